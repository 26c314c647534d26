"""Context that waits on a CPU: each full block is written, none is lost, and no other request's is taken for it."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from dflash_backend.config import asset_path
from dflash_backend.text.tokenizer import Tokenizer
from dflash_backend.worker import step_ops
from dflash_backend.worker.step_ops import PendingContext
from dflash_kernels.cpu_ops import HAS_CPU_OPS
from load_tests.prompts import load_prompts
from tests.worker.engines import Outputs, engine

pytestmark = [
    pytest.mark.usefixtures("single_thread", "inference_mode"),
    pytest.mark.skipif(not HAS_CPU_OPS, reason="needs a C++ compiler"),
]
BLOCK_SIZE = 16


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    tokenizer = Tokenizer.load(asset_path("demo", "pair", "target"))
    return [tokenizer.encode(row.prompt) for row in load_prompts(3)]


class Engine(Outputs):
    """An engine that runs requests and shows what waits."""

    def __init__(self, **settings: Any) -> None:
        one = engine(max_model_len=512, **settings)
        super().__init__(one)
        self.runner = one.runner

    @property
    def pending(self) -> PendingContext:
        pending = self.runner.model.pending
        assert pending is not None
        return pending

    def add_resting(self, request_id: str, prompt: list[int], max_tokens: int) -> None:
        """Queue a request that never drafts."""
        self.add(request_id, prompt, k=0, max_tokens=max_tokens, temperature=0.0, ignore_eos=True)


def draft_kv(outputs: Engine, request_id: str) -> torch.Tensor:
    """The drafter's KV of the full blocks of a running request: `[layers, positions, 2, heads, head_dim]`."""
    request = outputs.core.scheduler.running[request_id]
    blocks = torch.tensor(request.block_ids[: request.num_computed // BLOCK_SIZE])
    return torch.stack([layer.data[blocks].flatten(0, 1) for layer in outputs.runner.model.kv.draft])


def test_full_blocks_have_their_context_and_others_wait(
    monkeypatch: pytest.MonkeyPatch, prompts: list[list[int]]
) -> None:
    kept: list[list[torch.Tensor]] = []
    for most_rows in (step_ops.MAX_WAITING_ROWS, 0):
        monkeypatch.setattr(step_ops, "MAX_WAITING_ROWS", most_rows)
        outputs = Engine(max_num_seqs=3)
        for index, prompt in enumerate(prompts):
            outputs.add_resting(str(index), prompt, 100)
        seen, most = [], 0
        for number in range(60):
            crowded = 30 <= number < 34  # as with more rows than may wait
            monkeypatch.setattr(step_ops, "MAX_WAITING_ROWS", min(most_rows, 2) if crowded else most_rows)
            outputs.step()
            waiting = [outputs.pending.num_waiting(index) for index in range(3)]
            assert max(waiting) < BLOCK_SIZE
            assert not (crowded and any(waiting))
            most = max(most, sum(waiting))
            seen += [draft_kv(outputs, str(index)) for index in range(3)]
        assert (most > BLOCK_SIZE) == (most_rows > 0)
        kept.append(seen)
    for waited, at_once in zip(*kept, strict=True):
        torch.testing.assert_close(waited, at_once, atol=1e-4, rtol=1e-4)


def test_a_row_of_one_token_that_drafts_waits_for_nothing_beside_others_that_rest(prompts: list[list[int]]) -> None:
    outputs = Engine(max_num_seqs=3)
    for index in range(2):
        outputs.add_resting(str(index), prompts[index], 30)
    for _ in range(5):
        outputs.step()
    outputs.add("drafts", prompts[2][:1], max_tokens=8, temperature=0.0, ignore_eos=True)
    outputs.step()
    index = outputs.runner.requests.records["drafts"].index
    waiting = {each: outputs.pending.num_waiting(each) for each in range(3)}
    assert waiting.pop(index) == 0
    assert all(waiting.values())


def test_hits_behind_a_request_that_never_drafted_draft_as_well(
    monkeypatch: pytest.MonkeyPatch, prompts: list[list[int]]
) -> None:
    counts = []
    for most_rows in (step_ops.MAX_WAITING_ROWS, 0):
        monkeypatch.setattr(step_ops, "MAX_WAITING_ROWS", most_rows)
        outputs = Engine(max_num_seqs=2)
        outputs.add_resting("first", prompts[0], 40)
        outputs.finish()
        longer = prompts[0] + outputs.tokens["first"][:34]
        outputs.add("second", longer, max_tokens=24, temperature=0.0, ignore_eos=True)
        outputs.finish()
        stats = outputs.core.stats()
        assert stats.prefix_cache_hits >= len(longer) // BLOCK_SIZE * BLOCK_SIZE - BLOCK_SIZE
        counts.append((outputs.tokens["second"], stats.spec_decoding.num_accepted_tokens))
    assert counts[0] == counts[1]
    assert counts[0][1] > 10


def test_nothing_of_a_request_that_ended_is_written_for_the_next(prompts: list[list[int]]) -> None:
    """It has the same index, and the guard knows which blocks it may write."""
    outputs = Engine(max_num_seqs=2, enable_prefix_caching=False)
    for number in range(3):
        for name in "ab":
            outputs.add_resting(f"{name}{number}", prompts[number], 21 + number)
        outputs.finish()
        assert all(outputs.pending.num_waiting(index) > 0 for index in range(2))
    for name in "ab":
        outputs.add(name, prompts[0], max_tokens=40, temperature=0.0, ignore_eos=True)
    outputs.step()
    assert not any(outputs.pending.num_waiting(index) for index in range(2))
    outputs.finish()


def test_nothing_waits_of_a_request_that_ended_once_its_blocks_may_be_those_of_another(
    prompts: list[list[int]],
) -> None:
    """All that waits is written when another drafter is put in, also where no other request has the same index."""
    outputs = Engine(max_num_seqs=2)
    outputs.add_resting("ends", prompts[0], 21)
    outputs.add_resting("runs", prompts[1], 40)
    outputs.step()
    index = outputs.runner.requests.records["ends"].index
    while "ends" in outputs.core.scheduler.running:
        outputs.step()
    assert outputs.pending.num_waiting(index) > 0
    outputs.step()
    assert outputs.pending.num_waiting(index) == 0
    outputs.finish()


def test_a_reset_drops_what_waits(prompts: list[list[int]]) -> None:
    outputs = Engine(max_num_seqs=1)
    outputs.add_resting("a", prompts[0], 30)
    for _ in range(6):
        outputs.step()
    assert outputs.pending.num_waiting(0) > 0
    outputs.runner.reset()
    assert outputs.pending.num_waiting(0) == 0


def test_all_that_waits_can_be_taken(prompts: list[list[int]]) -> None:
    """As before another drafter is put in: the tokens of each request, where they lie, with their own features."""
    outputs = Engine(max_num_seqs=3)
    for index, prompt in enumerate(prompts):
        outputs.add_resting(str(index), prompt, 40)
    for _ in range(9):
        outputs.step()
    outputs.core.collect_drafts()
    waiting = {
        outputs.runner.requests.records[name].index: request for name, request in outputs.core.scheduler.running.items()
    }
    expected = [
        (index, position, waiting[index].block_ids[position // BLOCK_SIZE] * BLOCK_SIZE + position % BLOCK_SIZE)
        for index in sorted(waiting)
        for position in range(
            waiting[index].num_computed - outputs.pending.num_waiting(index), waiting[index].num_computed
        )
    ]
    context = outputs.pending.take_all()
    assert context is not None
    assert context.token_row is not None
    found = zip(context.token_row.tolist(), context.positions.tolist(), context.slots.tolist(), strict=True)
    assert list(found) == expected
    assert len(expected) > 3
    assert len(context.features.unique(dim=0)) == len(expected)
    assert outputs.pending.take_all() is None
