"""What Triton's Python stub and the engine process say to each other, as msgspec structs.

Stub to engine: `EngineSetup` as the first line of its standard input, then over ZeroMQ `GenerationRequest`,
`AbortRequests`, `SwapDrafter`, `Shutdown`. Engine to stub: `LoadProgress` while it loads, then `EngineReady` or
`EngineFailed`, then one `EngineCoreOutputs` a step. Everything is tagged by its type, so `ENGINE_INPUT` and
`ENGINE_OUTPUT` decode any of them.
"""

from __future__ import annotations

import signal
from typing import Literal

import msgspec

from dflash_backend.spec_stats import SpecDecodingStats

FinishReason = Literal["stop", "length", "abort"]
# gRPC statuses of requests that the engine does not take, or gives up.
ErrorStatus = Literal["INVALID_ARGUMENT", "UNAVAILABLE", "INTERNAL"]
# The priority of a request that names none. Triton's levels begin with 1, the most urgent.
DEFAULT_PRIORITY = 100
# All tenants together may have this many times what one tenant may have waiting.
TENANTS_IN_QUEUE = 4
# What may be between two tokens of JSON in an answer: nothing, a space, or a new line with its indentation. Where any
# white space is allowed, some models never stop writing it.
JSON_WHITESPACE = r"( |\r?\n[ \t]{0,40})?"


class StructuredOutputs(msgspec.Struct, frozen=True):
    """The grammar that an answer follows: a JSON schema, a regular expression, a JSON list of texts to choose from, or
    a grammar in llguidance's form of Lark, as `kind` says.

    after_reasoning: token ids behind which the grammar begins; empty where it begins with the answer. parameter: the
    sampling parameter that named it, for errors.
    """

    kind: Literal["json", "regex", "choice", "grammar"]
    text: str
    after_reasoning: tuple[int, ...] = ()
    parameter: str = "structured_outputs"


class KVTransferParams(msgspec.Struct, frozen=True, kw_only=True):
    """`kv_transfer_params`, by which a prefill server and a decode server work on one request (docs/disaggregation.md);
    names and meanings as of vLLM's NixlConnector.

    do_remote_decode: keep the prompt's KV, and answer with the parameters by which it can be fetched.
    do_remote_prefill: these are such, of KV that is kept at `remote_host` and `remote_port`, of the prompt's first
    `remote_num_blocks` blocks. `remote_block_ids` are those of them on the device, the first ones where they are many;
    without the number they count.
    """

    do_remote_prefill: bool = False
    do_remote_decode: bool = False
    remote_engine_id: str = ""
    remote_block_ids: tuple[int, ...] = ()
    remote_num_blocks: int = 0
    remote_host: str = ""
    remote_port: int = 0
    tp_size: int = 1

    @property
    def num_blocks(self) -> int:
        """Blocks of the prompt that are kept."""
        return self.remote_num_blocks or len(self.remote_block_ids)


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True):
    """How one request is sampled; names and meanings as in vLLM's `SamplingParams`.

    Bounds are checked where the values come in (`text.request`, `LLM.generate`), by
    `dflash_backend.text.sampling_params.parse_sampling_params`.
    `top_k` of 0 means all tokens; `seed` of None takes one from the engine's own; `num_speculative_tokens` of None
    takes the server's. `logit_bias` is added to the logits of its token ids; `logprobs` of None returns none, of 0
    those of the new tokens, of m also those of the m most likely ones, and `prompt_logprobs` is the same for the
    prompt's tokens after its first; `logprob_token_ids` are tokens whose log-probabilities come in place of those of
    the most likely ones. `allowed_token_ids` of None allows all;
    `bad_words_token_ids` are those of `bad_words`, which the stub fills in. `lora_name` is the LoRA adapter that the
    target runs with; empty for none. The engine runs one completion a request:
    for `n` of them, the stub sends the request n times (`dflash_backend.text.sampling_params.child`).

    `tenant` is whose share of the server the request takes, by default that of all who name none. `priority` orders the
    requests of one tenant, the lowest first; 0 is `DEFAULT_PRIORITY`. `timeout` in microseconds ends the request with
    what it has; 0 is none. All three are Triton's or ours, and change no output.
    """

    n: int = 1
    max_tokens: int = 16
    min_tokens: int = 0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: dict[int, float] = {}
    allowed_token_ids: tuple[int, ...] | None = None
    bad_words: tuple[str, ...] = ()
    bad_words_token_ids: tuple[tuple[int, ...], ...] = ()
    logprobs: int | None = None
    logprob_token_ids: tuple[int, ...] = ()
    prompt_logprobs: int | None = None
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    num_speculative_tokens: int | None = None
    cache_salt: str = ""
    lora_name: str = ""
    tenant: str = ""
    priority: int = 0
    timeout: int = 0
    record_traffic: bool = True
    structured_outputs: StructuredOutputs | None = None
    kv_transfer_params: KVTransferParams | None = None

    @property
    def greedy(self) -> bool:
        """Temperature 0: the most likely token is taken, and no random number is used."""
        return self.temperature == 0.0

    @property
    def penalised(self) -> bool:
        """Whether the tokens so far change the logits."""
        return self.presence_penalty != 0.0 or self.frequency_penalty != 0.0 or self.repetition_penalty != 1.0

    def ending(self, eos_token_ids: tuple[int, ...]) -> tuple[int, ...]:
        """The end-of-sequence tokens that end an answer. A grammar allows one only when the answer is complete, or,
        with `ignore_eos` or `min_tokens`, when it cannot go on; so with a grammar it always ends the answer."""
        return () if self.ignore_eos and self.structured_outputs is None else eos_token_ids

    @property
    def masks_tokens(self) -> bool:
        """Whether some tokens are hidden at any position."""
        return self.allowed_token_ids is not None or bool(self.bad_words_token_ids)


