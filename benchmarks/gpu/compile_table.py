"""Attention and the gated delta rule compiled for GPUs that need not be here: registers, shared memory and spills.

    python -m benchmarks.gpu.compile_table [--out benchmarks/results/attention_kernels.md]

compiles the kernels of a decode row with 15 drafts, which share contexts out among workers, and of a prefill chunk, for
some shapes of heads and each architecture with the tiles that its shared memory gives, over KV in bfloat16 and in FP8,
and those of the delta rule for such rows, with heads of 128 numbers, and reads what the assembler says of them. Nothing
is run and no time is measured.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from dflash_kernels.attention_schedule import PagedBatch, schedule_size
from dflash_kernels.delta_rule import DeltaInputs
from dflash_kernels.paged_attention_launch import Gpu, HeadShape, Launch, plan_launches
from load_tests.markdown import markdown_table

# By compute capability: multiprocessors of one of its GPUs, shared memory that a program may have and that a
# multiprocessor has.
GPUS = {
    capability: Gpu(capability, num_sms, program << 10, multiprocessor << 10)
    for capability, num_sms, program, multiprocessor in (
        (80, 108, 163, 164), (89, 142, 99, 100), (90, 132, 227, 228), (100, 148, 227, 228), (120, 170, 99, 100),
    )
}  # fmt: skip
SHAPES = {
    "4 heads of 128": HeadShape(32, 8, 128, 2),
    "8 of 128": HeadShape(32, 4, 128, 2),
    "8 of 64": HeadShape(32, 4, 64, 2),
    "2 of 256": HeadShape(16, 8, 256, 2),
}
QUERIES = {"decode": 16, "prefill": 2048}
BLOCK_SIZE, CONTEXT = 16, 32768
TYPES = {
    torch.bfloat16: "bf16",
    torch.float16: "fp16",
    torch.float32: "fp32",
    torch.int32: "i32",
    torch.uint8: "u8",
}
HEADER = [
    "GPU",
    "heads",
    "rows",
    "lines x positions",
    "warps",
    "stages",
    "registers",
    "spilled bytes",
    "shared KiB",
    "of",
]

OVERLAP = "waits for all products that are on their way, and tensors of exponentials that are computed beside a product"


DELTA_HEADER = ["GPU", "kernel", "rows", "warps", "registers", "spilled bytes", "shared KiB", "of"]
DELTA_HEAD_DIM = 128


@dataclass(frozen=True)
class Compiled:
    """What the assembler says of a kernel. spilled: bytes of local memory of a thread. overlap: as
    `overlap_of_loops`."""

    registers: int
    spilled: int
    shared: int
    overlap: tuple[tuple[int, int], ...]


def compile_launch(kernel: Any, arguments: tuple[Any, ...], options: dict[str, Any], arch: int) -> Compiled:
    """Compile what a launch with these arguments would run. Raises what the compiler raises."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    own = {name: options[name] for name in ("num_warps", "num_stages") if name in options}
    values = dict(zip(kernel.arg_names, arguments, strict=False)) | options
    signature, constants, attributes = {}, {}, {}
    for index, param in enumerate(kernel.params):
        value = values[param.name]
        number = type(value) is int
        if param.is_constexpr or value is None or (number and value == 1 and not param.do_not_specialize):
            signature[param.name], constants[param.name] = "constexpr", value
            continue
        signature[param.name] = (
            f"*{TYPES[value.dtype]}" if isinstance(value, torch.Tensor) else "i32" if number else "fp32"
        )
        if isinstance(value, torch.Tensor) or (number and value % 16 == 0 and not param.do_not_specialize):
            attributes[(index,)] = [["tt.divisibility", 16]]
    source = ASTSource(kernel, signature, constexprs=constants, attrs=attributes)
    compiled = triton.compile(source, target=GPUTarget("cuda", arch, 32), options=own)
    usage = _resource_usage(compiled.asm["cubin"])
    overlap = overlap_of_loops(compiled.asm["ttgir"])
    return Compiled(usage["REG"], usage["LOCAL"] + usage["STACK"], compiled.metadata.shared, overlap)


