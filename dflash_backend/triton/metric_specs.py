"""The table of the metrics: what docs/operators.md lists, each with its kind, its words and its buckets."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

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
    made when their values are known (`Metrics.inform`).
    """

    name: str
    kind: Literal["counter", "gauge", "histogram"]
    help: str
    label: str = ""
    buckets: tuple[float, ...] = ()
    of_steps: bool = False
    per_request: bool = False
    more_labels: tuple[str, ...] = ()


METRICS: tuple[MetricSpec, ...] = (
    MetricSpec("dflash:spec_decode_num_drafts_total", "counter", "Draft blocks that were verified"),
    MetricSpec("dflash:spec_decode_num_draft_tokens_total", "counter", "Draft tokens that were verified"),
    MetricSpec("dflash:spec_decode_num_accepted_tokens_total", "counter", "Draft tokens that were accepted"),
    MetricSpec(
        "dflash:spec_decode_num_accepted_tokens_per_pos_total",
        "counter",
        "Draft blocks whose token at this position (0-based) was accepted",
        label="position",
        of_steps=True,
    ),
    MetricSpec(
        "dflash:spec_decode_num_draft_tokens_per_pos_total",
        "counter",
        "Draft tokens at this position (0-based) that were verified, with adaptive_speculation",
        label="position",
        of_steps=True,
    ),
    MetricSpec(
        "dflash:spec_decode_num_expected_tokens_per_pos_total",
        "counter",
        "Draft tokens at this position (0-based) that were expected to be accepted, with adaptive_speculation",
        label="position",
        of_steps=True,
    ),
    MetricSpec(
        "dflash:spec_decode_num_steps_total",
        "counter",
        "Steps in which requests decoded that may draft, with adaptive_speculation",
    ),
    MetricSpec(
        "dflash:spec_decode_num_steps_without_drafts_total",
        "counter",
        "Those of them in which nothing was drafted, since it would not pay",
    ),
    MetricSpec(
        "dflash:spec_decode_num_proposed_tokens_total",
        "counter",
        "Draft tokens that were proposed, verified or not, with adaptive_speculation",
    ),
    MetricSpec(
        "dflash:spec_decode_num_budgeted_steps_total",
        "counter",
        "Steps that verified only the likeliest of their drafts, with adaptive_speculation",
    ),
    MetricSpec(
        "dflash:spec_decode_confidence_weight",
        "gauge",
        "How much the drafter's confidence in a draft counts, 0 for nothing, with adaptive_speculation",
        label="engine",
    ),
    MetricSpec("dflash:prompt_tokens_total", "counter", "Tokens of prompts whose answers have begun"),
    MetricSpec("dflash:generation_tokens_total", "counter", "Tokens that were sent to clients"),
    MetricSpec("dflash:prefix_cache_queries_total", "counter", "Prompt tokens looked up in the prefix cache"),
    MetricSpec("dflash:prefix_cache_hits_total", "counter", "Prompt tokens found in the prefix cache"),
    MetricSpec(
        "dflash:kv_tier_hit_tokens_total",
        "counter",
        "Prompt tokens that were loaded from a KV tier in place of being computed",
        label="tier",
    ),
    MetricSpec("dflash:kv_tier_stored_bytes_total", "counter", "Bytes that went to a KV tier", label="tier"),
    MetricSpec("dflash:kv_tier_stored_seconds_total", "counter", "Time of writing them", label="tier"),
    MetricSpec(
        "dflash:kv_tier_loaded_bytes_total", "counter", "Bytes that came back from a KV tier for requests", label="tier"
    ),
    MetricSpec("dflash:kv_tier_loaded_seconds_total", "counter", "Time of reading them", label="tier"),
    MetricSpec(
        "dflash:kv_tier_lost_total",
        "counter",
        "Records that were to go to a KV tier and left the one above before, or found no space",
        label="tier",
    ),
    MetricSpec(
        "dflash:kv_tier_computed_total",
        "counter",
        "Requests that computed what a KV tier has, since that takes less time than loading",
        label="tier",
    ),
    MetricSpec(
        "dflash:kv_kept_prompts_total", "counter", "Prompts whose KV was kept for a decode server, with kv_role"
    ),
    MetricSpec(
        "dflash:kv_fetched_prompts_total", "counter", "Those of them that were fetched, or found not to be needed"
    ),
    MetricSpec(
        "dflash:kv_given_up_prompts_total",
        "counter",
        "Those of them that no server fetched in time, or whose blocks were needed",
    ),
    MetricSpec(
        "dflash:kv_events_total", "counter", "Events of the prefix cache that were published, with kv_events_endpoint"
    ),
    MetricSpec(RECORDED, "counter", "Answers that were written down, with record_traffic"),
    MetricSpec(RECORDED_BYTES, "counter", "Bytes of these"),
    MetricSpec(DROPPED, "counter", "Answers that should have been written down and were not", label="reason"),
    MetricSpec("dflash:num_preemptions_total", "counter", "Requests that gave up their blocks for others"),
    MetricSpec("dflash:grammar_requests_total", "counter", "Requests with structured output"),
    MetricSpec("dflash:grammars_compiled_total", "counter", "Grammars that were compiled"),
    MetricSpec("dflash:grammar_compile_seconds_total", "counter", "Time of compiling grammars, beside the steps"),
    MetricSpec("dflash:grammar_steps_total", "counter", "Steps in which a grammar hid tokens"),
    MetricSpec("dflash:grammar_mask_seconds_total", "counter", "The host's time of filling masks for these steps"),
    MetricSpec(
        "dflash:request_success_total", "counter", "Finished requests by finish reason", label="finished_reason"
    ),
    MetricSpec("dflash:request_errors_total", "counter", "Requests that ended in an error by status", label="status"),
    MetricSpec(
        "dflash:drafter_swaps_total", "counter", "What came of swaps of the drafter, by outcome", label="outcome"
    ),
    MetricSpec("dflash:engine_restarts_total", "counter", "Engine processes that were started after one had died"),
    MetricSpec(
        "dflash:requests_routed_total",
        "counter",
        "Requests that an engine was sent, with data_parallel_size",
        label="engine",
    ),
    MetricSpec("dflash:engine_ready", "gauge", "1 while the engine takes requests, else 0", label="engine"),
    MetricSpec("dflash:num_requests_running", "gauge", "Requests that run", label="engine"),
    MetricSpec("dflash:num_requests_waiting", "gauge", "Requests that wait", label="engine"),
    MetricSpec(
        "dflash:num_requests_in_flight",
        "gauge",
        "Requests that were taken and not answered to the end, whatever the engine says of them",
        label="engine",
    ),
    MetricSpec(
        "dflash:cache_config_info",
        "gauge",
        "1 with the block size in tokens, and the KV blocks of all engines of the instance, as labels",
        label="engine",
        more_labels=("block_size", "num_gpu_blocks"),
    ),
    MetricSpec("dflash:kv_cache_usage_perc", "gauge", "Share of KV blocks in use, 0 to 1", label="engine"),
    MetricSpec(
        "dflash:engine_silence_seconds",
        "gauge",
        "Time since the engine last spoke, which it does after each step and once a second without one",
        label="engine",
    ),
    MetricSpec(
        "dflash:stub_heartbeat_timestamp_seconds",
        "gauge",
        "When the thread that answers requests last brought these metrics up to date, in seconds since 1970",
        label="engine",
    ),
    MetricSpec(
        "dflash:time_to_first_token_seconds",
        "histogram",
        "From a request's arrival to its first token",
        "",
        _SECONDS,
        per_request=True,
    ),
    MetricSpec(
        "dflash:inter_token_latency_seconds",
        "histogram",
        "Time between a token and the one before it, observed for each token but the first; those that one step yields "
        "share its time",
        "",
        _TOKEN_SECONDS,
        of_steps=True,
    ),
    MetricSpec(
        "dflash:request_time_per_output_token_seconds",
        "histogram",
        "Mean time between the tokens of a request, observed once a request",
        "",
        _TOKEN_SECONDS,
        per_request=True,
    ),
    MetricSpec(
        "dflash:e2e_request_latency_seconds",
        "histogram",
        "From a request's arrival to its last token",
        "",
        _SECONDS,
        per_request=True,
    ),
    MetricSpec(
        "dflash:request_queue_time_seconds",
        "histogram",
        "From a request's arrival to its first step",
        "",
        _SECONDS,
        per_request=True,
    ),
    MetricSpec(
        "dflash:request_prompt_tokens",
        "histogram",
        "Prompt tokens of a finished request",
        "",
        _TOKENS,
        per_request=True,
    ),
    MetricSpec(
        "dflash:request_generation_tokens",
        "histogram",
        "Tokens of a finished completion",
        "",
        _TOKENS,
        per_request=True,
    ),
    MetricSpec(
        "dflash:request_params_n", "histogram", "Completions of a finished request", "", _COMPLETIONS, per_request=True
    ),
    MetricSpec(
        "dflash:step_seconds",
        "histogram",
        "Time of an engine step's phases",
        label="phase",
        buckets=_STEP_SECONDS,
        of_steps=True,
    ),
)

