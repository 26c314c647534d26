"""The delta rule computes what `transformers` computes in each of its forms, and the state of a request holds what was
accepted and nothing else."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers.models.qwen3_next.modeling_qwen3_next import (
    torch_chunk_gated_delta_rule,
    torch_recurrent_gated_delta_rule,
)

from dflash_backend.checkpoints import read_target
from dflash_backend.models import load_target
from dflash_backend.models.recurrent_state import StateLayout, StatePool, StateRows, pool_bytes
from dflash_kernels.delta_rule import DeltaInputs, advance, chunked, delta_block, recurrent
from tests.support.paged import block_tables, caches, context
from tests.support.tiny_models import VOCAB_SIZE, make_target

pytestmark = pytest.mark.usefixtures("single_thread", "inference_mode")
CPU = torch.device("cpu")
CLOSE = {"atol": 1e-5, "rtol": 1e-5}
HEADS, KEY_DIM, VALUE_DIM = 3, 8, 12


def tokens(num_rows: int, width: int, seed: int = 0) -> DeltaInputs:
    """Random tokens with normalised keys, as the layer gives them."""
    generator = torch.Generator().manual_seed(seed)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(num_rows, HEADS, width, *shape, generator=generator)

    queries, keys = (torch.nn.functional.normalize(random(KEY_DIM), dim=-1) for _ in range(2))
    return DeltaInputs(queries, keys, random(VALUE_DIM), random().sigmoid(), -random().exp())


def state_of(num_rows: int) -> torch.Tensor:
    return torch.randn(num_rows, HEADS, KEY_DIM, VALUE_DIM, generator=torch.Generator().manual_seed(9))


@pytest.mark.parametrize("width", [1, 2, 9, 33, 64, 65, 200])
def test_all_forms_agree_with_transformers(width: int) -> None:
    given, state = tokens(2, width), state_of(2)
    queries, keys, values, beta, log_decay = (each.transpose(1, 2) for each in given)
    for theirs in (torch_chunk_gated_delta_rule, torch_recurrent_gated_delta_rule):
        outputs, after = theirs(
            queries * KEY_DIM**0.5, keys, values, log_decay, beta, initial_state=state, output_final_state=True
        )
        for ours in (recurrent, chunked):
            found, own = ours(given, state)
            torch.testing.assert_close(found.transpose(1, 2), outputs, **CLOSE)
            torch.testing.assert_close(own, after, **CLOSE)
    if width <= 64:
        torch.testing.assert_close(delta_block(given, state).outputs.transpose(1, 2), outputs, **CLOSE)


@pytest.mark.parametrize("width", [1, 5, 40])
def test_advance_gives_the_state_after_any_number_of_a_blocks_tokens(width: int) -> None:
    given, state = tokens(width + 1, width), state_of(width + 1)
    found = advance(state, given.keys, delta_block(given, state), torch.arange(width + 1))
    for count in range(width + 1):
        first = DeltaInputs(*(each[count : count + 1, :, :count] for each in given))
        _, expected = recurrent(first, state[count : count + 1])
        torch.testing.assert_close(found[count : count + 1], expected, **CLOSE)


def test_a_state_far_in_the_past_decays_to_nothing_without_infinities() -> None:
    given = tokens(1, 64)._replace(log_decay=torch.full((1, HEADS, 64), -30.0))
    outputs, state = chunked(given, state_of(1) * 1e6)
    expected, after = recurrent(given, state_of(1) * 1e6)
    torch.testing.assert_close(outputs, expected, **CLOSE)
    torch.testing.assert_close(state, after, **CLOSE)


class Hybrid:
    """A small hybrid over paged KV, with a pool of states."""

    def __init__(self, directory: Path, num_requests: int = 4) -> None:
        make_target(directory, architecture="Qwen3NextForCausalLM", num_experts=0)
        self.target = load_target(read_target(directory), 256, torch.float32, CPU)
        decoder = self.target.spec.decoder
        self.pool = StatePool.allocate(decoder, num_requests, torch.float32, CPU)
        self.kv = caches(decoder)
        self.tables = block_tables(1)
        self.ids = torch.randint(0, VOCAB_SIZE, (200,), generator=torch.Generator().manual_seed(1))

    def run(self, start: int, ids: torch.Tensor, kept: int | None = None) -> torch.Tensor:
        """Logits of one row, of which `kept` tokens are accepted."""
        paged = context(self.tables, [start], [len(ids)], pool=self.pool)
        assert paged.states is not None
        paged.states.check()
        output = self.target.forward(ids, paged, self.kv, ())
        paged.states.commit(torch.tensor([len(ids) if kept is None else kept], dtype=torch.int32))
        return self.target.logits(output.hidden)


@pytest.fixture
def hybrid(tmp_path: Path) -> Hybrid:
    return Hybrid(tmp_path)


@pytest.mark.parametrize("good", [1, 2, 5, 9])
def test_rejected_drafts_leave_no_trace(hybrid: Hybrid, good: int) -> None:
    """State, tail and length are those of a request that ran the accepted tokens alone."""
    hybrid.run(0, hybrid.ids[:20])
    before = [tensor.clone() for tensor in hybrid.pool.tensors]
    hybrid.run(20, hybrid.ids[20 : 20 + good])
    expected = [tensor.clone() for tensor in hybrid.pool.tensors]
    for tensor, old in zip(hybrid.pool.tensors, before, strict=True):
        tensor.copy_(old)
    block = hybrid.ids[20:29].clone()
    block[good:] = (block[good:] + 1) % VOCAB_SIZE
    hybrid.run(20, block, kept=good)
    for found, wanted in zip(hybrid.pool.tensors, expected, strict=True):
        torch.testing.assert_close(found, wanted, **CLOSE)


@pytest.mark.parametrize("cuts", [(1, 2, 3, 4), (5, 70), (64, 65, 130), (66, 134)])
def test_chunks_give_the_logits_of_a_whole_prompt(hybrid: Hybrid, cuts: tuple[int, ...]) -> None:
    whole = hybrid.run(0, hybrid.ids[:140])
    borders = [0, *cuts, 140]
    parts = [hybrid.run(start, hybrid.ids[start:end]) for start, end in pairwise(borders)]
    torch.testing.assert_close(torch.cat(parts), whole, atol=1e-4, rtol=0.0)


def test_a_forward_pass_changes_no_state(hybrid: Hybrid) -> None:
    """So a step that failed can be run again."""
    hybrid.run(0, hybrid.ids[:20])
    before = [tensor.clone() for tensor in hybrid.pool.tensors]
    for start, end in ((20, 21), (20, 29), (20, 190)):
        paged = context(hybrid.tables, [start], [end - start], pool=hybrid.pool)
        hybrid.target.forward(hybrid.ids[start:end], paged, hybrid.kv, ())
    assert all(torch.equal(now, then) for now, then in zip(hybrid.pool.tensors, before, strict=True))


def rows(pool: StatePool, req_idx: list[int], starts: list[int], lens: list[int], widths: list[int]) -> StateRows:
    """Rows whose tokens lie behind one another."""
    numbers = [torch.tensor(each, dtype=torch.int32) for each in (req_idx, starts, np.cumsum([0, *lens])[:-1], lens)]
    return StateRows.of(pool, StateLayout(*numbers, widths=np.array(widths), num_tokens=max(1, sum(lens))))


def test_padding_rows_change_no_slot_of_a_request(hybrid: Hybrid) -> None:
    pool, target = hybrid.pool, hybrid.target
    hybrid.run(0, hybrid.ids[:20])
    before = [tensor.clone() for tensor in pool.tensors]
    padding = rows(pool, [-1, -1], [0, 0], [0, 0], [3, 3])
    hidden = torch.full((1, target.spec.decoder.hidden_size), float("nan"))
    for layer in target.layers:
        if hasattr(layer, "net"):
            layer.net.forward(hidden, padding)
    padding.commit(torch.zeros(2, dtype=torch.int32))
    for now, then in zip(pool.tensors, before, strict=True):
        slots = 0 if now.dim() == 1 else 1
        assert torch.equal(now.narrow(slots, 0, 4), then.narrow(slots, 0, 4))


def test_numbers_of_tokens_of_no_row_do_not_reach_a_state(hybrid: Hybrid) -> None:
    """A row that may have three tokens and has two; what lies behind them is NaN."""
    layer = next(layer for layer in hybrid.target.layers if hasattr(layer, "net"))
    hidden = torch.randn(3, hybrid.target.spec.decoder.hidden_size, generator=torch.Generator().manual_seed(2))
    found = []
    for last in (1.0, float("nan")):
        hidden[2] = last
        numbers = [torch.tensor([each], dtype=torch.int32) for each in (1, 0, 0, 2)]
        padded = StateRows.of(hybrid.pool, StateLayout(*numbers, widths=np.array([3]), num_tokens=3))
        outputs = layer.net.forward(hidden, padded)
        padded.commit(torch.tensor([2], dtype=torch.int32))
        found.append((outputs[:2], *(tensor[0, 1].clone() for tensor in hybrid.pool.tensors[:2])))
    for finite, other in zip(*found, strict=True):
        assert torch.equal(finite, other)


def test_rows_run_with_others_of_about_their_width(hybrid: Hybrid) -> None:
    lens = [1, 70, 9, 0, 1, 12, 300, 64]
    found = rows(hybrid.pool, list(range(4)) * 2, [0] * 8, lens, lens)
    assert sorted(tuple(group.rows.tolist()) for group in found.groups) == [(0, 4), (1,), (2, 5), (6,), (7,)]
    assert {group.index.shape[1] for group in found.groups} == {1, 70, 12, 300, 64}
    assert [group.may_draft for group in found.groups].count(False) == 2


def test_a_row_must_start_where_its_state_ends(hybrid: Hybrid) -> None:
    hybrid.run(0, hybrid.ids[:20])
    rows(hybrid.pool, [0], [20], [1], [1]).check()
    rows(hybrid.pool, [0], [0], [1], [1]).check()
    with pytest.raises(RuntimeError, match="slot 0 covers 20 positions, and its row starts at position 21"):
        rows(hybrid.pool, [0], [21], [1], [1]).check()


def test_the_pool_takes_the_memory_that_is_planned_for_it(hybrid: Hybrid) -> None:
    decoder = hybrid.target.spec.decoder
    assert decoder.delta_net is not None
    for dtype in (torch.float32, torch.bfloat16):
        pool = StatePool.allocate(decoder, 5, dtype, CPU)
        size = sum(tensor.numel() * tensor.element_size() for tensor in (pool.states, pool.tails))
        assert size == pool_bytes(decoder.delta_net, 5, dtype)
