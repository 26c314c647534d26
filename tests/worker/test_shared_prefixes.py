"""Requests whose KV begin with the same blocks get, when these are read once for all of them, what they get without."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from dflash_backend.attention import AttentionBatch, AttentionPattern, DeviceLengths, SharedPrefixes
from dflash_backend.attention.cascade import CascadeCost
from dflash_backend.engine import build
from dflash_backend.engine.build import BuiltEngine
from tests.support.scale import SCALE, by_night
from tests.worker.engines import Outputs, engine, triton_engine

pytest.importorskip("triton")
from dflash_backend.attention.triton_backend import TritonBackend
from dflash_kernels.shared_prefix import SharedRows

pytestmark = pytest.mark.usefixtures("single_thread")
SYSTEM = list(range(5, 29))
SIZES = {"kv_block_size": 4, "max_model_len": 64, "max_num_seqs": 5}
SIZES["num_speculative_tokens"] = 7 if SCALE >= 4 else 3


@pytest.fixture
def low_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    """Eight positions are worth it, whatever the number of queries."""
    monkeypatch.setattr(build, "MIN_SHARED_POSITIONS", 8)
    monkeypatch.setattr(CascadeCost, "of", lambda *heads: CascadeCost(1000, 0.0))


def run(built: BuiltEngine, **more: Any) -> Outputs:
    """Five requests behind one system prompt, the first of which comes earlier, and of which two ask for more."""
    outputs = Outputs(built)
    asked: list[dict[str, Any]] = [{}, {"temperature": 0.8, "seed": 3}, {}, {"repetition_penalty": 1.2}, {"k": 0}]
    for i, own in enumerate(asked):
        prompt = [*SYSTEM, *range(40 + i, 41 + 2 * i)]
        outputs.add(str(i), prompt, **({"max_tokens": 5, "temperature": 0.0, "ignore_eos": True} | own | more))
        if i == 0:
            outputs.step()
            outputs.step()
    outputs.finish()
    return outputs


def watched(built: BuiltEngine) -> list[AttentionBatch]:
    """The layouts that the target's attention is prepared for, of steps whose rows share something."""
    found: list[AttentionBatch] = []
    backend = built.runner.model.backend
    prepare = backend.prepare

    def watching(layout: AttentionBatch, *rest: Any) -> Any:
        if layout.shared is not None:
            found.append(layout)
        return prepare(layout, *rest)

    backend.prepare = watching  # type: ignore[method-assign]
    return found


def test_the_text_is_that_of_each_request_by_itself(few_layers: dict[str, Any], low_bound: None) -> None:
    """In padded steps, as graphs run them."""
    sizes = few_layers | SIZES | {"kv_write_guard": False}
    expected = run(engine(**sizes))
    built = triton_engine(**sizes)
    assert built.core.config.min_shared_positions == 8
    layouts = watched(built)
    assert run(built).tokens == expected.tokens
    shared = [int(layout.shared.rows.positions.max()) for layout in layouts if layout.shared is not None]
    assert max(shared) == len(SYSTEM)


def test_kv_in_fp8_is_read_once_too(few_layers: dict[str, Any], low_bound: None) -> None:
    """The bytes and their scales are those of the same blocks, so the text is that of each request by itself."""
    sizes = few_layers | SIZES | {"kv_write_guard": False, "kv_cache_dtype": "fp8"}
    expected = run(engine(**sizes))
    built = triton_engine(**sizes)
    layouts = watched(built)
    assert run(built).tokens == expected.tokens
    assert any(layout.shared is not None for layout in layouts)


@pytest.mark.slow
@pytest.mark.parametrize("adaptive", [by_night(False), True])
def test_steps_with_a_guard_and_with_a_budget_share_too(
    few_layers: dict[str, Any], low_bound: None, adaptive: bool
) -> None:
    sizes = few_layers | SIZES | {"kv_write_guard": not adaptive, "adaptive_speculation": adaptive}
    expected = run(engine(**sizes))
    built = triton_engine(**sizes)
    layouts = watched(built)
    assert run(built).tokens == expected.tokens
    assert any(layout.shared is not None for layout in layouts)


@pytest.mark.slow
def test_steps_that_are_not_padded_share_too(few_layers: dict[str, Any], low_bound: None) -> None:
    sizes = few_layers | SIZES | {"kv_write_guard": False}
    expected = run(engine(**sizes))
    built = triton_engine(**sizes)
    built.runner.graphs._steps.clear()
    layouts = watched(built)
    assert run(built).tokens == expected.tokens
    assert any(layout.shared is not None for layout in layouts)


@pytest.mark.parametrize(
    ("pattern", "shares"),
    [
        (AttentionPattern(causal=True), True),
        (AttentionPattern(causal=True, sinks=True), True),
        (AttentionPattern(causal=True, sliding_window=100), False),
        (AttentionPattern(causal=False), False),
    ],
)
def test_a_pattern_that_does_not_show_all_of_the_prefix_reads_each_row_by_itself(
    pattern: AttentionPattern, shares: bool
) -> None:
    lens = torch.tensor([2, 2], dtype=torch.int32)
    lengths = DeviceLengths(torch.tensor([0, 2], dtype=torch.int32), lens, lens + 4)
    group = SharedRows(*(torch.tensor(each, dtype=torch.int32) for each in ([0], [2], [4], [4, 4])))
    tables = torch.tensor([[0, 1], [0, 2]], dtype=torch.int32)
    bounds = lens.numpy().astype("int64")
    layout = AttentionBatch(bounds, bounds + 4, tables, lengths, shared=SharedPrefixes(group, 4, 4))
    found = TritonBackend(4).prepare(layout, pattern, torch.float32)
    assert (found.prefix is not None) == shares
    assert found.rows.seq_lens.tolist() == ([2, 2] if shares else [6, 6])
    assert found.rows.block_tables[:, 0].tolist() == ([1, 2] if shares else [0, 0])


def test_from_where_on_it_pays_with_the_heads_of_a_published_model() -> None:
    """Qwen3-8B: 32 heads, 8 KV heads of 128 in bfloat16. Two rows with 15 drafts make a tile of 128 lines."""
    assert CascadeCost.of(32, 8, 128, 2) == CascadeCost(queries_per_tile=32, positions_per_query=16.0)
    assert CascadeCost.of(32, 8, 128, 2, kv_itemsize=1).positions_per_query == 32.0


@pytest.mark.parametrize(
    "changes",
    [
        {"share_prefix_attention": False},
        {"batch_invariant": True},
        {"enable_prefix_caching": False},
        {"attention_backend": "torch"},
    ],
)
def test_what_switches_it_off(few_layers: dict[str, Any], changes: dict[str, Any]) -> None:
    built = triton_engine(**(few_layers | SIZES | changes))
    assert built.core.config.min_shared_positions == 0
    assert not built.runner.model.shares_prefixes


def test_by_default_rows_share_what_pays(few_layers: dict[str, Any]) -> None:
    assert triton_engine(**(few_layers | SIZES)).core.config.min_shared_positions == 512
