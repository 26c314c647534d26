"""How long products by quantised weights take, beside the same products in bfloat16 by torch.

    python -m benchmarks.gpu.quantised_products [--tokens 16] [--weights fp8]

times, on a GPU, the products of a layer of Qwen3-8B and the experts of one of Qwen3-30B-A3B, each token's chosen by
chance, for numbers of tokens of decode steps and of a prompt's chunk. Each is replayed as a CUDA graph over as many
copies of the weight, or choices of experts, as no cache holds. With `--device cpu` tiny products run by the reference:
that shows that it runs, and measures nothing.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import torch
import torch.nn.functional as F

from benchmarks.gpu.timing import graph_of, median_seconds
from benchmarks.markdown import markdown_table
from dflash_kernels import moe, quantised_moe
from dflash_kernels import quantised_linear as products
from dflash_kernels.quantised_weight import FP8, INT4, QuantisedWeight

# Outputs and inputs of a layer's products.
QWEN3_8B = {"qkv": (6144, 4096), "output": (4096, 4096), "gate, up": (24576, 4096), "down": (4096, 12288)}
TINY = {"tiny": (64, 128)}


class ExpertSizes(NamedTuple):
    """Experts of a layer, those of a token, and the size of a token outside and inside."""

    experts: int
    per_token: int
    hidden: int
    inner: int


# A layer of it in INT4 is more than a cache holds, and so is what these choices of a token's experts read of it.
CHOICES = 32
QWEN3_30B_A3B = ExpertSizes(128, 8, 2048, 768)
TINY_EXPERTS = ExpertSizes(4, 2, 128, 128)
TOKENS = (1, 16, 64, 256, 2048)
GROUP = 128
# More than the largest cache of a GPU.
CACHE_BYTES = 256 << 20
HEADER = ["product", "weights", "tokens", "us", "us in bf16", "times as fast", "GB/s of weights"]
Product = Callable[[torch.Tensor, QuantisedWeight], torch.Tensor]
ExpertProduct = Callable[[torch.Tensor, QuantisedWeight, QuantisedWeight, torch.Tensor, torch.Tensor], torch.Tensor]


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


def measure_experts(
    kind: str, sizes: ExpertSizes, tokens: tuple[int, ...], device: torch.device, product: ExpertProduct
) -> list[list[str]]:
    """As `measure`, of the experts of a layer, beside those of `moe.py` in bfloat16. Of the weights the chosen experts'
    are read."""
    is_cuda = device.type == "cuda"
    dtype = torch.bfloat16 if is_cuda else torch.float32
    plain_product = moe.experts_mlp if is_cuda else moe.experts_mlp_reference
    into, out_of = (2 * sizes.inner, sizes.hidden), (sizes.hidden, sizes.inner)
    gate_up, down = (random_weight(kind, sizes.experts * out, inner, device) for out, inner in (into, out_of))
    plain_into, plain_out = (torch.randn(sizes.experts, *shape, device=device, dtype=dtype) for shape in (into, out_of))
    rows = []
    for count in tokens:
        x = torch.randn(count, sizes.hidden, device=device, dtype=dtype)
        choices = [torch.rand(count, sizes.experts, device=device).topk(sizes.per_token) for _ in range(CHOICES)]
        routed = [(weights.to(dtype), chosen.int()) for weights, chosen in choices]
        own = seconds(device, [partial(product, x, gate_up, down, *each) for each in routed])
        other = seconds(device, [partial(plain_product, x, plain_into, plain_out, *each) for each in routed])
        num_read = sum(len(chosen.unique()) for _, chosen in routed) / CHOICES
        num_bytes = (gate_up.num_bytes + down.num_bytes) * num_read / sizes.experts
        figures = f"{1e6 * own:.1f}", f"{1e6 * other:.1f}", f"{other / own:.2f}", f"{num_bytes / own / 1e9:.0f}"
        rows.append(["experts", kind, str(count), *figures])
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
    of_experts: ExpertProduct = (
        quantised_moe.quantised_experts_mlp if is_cuda else quantised_moe.quantised_experts_mlp_reference
    )
    tokens = tuple(args.tokens or (TOKENS if is_cuda else (1, 16)))
    rows = []
    with torch.inference_mode():
        for kind in args.weights or (FP8, INT4):
            for name, shape in (QWEN3_8B if is_cuda else TINY).items():
                rows += measure(name, kind, shape, tokens, device, product)
            rows += measure_experts(kind, QWEN3_30B_A3B if is_cuda else TINY_EXPERTS, tokens, device, of_experts)
    print(torch.cuda.get_device_name(device) if is_cuda else "a CPU: these times measure nothing")
    print(markdown_table(HEADER, rows, "llrrrrr"))
    return 0


if __name__ == "__main__":
    sys.exit(main())
