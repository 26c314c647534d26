"""How long products by quantised weights take, beside the same products in bfloat16 by torch.

    python -m benchmarks.gpu.quantised_products [--tokens 16] [--weights fp8]

times, on a GPU, the products of a layer of Qwen3-8B, for numbers of tokens of decode steps and of a prompt's chunk.
Each is replayed as a CUDA graph over as many copies of the weight as no cache holds. With `--device cpu` tiny products
run by the reference: that shows that it runs, and measures nothing.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from functools import partial

import torch
import torch.nn.functional as F

from benchmarks.gpu.timing import graph_of, median_seconds
from benchmarks.markdown import markdown_table
from dflash_kernels import quantised_linear as products
from dflash_kernels.quantised_weight import FP8, INT4, QuantisedWeight

# Outputs and inputs of a layer's products.
QWEN3_8B = {"qkv": (6144, 4096), "output": (4096, 4096), "gate, up": (24576, 4096), "down": (4096, 12288)}
TINY = {"tiny": (64, 128)}
TOKENS = (1, 16, 64, 256, 2048)
GROUP = 128
# More than the largest cache of a GPU.
CACHE_BYTES = 256 << 20
HEADER = ["product", "weights", "tokens", "us", "us in bf16", "times as fast", "GB/s of weights"]
Product = Callable[[torch.Tensor, QuantisedWeight], torch.Tensor]


def random_weight(kind: str, outputs: int, inputs: int, device: torch.device) -> QuantisedWeight:
    """FP8 with a scale for each 128 x 128, or INT4 with a scale and a zero point for each 128 of a row."""
    # Codes below 0x70 of e4m3 are numbers of up to 128.
    codes = torch.randint(0, 0x70 if kind == FP8 else 16, (outputs, inputs), dtype=torch.uint8, device=device)
    rows = GROUP if kind == FP8 else 1
    blocks = -(-outputs // rows), inputs // GROUP
    scales = torch.full(blocks, 2e-3, dtype=torch.float32 if kind == FP8 else torch.float16, device=device)
    zeros = None if kind == FP8 else torch.randint(0, 16, blocks, dtype=torch.uint8, device=device)
    return QuantisedWeight.of_codes(kind, codes, scales, zeros, rows, GROUP)


def seconds(device: torch.device, copies: Sequence[Callable[[], object]]) -> float:
    """The time of one of the products, which run one after the other."""

    def run() -> None:
        for product in copies:
            product()

    return median_seconds(device, graph_of(device, run)) / len(copies)


def measure(
    name: str, kind: str, shape: tuple[int, int], tokens: tuple[int, ...], device: torch.device, product: Product
) -> list[list[str]]:
    """Rows of the table for one weight."""
    is_cuda = device.type == "cuda"
    first = random_weight(kind, *shape, device)
    num_copies = -(-CACHE_BYTES // first.num_bytes) if is_cuda else 1
    weights = [first, *(random_weight(kind, *shape, device) for _ in range(num_copies - 1))]
    dtype = torch.bfloat16 if is_cuda else torch.float32
    num_plain = -(-CACHE_BYTES // (2 * shape[0] * shape[1])) if is_cuda else 1
    plain = [torch.randn(shape, device=device, dtype=dtype) for _ in range(num_plain)]
    rows = []
    for count in tokens:
        x = torch.randn(count, shape[1], device=device, dtype=dtype)
        own = seconds(device, [partial(product, x, weight) for weight in weights])
        other = seconds(device, [partial(F.linear, x, weight) for weight in plain])
        figures = f"{1e6 * own:.1f}", f"{1e6 * other:.1f}", f"{other / own:.2f}", f"{first.num_bytes / own / 1e9:.0f}"
        rows.append([name, kind, str(count), *figures])
    return rows


def main(arguments: list[str] | None = None) -> int:
    """Entry point; 1 where the device is not there."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--tokens", type=int, action="append", help=f"default: {', '.join(map(str, TOKENS))}")
    parser.add_argument("--weights", choices=(FP8, INT4), action="append", help="default: both")
    args = parser.parse_args(arguments)
    is_cuda = args.device == "cuda"
    if is_cuda and not torch.cuda.is_available():
        print(
            "torch sees no NVIDIA GPU here: run it on a machine with one, or with --device cpu, which measures nothing"
        )
        return 1
    device = torch.device(args.device)
    product: Product = products.quantised_linear if is_cuda else products.quantised_linear_reference
    tokens = tuple(args.tokens or (TOKENS if is_cuda else (1, 16)))
    rows = []
    with torch.inference_mode():
        for kind in args.weights or (FP8, INT4):
            for name, shape in (QWEN3_8B if is_cuda else TINY).items():
                rows += measure(name, kind, shape, tokens, device, product)
    print(torch.cuda.get_device_name(device) if is_cuda else "a CPU: these times measure nothing")
    print(markdown_table(HEADER, rows, "llrrrrr"))
    return 0


if __name__ == "__main__":
    sys.exit(main())
