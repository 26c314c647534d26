"""Container, Compose, alerts and dashboard: what they name exists, as far as can be told without a container engine."""

from __future__ import annotations

import json
import os
import re
import runpy
import shutil
import ssl
import subprocess
import tempfile
import threading
import time
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest
import trustme
import yaml
from hatchling.builders.wheel import WheelBuilder

from dflash_backend.config import ENV_PREFIX, SETTINGS, EngineConfig, environment_settings
from dflash_backend.triton.metric_specs import METRICS
from dflash_cli.commands.serve import SAFE_TRITON, triton_host
from dflash_cli.commands.serve_options import HOST_ENV
from dflash_cli.launcher.server import EXIT_MARGIN_S
from dflash_cli.main import parser
from dflash_openai.metrics import FrontendMetrics, merged
from dflash_openai.middleware.authentication import HEALTH_PATHS
from tests.client.conftest import toy_server
from tests.docker.dockerfile import read_dockerfile

ROOT = Path(__file__).resolve().parents[2]
DEPLOY = ROOT / "deploy"
DOCKERFILE = (ROOT / "docker" / "Dockerfile").read_text(encoding="utf-8")
STAGES = read_dockerfile(ROOT / "docker" / "Dockerfile")
# What the wheel has of the checkout, and where.
PACKED = {
    "dflash_backend": "dflash_backend",
    "kernels/dflash_kernels": "dflash_kernels",
    "client/dflash_client": "dflash_client",
    "cli/dflash_cli": "dflash_cli",
    "frontend/dflash_openai": "dflash_openai",
    "model_repository": "dflash_backend/_assets/model_repository",
    "backends": "dflash_backend/_assets/backends",
    "demo/pair": "dflash_backend/_assets/demo/pair",
    "demo/smollm2": "dflash_backend/_assets/demo/smollm2",
    "demo/held_out": "dflash_backend/_assets/demo/held_out",
}
PAGE = (ROOT / "docs" / "deployment.md").read_text(encoding="utf-8")
DASHBOARD: dict[str, Any] = json.loads((DEPLOY / "grafana" / "dashboards" / "dflash.json").read_text(encoding="utf-8"))

LABELS = {"instance", "job", "path", "server", "model", "version", "engine", "le"} | {spec.label for spec in METRICS}


def read(*parts: str) -> Any:
    """A YAML file of `deploy/`."""
    return yaml.safe_load(DEPLOY.joinpath(*parts).read_text(encoding="utf-8"))


def alerts() -> list[dict[str, Any]]:
    """The alerts of every group."""
    return [rule for group in read("prometheus", "alerts.yml")["groups"] for rule in group["rules"]]


def expressions() -> Iterator[str]:
    """All PromQL."""
    for rule in alerts():
        yield rule["expr"]
    for panel in DASHBOARD["panels"]:
        for target in panel["targets"]:
            yield target["expr"]


def series() -> set[str]:
    """The names on the metrics page."""
    parts = {"histogram": ("_sum", "_count", "_bucket")}
    of_model = {spec.name + part for spec in METRICS for part in parts.get(spec.kind, ("",))}
    return of_model | set(re.findall(r"^(dflash_openai:\w+)[ {]", front_end_page(), re.MULTILINE))


def front_end_page() -> str:
    """What a front end with some requests behind it and one server shows of its own."""
    metrics = FrontendMetrics(["/v1/completions"])
    metrics.finished("/v1/completions", 200, 0.1)
    metrics.first_event("/v1/completions", 0.1)
    return "\n".join([*metrics.lines(), *merged({"triton:8002": ""})])


def test_the_dashboard_is_what_its_writer_says() -> None:
    writer = runpy.run_path(str(DEPLOY / "grafana" / "write_dashboard.py"))
    written = (DEPLOY / "grafana" / "dashboards" / "dflash.json").read_text(encoding="utf-8")
    assert written == writer["text"](), "run `make docs`"


def test_every_expression_is_over_metrics_and_labels_that_exist() -> None:
    for expression in expressions():
        named = set(re.findall(r"dflash(?:_openai)?:\w+", expression))
        assert named <= series(), expression
        assert named or expression.startswith(("up{", "absent(up{")), expression
        grouped = re.findall(r"(?:by|on) \(([^)]*)\)", expression)
        labels = {label.strip() for group in grouped for label in group.split(",")}
        labels |= set(re.findall(r"[{,](\w+)=", expression))
        assert labels <= LABELS, expression


def test_every_metric_is_on_the_dashboard() -> None:
    shown = " ".join(expressions())
    missing = {spec.name for spec in METRICS if spec.name not in shown}
    assert not missing


