"""RESERVE, WINDOW, PUBLISH and TOGETHER on the toy's KV, by content: what a query or a rejected draft would destroy.

On real models: `tests/worker/test_context_kv.py`; padding rows that write: the kernels' tests.
"""

from __future__ import annotations

import pytest

from tests.core.checked_engine import CheckedEngine
from tests.core.toy_engine import Engine, lookup, make_config, make_request
from tests.core.toy_model import ALL_ACCEPTED, NONE_ACCEPTED, greedy_continuation
from tests.core.toy_worker import QUERY

PREFIX = list(range(1, 9))  # two blocks of four


def _run_beside(engine: CheckedEngine, *prompts: list[int], **sampling: object) -> None:
    engine.add(*[make_request(f"r{i}", prompt, **({"seed": i} | sampling)) for i, prompt in enumerate(prompts)])
    engine.finish()


@pytest.mark.parametrize("length", range(1, 10))
def test_reserve_queries_stay_in_blocks_of_their_own_wherever_the_prompt_ends(length: int) -> None:
    # Neighbours in a pool of single-position blocks: one query too many would lie in the next request's block.
    engine = CheckedEngine(make_config(block_size=1, num_blocks=120))
    _run_beside(engine, *[[10 + i, *PREFIX[:length]] for i in range(4)])
    assert engine.core.stats().spec_decoding.num_drafts > 0


def test_reserve_the_first_prefill_covers_the_anchors_query_and_k_masks() -> None:
    engine = Engine(make_config(block_size=1))
    engine.add(make_request("a", PREFIX))
    engine.step()
    engine.core.collect_drafts()
    assert len(engine.scheduler.running["a"].block_ids) == 8 + 1 + 3
    assert engine.worker.drafter_kv.count(QUERY) == 1 + 3


def test_reserve_a_shared_prefix_outlives_the_drafts_of_all_who_share_it() -> None:
    engine = CheckedEngine(make_config(num_blocks=60))
    engine.add(make_request("first", [*PREFIX, 40], max_tokens=1))
    engine.finish()
    shared = [lookup(engine.pool, name) for name in _names(engine, [*PREFIX, 40])]
    before = [engine.worker.drafter_kv[block * 4 : block * 4 + 4] for block in shared]
    _run_beside(engine, *[[*PREFIX, 20 + i] for i in range(8)])
    assert [engine.worker.drafter_kv[block * 4 : block * 4 + 4] for block in shared] == before
    assert engine.core.stats().prefix_cache_hits == 8 * 8


def _names(engine: CheckedEngine, prompt: list[int]) -> list[bytes]:
    """The hashes of a prompt's full blocks."""
    engine.add(make_request("names", prompt, max_tokens=1))
    chain = engine.scheduler.waiting["names"].block_hashes
    engine.abort("names")
    return list(chain.first(len(prompt) // 4, prompt))


@pytest.mark.parametrize("drafter_max_len", range(10, 30))
def test_window_no_anchor_or_mask_lies_past_the_drafters_length(drafter_max_len: int) -> None:
    engine = Engine(make_config(drafter_max_len=drafter_max_len, block_size=1))
    (output,) = engine.run(make_request("a", PREFIX, max_tokens=40, seed=ALL_ACCEPTED))
    drafting = [row for row in engine.rows_of("a") if row.num_next_draft]
    for row in drafting:
        anchor = row.num_computed + row.num_new + row.num_draft
        assert anchor + row.num_next_draft < drafter_max_len
    assert bool(drafting) == (drafter_max_len >= 8 + 1 + 3), "and it drafts wherever that fits"
    assert output.token_ids == greedy_continuation(PREFIX, 40)


def test_publish_rejected_drafts_are_in_no_block_that_can_be_found() -> None:
    # Each step leaves three rejected positions behind.
    engine = CheckedEngine(make_config(block_size=1))
    _run_beside(engine, PREFIX, seed=NONE_ACCEPTED, max_tokens=12)
    stats = engine.core.stats().spec_decoding
    assert (stats.num_accepted_tokens, stats.num_draft_tokens) == (0, 33)
    _run_beside(engine, [*PREFIX, *greedy_continuation(PREFIX, 12), 1], seed=ALL_ACCEPTED)
    assert engine.core.stats().prefix_cache_hits == 8 + 11, "prompt and output, but the last token, which was never run"


def test_together_a_hit_brings_the_drafters_context_with_the_targets() -> None:
    engine = CheckedEngine(make_config(num_blocks=60))
    _run_beside(engine, [*PREFIX, 30], seed=ALL_ACCEPTED, max_tokens=17)
    engine.add(make_request("hit", [*PREFIX, 31], seed=ALL_ACCEPTED, max_tokens=17))
    engine.step()
    blocks = engine.scheduler.running["hit"].block_ids[:2]
    slots = [block * 4 + offset for block in blocks for offset in range(4)]
    assert [engine.worker.drafter_kv[slot] for slot in slots] == [engine.worker.target_kv[slot] for slot in slots]
    engine.finish()
    hit, miss = engine.outputs["hit"].stats, engine.outputs["r0"].stats
    assert hit.num_cached_tokens == 8
    assert hit.spec_decoding.acceptance_length == miss.spec_decoding.acceptance_length == 4.0, (
        "acceptance on a hit is that on a miss"
    )


@pytest.mark.parametrize("num_blocks", [1, 2, 3])
def test_publish_a_hit_keeps_its_last_full_block(num_blocks: int) -> None:
    engine = CheckedEngine(make_config(num_blocks=60))
    prompt = [*range(1, 4 * num_blocks + 1), 40]
    _run_beside(engine, prompt, prompt, seed=ALL_ACCEPTED, max_tokens=1)
    engine.add(make_request("later", prompt, max_tokens=4))
    engine.finish()
    stats = engine.outputs["later"].stats
    assert stats.num_cached_tokens == 4 * num_blocks
