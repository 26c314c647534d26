"""What the core asks of the worker in a step, and what it gets back. Plain numbers: no tensors.

The worker keeps, for each request that it was told of, the token ids, the block table and the drafts that it
proposed; the plan carries only what changed. Draft token values never come here: the core plans with their number.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Protocol

import msgspec

from dflash_backend.messages import ErrorStatus, SamplingParams, TokenLogprobs

# Groups of rows in a step that read the beginning of their KV together, at most, and rows of one, at least: with fewer,
# what is saved is hardly more than what a launch and the merge of two results cost.
MAX_SHARED_PREFIXES = 4
MIN_SHARING_ROWS = 4


@dataclass(frozen=True, slots=True)
class NewRequest:
    """A request that the worker does not hold: admitted now, or resumed after preemption.

    `token_ids` are the prompt and every token generated so far; `seed` is resolved (never None). `snapshot_slot`: the
    slot of the recurrent state that its first row starts from; None where that starts at position 0, or where there is
    no such state.
    """

    request_id: str
    token_ids: list[int]
    num_prompt_tokens: int
    sampling: SamplingParams
    eos_token_ids: tuple[int, ...]
    seed: int
    snapshot_slot: int | None = None


@dataclass(frozen=True, slots=True)
class MeasuredStep:
    """A step that the worker measured at start, over rows without context: rows, target tokens, drafts that each row
    proposes, seconds of the target's pass and of drafting."""

    num_rows: int
    num_tokens: int
    draft_width: int
    target_s: float
    draft_s: float


class ScheduledRequest(msgspec.Struct, frozen=True):
    """One request's row in a step. (A msgspec struct: a step has hundreds, and they are cheap to make.)

    The target runs the positions `[num_computed, num_computed + num_new + num_draft)`: `num_new` known tokens, then the
    `num_draft` tokens that the worker proposed for this request in the step before; with a budget the first of them.
    sample: the row's last known token is the request's last one, so the row yields tokens (implied by `num_draft` > 0).
    num_next_draft: k for the drafts proposed after this step; 0 for none. A row with `sample` false and
    `num_next_draft` > 0 ends the prefill of a resumed request: the drafter goes on from its last token, the anchor.
    new_block_ids: appended to the request's block table before the step.
    new_window_block_ids: the same for the block table of the target's layers with a window, where those have blocks of
    their own; entries that no query will see are undefined. num_unverified_drafts: drafts
    of this request that the step in flight is verifying (0 if none). Then `num_computed` is an upper bound over the
    outcomes that do not end the request; the true start, known only to the worker, is at most this much lower. If the
    step in flight ends the request, the row runs for nothing: it may then start past `num_computed` and reach past its
    blocks, and a position that no block covers is not written. num_positions: the request's blocks cover every position
    below it (RESERVE).
    """

    request_id: str
    num_computed: int
    num_new: int
    num_draft: int
    sample: bool
    num_next_draft: int
    new_block_ids: list[int]
    num_unverified_drafts: int = 0
    num_positions: int = 0
    new_window_block_ids: list[int] = []


class DraftBudget(msgspec.Struct, frozen=True):
    """Which of a step's drafts are verified: of all rows together the `num_drafts` with the highest chance that they
    and all before them in their row are accepted. Since that chance never grows within a row, they are the first
    drafts of each row.

    The chance of draft i of row r when those before it are accepted is `sigmoid(offsets[i] + effects[r] + weight * c)`,
    c being the drafter's confidence in it, which the worker keeps with the draft. offsets: for k drafts. effects: for
    each of the plan's rows.
    """

    num_drafts: int
    weight: float
    offsets: list[float]
    effects: list[float]


@dataclass(frozen=True, slots=True)
class SharedPrefix:
    """Neighbouring rows of a plan, from `first_row` on, whose block tables begin with the same `num_blocks` blocks. All
    positions of those are final and lie before each row's first."""

    first_row: int
    num_rows: int
    num_blocks: int


@dataclass(frozen=True, slots=True)
class SchedulerOutput:
    """One step. The worker first removes the requests of `finished_req_ids` (also preempted ones), then adds those of
    `new_requests`, then runs all `rows` together, decode rows and prefill chunks alike.

    num_prefill_tokens: known tokens of the rows that are chunks of prompts. snapshot_slots: by request id, where the
    recurrent state after a row is copied once the row has run; only rows without drafts have one.
    budget: which drafts of the rows are verified; None: all. Then a row's `num_draft` is how many it may verify at
    most. A worker that cannot choose by confidence may verify fewer than the budget, the first ones of each row.
    wants_confidence: whether the results shall have the drafter's confidences, and the next step may have a
    budget; a captured step does so anyway.

    shared_prefixes: decode rows that share so much of the beginning of their KV that it pays to read it once for all of
    them; at most `MAX_SHARED_PREFIXES`, ascending; none beside chunks of prompts.

    `writable_block_ids` is given only when `kv_write_guard` is on: for each row the ids of the blocks it may write
    (invariant OWN), by request id; `writable_window_block_ids` likewise those of layers with a window, where these have
    blocks of their own.
    """

    step_id: int
    rows: list[ScheduledRequest]
    new_requests: list[NewRequest] = field(default_factory=list)
    finished_req_ids: list[str] = field(default_factory=list)
    writable_block_ids: dict[str, frozenset[int]] | None = None
    writable_window_block_ids: dict[str, frozenset[int]] | None = None
    budget: DraftBudget | None = None
    wants_confidence: bool = True
    shared_prefixes: list[SharedPrefix] = field(default_factory=list)
    num_prefill_tokens: int = 0
    snapshot_slots: dict[str, int] = field(default_factory=dict)

    @property
    def num_drafts(self) -> int:
        """Drafts that the target verifies in this step, at most."""
        num_drafts = sum(row.num_draft for row in self.rows)
        return num_drafts if self.budget is None else min(num_drafts, self.budget.num_drafts)

    @property
    def drafts(self) -> bool:
        """Whether any row proposes drafts."""
        return any(row.num_next_draft for row in self.rows)

    @property
    def num_tokens(self) -> int:
        """Tokens that the target runs in this step, at most."""
        num_drafts = sum(row.num_draft for row in self.rows)
        if self.budget is not None:
            num_drafts = min(num_drafts, self.budget.num_drafts)
        return sum(row.num_new for row in self.rows) + num_drafts