def overlap_of_loops(ttgir: str) -> tuple[tuple[int, int], ...]:
    """Of each innermost loop with products in Triton's code for a Hopper, in order: how often a turn waits for all
    products that are on their way, and how many tensors of exponentials it computes while one is."""
    found: list[tuple[int, int]] = []
    open_loops: list[tuple[int, list[str]]] = []
    for line in ttgir.splitlines():
        indent = len(line) - len(line.lstrip())
        if "scf.for " in line:
            open_loops.append((indent, []))
        elif open_loops and indent <= open_loops[-1][0] and line.lstrip().startswith("}"):
            _, body = open_loops.pop()
            if any("warp_group_dot " in each for each in body):
                found.append(_overlap(body))
        elif open_loops:
            open_loops[-1][1].append(line)
    return tuple(found)


def _overlap(turn: list[str]) -> tuple[int, int]:
    """As `overlap_of_loops`, of the operations of one loop's turn."""
    waits, exponentials, running = 0, 0, False
    for operation in turn:
        if "warp_group_dot_wait" in operation:
            waits += "pendings = 0" in operation
            running = False
        elif "warp_group_dot " in operation:
            running = True
        else:
            exponentials += running and "exp2" in operation
    return waits, exponentials


def _resource_usage(cubin: bytes) -> dict[str, int]:
    import triton

    tool = Path(triton.__path__[0]) / "backends/nvidia/bin/cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [str(tool), "--dump-resource-usage", file.name]
        text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return {name: int(value) for name, value in re.findall(r"\b([A-Z]+):(\d+)", text)}


