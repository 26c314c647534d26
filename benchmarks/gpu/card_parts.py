"""One part of `make gpu-report`, in a process of its own: those of `make bench-gpu`, and what is here.

    python -m benchmarks.gpu.card_parts NAME --shape qwen3-8b --device cuda --records FILE --seconds 60

`--fake rules` and `--fake compile` run it over a GPU that is not there (`fake_device`).
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import sysconfig
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from importlib import metadata, util
from itertools import count
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from benchmarks.gpu import (
    attention,
    card_texts,
    cublas_choices,
    part,
    quantised_products,
    reference,
    sustained,
    traffic,
)
from benchmarks.gpu.attention import AttentionCase
from benchmarks.gpu.build import EngineSizes, RandomEngine, attention_backend
from benchmarks.gpu.engine import GREEDY, Cell, decoding, run_cell, worker_of
from benchmarks.gpu.floor import Ceilings, Work, matrix
from benchmarks.gpu.part import Context
from benchmarks.gpu.profile import step_profile
from benchmarks.gpu.results import DFLASH, FP8_BOTH, MEASURED, SERVING, Fact, KernelRun, StartRun
from benchmarks.gpu.timing import measure_ceilings, num_copies, scale, seconds_each, synchronize
from dflash_backend.drafters.dflash.drafter import DFlashDrafter
from dflash_backend.worker.graphs import capture_shapes
from dflash_backend.worker.runner import ModelRunner
from dflash_backend.worker.state import StateTensors
from dflash_backend.worker.step import SpecDecodeModel
from dflash_backend.worker.step_ops import select_step_ops
from dflash_kernels.dispatch import use_triton
from dflash_kernels.measured_linear import describe_measured, use_measured_products
from dflash_kernels.quantised_weight import FP8

# Distributions, each with its module.
PACKAGES = {
    "torch": "torch", "triton": "triton", "numpy": "numpy", "transformers": "transformers", "msgspec": "msgspec",
    "pyzmq": "zmq", "llguidance": "llguidance", "pytest-xdist": "xdist", "nvidia-cublas": "", "nvidia-cudnn-cu13": "",
    "fa3-fwd": "fa3_fwd_interface", "flash-attn": "flash_attn", "flashinfer-python": "flashinfer",
}  # fmt: skip
NVIDIA_SMI = "name,memory.total,driver_version,clocks.sm,clocks.mem,power.limit,temperature.gpu"
LAUNCHES = 500
# Rows of a product, and of what lies between products.
ROWS = {"cuda": (1, 16, 128, 512), "cpu": (1, 4)}
# Rows and positions behind each, of decode attention with all drafts.
DECODE = {
    "cuda": ((1, 2048), (8, 2048), (32, 2048), (1, 32768), (8, 8192), (64, 1024)),
    "cpu": ((1, 24), (2, 24)),
}
CYCLE_CELLS = {"cuda": (Cell(1, 1024), Cell(8, 1024), Cell(32, 1024)), "cpu": (Cell(1, 24), Cell(2, 24))}
PROFILED_STEPS = {"cuda": 20, "cpu": 2}
# Tokens of prompts beside decode rows.
MIXED_PROMPTS = {"cuda": (128, 256), "cpu": (16,)}
# Rows and positions of a server's start, and tokens of a step.
START = {"cuda": (64, 4096, 8192), "cpu": (4, 500, 64)}
POSITIONS = 4096


def run_environment(context: Context) -> None:
    """The machine, its packages, whether the kernels that came along are used, and a first kernel of ours."""

    def say(name: str, value: object) -> None:
        context.recorder.write(Fact(name, str(value)))

    say("python", f"{sys.version.split()[0]}, {os.cpu_count()} cores")
    say("packages", ", ".join(f"{name} {_version(name, module)}" for name, module in PACKAGES.items()))
    compiler = next((path for path in map(shutil.which, ("cc", "gcc", "clang")) if path), None)
    header = (Path(sysconfig.get_paths()["include"]) / "Python.h").is_file()
    say("launchers", f"compiler {compiler or 'missing'}, Python.h {'there' if header else 'missing'}")
    if shutil.which("nvidia-smi"):
        command = ["nvidia-smi", f"--query-gpu={NVIDIA_SMI}", "--format=csv,noheader"]
        found = subprocess.run(command, capture_output=True, text=True, timeout=20, check=False)
        say("nvidia-smi", (found.stdout or found.stderr).strip()[:200])
    say("carried kernels", carried_kernels())
    if context.device.type != "cuda":
        return
    properties = torch.cuda.get_device_properties(context.device)
    memory = f"{properties.total_memory / 2**30:.1f} GiB"
    say("GPU", f"{properties.name}, {properties.multi_processor_count} multiprocessors, {memory}, compute capability "
        f"{properties.major}.{properties.minor}, CUDA {torch.version.cuda}")  # fmt: skip
    _first_kernel(context, say)


def _first_kernel(context: Context, say: Callable[[str, object], None]) -> None:
    from dflash_kernels import rms_norm

    size = context.shape.target.decoder.hidden_size
    x = torch.randn(3, size, device=context.device, dtype=context.dtype)
    weight = torch.ones(size, device=context.device, dtype=context.dtype)
    started = time.monotonic()
    found = rms_norm.rms_norm(x, weight, 1e-6)
    synchronize(context.device)
    seconds = time.monotonic() - started
    error = (found - rms_norm.rms_norm_reference(x, weight, 1e-6)).abs().max()
    say("first kernel", f"{seconds:.2f} s, off by {float(error):.2g}")
    for name, launch in (("ours", partial(rms_norm.rms_norm, x, weight, 1e-6)), ("torch's", partial(F.linear, x, x))):
        started = time.perf_counter()
        for _ in range(LAUNCHES):
            launch()
        seconds = time.perf_counter() - started
        synchronize(context.device)
        say(f"host time of a launch, {name}", f"{1e6 * seconds / LAUNCHES:.1f} us")


def _version(name: str, module: str) -> str:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return "brought along" if module and util.find_spec(module) else "missing"


def carried_kernels() -> str:
    """What is known of the kernels in Triton's cache that were compiled on another machine (`pack`)."""
    from benchmarks.gpu.pack import MANIFEST, kernel_key

    path = Path(os.environ.get("TRITON_CACHE_DIR", "")) / MANIFEST
    if not path.is_file():
        return "none"
    made = json.loads(path.read_text(encoding="utf-8"))
    fits = "they fit" if made["key"] == kernel_key() else "they do not fit the Triton of this machine"
    return f"{made['kernels']} by Triton {made['triton']} for compute capability {made['arch'] / 10:.1f}: {fits}"