def test_every_metric_of_the_front_end_is_on_the_dashboard() -> None:
    shown = " ".join(expressions())
    families = re.findall(r"^# TYPE (dflash_openai:\w+) ", front_end_page(), re.MULTILINE)
    assert families
    assert not [name for name in families if name not in shown]


def test_prometheus_reads_the_front_ends_own_metrics_alone_with_a_key_if_there_is_one() -> None:
    (job,) = [job for job in read("prometheus", "prometheus.yml")["scrape_configs"] if job["job_name"] != "dflash"]
    assert [rule["regex"] for rule in job["metric_relabel_configs"] if rule["action"] == "keep"] == ["dflash_openai:.*"]
    compose = read("compose.yaml")
    (secret,) = compose["services"]["prometheus"]["secrets"]
    assert job["authorization"]["credentials_file"] == f"/run/secrets/{secret}"
    assert compose["secrets"][secret]["file"] == "${METRICS_KEY_FILE:-/dev/null}"


# Growth per second of each counter, as if: 10 steps of 4 rows with drafts, of which some tokens were accepted.
RATES = {
    "spec_decode_num_steps_total": 10, "spec_decode_num_drafts_total": 40, "spec_decode_num_accepted_tokens_total": 80,
    "spec_decode_num_accepted_tokens_per_pos_total": 30, "spec_decode_num_proposed_tokens_total": 280,
    "spec_decode_num_draft_tokens_total": 240, "spec_decode_num_budgeted_steps_total": 5,
    "spec_decode_num_lookup_draft_tokens_total": 60, "spec_decode_num_lookup_accepted_tokens_total": 45,
    "spec_decode_num_steps_without_drafts_total": 1, "spec_decode_num_expected_tokens_per_pos_total": 18,
    "spec_decode_num_draft_tokens_per_pos_total": 36, "prefix_cache_hits_total": 25, "prefix_cache_queries_total": 100,
    "grammar_mask_seconds_total": 0.5, "grammar_steps_total": 8, "grammar_compile_seconds_total": 3,
    "grammars_compiled_total": 12,
}  # fmt: skip
# What panels show then; means of histograms apart.
RATIOS = {
    ("Acceptance length", "{{model}}"): 3.0,
    ("Acceptance by position", "{{position}}"): 0.75,
    ("Drafts per step", "proposed {{model}}"): 28.0,
    ("Drafts per step", "verified {{model}}"): 24.0,
    ("Drafts per step", "accepted {{model}}"): 8.0,
    ("Drafts of prompt lookup beside a drafter", "of all {{model}}"): 0.25,
    ("Drafts of prompt lookup beside a drafter", "accepted {{model}}"): 0.75,
    ("Steps with a budget", "{{model}}"): 0.5,
    ("Steps without drafts", "{{model}}"): 0.1,
    ("Expected acceptance by position", "{{position}}"): 0.5,
    ("Prefix cache hit rate", "{{model}}"): 0.25,
    ("Time for grammars", "masks of a step {{model}}"): 0.0625,
    ("Time for grammars", "compiling one {{model}}"): 0.25,
}
RATE = re.compile(r"sum by \([^)]*\) \(rate\(dflash:(\w+?)(_sum|_count)?\{[^}]*\}\[[^]]*\]\)\)")


def test_a_panel_of_a_ratio_shows_what_its_title_says() -> None:
    found, means = {}, []
    for panel in DASHBOARD["panels"]:
        for target in panel["targets"]:
            expression = target["expr"].replace(" on (model) group_left ()", "")
            if " / " not in expression:
                continue
            # A histogram's four values add up to 6.
            numbers = RATE.sub(lambda m: {"_sum": "6", "_count": "4"}.get(m[2]) or str(RATES[m[1]]), expression)
            more, above, below = re.fullmatch(r"(1 \+ )?([\d.]+) / ([\d.]+)", numbers).groups()  # type: ignore[union-attr]
            value = (more is not None) + float(above) / float(below)
            if RATE.search(expression)[2]:  # type: ignore[index]
                assert len({match[1] for match in RATE.finditer(expression)}) == 1, "the mean of one histogram"
                means.append(value)
            else:
                found[panel["title"], target["legendFormat"]] = value
                assert value <= panel["fieldConfig"]["defaults"].get("max", value)
    assert found == pytest.approx(RATIOS)
    assert len(means) >= 9
    assert set(means) == {1.5}


def test_a_percentile_is_the_one_that_its_legend_names() -> None:
    shown = {
        (target["legendFormat"].split()[0], *re.findall(r"histogram_quantile\(([\d.]+), ", target["expr"]))
        for panel in DASHBOARD["panels"]
        for target in panel["targets"]
        if "histogram_quantile" in target["expr"]
    }
    assert shown == {("p50", "0.5"), ("p99", "0.99")}


