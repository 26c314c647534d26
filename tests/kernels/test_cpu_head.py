"""The token that coarse codes of a head find is that of the whole product, the first of equals, bit for bit."""

from __future__ import annotations

import math
import sys

import numpy as np
import pytest
import torch

from dflash_kernels import cpu_head, cpu_ops
from dflash_kernels.argmax import argmax_reference
from dflash_kernels.cpu_head import CoarseHead
from dflash_kernels.cpu_ops import PackedWeight
from tests.kernels.inputs import random
from tests.kernels.test_cpu_ops import DTYPES, blocks_of, needs_library

needs_codes = pytest.mark.skipif(not cpu_head.MAX_ROWS[torch.float32], reason="needs a C++ compiler and AVX2")
# Outputs and inputs: of whole panels, a panel and one more, an odd number of inputs, more than are summed at once.
SHAPES = [(4096, 64), (4113, 96), (5000, 33), (4100, 700)]


@pytest.fixture
def rows_without_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """As many rows by codes as are asked for, also where the whole product of fewer is faster."""
    monkeypatch.setattr(cpu_head, "MAX_ROWS", dict.fromkeys(DTYPES, sys.maxsize))


def rows_for(weight: torch.Tensor, count: int, seed: int = 7) -> torch.Tensor:
    """Rows of which each has a few large logits, as a model's: between some rows of `weight`, with noise, one number
    far larger than the others."""
    rng = torch.Generator().manual_seed(seed)
    some = torch.randint(0, len(weight), (count, 3), generator=rng)
    x = weight.float()[some].sum(dim=1) + 0.3 * torch.randn((count, weight.shape[1]), generator=rng)
    x[torch.arange(count), torch.randint(0, weight.shape[1], (count,), generator=rng)] *= 20
    return x


def assert_found(head: CoarseHead, packed: PackedWeight, x: torch.Tensor) -> None:
    """The tokens of all rows at once, and of the first ones."""
    expected = argmax_reference(packed.product(x))
    for count in (len(x), 1, 3, 4, 5):
        found = head.likeliest(x[:count])
        assert found is not None
        assert found.tolist() == expected[:count].tolist()


@needs_codes
@pytest.mark.usefixtures("rows_without_end")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("outputs", "inputs"), SHAPES)
def test_the_token_is_that_of_the_whole_product(outputs: int, inputs: int, dtype: torch.dtype) -> None:
    weight = random(outputs, inputs).to(dtype)
    weight[5] *= 0.01  # an output whose logits are small, and one of zeros
    weight[17] = 0
    packed = PackedWeight(weight)
    head = CoarseHead(packed)
    for seed, count in enumerate((9, 9, 16, 17, 32, 35)):
        assert_found(head, packed, rows_for(weight, count, seed).to(dtype))
    last = torch.cat([weight[-1:].float() * 2, weight[:1].float() * 2]).to(dtype)
    assert_found(head, packed, last.repeat(4, 1))
    wide = torch.cat([last, last], dim=1)  # rows that lie apart
    found = head.likeliest(wide[:, inputs:])
    assert found is not None
    assert found.tolist() == argmax_reference(packed.product(last)).tolist() == [outputs - 1, 0]


@needs_codes
@pytest.mark.parametrize("dtype", DTYPES)
def test_of_equal_logits_the_first_is_chosen_and_of_all_that_differ_in_the_last_bit_the_largest(
    dtype: torch.dtype,
) -> None:
    """Codes cannot tell such outputs apart."""
    weight = random(4200, 128).to(dtype)
    rows = [4001, 40, 4000, 63, 64, 2000]
    weight[rows] = weight[100].clone()
    packed = PackedWeight(weight)
    x = (weight[100:101].float() * 3).to(dtype)
    found = CoarseHead(packed).likeliest(x)
    assert found is not None
    assert found.tolist() == argmax_reference(packed.product(x)).tolist() == [40]
    bits = torch.int32 if dtype == torch.float32 else torch.int16
    for row in rows:
        changed = weight.clone()
        largest = int(weight[row].float().abs().argmax())
        # The next number away from 0: in bfloat16 the logits may be rounded to one number.
        changed[row].view(bits)[largest] += 1
        packed = PackedWeight(changed)
        found = CoarseHead(packed).likeliest(x)
        assert found is not None
        assert found.tolist() == argmax_reference(packed.product(x)).tolist()