def run_texts(context: Context, group: str) -> None:
    """Every way of a group, and what it answers."""
    for way in card_texts.GROUPS[group]:
        if context.out_of_time():
            context.skip(f"text, {way}", "no time was left")
            continue
        card_texts.run_way(way, context.device, scale(context.device), context.recorder)


def run_kernels(context: Context) -> None:
    """Products by bfloat16 weights, decode attention and what lies between products, beside other ways to do them."""
    ceilings = part.ceilings_of(context)
    for name, runs in (
        ("decode attention", decode_attention(context, ceilings)),
        ("products", few_row_products(context, ceilings)),
        ("what lies between products", between_products(context, ceilings)),
    ):
        for run in runs:
            context.recorder.write(run)
            if context.out_of_time():
                context.skip(f"{name} behind {run.name}", "no time was left")
                return


def decode_attention(context: Context, ceilings: Ceilings) -> Iterator[KernelRun]:
    """One layer as a captured step has it, beside torch's attention over dense KV with the heads of a group as
    queries."""
    shape, device, dtype = context.shape, context.device, context.dtype
    backend, decoder = attention_backend(shape, device, dtype), shape.target.decoder
    queries = 1 + shape.num_speculative_tokens
    for batch, positions in DECODE[scale(device)]:
        case = AttentionCase("verify", batch, positions, queries, causal=True, captured=True)
        (run,) = attention.measure(shape, backend, [case], dtype, device)
        floor_s = run.seconds * run.bytes_per_s / ceilings.copy_bandwidth
        kv_size = batch, decoder.num_kv_heads, positions, decoder.head_dim
        copies = min(num_copies(device, 2 * dtype.itemsize * batch * positions * decoder.kv_size), 8)
        pairs = [[torch.randn(kv_size, device=device, dtype=dtype) for _ in "kv"] for _ in range(copies)]
        grouped = queries * decoder.num_heads // decoder.num_kv_heads
        query = torch.randn(batch, decoder.num_kv_heads, grouped, decoder.head_dim, device=device, dtype=dtype)
        works = [partial(F.scaled_dot_product_attention, query, keys, values) for keys, values in pairs]
        name = f"{batch} rows of {positions}"
        yield KernelRun("decode attention", name, run.seconds, floor_s, {"torch": seconds_each(device, works)})
        del pairs, works