class EngineSetup(msgspec.Struct, frozen=True):
    """What the engine process must know to start: the settings as text, by name, the two ZeroMQ addresses, the folder
    that holds their sockets, the file descriptor that stays open for as long as the process lives, and the number of
    the `tritonserver` process, with which engine and stub end; 0 without one."""

    settings: dict[str, str]
    inputs: str
    outputs: str
    socket_dir: str
    lifeline: int
    server_pid: int = 0


class GenerationRequest(msgspec.Struct, frozen=True, tag=True):
    """One prompt to continue. `stop_token_ids` of the sampling parameters and `eos_token_ids` end it.

    `deadline_s` is the time-out in seconds after the engine has received it; 0 is none.
    """

    request_id: str
    prompt_token_ids: list[int]
    sampling: SamplingParams
    eos_token_ids: tuple[int, ...] = ()
    deadline_s: float = 0.0


class AbortRequests(msgspec.Struct, frozen=True, tag=True):
    """End these requests and free their blocks; unknown ids are ignored. No further delta is sent for them.

    `num_output_tokens`, by id: of requests whose text reached a stop string, how many output tokens belong to the
    answer. The engine does not count speculation past them.
    """

    request_ids: list[str]
    num_output_tokens: dict[str, int] = {}


class DrafterChoice(msgspec.Struct, frozen=True, kw_only=True):
    """A drafter that is to draft from now on, and how it is compared with the one before.

    draft_model, draft_revision: as the settings of these names. window: verified blocks of the new drafter after which
    its acceptance is compared with the old one's, which comes back where more than `max_loss` of the accepted drafts
    are lost (0 to 1); 0: it is not compared.
    """

    draft_model: str
    draft_revision: str = ""
    window: int = 1000
    max_loss: float = 0.1


class SwapDrafter(DrafterChoice, frozen=True, tag=True, kw_only=True):
    """Draft with another drafter from now on; one `DrafterSwapped` answers, a second one says how it went on."""

    swap_id: str


class Shutdown(msgspec.Struct, frozen=True, tag=True):
    """End the engine process. Requests that still run are aborted."""


END_SIGNAL = signal.SIGUSR1
"""Asks the engine process to end, as `Shutdown` does, where it reads no messages. Not SIGTERM, which a service manager
sends to all processes of a server at once: the stub decides when requests have ended."""


