"""Rows of many queries go to FlashAttention or cuDNN where these are installed and give what they should, held against
stand-ins that do what the packages document."""

from __future__ import annotations

import dataclasses
import logging
import re
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch

from dflash_backend.attention import (
    AttentionBackend,
    AttentionBatch,
    AttentionPattern,
    KVLayer,
    Requirements,
    cudnn_rows,
    select_backend,
)
from dflash_backend.attention import long_rows as module
from dflash_backend.attention.long_rows import (
    CUDNN,
    FLASH_ATTENTION_2,
    MIN_POSITIONS,
    LongAttention,
    LongRows,
    all_installed,
    by_flash_attention_3,
    installed,
)
from dflash_backend.attention.triton_backend import TritonBackend
from dflash_kernels.attention_schedule import PagedBatch
from dflash_kernels.paged_attention import paged_attention_reference
from tests.attention.dense_attention import dense_attention, small_pieces
from tests.attention.test_device_lengths import (
    DECODE,
    MIXED,
    PATTERNS,
    Rows,
    assert_rows_equal_reference,
    noise,
    run,
)
from tests.attention.test_flash_attn_backend import documented_varlen
from tests.support.paged import BLOCK_SIZE, block_tables

NEEDS = Requirements(
    patterns=frozenset({AttentionPattern(True), AttentionPattern(True, 100), AttentionPattern(True, sinks=True)}),
    head_dims=frozenset({64, 128}),
    dtype=torch.bfloat16,
    device="cuda",
)


def documented_gathered(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    softmax_scale: float,
    causal: bool,
) -> torch.Tensor:
    """FlashAttention-3's `flash_attn_varlen_func`: the keys of all rows behind one another, the mask for the last ones.

    As `fa3-fwd` 0.0.3 has it, whose module is called `fa3_fwd_interface`: no pages, no windows."""
    assert k.shape == v.shape
    assert len(k) == int(cu_seqlens_k[-1])
    assert len(q) == int(cu_seqlens_q[-1])
    assert cu_seqlens_q.dtype == cu_seqlens_k.dtype == torch.int32
    blocks = int(cu_seqlens_k.diff().max())
    tables = cu_seqlens_k[:-1, None] + torch.arange(blocks)
    tables = tables.clamp(max=len(k) - 1)
    window = (-1, -1)
    # Blocks of one position.
    return documented_varlen(
        q, k[:, None], v[:, None], cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, softmax_scale, causal,
        window, tables,
    )  # fmt: skip


FLASH_ATTENTION_3 = by_flash_attention_3(documented_gathered)


def brought_along(monkeypatch: pytest.MonkeyPatch, name: str, attend_rows: Callable[..., Any]) -> None:
    """A module of this name that has FlashAttention-3."""
    found = ModuleType(name)
    found.flash_attn_varlen_func = attend_rows  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, name, found)


@pytest.fixture
def stand_ins(monkeypatch: pytest.MonkeyPatch) -> None:
    """All packages, and rows of few positions that are worth it."""
    brought_along(monkeypatch, "fa3_fwd_interface", documented_gathered)
    monkeypatch.setattr(module, "flash_attn_varlen_func", documented_varlen)
    monkeypatch.setattr(cudnn_rows, "attention_of_cudnn", dense_attention)
    monkeypatch.setattr(module, "MIN_POSITIONS", 1)
    monkeypatch.setattr(module, "TRIAL_ROWS", ((30, 30), (17, 50), (15, 140)))
    monkeypatch.setattr(module, "CUDNN", dataclasses.replace(CUDNN, pays=lambda start, end: True))
    small_pieces(monkeypatch)


def reference(query: torch.Tensor, layer: KVLayer, layout: AttentionBatch) -> torch.Tensor:
    """Causal attention of rows whose lengths are known."""
    lens, ends = (torch.from_numpy(column) for column in (layout.query_lens, layout.seq_lens))
    rows = PagedBatch(lens.cumsum(0) - lens, lens, ends, layout.block_tables)
    return paged_attention_reference(query.double(), layer.data.double(), rows, True, None).float()