def few_row_products(context: Context, ceilings: Ceilings) -> Iterator[KernelRun]:
    """A layer's products and the head by cuBLAS, as serving has them, beside those of `batch_invariant`."""
    device, dtype = context.device, context.dtype
    for name, outputs, inputs in _layer_products(context):
        copies = num_copies(device, dtype.itemsize * outputs * inputs)
        weights = [torch.randn(outputs, inputs, device=device, dtype=dtype) for _ in range(copies)]
        for rows in ROWS[scale(device)]:
            x = torch.randn(rows, inputs, device=device, dtype=dtype)
            seconds, others = seconds_each(device, [partial(F.linear, x, weight) for weight in weights]), {}
            if use_triton(device):
                from dflash_kernels.invariant_linear import invariant_linear

                others["batch_invariant"] = seconds_each(device, [partial(invariant_linear, x, w) for w in weights])
            work = matrix(inputs, outputs, rows, dtype.itemsize) + Work(dtype.itemsize * rows * (inputs + outputs))
            yield KernelRun("products", f"{name}, {rows} rows", seconds, work.seconds(ceilings), others)
        del weights


def _layer_products(context: Context) -> list[tuple[str, int, int]]:
    decoder = context.shape.target.decoder
    hidden, inner = decoder.hidden_size, decoder.intermediate_size
    return [
        ("qkv", decoder.query_size + 2 * decoder.kv_size, hidden),
        ("o", hidden, decoder.query_size),
        ("gate_up", 2 * inner, hidden),
        ("down", hidden, inner),
        ("head", context.shape.target.vocab_size, hidden),
    ]


def run_products(context: Context) -> None:
    """cuBLASLt's proposals for a layer's products, at many numbers of rows."""
    lt = cublas_choices.library()
    if isinstance(lt, str):
        context.skip("proposals of cuBLASLt", lt)
    known = None if isinstance(lt, str) else lt
    products, device, dtype = _layer_products(context), context.device, context.dtype
    runs = _write(context, cublas_choices.measure(products, device, dtype, _some_ceilings(context), known))
    context.recorder.write(Fact("rows before a step of a layer's products, us", cublas_choices.steps_in(runs)))


def run_sustained(context: Context) -> None:
    """All products of a forward pass for seconds, and the clock and the power that the device had."""
    layers = context.shape.target.decoder.num_layers
    for record in sustained.measure(
        _layer_products(context), layers, context.dtype, context.device, _some_ceilings(context)
    ):
        context.recorder.write(record)
        if context.out_of_time():
            context.skip("more rows without a pause", "no time was left")
            break


