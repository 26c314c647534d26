"""`python -m benchmarks.gpu --floor`: the bytes that a decode cycle must move, by what weights and KV are kept in,
against bfloat16. Arithmetic of `floor`, on any machine: no time follows from it alone."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from benchmarks.gpu.floor import CycleSize, cycle_work
from benchmarks.gpu.shapes import FLOOR_SHAPES, Shape

BF16 = 2
BATCHES, CONTEXTS = (1, 8, 32), (1000, 8000, 32000)
# Of the target's projections, experts among them: bytes of a weight with its share of scales. FP8 has a float32 for
# each 128 x 128, INT4 a bfloat16 for each 128 of a row.
WEIGHTS = {"fp8": 1 + 4 / 128**2, "int4": 0.5 + 2 / 128}
# Of gpt-oss's experts, which come in nothing else: a byte of scale for each 32 of a row. The rest stays in bfloat16.
MXFP4_EXPERTS = 0.5 + 1 / 32
SCALE_BYTES = 4  # of KV in FP8, for each token, head, and K or V


def cycle_bytes(shape: Shape, size: CycleSize) -> dict[str, float]:
    """Bytes of a cycle: in bfloat16, with the target's KV in FP8, and with its projections in FP8 or INT4 as well, or
    with gpt-oss's experts in MXFP4."""
    moe = shape.target.decoder.moe
    fp8_kv = replace(size, kv_itemsize=1 + SCALE_BYTES / shape.target.decoder.head_dim)
    kinds = {"bf16": size, "KV fp8": fp8_kv}
    if moe is not None and moe.mxfp4:
        kinds["experts mxfp4, KV fp8"] = replace(fp8_kv, expert_itemsize=MXFP4_EXPERTS)
    else:
        kinds |= {f"weights {name}, KV fp8": replace(fp8_kv, weight_itemsize=each) for name, each in WEIGHTS.items()}
    return {name: sum(work.bytes for work in cycle_work(shape, kind).values()) for name, kind in kinds.items()}


def table(names: list[str]) -> str:
    """A line for each shape, number of rows and context: gigabytes in bfloat16, and shares of them."""
    return "\n".join(_lines(names))


def _lines(names: list[str]) -> Iterator[str]:
    kinds = ("KV fp8", *(f"weights {name}, KV fp8" for name in WEIGHTS), "experts mxfp4, KV fp8")
    yield "| shape | rows | context | bf16, GB | " + " | ".join(kinds) + " |"
    yield "| --- " * (4 + len(kinds)) + "|"
    for name in names:
        shape = FLOOR_SHAPES[name]()
        for batch in BATCHES:
            for context in CONTEXTS:
                found = cycle_bytes(shape, CycleSize(batch, context, shape.num_speculative_tokens, BF16))
                plain = found["bf16"]
                shares = " | ".join(f"{found[kind] / plain:.2f}" if kind in found else "" for kind in kinds)
                yield f"| {shape.name} | {batch} | {context} | {plain / 1e9:.2f} | {shares} |"
