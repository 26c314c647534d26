"""Products by quantised weights compiled for GPUs that need not be here: registers, shared memory and spills.

    python -m benchmarks.gpu.quantised_table [--out benchmarks/results/quantised_kernels.md]
    python -m benchmarks.gpu.quantised_table --arch 90 --candidates

compiles the kernel for each scheme, each tile and each architecture, in bfloat16, with codes read as suits that
architecture, those that make numbers of a weight, and those of experts in the sizes of Qwen3-30B-A3B, and reads what
the assembler says of them. Nothing is run and no time is measured. With `--candidates` the tiles are those that
`quantised_products --candidates` tries besides.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu.compile_table import GPUS, compile_launch
from benchmarks.gpu.quantised_products import CANDIDATE_TILES
from dflash_kernels import moe, moe_routing
from dflash_kernels import quantised_linear as products
from dflash_kernels import quantised_moe as experts
from dflash_kernels.activation import Clamp
from dflash_kernels.moe import Biases
from dflash_kernels.mxfp4 import GROUP as GROUP_OF_MXFP4
from dflash_kernels.quantised_weight import FP8, INT4, INT8, MXFP4, QuantisedWeight
from load_tests.markdown import markdown_table

SIZE, GROUP = 4096, 128
NUM_EXPERTS, PER_TOKEN, MOE_HIDDEN, MOE_INNER = 128, 8, 2048, 768
LINEAR, INTO, OUT_OF = "Products", "Into experts, whose gate and up share the outputs", "Out of experts"
NUMBERS = "Numbers of a weight, by rows x columns of a program"
SCHEMES = ("FP8, 128 x 128", "FP8, rows", "INT8, rows", "INT4, groups of 128", "INT4, groups of 128, zero points")
# Which experts alone are of: gpt-oss's, with biases and a clamped gate.
MXFP4_EXPERTS = "MXFP4"
ALL = (*SCHEMES, MXFP4_EXPERTS)
HEADER = ["GPU", "weights", "tokens x outputs", "warps", "stages", "registers", "spilled bytes", "shared KiB", "of"]


def weight_of(scheme: str, outputs: int = SIZE, inputs: int = SIZE) -> QuantisedWeight:
    """A weight `[outputs, inputs]`, whose tensors have the memory of one number: nothing is read."""
    groups = inputs // GROUP

    def zeros(*shape: int, dtype: torch.dtype = torch.uint8) -> torch.Tensor:
        return torch.zeros((), dtype=dtype).expand(shape)

    if scheme.startswith(("FP8", "INT8")):
        kind = FP8 if scheme.startswith("FP8") else INT8
        in_rows = "rows" in scheme
        shape, rows, columns = ((1, outputs), 1, inputs) if in_rows else ((groups, outputs // GROUP), GROUP, GROUP)
        return QuantisedWeight(kind, zeros(outputs, inputs), zeros(*shape, dtype=torch.float32), None, rows, columns)
    if scheme == MXFP4_EXPERTS:
        groups = inputs // GROUP_OF_MXFP4
        return QuantisedWeight(
            MXFP4, zeros(groups, outputs, GROUP_OF_MXFP4 // 2), zeros(groups, outputs), None, 1, GROUP_OF_MXFP4
        )
    points = zeros(groups, outputs) if "zero points" in scheme else None
    scales = zeros(groups, outputs, dtype=torch.float16)
    return QuantisedWeight(INT4, zeros(groups, outputs, GROUP // 2), scales, points, 1, GROUP)


def form_of(scheme: str, x: torch.Tensor) -> tuple[Biases | None, Clamp | None]:
    """Biases, in the dtype of `x`, and the clamp of experts of a scheme."""
    if scheme != MXFP4_EXPERTS:
        return None, None
    return (x.new_zeros(NUM_EXPERTS, 2 * MOE_INNER), x.new_zeros(NUM_EXPERTS, MOE_HIDDEN)), (1.702, 7.0)


KernelLaunch = tuple[Any, tuple[Any, ...], dict[str, Any]]
"""A kernel, its arguments and options."""


def expert_launches(scheme: str, tile: products.Tile, arch: int) -> list[KernelLaunch]:
    """The kernels into experts and out of them that this tile would run on this architecture."""
    kernels = experts._quantised_gate_up_kernel, experts._quantised_down_kernel
    others = moe._sum_kernel, moe_routing._group_kernel
    runs = [kernel.run for kernel in (*kernels, *others)]
    found: list[KernelLaunch] = []
    for kernel in kernels:
        kernel.run = lambda *arguments, grid, warmup, kernel=kernel, **options: found.append(
            (kernel, arguments, options)
        )
    for kernel in others:
        kernel.run = lambda *arguments, **options: None
    try:
        gate_up = weight_of(scheme, NUM_EXPERTS * 2 * MOE_INNER, MOE_HIDDEN)
        down = weight_of(scheme, NUM_EXPERTS * MOE_HIDDEN, MOE_INNER)
        x = torch.zeros(4, MOE_HIDDEN, dtype=torch.bfloat16)
        chosen = torch.zeros(4, PER_TOKEN, dtype=torch.int32)
        reading = products.reading_of(divmod(arch, 10))
        form = form_of(scheme, x)
        experts.quantised_experts_mlp(x, gate_up, down, chosen.bfloat16(), chosen, *form, tile, reading)
    finally:
        for kernel, run in zip((*kernels, *others), runs, strict=True):
            kernel.run = run
    return found


def launch(scheme: str, tile: products.Tile, arch: int) -> KernelLaunch:
    """The kernel that a product by this tile would run on this architecture, its arguments and options."""
    kernel, add = products._quantised_linear_kernel, products._add_parts_kernel
    before, found = (kernel.run, add.run), []
    kernel.run = lambda *arguments, grid, warmup, **options: found.append((kernel, arguments, options))
    add.run = lambda *arguments, **options: None
    try:
        x, weight = torch.zeros(tile.tokens, SIZE, dtype=torch.bfloat16), weight_of(scheme)
        reading = products.reading_of(divmod(arch, 10))
        products.multiply(x, weight, None, tile, products.num_splits(tile.tokens, weight, tile), reading)
    finally:
        kernel.run, add.run = before
    (only,) = found
    return only


def numbers_launch(scheme: str, arch: int) -> KernelLaunch:
    """As `launch`, of the kernel that makes numbers of a weight."""
    kernel, found = products._dequantise_kernel, []
    before = kernel.run
    kernel.run = lambda *arguments, grid, warmup, **options: found.append((kernel, arguments, options))
    try:
        out = torch.zeros((), dtype=torch.bfloat16).expand(SIZE, SIZE)
        products.dequantise_rows(weight_of(scheme), 0, out, products.reading_of(divmod(arch, 10)))
    finally:
        kernel.run = before
    (only,) = found
    return only


def rows_of(scheme: str, arch: int, candidates: bool) -> Iterator[tuple[str, list[str]]]:
    """Rows of the tables, each with the name of its table."""
    tiles = [tile for tile, _ in CANDIDATE_TILES] if candidates else [*products.TILES, products.INVARIANT_TILE]
    for tile in tiles if scheme in SCHEMES else ():
        yield LINEAR, row_of(launch(scheme, tile, arch), scheme, tile, arch)
    if not candidates:
        num_rows, warps = products.DEQUANTISED_FORM
        tile = products.Tile(num_rows, weight_of(scheme).run, 3, warps)
        yield NUMBERS, row_of(numbers_launch(scheme, arch), scheme, tile, arch)
    for tile in () if candidates else experts.TILES:
        for name, each in zip((INTO, OUT_OF), expert_launches(scheme, tile, arch), strict=True):
            yield name, row_of(each, scheme, tile, arch)


def row_of(launched: KernelLaunch, scheme: str, tile: products.Tile, arch: int) -> list[str]:
    """A row of a table."""
    compiled = compile_launch(*launched, arch)
    numbers = [tile.warps, tile.stages, compiled.registers, compiled.spilled]
    shared = f"{compiled.shared / 1024:.1f}"
    return [
        f"sm_{arch}",
        scheme,
        f"{tile.tokens} x {tile.outputs}",
        *map(str, numbers),
        shared,
        str(GPUS[arch].shared_bytes >> 10),
    ]


def main(arguments: list[str] | None = None) -> int:
    """Entry point; 1 where a kernel spills or takes more shared memory than there is."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--arch", type=int, choices=GPUS, action="append", help="default: all")
    parser.add_argument("--weights", choices=ALL, action="append", help="default: all")
    parser.add_argument("--candidates", action="store_true", help="the tiles that are tried besides")
    parser.add_argument("--out", type=Path, help="where the table is written as well")
    args = parser.parse_args(arguments)
    tables: dict[str, list[list[str]]] = {LINEAR: [], NUMBERS: [], INTO: [], OUT_OF: []}
    fits = True
    for arch in args.arch or GPUS:
        for scheme in args.weights or ALL:
            for name, row in rows_of(scheme, arch, args.candidates):
                print(name, *row, flush=True)
                tables[name].append(row)
                fits &= float(row[-2]) <= GPUS[arch].shared_bytes >> 10 and row[-3] == "0"
    parts = [f"{name}:\n\n{markdown_table(HEADER, rows, 'lllrrrrrr')}\n" for name, rows in tables.items() if rows]
    text = "\n".join(parts)
    print(text)
    if args.out:
        args.out.write_text(text)
    return int(not fits)


if __name__ == "__main__":
    sys.exit(main())
