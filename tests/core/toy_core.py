"""A worker without a model, and the few helpers that the core's tests share.

The toy really keeps K/V: a map from (block, offset) to the position and token written there, for the target and for the
drafter. Before a row "attends" it reads every earlier position through the row's own block table and stops when one
holds anything else, so a block that is shared, freed or reserved wrongly is found where it would do harm. The drafter's
queries overwrite whatever lies at their positions, as they do on a device.

Its target's next token is a function of the prefix. A greedy request gets just that. For a sampled one the toy mimics
rejection sampling with random numbers fixed by seed and position: the tokens depend on where draft blocks start, as
they do in truth, so an output that survives batching, chunking and preemption shows that the alignment survived too.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from dflash_backend.core.engine import EngineCore
from dflash_backend.core.plan import EngineLimits, NewRequest, RowResult, ScheduledRow, StepPlan, StepResult
from dflash_backend.messages import GenerationRequest, RequestStats, SamplingParams

VOCAB = 50
EOS = 0
QUERY = "a drafter's query"

_KV = dict[tuple[int, int], Any]  # (block, offset) -> (position, token) or QUERY


def prefix_state(token_ids: list[int], state: int = 1) -> int:
    """A number that stands for all of `token_ids`; pass the state of a prefix to go on from it."""
    for token_id in token_ids:
        state = hash((state, token_id))
    return state


def greedy_token(state: int) -> int:
    """The target's next token after a prefix."""
    return hash((11, state)) % VOCAB


def greedy_continuation(prompt: list[int], count: int) -> list[int]:
    """What the target alone yields, with no engine in between."""
    state, tokens = prefix_state(prompt), []
    for _ in range(count):
        tokens.append(greedy_token(state))
        state = prefix_state(tokens[-1:], state)
    return tokens


@dataclass
class _Held:
    """What the worker keeps of a request."""

    new: NewRequest
    token_ids: list[int]
    block_ids: list[int] = field(default_factory=list)
    num_computed: int | None = None
    drafts: list[int] = field(default_factory=list)

    @property
    def greedy(self) -> bool:
        return self.new.sampling.greedy

    @property
    def acceptance_percent(self) -> int:
        return (0, 35, 75, 100)[self.new.seed % 4]


