"""What the core asks of the worker in a step, and what it gets back. Plain numbers: no tensors.

The worker keeps, for each request that it was told of, the token ids, the block table and the drafts that it
proposed; the plan carries only what changed. Draft token values never come here: the core plans with their number.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

import msgspec

from dflash_backend.messages import SamplingParams, TokenLogprobs


@dataclass(frozen=True, slots=True)
class NewRequest:
    """A request that the worker does not hold: admitted now, or resumed after preemption.

    `token_ids` are the prompt and every token generated so far; `seed` is resolved (never None).
    """

    request_id: str
    token_ids: list[int]
    num_prompt_tokens: int
    sampling: SamplingParams
    eos_token_ids: tuple[int, ...]
    seed: int


class ScheduledRow(msgspec.Struct, frozen=True):
    """One request's part in a step. (A msgspec struct, since a step has hundreds and they are cheap to make.)

    The target runs the positions `[num_computed, num_computed + num_new + num_draft)`: `num_new` tokens whose
    values are known, then `num_draft` tokens that the worker proposed for this request in the step before.
    `sample` says that the last known token of the row is the request's last one, so the row yields new tokens
    (`num_draft` > 0 implies it). `num_next_draft` is k for the drafts proposed after this step, 0 for none.
    A row with `sample` false and `num_next_draft` > 0 is a resumed request: all its tokens but the last are computed
    by the end of this step, and the drafter goes on from that last token, its anchor.
    `new_block_ids` are appended to the request's block table before the step.

    `num_uncertain` is the number of the request's drafts that the step before this one verifies, when that step was
    still in flight as this row was planned; 0 for a row that starts at `num_computed`. With it, `num_computed` is an
    upper bound that leaves out the outcomes which end the request, and only the worker knows where the row starts: at
    most `num_uncertain` below it. When the request has ended with the step in flight, the row runs for nothing; it may
    then start past `num_computed` and reach past its blocks. A position that no block of the row covers is not written.
    """

    request_id: str
    num_computed: int
    num_new: int
    num_draft: int
    sample: bool
    num_next_draft: int
    new_block_ids: list[int]
    num_uncertain: int = 0


@dataclass(frozen=True, slots=True)
class StepPlan:
    """One step. `finished` requests are forgotten by the worker first (also preempted ones), then `new` ones are
    learnt, then `rows` run together, decode rows and prefill chunks alike.

    `writable_block_ids` is given only when `kv_write_guard` is on: for each row the ids of the blocks it may write
    (invariant OWN), by request id.
    """

    step_id: int
    rows: list[ScheduledRow]
    new: list[NewRequest] = field(default_factory=list)
    finished: list[str] = field(default_factory=list)
    writable_block_ids: dict[str, frozenset[int]] | None = None

    @property
    def num_tokens(self) -> int:
        """Tokens that the target runs in this step."""
        return sum(row.num_new + row.num_draft for row in self.rows)


@dataclass(frozen=True, slots=True)
class RowResult:
    """What a row yielded: `token_ids` are the accepted drafts and the token after them; empty without `sample`.

    `num_accepted` of the row's drafts stood: `len(token_ids) == num_accepted + 1` for a row that sampled. `logprobs`
    has an entry for each of `token_ids` when the request asked for them, else it is None.
    """

    request_id: str
    token_ids: list[int]
    num_accepted: int
    logprobs: list[TokenLogprobs] | None = None


@dataclass(frozen=True, slots=True)
class StepResult:
    """What a step yielded, a row each, in the plan's order. `phase_seconds` has the wall time of verify, accept,
    inject and draft where it was measured."""

    step_id: int
    rows: list[RowResult]
    phase_seconds: dict[str, float] = field(default_factory=dict)


class StepOutOfMemory(Exception):
    """A step does not fit the device's memory. The plan's finished and new requests and the blocks of its rows have
    been taken in; none of its rows has run, and there is no result to collect. The message is for the operator."""


class StepFailed(Exception):
    """A step could not be run, for a reason other than memory, and the worker can go on with other steps. There is no
    result to collect. What the worker holds of its requests is not to be relied on: `Worker.reset` comes next. The
    message names the error."""


class Worker(Protocol):
    """What the engine core needs of a worker: steps go in, and their results come out in the same order.

    `worker.ModelRunner` runs steps on a CPU, `worker.DeviceRunner` on a GPU; tests have a toy.
    """

    @property
    def overlaps(self) -> bool:
        """Whether `submit` returns before the step has run, so that there is something to do meanwhile. Constant. A
        worker that does not overlap never gets a row with `num_uncertain`."""
        ...

    def submit(self, plan: StepPlan) -> None:
        """Queue a step behind those that were submitted before; at most one of them has not been collected. Raises
        `StepOutOfMemory` and `StepFailed`; after any other error the worker is of no more use."""
        ...

    def reset(self) -> None:
        """Remove every request, as if none had ever been in a plan. Nothing may be in flight. The K/V stays."""
        ...

    def collect(self) -> StepResult:
        """The result of the oldest step that was submitted and not collected; waits for it. There must be one."""
        ...


@dataclass(frozen=True, slots=True)
class EngineLimits:
    """The bounds that the scheduler plans within, settled once the models are loaded.

    `num_speculative_tokens` is k (0: no drafter); `lookahead(k)` positions are reserved past the tokens of a step
    for the drafter's queries (invariant RESERVE): `lookahead_base + k` when k > 0 (DFlash: base 1), else 0.
    `drafter_max_len` bounds drafting (invariant WINDOW): no draft and no anchor's query lies past `max_drafting_len`
    positions, which follows from it and from `max_model_len`. A step that decodes runs no more than
    `max_prefill_tokens_per_step` prompt tokens beside; None: half as many as it decodes or, if more, what it decodes
    times (requests without a first token / requests that decode); at least `min_prefill_tokens_per_step`. `max_step_s`
    bounds the time of a step with prompts while others wait or decode (`core.step_time`). Of one tenant,
    `max_queue_size` requests with `max_queue_tokens` tokens may wait. `tenant_weights` are shares; who is not named has
    a weight of 1.
    """

    num_blocks: int
    block_size: int
    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    max_queue_size: int
    enable_prefix_caching: bool
    num_speculative_tokens: int = 0
    lookahead_base: int = 1
    drafter_max_len: int = 0
    max_prefill_tokens_per_step: int | None = None
    min_prefill_tokens_per_step: int = 64
    max_step_s: float | None = None
    max_queue_tokens: int = 2_000_000
    tenant_weights: Mapping[str, float] = field(default_factory=dict)
    kv_write_guard: bool = False
    seed: int = 0
    max_drafting_len: int = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "max_drafting_len", min(self.drafter_max_len, self.max_model_len))

    def lookahead(self, k: int) -> int:
        """Positions reserved for the drafter's queries when it proposes k tokens."""
        return k + self.lookahead_base if k > 0 else 0