def counted(attention: LongAttention, calls: list[int]) -> LongAttention:
    def attending(query: torch.Tensor, layer: KVLayer, rows: LongRows) -> torch.Tensor:
        calls.append(len(rows.seq_lens))
        return attention.attend(query, layer, rows)

    return dataclasses.replace(attention, attend=attending, pays=lambda start, end: True)


@pytest.mark.parametrize("attention", [FLASH_ATTENTION_2, FLASH_ATTENTION_3, CUDNN])
@pytest.mark.parametrize("pattern", PATTERNS)
def test_long_rows_by_a_package_beside_short_ones_by_our_kernels(
    stand_ins: None, attention: LongAttention, pattern: AttentionPattern
) -> None:
    """Rows of 11 and of 5 queries are long where a tile of ours has 4, by 16 lines for groups of 4 heads. Of these the
    host knows the first one's lengths, and packages that gather get no other."""
    calls: list[int] = []
    query, layer, tables = noise(MIXED.num_tokens)
    query = query.repeat_interleave(2, 1)  # groups of 4
    backend = TritonBackend(BLOCK_SIZE, counted(attention, calls))
    exact = np.array([bound == length for bound, length in zip(MIXED.seq_bound, MIXED.seq_lens, strict=True)])
    metadata = backend.prepare(dataclasses.replace(MIXED.layout(tables), exact=exact), pattern, query.dtype)
    sinks = torch.tensor([0.5, -1.0, 2.0, 1.0]).repeat_interleave(2) if pattern.sinks else None
    plain = TritonBackend(BLOCK_SIZE)
    expected = plain.attend(query, layer, plain.prepare(MIXED.layout(tables), pattern, query.dtype), sinks)
    for _ in range(2):  # two layers
        actual = backend.attend(query, layer, metadata, sinks)
        for row in MIXED.real:
            torch.testing.assert_close(actual[MIXED.tokens(row)], expected[MIXED.tokens(row)], atol=1e-5, rtol=1e-5)
    num_rows = 2 if attention is FLASH_ATTENTION_2 else 1 if pattern == AttentionPattern(True) else 0
    assert calls == ([] if pattern.sinks or not num_rows else [num_rows] * 2)


@pytest.mark.parametrize("attention", [FLASH_ATTENTION_3, CUDNN])
def test_rows_with_and_without_cached_positions_whose_blocks_hold_nothing_else_that_counts(
    stand_ins: None, attention: LongAttention
) -> None:
    """Some lengths, at and beside the sizes of pieces; whatever lies past a row's end is not a number."""
    rng, calls = np.random.default_rng(3), list[int]()
    for _ in range(4):
        ends = rng.integers(9, 76, size=3)
        lens = np.minimum(rng.integers(9, 60, size=3), ends)
        tables = torch.from_numpy(block_tables(4)[:3]).int()
        query, layer, _ = noise(int(lens.sum()))
        known = torch.full_like(layer.data, float("nan")).flatten(0, 1)
        for table, end in zip(tables.long(), ends, strict=True):
            slots = (table[:, None] * BLOCK_SIZE + torch.arange(BLOCK_SIZE)).flatten()[: int(end)]
            known[slots] = layer.slots[slots]
        cache = KVLayer(known.view_as(layer.data))
        layout = AttentionBatch(lens, ends, tables)
        pattern, query = AttentionPattern(True), query.repeat_interleave(2, 1)
        backend = TritonBackend(BLOCK_SIZE, counted(attention, calls))
        actual = backend.attend(query, cache, backend.prepare(layout, pattern, query.dtype))
        torch.testing.assert_close(actual, reference(query, layer, layout), atol=1e-5, rtol=1e-5)
    assert calls == [3] * 4