@needs_codes
@pytest.mark.parametrize("dtype", DTYPES)
def test_logits_of_bfloat16_that_are_rounded_to_one_number_are_equal(dtype: torch.dtype) -> None:
    """The first of them is chosen, though another is larger before it is rounded."""
    most, step = 127 / 128, 1 / 128  # codes hold these as they are
    weight = torch.zeros((4200, 64))
    weight[:, 1] = -most
    weight[[7, 3000], 0], weight[[7, 3000], 1] = most, 0.0
    weight[3000, 2] = step
    packed = PackedWeight(weight.to(dtype))
    for more, chosen in ((0.1, 7), (0.2, 7), (0.5, 3000)):  # half a step of bfloat16 is 1 / 512
        x = torch.zeros((1, 64))
        x[0, :3] = torch.tensor([1.0, 4.0, more])
        found = CoarseHead(packed).likeliest(x.to(dtype))
        assert found is not None
        assert found.tolist() == argmax_reference(packed.product(x.to(dtype))).tolist()
        assert found.tolist() == [chosen if dtype == torch.bfloat16 else 3000]


@needs_codes
@pytest.mark.parametrize("dtype", DTYPES)
def test_more_rows_than_codes_are_faster_for_are_left_to_the_product(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    weight = random(4096, 64)
    head, x = CoarseHead(PackedWeight(weight.to(dtype))), rows_for(weight, 4).to(dtype)
    assert cpu_head.MAX_ROWS[dtype] >= 4
    monkeypatch.setitem(cpu_head.MAX_ROWS, dtype, 3)
    assert [head.likeliest(x[:count]) is None for count in (3, 4, 1)] == [False, True, False]


@needs_codes
@pytest.mark.usefixtures("rows_without_end")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", ["Q8_0", "Q4_1", "Q6_K"])
def test_a_head_in_blocks_has_codes_beside_it_too(kind: str, dtype: torch.dtype) -> None:
    raw, numbers = blocks_of(kind, 4100, 256)
    packed = PackedWeight.of_blocks([(kind, raw)], dtype)
    assert packed is not None
    head = CoarseHead(packed)
    for seed in range(4):
        assert_found(head, packed, rows_for(numbers, 9, seed).to(dtype))


@needs_codes
def test_rows_that_bounds_say_little_of_are_left_to_the_product_and_more_rarely_asked_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    weight = random(4096, 64) * 1e-3 + 1  # logits that lie close together
    head = CoarseHead(PackedWeight(weight))
    flat, real, asked = torch.ones((2, 64)), cpu_ops.likeliest, list[int]()

    def counted(
        x: torch.Tensor, packed: PackedWeight, codes: np.ndarray, ids: torch.Tensor, *sampling: torch.Tensor
    ) -> int:
        asked.append(real(x, packed, codes, ids, *sampling))
        return asked[-1]

    monkeypatch.setattr(cpu_ops, "likeliest", counted)
    for number, expected in ((1, 1), (1, 1), (1, 2), (3, 2), (1, 3), (7, 3), (1, 4)):
        assert all(head.likeliest(flat) is None for _ in range(number))
        assert asked == [-1] * expected
    pauses = [head._pause]
    for _ in range(10):
        head._left_out = 0
        assert head.likeliest(flat) is None
        pauses.append(head._pause)
    assert pauses == [15, 31, 63, 127, 255, 256, 256, 256, 256, 256, 256]
    other = CoarseHead(PackedWeight(random(4096, 64)))
    other._pause = 31
    assert other.likeliest(rows_for(random(4096, 64), 1)) is not None
    assert other._pause == 0


@needs_codes
@pytest.mark.usefixtures("rows_without_end")
@pytest.mark.parametrize("dtype", DTYPES)
def test_tokens_with_noise_are_those_that_are_sampled_from_all_logits(dtype: torch.dtype) -> None:
    """Greedy rows beside others, cold ones and hot ones, logits of any size."""
    rng = torch.Generator().manual_seed(5)
    temperature = torch.tensor([0.0, 0.05, 0.7, 1.0, 1.0, 1.3, 2.0, 0.0, 1.0] * 2 + [1.3, 0.7])
    num_found, differ = 0, 0
    for seed in range(40):
        weight = (random(4113, 96, seed=seed) * 4.0 ** (seed % 5 - 3)).to(dtype)
        packed, x = PackedWeight(weight), (rows_for(weight, 20, seed) / (1 + seed % 3)).to(dtype)
        seeds, positions = (torch.randint(-(2**62), 2**62, (20,), generator=rng) for _ in range(2))
        logits, noise = packed.product(x), (temperature, seeds, positions.abs())
        expected = cpu_ops.sample(logits, *noise)
        if (found := CoarseHead(packed).likeliest(x, *noise)) is not None:
            num_found += 1
            assert found.tolist() == expected.tolist()
            differ += int((expected != argmax_reference(logits)).sum())
        for row in (3, 5):
            one = CoarseHead(packed).likeliest(x[row : row + 1], *(each[row : row + 1] for each in noise))
            assert one is None or one.tolist() == expected[row : row + 1].tolist()
    assert num_found > 20
    assert differ > 20, "noise decides some"


@needs_codes
def test_scores_with_noise_are_those_of_logits_that_are_rounded() -> None:
    """Codes hold these numbers as they are, so that bounds are narrower than bfloat16 is fine."""
    rng = torch.Generator().manual_seed(2)
    weight = torch.randint(-127, 128, (4096, 64), generator=rng) / 128
    weight[:, 0] = 127 / 128
    packed = PackedWeight(weight.bfloat16())
    head, logits_apart = CoarseHead(packed), 0
    for seed in range(100):
        x = torch.randn((4, 64), generator=rng).bfloat16()
        seeds, positions = (torch.randint(0, 2**62, (4,), generator=rng) for _ in range(2))
        noise = torch.ones(4), seeds, positions
        expected = cpu_ops.sample(packed.product(x), *noise)
        logits_apart += int((expected != cpu_ops.sample(PackedWeight(weight).product(x.float()), *noise)).sum())
        found = head.likeliest(x, *noise)
        assert found is not None
        assert found.tolist() == expected.tolist(), seed
    assert logits_apart


FILTERS = [(0, 1.0, 0.0), (3, 1.0, 0.0), (20, 1.0, 0.0), (0, 1.0, 0.2), (20, 0.9, 0.0), (9, 0.5, 0.1), (0, 0.8, 0.02)]
"""top_k, top_p and min_p."""


@needs_codes
@pytest.mark.usefixtures("rows_without_end")
@pytest.mark.parametrize("dtype", DTYPES)
def test_filtered_tokens_are_those_that_are_sampled_from_what_filters_keep_of_all_logits(dtype: torch.dtype) -> None:
    """Each row with filters of its own, cold ones and hot ones, beside others without and greedy ones."""
    rng = torch.Generator().manual_seed(5)
    temperature = torch.tensor([1.0, 0.7, 0.5, 1.0, 1.3, 2.0, 1.0, 0.0, 0.05])
    num_found, differ = 0, torch.zeros(9, dtype=torch.int64)
    for seed in range(40):
        weight = (random(4113, 96, seed=seed) * 4.0 ** (seed % 5 - 3)).to(dtype)
        packed, x = PackedWeight(weight), (rows_for(weight, 9, seed) / (1 + seed % 3)).to(dtype)
        seeds, positions = (torch.randint(-(2**62), 2**62, (9,), generator=rng) for _ in range(2))
        top_k, top_p, min_p = map(torch.tensor, zip(*[*FILTERS, FILTERS[4], FILTERS[2]], strict=True))
        logits, noise, head = packed.product(x), (temperature, seeds, positions.abs()), CoarseHead(packed)
        call = *noise, top_k, top_p, min_p
        expected = cpu_ops.sample(logits, *noise, cpu_ops.lowest_kept(logits, temperature, *call[3:]))
        differ += expected != cpu_ops.sample(logits, *noise)
        for first, last in [(0, 9), *((row, row + 1) for row in range(9))]:
            head._left_out = 0
            found = head.likeliest(x[first:last], *(each[first:last] for each in call))
            if found is not None:
                num_found += last - first
                assert found.tolist() == expected[first:last].tolist()
    assert num_found > 400
    assert (differ[1:7] > 1).all(), "filters decide some"


@needs_codes
def test_top_p_alone_is_left_to_the_product_and_the_next_call_is_not() -> None:
    weight = random(4096, 64)
    head, x = CoarseHead(PackedWeight(weight)), rows_for(weight, 2)
    seeds = torch.arange(2)
    at = torch.tensor([1.0, 1.0]), seeds, seeds
    for top_k, min_p, is_left in ((0, 0.0, True), (9, 0.0, False), (0, 0.0, True), (0, 0.3, False), (4096, 0.0, True)):
        filters = torch.tensor([5, top_k]), torch.tensor([1.0, 0.9]), torch.tensor([0.0, min_p])
        assert (head.likeliest(x, *at, *filters) is None) == is_left
    assert head.likeliest(x, torch.tensor([1.0, 0.0]), seeds, seeds, *filters) is not None, "a greedy row"


@needs_codes
def test_where_the_rounding_of_a_sum_decides_what_top_p_keeps_the_product_does() -> None:
    """Weights of 1, 1 / e and 1 / e^2, and a top-p of just what the first has."""
    weight = torch.zeros((4200, 64))
    weight[[7, 900, 3000], 0] = torch.tensor([1.0, 0.5, 0.0]) * 127 / 128
    weight[:, 1] = -127 / 128
    weight[[7, 900, 3000], 1] = 0.0
    packed, x = PackedWeight(weight), torch.zeros((1, 64))
    x[0, :2] = torch.tensor([2 * 128 / 127, 40.0])
    head, one, top_k, min_p = CoarseHead(packed), torch.ones(1), torch.tensor([3]), torch.zeros(1)
    first = 1 / (1 + math.exp(-1) + math.exp(-2))
    for top_p, may_be_left in ((first, True), (first - 1e-3, False), (first + 1e-3, False)):
        left = 0
        for seed in range(30):
            noise, share = (one, torch.tensor([seed]), torch.tensor([1])), torch.tensor([top_p])
            logits = packed.product(x)
            expected = cpu_ops.sample(logits, *noise, cpu_ops.lowest_kept(logits, one, top_k, share, min_p))
            head._left_out = 0
            found = head.likeliest(x, *noise, top_k, share, min_p)
            left += found is None
            assert found is None or found.tolist() == expected.tolist()
        assert bool(left) == may_be_left


@needs_codes
@pytest.mark.parametrize("odd", [float("nan"), float("inf"), 0.0, 1e38])
@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_that_are_not_finite_or_nothing_are_left_to_the_product(odd: float, dtype: torch.dtype) -> None:
    weight = random(4096, 64).to(dtype)
    x = rows_for(weight, 2).to(dtype)
    x[1] = odd
    assert CoarseHead(PackedWeight(weight)).likeliest(x) is None


@needs_codes
@pytest.mark.parametrize("dtype", DTYPES)
def test_bounds_hold_however_numbers_are_spread(dtype: torch.dtype) -> None:
    """Outputs of very different norms, inputs of very different sizes, logits below 0."""
    rng = np.random.default_rng(3)
    for seed in range(20):
        spread = torch.from_numpy(np.exp(rng.normal(0, rng.choice([0.1, 1.0, 2.5]), 4096))).float()
        weight = (random(4096, 80, seed=seed) * spread[:, None]).to(dtype)
        x = rows_for(weight, 4, seed) * torch.from_numpy(np.exp(rng.normal(0, 1.5, 80))).float()
        if seed % 3 == 0:
            weight[:, 0], x[:, 0] = -weight[:, 0].abs(), 30.0
        packed, x = PackedWeight(weight), x.to(dtype)
        found = CoarseHead(packed).likeliest(x)
        if found is not None:
            assert found.tolist() == argmax_reference(packed.product(x)).tolist(), seed


@needs_codes
@pytest.mark.usefixtures("rows_without_end")
def test_all_bits_of_a_row_count() -> None:
    """Codes hold these numbers as they are. One input is large, and its weights are equal: others decide."""
    rng = torch.Generator().manual_seed(6)
    weight = torch.randint(-127, 128, (4096, 64), generator=rng) / 128
    weight[:, 0] = 127 / 128
    packed = PackedWeight(weight)
    head = CoarseHead(packed)
    for _ in range(10):
        x = torch.randn((20, 64), generator=rng)
        x[:, 0] = 50.0
        found = head.likeliest(x)
        assert found is not None
        assert found.tolist() == argmax_reference(packed.product(x)).tolist()


@needs_codes
@pytest.mark.parametrize("dtype", DTYPES)
def test_outputs_that_fill_up_a_panel_are_never_the_largest(dtype: torch.dtype) -> None:
    """Theirs would be 0, and all others are below."""
    weight = random(4113, 64).to(dtype)
    weight[:, 0] = -weight[:, 0].abs() - 1
    weight[100, 0] = -0.5
    packed, x = PackedWeight(weight), torch.full((1, 64), 0.01)
    x[0, 0] = 40
    found = CoarseHead(packed).likeliest(x.to(dtype))
    assert found is not None
    assert found.tolist() == argmax_reference(packed.product(x.to(dtype))).tolist() == [100]


@needs_library
def test_small_heads_have_none() -> None:
    assert CoarseHead.of(PackedWeight(random(cpu_head.LEAST_OUTPUTS - 1, 8))) is None
    made = CoarseHead.of(PackedWeight(random(cpu_head.LEAST_OUTPUTS, 8)))
    assert (made is not None) == (cpu_head.MAX_ROWS[torch.float32] > 0)


@needs_codes
@pytest.mark.parametrize("odd", [float("nan"), float("inf")])
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_head_with_a_number_that_is_not_finite_has_none(odd: float, dtype: torch.dtype) -> None:
    weight = random(4096, 64).to(dtype)
    weight[70, 3] = odd
    assert CoarseHead.of(PackedWeight(weight)) is None


@needs_codes
def test_codes_take_a_byte_for_each_number_and_three_numbers_for_each_output() -> None:
    assert CoarseHead(PackedWeight(random(4113, 33))).num_bytes == 4128 * (34 + 12)
