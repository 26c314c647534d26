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
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import NamedTuple

import torch
import torch.nn.functional as F

from benchmarks.gpu.results import ProductRun
from benchmarks.gpu.timing import num_copies, seconds_each
from dflash_kernels import moe, quantised_moe, scaled_linear
from dflash_kernels import quantised_linear as products
from dflash_kernels.quantised_weight import FP8, INT4, QuantisedWeight
from load_tests.markdown import markdown_table

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
TOKENS, TINY_TOKENS = (1, 16, 64, 256, 2048), (1, 16)
# Weights in FP8 with activations that become FP8 before the product.
FP8_BOTH = "fp8, activations too"
KINDS = (FP8, FP8_BOTH, INT4)
GROUP = 128
HEADER = ["product", "weights", "tokens", "us", "us in bf16", "times as fast", "GB/s of weights"]


def random_weight(kind: str, outputs: int, inputs: int, device: torch.device) -> QuantisedWeight:
    """FP8 with a scale for each 128 x 128, or INT4 with a scale and a zero point for each 128 of a row."""
    # Codes below 0x70 of e4m3 are numbers of up to 128.
    codes = torch.randint(0, 0x70 if kind == FP8 else 16, (outputs, inputs), dtype=torch.uint8, device=device)
    rows = GROUP if kind == FP8 else 1
    blocks = -(-outputs // rows), inputs // GROUP
    scales = torch.full(blocks, 2e-3, dtype=torch.float32 if kind == FP8 else torch.float16, device=device)
    zeros = None if kind == FP8 else torch.randint(0, 16, blocks, dtype=torch.uint8, device=device)
    return QuantisedWeight.of_codes(kind, codes, scales, zeros, rows, GROUP)


def measure(
    name: str, kind: str, shape: tuple[int, int], tokens: Sequence[int], device: torch.device
) -> Iterator[ProductRun]:
    """One weight, by each number of tokens. kind: FP8, INT4, or `FP8_BOTH` of activations that become FP8 as well."""
    is_cuda = device.type == "cuda"
    of_weight = FP8 if kind == FP8_BOTH else kind
    first = random_weight(of_weight, *shape, device)
    more = num_copies(device, first.num_bytes) - 1
    weights = [first, *(random_weight(of_weight, *shape, device) for _ in range(more))]
    dtype = torch.bfloat16 if is_cuda else torch.float32
    plain = [torch.randn(shape, device=device, dtype=dtype) for _ in range(num_copies(device, 2 * shape[0] * shape[1]))]
    products = [_product(kind, weight, is_cuda) for weight in weights]
    for count in tokens:
        x = torch.randn(count, shape[1], device=device, dtype=dtype)
        own = seconds_each(device, [partial(product, x) for product in products])
        other = seconds_each(device, [partial(F.linear, x, weight) for weight in plain])
        yield ProductRun(name, kind, count, own, other, first.num_bytes / own)


def _product(kind: str, weight: QuantisedWeight, is_cuda: bool) -> Callable[[torch.Tensor], torch.Tensor]:
    """What multiplies by a weight, as a server does."""
    if kind == FP8_BOTH:
        if not is_cuda:
            return partial(scaled_linear.scaled_linear_reference, weight=weight)
        multiply = scaled_linear.product_for(weight, torch.bfloat16)
        return lambda x: multiply(x, weight, None)
    product = products.quantised_linear if is_cuda else products.quantised_linear_reference
    return partial(product, weight=weight)


def measure_experts(kind: str, sizes: ExpertSizes, tokens: Sequence[int], device: torch.device) -> Iterator[ProductRun]:
    """As `measure`, of the experts of a layer, beside those of `moe.py` in bfloat16. Of the weights the chosen experts'
    are read."""
    is_cuda = device.type == "cuda"
    product = quantised_moe.quantised_experts_mlp if is_cuda else quantised_moe.quantised_experts_mlp_reference
    dtype = torch.bfloat16 if is_cuda else torch.float32
    plain_product = moe.experts_mlp if is_cuda else moe.experts_mlp_reference
    into, out_of = (2 * sizes.inner, sizes.hidden), (sizes.hidden, sizes.inner)
    gate_up, down = (random_weight(kind, sizes.experts * out, inner, device) for out, inner in (into, out_of))
    plain_into, plain_out = (torch.randn(sizes.experts, *shape, device=device, dtype=dtype) for shape in (into, out_of))
    for count in tokens:
        x = torch.randn(count, sizes.hidden, device=device, dtype=dtype)
        choices = [torch.rand(count, sizes.experts, device=device).topk(sizes.per_token) for _ in range(CHOICES)]
        routed = [(weights.to(dtype), chosen.int()) for weights, chosen in choices]
        own = seconds_each(device, [partial(product, x, gate_up, down, *each) for each in routed])
        other = seconds_each(device, [partial(plain_product, x, plain_into, plain_out, *each) for each in routed])
        num_read = sum(len(chosen.unique()) for _, chosen in routed) / CHOICES
        num_bytes = (gate_up.num_bytes + down.num_bytes) * num_read / sizes.experts
        yield ProductRun("experts", kind, count, own, other, num_bytes / own)


def measure_all(
    kinds: Sequence[str], tokens: Sequence[int], device: torch.device, tiny: bool = False
) -> Iterator[ProductRun]:
    """Every product and the experts, by each kind of weights; `tiny`: those that a CPU runs."""
    for kind in kinds:
        for name, shape in (TINY if tiny else QWEN3_8B).items():
            yield from measure(name, kind, shape, tokens, device)
        if kind != FP8_BOTH:
            yield from measure_experts(kind, TINY_EXPERTS if tiny else QWEN3_30B_A3B, tokens, device)


def row_of(run: ProductRun) -> list[str]:
    """A row of the table."""
    figures = f"{1e6 * run.seconds:.1f}", f"{1e6 * run.plain_seconds:.1f}", f"{run.speedup:.2f}"
    return [run.product, run.weights, str(run.tokens), *figures, f"{run.bytes_per_s / 1e9:.0f}"]


def main(arguments: list[str] | None = None) -> int:
    """Entry point; 1 where the device is not there."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--tokens", type=int, action="append", help=f"default: {', '.join(map(str, TOKENS))}")
    parser.add_argument("--weights", choices=KINDS, action="append", help="default: all")
    args = parser.parse_args(arguments)
    is_cuda = args.device == "cuda"
    if is_cuda and not torch.cuda.is_available():
        print(
            "torch sees no NVIDIA GPU here: run it on a machine with one, or with --device cpu, which measures nothing"
        )
        return 1
    device = torch.device(args.device)
    tokens = args.tokens or (TOKENS if is_cuda else TINY_TOKENS)
    rows = [row_of(run) for run in measure_all(args.weights or KINDS, tokens, device, tiny=not is_cuda)]
    print(torch.cuda.get_device_name(device) if is_cuda else "a CPU: these times measure nothing")
    print(markdown_table(HEADER, rows, "llrrrrr"))
    return 0


if __name__ == "__main__":
    sys.exit(main())