# Counters of the engine, by the field of `EngineStats` that they follow. Tokens of prompts and answers are counted on
# this side: a prompt once for all its completions, and an answer without the tokens past a stop string.
ENGINE_COUNTERS = {
    "prefix_cache_queries": "dflash:prefix_cache_queries_total",
    "prefix_cache_hits": "dflash:prefix_cache_hits_total",
    "num_preemptions": "dflash:num_preemptions_total",
}
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
# Counters of grammars, by the field of `GrammarStats`.
GRAMMAR_COUNTERS = {
    "num_requests": "dflash:grammar_requests_total",
    "num_compiled": "dflash:grammars_compiled_total",
    "compile_seconds": "dflash:grammar_compile_seconds_total",
    "num_mask_steps": "dflash:grammar_steps_total",
    "mask_seconds": "dflash:grammar_mask_seconds_total",
}
# Counters of a tier of KV, by the field of `TierStats`.
TIER_COUNTERS = {
    "num_hit_tokens": "dflash:kv_tier_hit_tokens_total",
    "num_bytes_stored": "dflash:kv_tier_stored_bytes_total",
    "store_seconds": "dflash:kv_tier_stored_seconds_total",
    "num_bytes_loaded": "dflash:kv_tier_loaded_bytes_total",
    "load_seconds": "dflash:kv_tier_loaded_seconds_total",
    "num_lost": "dflash:kv_tier_lost_total",
    "num_computed": "dflash:kv_tier_computed_total",
}
# Counters of what is kept for other servers, by the field of `TransferStats`.
TRANSFER_COUNTERS = {
    "num_kept": "dflash:kv_kept_prompts_total",
    "num_taken": "dflash:kv_fetched_prompts_total",
    "num_expired": "dflash:kv_given_up_prompts_total",
}
ENGINE_GAUGES = {
    "num_requests_running": "dflash:num_requests_running",
    "num_requests_waiting": "dflash:num_requests_waiting",
    "kv_cache_usage": "dflash:kv_cache_usage_perc",
}
CONFIDENCE_WEIGHT = "dflash:spec_decode_confidence_weight"
# Of the stub: the same for all its engines.
INSTANCE_GAUGES = frozenset(
    ("dflash:num_requests_in_flight", "dflash:stub_heartbeat_timestamp_seconds", *VLLM_GAUGES.values())
)