def _some_ceilings(context: Context) -> Ceilings:
    """Those that were measured, else those of now: such a part is run alone."""
    found = part.known_ceilings(context)
    if found is None:
        found = measure_ceilings(context.device, context.dtype)
        context.recorder.write(found)
    return found


def _write(context: Context, runs: Iterator[KernelRun]) -> list[KernelRun]:
    """Record them as they come, as long as there is time, and return them."""
    written = []
    for run in runs:
        context.recorder.write(run)
        written.append(run)
        if context.out_of_time():
            context.skip(f"what comes after {run.name}", "no time was left")
            break
    return written


def between_products(context: Context, ceilings: Ceilings) -> Iterator[KernelRun]:
    """Norms, the gate, the rotation that writes KV, and argmax, beside torch's where torch has one."""
    if not use_triton(context.device):
        return
    from dflash_kernels.activation import silu_mul
    from dflash_kernels.argmax import argmax
    from dflash_kernels.qk_norm_rope_write import qk_norm_rope_write
    from dflash_kernels.rms_norm import add_rms_norm, rms_norm

    device, dtype, decoder = context.device, context.dtype, context.shape.target.decoder
    hidden, inner, vocab = decoder.hidden_size, decoder.intermediate_size, context.shape.target.vocab_size

    def randn(*size: int) -> torch.Tensor:
        return torch.randn(size, device=device, dtype=dtype)

    table, cache = randn(POSITIONS, decoder.head_dim), randn(POSITIONS, 2, decoder.num_kv_heads, decoder.head_dim)
    ones = torch.ones(hidden, device=device, dtype=dtype)
    norms = torch.ones(decoder.num_heads + decoder.num_kv_heads, decoder.head_dim, device=device, dtype=dtype)
    for rows in ROWS[scale(device)]:
        at = torch.arange(rows, device=device)
        xs, gates = [[randn(rows, size) for _ in range(20)] for size in (hidden, 2 * inner)]
        heads = [randn(rows, decoder.query_size + 2 * decoder.kv_size) for _ in range(20)]
        logits = [randn(rows, vocab) for _ in range(max(2, num_copies(device, dtype.itemsize * rows * vocab)))]
        rotate = partial(qk_norm_rope_write, qk_norm=norms, eps=1e-6, cos=table, sin=table)
        by_torch = {
            "rms_norm": [partial(F.rms_norm, x, (hidden,), ones) for x in xs],
            "argmax": [partial(torch.argmax, x, dim=-1) for x in logits],
        }
        ours: dict[str, tuple[list[Callable[[], object]], int]] = {
            "rms_norm": ([partial(rms_norm, x, ones, 1e-6) for x in xs], 2 * hidden),
            "add_rms_norm": ([partial(add_rms_norm, x, x, ones, 1e-6) for x in xs], 4 * hidden),
            "silu_mul": ([partial(silu_mul, gate) for gate in gates], 3 * inner),
            "qk_norm_rope_write": (
                [partial(rotate, qkv, positions=at, slots=at, cache=cache) for qkv in heads],
                2 * (decoder.query_size + 2 * decoder.kv_size),
            ),
            "argmax": ([partial(argmax, x) for x in logits], vocab),
        }
        for name, (works, numbers) in ours.items():
            floor_s = rows * numbers * dtype.itemsize / ceilings.copy_bandwidth
            others = {"torch": seconds_each(device, by_torch[name])} if name in by_torch else {}
            yield KernelRun("between products", f"{name}, {rows} rows", seconds_each(device, works), floor_s, others)


def run_quantised(context: Context) -> None:
    """A layer's products and experts by quantised weights, beside bfloat16."""
    tiny = scale(context.device) == "cpu"
    tokens = quantised_products.TINY_TOKENS if tiny else quantised_products.TOKENS
    for run in quantised_products.measure_all(quantised_products.KINDS, tokens, context.device, tiny):
        context.recorder.write(run)
        if context.out_of_time():
            context.skip(f"quantised products behind {run.product}, {run.weights}", "no time was left")
            return


