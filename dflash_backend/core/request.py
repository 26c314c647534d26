"""A request as the core sees it: tokens, how far they are computed, the blocks it holds, what it has cost, and the row
that it has in a step.

The scheduler and the KV manager change it. Whether it waits or runs follows from the scheduler's queue that it is in.

A row follows from its request alone: nothing here looks at other requests, at the pool or at the queue. `draft_length`
says how many tokens a row drafts; the scheduler sets it before it makes rows. A row drafts none where that many do not
fit or cannot be of use. The scheduler makes hundreds of rows a step, so short steps are written out rather than called.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from dflash_backend.core.block_hashes import BlockHashes
from dflash_backend.core.plan import NewRequest, ScheduledRequest
from dflash_backend.core.scheduler_config import SchedulerConfig
from dflash_backend.core.spec_counts import RequestYields
from dflash_backend.core.speculation import SpeculatingRow
from dflash_backend.messages import (
    DEFAULT_PRIORITY,
    FinishReason,
    GenerationRequest,
    RequestStats,
    SamplingParams,
    TokenLogprobs,
)
from dflash_backend.spec_stats import SpecDecodingStats

_MASK_64 = (1 << 64) - 1


def derive_seed(engine_seed: int, arrival: int) -> int:
    """The seed of a request that brought none, 63 bits: SplitMix64 (Steele, Lea, Flood 2014) of the engine's seed,
    `arrival` steps on. Depends on which request this is, and not on what else runs."""
    z = (engine_seed + (arrival + 1) * 0x9E3779B97F4A7C15) & _MASK_64
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK_64
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK_64
    return (z ^ (z >> 31)) >> 1


@dataclass(slots=True, eq=False)
class Request:
    """One request's state between steps.

    `token_ids` are prompt and output. `num_computed` counts the positions whose target KV and drafter context KV are
    final (on a CPU the latter may wait in `worker.step_ops.PendingContext`, but never that of a full block); in decode
    it is one less than the tokens, whose last is the anchor. `num_pending_drafts` counts the drafts that the worker
    holds for the next verification. It survives a preemption, so that a request's draft blocks are the same with and
    without one.

    All of these are as of the last result that was applied. `row_in_flight` is the request's row in the step in flight,
    if it has one there.
    """

    request_id: str
    token_ids: list[int]
    num_prompt_tokens: int
    sampling: SamplingParams
    eos_token_ids: tuple[int, ...]
    seed: int
    num_speculative_tokens: int
    # Tokens that end its answer, but for those among its first `min_tokens - 1`.
    stop_ids: frozenset[int]
    min_tokens: int
    block_hashes: BlockHashes
    arrival: int
    arrival_s: float
    deadline_s: float | None
    # Its place among the requests of its tenant, the lowest first: priority, then arrival.
    rank: tuple[int, int]

    # How many tokens its next row may draft, of `num_speculative_tokens` at most, and how its drafts fare.
    draft_length: int
    speculation: SpeculatingRow

    num_computed: int = 0
    num_pending_drafts: int = 0
    looks_up: bool = False
    """Whether its pending drafts are those of prompt lookup, beside a drafter that is a model."""
    block_ids: list[int] = field(default_factory=list)
    # Those of the target's layers with a window, parallel to `block_ids` (`kv/groups.py`), and how many of the
    # first were given back. Empty where such layers have no blocks of their own.
    window_block_ids: list[int] = field(default_factory=list)
    num_window_freed: int = 0
    # The cached blocks that it found, and the version of the cache then; None while it runs.
    hit: tuple[int, list[int]] | None = None
    # How many blocks of its prompt are cached, those after the hit as well, for which there is no recurrent state.
    num_cached_blocks: int = 0
    # Positions at which a chunk of its prefill ends, for a copy of its recurrent state; the copies that steps are to
    # write, as position and block hash; and the slot of the one that it starts from.
    snapshot_borders: tuple[int, ...] = ()
    pending_snapshots: list[tuple[int, bytes]] = field(default_factory=list)
    snapshot_slot: int | None = None
    # Whether it need not load KV from a tier any more since it came into the queue.
    has_loaded: bool = False
    # Whether it ever left its place in the queue to load KV, so that others may have gone ahead.
    was_loading: bool = False
    # The versions of cache and tiers with which there was nothing to load for it.
    nothing_to_load_at: tuple[int, int] | None = None
    # Whether it has not yet fetched, or let go of, the KV that another server keeps for it.
    has_remote_kv: bool = False
    # Tokens that it did not compute since they came from tiers, by the tier's name.
    num_loaded_tokens: dict[str, int] = field(default_factory=dict)
    # Blocks that it needs to come to its first decode row, as of its admission.
    num_blocks_to_decode: int = 0
    num_published_blocks: int = 0
    # Of the drafter whose context KV its blocks began with, as `KVManager.drafter_epoch` counts them.
    drafter_epoch: int = 0
    row_in_flight: ScheduledRequest | None = None
    # The compiled grammar of its structured output, which is kept as long as the request is.
    grammar: Any = None
    # Steps with a row of this request that the worker could not run, and no request of which fails alone.
    num_unexplained_failures: int = 0

    first_scheduled_s: float | None = None
    num_cached_tokens: int = 0
    num_preemptions: int = 0
    # Log-probabilities of the prompt that were sent, from its second token on.
    num_prompt_logprobs: int = 0
    spec_stats: SpecDecodingStats = field(default_factory=SpecDecodingStats)
    # Only kept for a request with stop strings, which the text may have reached steps ago.
    yields: RequestYields | None = None

    @classmethod
    def from_generation_request(
        cls, request: GenerationRequest, config: SchedulerConfig, arrival: int, now: float
    ) -> Request:
        """The state of a request that has passed admission. `arrival` counts the admitted requests, `now` is in s."""
        sampling = request.sampling
        k = sampling.num_speculative_tokens
        k = config.num_speculative_tokens if k is None else k
        limits_s = [seconds for seconds in (request.deadline_s, sampling.timeout / 1e6) if seconds > 0]
        return cls(
            request_id=request.request_id,
            token_ids=list(request.prompt_token_ids),
            num_prompt_tokens=len(request.prompt_token_ids),
            sampling=sampling,
            eos_token_ids=request.eos_token_ids,
            seed=derive_seed(config.seed, arrival) if sampling.seed is None else sampling.seed,
            num_speculative_tokens=k,
            stop_ids=frozenset(sampling.ending(request.eos_token_ids)) | frozenset(sampling.stop_token_ids),
            min_tokens=sampling.min_tokens if sampling.structured_outputs is None else 0,
            block_hashes=BlockHashes(
                sampling.cache_salt, config.block_size, config.reads_next_tokens, sampling.lora_name
            ),
            arrival=arrival,
            arrival_s=now,
            deadline_s=now + min(limits_s) if limits_s else None,
            rank=(sampling.priority or DEFAULT_PRIORITY, arrival),
            draft_length=k,
            speculation=SpeculatingRow(k),
            spec_stats=SpecDecodingStats.zeros(k),
            yields=RequestYields() if sampling.stop else None,
            has_remote_kv=sampling.kv_transfer_params is not None and sampling.kv_transfer_params.do_remote_prefill,
        )

    @property
    def wants_prompt_logprobs(self) -> bool:
        """Whether positions of the prompt are to be computed for the log-probabilities that they give."""
        return self.sampling.prompt_logprobs is not None and self.num_prompt_logprobs < self.num_prompt_tokens - 1

    @property
    def is_resumed(self) -> bool:
        """Whether it has run before: it was preempted, or a step with it failed."""
        return self.first_scheduled_s is not None

    @property
    def num_tokens(self) -> int:
        """Prompt and output."""
        return len(self.token_ids)

    @property
    def num_output_tokens(self) -> int:
        """Tokens generated so far."""
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def max_decode_tokens(self) -> int:
        """Tokens of its decode row at most: the anchor and all drafts."""
        return 1 + self.num_speculative_tokens

    @property
    def max_useful_drafts(self) -> int:
        """Drafts that can still be of use to the answer, at most, once the row that proposes them has yielded."""
        return max(0, self.sampling.max_tokens - self.num_output_tokens - 2)

    @property
    def prefill_end(self) -> int:
        """Positions that a prefill of this request computes.

        All tokens, the last one's logits giving the next token. A request that was preempted with drafts pending stops
        before its anchor instead: the drafter then proposes from it the same block again, and the request goes on
        exactly as if it had never been preempted.
        """
        return self.num_tokens - 1 if self.num_pending_drafts else self.num_tokens

    @property
    def in_prefill(self) -> bool:
        """Whether the next row is a prefill chunk, also when a row is in flight: more than the last token is not
        computed."""
        row = self.row_in_flight
        if row is None:
            return len(self.token_ids) - self.num_computed > 1
        return not row.sample and len(self.token_ids) - self.num_computed - row.num_new > 1

    def append(self, token_ids: list[int], max_model_len: int) -> tuple[list[int], FinishReason | None]:
        """Append the tokens of a step up to the one that ends the answer, and drop those after it. Returns what was
        kept, and why the answer ended; None: it goes on. A stop token is kept: its text is the detokeniser's to leave
        out."""
        num_before = len(self.token_ids) - self.num_prompt_tokens
        limit = min(self.sampling.max_tokens, max_model_len - self.num_prompt_tokens)
        reason: FinishReason | None = None
        if num_before + len(token_ids) >= limit or not self.stop_ids.isdisjoint(token_ids):
            for length, token_id in enumerate(token_ids, start=num_before + 1):
                if token_id in self.stop_ids and length >= self.min_tokens:
                    reason = "stop"
                elif length >= limit:
                    reason = "length"
                if reason is not None:
                    token_ids = token_ids[: length - num_before]
                    break
        self.token_ids += token_ids
        return token_ids, reason

    def to_new_request(self) -> NewRequest:
        """What the worker must know to run it. The token ids are a copy: both sides append to their own."""
        sampling = self.sampling
        if sampling.prompt_logprobs is not None and not self.wants_prompt_logprobs:
            sampling = msgspec.structs.replace(sampling, prompt_logprobs=None)
        return NewRequest(
            request_id=self.request_id,
            token_ids=list(self.token_ids),
            num_prompt_tokens=self.num_prompt_tokens,
            sampling=sampling,
            eos_token_ids=self.eos_token_ids,
            seed=self.seed,
            snapshot_slot=self.snapshot_slot,
        )

    def take_prompt_logprobs(self, start: int, entries: Sequence[TokenLogprobs]) -> list[TokenLogprobs]:
        """Those of a row that began at position `start` that were not sent before: after a preemption the worker
        computes them again."""
        new = list(entries[max(0, self.num_prompt_logprobs - start) :])
        self.num_prompt_logprobs += len(new)
        return new

    def stats(self, now: float) -> RequestStats:
        """What it has cost so far; a request that was never scheduled has waited until `now`."""
        scheduled_s = now if self.first_scheduled_s is None else self.first_scheduled_s
        return RequestStats(
            num_prompt_tokens=self.num_prompt_tokens,
            num_output_tokens=self.num_output_tokens,
            num_cached_tokens=self.num_cached_tokens,
            spec_decoding=self.spec_stats.copy(),
            num_preemptions=self.num_preemptions,
            queue_time_s=scheduled_s - self.arrival_s,
            num_loaded_tokens=self.num_loaded_tokens,
        )


def decode_row(request: Request, config: SchedulerConfig) -> ScheduledRequest:
    """The row of a request whose last token alone is not computed: that token and all of its drafts."""
    start, num_draft = request.num_computed, request.num_pending_drafts
    end = start + 1 + num_draft
    k = next_draft_length(request, start + 1, num_draft, config, request.draft_length)
    num_positions = end + config.lookahead[k]
    return ScheduledRequest(request.request_id, start, 1, num_draft, True, k, [], 0, num_positions)


def chunk_end(request: Request, start: int, budget: int) -> int:
    """Where the chunk of a request's prefill ends that begins at position `start`, of `budget` tokens at most and one
    at least: where the recurrent state is to be copied, or at the end of the prefill."""
    end = min(request.prefill_end, start + budget)
    return next((border for border in request.snapshot_borders if start < border < end), end)


def prefill_row(request: Request, start: int, end: int, config: SchedulerConfig, draft_length: int) -> ScheduledRequest:
    """The chunk of a request's prefill from position `start` up to `end`."""
    num_tokens = len(request.token_ids)
    # k follows from the tokens that the whole prefill leaves, so that all chunks of a prompt agree. Drafts that were
    # pending when the request was preempted are proposed again from the same anchor.
    k = request.num_pending_drafts or next_draft_length(request, num_tokens, 0, config, draft_length)
    finishes = end == request.prefill_end
    num_positions = end + config.lookahead[k]
    return ScheduledRequest(
        request_id=request.request_id,
        num_computed=start,
        num_new=end - start,
        num_draft=0,
        sample=end == num_tokens,
        num_next_draft=k if finishes else 0,
        new_block_ids=[],
        num_positions=num_positions,
    )


