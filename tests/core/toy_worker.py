"""A worker without a model, for the core's tests.

The toy really keeps KV: for every slot of the target's and of the drafter's cache the prefix state (`toy_model.py`) of
what was written there. Before a row "attends" it reads every earlier position through the row's own block table and
stops when one holds anything else, so a block that is shared, freed or reserved wrongly is found where it would do
harm. Two requests agree on a slot only when salt and prefix are the same. The drafter's queries overwrite whatever lies
at their positions, as they do on a device. A position past a row's blocks is not written.

`OverlappingToy` is the same worker behind a queue: a step runs some time after it was submitted, as the test's clock of
the device says, and at the latest when its result is collected. Everything is checked when the step runs, in the
device's order, also for the rows of requests that have ended.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Collection
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import accumulate
from math import exp
from operator import mul

from dflash_backend.core.kv.block_pool import BlockPool
from dflash_backend.core.plan import (
    DraftBudget,
    DraftOutput,
    ModelRunnerOutput,
    NewRequest,
    RequestResult,
    ScheduledRequest,
    SchedulerOutput,
    StepFailed,
    StepOutOfMemory,
)
from dflash_backend.core.scheduler_config import SchedulerConfig
from tests.core.toy_checks import check_shared
from tests.core.toy_model import prefix_states, propose, root_state, verify

EMPTY = 0  # a slot that was never written
QUERY = -1  # a slot that holds the KV of a drafter's query


@dataclass
class _Held:
    """What the worker keeps of a request. `plain` are states without the salt, which tokens depend on."""

    new: NewRequest
    token_ids: list[int]
    states: list[int]
    plain: int
    block_ids: list[int] = field(default_factory=list)
    window_ids: list[int] = field(default_factory=list)
    first_start: int = 0
    num_computed: int | None = None
    drafts: list[int] = field(default_factory=list)
    confidences: list[float] = field(default_factory=list)
    # Of the layers that keep one state for all positions: the prefix state that it is behind.
    recurrent: int = EMPTY

    def extend(self, token_ids: list[int]) -> None:
        self.token_ids += token_ids
        self.states += prefix_states(token_ids, self.states[-1])
        self.plain = [self.plain, *prefix_states(token_ids, self.plain)][-1]

    def tokens_left(self, config: SchedulerConfig) -> int:
        """How many tokens may come yet; none or less for a request that has ended by its length."""
        longest = min(self.new.num_prompt_tokens + self.new.sampling.max_tokens, config.max_model_len)
        return longest - len(self.token_ids)


class ToyWorker:
    """Runs step plans on a made-up target and drafter, checking every KV read and write. Keeps the plans it saw.

    `pool` is the core's, once there is one: a write to a block that is in the prefix cache is a breach of OWN whatever
    the plan says.
    """

    overlaps = False

    def __init__(self, config: SchedulerConfig) -> None:
        self._config = config
        # A drafter that reads the token behind a position keeps its state there.
        self._shift = int(config.reads_next_tokens)
        self._held: dict[str, _Held] = {}
        self._results: deque[ModelRunnerOutput] = deque()
        # What is left of the steps that have run: injecting and drafting, which waits until it is asked for.
        self._rests: deque[Callable[[Collection[str]], DraftOutput]] = deque()
        self._is_collected = False  # and its drafts are not
        num_slots = config.num_blocks * config.block_size
        # Of tokens, positions and drafts of one request: one that ended by accepted drafts runs past its longest.
        self._max_positions = config.max_model_len + config.num_speculative_tokens + 1
        self.target_kv = [EMPTY] * num_slots
        self.drafter_kv = [EMPTY] * num_slots
        # Copies of recurrent states, by slot.
        self.snapshots: dict[int, int] = {}
        self.window_kv = [EMPTY] * (config.num_window_blocks * config.block_size)
        self.pool: BlockPool | None = None
        self.window_pool: BlockPool | None = None
        self.keep_plans = True
        self.plans: list[SchedulerOutput] = []
        self.num_steps = 0
        # A step of more tokens does not fit the made-up device's memory.
        self.max_tokens_in_memory: int | None = None
        # Whether a step fails, by what it runs. It fails midway: requests and blocks of the plan were taken in.
        self.fails: Callable[[SchedulerOutput], bool] = lambda plan: False
        # Whether injecting and drafting fail, before anything is written.
        self.fails_to_draft: Callable[[SchedulerOutput], bool] = lambda plan: False
        # Whether a step's result cannot be taken in; steps in flight are dropped then.
        self.fails_to_collect: Callable[[], bool] = lambda: False
        self._has_dropped = False
        self.num_failed = 0
        # Seconds of the target's pass and of drafting, and who is told that they have passed.
        self.target_s: Callable[[SchedulerOutput], float] = lambda plan: 0.0
        self.draft_s: Callable[[SchedulerOutput], float] = lambda plan: 0.0
        self.on_time: Callable[[float], None] = lambda seconds: None
        self.num_hidden_blocks = 0  # of rows, which their windows hide
        self.num_left_out = 0  # drafts that were not verified
        self.refused: list[SchedulerOutput] = []  # plans that did not fit the memory

    @property
    def held_ids(self) -> set[str]:
        """Requests that it was told of and not told to remove."""
        return set(self._held)

    def submit(self, plan: SchedulerOutput) -> None:
        self._check_drafts_were_collected()
        self._admit(plan)
        self._results.append(self._run(plan))

    def collect_results(self) -> ModelRunnerOutput:
        self._check_drafts_were_collected()
        if self.fails_to_collect():
            self.num_failed += 1
            self._has_dropped = True
            raise StepFailed("ValueError: something about a result")
        self._is_collected = True
        return self._results.popleft()

    def collect_drafts(self, ended: Collection[str]) -> DraftOutput:
        assert self._is_collected, "the drafts of no step, or twice"
        self._is_collected = False
        return self._rests.popleft()(ended)

    def _check_drafts_were_collected(self) -> None:
        assert not self._is_collected, "the drafts of a step were left behind"

    def reset(self) -> None:
        if self._has_dropped:
            self._has_dropped = False
            self._results.clear()
            self._rests.clear()
        assert not self._results, "a step is in flight"
        assert not self._rests, "the drafts of a step were left behind"
        self._held.clear()

    def _admit(self, plan: SchedulerOutput) -> None:
        """What is decided when a step is submitted: whether it fits the memory."""
        assert plan.num_tokens <= self._config.max_num_batched_tokens
        assert len({row.request_id for row in plan.rows}) == len(plan.rows)
        if self.max_tokens_in_memory is not None and plan.num_tokens > self.max_tokens_in_memory:
            self.refused.append(plan)
            self._take_deltas_only(plan)
            raise StepOutOfMemory(f"no memory for {plan.num_tokens} tokens")
        if self.fails(plan):
            self.num_failed += 1
            self._take_deltas_only(plan)
            for row in plan.rows:
                held = self._held[row.request_id]
                held.extend([7])
                held.drafts = []
            raise StepFailed("ValueError: something about a row")
        self.num_steps += 1
        if self.keep_plans:
            self.plans.append(plan)

    def _take_deltas_only(self, plan: SchedulerOutput) -> None:
        """Take what a plan brings that does not run."""
        self._take_deltas(plan)

    def _take_deltas(self, plan: SchedulerOutput) -> None:
        """Remove and add requests, and take the blocks that rows gained."""
        for request_id in plan.finished_req_ids:
            del self._held[request_id]
        for new in plan.new_requests:
            assert new.request_id not in self._held, f"{new.request_id} is new and already held"
            states = prefix_states(new.token_ids, root_state(new.sampling.cache_salt))
            plain = prefix_states(new.token_ids, root_state())[-1]
            self._held[new.request_id] = held = _Held(new, list(new.token_ids), states, plain)
            if new.snapshot_slot is not None:
                held.recurrent = self.snapshots[new.snapshot_slot]
        assert len(self._held) <= self._config.max_num_seqs, "more requests than the worker has rows for"
        added = {new.request_id for new in plan.new_requests}
        for row in plan.rows:
            held = self._held[row.request_id]
            held.block_ids += row.new_block_ids
            held.window_ids += row.new_window_block_ids
            assert len(held.window_ids) == (len(held.block_ids) if self.window_kv else 0), "tables are not parallel"
            if row.request_id in added:
                held.first_start = row.num_computed

    def _run(self, plan: SchedulerOutput) -> ModelRunnerOutput:
        """The step itself, all rows at once, phase by phase."""
        self._take_deltas(plan)
        work = [(row, self._held[row.request_id], self._start_of(row)) for row in plan.rows]
        for row, held, start in work:
            self._check_row(row, held, start)
            if self._config.num_state_snapshots is not None and start:
                assert held.recurrent == held.states[start - 1], f"{row} starts from the state of another prefix"
        self._check_owners(plan, work)
        check_shared(plan, work, self._config)
        if plan.budget is not None:
            self._keep_likeliest(plan.budget, [held for _, held, _ in work])

        states = [self._row_states(row, held, start) for row, held, start in work]
        for (_, held, start), row_states in zip(work, states, strict=True):
            self._write(held, held.block_ids, self.target_kv, start, row_states)
            self._write(held, held.window_ids, self.window_kv, start, row_states)
        for (_, held, start), row_states in zip(work, states, strict=True):
            self._read(held, held.block_ids, self.target_kv, held.states[:start] + row_states)
            first = max(0, start - self._config.sliding_window + 1)
            self.num_hidden_blocks += first // self._config.block_size if held.window_ids else 0
            self._read(held, held.window_ids, self.window_kv, held.states[:start] + row_states, first)
        accepted = [self._accept(row, held) for row, held, _ in work]
        for (row, held, start), result in zip(work, accepted, strict=True):
            final = start + row.num_new + result.num_accepted
            held.extend(result.token_ids)
            held.drafts, held.confidences = [], []
            held.num_computed = final
            held.recurrent = held.states[final - 1]
            if (slot := plan.snapshot_slots.get(row.request_id)) is not None:
                assert row.num_draft == 0
                self.snapshots[slot] = held.recurrent
            assert len(held.token_ids) <= self._max_positions, "more tokens than a worker keeps for a request"
        self._rests.append(partial(self._finish, plan, work))
        self.on_time(self.target_s(plan))
        return ModelRunnerOutput(plan.step_id, accepted)

    def _finish(
        self, plan: SchedulerOutput, work: list[tuple[ScheduledRequest, _Held, int]], ended: Collection[str] = ()
    ) -> DraftOutput:
        """Inject and draft."""
        if self.fails_to_draft(plan):
            self.num_failed += 1
            raise StepFailed("ValueError: something about a draft")
        for _, held, start in work:
            assert held.num_computed is not None
            states = held.states[start + self._shift : held.num_computed + self._shift]
            self._write(held, held.block_ids, self.drafter_kv, start, states)
        for row, held, _ in work:
            if row.num_next_draft and row.request_id not in ended:
                self._propose(row, held)
        draft_s = self.draft_s(plan)
        self.on_time(draft_s)
        return DraftOutput(
            plan.step_id, [held.confidences for _, held, _ in work], phase_seconds={"draft": draft_s} if draft_s else {}
        )

    def _keep_likeliest(self, budget: DraftBudget, held: list[_Held]) -> None:
        """Drop the drafts that the budget has no room for, one by one the least likely of the last ones."""
        assert budget.num_drafts < sum(len(each.drafts) for each in held), "a budget that leaves nothing out"
        chances = []
        for each, effect in zip(held, budget.effects, strict=True):
            logits = [
                offset + effect + budget.weight * confidence
                for offset, confidence in zip(budget.offsets, each.confidences, strict=False)
            ]
            chances.append(list(accumulate((1 / (1 + exp(-logit)) for logit in logits), mul)))
        while sum(len(each.drafts) for each in held) > budget.num_drafts:
            _, last = min((chances[i][len(each.drafts) - 1], -i) for i, each in enumerate(held) if each.drafts)
            held[-last].drafts.pop()
            self.num_left_out += 1

    def _start_of(self, row: ScheduledRequest) -> int:
        """Where a row starts: where the worker has got to, if that was not certain as the row was planned."""
        held = self._held[row.request_id]
        if not row.num_unverified_drafts:
            assert held.num_computed in (None, row.num_computed), f"{row} does not start at {held.num_computed}"
            return row.num_computed
        start = held.num_computed
        assert start is not None
        assert row.num_computed - row.num_unverified_drafts <= start, f"{row} starts at {start}, which is too far below"
        if held.tokens_left(self._config) > 0:
            assert start <= row.num_computed, f"{row} starts at {start}, past its upper bound"
        return start

    def _check_row(self, row: ScheduledRequest, held: _Held, start: int) -> None:
        """What the row needs of tokens, blocks and length. Of those that follow a token, only when it is not the last:
        a request that has ended, or ends in this row, goes on to draft for nothing."""
        config = self._config
        assert row.num_draft == (len(held.drafts) if row.sample else 0)
        known = start + row.num_new
        assert known == len(held.token_ids) if row.sample else known < len(held.token_ids)
        if row.num_next_draft and not row.sample:
            assert known == len(held.token_ids) - 1, "a resumed request drafts from its last token"
        if held.tokens_left(config) < 1:
            assert row.num_unverified_drafts, f"{row} is of a request that is known to have ended"
            return
        end = known + row.num_draft
        covered = len(held.block_ids) * config.block_size
        assert covered >= end, "RESERVE"
        assert end <= config.max_model_len
        if row.num_next_draft and held.tokens_left(config) > 1:
            assert covered >= end + self._num_queries(row), "RESERVE"
            # The row leaves `end + 1` tokens at most, the last of them the anchor, and the masks follow it.
            longest = end + 1 + row.num_next_draft
            assert longest <= min(config.drafter_max_len, config.max_model_len), "WINDOW"

    def _num_queries(self, row: ScheduledRequest) -> int:
        """Positions that the drafter's queries write: k masks, and for DFlash the anchor. The toy counts for itself."""
        base = self._config.lookahead_base
        return row.num_next_draft + base if row.num_next_draft and base is not None else 0

    def _check_owners(self, plan: SchedulerOutput, work: list[tuple[ScheduledRequest, _Held, int]]) -> None:
        """OWN: what a row may write (from its first uncomputed position on) is in no other request's table, not in the
        prefix cache, and in the guard's set when there is one."""
        num_holders = Counter(block_id for held in self._held.values() for block_id in held.block_ids)
        for row, held, start in work:
            written = held.block_ids[start // self._config.block_size :]
            for block_id in written:
                assert num_holders[block_id] == 1, f"OWN: {row} writes block {block_id}, which others hold"
                assert self.pool is None or not self.pool.is_cached(block_id), f"OWN: {row} writes a cached block"
            if plan.writable_block_ids is not None:
                assert plan.writable_block_ids[row.request_id] >= set(written), "OWN: not in the guard's set"
        if self.window_kv:
            self._check_window_owners(plan, work)

    def _check_window_owners(self, plan: SchedulerOutput, work: list[tuple[ScheduledRequest, _Held, int]]) -> None:
        """OWN, for the layers with a window. Of the blocks of a request those count that one of its queries may see."""
        num_holders = Counter(
            block_id for held in self._held.values() for block_id in held.window_ids[self._first_visible(held) :]
        )
        for row, held, start in work:
            written = held.window_ids[start // self._config.block_size :]
            for block_id in written:
                assert num_holders[block_id] == 1, f"OWN: {row} writes window block {block_id}, which others hold"
                assert self.window_pool is None or not self.window_pool.is_cached(block_id), (
                    f"OWN: {row} writes a cached one"
                )
            if plan.writable_window_block_ids is not None:
                assert plan.writable_window_block_ids[row.request_id] >= set(written), "OWN: not in the guard's set"

    def _first_visible(self, held: _Held) -> int:
        at = held.first_start if held.num_computed is None else held.num_computed
        return max(0, at - self._config.sliding_window + 1) // self._config.block_size

    def _row_states(self, row: ScheduledRequest, held: _Held, start: int) -> list[int]:
        known = start + row.num_new
        states = held.states[start:known]
        return states + prefix_states(held.drafts, states[-1]) if row.num_draft else states

    def _write(self, held: _Held, table: list[int], kv: list[int], start: int, values: list[int]) -> None:
        block_size = self._config.block_size
        covered = len(table) * block_size
        for position, value in enumerate(values[: max(0, covered - start)], start):
            kv[table[position // block_size] * block_size + position % block_size] = value

    def _read(self, held: _Held, table: list[int], kv: list[int], expected: list[int], first: int = 0) -> None:
        """Every position from `first` on that has a block, through the block table, a block at a time."""
        block_size = self._config.block_size
        for index in range(first // block_size, len(table)):
            start, skipped = index * block_size, max(0, first - index * block_size)
            if start >= len(expected):
                return
            wanted = expected[start + skipped : start + block_size]
            at = table[index] * block_size + skipped
            found = kv[at : at + len(wanted)]
            assert found == wanted, f"{held.new.request_id} reads {found} from {start + skipped} on, not {wanted}"

    def _accept(self, row: ScheduledRequest, held: _Held) -> RequestResult:
        if not row.sample:
            return RequestResult(row.request_id, [], 0)
        tokens = verify(held.new.seed, held.new.sampling.greedy, len(held.token_ids), held.plain, held.drafts)
        return RequestResult(row.request_id, tokens, len(tokens) - 1, num_verified=len(held.drafts))

    def _propose(self, row: ScheduledRequest, held: _Held) -> None:
        anchor = held.num_computed
        assert anchor is not None
        assert anchor == len(held.token_ids) - 1
        assert anchor + row.num_next_draft < self._max_positions, "drafts past what a worker keeps for a request"
        queries = [QUERY] * self._num_queries(row)
        self._write(held, held.block_ids, self.drafter_kv, anchor, queries)
        # Stricter than a device: the target must not need anything there either, for it has yet to run the anchor.
        self._write(held, held.block_ids, self.target_kv, anchor, queries)
        self._write(held, held.window_ids, self.window_kv, anchor, queries)
        self._read(held, held.block_ids, self.drafter_kv, held.states[self._shift : anchor + self._shift])
        held.drafts = propose(held.new.seed, held.new.sampling.greedy, anchor, held.plain, row.num_next_draft)
        own = verify(held.new.seed, held.new.sampling.greedy, anchor + 1, held.plain, held.drafts)
        # Surer of the drafts that will be accepted, but not always.
        held.confidences = [
            float(hash((18, anchor, i)) % 4 + (3 if i < len(own) - 1 else 0)) for i in range(row.num_next_draft)
        ]


class OverlappingToy(ToyWorker):
    """The toy as a device with a queue. `lag` says, at each submission if it is a function, how many steps may stay in
    the queue, not run yet: 0 runs them at once, 1 leaves the new one, 2 leaves both until the first is collected."""

    overlaps = True

    def __init__(self, config: SchedulerConfig, lag: int | Callable[[], int] = 1) -> None:
        super().__init__(config)
        self._lag = lag if callable(lag) else lambda: lag
        self._queue: deque[SchedulerOutput] = deque()
        self._uncollected: deque[SchedulerOutput] = deque()
        # Why a step that waits for the drafts of the one before cannot go on with them.
        self.next_error: Callable[[SchedulerOutput], StepFailed | StepOutOfMemory | None] = lambda plan: None

    def submit(self, plan: SchedulerOutput) -> None:
        self._check_drafts_were_collected()
        assert len(self._uncollected) <= 1, "more than one step is in flight"
        self._check_certainty(plan)
        self._admit(plan)
        self._queue.append(plan)
        self._uncollected.append(plan)
        self._run_queue(self._lag())

    def collect_results(self) -> ModelRunnerOutput:
        if not self._results:
            self._run_queue(len(self._queue) - 1)
        result = super().collect_results()
        self._uncollected.popleft()
        return result

    def collect_drafts(self, ended: Collection[str]) -> DraftOutput:
        drafts = super().collect_drafts(ended)
        if not self._queue or (error := self.next_error(self._queue[0])) is None:
            return drafts
        self.num_failed += 1
        self._take_deltas(self._queue.popleft())
        self._uncollected.popleft()
        return replace(drafts, next_error=error)

    def reset(self) -> None:
        if self._has_dropped:
            self._run_queue(0)  # a device runs them all the same
            self._uncollected.clear()
        super().reset()

    def _take_deltas_only(self, plan: SchedulerOutput) -> None:
        self._run_queue(0)  # what is ahead comes first, also with what it brings of requests and blocks
        super()._take_deltas_only(plan)

    def _run_queue(self, num_left: int) -> None:
        while len(self._queue) > num_left:
            self._results.append(self._run(self._queue.popleft()))
            drafts = self._rests.pop()(())  # a device does not wait
            self._rests.append(lambda ended, drafts=drafts: drafts)

    def _check_certainty(self, plan: SchedulerOutput) -> None:
        """A row is as uncertain as the step in flight makes it."""
        added = {new.request_id for new in plan.new_requests}
        ahead = {row.request_id: row for other in self._uncollected for row in other.rows}
        for row in plan.rows:
            other = None if row.request_id in added else ahead.get(row.request_id)
            assert row.num_unverified_drafts == (0 if other is None else other.num_draft)
