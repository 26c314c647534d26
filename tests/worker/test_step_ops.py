"""A step's operations decide what plain Python decides, row by row, and touch nothing else."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from dflash_backend.drafters.base import Drafts
from dflash_backend.worker.batch import BatchTraits, DeviceBatch, ForwardBatch, HostBatch, spans
from dflash_backend.worker.state import StateTensors
from dflash_backend.worker.step_ops import CpuStepOps, GpuStepOps, StepOps, select_step_ops
from dflash_kernels.gumbel_noise import gumbel_reference
from dflash_kernels.prepare_draft import prepare_draft_reference, store_drafts_reference
from tests.kernels.test_sampling import by_hand
from tests.worker.engines import PaddedStepOps
from tests.worker.random_steps import (
    DEVICE,
    MASK_ID,
    VOCAB,
    RandomStep,
    accepted_step,
    prepared_step,
    random_step,
    random_target,
)


class References(PaddedStepOps):
    """The references of what `PaddedStepOps` calls C++ for."""

    _prepare_draft = staticmethod(prepare_draft_reference)
    _store_drafts = staticmethod(store_drafts_reference)


# The references are a CPU's.
OPS: list[StepOps] = [GpuStepOps()] if torch.cuda.is_available() else [PaddedStepOps(), GpuStepOps()]
OPS_AND_REFERENCES = OPS if torch.cuda.is_available() else [*OPS, References()]
GRID = [(seed, k) for seed, k in enumerate([1, 2, 3, 7, 15, 4, 0])]


@pytest.fixture(params=OPS, ids=lambda ops: type(ops).__name__)
def ops(request: pytest.FixtureRequest) -> StepOps:
    return request.param


def host(tensor: torch.Tensor) -> np.ndarray:
    return tensor.cpu().numpy().astype(np.int64)


def real_starts(step: RandomStep) -> np.ndarray:
    rows = step.rows
    computed = host(step.state.computed)[host(rows.req_idx).clip(min=0)]
    return np.where(host(rows.num_unverified_drafts) > 0, computed, host(rows.start_bound))


@pytest.mark.parametrize(("seed", "k"), GRID)
def test_prepare_gives_tokens_positions_and_slots_of_the_batch(ops: StepOps, seed: int, k: int) -> None:
    step = random_step(seed, k, padding=False, zombies=False)
    rows, state = step.rows, step.state
    token_row, positions = spans(real_starts(step), host(rows.query_lens))
    req_idx = host(rows.req_idx)[token_row]
    prepared = prepared_step(ops, step, state)
    assert host(prepared.positions).tolist() == positions.tolist()
    assert host(prepared.slots).tolist() == slots_of(state, req_idx, positions)
    assert host(prepared.token_ids).tolist() == host(state.tokens)[req_idx, positions].tolist()
    assert host(prepared.starts).tolist() == real_starts(step).tolist()
    assert host(prepared.seq_lens).tolist() == (real_starts(step) + host(rows.query_lens)).tolist()


def slots_of(state: StateTensors, req_idx: np.ndarray, positions: np.ndarray) -> list[int]:
    """KV slots of `positions` of these requests."""
    blocks = host(state.blocks)[req_idx, positions // state.block_size]
    return (blocks * state.block_size + positions % state.block_size).tolist()


@pytest.mark.parametrize(("seed", "k"), GRID)
@pytest.mark.parametrize("graph", [False, True])
def test_a_token_of_padding_or_past_its_blocks_is_prepared_as_nothing(
    ops: StepOps, seed: int, k: int, graph: bool
) -> None:
    step = random_step(seed, k, graph=graph)
    rows, state = step.rows, step.state
    starts = np.where(host(rows.req_idx) >= 0, real_starts(step), 0)
    capacity = np.array([covered(state, req_idx) for req_idx in host(rows.req_idx).tolist()])
    prepared = prepared_step(ops, step, state)
    assert host(prepared.starts).tolist() == starts.tolist()
    assert host(prepared.seq_lens).tolist() == np.minimum(starts + host(rows.query_lens), capacity).tolist()
    for t, row in enumerate(host(rows.token_row).tolist()):
        expected = (0, 0, -1)
        position = int(starts[row]) + t - int(rows.query_start[row])
        if row >= 0 and position < capacity[row]:
            expected = looked_up(state, int(rows.req_idx[row]), position)
        got = (prepared.token_ids[t], prepared.positions[t], prepared.slots[t])
        assert tuple(int(value) for value in got) == expected


def covered(state: StateTensors, req_idx: int) -> int:
    """Positions of a row for which there are blocks and tokens; 0 for a padding row."""
    return min(int(state.num_blocks[req_idx]) * state.block_size, state.max_len) if req_idx >= 0 else 0


def looked_up(state: StateTensors, req_idx: int, position: int) -> tuple[int, int, int]:
    """Token, position and slot of a position that is covered."""
    slot = int(state.blocks[req_idx, position // state.block_size]) * state.block_size
    return int(state.tokens[req_idx, position]), position, slot + position % state.block_size


@pytest.mark.parametrize(("seed", "k"), GRID)
@pytest.mark.parametrize("graph", [False, True])
def test_the_targets_token_follows_from_logits_seed_and_position(ops: StepOps, seed: int, k: int, graph: bool) -> None:
    """Each row of logits at the temperature of its own request, with the noise of the position that it decides."""
    step = random_step(seed, k, zombies=False, graph=graph)
    logits = 2 * torch.randn(max(step.num_logits, 1), VOCAB, generator=torch.Generator().manual_seed(seed))
    state, rows = step.state, step.rows
    prepared = prepared_step(ops, step, state)
    prepared.logits = logits.to(DEVICE)
    found = ops.target_tokens(prepared, state).tolist()
    for r, start in enumerate(host(rows.logits_start).tolist()):
        req_idx, first = int(rows.req_idx[r]), int(real_starts(step)[r] + host(rows.num_new)[r])
        for j in range(int(rows.num_draft[r]) + 1 if start >= 0 else 0):
            expected = chosen_by_hand(logits[start + j], state, req_idx, first + j)
            assert found[start + j] == expected, (r, j)


def chosen_by_hand(
    logits: torch.Tensor,
    state: StateTensors,
    req_idx: int,
    position: int,
    ratio: float = 1.0,
    ids: torch.Tensor | None = None,
) -> int:
    """The column of one row of logits (`[vocab]`) in float64; with the `ids` of its columns, a draft's."""
    temperature = float(state.temperature[req_idx]) * ratio
    if temperature == 0.0:
        return int(logits.argmax())
    kept = torch.ones(len(logits), dtype=torch.bool)
    if ids is None:
        ids = torch.arange(len(logits))
        top_k, top_p, min_p = (float(each[req_idx]) for each in (state.top_k, state.top_p, state.min_p))
        kept = torch.tensor(by_hand(logits.tolist(), temperature, int(top_k), top_p, min_p)) > 0.0
    noise = gumbel_reference(state.seeds[req_idx, None].cpu(), torch.tensor([position]), ids)[0]
    return int((logits.double() / temperature + noise.double()).masked_fill(~kept, float("-inf")).argmax())