# Each metric's value, or growth per second, in panels that show it as it is.
VALUES = {
    "dflash:generation_tokens_total": 1001, "dflash:prompt_tokens_total": 1002, "dflash:num_requests_running": 3,
    "dflash:num_requests_waiting": 4, "dflash:num_requests_in_flight": 9, "dflash:request_success_total": 1003,
    "dflash:request_errors_total": 1004, "dflash:kv_cache_usage_perc": 0.75, "dflash:requests_routed_total": 1005,
    "dflash:kv_events_total": 1006, "dflash:cache_config_info": 1, "dflash:num_preemptions_total": 1007,
    "dflash:engine_silence_seconds": 2.5, "dflash:stub_heartbeat_timestamp_seconds": 5000, "dflash:engine_ready": 0.5,
    "dflash:engine_restarts_total": 1008, "dflash:grammar_requests_total": 1009, "dflash:grammars_compiled_total": 1010,
    "dflash:spec_decode_confidence_weight": 0.125, "dflash_openai:requests_total": 1011,
    "dflash_openai:requests_running": 6, "dflash_openai:triton_up": 0, "dflash:drafter_swaps_total": 1012,
    "dflash:kv_tier_hit_tokens_total": 1013, "dflash:kv_tier_stored_bytes_total": 1014,
    "dflash:kv_tier_loaded_bytes_total": 1015, "dflash:kv_tier_stored_seconds_total": 0.25,
    "dflash:kv_tier_loaded_seconds_total": 0.375, "dflash:kv_tier_lost_total": 1016,
    "dflash:kv_tier_computed_total": 1017, "dflash:traffic_recorded_total": 1018,
    "dflash:traffic_dropped_total": 1019, "dflash:traffic_recorded_bytes_total": 1020,
    "dflash:kv_kept_prompts_total": 1021, "dflash:kv_fetched_prompts_total": 1022,
    "dflash:kv_given_up_prompts_total": 1023,
}  # fmt: skip
NOW, RANGE_S = 5007, 60
SHOWN = {
    ("Tokens per second", "answers {{model}}"): 1001,
    ("Tokens per second", "prompts {{model}}"): 1002,
    ("Weight of the drafter's confidence", "{{model}} {{engine}}"): 0.125,
    ("Requests", "running {{model}}"): 3,
    ("Requests", "waiting {{model}}"): 4,
    ("Requests", "in flight {{model}}"): 9,
    ("Requests ended per second", "{{finished_reason}} {{model}}"): 1003,
    ("Requests ended per second", "{{status}} {{model}}"): 1004,
    ("KV blocks in use", "{{model}} {{engine}}"): 0.75,
    ("Requests sent to each engine per second", "{{model}} {{engine}}"): 1005,
    ("Prefix cache events per second", "{{model}}"): 1006,
    ("Drafters swapped", "{{model}} {{outcome}}"): 1012 * RANGE_S,
    ("Answers written down per second", "{{model}}"): 1018,
    ("Answers written down per second", "{{model}} dropped: {{reason}}"): 1019,
    ("Bytes of answers written down per second", "{{model}}"): 1020,
    ("Prompt tokens from KV tiers per second", "{{tier}} {{model}}"): 1013,
    ("KV to and from tiers", "to {{tier}} {{model}}"): 1014,
    ("KV to and from tiers", "from {{tier}} {{model}}"): 1015,
    ("Time of moving KV per second", "to {{tier}} {{model}}"): 0.25,
    ("Time of moving KV per second", "from {{tier}} {{model}}"): 0.375,
    ("Misses of KV tiers per second", "lost before {{tier}} {{model}}"): 1016,
    ("Misses of KV tiers per second", "computed sooner than from {{tier}} {{model}}"): 1017,
    ("Prompts for decode servers per second", "kept {{model}}"): 1021,
    ("Prompts for decode servers per second", "fetched {{model}}"): 1022,
    ("Prompts for decode servers per second", "given up {{model}}"): 1023,
    ("KV blocks", "{{model}} {{num_gpu_blocks}} blocks of {{block_size}} tokens"): 1,
    ("Preemptions per second", "{{model}}"): 1007,
    ("Silence of the engine", "{{model}} {{engine}}"): 2.5,
    ("Age of the stub's heartbeat", "{{model}} {{engine}}"): 7,
    ("Engines ready", "{{model}} {{engine}}"): 0.5,
    ("Engine restarts", "{{model}}"): 1008 * RANGE_S,
    ("Requests with a grammar per second", "{{model}}"): 1009,
    ("Requests with a grammar per second", "compiled {{model}}"): 1010,
    ("OpenAI requests per second", "{{path}} {{status}}"): 1011,
    ("OpenAI requests running", "{{instance}}"): 6,
    ("Triton servers that front ends reach", "{{server}}"): 0,
}
HISTOGRAMS = {
    "Time to first token": ("dflash:time_to_first_token_seconds", "s"),
    "Time between tokens": ("dflash:inter_token_latency_seconds", "s"),
    "Whole request": ("dflash:e2e_request_latency_seconds", "s"),
    "Time per token of a request": ("dflash:request_time_per_output_token_seconds", "s"),
    "Prompt tokens of a request": ("dflash:request_prompt_tokens", "short"),
    "Tokens of a completion": ("dflash:request_generation_tokens", "short"),
    "Completions of a request": ("dflash:request_params_n", "short"),
    "Wait in the queue": ("dflash:request_queue_time_seconds", "s"),
    "OpenAI time to first event": ("dflash_openai:time_to_first_event_seconds", "s"),
    "OpenAI request duration": ("dflash_openai:request_duration_seconds", "s"),
}
ONE = re.compile(
    r"(?:(sum|min) by \((?P<by>[^)]*)\) \()?(?:(rate|increase)\()?(?P<name>\w+:\w+)(\{[^}]*\})?(\[[^]]*\])?\)*"
)


