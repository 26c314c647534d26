"""A worker without a model, and the few helpers that the core's tests share.

The toy really keeps K/V: for every slot of the target's and of the drafter's cache the *prefix state* of what was
written there, a number that stands for the salt of the request that wrote it and for all of its tokens up to that
position. Before a row "attends" it reads every earlier position through the row's own block table and stops when one
holds anything else, so a block that is shared, freed or reserved wrongly is found where it would do harm. Two requests
agree on a slot only when salt and prefix are the same. The drafter's queries overwrite whatever lies at their
positions, as they do on a device.

Its target's next token is a function of the prefix. A greedy request gets just that. For a sampled one the toy mimics
rejection sampling with random numbers fixed by seed and position: the tokens depend on where draft blocks start, as
they do in truth, so an output that survives batching, chunking and preemption shows that the alignment survived too.
`toy_reference.py` has the same arithmetic without an engine.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from dflash_backend.core.block_pool import BlockPool
from dflash_backend.core.engine import EngineCore
from dflash_backend.core.plan import EngineLimits, NewRequest, RowResult, ScheduledRow, StepPlan, StepResult
from dflash_backend.messages import GenerationRequest, RequestStats, SamplingParams

VOCAB = 50
EOS = 0
EMPTY = 0  # a slot that was never written
QUERY = -1  # a slot that holds the K/V of a drafter's query

ACCEPTANCE_PERCENT = (0, 35, 75, 100)  # by the request's seed


def root_state(salt: str = "") -> int:
    """The prefix state before the first token."""
    return hash((17, *map(ord, salt)))


def next_state(state: int, token_id: int) -> int:
    """The prefix state after one token more. Hashes of integers are the same in every process."""
    return hash((state, token_id))


def prefix_states(token_ids: list[int], state: int) -> list[int]:
    """The state after each of `token_ids`, from the state before them."""
    states = []
    for token_id in token_ids:
        state = hash((state, token_id))
        states.append(state)
    return states


def greedy_token(state: int) -> int:
    """The target's next token after a prefix, whatever its salt."""
    return hash((11, state)) % VOCAB


def verify(seed: int, greedy: bool, position: int, state: int, drafts: list[int]) -> list[int]:
    """The drafts that stand and the token after them, from the state of the anchor; `position` is the first draft's."""
    tokens: list[int] = []
    for draft in drafts:
        if greedy:
            token = hash((11, state)) % VOCAB
            stands = token == draft
        else:
            stands = hash((12, seed, position, state, draft)) % 100 < ACCEPTANCE_PERCENT[seed % 4]
            token = draft if stands else hash((13, seed, position, state)) % VOCAB
        tokens.append(token)
        if not stands:
            return tokens
        state = hash((state, token))
        position += 1
    tokens.append(hash((11, state)) % VOCAB if greedy else hash((14, seed, position, state)) % VOCAB)
    return tokens


def propose(seed: int, greedy: bool, anchor: int, state: int, k: int) -> list[int]:
    """k drafts after the anchor at position `anchor`, from its state."""
    drafts, anchor_state = [], state
    for i in range(k):
        token = hash((15, seed, anchor_state, anchor, i)) % VOCAB
        if greedy and hash((16, seed, anchor, i)) % 100 < ACCEPTANCE_PERCENT[seed % 4]:
            token = hash((11, state)) % VOCAB
        drafts.append(token)
        state = hash((state, token))
    return drafts


@dataclass
class _Held:
    """What the worker keeps of a request. `plain` are states without the salt, which tokens depend on."""

    new: NewRequest
    token_ids: list[int]
    states: list[int]
    plain: int
    block_ids: list[int] = field(default_factory=list)
    num_computed: int | None = None
    drafts: list[int] = field(default_factory=list)

    def extend(self, token_ids: list[int]) -> None:
        self.token_ids += token_ids
        self.states += prefix_states(token_ids, self.states[-1])
        for token_id in token_ids:
            self.plain = hash((self.plain, token_id))