@pytest.mark.parametrize(("seed", "k"), GRID[:-1])
@pytest.mark.parametrize(("ratio", "lookahead_base"), [(0.0, 1), (0.4, 1), (1.0, 1), (1.0, 0)])
def test_a_draft_is_chosen_with_the_noise_by_which_the_target_will_choose(
    ops: StepOps, seed: int, k: int, ratio: float, lookahead_base: int
) -> None:
    """At the request's temperature times the ratio, by the target's ids, and never filtered."""
    step = random_step(seed, k, zombies=False)
    rows, state = step.rows, step.state
    ids = torch.randperm(VOCAB, generator=torch.Generator().manual_seed(seed))[:40]
    batch = ops.prepare_draft(step.inputs, state, MASK_ID, lookahead_base)
    positions = batch.draft_positions()
    logits = 2 * torch.randn(len(positions), len(ids), generator=torch.Generator().manual_seed(seed))
    sampler = ops.draft_sampler(step.inputs, state, ratio)
    drafts = sampler.choose(logits.to(DEVICE), positions, ids.to(DEVICE)).token_ids.tolist()
    owners = [(r, j) for r in range(len(rows.req_idx)) for j in range(k)]
    if ops.on_host:
        owners = [(r, j) for r, j in owners if j < int(rows.num_next_draft[r])]
    assert len(owners) == len(drafts)
    for (r, j), row, draft in zip(owners, logits, drafts, strict=True):
        req_idx = int(rows.req_idx[r])
        if req_idx >= 0 and j < int(rows.num_next_draft[r]):
            position = int(state.computed[req_idx]) + 1 + j
            assert draft == int(ids[chosen_by_hand(row, state, req_idx, position, ratio, ids)]), (r, j)


