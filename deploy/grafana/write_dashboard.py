"""Writes dashboards/dflash.json, the Grafana dashboard, from the panels listed here. Run by `make docs`.

Every expression is over the metrics of `dflash_backend.triton.metrics`, summed over the engines of a model, or over
those of the OpenAI front ends, `dflash_openai.metrics`.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

FILE = Path(__file__).resolve().parent / "dashboards" / "dflash.json"

DATASOURCE = {"type": "prometheus", "uid": "${datasource}"}
FRONT_END = "dflash_openai:"
WHERE = 'model=~"$model"'
WIDTH, HEIGHT = 8, 8
COLUMNS = 24 // WIDTH


@dataclass(frozen=True)
class Panel:
    """A chart: `series` are pairs of legend and PromQL expression. `unit` is Grafana's name of one."""

    title: str
    unit: str
    series: tuple[tuple[str, str], ...]
    help: str = ""
    most: float | None = None


def rate(metric: str, by: str = "model") -> str:
    """A counter's growth per second, in sum over everything but `by`."""
    return f"sum by ({by}) (rate(dflash:{metric}{{{WHERE}}}[$__rate_interval]))"


def gauge(metric: str) -> str:
    """A gauge, in sum over the model's engines."""
    return f"sum by (model) (dflash:{metric}{{{WHERE}}})"


def times(metric: str) -> tuple[tuple[str, str], ...]:
    """A histogram's mean and percentiles."""
    buckets = rate(f"{metric}_bucket", "model, le")
    mean = ("mean {{model}}", f"{rate(f'{metric}_sum')} / {rate(f'{metric}_count')}")
    return (mean, *((f"p{p} {{{{model}}}}", f"histogram_quantile({p / 100}, {buckets})") for p in (50, 99)))


def front_end_times(metric: str) -> tuple[tuple[str, str], ...]:
    """Percentiles of a histogram of the OpenAI front ends, by path."""
    buckets = f"sum by (path, le) (rate({FRONT_END}{metric}_bucket[$__rate_interval]))"
    return tuple((f"p{p} {{{{path}}}}", f"histogram_quantile({p / 100}, {buckets})") for p in (50, 99))


