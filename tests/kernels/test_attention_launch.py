"""How paged attention is split into launches, and which kinds of launches there are to compile."""

from __future__ import annotations

import random
from dataclasses import replace

import numpy as np
import pytest
import torch
import triton
import triton.language as tl

from dflash_backend.attention import KVLayer
from dflash_backend.attention.triton_backend import TritonBackend, TritonMetadata
from dflash_kernels.attention_merge import FEW_TILES, MANY_TILES, merge_form
from dflash_kernels.invariant_attention import PIECE, pieces_tiling
from dflash_kernels.paged_attention import _longest_first
from dflash_kernels.paged_attention_launch import (
    HOPPER,
    Gpu,
    HeadShape,
    Launch,
    launch_variants,
    plan_launches,
    tiling_of,
)
from tests.kernels.inputs import DEVICE


@triton.jit
def _order_kernel(out_ptr, num_tiles, query_len):
    tile = tl.program_id(0)
    tl.store(out_ptr + tile, _longest_first(tile, num_tiles, query_len, 32))


SHAPES = [
    HeadShape(32, 8, 128, 2),
    HeadShape(32, 4, 128, 2),
    HeadShape(16, 8, 256, 2),
    HeadShape(32, 4, 512, 2),
    HeadShape(4, 2, 32, 4),
]


def kind(launch: Launch) -> tuple[object, ...]:
    """What Triton compiles a kernel of its own for."""
    return launch.tiling, launch.tiles is not None, min(launch.num_workers, 1)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("seed", range(20))
def test_every_launch_of_a_step_is_of_a_kind_that_was_compiled_at_the_start(shape: HeadShape, seed: int) -> None:
    rng = random.Random(seed)
    longest = rng.choice([1, 4, 16, 40, 300])
    compiled = {kind(launch) for launch in launch_variants(np.array([300, 0, 0, 0]), shape)}
    for equal in (False, True):
        num_rows = rng.choice([1, 4, 20])
        lens = [longest if equal else rng.randint(0, longest) for _ in range(num_rows)]
        ends = [length + rng.choice([0, 90, 5000]) for length in lens]
        launches = plan_launches(np.array(lens), np.array(ends), shape, True, None, HOPPER)
        assert {kind(launch) for launch in launches} <= compiled


@pytest.mark.parametrize("width", [1, 4, 8, 16])
def test_draft_blocks_of_one_width_have_the_kinds_of_rows_of_one_bound(width: int) -> None:
    shape = SHAPES[0]
    compiled = {kind(launch) for launch in launch_variants(np.full(4, width), shape)}
    for num_rows in (1, 4, 64):
        launches = plan_launches(np.full(num_rows, width), np.full(num_rows, 4096), shape, False, None, HOPPER)
        assert {kind(launch) for launch in launches} <= compiled


QWEN3_8B = SHAPES[0]


def planned(query_lens: list[int], seq_len: int, window: int | None = None, overestimate: int = 0) -> list[Launch]:
    bounds = np.array(query_lens), np.full(len(query_lens), seq_len)
    return plan_launches(*bounds, QWEN3_8B, True, window, HOPPER, overestimate)


@pytest.mark.parametrize("num_rows", [1, 8, 64, 128])
def test_decode_rows_of_any_number_fill_the_device_and_no_more(num_rows: int) -> None:
    (launch,) = planned([16] * num_rows, 32768, overestimate=32768)
    assert launch.num_workers * QWEN3_8B.num_kv_heads == 132 * launch.tiling.programs_per_sm


def test_there_are_no_more_workers_than_pieces() -> None:
    assert planned([16], 200)[0].num_workers == 2
    assert planned([16] * 3, 32768, window=100)[0].num_workers == 3


def test_tiles_that_are_many_and_alike_have_a_program_each() -> None:
    assert planned([8192], 8192)[0].num_workers == 0
    assert planned([2048], 2048)[0].num_workers == 0, "64 tiles of 8 heads fill 132 multiprocessors"
    assert planned([512], 32768)[0].num_workers > 0, "16 tiles do not"
    assert planned([100] * 4, 100)[0].num_workers == 0, "too short to be cut"
    assert planned([100], 32768)[0].num_workers == 132 // QWEN3_8B.num_kv_heads, "four tiles would leave it idle"
    assert planned([8192], 40960, overestimate=40960)[0].num_workers > 0, "they may be unlike"


@pytest.mark.parametrize(("head_dim", "fewest"), [(64, 3), (128, 3), (256, 3), (512, 3)])
def test_a_gpu_with_little_shared_memory_has_fewer_pieces_on_their_way(head_dim: int, fewest: int) -> None:
    """Measured by the compiler for sm_89 and sm_120: 100.2 KiB with five stages at heads of 256, 68.1 with three. At
    heads of 512 tiles of 32 lines and 16 positions take 97.1 KiB; those of heads of 256 would take 256.3."""
    shape = HeadShape(16, 8, head_dim, 2)
    for num_queries in (1, 16, 300):
        small, large = (
            tiling_of(shape, num_queries, replace(HOPPER, shared_bytes=99 << 10)),
            tiling_of(shape, num_queries),
        )
        assert small.num_stages >= fewest
        assert (small.num_stages < large.num_stages) == (
            (head_dim == 256 and small.block_m == 64) or (head_dim == 512 and small.block_m == 32)
        )


