"""The table of the metrics: what docs/operators.md lists, each with its kind, its words and its buckets."""

from __future__ import annotations

from dataclasses import dataclass
from operator import attrgetter
from typing import Literal

from dflash_backend.messages import EngineStats
from dflash_backend.traffic import DROPPED, RECORDED, RECORDED_BYTES

_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)
_STEP_SECONDS = (0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0)
_TOKEN_SECONDS = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0)
_TOKENS = tuple(float(digit * 10**power) for power in range(6) for digit in (1, 2, 5))
_COMPLETIONS = (1.0, 2.0, 5.0, 10.0, 20.0, 50.0)
INFINITY = "+Inf"
# What the hash table of Triton's metrics library holds before it grows; larger families come in any order.
SMALL_FAMILY = 13


@dataclass(frozen=True, slots=True)
class MetricSpec:
    """One metric.

    `label` names its label besides `model` and `version`; `buckets` are a histogram's upper bounds, in the unit that
    its name ends with. `of_steps`: it tells of the engine's steps and not of requests, so no response waits for it.
    `per_request`: a histogram with one observation for each request or completion. `more_labels`: of a gauge that is
    made when their values are known (`Metrics.inform`). `follows`: the field of `EngineStats` that it shows, by its
    path; with the label "tier" that of `TierStats`. Where it is empty the stub counts, in Triton's process. The stub
    counts tokens of prompts and answers itself: a prompt once for all its completions, and an answer without the
    tokens past a stop string. `EngineStats.num_prompt_tokens` and `num_generation_tokens` are other numbers.
    """

    name: str
    kind: Literal["counter", "gauge", "histogram"]
    help: str
    label: str = ""
    buckets: tuple[float, ...] = ()
    of_steps: bool = False
    per_request: bool = False
    more_labels: tuple[str, ...] = ()
    follows: str = ""

    def numbers(self, stats: EngineStats) -> dict[str, float]:
        """What it follows, by the values of its label."""
        if self.label == "tier":
            return {tier: getattr(counts, self.follows) for tier, counts in stats.tiers.items()}
        value = attrgetter(self.follows)(stats)
        return {str(i): each for i, each in enumerate(value)} if self.label == "position" else {"": value}


def _counter(name: str, help: str, follows: str = "", label: str = "") -> MetricSpec:
    return MetricSpec(name, "counter", help, label, follows=follows)


def _by_position(name: str, help: str, follows: str) -> MetricSpec:
    return MetricSpec(name, "counter", help, "position", of_steps=True, follows=follows)


def _of_tier(name: str, help: str, follows: str) -> MetricSpec:
    return MetricSpec(name, "counter", help, "tier", follows=follows)


def _gauge(name: str, help: str, follows: str = "", more_labels: tuple[str, ...] = ()) -> MetricSpec:
    return MetricSpec(name, "gauge", help, "engine", more_labels=more_labels, follows=follows)


def _histogram(name: str, help: str, buckets: tuple[float, ...], label: str = "", of_steps: bool = False) -> MetricSpec:
    return MetricSpec(name, "histogram", help, label, buckets, of_steps, per_request=not of_steps)


