"""How long products by quantised weights take, beside the same products in bfloat16 by torch.

    python -m benchmarks.gpu.quantised_products [--tokens 16] [--weights fp8] [--candidates]

times, on a GPU, the products of a layer of Qwen3-8B and the experts of one of Qwen3-30B-A3B, each token's chosen by
chance, for numbers of tokens of decode steps and of a prompt's chunk. Each is replayed as a CUDA graph over as many
copies of the weight, or choices of experts, as no cache holds. With `--candidates` each product is computed in other
ways besides, from which the constants of `quantised_linear.py` and `scaled_linear.py` are chosen: other tiles and
splits, the weight as numbers that torch multiplies by, and torch's scaled products. Ways that an H200 has shown to be
slower are not among them. One that fails, or whose numbers are off, is named and left out. With `--device cpu` tiny
products run by the reference: that shows that it runs, and measures nothing.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
import torch.nn.functional as F

from benchmarks.gpu.results import ProductRun, Recorder
from benchmarks.gpu.timing import REPEATS, num_copies, seconds_each
from dflash_kernels import moe, quantised_moe, scaled_linear
from dflash_kernels import quantised_linear as products
from dflash_kernels.quantised_linear import TILES, Tile
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

Multiply = Callable[[torch.Tensor, QuantisedWeight], torch.Tensor]
"""A way to compute a product by a quantised weight."""
# Tokens of the candidates, and of these those with activations in FP8.
CANDIDATE_TOKENS, BOTH_TOKENS = (32, 64, 128, 256), (16, 17, 32, 64, 128)
# Tiles beside those that are chosen from, each with the numbers of tokens that it is tried for.
CANDIDATE_TILES: tuple[tuple[Tile, tuple[int, ...]], ...] = (
    (Tile(32, 64, 5, 4), (32,)),
    (Tile(32, 128, 3, 8), (32,)),
    (Tile(64, 128, 3, 8), (64, 128)),
)
# The chosen tiles, with other splits than are chosen.
OTHER_SPLITS: tuple[tuple[Tile, tuple[int, ...]], ...] = (
    (TILES[1], (32,)), (TILES[2], (64,)), (TILES[3], (128, 256)),
)  # fmt: skip
# Programs that columns are split for: about two and four of a multiprocessor of an H100 or H200.
PROGRAMS = (256, 512)
# Tokens for which a weight is multiplied as codes and as numbers, whichever is chosen.
BOTH_WAYS_TOKENS, CANDIDATE_REPEATS = (128, 256), 6
# How far a candidate's numbers may be off, by the largest one.
TOLERANCE = 3e-2
CANDIDATE_HEADER = ["product", "weights", "tokens", "bf16, us", "ours, us", "others, us, the fastest first"]


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
    name: str,
    kind: str,
    shape: tuple[int, int],
    tokens: Sequence[int],
    device: torch.device,
    candidates: bool = False,
) -> Iterator[ProductRun]:
    """One weight, by each number of tokens. kind: FP8, INT4, or `FP8_BOTH` of activations that become FP8 as well.
    candidates: in all ways."""
    is_cuda = device.type == "cuda"
    of_weight = FP8 if kind == FP8_BOTH else kind
    first = random_weight(of_weight, *shape, device)
    more = num_copies(device, first.num_bytes) - 1
    weights = [first, *(random_weight(of_weight, *shape, device) for _ in range(more))]
    dtype = torch.bfloat16 if is_cuda else torch.float32
    plain = [torch.randn(shape, device=device, dtype=dtype) for _ in range(num_copies(device, 2 * shape[0] * shape[1]))]
    products = [_product(kind, weight, is_cuda) for weight in weights]
    repeats = CANDIDATE_REPEATS if candidates else REPEATS
    for count in tokens:
        x = torch.randn(count, shape[1], device=device, dtype=dtype)
        own = seconds_each(device, [partial(product, x) for product in products], repeats)
        other = seconds_each(device, [partial(F.linear, x, weight) for weight in plain], repeats)
        ways = ways_of(kind, count, first) if candidates and is_cuda else {}
        others = seconds_of_ways(ways, f"{name}, {kind}, {count} tokens", x, weights, products[0](x)) if ways else {}
        yield ProductRun(name, kind, count, own, other, first.num_bytes / own, others)


def seconds_of_ways(
    ways: dict[str, Multiply], title: str, x: torch.Tensor, weights: Sequence[QuantisedWeight], expected: torch.Tensor
) -> dict[str, float]:
    """How long each way takes for one of the weights; those that give `expected` by the first one."""
    found: dict[str, float] = {}
    measured: dict[Multiply, float] = {}
    size = expected.float().abs().amax().clamp(min=1e-6)
    for way, multiply in ways.items():
        try:
            if multiply not in measured:
                error = float((multiply(x, weights[0]).float() - expected.float()).abs().amax() / size)
                if not error <= TOLERANCE:
                    print(f"{title}: '{way}' is off by {error:.2g} of the largest number", flush=True)
                    continue
                works = [partial(multiply, x, weight) for weight in weights]
                measured[multiply] = seconds_each(x.device, works, CANDIDATE_REPEATS)
            found[way] = measured[multiply]
        except Exception as failure:  # noqa: BLE001 - of Triton, of torch, or of the driver: the others are wanted
            print(f"{title}: '{way}' fails ({type(failure).__name__}: {str(failure)[:200]})", flush=True)
    return found


def ways_of(kind: str, count: int, weight: QuantisedWeight) -> dict[str, Multiply]:
    """Other ways for `count` tokens, by their names: those of tiles say for how many programs columns are split. Equal
    ones are the same object."""
    if kind == FP8_BOTH:
        return scaled_ways(weight) if count in BOTH_TOKENS else {}
    ways: dict[str, Multiply] = {}
    for tile, tokens in (*CANDIDATE_TILES, *OTHER_SPLITS):
        by_splits: dict[int, Multiply] = {}
        for programs in PROGRAMS if count in tokens else ():
            splits = splits_for(programs, count, weight, tile)
            way = by_splits.setdefault(splits, partial(_by_tile, tile=tile, splits=splits))
            ways[f"{tile_name(tile)} for {programs}"] = way
    if count in BOTH_WAYS_TOKENS:
        ways["numbers"] = products.dequantised_linear
        tile = products.tile_of(count, torch.bfloat16)
        # As below the least tokens.
        ways["codes"] = partial(_by_tile, tile=tile, splits=products.num_splits(count, weight, tile))
    return ways


def _by_tile(x: torch.Tensor, weight: QuantisedWeight, tile: Tile, splits: int) -> torch.Tensor:
    return products.multiply(x, weight, None, tile, splits)


def scaled_ways(weight: QuantisedWeight) -> dict[str, Multiply]:
    """Activations in FP8 by our kernel, and by torch's product where it is there."""
    by_torch = scaled_linear.product_for(weight, torch.bfloat16)
    ways: dict[str, Multiply] = {"ours": scaled_linear.ScaledProduct(weight, by_torch=False)}
    if isinstance(by_torch, scaled_linear.ScaledProduct) and by_torch.by_torch:
        scales = scaled_linear.scales_for_torch(weight)
        ways["torch's"] = lambda x, weight: scaled_linear.multiply_by_torch(x, weight, scales, None)
    return ways