@pytest.mark.parametrize(("seed", "k"), GRID)
def test_drafts_are_accepted_up_to_the_first_that_is_not_the_targets_token(ops: StepOps, seed: int, k: int) -> None:
    step = random_step(seed, k)
    target_tokens = random_target(step, seed)
    expected = verified(step, target_tokens)
    state = step.copy_of_state()
    accepted = accepted_step(ops, step, state, target_tokens)

    starts = real_starts(step)
    for r in range(len(starts)):
        req_idx, num_new = int(step.rows.req_idx[r]), int(step.rows.num_new[r])
        count, new_tokens = expected.get(r, (0, []))
        assert int(accepted.num_accepted[r]) == count
        num_verified = int(step.rows.num_draft[r])
        assert accepted.results[r].tolist() == [count, num_verified, *new_tokens, *[0] * (k + 1 - len(new_tokens))]
        if req_idx >= 0:
            end = int(starts[r]) + num_new + count
            assert int(state.computed[req_idx]) == end
            if new_tokens and end < state.max_len:
                step.state.tokens[req_idx, end] = new_tokens[-1]
                step.state.computed[req_idx] = end
    assert torch.equal(state.tokens, step.state.tokens)


def context_slots(ops: StepOps, step: ForwardBatch, state: StateTensors) -> torch.Tensor:
    """Where the context of a step goes."""
    context = ops.context(step, state, step.positions[:, None])
    assert context is not None
    return context.slots


def verified(step: RandomStep, target_tokens: torch.Tensor) -> dict[int, tuple[int, list[int]]]:
    """Accepted drafts and new tokens of each row that samples."""
    rows, state, own = step.rows, step.state, target_tokens.tolist()
    firsts = (real_starts(step) + host(rows.num_new)).tolist()
    result = {}
    for r, start in enumerate(host(rows.logits_start).tolist()):
        if start >= 0:
            num_draft = int(rows.num_draft[r])
            positions = range(firsts[r], firsts[r] + num_draft)
            drafts = [int(state.tokens[rows.req_idx[r], at]) if at < state.max_len else 0 for at in positions]
            count = next((j for j in range(num_draft) if drafts[j] != own[start + j]), num_draft)
            result[r] = count, own[start : start + count + 1]
    return result


def test_a_length_is_known_where_no_draft_may_be_rejected() -> None:
    """Neither one of the step in flight nor one of this step; nothing is known of padding."""
    rows = np.array([[0, 5, 0, 3, 0, 2, 1], [1, 9, 2, 1, 0, 4, 1], [2, 9, 0, 1, 4, 4, 1]])
    bounds = HostBatch(["a", "b", "c"], rows, BatchTraits(sampled=False, drafts=True)).bounds(5)
    assert bounds.exact is not None
    assert bounds.exact.tolist() == [True, False, False, False, False]
    assert bounds.max_overestimate == 4