METRICS: tuple[MetricSpec, ...] = (
    _counter("dflash:spec_decode_num_drafts_total", "Draft blocks that were verified", "spec_decoding.num_drafts"),
    _counter(
        "dflash:spec_decode_num_draft_tokens_total", "Draft tokens that were verified", "spec_decoding.num_draft_tokens"
    ),
    _counter(
        "dflash:spec_decode_num_accepted_tokens_total",
        "Draft tokens that were accepted",
        "spec_decoding.num_accepted_tokens",
    ),
    _by_position(
        "dflash:spec_decode_num_accepted_tokens_per_pos_total",
        "Draft blocks whose token at this position (0-based) was accepted",
        "spec_decoding.num_accepted_tokens_per_pos",
    ),
    _by_position(
        "dflash:spec_decode_num_draft_tokens_per_pos_total",
        "Draft tokens at this position (0-based) that were verified, with adaptive_speculation",
        "speculation.num_draft_tokens_per_pos",
    ),
    _by_position(
        "dflash:spec_decode_num_expected_tokens_per_pos_total",
        "Draft tokens at this position (0-based) that were expected to be accepted, with adaptive_speculation",
        "speculation.num_expected_tokens_per_pos",
    ),
    _counter(
        "dflash:spec_decode_num_steps_total",
        "Steps in which requests decoded that may draft, with adaptive_speculation",
        "speculation.num_steps",
    ),
    _counter(
        "dflash:spec_decode_num_steps_without_drafts_total",
        "Those of them in which nothing was drafted, since it would not pay",
        "speculation.num_steps_without_drafts",
    ),
    _counter(
        "dflash:spec_decode_num_proposed_tokens_total",
        "Draft tokens that were proposed, verified or not, with adaptive_speculation",
        "speculation.num_proposed_tokens",
    ),
    _counter(
        "dflash:spec_decode_num_budgeted_steps_total",
        "Steps that verified only the likeliest of their drafts, with adaptive_speculation",
        "speculation.num_budgeted_steps",
    ),
    _counter(
        "dflash:spec_decode_num_lookup_draft_tokens_total",
        "Draft tokens that were verified and that prompt lookup had in place of the drafter's model",
        "lookup.num_draft_tokens",
    ),
    _counter(
        "dflash:spec_decode_num_lookup_accepted_tokens_total",
        "Those of them that were accepted",
        "lookup.num_accepted_tokens",
    ),
    _gauge(
        "dflash:spec_decode_confidence_weight",
        "How much the drafter's confidence in a draft counts, 0 for nothing, with adaptive_speculation",
        "speculation.confidence_weight",
    ),
    _counter("dflash:prompt_tokens_total", "Tokens of prompts whose answers have begun"),
    _counter("dflash:generation_tokens_total", "Tokens that were sent to clients"),
    _counter(
        "dflash:prefix_cache_queries_total", "Prompt tokens looked up in the prefix cache", "prefix_cache_queries"
    ),
    _counter("dflash:prefix_cache_hits_total", "Prompt tokens found in the prefix cache", "prefix_cache_hits"),
    _of_tier(
        "dflash:kv_tier_hit_tokens_total",
        "Prompt tokens that were loaded from a KV tier in place of being computed",
        "num_hit_tokens",
    ),
    _of_tier("dflash:kv_tier_stored_bytes_total", "Bytes that went to a KV tier", "num_bytes_stored"),
    _of_tier("dflash:kv_tier_stored_seconds_total", "Time of writing them", "store_seconds"),
    _of_tier(
        "dflash:kv_tier_loaded_bytes_total", "Bytes that came back from a KV tier for requests", "num_bytes_loaded"
    ),
    _of_tier("dflash:kv_tier_loaded_seconds_total", "Time of reading them", "load_seconds"),
    _of_tier(
        "dflash:kv_tier_lost_total",
        "Records that were to go to a KV tier and left the one above before, or found no space",
        "num_lost",
    ),
    _of_tier(
        "dflash:kv_tier_computed_total",
        "Requests that computed what a KV tier has, since that takes less time than loading",
        "num_computed",
    ),
    _counter(
        "dflash:kv_kept_prompts_total", "Prompts whose KV was kept for a decode server, with kv_role", "kept.num_kept"
    ),
    _counter(
        "dflash:kv_fetched_prompts_total",
        "Those of them that were fetched, or found not to be needed",
        "kept.num_taken",
    ),
    _counter(
        "dflash:kv_given_up_prompts_total",
        "Those of them that no server fetched in time, or whose blocks were needed",
        "kept.num_expired",
    ),
    _counter("dflash:kv_events_total", "Events of the prefix cache that were published, with kv_events_endpoint"),
    _counter(RECORDED, "Answers that were written down, with record_traffic"),
    _counter(RECORDED_BYTES, "Bytes of these"),
    _counter(DROPPED, "Answers that should have been written down and were not", label="reason"),
    _counter("dflash:num_preemptions_total", "Requests that gave up their blocks for others", "num_preemptions"),
    _counter("dflash:grammar_requests_total", "Requests with structured output", "grammars.num_requests"),
    _counter("dflash:grammars_compiled_total", "Grammars that were compiled", "grammars.num_compiled"),
    _counter(
        "dflash:grammar_compile_seconds_total",
        "Time of compiling grammars, beside the steps",
        "grammars.compile_seconds",
    ),
    _counter("dflash:grammar_steps_total", "Steps in which a grammar hid tokens", "grammars.num_mask_steps"),
    _counter(
        "dflash:grammar_mask_seconds_total", "The host's time of filling masks for these steps", "grammars.mask_seconds"
    ),
    _counter("dflash:request_success_total", "Finished requests by finish reason", label="finished_reason"),
    _counter("dflash:request_errors_total", "Requests that ended in an error by status", label="status"),
    _counter("dflash:drafter_swaps_total", "What came of swaps of the drafter, by outcome", label="outcome"),
    _counter("dflash:engine_restarts_total", "Engine processes that were started after one had died"),
    _counter(
        "dflash:requests_routed_total", "Requests that an engine was sent, with data_parallel_size", label="engine"
    ),
    _gauge("dflash:engine_ready", "1 while the engine takes requests, else 0"),
    _gauge("dflash:num_requests_running", "Requests that run", "num_requests_running"),
    _gauge("dflash:num_requests_waiting", "Requests that wait", "num_requests_waiting"),
    _gauge(
        "dflash:num_requests_in_flight",
        "Requests that were taken and not answered to the end, whatever the engine says of them",
    ),
    _gauge(
        "dflash:cache_config_info",
        "1 with the block size in tokens, and the KV blocks of all engines of the instance, as labels",
        more_labels=("block_size", "num_gpu_blocks"),
    ),
    _gauge("dflash:kv_cache_usage_perc", "Share of KV blocks in use, 0 to 1", "kv_cache_usage"),
    _gauge(
        "dflash:engine_silence_seconds",
        "Time since the engine last spoke, which it does after each step and once a second without one",
    ),
    _gauge(
        "dflash:stub_heartbeat_timestamp_seconds",
        "When the thread that answers requests last brought these metrics up to date, in seconds since 1970",
    ),
    _histogram("dflash:time_to_first_token_seconds", "From a request's arrival to its first token", _SECONDS),
    _histogram(
        "dflash:inter_token_latency_seconds",
        "Time between a token and the one before it, observed for each token but the first; those that one step yields "
        "share its time",
        _TOKEN_SECONDS,
        of_steps=True,
    ),
    _histogram(
        "dflash:request_time_per_output_token_seconds",
        "Mean time between the tokens of a request, observed once a request",
        _TOKEN_SECONDS,
    ),
    _histogram("dflash:e2e_request_latency_seconds", "From a request's arrival to its last token", _SECONDS),
    _histogram("dflash:request_queue_time_seconds", "From a request's arrival to its first step", _SECONDS),
    _histogram("dflash:request_prompt_tokens", "Prompt tokens of a finished request", _TOKENS),
    _histogram("dflash:request_generation_tokens", "Tokens of a finished completion", _TOKENS),
    _histogram("dflash:request_params_n", "Completions of a finished request", _COMPLETIONS),
    _histogram("dflash:step_seconds", "Time of an engine step's phases", _STEP_SECONDS, label="phase", of_steps=True),
)