def next_start(request: Request) -> int:
    """Where the next chunk of a running request in prefill starts."""
    row = request.row_in_flight
    return request.num_computed + (0 if row is None else row.num_new)


def decode_row_ahead(request: Request, row: ScheduledRequest, config: SchedulerConfig) -> ScheduledRequest | None:
    """The decode row after `row`, which is in flight; None when it must wait for the result, or is sure not to come.

    Only outcomes count after which the request goes on. Every number is the largest over them, and k must be the same
    for all: it falls with the number of tokens, so the lowest and the highest outcome tell.
    """
    if not row.sample:  # a prefill that stopped before the last token, which is known
        fewest = most = request.num_tokens
        num_draft = request.num_pending_drafts
    else:
        longest = min(request.num_prompt_tokens + request.sampling.max_tokens, config.max_model_len) - 1
        fewest = request.num_tokens + 1
        if fewest > longest:
            return None
        most = min(fewest + row.num_draft, longest)
        num_draft = row.num_next_draft
    # A request with one token left ends in this row, so drafting after it cannot change its output.
    most_drafting = max(fewest, min(most, request.num_prompt_tokens + request.sampling.max_tokens - 2))
    k = next_draft_length(request, most_drafting, num_draft, config, request.draft_length)
    if k == 0 and next_draft_length(request, fewest, num_draft, config, request.draft_length) > 0:
        return None
    num_positions = num_draft + max(most, most_drafting + config.lookahead[k])
    return ScheduledRequest(request.request_id, most - 1, 1, num_draft, True, k, [], row.num_draft, num_positions)