def attention_launch(
    shape: HeadShape, kind: str, arch: int, fp8_kv: bool = False
) -> tuple[Launch, list[tuple[Any, tuple[Any, ...], dict[str, Any]]]]:
    """The planned launch, and the kernels that it would run first, with their arguments. fp8_kv: the cache has bytes of
    FP8 (e4m3) and a scale for each token and head, else bfloat16."""
    from dflash_kernels import paged_attention

    bounds, shape = np.array([QUERIES[kind]]), replace(shape, fp8_kv=fp8_kv)
    overestimate = CONTEXT if kind == "decode" else 0
    (launch,) = plan_launches(bounds, np.array([CONTEXT]), shape, True, None, GPUS[arch], max_overestimate=overestimate)
    if kind == "prefill":
        launch = Launch(launch.tiling, launch.num_tiles, 0, launch.query_len, None)
    found: list[tuple[Any, tuple[Any, ...], dict[str, Any]]] = []
    name = "_attend_kernel" if kind == "prefill" else "_attend_shares_kernel"
    kernel = getattr(paged_attention, name)
    run, merge = kernel.run, paged_attention.merge
    kernel.run = lambda *arguments, grid, warmup, **options: found.append((kernel, arguments, options))
    paged_attention.merge = lambda *arguments: None
    try:
        start, lens, ends, table = (torch.zeros(size, dtype=torch.int32) for size in (1, 1, 1, CONTEXT // BLOCK_SIZE))
        rows = PagedBatch(start, lens, ends, table[None])
        query = torch.zeros(QUERIES[kind], shape.num_heads, shape.head_dim, dtype=torch.bfloat16)
        kv_dtype = torch.uint8 if fp8_kv else torch.bfloat16
        cache = torch.zeros(4, BLOCK_SIZE, 2, shape.num_kv_heads, shape.head_dim, dtype=kv_dtype)
        scales = torch.zeros(cache.shape[:-1]) if fp8_kv else None
        plan = None
        if launch.num_workers:
            plan = torch.zeros(schedule_size(launch.num_tiles, launch.num_workers), dtype=torch.int32)
        prepared = paged_attention.PreparedLaunch(launch, None, plan)
        paged_attention.paged_attention(query, cache, rows, [prepared], True, None, scales=scales)
    finally:
        kernel.run, paged_attention.merge = run, merge
    return launch, found


def delta_launches(kind: str) -> list[tuple[Any, tuple[Any, ...], dict[str, Any]]]:
    """The kernels of the delta rule that a row of this kind runs, with their arguments."""
    from dflash_kernels import delta_chunks

    found: list[tuple[Any, tuple[Any, ...], dict[str, Any]]] = []
    kernels = delta_chunks._delta_systems_kernel, delta_chunks._delta_scan_kernel
    runs = [kernel.run for kernel in kernels]
    for kernel in kernels:
        kernel.run = lambda *arguments, grid, warmup, kernel=kernel, **options: found.append(
            (kernel, arguments, options)
        )
    try:
        shape = 1, 2, QUERIES[kind]
        queries, keys, values = torch.zeros(3, *shape, DELTA_HEAD_DIM)
        tokens = DeltaInputs(queries, keys, values, torch.zeros(shape), torch.zeros(shape))
        run = delta_chunks.delta_block if kind == "decode" else delta_chunks.chunked
        run(tokens, torch.zeros(1, 2, DELTA_HEAD_DIM, DELTA_HEAD_DIM))
    finally:
        for kernel, original in zip(kernels, runs, strict=True):
            kernel.run = original
    return found


def delta_rows(arch: int) -> tuple[list[list[str]], bool]:
    """Rows of the table of the delta rule, and whether all fit the shared memory."""
    rows, fits = [], True
    for kind in QUERIES:
        for kernel, arguments, options in delta_launches(kind):
            compiled = compile_launch(kernel, arguments, options, arch)
            numbers = [options["num_warps"], compiled.registers, compiled.spilled]
            name = kernel.__name__.removeprefix("_delta_").removesuffix("_kernel")
            cells = [f"sm_{arch}", name, kind, *map(str, numbers), f"{compiled.shared / 1024:.1f}"]
            rows.append([*cells, str(GPUS[arch].shared_bytes >> 10)])
            print(" ".join(rows[-1]), flush=True)
            fits &= compiled.shared <= GPUS[arch].shared_bytes
    return rows, fits


def row_of(name: str, kind: str, arch: int, fp8_kv: bool = False) -> tuple[list[str], Compiled]:
    """A row of a table of attention, and what it says. fp8_kv: as of `attention_launch`."""
    launch, ((kernel, arguments, options),) = attention_launch(SHAPES[name], kind, arch, fp8_kv)
    compiled, tiling = compile_launch(kernel, arguments, options, arch), launch.tiling
    numbers = [tiling.num_warps, tiling.num_stages, compiled.registers, compiled.spilled]
    cells = [f"sm_{arch}", name, kind, f"{tiling.block_m} x {tiling.block_n}", *map(str, numbers)]
    return [*cells, f"{compiled.shared / 1024:.1f}", str(GPUS[arch].shared_bytes >> 10)], compiled


def fp8_kv_rows(arch: int) -> tuple[list[list[str]], bool]:
    """Rows of the table of attention over KV in FP8, and whether all fit the shared memory and none spills."""
    rows, fits = [], True
    for name in SHAPES:
        for kind in QUERIES:
            row, compiled = row_of(name, kind, arch, fp8_kv=True)
            print("KV in FP8", *row, flush=True)
            rows.append(row)
            fits &= compiled.shared <= GPUS[arch].shared_bytes and compiled.spilled == 0
    return rows, fits


def main(arguments: list[str] | None = None) -> int:
    """Entry point; 1 where attention spills, or a kernel takes more shared memory than there is."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--arch", type=int, choices=GPUS, action="append", help="default: all")
    parser.add_argument("--out", type=Path, help="where the table is written as well")
    args = parser.parse_args(arguments)
    rows, fp8_rows, overlaps, of_delta_rule, fits = [], [], [], [], True
    for arch in args.arch or GPUS:
        for name in SHAPES:
            for kind in QUERIES:
                row, compiled = row_of(name, kind, arch)
                print(" ".join(row), flush=True)
                rows.append(row)
                fits &= compiled.shared <= GPUS[arch].shared_bytes and compiled.spilled == 0
                if arch == 90 and kind == "prefill":
                    # Where it was measured to win, all blocks of positions have the loop with masks.
                    loops = [f"{waits}, {beside}" for waits, beside in compiled.overlap]
                    overlaps.append([name, *["-"] * (2 - len(loops)), *loops])
        found, all_fit = fp8_kv_rows(arch)
        fp8_rows += found
        fits &= all_fit
        found, all_fit = delta_rows(arch)
        of_delta_rule += found
        fits &= all_fit
    text = f"{markdown_table(HEADER, rows, 'lllrrrrrrr')}\n"
    if overlaps:
        text += f"\nIn a turn of the loops of sm_90's prefill kernel: {OVERLAP}.\n\n"
        text += markdown_table(["heads", "without masks", "with masks"], overlaps, "lrr") + "\n"
    text += f"\nWith KV in FP8:\n\n{markdown_table(HEADER, fp8_rows, 'lllrrrrrrr')}\n"
    text += f"\nThe gated delta rule:\n\n{markdown_table(DELTA_HEADER, of_delta_rule, 'lllrrrrr')}\n"
    print(text)
    if args.out:
        args.out.write_text(text)
    return int(not fits)


if __name__ == "__main__":
    sys.exit(main())