def test_a_panel_of_one_metric_shows_what_its_title_says() -> None:
    found = {}
    for panel in DASHBOARD["panels"]:
        for target in panel["targets"]:
            expression = target["expr"]
            if " / " in expression or "histogram_quantile" in expression:
                continue
            plain = expression.removeprefix("time() - ")
            one = ONE.fullmatch(plain)
            assert one is not None, expression
            value = VALUES[one["name"]] * (RANGE_S if one[3] == "increase" else 1)
            found[panel["title"], target["legendFormat"]] = value if plain == expression else NOW - value
            # What a sum leaves out no legend can name.
            named = re.findall(r"\{\{(\w+)\}\}", target["legendFormat"])
            assert one["by"] is None or set(named) == set(one["by"].split(", "))
    assert found == SHOWN


def test_a_panel_of_a_histogram_is_of_the_one_that_its_title_names() -> None:
    found = {}
    for panel in DASHBOARD["panels"]:
        names = {
            name
            for target in panel["targets"]
            for name in re.findall(r"(\w+:\w+)_(?:bucket|sum|count)\b", target["expr"])
            if "histogram_quantile" in "".join(each["expr"] for each in panel["targets"])
        }
        if names:
            found[panel["title"]] = (*names, panel["fieldConfig"]["defaults"]["unit"])
    assert found == HISTOGRAMS


def test_panels_do_not_overlap() -> None:
    positions = [panel["gridPos"] for panel in DASHBOARD["panels"]]
    assert len({(at["x"], at["y"]) for at in positions}) == len(positions)
    assert all(at["x"] + at["w"] <= 24 for at in positions)


def test_an_alert_for_tokens_that_stand_still_looks_at_steps_too() -> None:
    """An answer that is not streamed is counted at its end. promtool runs the case; this holds where it is not here."""
    still = [
        rule["expr"] for rule in alerts() if re.search(r"rate\(dflash:generation_tokens_total\S*\) == 0", rule["expr"])
    ]
    assert still
    for expression in still:
        assert re.search(r"unless sum by \(instance, model\) \(rate\(dflash:step_seconds_count\S*\)\) > 0$", expression)


def test_what_an_alert_compares_and_for_how_long_is_as_it_was_chosen() -> None:
    """promtool shows when each fires; this holds where it is not here."""
    compared = {
        rule["alert"]: (*re.findall(r"(?:[<>]=?|[=!]=) [\d.]+", rule["expr"]), rule.get("for", "0m"))
        for rule in alerts()
    }
    assert compared == {
        "DFlashUnreachable": ("== 0", "1m"),
        "DFlashAbsent": ("5m",),
        "DFlashFrontEndUnreachable": ("== 0", "1m"),
        "DFlashFrontEndFailing": ("> 0", "2m"),
        "DFlashEngineNotReady": ("== 0", "1m"),
        "DFlashEngineRestarted": ("> 0", "0m"),
        "DFlashEngineSilent": ("> 60", "0m"),
        "DFlashStalled": ("== 0", "> 0", "> 0", "3m"),
        "DFlashStubStalled": ("> 60", "1m"),
        "DFlashStubAbsent": ("== 1", "5m"),
        "DFlashRefusing": ("> 0", "5m"),
        "DFlashQueueing": ("> 0", "5m"),
        "DFlashPreempting": ("> 0.1", "10m"),
        "DFlashAcceptanceLow": ("> 0.1", "< 1.5", "15m"),
    }