def run_quantised_candidates(context: Context) -> None:
    """A layer's products by quantised weights in all ways that their constants are chosen from."""
    tiny = scale(context.device) == "cpu"
    for run in quantised_products.measure_candidates(quantised_products.KINDS, None, context.device, tiny):
        context.recorder.write(run)
        if context.out_of_time():
            context.skip(f"candidates after {run.product}, {run.weights}, {run.tokens} tokens", "no time was left")
            return


def run_quantised_cycles(context: Context) -> None:
    """Decode cycles of a target whose projections and their activations are in FP8."""
    ceilings, shape, device = part.ceilings_of(context), context.shape, context.device
    k, cycles = shape.num_speculative_tokens, part.NUM_CYCLES[scale(device)]
    cells, sizes = part.fitting(context, list(CYCLE_CELLS[scale(device)]), cycles)
    on_gpu = device.type == "cuda"
    engine = RandomEngine(shape, sizes, device, context.dtype, FP8 if on_gpu else None, fp8_activations=on_gpu)
    core = engine.core(k, context.acceptance)
    for cell in cells:
        if context.out_of_time():
            context.skip(f"{FP8_BOTH}, batch {cell.batch}", "no time was left")
            continue
        context.recorder.write(run_cell(core, shape, cell, k, cycles, context.dtype, ceilings, FP8_BOTH))


def run_measured_cycles(context: Context) -> None:
    """Decode cycles and mixed steps with torch's products, then with those that are measured at the start."""
    ceilings, shape, device = _some_ceilings(context), context.shape, context.device
    sizes, k, tiny = traffic.SIZES[scale(device)], shape.num_speculative_tokens, scale(device)
    cells = [*CYCLE_CELLS[tiny], *(each.cell for each in sizes.cells if each.system == SERVING)]
    steps, (batch, positions, _) = traffic.NUM_MIXED[tiny], sizes.mixed
    for system, wanted in ((DFLASH, False), (MEASURED, True)):
        if context.out_of_time():
            context.skip(system, "no time was left")
            return
        use_measured_products(wanted)
        _, fitting = part.fitting(context, [*cells, Cell(batch + 1, positions)], part.NUM_CYCLES[tiny])
        engine = RandomEngine(shape, replace(fitting, batches=sizes.row_sizes), device, context.dtype)
        core, started = traffic.start(engine, context.acceptance, sizes.chunk)
        context.recorder.write(started)
        for cell in cells:
            context.recorder.write(
                run_cell(core, shape, cell, k, part.NUM_CYCLES[tiny], context.dtype, ceilings, system)
            )
        for tokens in MIXED_PROMPTS[tiny]:
            mixed = batch, positions, tokens
            run = traffic.mixed_step(core, shape, mixed, k, steps, context.dtype, ceilings)
            context.recorder.write(replace(run, name=f"mixed, {system}"))
        del engine, core
        reference.release(device)
    context.recorder.write(Fact("measured products", describe_measured()))
    use_measured_products(False)


