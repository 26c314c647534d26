"""What the scheduler plans within: the pool, the bounds of a step and of a sequence, and k.

`EngineConfig` holds the operator's settings; this holds what they come to once the models are loaded.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, TypeVar

import numpy as np
import numpy.typing as npt

from dflash_backend.core.plan import MeasuredStep


def blocks_for(num_positions: int, block_size: int) -> int:
    """KV blocks that cover this many positions."""
    return -(-num_positions // block_size)


@dataclass(frozen=True, slots=True)
class WindowGroup:
    """The target's layers with a sliding window, under a block table of their own (`kv/groups.py`).

    window: positions that a query sees at most, its own included. max_step_tokens: tokens of a step; max_lookahead:
    positions that a row reserves after them.
    """

    num_blocks: int
    block_size: int
    window: int
    max_step_tokens: int
    max_lookahead: int

    def first_visible(self, position: int) -> int:
        """Index of the first block that a query at `position`, or after it, sees."""
        return max(0, position - self.window + 1) // self.block_size

    def first_visible_after(self, num_blocks: int) -> int:
        """Index of the first block that the first query after `num_blocks` blocks sees, at most `num_blocks`."""
        return min(num_blocks, self.first_visible(num_blocks * self.block_size))

    @property
    def steady_blocks(self) -> int:
        """Blocks that hold a window, what a row reserves, and the ends of both, wherever blocks begin."""
        return -(-(self.window - 1 + self.max_lookahead) // self.block_size) + 2

    @property
    def most_blocks(self) -> int:
        """Blocks that a request holds at a time at most: before the result of the step in flight is known, those that
        it and the step after it write are not given back."""
        return self.steady_blocks + -(-2 * self.max_step_tokens // self.block_size)


@dataclass(frozen=True, slots=True)
class TierConfig:
    """A tier of KV below the device (`kv/tiers.py`), by its name among those of `core/moves.py`: how many records it
    holds of each group of layers, in the order of `KVManager.groups`."""

    name: str
    num_slots: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class TransferConfig:
    """KV that goes to other servers or comes from them. sends: whether the KV of prompts is kept for others, for
    `timeout_s` seconds at most; receives: whether requests may begin with KV that another server keeps."""

    sends: bool
    receives: bool
    timeout_s: float


Number = TypeVar("Number", int, npt.NDArray[np.int64])


@dataclass(frozen=True, slots=True)
class DrafterWork:
    """Passes, queries, and the rows that passes run.

    lookahead_base: queries of a row beside one for each draft; None: the drafter runs none. autoregressive: each draft
    of a row takes a pass, which it shares with that draft of all other rows; else a single pass drafts for all of them.
    """

    lookahead_base: int | None = 1
    autoregressive: bool = False

    def num_queries(self, num_drafts: Number, num_rows: Number) -> Number:
        """Queries of all rows, for that many drafts of as many rows together."""
        return 0 * num_drafts if self.lookahead_base is None else num_drafts + self.lookahead_base * num_rows

    def num_row_passes(self, num_drafts: Number, num_rows: Number) -> Number:
        """Rows, each as often as a pass reads its context."""
        return num_drafts if self.autoregressive else num_rows

    def num_passes(self, longest: Number) -> Number:
        """Passes for at least one row that drafts, where the one with the most drafts has `longest`."""
        return longest if self.autoregressive else 0 * longest + 1


ONE_PASS = DrafterWork()
"""That of a drafter which drafts in a single pass, with a query at the anchor."""


def max_positions(max_model_len: int, k: int) -> int:
    """Positions that a row can name at most: a sequence, and the anchor and drafts that may reach past its end."""
    return max_model_len + k + 1


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    """The scheduler's settings.

    num_blocks, block_size: the KV pool, in blocks and in positions a block.
    max_model_len: tokens of the longest sequence, prompt and output.
    max_num_seqs, max_num_batched_tokens: requests and target tokens of one step.
    max_queue_size, max_queue_tokens: requests and tokens that one tenant may have waiting.
    num_speculative_tokens: k; 0 without a drafter.
    adaptive_speculation: whether a row drafts as many tokens as pay, k at most; else always k.
    draft_shapes: with that, the numbers of verified and of proposed drafts for each row to choose from, one for all
    rows of a step; empty: any, by row.
    measured_steps: times that were measured at start, for the estimate that the choice begins with; empty: none.
    uneven_cost: with that, the part by which a step takes longer, at least, when its rows have different numbers of
    drafts.
    lookahead_base: positions that the drafter's queries take beside its k drafts (1 for an anchor); None: it runs none.
    autoregressive: whether the drafter runs a pass for each draft, and not one for all of them.
    reads_next_tokens: whether the drafter's context KV at a position depends on the token after it (PUBLISH).
    drafter_max_len: positions that the drafter can address. With `max_model_len` it bounds drafting (WINDOW).
    max_prefill_tokens_per_step: prompt tokens of a step that also decodes; None: `PlanBuilder.prefill_budget` decides.
    min_prefill_tokens_per_step: the least that the None above comes to.
    max_step_s: seconds that a step with prompts may take while others wait or decode; None: `core.step_time` decides.
    tenant_weights: each tenant's share; a tenant without an entry has weight 1.
    num_state_snapshots: slots for copies of recurrent states; None: no layer has such a state. Without a slot there are
    no prefix hits then.
    num_window_blocks, sliding_window: the pool of the target's layers with a window, and the widest window of them; 0
    blocks where they are in the pool of all layers.
    min_shared_positions: positions that rows share, at least, where their KV is read once for all; 0: never.
    shared_queries_per_tile, positions_per_shared_query: for how many queries it is read at a time, and how many
    positions of KV cost as much as the partial results of a query.
    tiers: where KV goes that leaves the device, the nearest first; each takes what the one before it has.
    transfer: KV that other servers get or give; None: neither.
    kv_write_guard: whether plans say which blocks a row may write.
    kv_events: whether steps report what enters and leaves the prefix cache: "off", "hashes", or "tokens" for hashes and
    the tokens of stored blocks.
    seed: where the seeds of requests without one come from.
    """

    num_blocks: int
    block_size: int
    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    max_queue_size: int
    enable_prefix_caching: bool
    num_speculative_tokens: int = 0
    adaptive_speculation: bool = False
    draft_shapes: tuple[tuple[int, int], ...] = ()
    uneven_cost: float = 0.0
    measured_steps: tuple[MeasuredStep, ...] = ()
    lookahead_base: int | None = 1
    autoregressive: bool = False
    reads_next_tokens: bool = False
    drafter_max_len: int = 0
    max_prefill_tokens_per_step: int | None = None
    min_prefill_tokens_per_step: int = 64
    max_step_s: float | None = None
    max_queue_tokens: int = 2_000_000
    tenant_weights: Mapping[str, float] = field(default_factory=dict)
    num_state_snapshots: int | None = None
    num_window_blocks: int = 0
    sliding_window: int = 0
    min_shared_positions: int = 0
    shared_queries_per_tile: int = 1 << 30
    positions_per_shared_query: float = 0.0
    tiers: tuple[TierConfig, ...] = ()
    transfer: TransferConfig | None = None
    kv_write_guard: bool = False
    kv_events: Literal["off", "hashes", "tokens"] = "off"
    seed: int = 0
    max_drafting_len: int = field(init=False)
    """A sequence can be given k drafts if it has at most k tokens fewer (WINDOW): the anchor, its last token, and the k
    positions after it lie within what the drafter can address and within `max_model_len`."""
    lookahead: tuple[int, ...] = field(init=False)
    """For 0 to `num_speculative_tokens` drafts, positions that are reserved past a step's tokens for the drafter's
    queries when it proposes that many (RESERVE)."""
    drafter_work: DrafterWork = field(init=False)
    """What the drafter runs for a number of drafts."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "max_drafting_len", min(self.drafter_max_len, self.max_model_len))
        base, k = self.lookahead_base, self.num_speculative_tokens
        lookahead = (0 if base is None else drafts + base for drafts in range(1, k + 1))
        object.__setattr__(self, "lookahead", (0, *lookahead))
        object.__setattr__(self, "drafter_work", DrafterWork(self.lookahead_base, self.autoregressive))

    @property
    def window_group(self) -> WindowGroup | None:
        """The target's layers with a window; None where their blocks are those of all layers."""
        if not self.num_window_blocks:
            return None
        lookahead = self.num_speculative_tokens + self.lookahead[-1] + 1
        return WindowGroup(
            self.num_window_blocks, self.block_size, self.sliding_window, self.max_num_batched_tokens, lookahead
        )