class ToyWorker:
    """Runs step plans on a made-up target and drafter, checking every K/V read and write. Keeps the plans it saw."""

    def __init__(self, limits: EngineLimits) -> None:
        self._limits = limits
        self._held: dict[str, _Held] = {}
        self._target_kv: _KV = {}
        self._drafter_kv: _KV = {}
        self.plans: list[StepPlan] = []

    @property
    def held_ids(self) -> set[str]:
        """Requests that it was told of and not told to forget."""
        return set(self._held)

    def execute(self, plan: StepPlan) -> StepResult:
        self.plans.append(plan)
        for request_id in plan.finished:
            del self._held[request_id]
        for new in plan.new:
            assert new.request_id not in self._held, f"{new.request_id} is new and already held"
            self._held[new.request_id] = _Held(new, list(new.token_ids))
        assert plan.num_tokens <= self._limits.max_num_batched_tokens
        assert len({row.request_id for row in plan.rows}) == len(plan.rows)
        for row in plan.rows:
            self._take_row(row)

        for row in plan.rows:
            self._write(plan, row, self._target_kv, row.num_computed, self._row_tokens(row))
        for row in plan.rows:
            self._read(row, self._target_kv, row.num_computed + row.num_new + row.num_draft, self._row_tokens(row))
        results = [self._accept(row) for row in plan.rows]
        for row, result in zip(plan.rows, results, strict=True):
            held = self._held[row.request_id]
            final = row.num_computed + row.num_new + result.num_accepted
            held.token_ids += result.token_ids
            held.drafts = []
            held.num_computed = final
            self._write(plan, row, self._drafter_kv, row.num_computed, held.token_ids[row.num_computed : final])
        for row in plan.rows:
            if row.num_next_draft:
                self._propose(plan, row)
        return StepResult(plan.step_id, results)

    def _take_row(self, row: ScheduledRow) -> None:
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
        assert covered >= end + self._limits.lookahead(row.num_next_draft), "RESERVE"
        assert end <= self._limits.max_model_len
        if row.num_next_draft:
            assert end + row.sample + row.num_next_draft <= self._limits.drafter_max_len, "WINDOW"

    def _row_tokens(self, row: ScheduledRow) -> list[int]:
        held = self._held[row.request_id]
        return held.token_ids[row.num_computed : row.num_computed + row.num_new] + held.drafts[: row.num_draft]

    def _slot(self, row: ScheduledRow, position: int) -> tuple[int, int]:
        index, offset = divmod(position, self._limits.block_size)
        return self._held[row.request_id].block_ids[index], offset

    def _write(self, plan: StepPlan, row: ScheduledRow, kv: _KV, start: int, tokens: list[Any]) -> None:
        for position, token in enumerate(tokens, start):
            block_id, offset = self._slot(row, position)
            if plan.writable_block_ids is not None:
                assert block_id in plan.writable_block_ids[row.request_id], "OWN: not in the guard's set"
            kv[block_id, offset] = token if token is QUERY else (position, token)
        first = start // self._limits.block_size
        written = set(self._held[row.request_id].block_ids[first:])
        for request_id, other in self._held.items():
            assert request_id == row.request_id or written.isdisjoint(other.block_ids), "OWN: shared with a live row"

    def _read(self, row: ScheduledRow, kv: _KV, end: int, row_tokens: list[int]) -> None:
        tokens = self._held[row.request_id].token_ids[: row.num_computed] + row_tokens
        for position in range(end):
            found = kv.get(self._slot(row, position))
            assert found == (position, tokens[position]), f"{row} reads {found} at {position}, not {tokens[position]}"

    def _accept(self, row: ScheduledRow) -> RowResult:
        if not row.sample:
            return RowResult(row.request_id, [], 0)
        held = self._held[row.request_id]
        state, tokens = prefix_state(held.token_ids), []
        for draft in held.drafts:
            position = len(held.token_ids) + len(tokens)
            if held.greedy:
                token = greedy_token(state)
                stands = token == draft
            else:
                stands = hash((12, held.new.seed, position, state, draft)) % 100 < held.acceptance_percent
                token = draft if stands else hash((13, held.new.seed, position, state)) % VOCAB
            tokens.append(token)
            state = prefix_state([token], state)
            if not stands:
                return RowResult(row.request_id, tokens, len(tokens) - 1)
        position = len(held.token_ids) + len(tokens)
        tokens.append(greedy_token(state) if held.greedy else hash((14, held.new.seed, position, state)) % VOCAB)
        return RowResult(row.request_id, tokens, len(tokens) - 1)

    def _propose(self, plan: StepPlan, row: ScheduledRow) -> None:
        held = self._held[row.request_id]
        assert held.num_computed is not None
        anchor = held.num_computed
        assert anchor == len(held.token_ids) - 1
        queries = [QUERY] * self._limits.lookahead(row.num_next_draft)
        self._write(plan, row, self._drafter_kv, anchor, queries)
        # Stricter than a device: the target must not need anything there either, for it has yet to run the anchor.
        self._write(plan, row, self._target_kv, anchor, queries)
        context = held.token_ids[row.num_computed : anchor]
        self._read(row, self._drafter_kv, anchor, context)
        state = anchor_state = prefix_state(held.token_ids)
        for i in range(row.num_next_draft):
            token = hash((15, held.new.seed, anchor_state, anchor, i)) % VOCAB
            if held.greedy and hash((16, held.new.seed, anchor, i)) % 100 < held.acceptance_percent:
                token = greedy_token(state)
            held.drafts.append(token)
            state = prefix_state([token], state)


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
        self.outputs: dict[str, Output] = {}

    def add(self, request: GenerationRequest) -> None:
        self.core.add_request(request)
        self.outputs[request.request_id] = Output()

    def step(self) -> None:
        deltas = self.core.step()
        assert len({delta.request_id for delta in deltas}) == len(deltas), "two deltas for one request in a step"
        for delta in deltas:
            output = self.outputs[delta.request_id]
            assert output.finish_reason is None, "a delta after the last one"
            output.token_ids += delta.token_ids
            output.finish_reason, output.stats = delta.finish_reason, delta.stats
            assert (delta.stats is None) == (delta.finish_reason is None)
        self.core.check_invariants()

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