@pytest.mark.parametrize("attention", [FLASH_ATTENTION_3, CUDNN])
@pytest.mark.parametrize("start", [0, 21])
def test_the_only_row_of_a_pass_is_not_copied(stand_ins: None, attention: LongAttention, start: int) -> None:
    """A prompt, or a chunk of one, alone: its queries are those of the pass."""
    seen: list[int] = []

    def attending(query: torch.Tensor, layer: KVLayer, rows: LongRows) -> torch.Tensor:
        seen.append(query.data_ptr())
        return attention.attend(query, layer, rows)

    query, layer, _ = noise(32)
    # Beside a padding row, as an engine has it.
    layout = AttentionBatch(np.array([32, 0]), np.array([start + 32, 0]), torch.from_numpy(block_tables(2)))
    always = dataclasses.replace(attention, attend=attending, pays=lambda start, end: True)
    backend = TritonBackend(BLOCK_SIZE, always)
    actual = backend.attend(query, layer, backend.prepare(layout, AttentionPattern(True), query.dtype))
    torch.testing.assert_close(actual, reference(query, layer, layout), atol=1e-5, rtol=1e-5)
    assert seen == [query.data_ptr()]


def test_rows_are_gathered_together_as_far_as_the_longest_alone_would_go(stand_ins: None) -> None:
    """So that no step takes more memory than the one that was measured at the start."""
    calls: list[tuple[int, list[int]]] = []

    def counting(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, **named: Any) -> torch.Tensor:
        calls.append((len(key), named["cu_seqlens_k"].tolist()))
        return documented_gathered(query, key, value, **named)

    ends = np.array([40, 30, 20, 9])
    query, layer, _ = noise(4 * 9)
    layout = AttentionBatch(np.full(4, 9), ends, torch.from_numpy(block_tables(4)).int())
    query = query.repeat_interleave(2, 1)
    backend = TritonBackend(BLOCK_SIZE, by_flash_attention_3(counting))
    actual = backend.attend(query, layer, backend.prepare(layout, AttentionPattern(True), query.dtype))
    torch.testing.assert_close(actual, reference(query, layer, layout), atol=1e-5, rtol=1e-5)
    assert calls == [(40, [0, 40]), (30, [0, 30]), (29, [0, 20, 29])]


@pytest.mark.parametrize("rows", [DECODE, MIXED])
def test_rows_of_one_tile_stay_with_our_kernels(stand_ins: None, rows: Rows) -> None:
    calls: list[int] = []
    if rows is MIXED:
        rows = dataclasses.replace(rows, query_bound=[8, 2, 2, 5, 1], query_lens=[8, 2, 1, 5, 1])
    query, layer, tables = noise(rows.num_tokens)
    backend = TritonBackend(BLOCK_SIZE, counted(FLASH_ATTENTION_2, calls))
    pattern = AttentionPattern(True)
    actual = run(backend, rows.layout(tables), query, layer, pattern)
    assert_rows_equal_reference(actual, rows, query, layer, tables, pattern)
    assert calls == []


def test_which_rows_are_long() -> None:
    lens, ends = np.array([40, 40, 16, 4000, 40]), np.array([5000, 900, 5000, 4000, MIN_POSITIONS + 20])
    known, unknown = np.ones(5, dtype=bool), np.zeros(5, dtype=bool)
    pages, gathers = FLASH_ATTENTION_2.rows, FLASH_ATTENTION_3.rows
    assert pages(lens, ends, unknown, 0, 32, None).tolist() == [0, 3, 4]
    assert pages(lens, ends, unknown, 1, 32, None).tolist() == [0, 3], "it may have seen one position fewer"
    assert pages(lens, ends, unknown, 0, 32, MIN_POSITIONS - 1).tolist() == [], "a window shows no more"
    assert pages(lens, np.full(5, 40960), unknown, 40960, 32, None).tolist() == [], "a captured step"
    assert gathers(lens, ends, unknown, 0, 32, None).tolist() == []
    assert gathers(lens, ends, known, 40960, 32, None).tolist() == [0, 3, 4], "other rows' lengths are not known"
    assert gathers(lens, ends, known & (lens == 4000), 0, 32, None).tolist() == [3]
    assert CUDNN.rows(lens, ends, known, 0, 32, None).tolist() == [3], "40 queries are padded to 1,024"