PANELS: tuple[Panel, ...] = (
    Panel(
        "Tokens per second",
        "short",
        (
            ("answers {{model}}", rate("generation_tokens_total")),
            ("prompts {{model}}", rate("prompt_tokens_total")),
        ),
    ),
    Panel(
        "Acceptance length",
        "short",
        (
            (
                "{{model}}",
                f"1 + {rate('spec_decode_num_accepted_tokens_total')} / {rate('spec_decode_num_drafts_total')}",
            ),
        ),
        "Tokens that a step yields for a request, on average. 1 means that no draft is ever accepted.",
    ),
    Panel(
        "Acceptance by position",
        "percentunit",
        (
            (
                "{{position}}",
                f"{rate('spec_decode_num_accepted_tokens_per_pos_total', 'model, position')} "
                f"/ on (model) group_left () {rate('spec_decode_num_drafts_total')}",
            ),
        ),
        "Share of the draft blocks whose token at this position was accepted.",
        most=1,
    ),
    Panel(
        "Drafts per step",
        "short",
        (
            (
                "proposed {{model}}",
                f"{rate('spec_decode_num_proposed_tokens_total')} / {rate('spec_decode_num_steps_total')}",
            ),
            (
                "verified {{model}}",
                f"{rate('spec_decode_num_draft_tokens_total')} / {rate('spec_decode_num_steps_total')}",
            ),
            (
                "accepted {{model}}",
                f"{rate('spec_decode_num_accepted_tokens_total')} / {rate('spec_decode_num_steps_total')}",
            ),
        ),
        "Draft tokens of all rows of a step, with adaptive_speculation.",
    ),
    Panel(
        "Steps with a budget",
        "percentunit",
        (("{{model}}", f"{rate('spec_decode_num_budgeted_steps_total')} / {rate('spec_decode_num_steps_total')}"),),
        "Share of the decode steps that verified only the likeliest of their drafts, with adaptive_speculation.",
        most=1,
    ),
    Panel(
        "Drafts of prompt lookup beside a drafter",
        "percentunit",
        (
            (
                "of all {{model}}",
                f"{rate('spec_decode_num_lookup_draft_tokens_total')} / {rate('spec_decode_num_draft_tokens_total')}",
            ),
            (
                "accepted {{model}}",
                f"{rate('spec_decode_num_lookup_accepted_tokens_total')}"
                f" / {rate('spec_decode_num_lookup_draft_tokens_total')}",
            ),
        ),
        "Share of the verified draft tokens that were looked up in place of the drafter's, and of these the accepted.",
        most=1,
    ),
    Panel(
        "Weight of the drafter's confidence",
        "short",
        (("{{model}} {{engine}}", f"dflash:spec_decode_confidence_weight{{{WHERE}}}"),),
        "How much the drafter's confidence tells of a draft's chance, 0 for nothing, with adaptive_speculation.",
    ),
    Panel(
        "Steps without drafts",
        "percentunit",
        (
            (
                "{{model}}",
                f"{rate('spec_decode_num_steps_without_drafts_total')} / {rate('spec_decode_num_steps_total')}",
            ),
        ),
        "Share of the decode steps in which drafting would not pay, with adaptive_speculation.",
        most=1,
    ),
    Panel(
        "Expected acceptance by position",
        "percentunit",
        (
            (
                "{{position}}",
                f"{rate('spec_decode_num_expected_tokens_per_pos_total', 'model, position')} "
                f"/ {rate('spec_decode_num_draft_tokens_per_pos_total', 'model, position')}",
            ),
        ),
        "Share of the verified drafts at this position that were expected to be accepted, with adaptive_speculation.",
        most=1,
    ),
    Panel("Time to first token", "s", times("time_to_first_token_seconds")),
    Panel(
        "Time between tokens",
        "s",
        times("inter_token_latency_seconds"),
        "Observed for each token but the first; the tokens that one step yields share its time.",
    ),
    Panel("Whole request", "s", times("e2e_request_latency_seconds")),
    Panel(
        "Time per token of a request",
        "s",
        times("request_time_per_output_token_seconds"),
        "The mean over a request's tokens, observed once for each request.",
    ),
    Panel("Prompt tokens of a request", "short", times("request_prompt_tokens")),
    Panel("Tokens of a completion", "short", times("request_generation_tokens")),
    Panel("Completions of a request", "short", times("request_params_n")),
    Panel(
        "Requests",
        "short",
        (
            ("running {{model}}", gauge("num_requests_running")),
            ("waiting {{model}}", gauge("num_requests_waiting")),
            ("in flight {{model}}", gauge("num_requests_in_flight")),
        ),
    ),
    Panel("Wait in the queue", "s", times("request_queue_time_seconds")),
    Panel(
        "Requests ended per second",
        "reqps",
        (
            ("{{finished_reason}} {{model}}", rate("request_success_total", "model, finished_reason")),
            ("{{status}} {{model}}", rate("request_errors_total", "model, status")),
        ),
    ),
    Panel(
        "Prefix cache hit rate",
        "percentunit",
        (("{{model}}", f"{rate('prefix_cache_hits_total')} / {rate('prefix_cache_queries_total')}"),),
        "Share of the prompt tokens that were found in the prefix cache.",
        most=1,
    ),
    Panel(
        "Prompt tokens from KV tiers per second",
        "short",
        (("{{tier}} {{model}}", rate("kv_tier_hit_tokens_total", "model, tier")),),
        "Prompt tokens that came from host memory or disk and were not computed.",
    ),
    Panel(
        "KV to and from tiers",
        "Bps",
        (
            ("to {{tier}} {{model}}", rate("kv_tier_stored_bytes_total", "model, tier")),
            ("from {{tier}} {{model}}", rate("kv_tier_loaded_bytes_total", "model, tier")),
        ),
    ),
    Panel(
        "Time of moving KV per second",
        "s",
        (
            ("to {{tier}} {{model}}", rate("kv_tier_stored_seconds_total", "model, tier")),
            ("from {{tier}} {{model}}", rate("kv_tier_loaded_seconds_total", "model, tier")),
        ),
        "Near 1: a tier is as busy as it can be.",
    ),
    Panel(
        "Misses of KV tiers per second",
        "short",
        (
            ("lost before {{tier}} {{model}}", rate("kv_tier_lost_total", "model, tier")),
            ("computed sooner than from {{tier}} {{model}}", rate("kv_tier_computed_total", "model, tier")),
        ),
        "Blocks that left before they could be kept, and requests for which computing was quicker than loading.",
    ),
    Panel(
        "Prompts for decode servers per second",
        "short",
        (
            ("kept {{model}}", rate("kv_kept_prompts_total")),
            ("fetched {{model}}", rate("kv_fetched_prompts_total")),
            ("given up {{model}}", rate("kv_given_up_prompts_total")),
        ),
        "Prompts of which a prefill server kept the KV, and what became of it.",
    ),
    Panel(
        "KV blocks in use",
        "percentunit",
        (("{{model}} {{engine}}", f"dflash:kv_cache_usage_perc{{{WHERE}}}"),),
        "Blocks of finished requests that are kept for the prefix cache do not count.",
        most=1,
    ),
    Panel(
        "Requests sent to each engine per second",
        "reqps",
        (("{{model}} {{engine}}", rate("requests_routed_total", "model, engine")),),
        "With data_parallel_size. One line far above the others: most requests share one prefix.",
    ),
    Panel(
        "Drafters swapped",
        "short",
        (
            (
                "{{model}} {{outcome}}",
                f"sum by (model, outcome) (increase(dflash:drafter_swaps_total{{{WHERE}}}[$__rate_interval]))",
            ),
        ),
        "What came of requests for another drafter. reverted: fewer drafts of the new one were accepted.",
    ),
    Panel(
        "Prefix cache events per second",
        "short",
        (("{{model}}", rate("kv_events_total")),),
        "Events that were published for routers of several servers, with kv_events_endpoint.",
    ),
    Panel(
        "Answers written down per second",
        "short",
        (
            ("{{model}}", rate("traffic_recorded_total")),
            ("{{model}} dropped: {{reason}}", rate("traffic_dropped_total", "model, reason")),
        ),
        "For training, with record_traffic. They are personal data.",
    ),
    Panel(
        "Bytes of answers written down per second",
        "Bps",
        (("{{model}}", rate("traffic_recorded_bytes_total")),),
        "The files of record_traffic hold at most record_traffic_gb; the oldest go first.",
    ),
    Panel(
        "KV blocks",
        "short",
        (("{{model}} {{num_gpu_blocks}} blocks of {{block_size}} tokens", f"dflash:cache_config_info{{{WHERE}}}"),),
        "The line is 1 while there is a cache; its name has the sizes.",
    ),
    Panel("Preemptions per second", "short", (("{{model}}", rate("num_preemptions_total")),)),
    Panel(
        "Phases of a step, mean",
        "s",
        (
            (
                "{{phase}} {{model}}",
                f"{rate('step_seconds_sum', 'model, phase')} / {rate('step_seconds_count', 'model, phase')}",
            ),
        ),
    ),
    Panel(
        "Silence of the engine",
        "s",
        (("{{model}} {{engine}}", f"dflash:engine_silence_seconds{{{WHERE}}}"),),
        "It speaks after each step and once a second without one: a line that climbs is a hang or a very long step.",
    ),
    Panel(
        "Age of the stub's heartbeat",
        "s",
        (("{{model}} {{engine}}", f"time() - dflash:stub_heartbeat_timestamp_seconds{{{WHERE}}}"),),
        "A line that climbs: Triton's stub is dead or hangs.",
    ),
    Panel("Engines ready", "short", (("{{model}} {{engine}}", f"dflash:engine_ready{{{WHERE}}}"),)),
    Panel(
        "Engine restarts",
        "short",
        (("{{model}}", f"sum by (model) (increase(dflash:engine_restarts_total{{{WHERE}}}[$__rate_interval]))"),),
    ),
    Panel(
        "Requests with a grammar per second",
        "reqps",
        (("{{model}}", rate("grammar_requests_total")), ("compiled {{model}}", rate("grammars_compiled_total"))),
        "Structured output. A grammar that was compiled before is taken from a cache.",
    ),
    Panel(
        "Time for grammars",
        "s",
        (
            ("masks of a step {{model}}", f"{rate('grammar_mask_seconds_total')} / {rate('grammar_steps_total')}"),
            (
                "compiling one {{model}}",
                f"{rate('grammar_compile_seconds_total')} / {rate('grammars_compiled_total')}",
            ),
        ),
    ),
    Panel(
        "OpenAI requests per second",
        "reqps",
        (("{{path}} {{status}}", f"sum by (path, status) (rate({FRONT_END}requests_total[$__rate_interval]))"),),
        "Requests that have ended, by path and HTTP status; 499: the client left.",
    ),
    Panel("OpenAI requests running", "short", (("{{instance}}", f"{FRONT_END}requests_running"),)),
    Panel("OpenAI time to first event", "s", front_end_times("time_to_first_event_seconds"), "Of streams."),
    Panel("OpenAI request duration", "s", front_end_times("request_duration_seconds")),
    Panel(
        "Triton servers that front ends reach",
        "short",
        (("{{server}}", f"min by (server) ({FRONT_END}triton_up)"),),
        "0: its metrics could not be read.",
        most=1,
    ),
)


