"""KV in FP8: what is kept of a number, the kernel that writes it, and attention over it."""

from __future__ import annotations

import pytest
import torch
import triton
import triton.language as tl

from dflash_kernels.fp8_kv import LARGEST, decode_e4m3, dequantise_kv_reference, encode_e4m3, quantise_kv_reference
from dflash_kernels.qk_norm_rope_write import qk_norm_rope_write, qk_norm_rope_write_reference
from tests.kernels.inputs import DEVICE, HALF_DTYPES, random, rotary_tables
from tests.kernels.test_paged_attention import Case
from tests.support.scale import one_in

NUM_SLOTS, EPS = 24, 1e-6


@triton.jit
def _there_and_back(numbers_ptr, codes_ptr, decoded_ptr, SIZE: tl.constexpr):
    place = tl.arange(0, SIZE)
    codes = encode_e4m3(tl.load(numbers_ptr + place))
    tl.store(codes_ptr + place, codes)
    tl.store(decoded_ptr + place, decode_e4m3(codes))


def test_kernels_round_as_torch_does_and_read_what_torch_reads() -> None:
    """Every number of e4m3, what lies in the middle of two, numbers beside the middle, and many others."""
    exact = torch.arange(0x7F, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    middle = (exact[1:] + exact[:-1]) / 2
    beside = torch.cat([middle.nextafter(torch.tensor(0.0)), middle.nextafter(torch.tensor(1e9))])
    others = torch.randn(1024, generator=torch.Generator().manual_seed(1)) * 10 ** torch.linspace(-4, 2, 1024)
    numbers = torch.cat([exact, middle, beside, others.clamp(-LARGEST, LARGEST)])
    numbers = torch.nn.functional.pad(torch.cat([numbers, -numbers]), (0, 4096 - 2 * len(numbers))).to(DEVICE)
    codes, decoded = torch.zeros_like(numbers, dtype=torch.uint8), torch.zeros_like(numbers)
    _there_and_back[(1,)](numbers, codes, decoded, SIZE=len(numbers))
    expected = numbers.to(torch.float8_e4m3fn)
    assert torch.equal(codes, expected.view(torch.uint8))
    assert torch.equal(decoded, expected.float())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_what_is_kept_is_within_a_sixteenth_of_each_number_or_of_the_smallest_step(dtype: torch.dtype) -> None:
    kv = (random(50, 2, 3, 80) * 10 ** random(50, 2, 3, 1, seed=1)).to(dtype)
    kv[3] = 0
    codes, scales = quantise_kv_reference(kv)
    kept = dequantise_kv_reference(codes, scales, torch.float32)
    step = torch.maximum(kv.float().abs() / 16, scales[..., None] * 2**-10)
    assert bool(((kept - kv.float()).abs() <= 1.001 * step).all())
    assert not kept[3].any()
    largest = kept.abs().amax(-1)
    torch.testing.assert_close(largest, kv.float().abs().amax(-1), rtol=1e-6, atol=0)


def test_a_tokens_kv_does_not_follow_from_its_neighbours() -> None:
    kv = random(40, 2, 2, 64)
    together, alone = quantise_kv_reference(kv), [quantise_kv_reference(token) for token in kv.split(1)]
    for whole, parts in zip(together, zip(*alone, strict=True), strict=True):
        assert torch.equal(whole, torch.cat(parts))


@pytest.mark.parametrize("dtype", [torch.float32, *HALF_DTYPES])
@pytest.mark.parametrize(("heads", "head_dim"), [((4, 2), 64), ((7, 3), 80), ((1, 1), 16), ((8, 2), 256)])
@pytest.mark.parametrize("norm", [True, False])
def test_the_kernel_writes_the_bytes_and_scales_of_its_reference(
    heads: tuple[int, int], head_dim: int, dtype: torch.dtype, norm: bool
) -> None:
    (num_heads, kv_heads), num_tokens = heads, 13
    qkv = (random(num_tokens, (num_heads + 2 * kv_heads) * head_dim) * 3).to(dtype)
    weights = random(num_heads + kv_heads, head_dim, seed=1).to(dtype) if norm else None
    cos, sin = (table.to(DEVICE, dtype) for table in rotary_tables(40, head_dim))
    slots = torch.randperm(NUM_SLOTS, generator=torch.Generator().manual_seed(2))[:num_tokens].to(DEVICE)
    slots[2::3] = -1
    positions = (torch.arange(num_tokens) * 3).to(DEVICE)
    memories = []
    for run in (0, 1):
        cache = torch.full((1 + NUM_SLOTS, 2, kv_heads, head_dim), 7, dtype=torch.uint8, device=DEVICE)
        scales = torch.full(cache.shape[:-1], 0.5, device=DEVICE)
        if run:
            query = qk_norm_rope_write(qkv, weights, EPS, cos, sin, positions, slots, cache[1:], scales=scales[1:])
        else:
            tables = (cos[positions].unsqueeze(1), sin[positions].unsqueeze(1))
            plain = qk_norm_rope_write_reference(
                qkv, weights, EPS, *tables, slots, cache[1:], padded=True, scales=scales[1:]
            )
        memories.append((cache, scales))
    torch.testing.assert_close(query, plain, atol=0.05, rtol=0.02)
    (cache, scales), (expected, expected_scales) = memories[1], memories[0]
    # Where the two have rounded apart before, a byte is one step away.
    assert (cache != expected).float().mean() < 0.01
    torch.testing.assert_close(scales, expected_scales, rtol=0.02, atol=0)
    numbers, others = (dequantise_kv_reference(*memory, torch.float32) for memory in memories)
    torch.testing.assert_close(numbers, others, rtol=0.15, atol=0.05)
    untouched = sorted(set(range(1 + NUM_SLOTS)) - set((1 + slots[slots >= 0]).tolist()))
    assert bool((cache[untouched] == 7).all())
    assert bool((scales[untouched] == 0.5).all())


@pytest.mark.parametrize("splits", [1, 3])
@pytest.mark.parametrize(("causal", "window"), [(True, None), (True, 20), (False, None), (False, 7)])
def test_attention_over_fp8_for_any_pattern_and_number_of_splits(causal: bool, window: int | None, splits: int) -> None:
    Case([3, 2], [61, 7], fp8=True).check(causal, window, splits)


@pytest.mark.parametrize(
    ("shape", "sink"),
    one_in(2, [((1, 1), 64, 16), ((6, 3), 80, 5), ((5, 1), 16, 1), ((16, 8), 64, 64)], [1.0, None]),
)
def test_attention_over_fp8_for_any_heads_blocks_and_sinks(
    shape: tuple[tuple[int, int], int, int], sink: float | None
) -> None:
    heads, head_dim, block_size = shape
    case = Case([2, 1], [37, 18], heads=heads, head_dim=head_dim, block_size=block_size, sink=sink, fp8=True)
    for splits in (1, 3):
        case.check(True, None, splits)


def test_a_prefill_chunk_and_tiles_that_workers_share_over_fp8() -> None:
    Case([70, 5], [90, 5], heads=(2, 1), fp8=True).check(True, None, 1)
    Case([3, 1, 5, 1], [100, 3, 61, 33], heads=(4, 2), sink=2.0, fp8=True).check_shares(7, True, None)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_attention_over_fp8_in_half_precision(dtype: torch.dtype) -> None:
    for splits in (1, 3):
        case = Case([3, 1], [50, 35], dtype=dtype, head_dim=64, heads=(2, 1), fp8=True)
        tolerance = 0.03 * float(case.reference(True, None).abs().max())
        actual = case.run(True, None, splits).double()
        torch.testing.assert_close(actual, case.reference(True, None), atol=tolerance, rtol=0)