class RequestStats(msgspec.Struct, frozen=True):
    """What a request has cost so far, in tokens unless said otherwise."""

    num_prompt_tokens: int
    num_output_tokens: int
    num_cached_tokens: int
    spec_decoding: SpecDecodingStats
    num_preemptions: int
    queue_time_s: float
    num_loaded_tokens: dict[str, int] = {}
    """Those of the cached tokens that came from tiers of KV, by the tier's name."""

    def with_last_step_trimmed(self, num_tokens: int, num_kept: int) -> RequestStats:
        """The same, when only `num_kept` of the `num_tokens` tokens of the last delta belong to the answer. A delta is
        that of one step, except for rare ones of several; then no more is taken off than one step can have added."""
        spec = self.spec_decoding
        accepted = list(spec.num_accepted_tokens_per_pos)
        for position in range(max(num_kept - 1, 0), min(num_tokens - 1, len(accepted))):
            accepted[position] = max(accepted[position] - 1, 0)
        return msgspec.structs.replace(
            self,
            num_output_tokens=self.num_output_tokens - num_tokens + num_kept,
            spec_decoding=SpecDecodingStats(spec.num_drafts, spec.num_draft_tokens, sum(accepted), accepted),
        )


class TokenLogprobs(msgspec.Struct, frozen=True, array_like=True):
    """Log-probabilities at one position of the output: the new token first, then the most likely ones without it.

    They are the model's own, of the logits before penalties, bias and temperature, as vLLM's are. A rank is 1 for the
    most likely token. The most likely ones are ranked by their place; a new token that is not among them has the number
    of tokens that are at least as likely. All three lists have the same length, at least 1.
    """

    token_ids: list[int]
    logprobs: list[float]
    ranks: list[int]


class TokenDelta(msgspec.Struct, frozen=True):
    """New tokens of one request from one step. The last one of a request has a finish reason and stats.

    The first one with tokens has stats too, which say how long the request waited for its first step. Every delta of a
    request with stop strings has stats: the text may end the answer within it.
    `logprobs` has an entry for each of `token_ids`, and is None when the request asked for none. `prompt_logprobs` has
    those of the prompt's tokens after its first, in order, over all deltas; a delta may have only these.
    `num_draft_tokens` counts the drafts that the step verified for the request. `kv_transfer_params`, of the last
    delta: where the prompt's KV is kept for another server.
    """

    request_id: str
    token_ids: list[int]
    finish_reason: FinishReason | None = None
    stats: RequestStats | None = None
    logprobs: list[TokenLogprobs] | None = None
    prompt_logprobs: list[TokenLogprobs] = []
    num_draft_tokens: int = 0
    kv_transfer_params: KVTransferParams | None = None

    @classmethod
    def joined(cls, deltas: list[TokenDelta]) -> TokenDelta:
        """One delta in place of several of one request, at least one, in order."""
        last = deltas[-1]
        logprobs = None
        if any(delta.logprobs is not None for delta in deltas):
            logprobs = [entry for delta in deltas for entry in delta.logprobs or []]
        token_ids = [token_id for delta in deltas for token_id in delta.token_ids]
        of_prompt = [entry for delta in deltas for entry in delta.prompt_logprobs]
        num_drafts = sum(delta.num_draft_tokens for delta in deltas)
        stats = next((delta.stats for delta in reversed(deltas) if delta.stats is not None), None)
        kept = (last.finish_reason, stats)
        return cls(last.request_id, token_ids, *kept, logprobs, of_prompt, num_drafts, last.kv_transfer_params)


class RequestFailed(msgspec.Struct, frozen=True):
    """The engine could not take a request, or gave it up as it ran. `status` is a gRPC status name."""

    request_id: str
    status: ErrorStatus
    message: str