def test_probes_that_fail_are_no_requests_that_do() -> None:
    (failing,) = [rule["expr"] for rule in alerts() if rule["alert"] == "DFlashFrontEndFailing"]
    (paths,) = re.findall(r'path!~"([^"]*)"', failing)
    assert all(re.fullmatch(paths, path) for path in HEALTH_PATHS)
    assert not re.fullmatch(paths, "/v1/chat/completions")


def test_the_page_says_what_to_do_about_every_alert() -> None:
    names = [rule["alert"] for rule in alerts()]
    assert len(set(names)) == len(names)
    assert set(re.findall(r"^\| `(DFlash\w+)`", PAGE, re.MULTILINE)) == set(names)


@pytest.mark.skipif(shutil.which("promtool") is None, reason="needs Prometheus's promtool")
def test_alerts_fire_when_they_should_and_not_otherwise() -> None:
    # The files of secrets are there in the container alone.
    check, test = ["check", "config", "--syntax-only", "prometheus.yml"], ["test", "rules", "alerts_test.yml"]
    for command in (check, ["check", "rules", "alerts.yml"], test):
        done = subprocess.run(["promtool", *command], cwd=DEPLOY / "prometheus", capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr


def test_every_alert_has_a_case_in_which_it_fires_and_one_in_which_it_does_not() -> None:
    cases = [case for test in read("prometheus", "alerts_test.yml")["tests"] for case in test["alert_rule_test"]]
    names = {rule["alert"] for rule in alerts()}
    for fires in (True, False):
        assert {case["alertname"] for case in cases if ("exp_alerts" in case) is fires} == names


def test_prometheus_scrapes_the_server_under_the_job_that_the_alerts_name() -> None:
    config = read("prometheus", "prometheus.yml")
    for job in config["scrape_configs"]:
        (target,) = job["static_configs"][0]["targets"]
        host, _, port = target.partition(":")
        assert host in read("compose.yaml")["services"]
        assert port in re.findall(r"^EXPOSE (.*)$", DOCKERFILE, re.MULTILINE)[0].split()
    named = {name for rule in alerts() for name in re.findall(r'up{job="([^"]*)"', rule["expr"])}
    assert named == {job["job_name"] for job in config["scrape_configs"]}
    assert all((DEPLOY / "prometheus" / name).is_file() for name in config["rule_files"])


def test_grafana_finds_the_data_source_and_the_dashboard() -> None:
    (source,) = read("grafana", "provisioning", "datasources", "prometheus.yml")["datasources"]
    (provider,) = read("grafana", "provisioning", "dashboards", "dflash.yml")["providers"]
    services = read("compose.yaml")["services"]
    assert source["url"].removeprefix("http://").split(":")[0] in services
    grafana = services["grafana"]
    mounts = dict(volume.split(":")[:2] for volume in grafana["volumes"])
    assert all((DEPLOY / source).is_dir() for source in mounts)
    assert provider["options"]["path"] == mounts["./grafana/dashboards"]
    home = grafana["environment"]["GF_DASHBOARDS_DEFAULT_HOME_DASHBOARD_PATH"]
    assert home == f"{provider['options']['path']}/dflash.json"


def test_compose_names_settings_that_exist_and_passes_their_defaults() -> None:
    environment = {
        name: re.sub(r"\$\{\w+:-(.*)\}", r"\1", value)
        for name, value in read("compose.yaml")["services"]["dflash"]["environment"].items()
        if name.startswith(ENV_PREFIX)
    }
    assert environment
    given = EngineConfig.from_values(environment_settings(environment), "environment")
    assert given.as_strings() == EngineConfig.from_values({}).as_strings()


def test_the_page_names_every_variable_and_build_argument() -> None:
    text = "".join(path.read_text(encoding="utf-8") for path in DEPLOY.glob("compose*.yaml"))
    names = set(re.findall(r"\$\{(\w+):-", text)) | set(re.findall(r"^ARG (\w+)", DOCKERFILE, re.MULTILINE))
    assert names
    assert all(f"`{name}`" in PAGE for name in names), names


def test_the_image_is_of_a_triton_that_no_single_request_crashes() -> None:
    (version,) = re.findall(r"^ARG TRITON_IMAGE=.*tritonserver:(\d+\.\d+)-py3$", DOCKERFILE, re.MULTILINE)
    assert tuple(map(int, version.split("."))) >= tuple(map(int, SAFE_TRITON.split(".")))
    assert f"from {SAFE_TRITON} on" in PAGE


def test_a_container_listens_on_every_address_and_is_published_on_this_machine_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert f"\nENV {HOST_ENV}=0.0.0.0\n" in DOCKERFILE
    services = read("compose.yaml")["services"]
    for name in ("dflash", "dflash-cpu"):
        arguments = parser().parse_args(services[name]["command"][:3])
        assert (arguments.command, arguments.host) == ("serve", "0.0.0.0")
        published = r"\$\{(OPENAI_)?BIND_ADDRESS:-127\.0\.0\.1\}:"
        assert all(re.match(published, port) for port in services[name]["ports"])
        monkeypatch.setenv("DFLASH_API_KEYS", "team an-example-key-of-32-characters-a")
        given = parser().parse_args([word for word in services[name]["command"] if "EXIT_TIMEOUT" not in word][:-1])
        assert (triton_host(given), given.metrics_host) == ("127.0.0.1", "0.0.0.0"), "Prometheus reads the metrics"
    for name in ("prometheus", "grafana"):
        assert all(port.startswith("127.0.0.1:") for port in services[name]["ports"])


def test_the_pages_container_publishes_every_port_of_the_image_on_this_machine_alone() -> None:
    (exposed,) = re.findall(r"^EXPOSE (.*)$", DOCKERFILE, re.MULTILINE)
    command = PAGE.partition("docker run --rm --init")[2].partition("```")[0]
    assert sorted(re.findall(r"-p (\S+)", command)) == [f"127.0.0.1:{port}:{port}" for port in sorted(exposed.split())]


def test_compose_serves_on_a_gpu_and_without_one_under_one_name() -> None:
    services = read("compose.yaml")["services"]
    assert services["dflash"]["profiles"] == ["gpu"]
    assert "deploy" in services["dflash"]
    assert services["dflash-cpu"]["profiles"] == ["cpu"]
    assert "deploy" not in services["dflash-cpu"]
    assert services["dflash-cpu"]["networks"]["default"]["aliases"] == ["dflash"]


def test_compose_gives_requests_less_time_than_docker_gives_the_server() -> None:
    servers = {
        (file, name): service
        for file in ("compose.yaml", "compose.disaggregation.yaml")
        for name, service in read(file)["services"].items()
        if service["image"] == "dflash-triton"
    }
    assert len(servers) == 4
    for service in servers.values():
        (exit_timeout,) = [int(re.sub(r"\D", "", word)) for word in service["command"] if "EXIT_TIMEOUT" in word]
        (grace,) = re.findall(r"STOP_GRACE_PERIOD:-(\d+)s", service["stop_grace_period"])
        assert exit_timeout + EXIT_MARGIN_S < int(grace)


def test_compose_gives_its_services_no_privilege_and_no_file_to_change() -> None:
    for name, service in read("compose.yaml")["services"].items():
        confined = {key: service[key] for key in ("cap_drop", "security_opt", "read_only")}
        assert confined == {"cap_drop": ["ALL"], "security_opt": ["no-new-privileges:true"], "read_only": True}, name
        assert not {"privileged", "cap_add", "pid", "ipc", "network_mode"} & service.keys(), name
    for name in ("compose.keys.yaml", "compose.admin.yaml"):
        for service in read(name)["services"].values():
            assert not {"cap_drop", "security_opt", "read_only", "tmpfs", "volumes"} & service.keys()


def test_a_server_in_compose_can_write_where_it_must_and_has_bounded_memory() -> None:
    services = read("compose.yaml")["services"]
    for name in ("dflash", "dflash-cpu"):
        service = services[name]
        # Triton makes environments in /tmp whose programs it starts; without "exec" Docker lets none run there.
        assert service["tmpfs"] == ["/tmp:mode=1777,exec"]
        assert [volume.split(":")[1] for volume in service["volumes"] if not volume.endswith(":ro")] == ["/cache"]
        assert service["shm_size"] == "1gb"
        assert service["mem_limit"] == "${MEMORY_LIMIT:-32g}"
        assert "healthcheck" not in service, "the image has one"
    assert services["grafana"]["tmpfs"] == ["/tmp:mode=1777", "/var/lib/grafana:mode=1777"]


def test_secrets_are_files_and_grafana_has_no_administrator_unless_asked() -> None:
    compose, admin = read("compose.yaml"), read("compose.admin.yaml")
    service, grafana = compose["services"]["dflash"], compose["services"]["grafana"]["environment"]
    assert "HF_TOKEN" not in service["environment"]
    assert service["environment"]["HF_TOKEN_PATH"] == f"/run/secrets/{service['secrets'][0]}"
    assert grafana["GF_AUTH_ANONYMOUS_ORG_ROLE"] == "Viewer"
    assert grafana["GF_SECURITY_DISABLE_INITIAL_ADMIN_CREATION"] == "true"
    assert grafana["GF_AUTH_DISABLE_LOGIN_FORM"] == "true"
    (secret,) = admin["services"]["grafana"]["secrets"]
    assert admin["services"]["grafana"]["environment"]["GF_SECURITY_ADMIN_PASSWORD__FILE"] == f"/run/secrets/{secret}"
    assert ":?" in admin["secrets"][secret]["file"]


def test_api_keys_are_a_secret_file_and_leave_tritons_ports_where_they_are() -> None:
    compose, keys = read("compose.yaml"), read("compose.keys.yaml")
    for name in ("dflash", "dflash-cpu"):
        service = keys["services"][name]
        assert set(service["secrets"]) == {*compose["services"][name]["secrets"], "api_keys"}
        assert "ports" not in service
        given = [word for word in service["command"] if "$" not in word]
        arguments = parser().parse_args(given)
        assert arguments.api_key_file == [Path("/run/secrets/api_keys")]
        assert (arguments.host, arguments.triton_host) == ("0.0.0.0", "0.0.0.0"), "Prometheus reads Triton's metrics"
    assert ":?" in keys["secrets"]["api_keys"]["file"]


def health_check(directory: str | Path, container: str = "", **environ: str) -> int:
    """The exit status of the image's own command, with this folder of temporary files, where the first process of the
    container has the command line `container`."""
    check = STAGES[-1].last("HEALTHCHECK").words
    with tempfile.NamedTemporaryFile("w") as first:
        first.write("".join(f"{word}\0" for word in container.split()))
        first.flush()
        command = [word.replace("/tmp/", f"{directory}/").replace("/proc/1/cmdline", first.name) for word in check]
        return subprocess.run(command, capture_output=True, env=os.environ | environ).returncode


@contextmanager
def answering(status: int, certificate: trustme.LeafCert | None = None) -> Iterator[str]:
    """The URL of a server that answers everything with this status."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(status)
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        if certificate is not None:
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            certificate.configure_cert(context)
            server.socket = context.wrap_socket(server.socket, server_side=True)
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield f"{'https' if certificate else 'http'}://127.0.0.1:{server.server_port}/health/ready"
        finally:
            server.shutdown()
            thread.join()


def folder_of(server: str, directory: Path, url: str, age_s: float = 0) -> Path:
    """What `serve` leaves in the folder of temporary files, made so many seconds ago."""
    folder = directory / f"dflash-triton-{server}"
    folder.mkdir(parents=True)
    (folder / "ready-url").write_text(f"{url}\n")
    os.utime(folder, (time.time() - age_s,) * 2)
    return folder


@pytest.mark.parametrize(("status", "result"), [(200, 0), (503, 1), (400, 1), (500, 1), (421, 1)])
def test_the_health_check_is_what_the_server_says(status: int, result: int, tmp_path: Path) -> None:
    with answering(status) as url:
        folder = folder_of("7-a", tmp_path, url)
        # A container is often told of a proxy, which knows nothing of its loopback.
        assert health_check(tmp_path, http_proxy="http://127.0.0.1:9", ALL_PROXY="http://127.0.0.1:9") == result
        # A server that was killed leaves its folder, and the container that starts again has both.
        folder_of("7-b", tmp_path, "http://127.0.0.1:9/health/ready", age_s=60)
        assert health_check(tmp_path) == result
        os.utime(folder, (time.time() - 120,) * 2)
        assert health_check(tmp_path) == 1
    assert health_check(tmp_path) == 1
    assert health_check(tmp_path / "empty") == 1


@pytest.mark.parametrize(
    ("container", "serves"),
    [
        ("/usr/bin/python3 /usr/local/bin/dflash-triton serve", True),
        ("/sbin/docker-init -- /opt/nvidia/nvidia_entrypoint.sh dflash-triton serve /models/a --port 9001", True),
        ("/usr/bin/python3 /usr/local/bin/dflash-triton openai --triton grpc://a:8001", True),
        ("sh -c dflash-triton train out && dflash-triton serve", True),
        ("sh /start.sh", True),
        ("/sbin/docker-init -- /opt/nvidia/nvidia_entrypoint.sh dflash-triton train out", False),
        ("/usr/bin/python3 /usr/local/bin/dflash-triton dynamo", False),
    ],
)
def test_a_container_whose_command_takes_no_requests_is_healthy(container: str, serves: bool, tmp_path: Path) -> None:
    assert health_check(tmp_path, container) == serves
    with answering(200) as url:
        folder_of("7-a", tmp_path, url)
        assert health_check(tmp_path, container) == 0
    assert health_check(tmp_path, container) == serves


def test_a_load_of_hours_is_no_failure() -> None:
    (hours,) = re.findall(r"^(\d+)h$", STAGES[-1].last("HEALTHCHECK").flags["start-period"])
    assert int(hours) >= 2


def test_the_health_check_does_not_ask_for_whom_the_certificate_is(tmp_path: Path) -> None:
    with answering(200, trustme.CA().issue_cert("llm.example")) as url:
        folder_of("7-a", tmp_path, url)
        assert health_check(tmp_path) == 0


def test_a_health_check_that_hangs_fails_before_docker_ends_it() -> None:
    check = STAGES[-1].last("HEALTHCHECK")
    (longest,) = re.findall(r" --max-time (\d+) ", check.text)
    assert int(longest) < int(check.flags["timeout"].removesuffix("s"))


@pytest.mark.server
def test_the_health_check_follows_the_port() -> None:
    def healthy(directory: str) -> bool:
        return health_check(directory) == 0

    with tempfile.TemporaryDirectory(prefix="health") as directory, pytest.MonkeyPatch.context() as patch:
        patch.setattr("tempfile.tempdir", directory)
        with toy_server() as server:
            of_triton = f"http://{server.http_url}/v2/models/{server.model_name}/ready\n"
            assert (server.folder / "ready-url").read_text() == of_triton
            assert healthy(directory)
        assert not healthy(directory)


def test_the_wheel_of_what_the_image_copies_has_all_files_and_the_command(tmp_path: Path) -> None:
    build, image = STAGES
    (tmp_path / "context").mkdir()
    for one in build.instructions:
        for source in one.words[:-1] if one.name == "COPY" else ():
            (tmp_path / "context" / source).symlink_to(ROOT / source)
    (wheel,) = WheelBuilder(str(tmp_path / "context")).build(directory=str(tmp_path), versions=["standard"])
    with zipfile.ZipFile(wheel) as packed:
        names = set(packed.namelist())
        (entry_points,) = [name for name in names if name.endswith(".dist-info/entry_points.txt")]
        commands = re.findall(r"^([\w-]+) = (.*)$", packed.read(entry_points).decode(), re.MULTILINE)
    expected = {
        f"{target}/{path.relative_to(ROOT / source)}"
        for source, target in PACKED.items()
        for path in (ROOT / source).rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    assert len(expected) > 300
    assert expected - names == set()
    assert commands == [("dflash-triton", "dflash_cli.main:entry")]
    assert image.last("ENTRYPOINT").words[-1] == "dflash-triton"


def test_the_images_command_is_one_and_its_user_can_write_to_the_volume() -> None:
    _, image = STAGES
    assert parser().parse_args(image.last("CMD").words).command == "serve"
    assert image.last("USER").text == "1000:1000"
    volume = image.last("VOLUME").text
    (made,) = [one.text for one in image.instructions if one.text.startswith("install --directory ")]
    assert made == f"install --directory --owner=1000 --group=1000 {volume}"
    environ = {
        name: value for one in image.instructions if one.name == "ENV" for name, value in one.assignments.items()
    }
    for name in ("HOME", "HF_HOME", "TRITON_CACHE_DIR"):
        assert Path(environ[name]).is_relative_to(volume)
    assert image.last("WORKDIR").text == volume


def test_the_image_copies_what_exists_and_all_that_a_wheel_is_made_of() -> None:
    sources = [
        source
        for line in re.findall(r"^COPY (?!--from)(.*)$", DOCKERFILE, re.MULTILINE)
        for source in line.split()[:-1]
    ]
    assert all((ROOT / source).exists() for source in sources)
    kept = {line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")}
    assert set(sources) == kept
    project = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    packaged = re.findall(r'^"([\w/]+)" = "dflash_backend/_assets', project, re.MULTILINE)
    packaged += re.findall(r'"([\w/]+)"', re.findall(r"^packages = \[(.*dflash_client.*)\]", project, re.MULTILINE)[0])
    assert packaged
    assert all(path.split("/")[0] in sources for path in packaged)


def test_the_prefill_and_the_decode_server_of_compose_have_roles_and_an_address_that_is_one() -> None:
    """What they are told are settings; the decode server finds the other one by its name."""
    services = read("compose.disaggregation.yaml")["services"]
    names = {setting.name for setting in SETTINGS}
    for service in services.values():
        assert {name.removeprefix("DFLASH_").lower() for name in service["environment"]} <= names
    roles = {name: service["environment"]["DFLASH_KV_ROLE"] for name, service in services.items()}
    assert roles == {name: name for name in ("prefill", "decode")}
    assert services["prefill"]["environment"]["DFLASH_KV_TRANSFER_HOST"] == services["prefill"]["hostname"] == "prefill"