class ToyWorker:
    """Runs step plans on a made-up target and drafter, checking every K/V read and write. Keeps the plans it saw.

    `pool` is the core's, once there is one: a write to a block that is in the prefix cache is a breach of OWN whatever
    the plan says.
    """

    def __init__(self, limits: EngineLimits) -> None:
        self._limits = limits
        self._held: dict[str, _Held] = {}
        num_slots = limits.num_blocks * limits.block_size
        self.target_kv = [EMPTY] * num_slots
        self.drafter_kv = [EMPTY] * num_slots
        self.pool: BlockPool | None = None
        self.keep_plans = True
        self.plans: list[StepPlan] = []
        self.num_steps = 0

    @property
    def held_ids(self) -> set[str]:
        """Requests that it was told of and not told to forget."""
        return set(self._held)

    def execute(self, plan: StepPlan) -> StepResult:
        self.num_steps += 1
        if self.keep_plans:
            self.plans.append(plan)
        for request_id in plan.finished:
            del self._held[request_id]
        for new in plan.new:
            assert new.request_id not in self._held, f"{new.request_id} is new and already held"
            states = prefix_states(new.token_ids, root_state(new.sampling.cache_salt))
            plain = prefix_states(new.token_ids, root_state())[-1]
            self._held[new.request_id] = _Held(new, list(new.token_ids), states, plain)
        assert plan.num_tokens <= self._limits.max_num_batched_tokens
        assert len({row.request_id for row in plan.rows}) == len(plan.rows)
        helds = [self._take_row(row) for row in plan.rows]
        self._check_owners(plan, helds)

        row_states = [self._row_states(row, held) for row, held in zip(plan.rows, helds, strict=True)]
        for row, held, states in zip(plan.rows, helds, row_states, strict=True):
            self._write(held, self.target_kv, row.num_computed, states)
        for row, held, states in zip(plan.rows, helds, row_states, strict=True):
            self._read(held, self.target_kv, held.states[: row.num_computed] + states)
        results = [self._accept(row, held) for row, held in zip(plan.rows, helds, strict=True)]
        for row, held, result in zip(plan.rows, helds, results, strict=True):
            final = row.num_computed + row.num_new + result.num_accepted
            held.extend(result.token_ids)
            held.drafts = []
            held.num_computed = final
            self._write(held, self.drafter_kv, row.num_computed, held.states[row.num_computed : final])
        for row, held in zip(plan.rows, helds, strict=True):
            if row.num_next_draft:
                self._propose(row, held)
        return StepResult(plan.step_id, results)

    def _take_row(self, row: ScheduledRow) -> _Held:
        held = self._held[row.request_id]
        held.block_ids += row.new_block_ids
        assert held.num_computed in (None, row.num_computed)
        assert row.num_draft == (len(held.drafts) if row.sample else 0)
        known = row.num_computed + row.num_new
        assert known == len(held.token_ids) if row.sample else known < len(held.token_ids)
        if row.num_next_draft and not row.sample:
            assert known == len(held.token_ids) - 1, "a resumed request drafts from its last token"
        end = known + row.num_draft
        covered = len(held.block_ids) * self._limits.block_size
        assert covered >= end + self._num_queries(row), "RESERVE"
        assert end <= self._limits.max_model_len
        if row.num_next_draft:
            # The row leaves `end + 1` tokens at most, and the 1 after k is the slot of the anchor that follows.
            longest = end + 1 + row.num_next_draft + 1
            assert longest <= min(self._limits.drafter_max_len, self._limits.max_model_len), "WINDOW"
        return held

    def _num_queries(self, row: ScheduledRow) -> int:
        """Positions that the drafter's queries write: k masks, and for DFlash the anchor. The toy counts for itself."""
        return row.num_next_draft + self._limits.lookahead_base if row.num_next_draft else 0

    def _check_owners(self, plan: StepPlan, helds: list[_Held]) -> None:
        """OWN: what a row may write (from its first uncomputed position on) is in no other request's table, not in the
        prefix cache, and in the guard's set when there is one."""
        num_holders: dict[int, int] = {}
        for held in self._held.values():
            for block_id in held.block_ids:
                num_holders[block_id] = num_holders.get(block_id, 0) + 1
        for row, held in zip(plan.rows, helds, strict=True):
            written = held.block_ids[row.num_computed // self._limits.block_size :]
            for block_id in written:
                assert num_holders[block_id] == 1, f"OWN: {row} writes block {block_id}, which others hold"
                assert self.pool is None or not self.pool.is_cached(block_id), f"OWN: {row} writes a cached block"
            if plan.writable_block_ids is not None:
                assert plan.writable_block_ids[row.request_id] >= set(written), "OWN: not in the guard's set"

    def _row_states(self, row: ScheduledRow, held: _Held) -> list[int]:
        known = row.num_computed + row.num_new
        states = held.states[row.num_computed : known]
        return states + prefix_states(held.drafts, states[-1]) if row.num_draft else states

    def _write(self, held: _Held, kv: list[int], start: int, values: list[int]) -> None:
        block_size = self._limits.block_size
        for position, value in enumerate(values, start):
            kv[held.block_ids[position // block_size] * block_size + position % block_size] = value

    def _read(self, held: _Held, kv: list[int], expected: list[int]) -> None:
        """Every position through the block table, a block at a time."""
        block_size, start = self._limits.block_size, 0
        for block_id in held.block_ids:
            wanted = expected[start : start + block_size]
            found = kv[block_id * block_size : block_id * block_size + len(wanted)]
            assert found == wanted, f"{held.new.request_id} reads {found} from {start} on, not {wanted}"
            start += block_size
            if start >= len(expected):
                return

    def _accept(self, row: ScheduledRow, held: _Held) -> RowResult:
        if not row.sample:
            return RowResult(row.request_id, [], 0)
        tokens = verify(held.new.seed, held.new.sampling.greedy, len(held.token_ids), held.plain, held.drafts)
        return RowResult(row.request_id, tokens, len(tokens) - 1)

    def _propose(self, row: ScheduledRow, held: _Held) -> None:
        anchor = held.num_computed
        assert anchor is not None
        assert anchor == len(held.token_ids) - 1
        queries = [QUERY] * self._num_queries(row)
        self._write(held, self.drafter_kv, anchor, queries)
        # Stricter than a device: the target must not need anything there either, for it has yet to run the anchor.
        self._write(held, self.target_kv, anchor, queries)
        self._read(held, self.drafter_kv, held.states[:anchor])
        held.drafts = propose(held.new.seed, held.new.sampling.greedy, anchor, held.plain, row.num_next_draft)


class Clock:
    """Seconds that pass when the test says so."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def make_limits(**changes: Any) -> EngineLimits:
    """Limits that leave room for everything, but for `changes`."""
    values: dict[str, Any] = {
        "num_blocks": 64,
        "block_size": 4,
        "max_model_len": 128,
        "max_num_seqs": 8,
        "max_num_batched_tokens": 256,
        "max_queue_size": 100,
        "enable_prefix_caching": True,
        "num_speculative_tokens": 3,
        "drafter_max_len": 128,
        "kv_write_guard": True,
    }
    return EngineLimits(**(values | changes))


def make_request(request_id: str, prompt: list[int], **sampling: Any) -> GenerationRequest:
    """A greedy request of 16 tokens without a stop token, but for what `sampling` says."""
    deadline_s = sampling.pop("deadline_s", 0.0)
    eos = sampling.pop("eos_token_ids", ())
    params = SamplingParams(**({"temperature": 0.0, "seed": 3} | sampling))
    return GenerationRequest(request_id, prompt, params, eos, deadline_s)


@dataclass
class Output:
    """All deltas of one request, joined."""

    token_ids: list[int] = field(default_factory=list)
    finish_reason: str | None = None
    stats: RequestStats | None = None


class Engine:
    """An engine core on a toy worker that checks all invariants after every step and joins the deltas."""

    def __init__(self, limits: EngineLimits) -> None:
        self.clock = Clock()
        self.worker = ToyWorker(limits)
        self.core = EngineCore(limits, self.worker, self.clock)
        self.worker.pool = self.core.scheduler.kv.pool
        self.outputs: dict[str, Output] = {}

    def add(self, request: GenerationRequest) -> None:
        self.core.add_request(request)
        self.outputs[request.request_id] = Output()

    def step(self) -> None:
        self.take(self.core.step())
        self.core.check_invariants()

    def take(self, deltas: list[Any]) -> None:
        """Join deltas to the outputs."""
        assert len({delta.request_id for delta in deltas}) == len(deltas), "two deltas for one request in a step"
        for delta in deltas:
            output = self.outputs[delta.request_id]
            assert output.finish_reason is None, "a delta after the last one"
            output.token_ids += delta.token_ids
            output.finish_reason, output.stats = delta.finish_reason, delta.stats
            assert (delta.stats is None) == (delta.finish_reason is None)

    def run(self, *requests: GenerationRequest, max_steps: int = 10_000) -> list[Output]:
        """Add the requests, run until nothing is left, and return their outputs."""
        for request in requests:
            self.add(request)
        for _ in range(max_steps):
            if not self.core.has_unfinished():
                return [self.outputs[request.request_id] for request in requests]
            self.step()
        raise AssertionError(f"not done after {max_steps} steps")

    def rows_of(self, request_id: str) -> list[ScheduledRow]:
        """The rows that the request had, step by step."""
        return [row for plan in self.worker.plans for row in plan.rows if row.request_id == request_id]


def run_alone(request: GenerationRequest, limits: EngineLimits) -> Output:
    """The request's output with an engine to itself: no sharing, no chunks, no lack of blocks."""
    changes = {name: getattr(limits, name) for name in limits.__slots__}
    roomy = EngineLimits(
        **(changes | {"num_blocks": 512, "max_num_batched_tokens": 4096, "enable_prefix_caching": False})
    )
    return Engine(roomy).run(request)[0]


def greedy_continuation(prompt: list[int], count: int) -> list[int]:
    """What the target alone yields, with no engine in between."""
    state, tokens = prefix_states(prompt, root_state())[-1], []
    for _ in range(count):
        tokens.append(greedy_token(state))
        state = next_state(state, tokens[-1])
    return tokens
