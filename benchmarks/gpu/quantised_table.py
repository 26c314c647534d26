"""Products by quantised weights compiled for GPUs that need not be here: registers, shared memory and spills.

    python -m benchmarks.gpu.quantised_table [--out benchmarks/results/quantised_kernels.md]

compiles the kernel for each scheme, each tile and each architecture, in bfloat16, with codes read as suits that
architecture, and reads what the assembler says of it. Nothing is run and no time is measured.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu.compile_table import GPUS, compile_launch
from benchmarks.markdown import markdown_table
from dflash_kernels import quantised_linear as products
from dflash_kernels.quantised_weight import FP8, INT4, INT8, QuantisedWeight

SIZE, GROUP = 4096, 128
SCHEMES = ("FP8, 128 x 128", "FP8, rows", "INT8, rows", "INT4, groups of 128", "INT4, groups of 128, zero points")
HEADER = ["GPU", "weights", "tokens x outputs", "warps", "stages", "registers", "spilled bytes", "shared KiB", "of"]


def weight_of(scheme: str) -> QuantisedWeight:
    """A weight of 4096 by 4096."""
    groups = SIZE // GROUP
    if not scheme.startswith("INT4"):
        codes, kind = torch.zeros(SIZE, SIZE, dtype=torch.uint8), FP8 if scheme.startswith("FP8") else INT8
        shape, rows, columns = ((1, SIZE), 1, SIZE) if "rows" in scheme else ((groups, groups), GROUP, GROUP)
        return QuantisedWeight(kind, codes, torch.zeros(shape), None, rows, columns)
    scales = torch.zeros(groups, SIZE, dtype=torch.float16)
    codes = torch.zeros(groups, SIZE, GROUP // 2, dtype=torch.uint8)
    return QuantisedWeight(INT4, codes, scales, scales.byte() if "zero points" in scheme else None, 1, GROUP)


def launch(scheme: str, tile: products.Tile, arch: int) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
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


def row_of(scheme: str, tile: products.Tile, arch: int) -> list[str]:
    """A row of the table."""
    compiled = compile_launch(*launch(scheme, tile, arch), arch)
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
    parser.add_argument("--out", type=Path, help="where the table is written as well")
    args = parser.parse_args(arguments)
    rows, fits = [], True
    for arch in args.arch or GPUS:
        for scheme in SCHEMES:
            for tile in products.TILES:
                row = row_of(scheme, tile, arch)
                print(" ".join(row), flush=True)
                rows.append(row)
                fits &= float(row[-2]) <= GPUS[arch].shared_bytes >> 10 and row[-3] == "0"
    text = f"{markdown_table(HEADER, rows, 'lllrrrrrr')}\n"
    print(text)
    if args.out:
        args.out.write_text(text)
    return int(not fits)


if __name__ == "__main__":
    sys.exit(main())