class AdaptiveSpeculationStats(msgspec.Struct):
    """What `adaptive_speculation` has decided and expected, since the start; all 0 without it.

    num_steps: steps in which requests decoded that may draft; num_steps_without_drafts: those of them in which none
    drafted. num_draft_tokens_per_pos: verified drafts by their position in the block. num_expected_tokens_per_pos: how
    many of them were expected to be accepted. num_proposed_tokens: drafts that were proposed, verified or not.
    num_budgeted_steps: steps that verified only the likeliest of their drafts. confidence_weight: how much the
    drafter's confidence in a draft counts now, 0 for nothing.
    """

    num_steps: int = 0
    num_steps_without_drafts: int = 0
    num_draft_tokens_per_pos: list[int] = []
    num_expected_tokens_per_pos: list[float] = []
    num_proposed_tokens: int = 0
    num_budgeted_steps: int = 0
    confidence_weight: float = 0.0

    @classmethod
    def zeros(cls, k: int) -> AdaptiveSpeculationStats:
        """Nothing yet, with blocks of at most `k` drafts."""
        return cls(num_draft_tokens_per_pos=[0] * k, num_expected_tokens_per_pos=[0.0] * k)

    def copy(self) -> AdaptiveSpeculationStats:
        """These counts as they are now."""
        drafts, expected = self.num_draft_tokens_per_pos, self.num_expected_tokens_per_pos
        return msgspec.structs.replace(
            self, num_draft_tokens_per_pos=list(drafts), num_expected_tokens_per_pos=list(expected)
        )


class GrammarStats(msgspec.Struct, frozen=True):
    """Structured output since the start: requests with a grammar, grammars that were compiled and the seconds that
    took, steps with masks and the host's seconds of filling them."""

    num_requests: int = 0
    num_compiled: int = 0
    compile_seconds: float = 0.0
    num_mask_steps: int = 0
    mask_seconds: float = 0.0


class TierStats(msgspec.Struct):
    """What went to a tier of KV and came back from it, since the engine started.

    num_hit_tokens: prompt tokens that requests did not compute since they came from it. num_bytes_stored,
    store_seconds: what was written to it, and how long that took; num_bytes_loaded, load_seconds: what was read from it
    for requests. num_lost: records that were to go there and left the device before, or for which there was no space.
    num_computed: requests that computed what they could have loaded, since that takes less time. num_records: that it
    has now.
    """

    num_hit_tokens: int = 0
    num_bytes_stored: int = 0
    store_seconds: float = 0.0
    num_bytes_loaded: int = 0
    load_seconds: float = 0.0
    num_lost: int = 0
    num_computed: int = 0
    num_records: int = 0


class TransferStats(msgspec.Struct):
    """Prompts whose KV was kept for another server, since the engine started; how many of them were fetched, or found
    not to be needed; and how many were given up, since no reader came in time or requests here needed the blocks."""

    num_kept: int = 0
    num_taken: int = 0
    num_expired: int = 0


class EngineStats(msgspec.Struct, frozen=True):
    """Gauges after a step and counters since the engine started. lookup: of `spec_decoding` the blocks that prompt
    lookup had in place of the drafter's model, those past a stop string included."""

    num_requests_running: int = 0
    num_requests_waiting: int = 0
    kv_cache_usage: float = 0.0
    num_preemptions: int = 0
    prefix_cache_queries: int = 0
    prefix_cache_hits: int = 0
    spec_decoding: SpecDecodingStats = msgspec.field(default_factory=SpecDecodingStats)
    speculation: AdaptiveSpeculationStats = msgspec.field(default_factory=AdaptiveSpeculationStats)
    lookup: SpecDecodingStats = msgspec.field(default_factory=SpecDecodingStats)
    num_prompt_tokens: int = 0
    num_generation_tokens: int = 0
    num_steps: int = 0
    step_seconds: float = 0.0
    grammars: GrammarStats = msgspec.field(default_factory=GrammarStats)
    tiers: dict[str, TierStats] = {}
    kept: TransferStats = msgspec.field(default_factory=TransferStats)


class QueueState(msgspec.Struct, frozen=True, array_like=True):
    """How many requests the engine has received in all, how many of them wait to be run, and how many may run beside
    those that do. `crowded`: waiting requests of each tenant that has a sixteenth of a queue or more."""

    num_received: int
    num_waiting: int
    num_free_rows: int = 0
    crowded: dict[str, int] = {}


DEVICE_MEDIUM = "GPU"
"""What KV events call the device's cache, on a CPU too: vLLM's name for where a request can use blocks at once."""