@dataclass(frozen=True, slots=True)
class RequestResult:
    """What a row yielded: `token_ids` are the accepted drafts and the token after them; empty without `sample`.

    `num_verified` of the row's drafts were verified and `num_accepted` of them accepted:
    `len(token_ids) == num_accepted + 1` for a row that sampled. `logprobs` has an entry for each of `token_ids` when
    the request asked for them, else it is None. `prompt_logprobs` has an entry for each token of the prompt that a
    position of this row predicts, when the request asked for them.
    `error`: why this request cannot go on, for its client; the others are not affected. `error_status`: whose fault
    that is, a gRPC status name.
    """

    request_id: str
    token_ids: list[int]
    num_accepted: int
    logprobs: list[TokenLogprobs] | None = None
    prompt_logprobs: list[TokenLogprobs] | None = None
    error: str | None = None
    error_status: ErrorStatus = "INTERNAL"
    num_verified: int = 0

    def fits(self, row: ScheduledRequest) -> bool:
        """Whether this can be the answer to `row`. Going on with another one would corrupt the request."""
        expected = self.num_accepted + 1 if row.sample else 0
        return (
            self.request_id == row.request_id
            and 0 <= self.num_accepted <= self.num_verified <= row.num_draft
            and len(self.token_ids) == expected
            and (self.logprobs is None or len(self.logprobs) == expected)
        )


@dataclass(frozen=True, slots=True)
class ModelRunnerOutput:
    """What a step yielded, a row each, in the plan's order: known once drafts are accepted, before the next ones are
    proposed. `mask_seconds` is the host's time of filling grammars' masks."""

    step_id: int
    rows: list[RequestResult]
    mask_seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class DraftOutput:
    """What a step proposed, known after its `ModelRunnerOutput`.

    confidences: for each row, in the plan's order, the drafter's in the drafts that it proposed; empty where it has
    none. num_kept: by request id, how many drafts the next row verifies where the worker kept fewer than it proposed.
    errors: by request id, why a request cannot go on, and a gRPC status name. phase_seconds: wall time of verify,
    accept, inject and draft, where it was measured. next_error: why the step that was submitted after this one, and
    waited for its drafts, cannot go on; as if its `submit` had raised it, that step is not in flight any more.
    num_looked_up: by request id, where prompt lookup drafts beside a model, how many drafts the row looked up in place
    of the model's.
    """

    step_id: int
    confidences: list[list[float]] = field(default_factory=list)
    num_kept: dict[str, int] = field(default_factory=dict)
    errors: dict[str, tuple[str, ErrorStatus]] = field(default_factory=dict)
    phase_seconds: dict[str, float] = field(default_factory=dict)
    next_error: StepFailed | StepOutOfMemory | None = None
    num_looked_up: dict[str, int] = field(default_factory=dict)


class StepOutOfMemory(Exception):
    """A step does not fit the device's memory. The plan's finished and new requests and the blocks of its rows have
    been taken in; none of its rows has run, and there is no result to collect. The message is for the operator."""


class StepFailed(Exception):
    """A step could not be run, for a reason other than memory, and the worker can go on with other steps. There is no
    result to collect. What the worker holds of its requests is not to be relied on: `Worker.reset` comes next. The
    message names the error."""


class Worker(Protocol):
    """What the engine core needs of a worker: steps go in, and their results come out in the same order.

    `worker.ModelRunner` is one; tests have a toy.
    """

    @property
    def overlaps(self) -> bool:
        """Whether `submit` returns before the step has run, so that there is something to do meanwhile. Constant. A
        worker that does not overlap never gets a row with `num_unverified_drafts`."""
        ...

    def submit(self, plan: SchedulerOutput) -> None:
        """Queue a step after those that were submitted before; at most one of them has not been collected. Raises
        `StepOutOfMemory` and `StepFailed`; after any other error the worker is of no more use."""
        ...

    def reset(self) -> None:
        """Remove every request, as if none had ever been in a plan. Steps in flight are dropped. The KV stays."""
        ...

    def collect_results(self) -> ModelRunnerOutput:
        """The result of the oldest step that was submitted and not collected; waits for it. There must be one. Raises
        `StepFailed`."""
        ...

    def collect_drafts(self, ended: Collection[str]) -> DraftOutput:
        """What the step that was collected last proposed; waits for it. Called once after each `collect_results`,
        before the next `submit` or `collect_results`. ended: the requests of its rows that have ended: their drafts
        are of no use. Raises `StepFailed`."""
        ...