def test_most_outcomes_occur() -> None:
    """The steps above would prove little if no draft were rejected, or none accepted."""
    outcomes = set()
    for seed, k in GRID:
        step = random_step(seed, k)
        for count, tokens in verified(step, random_target(step, seed)).values():
            outcomes.add((count > 0, len(tokens) > 2))
    assert len(outcomes) == 3


def test_accept_with_no_row_that_samples_advances_what_is_computed(ops: StepOps) -> None:
    step = random_step(3, 4, padding=False, zombies=False)
    step.rows.logits_start.fill_(-1)  # what drafts a row may have are not looked at
    state = step.copy_of_state()
    accepted = accepted_step(ops, step, state, torch.zeros(0, dtype=torch.int64, device=DEVICE))
    assert accepted.results[:, 1].tolist() == step.rows.num_draft.tolist()
    assert not accepted.results[:, [0, *range(2, 7)]].any()
    assert torch.equal(state.tokens, step.state.tokens)
    ends = real_starts(step) + host(step.rows.num_new)
    assert host(state.computed)[host(step.rows.req_idx)].tolist() == ends.tolist()


@pytest.mark.parametrize(("seed", "k"), GRID)
def test_context_of_positions_that_are_final_is_injected_and_no_other(ops: StepOps, seed: int, k: int) -> None:
    step = random_step(seed, k)
    rows, state = step.rows, step.state
    prepared = accepted_step(ops, step, state, random_target(step, seed))
    slots = context_slots(ops, prepared, state)
    for t, row in enumerate(host(rows.token_row).tolist()):
        final = row >= 0 and int(prepared.positions[t]) < int(state.computed[rows.req_idx[row]])
        assert int(slots[t]) == (int(prepared.slots[t]) if final else -1)


@pytest.mark.parametrize("ops", OPS_AND_REFERENCES, ids=lambda ops: type(ops).__name__)
@pytest.mark.parametrize(("seed", "k"), GRID[:-1])
@pytest.mark.parametrize("lookahead_base", [1, 0])
def test_the_drafter_runs_anchor_and_masks_of_the_rows_that_draft(
    ops: StepOps, seed: int, k: int, lookahead_base: int
) -> None:
    """A query for each draft beside the anchor's, or one less."""
    step, width = random_step(seed, k), k + lookahead_base
    rows, state = step.rows, step.state
    queries = ops.prepare_draft(step.inputs, state, MASK_ID, lookahead_base)
    found = queries.layout.device
    assert found is not None
    assert (queries.query_len, queries.from_anchor) == (width, lookahead_base == 0)
    assert found.query_start.tolist() == [r * width for r in range(len(rows.req_idx))]
    draft_positions = queries.draft_positions().view(-1, k)
    for r, (req_idx, num_next_draft) in enumerate(
        zip(host(rows.req_idx).tolist(), host(rows.num_next_draft).tolist(), strict=True)
    ):
        drafts = req_idx >= 0 and num_next_draft > 0
        size = lookahead_base + num_next_draft if drafts else 0
        anchor = int(state.computed[req_idx])
        capacity = covered(state, req_idx)
        assert int(found.query_lens[r]) == size
        assert int(found.seq_lens[r]) == (min(anchor + size, capacity) if drafts else 0)
        if drafts and anchor + num_next_draft < capacity:
            # The bound is for the most that can be accepted, so it is as far behind the bound of the drafts.
            behind_last_draft = int(step.inputs.bounds.draft_lens[r])
            assert queries.layout.seq_lens[r] == behind_last_draft - (1 - lookahead_base) >= anchor + size
            assert draft_positions[r, :num_next_draft].tolist() == [anchor + 1 + j for j in range(num_next_draft)]
        for column in range(width):
            position, expected = anchor + column, (0, 0, -1)
            if column < size and position < capacity:
                expected = looked_up(state, req_idx, position)
                expected = expected if column == 0 else (MASK_ID, *expected[1:])
            place = r * width + column
            got = (queries.token_ids[place], queries.positions[place], queries.slots[place])
            assert tuple(int(value) for value in got) == expected


