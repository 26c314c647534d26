"""A step's operations on device state decide what the runner on the CPU decides, row by row, and touch nothing else."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from dflash_backend.sampling.filtering import SamplingRows
from dflash_backend.sampling.verify import VerifyLayout, verify_greedy, verify_sampled
from dflash_backend.worker.batch import slots_of, spans
from dflash_backend.worker.device_state import DeviceState, StepRows
from dflash_backend.worker.step_ops import StepOps, TorchStepOps, TritonStepOps, select_step_ops
from tests.worker.random_steps import DEVICE, MASK_ID, VOCAB, RandomStep, random_judgement, random_step

OPS: list[StepOps] = [TorchStepOps(), TritonStepOps()]
GRID = [(seed, k) for seed, k in enumerate([1, 2, 3, 7, 15, 4, 0])]


@pytest.fixture(params=OPS, ids=lambda ops: type(ops).__name__)
def ops(request: pytest.FixtureRequest) -> StepOps:
    return request.param


def host(tensor: torch.Tensor) -> np.ndarray:
    return tensor.cpu().numpy().astype(np.int64)


def real_starts(step: RandomStep) -> np.ndarray:
    rows = step.rows
    computed = host(step.state.computed)[host(rows.table).clip(min=0)]
    return np.where(host(rows.uncertain) > 0, computed, host(rows.start))


@pytest.mark.parametrize(("seed", "k"), GRID)
def test_prepare_gives_tokens_positions_and_slots_of_the_batch(ops: StepOps, seed: int, k: int) -> None:
    step = random_step(seed, k, padding=False, zombies=False)
    rows, state = step.rows, step.state
    token_row, positions = spans(real_starts(step), host(rows.query_lens))
    table = host(rows.table)[token_row]
    prepared = ops.prepare(rows, state)
    assert host(prepared.positions).tolist() == positions.tolist()
    assert host(prepared.slots).tolist() == slots_of(host(state.blocks), table, positions, state.block_size).tolist()
    assert host(prepared.token_ids).tolist() == host(state.tokens)[table, positions].tolist()
    assert host(prepared.starts).tolist() == real_starts(step).tolist()
    assert host(prepared.seq_lens).tolist() == (real_starts(step) + host(rows.query_lens)).tolist()


@pytest.mark.parametrize(("seed", "k"), GRID)
@pytest.mark.parametrize("graph", [False, True])
def test_a_token_of_padding_or_past_its_blocks_is_prepared_as_nothing(
    ops: StepOps, seed: int, k: int, graph: bool
) -> None:
    step = random_step(seed, k, graph=graph)
    rows, state = step.rows, step.state
    starts = np.where(host(rows.table) >= 0, real_starts(step), 0)
    room = np.array([covered(state, table) for table in host(rows.table).tolist()])
    prepared = ops.prepare(rows, state)
    assert host(prepared.starts).tolist() == starts.tolist()
    assert host(prepared.seq_lens).tolist() == np.minimum(starts + host(rows.query_lens), room).tolist()
    for t, row in enumerate(host(rows.token_row).tolist()):
        expected = (0, 0, -1)
        position = int(starts[row]) + t - int(rows.query_start[row])
        if row >= 0 and position < room[row]:
            expected = looked_up(state, int(rows.table[row]), position)
        got = (prepared.token_ids[t], prepared.positions[t], prepared.slots[t])
        assert tuple(int(value) for value in got) == expected


def covered(state: DeviceState, table: int) -> int:
    """Positions of a row for which there are blocks and tokens; 0 for a padding row."""
    return min(int(state.num_blocks[table]) * state.block_size, state.max_len) if table >= 0 else 0


def looked_up(state: DeviceState, table: int, position: int) -> tuple[int, int, int]:
    """Token, position and slot of a position that is covered."""
    slot = int(state.blocks[table, position // state.block_size]) * state.block_size
    return int(state.tokens[table, position]), position, slot + position % state.block_size


@pytest.mark.parametrize(("seed", "k"), GRID)
@pytest.mark.parametrize("sampled", [False, True])
@pytest.mark.parametrize("drawn_drafts", [False, True])
def test_accept_decides_as_the_verification_of_the_batch(
    ops: StepOps, seed: int, k: int, sampled: bool, drawn_drafts: bool
) -> None:
    step = random_step(seed, k, drawn_drafts=drawn_drafts)
    best, probs = random_judgement(step, seed)
    step.rows.sampled.fill_(sampled)
    expected = verified(step, best, probs)
    state = step.copy_of_state()
    prepared = ops.prepare(step.rows, state)
    accepted = ops.accept(best, probs if sampled else None, step.rows, prepared, state)

    starts = real_starts(step)
    for r in range(len(starts)):
        table, num_new = int(step.rows.table[r]), int(step.rows.num_new[r])
        count, new_tokens = expected.get(r, (0, []))
        assert int(accepted.count[r]) == count
        assert accepted.tokens[r].tolist() == new_tokens + [0] * (k + 1 - len(new_tokens))
        if table >= 0:
            end = int(starts[r]) + num_new + count
            assert int(state.computed[table]) == end
            if new_tokens and end < state.max_len:
                step.state.tokens[table, end] = new_tokens[-1]
                step.state.computed[table] = end
    assert torch.equal(state.tokens, step.state.tokens)


def verified(step: RandomStep, best: torch.Tensor, probs: torch.Tensor) -> dict[int, tuple[int, list[int]]]:
    """By `sampling.verify`: accepted drafts and new tokens of each row that samples."""
    rows, state = step.rows, step.state
    which = np.flatnonzero(host(rows.dist_start) >= 0)
    if len(which) == 0:
        return {}
    table = rows.table.long()[which]
    first = torch.from_numpy((real_starts(step) + host(rows.num_new))[which]).to(DEVICE)
    layout = VerifyLayout.build(host(rows.num_draft)[which], DEVICE)
    columns = layout.draft_columns
    places = first[layout.draft_rows] + columns
    drafts = state.tokens[table[layout.draft_rows], places.clamp(max=state.max_len - 1)]
    drafts = torch.where(places < state.max_len, drafts, 0)
    if rows.sampled[which[0]]:
        draft_probs = None
        if state.draft_probs is not None:
            draft_probs = state.draft_probs[table[layout.draft_rows], columns]
        parameters = state.sampling_rows(table, False, False)
        count, following = verify_sampled(probs, draft_probs, drafts, first, parameters, layout)
    else:
        count, following = verify_greedy(best, drafts, layout)
    result = {}
    for i, row in enumerate(which.tolist()):
        own = drafts[layout.draft_rows == i].tolist()[: int(count[i])]
        result[row] = (int(count[i]), [*own, int(following[i])])
    return result


def test_most_outcomes_occur() -> None:
    """The steps above would prove little if no draft fell, or none stood."""
    outcomes = set()
    for seed, k in GRID:
        step = random_step(seed, k)
        for count, tokens in verified(step, *random_judgement(step, seed)).values():
            outcomes.add((count > 0, len(tokens) > 2))
    assert len(outcomes) == 3


def test_accept_with_no_row_that_samples_advances_what_is_computed(ops: StepOps) -> None:
    step = random_step(3, 4, padding=False, zombies=False)
    step.rows.dist_start.fill_(-1)
    step.rows.num_draft.zero_()
    state = step.copy_of_state()
    accepted = ops.accept(
        torch.zeros(0, dtype=torch.int64, device=DEVICE), None, step.rows, ops.prepare(step.rows, state), state
    )
    assert not accepted.count.any()
    assert not accepted.tokens.any()
    assert torch.equal(state.tokens, step.state.tokens)
    ends = real_starts(step) + host(step.rows.num_new)
    assert host(state.computed)[host(step.rows.table)].tolist() == ends.tolist()


def test_a_residual_of_nothing_falls_back_to_the_target(ops: StepOps) -> None:
    """p and q equal, and a draft that falls all the same since p of it is 0: the draw is from p itself."""
    step = random_step(0, 1, num_rows=1, padding=False, zombies=False)
    state, rows = step.state, step.rows
    table = int(rows.table[0])
    for name, value in {
        "start": 3,
        "uncertain": 0,
        "num_new": 1,
        "num_draft": 1,
        "query_lens": 2,
        "sampled": 1,
    }.items():
        getattr(rows, name).fill_(value)
    rows.dist_start.zero_()
    state.tokens[table, 4] = 9
    probs = torch.zeros(2, VOCAB, device=DEVICE)
    probs[:, 5] = 1.0
    assert state.draft_probs is not None
    state.draft_probs[table, 0] = probs[0]
    prepared = ops.prepare(rows, state)
    accepted = ops.accept(probs.argmax(-1), probs, rows, prepared, state)
    assert (int(accepted.count[0]), accepted.tokens[0].tolist()) == (0, [5, 0])


@pytest.mark.parametrize(("seed", "k"), GRID)
def test_context_of_positions_that_are_final_is_injected_and_no_other(ops: StepOps, seed: int, k: int) -> None:
    step = random_step(seed, k)
    rows, state = step.rows, step.state
    prepared = ops.prepare(rows, state)
    ops.accept(random_judgement(step, seed)[0], None, rows, prepared, state)
    slots = ops.inject_slots(rows, prepared, state)
    for t, row in enumerate(host(rows.token_row).tolist()):
        final = row >= 0 and int(prepared.positions[t]) < int(state.computed[rows.table[row]])
        assert int(slots[t]) == (int(prepared.slots[t]) if final else -1)


@pytest.mark.parametrize(("seed", "k"), GRID[:-1])
def test_the_drafter_runs_anchor_and_masks_of_the_rows_that_draft(ops: StepOps, seed: int, k: int) -> None:
    step = random_step(seed, k)
    rows, state = step.rows, step.state
    queries = ops.prepare_draft(rows, state, MASK_ID)
    assert queries.query_start.tolist() == [r * (k + 1) for r in range(len(rows.table))]
    for r, (table, num_next) in enumerate(zip(host(rows.table).tolist(), host(rows.num_next).tolist(), strict=True)):
        drafts = table >= 0 and num_next > 0
        size = 1 + num_next if drafts else 0
        anchor = int(state.computed[table])
        room = covered(state, table)
        assert int(queries.query_lens[r]) == size
        assert int(queries.seq_lens[r]) == (min(anchor + size, room) if drafts else 0)
        for column in range(k + 1):
            position, expected = anchor + column, (0, 0, -1)
            if column < size and position < room:
                expected = looked_up(state, table, position)
                expected = expected if column == 0 else (MASK_ID, *expected[1:])
            got = (queries.token_ids[r, column], queries.positions[r, column], queries.slots[r, column])
            assert tuple(int(value) for value in got) == expected


@pytest.mark.parametrize(("seed", "k"), GRID[:-1])
def test_drafts_and_what_they_were_drawn_from_lie_behind_the_anchor(ops: StepOps, seed: int, k: int) -> None:
    step = random_step(seed, k)
    rows, expected = step.rows, step.copy_of_state()
    assert expected.draft_probs is not None
    generator = torch.Generator().manual_seed(seed)
    drafts = torch.randint(VOCAB, (len(rows.table), k), generator=generator).to(DEVICE)
    probs = torch.rand(len(rows.table), k, VOCAB, generator=generator).to(DEVICE)
    for r, table in enumerate(host(rows.table).tolist()):
        for j in range(int(rows.num_next[r]) if table >= 0 else 0):
            place = int(expected.computed[table]) + 1 + j
            if place < expected.max_len:
                expected.tokens[table, place] = drafts[r, j]
            if rows.sampled[r]:
                expected.draft_probs[table, j] = probs[r, j]
    ops.store_drafts(drafts, rows, step.state, probs)
    assert torch.equal(step.state.tokens, expected.tokens)
    assert step.state.draft_probs is not None
    assert torch.equal(step.state.draft_probs, expected.draft_probs)


def test_a_step_of_padding_alone_reads_and_writes_nothing(ops: StepOps) -> None:
    step = random_step(1, 3, num_rows=3, graph=True)
    rows, state = step.rows, step.copy_of_state()
    for name in StepRows.__dataclass_fields__:
        getattr(rows, name).fill_(-1 if name in ("table", "dist_start", "token_row") else 0)
    prepared = ops.prepare(rows, state)
    best, probs = torch.zeros(12, dtype=torch.int64, device=DEVICE), torch.full((12, VOCAB), 0.1, device=DEVICE)
    accepted = ops.accept(best, probs, rows, prepared, state)
    slots = ops.inject_slots(rows, prepared, state)
    queries = ops.prepare_draft(rows, state, MASK_ID)
    ops.store_drafts(torch.ones(3, 3, dtype=torch.int64, device=DEVICE), rows, state, probs[:9].view(3, 3, VOCAB))
    for tensor in (prepared.token_ids, prepared.positions, prepared.starts, prepared.seq_lens, accepted.count):
        assert not tensor.any()
    for tensor in (accepted.tokens, queries.token_ids, queries.positions, queries.query_lens, queries.seq_lens):
        assert not tensor.any()
    for tensor in (prepared.slots, slots, queries.slots):
        assert (tensor == -1).all()
    assert same_state(state, step.state)


@pytest.mark.parametrize(("seed", "k"), [(21, 1), (22, 6), (23, 15)])
@pytest.mark.parametrize("graph", [False, True])
@pytest.mark.parametrize("drawn_drafts", [False, True])
def test_both_forms_agree_on_a_whole_step(seed: int, k: int, graph: bool, drawn_drafts: bool) -> None:
    step = random_step(seed, k, num_rows=5, block_size=5, graph=graph, drawn_drafts=drawn_drafts)
    judgement = random_judgement(step, seed)
    outcomes, states = [], []
    for form in OPS:
        state = step.copy_of_state()
        outcomes.append(whole_step(form, step, state, *judgement))
        states.append(state)
    for one, other in zip(*outcomes, strict=True):
        assert one.dtype == other.dtype
        assert torch.equal(one, other)
    assert same_state(*states)


def whole_step(
    ops: StepOps, step: RandomStep, state: DeviceState, best: torch.Tensor, probs: torch.Tensor
) -> list[torch.Tensor]:
    """Every operation in turn; all that they return."""
    rows, k = step.rows, state.k
    prepared = ops.prepare(rows, state)
    accepted = ops.accept(best, probs, rows, prepared, state)
    slots = ops.inject_slots(rows, prepared, state)
    queries = ops.prepare_draft(rows, state, MASK_ID)
    drafts = ops.best(torch.sin(torch.arange(len(rows.table) * k * VOCAB, device=DEVICE)).view(-1, VOCAB)).view(-1, k)
    kept = None if state.draft_probs is None else torch.full((len(rows.table), k, VOCAB), 0.5, device=DEVICE)
    ops.store_drafts(drafts, rows, state, kept)
    parts = (prepared, accepted, queries)
    return [slots, drafts, *(getattr(part, name) for part in parts for name in part.__dataclass_fields__)]


def test_no_operation_of_the_torch_form_looks_at_a_value() -> None:
    """With tensors that have no values: one that asked for a value, or for a shape that depends on one, would raise."""
    step = random_step(5, 3)
    best, probs = random_judgement(step, 5)
    with FakeTensorMode() as mode:
        faked = {name: mode.from_tensor(getattr(step.rows, name)) for name in StepRows.__dataclass_fields__}
        rows = StepRows(**faked)
        state = step.state
        for name in DeviceState.__dataclass_fields__:
            if isinstance(getattr(state, name), torch.Tensor):
                setattr(state, name, mode.from_tensor(getattr(state, name)))
        parameters = state.sampling_rows(rows.table, True, True)
        TorchStepOps().probabilities(mode.from_tensor(probs)[: len(rows.table)], parameters)
        fake_step = RandomStep(state, rows, step.num_distributions)
        outcome = whole_step(TorchStepOps(), fake_step, state, mode.from_tensor(best), mode.from_tensor(probs))
    assert [tensor.shape[0] for tensor in outcome[:2]] == [len(rows.token_row), len(rows.table)]


def same_state(one: DeviceState, other: DeviceState) -> bool:
    names = [name for name in DeviceState.__dataclass_fields__ if isinstance(getattr(one, name), torch.Tensor)]
    return all(torch.equal(getattr(one, name), getattr(other, name)) for name in names)


def test_drawn_drafts_without_room_for_their_distributions_are_refused(ops: StepOps) -> None:
    step = random_step(1, 2, drawn_drafts=False)
    drafts = torch.zeros(7, 2, dtype=torch.int64, device=DEVICE)
    with pytest.raises(RuntimeError, match="keep_draft_probs"):
        ops.store_drafts(drafts, step.rows, step.state, torch.zeros(7, 2, VOCAB, device=DEVICE))


def test_a_layout_buffer_that_is_too_small_is_refused() -> None:
    with pytest.raises(ValueError, match="at least 40 numbers"):
        StepRows.over(torch.zeros(39, dtype=torch.int32), 3)


def test_sampling_parameters_are_those_of_the_rows() -> None:
    state = random_step(2, 1).state
    picked: SamplingRows = state.sampling_rows(torch.tensor([3, -1, 1], device=DEVICE), True, False)
    assert picked.temperature[[0, 2]].tolist() == state.temperature[[3, 1]].tolist()
    assert picked.seeds[[0, 2]].tolist() == state.seeds[[3, 1]].tolist()
    assert (picked.any_top_k_or_p, picked.any_min_p) == (True, False)


def test_the_device_decides_which_form_runs_unless_one_is_asked_for() -> None:
    assert type(select_step_ops(torch.device("cpu"))) is TorchStepOps
    assert type(select_step_ops(torch.device("cuda"))) is TritonStepOps
    assert type(select_step_ops(torch.device("cpu"), "triton")) is TritonStepOps
    assert type(select_step_ops(torch.device("cuda"), "torch")) is TorchStepOps
    with pytest.raises(ValueError, match="there are 'torch' and 'triton'"):
        select_step_ops(torch.device("cpu"), "cuda")
