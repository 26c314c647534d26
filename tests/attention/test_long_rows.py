"""Rows of many queries go to FlashAttention where it is installed and gives what it should, held against stand-ins that
do what the packages document."""

from __future__ import annotations

import dataclasses
import logging
import re
from typing import Any

import numpy as np
import pytest
import torch

from dflash_backend.attention import AttentionBackend, AttentionPattern, KVLayer, Requirements, select_backend
from dflash_backend.attention import long_rows as module
from dflash_backend.attention.long_rows import (
    MIN_POSITIONS,
    by_flash_attention_2,
    by_flash_attention_3,
    installed,
    long_rows,
)
from dflash_backend.attention.triton_backend import TritonBackend
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
from tests.support.paged import BLOCK_SIZE

NEEDS = Requirements(
    patterns=frozenset({AttentionPattern(True), AttentionPattern(True, 100), AttentionPattern(True, sinks=True)}),
    head_dims=frozenset({64, 128}),
    dtype=torch.bfloat16,
    device="cuda",
)


def documented_kvcache(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    cache_seqlens: torch.Tensor,
    page_table: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    max_seqlen_q: int,
    softmax_scale: float,
    causal: bool,
    window_size: tuple[int, int],
) -> torch.Tensor:
    """FlashAttention-3's `flash_attn_with_kvcache` with rows of queries of any number."""
    keys = torch.nn.functional.pad(cache_seqlens.cumsum(0), (1, 0))
    longest = page_table.shape[1] * k_cache.shape[1]
    return documented_varlen(
        q, k_cache, v_cache, cu_seqlens_q, keys, max_seqlen_q, longest, softmax_scale, causal, window_size, page_table
    )


@pytest.fixture
def stand_ins(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both packages, and rows of few positions that are worth it."""
    monkeypatch.setattr(module, "flash_attn_with_kvcache", documented_kvcache)
    monkeypatch.setattr(module, "flash_attn_varlen_func", documented_varlen)
    monkeypatch.setattr(module, "MIN_POSITIONS", 1)


def counted(attend: module.LongAttention, calls: list[int]) -> module.LongAttention:
    def attending(query: torch.Tensor, layer: KVLayer, rows: module.LongRows) -> torch.Tensor:
        calls.append(len(rows.seq_lens))
        return attend(query, layer, rows)

    return attending


@pytest.mark.parametrize("attend", [by_flash_attention_2, by_flash_attention_3])
@pytest.mark.parametrize("pattern", PATTERNS)
def test_long_rows_by_a_package_beside_short_ones_by_our_kernels(
    stand_ins: None, attend: module.LongAttention, pattern: AttentionPattern
) -> None:
    """Rows of 11 and of 5 queries are long where a tile of ours has 4, by 16 lines for groups of 4 heads."""
    calls: list[int] = []
    query, layer, tables = noise(MIXED.num_tokens)
    query = query.repeat_interleave(2, 1)  # groups of 4
    backend = TritonBackend(BLOCK_SIZE, counted(attend, calls))
    metadata = backend.prepare(MIXED.layout(tables), pattern, query.dtype)
    sinks = torch.tensor([0.5, -1.0, 2.0, 1.0]).repeat_interleave(2) if pattern.sinks else None
    plain = TritonBackend(BLOCK_SIZE)
    expected = plain.attend(query, layer, plain.prepare(MIXED.layout(tables), pattern, query.dtype), sinks)
    for _ in range(2):  # two layers
        actual = backend.attend(query, layer, metadata, sinks)
        for row in MIXED.real:
            torch.testing.assert_close(actual[MIXED.tokens(row)], expected[MIXED.tokens(row)], atol=1e-5, rtol=1e-5)
    assert calls == ([] if pattern.sinks else [2, 2])


@pytest.mark.parametrize("rows", [DECODE, MIXED])
def test_rows_of_one_tile_stay_with_our_kernels(stand_ins: None, rows: Rows) -> None:
    calls: list[int] = []
    if rows is MIXED:
        rows = dataclasses.replace(rows, query_bound=[8, 2, 2, 5, 1], query_lens=[8, 2, 1, 5, 1])
    query, layer, tables = noise(rows.num_tokens)
    backend = TritonBackend(BLOCK_SIZE, counted(by_flash_attention_3, calls))
    pattern = AttentionPattern(True)
    actual = run(backend, rows.layout(tables), query, layer, pattern)
    assert_rows_equal_reference(actual, rows, query, layer, tables, pattern)
    assert calls == []


def test_which_rows_are_long() -> None:
    lens, ends = np.array([40, 40, 16, 3000, 40]), np.array([5000, 900, 5000, 3000, MIN_POSITIONS + 20])
    assert long_rows(lens, ends, 0, 32, None).tolist() == [0, 3, 4]
    assert long_rows(lens, ends, 1, 32, None).tolist() == [0, 3], "it may have seen one position fewer"
    assert long_rows(lens, ends, 0, 32, MIN_POSITIONS - 1).tolist() == [], "a window shows no more"
    assert long_rows(lens, np.full(5, 40960), 40960, 32, None).tolist() == [], "a captured step"


@pytest.fixture
def hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    trial = module.trial
    monkeypatch.setattr(module, "trial", lambda *needed: trial(*needed[:3], torch.device("cpu")))


def test_the_newer_package_is_taken_where_both_are_here(stand_ins: None, hopper: None) -> None:
    assert installed(NEEDS, 256) is by_flash_attention_3
    assert installed(NEEDS, 16) is by_flash_attention_3


def test_on_another_gpu_the_older_one_is_taken_for_large_blocks(
    stand_ins: None, hopper: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (8, 9))
    assert installed(NEEDS, 256) is by_flash_attention_2
    assert installed(NEEDS, 16) is None


@pytest.mark.parametrize("changes", [{"device": "cpu"}, {"dtype": torch.float32}, {"kv_dtype": torch.float8_e4m3fn}])
def test_what_no_package_attends(stand_ins: None, hopper: None, changes: dict[str, Any]) -> None:
    assert installed(dataclasses.replace(NEEDS, **changes), 256) is None


@pytest.mark.parametrize(
    ("result", "says"),
    [
        (lambda out: out + 0.5, "differ from ours by 0.5"),
        (lambda out: out * float("nan"), "differ from ours by nan"),
        (lambda out: out[:-1], r"has the shape \(376, 4, 64\)"),
        (lambda out: (out, out), "AttributeError"),
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
        return result(documented_kvcache(*arguments, **named))

    monkeypatch.setattr(module, "flash_attn_with_kvcache", broken)
    with caplog.at_level(logging.WARNING):
        assert installed(NEEDS, 16) is None
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
    assert (chosen._long_attention is not None) == (wanted is None and not invariant)