A100 = Gpu(capability=80, num_sms=108, shared_bytes=163 << 10, sm_shared_bytes=164 << 10)
L40S = Gpu(capability=89, num_sms=142, shared_bytes=99 << 10, sm_shared_bytes=100 << 10)
B200 = Gpu(capability=100, num_sms=148, shared_bytes=227 << 10, sm_shared_bytes=228 << 10)


@pytest.mark.parametrize(("gpu", "loop"), [(A100, "split"), (L40S, "split"), (HOPPER, "masked"), (B200, "overlapped")])
def test_rows_of_several_tiles_attend_what_all_see_without_masks(gpu: Gpu, loop: str) -> None:
    assert tiling_of(QWEN3_8B, 33, gpu).loop == loop
    assert tiling_of(QWEN3_8B, 32, gpu).loop == "masked", "one tile: decode rows and draft blocks"
    for other in (replace(QWEN3_8B, fp8_kv=True), replace(QWEN3_8B, head_dim=256)):
        assert tiling_of(other, 300, gpu).loop == ("overlapped" if gpu is HOPPER else loop), "not measured"
    assert tiling_of(replace(QWEN3_8B, itemsize=4), 300, gpu).loop == "masked", "float32 has no tensor cores"


def test_the_programs_of_a_multiprocessor_are_what_its_shared_memory_holds() -> None:
    """The compiler says 70.5 KiB of a tile of 16 lines."""
    assert [tiling_of(QWEN3_8B, 4, gpu).programs_per_sm for gpu in (A100, L40S, HOPPER, B200)] == [2, 1, 2, 2]
    rows = np.full(64, 4), np.full(64, 32768)
    workers = [plan_launches(*rows, QWEN3_8B, True, None, gpu, 32768)[0].num_workers for gpu in (A100, L40S, HOPPER)]
    assert workers == [2 * 108 // 8, 142 // 8, 2 * 132 // 8]


def test_tiles_behind_the_most_positions_come_first() -> None:
    lens, ends = np.array([100, 300, 70]), np.array([9000, 300, 70])
    (launch,) = plan_launches(lens, ends, QWEN3_8B, True, None, HOPPER)
    assert launch.tiles is not None
    row, _, last = launch.tiles
    behind = ends[row] - lens[row] + last
    assert (np.diff(behind) <= 0).all()
    assert launch.tiles.flags.c_contiguous, "kernels read it without strides"
    assert row[0] == 0


def test_rows_of_one_bound_begin_with_the_last_tiles_of_all() -> None:
    out = torch.empty(12, dtype=torch.int32, device=DEVICE)
    _order_kernel[(12,)](out, 12, 100)
    assert out.tolist() == [3, 7, 11, 2, 6, 10, 1, 5, 9, 0, 4, 8]


@pytest.mark.parametrize("capability", [80, 90, 120])
@pytest.mark.parametrize("num_queries", [1, 16, 300])
def test_tiles_over_kv_in_fp8_hold_half_of_the_positions_where_operands_fill_registers(
    capability: int, num_queries: int
) -> None:
    gpu = replace(HOPPER, capability=capability)
    for shape in (HeadShape(32, 8, 128, 2), HeadShape(32, 4, 64, 2), HeadShape(16, 8, 256, 2)):
        plain, own = (tiling_of(each, num_queries, gpu) for each in (shape, replace(shape, fp8_kv=True)))
        if plain.block_m <= 16:
            assert own == plain
        elif capability != 90:
            assert (own.block_n, own.num_stages) == (max(16, plain.block_n // 2), 3)
        elif shape.head_dim == 256 and plain.loop == "masked":
            assert (own.block_n, own.num_warps) == (16, 4)
        else:
            assert replace(own, loop=plain.loop) == plain


@pytest.mark.parametrize("is_fp8", [False, True])
def test_the_backend_takes_the_tiles_of_its_cache(is_fp8: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[HeadShape] = []

    def planned(metadata: TritonMetadata, shape: HeadShape) -> None:
        seen.append(shape)
        raise InterruptedError

    monkeypatch.setattr(TritonMetadata, "launches_for", planned)
    data = torch.zeros(1, 16, 2, 2, 16, dtype=torch.uint8 if is_fp8 else torch.bfloat16)
    layer = KVLayer(data, torch.zeros(1, 16, 2, 2) if is_fp8 else None)
    with pytest.raises(InterruptedError):
        TritonBackend(16).attend(torch.zeros(3, 4, 16), layer, object.__new__(TritonMetadata))
    assert seen == [HeadShape(4, 2, 16, 4, fp8_kv=is_fp8)]


@pytest.mark.parametrize(
    ("num_tiles", "num_workers", "form"),
    [(1, 33, FEW_TILES), (4, 33, FEW_TILES), (5, 33, MANY_TILES), (1, 7, MANY_TILES), (192, 16, MANY_TILES)],
)
def test_few_tiles_with_many_pieces_are_merged_by_more_pieces_at_a_time(
    num_tiles: int, num_workers: int, form: tuple[int, int]
) -> None:
    tiling = tiling_of(SHAPES[0], 16)
    assert merge_form(Launch(tiling, num_tiles, num_workers, 16, None)) == form
    assert FEW_TILES[0] > MANY_TILES[0]


def test_pieces_of_invariant_attention_are_whole_blocks_of_keys() -> None:
    """A window's blocks begin at multiples of their length, also in the next piece."""
    for capability in (80, 89, 90, 100, 120):
        gpu = replace(HOPPER, capability=capability)
        assert [PIECE % pieces_tiling(shape, gpu).block_n for shape in SHAPES] == [0] * len(SHAPES)