@pytest.mark.parametrize("ops", OPS_AND_REFERENCES, ids=lambda ops: type(ops).__name__)
@pytest.mark.parametrize(("seed", "k"), GRID[:-1])
def test_drafts_lie_behind_the_anchor(ops: StepOps, seed: int, k: int) -> None:
    step = random_step(seed, k)
    rows, expected = step.rows, step.copy_of_state()
    generator = torch.Generator().manual_seed(seed)
    drafts = torch.randint(VOCAB, (len(rows.req_idx), k), generator=generator).to(DEVICE)
    confidence = torch.randn(drafts.shape, generator=generator).to(DEVICE)
    for r, req_idx in enumerate(host(rows.req_idx).tolist()):
        for j in range(int(rows.num_next_draft[r]) if req_idx >= 0 else 0):
            expected.confidence[req_idx, j] = confidence[r, j]
            position = int(expected.computed[req_idx]) + 1 + j
            if position < expected.max_len:
                expected.tokens[req_idx, position] = drafts[r, j]
    ops.store_drafts(Drafts(drafts, confidence), rows, step.state)
    assert torch.equal(step.state.tokens, expected.tokens)
    assert torch.equal(step.state.confidence, expected.confidence)


def test_a_step_of_padding_alone_reads_and_writes_nothing(ops: StepOps) -> None:
    step = random_step(1, 3, num_rows=3, graph=True)
    rows, state = step.rows, step.copy_of_state()
    for name in DeviceBatch.__dataclass_fields__:
        getattr(rows, name).fill_(-1 if name in ("req_idx", "logits_start", "token_row") else 0)
    prepared = accepted = accepted_step(ops, step, state, torch.zeros(12, dtype=torch.int64, device=DEVICE))
    slots = context_slots(ops, prepared, state)
    queries = ops.prepare_draft(step.inputs, state, MASK_ID)
    ones = torch.ones(3, 3, dtype=torch.int64, device=DEVICE)
    ops.store_drafts(Drafts(ones, ones.float()), rows, state)
    for tensor in (prepared.token_ids, prepared.positions, prepared.starts, prepared.seq_lens, accepted.results):
        assert not tensor.any()
    lens = queries.layout.device
    assert lens is not None
    for tensor in (queries.token_ids, queries.positions, lens.query_lens, lens.seq_lens):
        assert not tensor.any()
    for tensor in (prepared.slots, slots, queries.slots):
        assert (tensor == -1).all()
    assert same_state(state, step.state)


@pytest.mark.parametrize(("seed", "k"), [(21, 1), (22, 6), (23, 15)])
@pytest.mark.parametrize("graph", [False, True])
def test_kernels_and_references_agree_on_a_whole_step(seed: int, k: int, graph: bool) -> None:
    step = random_step(seed, k, num_rows=5, block_size=5, graph=graph)
    target_tokens = random_target(step, seed)
    kernels = whole_step(GpuStepOps(), step, target_tokens)
    references = whole_step(PaddedStepOps(), step.to(torch.device("cpu")), target_tokens.cpu())
    for one, other in zip(kernels, references, strict=True):
        assert one.dtype == other.dtype
        assert torch.equal(one.cpu(), other)