class BlocksStored(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Blocks of one text that entered the prefix cache, in order, by their hashes (`core/block_hashes.py`).

    parent: the hash of the block before the first of them, None at the beginning of a text. token_ids: of all of them;
    empty where they are not asked for. medium: where the blocks are; in a tier below the device's cache they are of any
    texts, in any order, and have neither parent nor tokens.
    """

    block_hashes: list[bytes]
    parent: bytes | None = None
    token_ids: list[int] = []
    medium: str = DEVICE_MEDIUM


class BlocksRemoved(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Blocks that left the prefix cache, or a tier below it, in order."""

    block_hashes: list[bytes]
    medium: str = DEVICE_MEDIUM


KVEvent = BlocksStored | BlocksRemoved


SwapOutcome = Literal["swapped", "refused", "kept", "reverted"]


class DrafterSwapped(msgspec.Struct, frozen=True):
    """What came of a `SwapDrafter`: `swapped` or `refused`, then `kept` or `reverted` once the new drafter was compared
    with the old one. message: for clients and the log. status: of a refusal. drafting: what drafts from now on, as of
    `EngineReady`; empty where that stays."""

    swap_id: str
    outcome: SwapOutcome
    message: str
    status: ErrorStatus = "INVALID_ARGUMENT"
    drafting: str = ""


class EngineCoreOutputs(msgspec.Struct, frozen=True, tag=True):
    """All that came of one engine step, or of the intake before it: what `EngineCore.step` returns.

    failed: requests that the engine did not take, or ended with an error; they have no delta.
    stats: now and then, and always before the engine goes idle.
    phase_seconds: the time by phase (verify, accept, inject, draft) of the step whose drafts came last; empty when no
    step was applied.
    queue: filled in by the engine process.
    kv_events: what entered and left the prefix cache, in order; empty unless the engine reports it.
    drafter_swaps: what came of `SwapDrafter`s.
    """

    deltas: list[TokenDelta] = []
    failed: list[RequestFailed] = []
    stats: EngineStats | None = None
    phase_seconds: dict[str, float] = {}
    queue: QueueState | None = None
    kv_events: list[KVEvent] = []
    drafter_swaps: list[DrafterSwapped] = []


class LoadProgress(msgspec.Struct, frozen=True, tag=True):
    """A line about loading, and how far it is (0 to 1)."""

    message: str
    fraction: float


class EngineReady(msgspec.Struct, frozen=True, tag=True):
    """The engine takes requests. What the stub must know to validate them and to find their blocks.

    reads_next_tokens: as of `core/block_hashes.py:BlockHashes`. finds_blocks: whether prompts begin with cached blocks
    at all. has_drafter: whether drafts come from a drafter's checkpoint. num_tier_blocks: blocks that its tiers of KV
    hold beside `num_kv_blocks` of the device. drafting: the part of `description` that says what drafts. lora_names:
    the LoRA adapters that requests may name.
    """

    max_model_len: int
    num_speculative_tokens: int
    num_kv_blocks: int
    kv_block_size: int
    vocab_size: int
    description: str
    reads_next_tokens: bool = False
    finds_blocks: bool = True
    has_drafter: bool = False
    num_tier_blocks: int = 0
    drafting: str = ""
    lora_names: tuple[str, ...] = ()


class EngineFailed(msgspec.Struct, frozen=True, tag=True):
    """The engine cannot start or go on; `message` is for the operator. `setup_error` says that its settings or files
    are at fault, so that it will fail again until they are changed."""

    message: str
    setup_error: bool = False


EngineInput = GenerationRequest | AbortRequests | SwapDrafter | Shutdown
EngineOutput = EngineCoreOutputs | LoadProgress | EngineReady | EngineFailed

ENCODER = msgspec.msgpack.Encoder()
ENGINE_INPUT: msgspec.msgpack.Decoder[EngineInput] = msgspec.msgpack.Decoder(EngineInput)
ENGINE_OUTPUT: msgspec.msgpack.Decoder[EngineOutput] = msgspec.msgpack.Decoder(EngineOutput)