def run_profile(context: Context) -> None:
    """Kernels and gaps of a step: of 1, 8 and 32 greedy rows, of sampled ones, and with a prompt beside them."""
    shape, device = context.shape, context.device
    k, steps = shape.num_speculative_tokens, PROFILED_STEPS[scale(device)]
    cells, sizes = part.fitting(context, list(CYCLE_CELLS[scale(device)]), 4 * steps)
    _, _, tokens = traffic.SIZES[scale(device)].mixed
    engine = RandomEngine(shape, sizes, device, context.dtype)
    core = engine.core(k, context.acceptance, prompt_tokens=traffic.SIZES[scale(device)].chunk)

    def profiled(name: str, cell: Cell, sampling: Mapping[str, Any], prompt: int) -> None:
        numbers = count()

        def step() -> None:
            if prompt:
                core.add_request(traffic.prompt_request(shape, f"{name}-{next(numbers)}", prompt))
            core.step()

        with decoding(core, shape, cell, k, 2 * steps, sampling):
            worker_of(core).computes_prompts = prompt > 0
            try:
                found = step_profile(name, step, steps, device)
            finally:
                worker_of(core).computes_prompts = False
        if found is None:
            context.skip(f"profile of {name}", "the profiler saw no kernels")
        else:
            context.recorder.write(found)

    middle = cells[len(cells) // 2]
    for name, cell, sampling, prompt in (
        *((f"{cell.batch} greedy rows", cell, GREEDY, 0) for cell in cells),
        (f"{cells[-1].batch} sampled rows", cells[-1], traffic.SAMPLING, 0),
        (f"{middle.batch} rows and a prompt of {tokens}", middle, GREEDY, tokens),
    ):
        if context.out_of_time():
            context.skip(f"profile of {name}", "no time was left")
        else:
            profiled(name, cell, sampling, prompt)


class _OutOfTime(Exception):
    """A start was ended."""


def run_start(context: Context) -> None:
    """What a server with default settings compiles and captures before its first request, in a new process."""
    shape, device = context.shape, context.device
    rows, positions, tokens = START[scale(device)]
    k = shape.num_speculative_tokens
    engine = RandomEngine(shape, EngineSizes((rows,), positions, positions), device, context.dtype)
    state = StateTensors.allocate(rows, positions, k, engine.kv.block_size, shape.target.vocab_size, device)
    drafter = DFlashDrafter(engine.draft, engine.target, engine.kv.draft, engine.backend)
    ops, shared = select_step_ops(device), engine.backend.capabilities.shares_prefixes
    model = SpecDecodeModel(
        engine.target, drafter, engine.kv, engine.backend, ops, state, draft_temperature_ratio=0.0,
        dtype=context.dtype, wants_confidence=True, shares_prefixes=shared,
    )  # fmt: skip
    runner = ModelRunner(model, max_tokens=tokens)
    cached, before = traffic.has_compiled_kernels(), _free_memory(device)
    started, begun = time.monotonic(), count()

    def progress(message: str, fraction: float) -> None:
        number = next(begun)
        if context.out_of_time():
            raise _OutOfTime(f"{message}, {number} steps behind the beginning")

    try:
        runner.prepare(True, progress, shapes=capture_shapes(k))
    except _OutOfTime as ended:
        context.skip("start of a server", f"ended after {time.monotonic() - started:.1f} s of it, at {ended}")
        return
    synchronize(device)
    seconds, memory = time.monotonic() - started, before - _free_memory(device)
    context.recorder.write(
        StartRun(shape.name, seconds, runner.graphs.num_steps, cached, _process_seconds(), max(memory, 0))
    )


def _free_memory(device: torch.device) -> int:
    return int(torch.cuda.mem_get_info(device)[0]) if device.type == "cuda" else 0


def _process_seconds() -> float:
    """Since this process began."""
    fields = Path("/proc/self/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
    return time.clock_gettime(time.CLOCK_BOOTTIME) - int(fields[19]) / os.sysconf("SC_CLK_TCK")


PARTS: dict[str, Callable[[Context], None]] = part.PARTS | {
    "environment": run_environment,
    **{f"texts {group}": partial(run_texts, group=group) for group in card_texts.GROUPS},
    "kernels": run_kernels,
    "sustained": run_sustained,
    "products": run_products,
    "quantised": run_quantised,
    "candidates": run_quantised_candidates,
    "quantised cycles": run_quantised_cycles,
    "measured cycles": run_measured_cycles,
    "profile": run_profile,
    "start": run_start,
    "second start": run_start,
}

if __name__ == "__main__":
    sys.exit(part.main(parts=PARTS))