@pytest.mark.parametrize(("head_dim", "taken"), [(64, True), (128, True), (80, True), (100, False), (256, False)])
def test_heads_that_cudnn_takes(head_dim: int, taken: bool) -> None:
    assert CUDNN.takes(AttentionPattern(True), head_dim) == taken


@pytest.fixture
def hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    trial = module.trial
    monkeypatch.setattr(module, "trial", lambda *needed: trial(*needed[:3], torch.device("cpu")))


def names(block_size: int) -> list[str]:
    return [attention.name for attention in all_installed(NEEDS, block_size)]


def test_the_newest_package_comes_first(stand_ins: None, hopper: None) -> None:
    first = installed(NEEDS, 16)
    assert first is not None
    assert first.name == "FlashAttention-3"
    assert names(256) == ["FlashAttention-3", "cuDNN", "FlashAttention-2"]
    assert names(16) == ["FlashAttention-3", "cuDNN"]


@pytest.mark.parametrize(
    ("capability", "expected"),
    [((8, 9), ["FlashAttention-2"]), ((10, 0), ["cuDNN", "FlashAttention-2"]), ((12, 0), ["FlashAttention-2"])],
)
def test_packages_of_other_gpus(
    stand_ins: None, hopper: None, monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], expected: list[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
    assert names(256) == expected
    assert names(16) == expected[:-1]


def test_flash_attention_of_its_own_distribution(
    stand_ins: None, hopper: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delitem(sys.modules, "fa3_fwd_interface")
    assert names(16) == ["cuDNN"]
    brought_along(monkeypatch, "flash_attn_interface", documented_gathered)
    assert names(16) == ["FlashAttention-3", "cuDNN"]


def test_a_package_that_does_not_load_is_left_alone_and_the_log_says_why(
    stand_ins: None, hopper: None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(name: str) -> Any:
        raise OSError(f"{name}: undefined symbol")

    monkeypatch.setattr(module.importlib, "import_module", broken)
    with caplog.at_level(logging.WARNING):
        assert names(16) == ["cuDNN"]
    assert (
        "FlashAttention-3 (fa3_fwd_interface) is installed and does not load: fa3_fwd_interface: undefined"
        in caplog.text
    )


def test_models_without_a_layer_that_a_package_takes(stand_ins: None, hopper: None) -> None:
    needs = dataclasses.replace(NEEDS, patterns=frozenset({AttentionPattern(True, 100), AttentionPattern(False)}))
    assert [attention.name for attention in all_installed(needs, 256)] == ["FlashAttention-2"]


@pytest.mark.parametrize("changes", [{"device": "cpu"}, {"dtype": torch.float32}, {"kv_dtype": torch.float8_e4m3fn}])
def test_what_no_package_attends(stand_ins: None, hopper: None, changes: dict[str, Any]) -> None:
    assert installed(dataclasses.replace(NEEDS, **changes), 256) is None


@pytest.mark.parametrize(
    ("result", "says"),
    [
        (lambda out: out + 0.5, "differ from ours by 0.5"),
        (lambda out: out * float("nan"), "differ from ours by nan"),
        (lambda out: out[:-1], r"has the shape \(60, 4, 64\)"),
        (lambda out: None, "TypeError"),
        (None, "TypeError"),
    ],
)
def test_a_package_that_fails_or_differs_is_left_alone_and_the_log_says_why(
    stand_ins: None,
    hopper: None,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    result: Any,
    says: str,
) -> None:
    def broken(*arguments: Any, **named: Any) -> Any:
        if result is None:
            raise TypeError("got an unexpected keyword argument")
        return result(documented_gathered(*arguments, **named))

    brought_along(monkeypatch, "fa3_fwd_interface", broken)
    with caplog.at_level(logging.WARNING):
        assert names(16) == ["cuDNN"]
    assert "FlashAttention-3 is installed and not used: heads of 64" in caplog.text
    assert re.search(says, caplog.text)


@pytest.mark.parametrize(("wanted", "invariant"), [(None, False), ("triton", False), (None, True)])
def test_auto_chooses_per_launch_and_a_named_backend_does_not(
    stand_ins: None, hopper: None, wanted: str | None, invariant: bool
) -> None:
    capabilities = dataclasses.replace(TritonBackend.capabilities, devices=frozenset({"cuda"}))
    backends: Any = {"triton": (capabilities, TritonBackend)}
    needs = dataclasses.replace(NEEDS, batch_invariant=invariant)
    chosen: AttentionBackend = select_backend(wanted, needs, 16, backends)
    assert isinstance(chosen, TritonBackend)
    assert (chosen.long_attention is not None) == (wanted is None and not invariant)


def test_cudnn_that_gives_other_numbers_or_is_not_there_is_left_alone(
    stand_ins: None, hopper: None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.delitem(sys.modules, "fa3_fwd_interface")

    def not_there(*arguments: Any) -> Any:
        raise NotImplementedError("no kernel for this GPU")

    def of_two(*arguments: Any) -> Any:
        out, lse = dense_attention(*arguments)
        return out, lse / 0.6931471805599453

    for broken, says in ((not_there, "NotImplementedError: no kernel"), (of_two, "its numbers differ from ours by")):
        monkeypatch.setattr(cudnn_rows, "attention_of_cudnn", broken)
        caplog.clear()
        with caplog.at_level(logging.WARNING):
            assert names(16) == []
        assert f"cuDNN is installed and not used: heads of 64: {says}" in caplog.text


def test_plans_are_made_once_for_each_shape_of_heads(stand_ins: None) -> None:
    made: list[tuple[torch.Size, int, int]] = []

    def warm_up(query: torch.Tensor, layer: KVLayer, max_tokens: int, max_positions: int) -> None:
        made.append((query.shape[1:], max_tokens, max_positions))

    query, layer, _ = noise(MIXED.num_tokens)
    backend = TritonBackend(BLOCK_SIZE, dataclasses.replace(CUDNN, warm_up=warm_up))
    padding = AttentionBatch(np.array([5, 0]), np.array([64, 0]), torch.zeros(2, 16).int())
    for pattern in (AttentionPattern(True, 5), AttentionPattern(True), AttentionPattern(True)):
        with backend.every_variant(100):
            backend.attend(query[:5], layer, backend.prepare(padding, pattern, query.dtype))
        with backend.every_variant():
            backend.attend(query[:5], layer, backend.prepare(padding, pattern, query.dtype))
    assert made == [(query.shape[1:], 100, 64)]


@pytest.mark.parametrize("start", [0, 21])
def test_a_package_that_fails_in_a_step_gets_no_more_rows(
    stand_ins: None, caplog: pytest.LogCaptureFixture, start: int
) -> None:
    """A shape that cuDNN has no plan for, say: the step goes on with our kernel, in this layer and in the others."""
    calls: list[int] = []

    def failing(query: torch.Tensor, layer: KVLayer, rows: LongRows) -> torch.Tensor:
        calls.append(len(query))
        raise RuntimeError("no execution plan")

    query, layer, _ = noise(32)
    layout = AttentionBatch(np.array([32]), np.array([start + 32]), torch.from_numpy(block_tables(2))[:1])
    backend = TritonBackend(BLOCK_SIZE, dataclasses.replace(CUDNN, attend=failing, pays=lambda start, end: True))
    with caplog.at_level(logging.ERROR):
        metadata = backend.prepare(layout, AttentionPattern(True), query.dtype)
        for _ in range(2):
            actual = backend.attend(query, layer, metadata)
            torch.testing.assert_close(actual, reference(query, layer, layout), atol=1e-5, rtol=1e-5)
        backend.attend(query, layer, backend.prepare(layout, AttentionPattern(True), query.dtype))
    assert calls == [32, 32]
    assert caplog.text.count("cuDNN is not used from now on, since it failed: no execution plan") == 1