# What vLLM and Triton's backend for it publish, by the metric here that counts the same: for dashboards, tests and
# benchmarks made for them, such as `vllm bench serve`, which reads the acceptance there.
VLLM_NAMES = {
    "dflash:spec_decode_num_drafts_total": "vllm:spec_decode_num_drafts_total",
    "dflash:spec_decode_num_draft_tokens_total": "vllm:spec_decode_num_draft_tokens_total",
    "dflash:spec_decode_num_accepted_tokens_total": "vllm:spec_decode_num_accepted_tokens_total",
    "dflash:spec_decode_num_accepted_tokens_per_pos_total": "vllm:spec_decode_num_accepted_tokens_per_pos_total",
    "dflash:prefix_cache_queries_total": "vllm:prefix_cache_queries_total",
    "dflash:prefix_cache_hits_total": "vllm:prefix_cache_hits_total",
    "dflash:num_preemptions_total": "vllm:num_preemptions_total",
    "dflash:prompt_tokens_total": "vllm:prompt_tokens_total",
    "dflash:generation_tokens_total": "vllm:generation_tokens_total",
    "dflash:time_to_first_token_seconds": "vllm:time_to_first_token_seconds",
    "dflash:inter_token_latency_seconds": "vllm:time_per_output_token_seconds",
    "dflash:e2e_request_latency_seconds": "vllm:e2e_request_latency_seconds",
    "dflash:request_prompt_tokens": "vllm:request_prompt_tokens",
    "dflash:request_generation_tokens": "vllm:request_generation_tokens",
    "dflash:request_params_n": "vllm:request_params_n",
}
# Gauges that routers of several servers read, by vLLM's names: those of all engines of an instance, added up or, of a
# share, their mean.
VLLM_GAUGES = {
    "dflash:num_requests_running": "vllm:num_requests_running",
    "dflash:num_requests_waiting": "vllm:num_requests_waiting",
    "dflash:kv_cache_usage_perc": "vllm:kv_cache_usage_perc",
}
CACHE_CONFIG = "dflash:cache_config_info"
FOLLOWING = tuple(spec for spec in METRICS if spec.follows)
# Of the stub: the same for all its engines.
INSTANCE_GAUGES = frozenset(
    ("dflash:num_requests_in_flight", "dflash:stub_heartbeat_timestamp_seconds", *VLLM_GAUGES.values())
)