def splits_for(programs: int, count: int, weight: QuantisedWeight, tile: Tile) -> int:
    """Parts of the columns with which there are about `programs` of them, also for more tokens than a tile has."""
    outputs, inputs = weight.shape
    tiles = -(-count // tile.tokens) * -(-outputs // tile.outputs)
    return max(1, min(programs // tiles, products.MAX_SPLITS, inputs // (weight.run * products.MIN_RUNS)))


def tile_name(tile: Tile) -> str:
    """A tile in a table."""
    return f"{tile.tokens}x{tile.outputs} s{tile.stages} w{tile.warps}"


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
    dtype, num_choices = (torch.bfloat16, CHOICES) if is_cuda else (torch.float32, 1)
    plain_product = moe.experts_mlp if is_cuda else moe.experts_mlp_reference
    into, out_of = (2 * sizes.inner, sizes.hidden), (sizes.hidden, sizes.inner)
    gate_up, down = (random_weight(kind, sizes.experts * out, inner, device) for out, inner in (into, out_of))
    plain_into, plain_out = (torch.randn(sizes.experts, *shape, device=device, dtype=dtype) for shape in (into, out_of))
    for count in tokens:
        x = torch.randn(count, sizes.hidden, device=device, dtype=dtype)
        choices = [torch.rand(count, sizes.experts, device=device).topk(sizes.per_token) for _ in range(num_choices)]
        routed = [(weights.to(dtype), chosen.int()) for weights, chosen in choices]
        own = seconds_each(device, [partial(product, x, gate_up, down, *each) for each in routed])
        other = seconds_each(device, [partial(plain_product, x, plain_into, plain_out, *each) for each in routed])
        num_read = sum(len(chosen.unique()) for _, chosen in routed) / num_choices
        num_bytes = (gate_up.num_bytes + down.num_bytes) * num_read / sizes.experts
        yield ProductRun("experts", kind, count, own, other, num_bytes / own)


def measure_candidates(
    kinds: Sequence[str], tokens: Sequence[int] | None, device: torch.device, tiny: bool = False
) -> Iterator[ProductRun]:
    """Every product in all ways; tokens: those of each kind by default."""
    for name, shape in (TINY if tiny else QWEN3_8B).items():
        for kind in kinds:
            counts = BOTH_TOKENS if kind == FP8_BOTH else CANDIDATE_TOKENS
            yield from measure(name, kind, shape, tokens or (TINY_TOKENS if tiny else counts), device, candidates=True)


def candidate_tables(runs: Sequence[ProductRun]) -> str:
    """Each product in all ways, in microseconds; then of each way how many times as fast as bfloat16 it is, in the
    geometric mean over the products that were computed so."""
    rows: list[list[str]] = []
    speeds: dict[tuple[str, int, str], list[float]] = {}
    for run in runs:
        ways = sorted(run.others.items(), key=lambda way: way[1])
        named = ", ".join(f"{way} {1e6 * seconds:.1f}" for way, seconds in ways)
        times = [f"{1e6 * seconds:.1f}" for seconds in (run.plain_seconds, run.seconds)]
        rows.append([run.product, run.weights, str(run.tokens), *times, named or "-"])
        for way, seconds in {"as chosen": run.seconds, **run.others}.items():
            speeds.setdefault((run.weights, run.tokens, way), []).append(run.plain_seconds / seconds)
    means = {key: statistics.geometric_mean(each) for key, each in speeds.items()}
    # By weights and tokens, the fastest first.
    ranked = sorted(means, key=lambda key: (*key[:2], -means[key]))
    of_ways = [[weights, str(count), way, f"{means[weights, count, way]:.2f}", str(len(speeds[weights, count, way]))]
               for weights, count, way in ranked]  # fmt: skip
    header = ["weights", "tokens", "way", "times as fast as bf16", "products"]
    return f"{markdown_table(CANDIDATE_HEADER, rows, 'llrrrl')}\n\n{markdown_table(header, of_ways, 'lrlrr')}"


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
    parser.add_argument("--candidates", action="store_true", help="each product in all ways, without experts")
    parser.add_argument("--records", type=Path, help="where results are appended as they come, a line of JSON each")
    args = parser.parse_args(arguments)
    is_cuda = args.device == "cuda"
    if is_cuda and not torch.cuda.is_available():
        print(
            "torch sees no NVIDIA GPU here: run it on a machine with one, or with --device cpu, which measures nothing"
        )
        return 1
    device = torch.device(args.device)
    kinds, tiny = args.weights or KINDS, not is_cuda
    print(torch.cuda.get_device_name(device) if is_cuda else "a CPU: these times measure nothing", flush=True)
    if args.candidates:
        runs = measure_candidates(kinds, args.tokens, device, tiny)
    else:
        runs = measure_all(kinds, args.tokens or (TOKENS if is_cuda else TINY_TOKENS), device, tiny)
    found = []
    for run in runs:
        found.append(run)
        if args.records:
            Recorder(args.records).write(run)
    if args.candidates:
        print(candidate_tables(found))
    else:
        print(markdown_table(HEADER, [row_of(run) for run in found], "llrrrrr"))
    return 0


if __name__ == "__main__":
    sys.exit(main())