def dashboard() -> dict[str, Any]:
    """The dashboard in Grafana's JSON model."""
    return {
        "uid": "dflash",
        "title": "DFlash on Triton",
        "schemaVersion": 39,
        "version": 1,
        "editable": True,
        "refresh": "5s",
        "time": {"from": "now-30m", "to": "now"},
        "templating": {"list": [_datasource_variable(), _model_variable()]},
        "panels": [_panel(index, panel) for index, panel in enumerate(PANELS)],
    }


def text() -> str:
    """The file's content."""
    return json.dumps(dashboard(), indent=1) + "\n"


def _datasource_variable() -> dict[str, Any]:
    return {"name": "datasource", "type": "datasource", "query": "prometheus", "label": "Data source"}


def _model_variable() -> dict[str, Any]:
    return {
        "name": "model",
        "label": "Model",
        "type": "query",
        "datasource": DATASOURCE,
        "query": {"query": "label_values(dflash:engine_ready, model)", "refId": "models"},
        "refresh": 2,
        "includeAll": True,
        "multi": True,
        "current": {"text": "All", "value": "$__all"},
    }


def _panel(index: int, panel: Panel) -> dict[str, Any]:
    defaults: dict[str, Any] = {"unit": panel.unit, "min": 0, "custom": {"lineWidth": 1, "fillOpacity": 5}}
    if panel.most is not None:
        defaults["max"] = panel.most
    return {
        "id": index + 1,
        "type": "timeseries",
        "title": panel.title,
        "description": panel.help,
        "datasource": DATASOURCE,
        "gridPos": {"x": index % COLUMNS * WIDTH, "y": index // COLUMNS * HEIGHT, "w": WIDTH, "h": HEIGHT},
        "fieldConfig": {"defaults": defaults, "overrides": []},
        "options": {"legend": {"displayMode": "list", "placement": "bottom"}, "tooltip": {"mode": "multi"}},
        "targets": [
            {"refId": chr(ord("A") + number), "datasource": DATASOURCE, "expr": expression, "legendFormat": legend}
            for number, (legend, expression) in enumerate(panel.series)
        ],
    }


if __name__ == "__main__":
    FILE.write_text(text(), encoding="utf-8")
