"""One part of the benchmark, in a process of its own: `python -m benchmarks.gpu.part NAME --shape ...`.

Started by `run`; appends its records to the file that it is given and stops beginning anything new when its time is up.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch

from benchmarks.gpu import attention, fake_device, prompts, reference, sampling, traffic
from benchmarks.gpu.build import BLOCK_SIZE, EngineSizes, RandomEngine, attention_backend, attention_needs
from benchmarks.gpu.engine import Cell, NotSteady, run_cell
from benchmarks.gpu.floor import Ceilings, kv_bytes_per_token
from benchmarks.gpu.profile import profile_cell
from benchmarks.gpu.results import DFLASH, INVARIANT, NO_DRAFT, Cycle, Recorder, Results, Skipped, StepRun
from benchmarks.gpu.shapes import SHAPES, Shape, with_layers
from benchmarks.gpu.synthetic import SyntheticAcceptance
from benchmarks.gpu.timing import measure_ceilings, scale
from dflash_backend.core.admission import RequestError
from dflash_backend.device import prepare_gpu

# In the order of what matters most: the promises first, then the grid of batches and contexts.
GRID = [
    Cell(batch, context)
    for batch, context in (
        (1, 1024), (32, 1024), (8, 1024), (1, 32768), (128, 1024), (1, 8192), (8, 8192), (32, 8192), (8, 32768),
        (128, 8192), (32, 32768), (128, 32768),
    )
]  # fmt: skip
REFERENCE_GRID = [Cell(1, 1024), Cell(8, 1024), Cell(32, 1024), Cell(1, 8192)]
# The same on a CPU, where nothing is measured.
CPU_GRID, CPU_REFERENCE_GRID = [Cell(1, 24), Cell(2, 40), Cell(3, 4096)], [Cell(2, 24)]
# Of these, the first ones also with `batch_invariant`.
INVARIANT_CELLS = 3
NUM_CYCLES = {"cuda": 48, "cpu": 3}
PROFILED_CYCLES = 8
# Layers have the same kernels.
COMPILED_LAYERS = 8
REFERENCE_CYCLES = {"cuda": 16, "cpu": 2}
ATTENTION_CONTEXT = {"cuda": 32768, "cpu": 64}
# Of the memory that is free once the models are loaded, what the KV may take; the rest is for graphs and logits.
KV_SHARE = 0.75
CPU_KV_BYTES = 1 << 20


@dataclass(frozen=True)
class Context:
    """What a part works with. `out_of_time` says whether to begin anything new."""

    shape: Shape
    device: torch.device
    dtype: torch.dtype
    acceptance: SyntheticAcceptance
    recorder: Recorder
    records: Path
    out_of_time: Callable[[], bool]

    def skip(self, what: str, reason: str) -> None:
        """Record that something was not measured."""
        self.recorder.write(Skipped(f"{self.shape.name}, {what}", reason))


def run_ceilings(context: Context) -> None:
    """Copy bandwidth, matrix rate, the attention of one layer at a long context, and sampling."""
    context.recorder.write(measure_ceilings(context.device, context.dtype))
    shape = context.shape
    backend = attention_backend(shape, context.device, context.dtype)
    cases = attention.cases(shape.num_speculative_tokens, ATTENTION_CONTEXT[scale(context.device)])
    for run in attention.measure(shape, backend, cases, context.dtype, context.device):
        context.recorder.write(run)
        if context.out_of_time():
            context.skip("more attention, and sampling", "no time was left")
            return
    for sampled in sampling.measure(shape, context.dtype, context.device):
        context.recorder.write(sampled)
        if context.out_of_time():
            context.skip("more sampling", "no time was left")
            return


def run_prompts(context: Context) -> None:
    """The attention of one layer for prompts and chunks, then whole prompts, each by every way that there is."""
    ceilings, shape, device = ceilings_of(context), context.shape, context.device
    backend = attention_backend(shape, device, context.dtype)
    needs = attention_needs(shape, device, context.dtype)
    ways = prompts.ways(backend, needs)
    for run in prompts.measure(shape, ways, context.dtype, device):
        context.recorder.write(run)
        if context.out_of_time():
            context.skip("more prompts", "no time was left")
            return
    sizes = traffic.SIZES[scale(device)]
    _, engine_sizes = fitting(context, [Cell(1, max(sizes.prompts))], NUM_CYCLES[scale(device)])
    engine = RandomEngine(shape, engine_sizes, device, context.dtype)
    core, _ = traffic.start(engine, context.acceptance, sizes.chunk)
    for tokens in sizes.prompts:
        for way in ways:
            if context.out_of_time():
                context.skip(f"a prompt of {tokens}, {way.name}", "no time was left")
                continue
            name = f"prompt, {way.name}"
            with way.taken_by(engine.backend):
                step = traffic.prompt_step(core, shape, tokens, sizes.chunk, context.dtype, ceilings, name)
            context.recorder.write(step)


def run_engine_part(context: Context) -> None:
    """Every cell of the grid with and without drafts, as far as its KV fits."""
    ceilings = ceilings_of(context)
    shape, device = context.shape, context.device
    k, cycles = shape.num_speculative_tokens, NUM_CYCLES[scale(device)]
    grid, sizes = fitting(context, GRID if scale(device) == "cuda" else CPU_GRID, cycles)
    engine = RandomEngine(shape, sizes, device, context.dtype)
    drafting = engine.core(k, context.acceptance)
    for system, drafts, core, cells in (
        (DFLASH, k, drafting, grid),
        (NO_DRAFT, 0, engine.core(0, None), grid),
        (INVARIANT, k, engine.core(k, context.acceptance, batch_invariant=True), grid[:INVARIANT_CELLS]),
    ):
        for cell in cells:
            what = f"{system}, k = {drafts}, batch {cell.batch}, context {cell.context}"
            if context.out_of_time():
                context.skip(what, "no time was left")
                continue
            try:
                cycle = run_cell(core, shape, cell, drafts, cycles, context.dtype, ceilings, system)
            except (NotSteady, RequestError, torch.OutOfMemoryError) as error:
                context.skip(what, f"{type(error).__name__}: {error}")
                continue
            context.recorder.write(cycle)
    # Last: should the profiler not work on a machine, nothing is lost but the profile.
    if context.out_of_time():
        context.skip("profile", "no time was left")
        return
    for kernel in profile_cell(drafting, shape, grid[0], k, PROFILED_CYCLES, device):
        context.recorder.write(kernel)


def run_traffic(context: Context) -> None:
    """Prompts, mixed steps, unlike lengths, other numbers of rows, sampled rows, and the start, as far as KV fits."""
    ceilings, shape, device = ceilings_of(context), context.shape, context.device
    sizes = traffic.SIZES[scale(device)]
    k, cycles = shape.num_speculative_tokens, NUM_CYCLES[scale(device)]
    steps = traffic.NUM_MIXED[scale(device)]
    batch, positions, _ = sizes.mixed
    fixed = [Cell(1, max(sizes.prompts)), Cell(batch + 1, positions)]
    cells, engine_sizes = fitting(context, [*fixed, *(each.cell for each in sizes.cells)], cycles)
    engine = RandomEngine(shape, replace(engine_sizes, batches=sizes.row_sizes), device, context.dtype)
    core, started = traffic.start(engine, context.acceptance, sizes.chunk)
    context.recorder.write(started)
    todo: list[tuple[str, Callable[[], Cycle | StepRun]]] = [
        (
            f"a prompt of {tokens}",
            partial(traffic.prompt_step, core, shape, tokens, sizes.chunk, context.dtype, ceilings),
        )
        for tokens in sizes.prompts
    ]
    todo.append(
        ("mixed steps", partial(traffic.mixed_step, core, shape, sizes.mixed, k, steps, context.dtype, ceilings))
    )
    for each in sizes.cells:
        if each.cell in cells:
            run = partial(
                run_cell, core, shape, each.cell, k, cycles, context.dtype, ceilings, each.system, each.sampling
            )
            todo.append((f"{each.system}, batch {each.cell.batch}", run))
    for what, run_once in todo:
        if context.out_of_time():
            context.skip(what, "no time was left")
            continue
        try:
            context.recorder.write(run_once())
        except (NotSteady, RequestError, torch.OutOfMemoryError) as error:
            context.skip(what, f"{type(error).__name__}: {error}")


def run_references(context: Context) -> None:
    """The plain torch loop and `transformers`, at the cells that they do in reasonable time."""
    shape, device = context.shape, context.device
    if shape.target.decoder.moe is not None:
        context.skip("plain torch and transformers", "the comparison is written for dense models")
        return
    grid = REFERENCE_GRID if scale(device) == "cuda" else CPU_REFERENCE_GRID
    cycles = REFERENCE_CYCLES[scale(device)]
    for cell in grid:
        if context.out_of_time():
            context.skip(f"plain torch, batch {cell.batch}, context {cell.context}", "no time was left")
            continue
        try:
            for cycle in reference.measure_plain(shape, cell, context.acceptance, cycles, context.dtype, device):
                context.recorder.write(cycle)
        except torch.OutOfMemoryError as error:
            context.skip(f"plain torch, batch {cell.batch}, context {cell.context}", str(error).partition("\n")[0])
        reference.release(device)
    # Last, since it is the package of the machine, of whatever version, that runs here.
    if context.out_of_time():
        context.skip("transformers", "no time was left")
        return
    try:
        for cycle in reference.measure_transformers(shape, grid[:3], context.dtype, device):
            context.recorder.write(cycle)
    except ImportError as error:
        context.skip("transformers", f"not available: {error}")


def fitting(context: Context, grid: list[Cell], cycles: int) -> tuple[list[Cell], EngineSizes]:
    """The cells whose KV fits beside the models, and the sizes that they need; the others are recorded."""
    shape, k = context.shape, context.shape.num_speculative_tokens
    block_bytes = kv_bytes_per_token(shape, context.dtype.itemsize) * BLOCK_SIZE
    available = CPU_KV_BYTES
    if scale(context.device) == "cuda":
        free, _ = torch.cuda.mem_get_info(context.device)
        available = int(KV_SHARE * (free - shape.num_parameters * context.dtype.itemsize))
    found = []
    for cell in grid:
        needed = cell.num_blocks(k, cycles, BLOCK_SIZE) * block_bytes
        if needed <= available:
            found.append(cell)
        else:
            gib = needed / 2**30, available / 2**30
            context.skip(
                f"batch {cell.batch}, context {cell.context}",
                f"its KV takes {gib[0]:.3g} GiB and there is room for {gib[1]:.3g} GiB",
            )
    longest = max(cell.longest + cell.max_tokens(k, cycles) for cell in found)
    blocks = max(cell.num_blocks(k, cycles, BLOCK_SIZE) for cell in found)
    return found, EngineSizes(tuple(sorted({cell.batch for cell in found})), longest + 1, blocks)


def ceilings_of(context: Context) -> Ceilings:
    """Those that the first part measured. Raises RuntimeError when it did not."""
    ceilings = known_ceilings(context)
    if ceilings is None:
        raise RuntimeError("the ceilings were not measured, so there is no floor to compare with")
    return ceilings


def known_ceilings(context: Context) -> Ceilings | None:
    """Those that a part has measured."""
    results = Results({})
    results.take(context.records.read_text(encoding="utf-8"))
    return results.ceilings


PARTS: dict[str, Callable[[Context], None]] = {
    "ceilings": run_ceilings,
    "prompts": run_prompts,
    "engine": run_engine_part,
    "traffic": run_traffic,
    "references": run_references,
}


def main(argv: list[str] | None = None, parts: Mapping[str, Callable[[Context], None]] = PARTS) -> int:
    """Entry point; `parts` are those that there are."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("part", choices=tuple(parts))
    parser.add_argument("--shape", choices=tuple(SHAPES), required=True)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--records", type=Path, required=True, help="file to append results to")
    parser.add_argument("--seconds", type=float, required=True, help="nothing new is begun after so long")
    parser.add_argument("--acceptance-length", type=float, required=True)
    parser.add_argument("--fake", choices=fake_device.MODES, help="over a GPU that is not there")
    args = parser.parse_args(argv)
    if args.fake:
        fake_device.install(args.fake)
    deadline = time.monotonic() + args.seconds
    shape = SHAPES[args.shape]()
    if args.fake == "compile":
        shape = with_layers(shape, COMPILED_LAYERS)
    if args.device == "cuda":
        prepare_gpu()  # as an engine that serves
    else:
        torch.set_num_threads(1)  # for tensors this small a second thread costs more than it saves
    parts[args.part](
        Context(
            shape=shape,
            device=torch.device(args.device),
            dtype=torch.bfloat16 if args.device == "cuda" else torch.float32,
            acceptance=SyntheticAcceptance.with_mean_length(shape.num_speculative_tokens, args.acceptance_length),
            recorder=Recorder(args.records),
            records=args.records,
            out_of_time=lambda: time.monotonic() > deadline,
        )
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