def next_draft_length(request: Request, num_tokens: int, num_draft: int, config: SchedulerConfig, k: int) -> int:
    """The drafts after a step that begins with `num_tokens` tokens and verifies `num_draft`: `k` of them, or none.

    When every draft is accepted the step leaves `num_tokens + num_draft + 1` tokens, of which the last is the anchor;
    the next block must fit after it (WINDOW). A request that the step is sure to end drafts no more; surplus drafts
    before that are dropped at `max_tokens`.
    """
    if num_tokens - request.num_prompt_tokens + 1 >= request.sampling.max_tokens:
        return 0
    return k if num_tokens + num_draft + 1 + k <= config.max_drafting_len else 0


def positions_to_start(request: Request, config: SchedulerConfig) -> int:
    """Positions that must be free for a request to start: its whole prefill, and the decode row after it, with as many
    drafts as it may propose: where k do not fit, fewer may."""
    k = request.num_speculative_tokens
    if config.adaptive_speculation:
        k = min(k, max(0, config.max_drafting_len - request.num_tokens - 1))
    whole = prefill_row(request, 0, request.prefill_end, config, k)
    return min(whole.num_positions + 1 + whole.num_next_draft, peak_positions(request, config))


def promised_blocks(request: Request) -> int:
    """Blocks that a running request will still take before it decodes."""
    return max(0, request.num_blocks_to_decode - len(request.block_ids)) if request.in_prefill else 0


def peak_positions(request: Request, config: SchedulerConfig) -> int:
    """The most positions that the request's blocks ever have to cover, if it runs to its last token. Constant.

    When the pool covers this, a request that runs alone never lacks a block, and so the oldest request always finishes.
    """
    longest = min(request.num_prompt_tokens + request.sampling.max_tokens, config.max_model_len)
    target = longest - 1  # the last token of all is never run
    k = request.num_speculative_tokens
    fewest = min(k, 1) if config.adaptive_speculation else k
    if next_draft_length(request, request.num_prompt_tokens, 0, config, fewest) == 0:
        return target  # it never drafts
    # The latest verification that is followed by drafts starts from an anchor with two tokens still to come.
    reach = k + config.lookahead[k]
    by_tokens = request.num_prompt_tokens + request.sampling.max_tokens - 2 + reach
    by_window = config.max_drafting_len + config.lookahead[k] - k - 1
    # The latest of all starts from the last token but one. It reaches further where less than k + 1 is reserved.
    verifying = min(request.num_prompt_tokens + request.sampling.max_tokens - 1 + k, config.max_drafting_len)
    return max(target, verifying, min(by_tokens, by_window))