def whole_step(ops: StepOps, step: RandomStep, target_tokens: torch.Tensor) -> list[torch.Tensor]:
    """Every operation in turn; all that they return, and the state behind them."""
    rows, state, k = step.rows, step.copy_of_state(), step.state.k
    count, device = len(rows.req_idx), target_tokens.device
    prepared = accepted = accepted_step(ops, step, state, target_tokens)
    slots = context_slots(ops, prepared, state)
    queries = ops.prepare_draft(step.inputs, state, MASK_ID)
    drafts = ops.argmax(torch.sin(torch.arange(count * k * VOCAB, device=device)).view(-1, VOCAB))
    ops.store_drafts(Drafts(drafts), rows, state)
    lens = queries.layout.device
    assert lens is not None
    found = [
        slots,
        drafts,
        accepted.results,
        queries.token_ids,
        queries.positions,
        queries.slots,
    ]
    found += [prepared.token_ids, prepared.positions, prepared.slots, prepared.starts, prepared.seq_lens]
    found += [lens.query_start, lens.query_lens, lens.seq_lens]
    return found + [value for value in vars(state).values() if isinstance(value, torch.Tensor)]


@pytest.mark.parametrize(("seed", "k"), [(31, 1), (32, 6), (33, 15), (34, 4)])
@pytest.mark.parametrize("lookahead_base", [1, 0])
def test_a_cpu_runs_the_queries_that_are_no_padding_and_stores_the_same(seed: int, k: int, lookahead_base: int) -> None:
    """Rows that draft nothing, and the places of a row behind its last draft, are left out."""
    step = random_step(seed, k).to(torch.device("cpu"))
    rows, states = step.rows, [step.copy_of_state() for _ in range(2)]
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(len(rows.req_idx) * k, VOCAB, generator=generator)
    batches = []
    for ops, state in zip((CpuStepOps(), PaddedStepOps()), states, strict=True):
        draft = ops.prepare_draft(step.inputs, state, MASK_ID, lookahead_base)
        sampler = ops.draft_sampler(step.inputs, state, temperature_ratio=0.5)
        own = logits
        if ops.on_host:
            padded = PaddedStepOps().prepare_draft(step.inputs, state, MASK_ID, lookahead_base)
            assert padded.layout.device is not None
            lens = padded.layout.device.query_lens[:, None]
            used = torch.arange(k + lookahead_base) < lens
            own = logits[used[:, lookahead_base:].flatten()]
            assert draft.token_ids.tolist() == padded.token_ids[used.flatten()].tolist()
            assert draft.slots.tolist() == padded.slots[used.flatten()].tolist()
            assert draft.layout.query_lens.tolist() == lens[lens > 0].tolist()
        ops.store_drafts(sampler.choose(own, draft.draft_positions()), rows, state)
        batches.append(draft)
    assert len(batches[0].token_ids) < len(batches[1].token_ids)
    assert same_state(*states)


def same_state(one: StateTensors, other: StateTensors) -> bool:
    names = [name for name in StateTensors.__dataclass_fields__ if isinstance(getattr(one, name), torch.Tensor)]
    return all(torch.equal(getattr(one, name), getattr(other, name)) for name in names)


def test_sampling_parameters_are_those_of_the_rows(ops: StepOps) -> None:
    state = random_step(2, 1).state
    state.temperature.add_(0.5)
    req_idx, positions = torch.tensor([3, -1, 1], device=DEVICE), torch.arange(3, device=DEVICE)
    logits = torch.randn(3, VOCAB, generator=torch.Generator().manual_seed(0)).to(DEVICE)
    chosen = ops.chosen_tokens(logits, req_idx, positions, state, sampled=True)
    assert chosen[1] == logits[1].argmax(), "padding is greedy"
    for row in (0, 2):
        own = logits[row, None], req_idx[row, None], positions[row, None]
        assert ops.chosen_tokens(*own, state, sampled=True) == chosen[row]


def test_the_device_decides_which_form_runs_unless_one_is_asked_for() -> None:
    assert type(select_step_ops(torch.device("cpu"))) is CpuStepOps
    assert type(select_step_ops(torch.device("cuda"))) is GpuStepOps
    assert type(select_step_ops(torch.device("cpu"), "triton")) is GpuStepOps
    with pytest.raises(ValueError, match="there are 'torch' and 'triton'"):
        select_step_ops(torch.device("cpu"), "cuda")
