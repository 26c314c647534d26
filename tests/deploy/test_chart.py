"""The Helm chart and the KServe runtime: what they refer to exists, and rendered they are what Kubernetes takes."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from dflash_backend.config import ConfigError, EngineConfig, environment_settings
from dflash_backend.engine_client.kv_publisher import at_rank
from dflash_cli.commands.serve import triton_host
from dflash_cli.launcher.server import EXIT_MARGIN_S
from dflash_cli.main import parser
from dflash_openai.middleware.authentication import HEALTH_PATHS

ROOT = Path(__file__).resolve().parents[2]
CHART = ROOT / "deploy/helm/dflash-triton"
RUNTIME = ROOT / "deploy/kserve/servingruntime.yaml"
RUNTIMES = (RUNTIME, ROOT / "deploy/kserve/servingruntime-openai.yaml")
HELM = os.environ.get("HELM") or shutil.which("helm")
VALUES: dict[str, Any] = yaml.safe_load((CHART / "values.yaml").read_text(encoding="utf-8"))
EVERYTHING = (
    "gpus=4,podMonitor.enabled=true,autoscaling.enabled=true,cache.accessModes={ReadWriteMany},kvEvents.enabled=true,"
    "kvTransfer.port=5700,settings.kv_role=prefill,podDisruptionBudget.enabled=true,"
    "settings.max_num_seqs=32,apiKeys.secretName=keys,hfToken.secretName=hf,runtimeClassName=nvidia,model.target=a/b"
)
# As Kubernetes has it.
LONGEST_PORT_NAME = 15
HTTPS = "openai.tlsSecretName=tls"
NO_FRONT_END = "openai.enabled=false"
# Paths of the front end, which answers them without a key.
READY, LIVE = "/health/ready", "/health/live"
PROBES = {"startupProbe": READY, "readinessProbe": READY, "livenessProbe": LIVE}
# What a pod has beside the time for its requests, and what Kubernetes gives one that asks for nothing.
GRACE_S = 15
DEFAULT_GRACE_S = 30
CONFINED = {
    "allowPrivilegeEscalation": False,
    "readOnlyRootFilesystem": True,
    "capabilities": {"drop": ["ALL"]},
}
needs_helm = pytest.mark.skipif(HELM is None, reason="needs helm, on the PATH or in the variable HELM")


def leaves(values: dict[str, Any], prefix: str = "") -> set[str]:
    """The paths of all values; of an empty map its own."""
    found = set()
    for name, value in values.items():
        found |= leaves(value, f"{prefix}{name}.") if isinstance(value, dict) and value else {prefix + name}
    return found


def render(values: str = "") -> dict[str, dict[str, Any]]:
    """The chart's resources by kind. Raises `CalledProcessError` with helm's words."""
    command = [str(HELM), "template", "release", str(CHART), *(("--set", values) if values else ())]
    text = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    return {one["kind"]: one for one in yaml.safe_load_all(text) if one}


def pod(resources: dict[str, dict[str, Any]]) -> dict[str, Any]:
    return resources["Deployment"]["spec"]["template"]["spec"]


def container(resources: dict[str, dict[str, Any]]) -> dict[str, Any]:
    return pod(resources)["containers"][0]


def variables(resources: dict[str, dict[str, Any]]) -> dict[str, str]:
    return {one["name"]: one["value"] for one in container(resources)["env"] if "value" in one}


def template(name: str) -> str:
    """The text of one of the chart's templates."""
    return (CHART / "templates" / name).read_text(encoding="utf-8")


def probed(one: dict[str, Any]) -> dict[str, tuple[str, int, str]]:
    """Path, port and scheme of each probe of a container."""
    ports = {each["name"]: each["containerPort"] for each in one["ports"]}
    asked = {name: one[name]["httpGet"] for name in PROBES}
    return {
        name: (each["path"], ports.get(each["port"], each["port"]), each.get("scheme", "HTTP"))
        for name, each in asked.items()
    }


def written_to(one: dict[str, Any]) -> set[str]:
    """The folders of a container that can be written to beside its root."""
    return {each["mountPath"] for each in one["volumeMounts"] if not each.get("readOnly")}


def check_arguments(arguments: list[str]) -> None:
    """Each option is one that `serve` has."""
    assert arguments[0] == "serve"
    command = [sys.executable, "-m", "dflash_cli.main", "serve", "--help"]
    known = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    for argument in arguments[1:]:
        assert re.search(rf"{re.escape(argument.partition('=')[0])}\b", known), argument


def test_every_value_that_templates_read_is_declared_and_every_declared_one_is_read() -> None:
    declared = leaves(VALUES)
    text = "\n".join(path.read_text(encoding="utf-8") for path in (CHART / "templates").iterdir())
    text = text.replace("$v.", ".Values.")
    # Inside `with .Values.autoscaling`.
    text = re.sub(
        r" \.(enabled|\w+Replicas|metric|waitingRequests|scaleDownSeconds)\b", r" .Values.autoscaling.\1", text
    )
    read = set(re.findall(r"\.Values\.([\w.]+)", text))
    assert {path for path in read if not any(f"{one}.".startswith(f"{path}.") for one in declared)} == set()
    read -= {"resources.requests"}
    assert {path for path in declared if not any(f"{path}.".startswith(f"{one}.") for one in read)} == set()


def test_a_field_of_a_values_name_has_that_value() -> None:
    """Where helm is absent too: `maxReplicas` is not `minReplicas`."""
    lines = [line for file in sorted((CHART / "templates").glob("*.yaml")) for line in file.read_text().splitlines()]
    fields = [
        re.fullmatch(r"[ -]*(\w+): \{\{-? (?:toYaml |mul )?[$\w]*\.([\w.]+)(?: [\w$|. ]*)? \}\}", line)
        for line in lines
    ]
    pairs = {(found[1], found[2].rpartition(".")[2]) for found in fields if found}
    names = {path.rpartition(".")[2] for path in leaves(VALUES)}
    assert {("minReplicas", "minReplicas"), ("maxReplicas", "maxReplicas"), ("accessModes", "accessModes")} <= pairs
    assert {one for one in pairs if one[0] in names - {"secretName"} and one[0] != one[1]} == set()


def test_the_schema_has_the_values_and_no_others() -> None:
    schema = json.loads((CHART / "values.schema.json").read_text(encoding="utf-8"))

    def check(values: dict[str, Any], properties: dict[str, Any], at: str) -> None:
        assert values.keys() == properties.keys() - {"global"}, at
        for name, value in values.items():
            if isinstance(value, dict) and "properties" in properties[name]:
                check(value, properties[name]["properties"], f"{at}.{name}")

    check(VALUES, schema["properties"], "values")


@pytest.mark.parametrize("path", RUNTIMES, ids=lambda path: path.stem)
def test_a_kserve_runtime_is_one(path: Path) -> None:
    runtime = yaml.safe_load(path.read_text(encoding="utf-8"))
    assert (runtime["apiVersion"], runtime["kind"]) == ("serving.kserve.io/v1alpha1", "ServingRuntime")
    (one,) = runtime["spec"]["containers"]
    assert one["name"] == "kserve-container"
    check_arguments(one["args"])
    environ = {each["name"]: each["value"] for each in one["env"] if each["name"].startswith("DFLASH_")}
    EngineConfig.from_values(environment_settings(environ))
    mounts = {each["name"] for each in one["volumeMounts"]}
    assert mounts == {each["name"] for each in runtime["spec"]["volumes"]}

    assert one["securityContext"] == CONFINED | {"runAsNonRoot": True, "runAsUser": 1000}
    assert written_to(one) == {"/tmp", "/dev/shm", "/cache"}
    assert one["resources"]["limits"] == {"memory": "32Gi", "nvidia.com/gpu": "1"}
    # Knative takes none, so a service says it that runs without Knative.
    assert "lifecycle" not in one


@pytest.mark.parametrize("path", RUNTIMES, ids=lambda path: path.stem)
def test_a_kserve_runtimes_probes_ask_the_front_end(path: Path) -> None:
    runtime = yaml.safe_load(path.read_text(encoding="utf-8"))
    (one,) = runtime["spec"]["containers"]
    assert not [word for word in one["args"] if word.startswith(("--port", "--openai-port", "--tls", "--ssl"))]
    assert probed(one) == {name: (path, 9000, "HTTP") for name, path in PROBES.items()}
    assert {READY, LIVE} <= HEALTH_PATHS
    assert {name: one[name]["timeoutSeconds"] for name in ("readinessProbe", "livenessProbe")} == {
        "readinessProbe": 5,
        "livenessProbe": 10,
    }


def test_the_url_of_one_runtime_is_tritons_and_that_of_the_other_is_openais() -> None:
    """They are one runtime but for that: Knative lets a container have a single port."""
    of_triton, of_openai = (yaml.safe_load(path.read_text(encoding="utf-8")) for path in RUNTIMES)
    (triton,), (openai,) = (one["spec"]["containers"] for one in (of_triton, of_openai))
    given = parser().parse_args(triton["args"])
    assert triton.pop("ports") == [{"name": "http1", "containerPort": given.http_port, "protocol": "TCP"}]
    assert (triton_host(given), given.metrics_host) == ("0.0.0.0", "0.0.0.0")
    given = parser().parse_args(openai["args"])
    assert openai.pop("ports") == [{"name": "http1", "containerPort": given.port, "protocol": "TCP"}]
    assert (given.host, triton_host(given), given.metrics_host) == ("0.0.0.0", "127.0.0.1", "0.0.0.0")
    assert openai.pop("args") == [*triton["args"][:3], "--triton-host=127.0.0.1", *triton.pop("args")[3:]]

    assert of_openai["metadata"].pop("name") == of_triton["metadata"].pop("name") + "-openai"
    (of_triton_format,), (of_openai_format,) = (one["spec"]["supportedModelFormats"] for one in (of_triton, of_openai))
    # KServe chooses between those that let it.
    assert (of_triton_format.pop("autoSelect"), of_openai_format.pop("autoSelect")) == (True, False)
    assert of_triton["spec"].pop("protocolVersions") == ["v2", "grpc-v2"]
    assert of_openai == of_triton


@pytest.mark.parametrize("path", RUNTIMES, ids=lambda path: path.stem)
def test_a_pod_of_kserve_has_more_time_to_end_than_its_requests(path: Path) -> None:
    """A runtime says nothing of a pod's grace period: KServe's own resource would."""
    runtime = yaml.safe_load(path.read_text(encoding="utf-8"))
    assert "terminationGracePeriodSeconds" not in runtime["spec"]
    (argument,) = [word for word in runtime["spec"]["containers"][0]["args"] if word.startswith("--exit-timeout=")]
    assert int(argument.partition("=")[2]) + GRACE_S == DEFAULT_GRACE_S


def test_the_service_of_kserve_that_the_page_shows_is_one_of_this_runtime() -> None:
    page = (ROOT / "docs/deployment.md").read_text(encoding="utf-8")
    service = yaml.safe_load(re.findall(r"\n```console\n(apiVersion: .*?)```", page, re.DOTALL)[0])
    assert (service["apiVersion"], service["kind"]) == ("serving.kserve.io/v1beta1", "InferenceService")
    runtimes = [yaml.safe_load(path.read_text(encoding="utf-8")) for path in RUNTIMES]
    predictor = service["spec"]["predictor"]
    model = predictor["model"]
    (runtime,) = [one for one in runtimes if one["metadata"]["name"] == model["runtime"]]
    assert model["modelFormat"]["name"] in [one["name"] for one in runtime["spec"]["supportedModelFormats"]]
    given = parser().parse_args([*runtime["spec"]["containers"][0]["args"], *model["args"]])
    assert given.exit_timeout + GRACE_S == predictor["terminationGracePeriodSeconds"]
    EngineConfig.from_values(environment_settings({one["name"]: one["value"] for one in model["env"]}))
    assert predictor["enableServiceLinks"] is False
    assert service["metadata"]["annotations"] == {"serving.kserve.io/deploymentMode": "RawDeployment"}
    # As the chart has it, which the time beside that for requests counts.
    (before_s,) = re.findall(r'command: \[sleep, "(\d+)"\]', template("deployment.yaml"))
    assert model["lifecycle"] == {"preStop": {"exec": {"command": ["sleep", before_s]}}}


def test_the_charts_text_gives_a_pod_more_time_than_its_requests() -> None:
    """What helm would render, for machines without it; so in the next one."""
    text = template("deployment.yaml")
    assert re.findall(r"terminationGracePeriodSeconds: (.*)", text) == [f"{{{{ add $v.exitTimeout {GRACE_S} }}}}"]
    assert re.findall(r"--exit-timeout=(.*)", text) == ["{{ $v.exitTimeout }}"]
    (before_s,) = re.findall(r'preStop:\n +exec:\n +command: \[sleep, "(\d+)"\]', text)
    assert int(before_s) + EXIT_MARGIN_S < GRACE_S


def test_the_charts_text_has_probes_of_the_front_end_or_without_it_of_triton() -> None:
    text = template("deployment.yaml")
    assert dict(re.findall(r"(\w+Probe):\n +httpGet: {{ include \"dflash\.(\w+)\" \. }}", text)) == {
        "startupProbe": "ready",
        "readinessProbe": "ready",
        "livenessProbe": "live",
    }
    helpers = template("_helpers.tpl")
    assert 'define "dflash.scheme" -}}\n{{ if .Values.openai.tlsSecretName }}HTTPS{{ else }}HTTP{{ end }}\n' in helpers
    branches = {
        name: helpers.partition(f'define "dflash.{name}" -}}}}\n')[2].splitlines()[:4] for name in ("ready", "live")
    }
    assert branches == {
        name: [
            "{{- if .Values.openai.enabled -}}",
            f'{{path: {path}, port: openai, scheme: {{{{ include "dflash.scheme" . }}}}}}',
            "{{- else -}}",
            f"{{path: {of_triton}, port: http}}",
        ]
        for name, path, of_triton in (("ready", READY, "/v2/models/dflash/ready"), ("live", LIVE, "/v2/health/live"))
    }
    assert "{name: openai, containerPort: 9000}" in text
    assert "{name: http, containerPort: 8000}" in text
    assert VALUES["securityContext"] == CONFINED
    assert VALUES["podSecurityContext"]["runAsNonRoot"] is True
    given = re.findall(r"with \$v\.(\w+) }}\n( +)securityContext: {{- toYaml \. \| nindent (\d+) }}", text)
    assert given == [("podSecurityContext", " " * 6, "8"), ("securityContext", " " * 10, "12")]
    assert VALUES["resources"]["limits"] == {"memory": "32Gi"}
    assert VALUES["networkPolicy"]["enabled"] is True


def test_a_setting_is_written_as_it_was_given() -> None:
    """Not as helm prints numbers, of which 2000000 in a file of values is 2e+06, which no setting of integers takes."""
    assert re.findall(r"DFLASH_{{ \$name \| upper }}\n +value: (.*)", template("deployment.yaml")) == [
        '{{ include "dflash.text" $value | quote }}'
    ]
    helper = template("_helpers.tpl").partition('define "dflash.text" -}}\n')[2].splitlines()[0]
    assert helper == '{{- if and (kindIs "float64" .) (eq (floor .) .) }}{{ int64 . }}{{ else }}{{ . }}{{ end }}'
    with pytest.raises(ConfigError, match="allowed: an integer"):
        EngineConfig.from_values({"max_queue_tokens": "2e+06"})


def test_the_monitor_reads_the_job_that_the_alerts_name() -> None:
    rules = yaml.safe_load((ROOT / "deploy/prometheus/alerts.yml").read_text(encoding="utf-8"))
    named = set(re.findall(r'up{job="([^"]*)"', json.dumps(rules).replace('\\"', '"')))
    (job,) = re.findall(r"relabelings:\n +- {targetLabel: job, replacement: ([\w-]+)}", template("podmonitor.yaml"))
    assert job in named
    assert template("podmonitor.yaml").count("- port: ") == 1
    # What a PrometheusRule has as its spec.
    assert rules.keys() == {"groups"}


@needs_helm
def test_settings_of_a_file_are_written_as_they_were_given(tmp_path: Path) -> None:
    given = {"max_queue_tokens": 3000000, "kv_cache_gb": 0.5, "enable_prefix_caching": False, "tenant_weights": "a=4"}
    (tmp_path / "my.yaml").write_text(yaml.safe_dump({"settings": given}), encoding="utf-8")
    command = [str(HELM), "template", "release", str(CHART), "-f", str(tmp_path / "my.yaml")]
    text = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    (deployment,) = [one for one in yaml.safe_load_all(text) if one and one["kind"] == "Deployment"]
    found = variables({"Deployment": deployment})
    assert {name: found[f"DFLASH_{name.upper()}"] for name in given} == {
        "max_queue_tokens": "3000000",
        "kv_cache_gb": "0.5",
        "enable_prefix_caching": "false",
        "tenant_weights": "a=4",
    }


def conditions_of(text: str) -> dict[str, list[str]]:
    """What must hold for each line of a template to be there, the outermost first; `not` before the condition of an
    `else`."""
    stack: list[str] = []
    found: dict[str, list[str]] = {}
    for line in text.splitlines():
        words = re.fullmatch(r" *{{- (if|else if|else|end|range|with)\b *(.*?) }}", line)
        if words is None:
            found.setdefault(line.strip(), list(stack))
            continue
        kind, condition = words[1], words[2].replace("$v", ".Values")
        if kind in ("end", "else", "else if"):
            last = stack.pop()
        if kind == "else":
            stack.append(f"not ({last})")
        elif kind == "else if":
            stack.append(f"not ({last}), {condition}")
        elif kind != "end":
            stack.append(condition)
    assert not stack
    return found


KEYS, TLS = ".Values.apiKeys.secretName", ".Values.openai.tlsSecretName"
POLICY = ".Values.networkPolicy.enabled"
ENGINES = '$engine := until (int (include "dflash.engines" .))'


@pytest.mark.parametrize(
    ("name", "line", "conditions"),
    [
        ("deployment", "- --host=0.0.0.0", []),
        ("deployment", "- --no-restart", []),
        ("deployment", "- --api-key-file=/run/secrets/dflash/{{ $v.apiKeys.key }}", [KEYS]),
        ("deployment", "- --metrics-host=0.0.0.0", []),
        ("deployment", "- {name: api-keys, mountPath: /run/secrets/dflash, readOnly: true}", [KEYS]),
        ("deployment", "- --tls-cert=/run/secrets/dflash-tls/tls.crt", [TLS]),
        ("deployment", "- --tls-key=/run/secrets/dflash-tls/tls.key", [TLS]),
        ("deployment", "- --port=0", ["not .Values.openai.enabled"]),
        ("deployment", "- {name: openai, containerPort: 9000}", [".Values.openai.enabled"]),
        ("deployment", "- name: DFLASH_DEVICE", ["eq (int .Values.gpus) 0"]),
        ("deployment", "- name: DFLASH_KV_EVENTS_ENDPOINT", [".Values.kvEvents.enabled"]),
        ("deployment", "replicas: {{ $v.replicaCount }}", ["not .Values.autoscaling.enabled"]),
        ("deployment", "type: Recreate", ["not (.Values.strategy), not $several"]),
        (
            "deployment",
            "rollingUpdate: {maxSurge: 0, maxUnavailable: 1}",
            ["not (not (.Values.strategy), not $several), gt (int .Values.gpus) 0"],
        ),
        ("deployment", "- name: DFLASH_KV_TRANSFER_HOST", [".Values.kvTransfer.port"]),
        (
            "deployment",
            "- {name: kv-events{{ $suffix }}, containerPort: {{ add $v.kvEvents.port $engine }}}",
            [ENGINES, ".Values.kvEvents.enabled"],
        ),
        (
            "deployment",
            "- {name: kv-transfer{{ $suffix }}, containerPort: {{ add $v.kvTransfer.port $engine }}}",
            [ENGINES, ".Values.kvTransfer.port"],
        ),
        ("deployment", "emptyDir: {}", ["not (.Values.cache.enabled)"]),
        ("service", "- {name: http, port: 8000, targetPort: http}", [f"not {KEYS}"]),
        ("service", "- {name: metrics, port: 8002, targetPort: metrics}", [f"not {KEYS}"]),
        ("service", "- {name: openai, port: 9000, targetPort: openai}", [".Values.openai.enabled"]),
        ("networkpolicy", "- {port: openai}", [POLICY, ".Values.openai.enabled"]),
        ("networkpolicy", "- {port: http}", [POLICY, f"not {KEYS}"]),
        (
            "networkpolicy",
            "from: {{- toYaml $v.networkPolicy.from | nindent 8 }}",
            [POLICY, ".Values.networkPolicy.from"],
        ),
        (
            "networkpolicy",
            "from: {{- toYaml $namespace | nindent 8 }}",
            [POLICY, f"not (.Values.networkPolicy.from), not {KEYS}"],
        ),
        ("networkpolicy", "- {port: metrics}", [POLICY]),
        (
            "networkpolicy",
            "- {port: kv-events{{ $suffix }}}",
            [POLICY, ".Values.kvEvents.enabled", "$engine := $engines"],
        ),
        (
            "networkpolicy",
            '- {port: kv-transfer{{ ternary (printf "-%d" $engine) "" (gt $engine 0) }}}',
            [POLICY, ".Values.kvTransfer.port", "$engine := $engines"],
        ),
        (
            "networkpolicy",
            "from: {{- toYaml ($v.kvTransfer.from | default $namespace) | nindent 8 }}",
            [POLICY, ".Values.kvTransfer.port"],
        ),
        ("networkpolicy", "{{- toYaml . | nindent 4 }}", [POLICY, ".Values.networkPolicy.extraIngress"]),
        ("poddisruptionbudget", "kind: PodDisruptionBudget", [".Values.podDisruptionBudget.enabled"]),
    ],
)
def test_a_line_of_the_chart_is_there_where_its_values_ask_for_it(name: str, line: str, conditions: list[str]) -> None:
    assert conditions_of(template(f"{name}.yaml"))[line] == conditions


def test_a_first_start_has_the_minutes_that_its_value_says() -> None:
    probe = template("deployment.yaml").partition("startupProbe:")[2].partition("readinessProbe:")[0]
    (period_s,) = re.findall(r"periodSeconds: (\d+)\n", probe)
    (failures,) = re.findall(r"failureThreshold: {{ mul \$v.startupMinutes (\d+) }}\n", probe)
    assert int(period_s) * int(failures) == 60
    # A Deployment whose pod takes longer than this counts as failed, and so does the upgrade.
    (deadline,) = re.findall(r"progressDeadlineSeconds: (.*)\n", template("deployment.yaml"))
    assert deadline == "{{ add (mul $v.startupMinutes 60) 600 }}"


@needs_helm
@pytest.mark.parametrize(
    ("values", "scheme"),
    [("", "HTTP"), ("apiKeys.secretName=keys", "HTTP"), (f"apiKeys.secretName=keys,{HTTPS}", "HTTPS")],
)
def test_probes_ask_the_front_end_by_what_it_speaks(values: str, scheme: str) -> None:
    one = container(render(values))
    assert probed(one) == {name: (path, 9000, scheme) for name, path in PROBES.items()}
    tls = [word for word in one["args"] if word.startswith("--tls")]
    assert tls == (
        ["--tls-cert=/run/secrets/dflash-tls/tls.crt", "--tls-key=/run/secrets/dflash-tls/tls.key"]
        if HTTPS in values
        else []
    )


@needs_helm
def test_without_a_front_end_probes_ask_triton() -> None:
    resources = render(NO_FRONT_END)
    one = container(resources)
    ready = ("/v2/models/dflash/ready", 8000, "HTTP")
    assert probed(one) == {
        "startupProbe": ready,
        "readinessProbe": ready,
        "livenessProbe": ("/v2/health/live", 8000, "HTTP"),
    }
    assert "--port=0" in one["args"]
    assert 9000 not in [each["port"] for each in resources["Service"]["spec"]["ports"]]


@needs_helm
@pytest.mark.parametrize("values", ["", EVERYTHING, f"cache.enabled=false,{NO_FRONT_END}", "exitTimeout=300"])
def test_a_pod_is_confined(values: str) -> None:
    resources = render(values)
    one = container(resources)
    assert one["securityContext"] == CONFINED
    assert pod(resources)["securityContext"]["runAsNonRoot"] is True
    secrets = {"/run/secrets/dflash"} if "apiKeys" in values else set()
    assert written_to(one) == {"/tmp", "/dev/shm", "/cache"}
    assert {each["mountPath"] for each in one["volumeMounts"] if each.get("readOnly")} == secrets
    assert one["resources"]["limits"]["memory"] == "32Gi"
    assert pod(resources)["terminationGracePeriodSeconds"] == (300 if "300" in values else 30) + GRACE_S


@needs_helm
def test_the_network_policy_lets_in_who_the_values_name() -> None:
    def rules(values: str) -> list[tuple[list[str], Any]]:
        policy = render(values)["NetworkPolicy"]["spec"]
        assert policy["policyTypes"] == ["Ingress"]
        return [([port["port"] for port in rule["ports"]], rule.get("from")) for rule in policy["ingress"]]

    namespace, cluster = [{"podSelector": {}}], [{"namespaceSelector": {}}]
    metrics = (["metrics"], cluster)
    assert rules("") == [(["openai", "http", "grpc"], namespace), metrics]
    assert rules(NO_FRONT_END) == [(["http", "grpc"], namespace), metrics]
    events = (["kv-events", "kv-replay"], namespace)
    assert rules("apiKeys.secretName=keys,kvEvents.enabled=true") == [(["openai"], None), metrics, events]
    named = rules("apiKeys.secretName=keys,networkPolicy.from[0].ipBlock.cidr=10.0.0.0/8")
    assert named == [(["openai"], [{"ipBlock": {"cidr": "10.0.0.0/8"}}]), metrics]
    assert "NetworkPolicy" not in render("networkPolicy.enabled=false")
    resources = render(EVERYTHING)
    ports = {each["name"] for each in container(resources)["ports"]}
    assert {port["port"] for rule in resources["NetworkPolicy"]["spec"]["ingress"] for port in rule["ports"]} <= ports
    labels = resources["Deployment"]["spec"]["template"]["metadata"]["labels"]
    assert resources["NetworkPolicy"]["spec"]["podSelector"]["matchLabels"].items() <= labels.items()
    more = rules("networkPolicy.extraIngress[0].ports[0].port=5000")
    assert more == [*rules(""), ([5000], None)]


@needs_helm
@pytest.mark.parametrize(
    ("values", "engines"),
    [
        ("gpus=4", 4),
        ("gpus=0", 1),
        ("gpus=8,settings.tensor_parallel_size=8", 1),
        ("gpus=8,settings.tensor_parallel_size=4,settings.data_parallel_size=2", 2),
    ],
)
def test_every_port_of_every_engine_is_open(values: str, engines: int) -> None:
    """The first engine's ports are the values', and each further one has the next ones."""
    resources = render(
        f"{values},kvEvents.enabled=true,kvTransfer.port=5700,kvTransfer.from[0].podSelector.matchLabels.a=b"
    )
    config = EngineConfig.from_values(environment_settings(variables(resources)))
    assert config.data_parallel_size == engines
    ports = {one["name"]: one["containerPort"] for one in container(resources)["ports"]}
    events, transfer = [
        ([ports[one["port"]] for one in rule["ports"]], rule["from"])
        for rule in resources["NetworkPolicy"]["spec"]["ingress"][2:]
    ]
    published = [
        int(at_rank(endpoint, rank).rpartition(":")[2])
        for rank in range(engines)
        for endpoint in (config.kv_events_endpoint, config.kv_events_replay_endpoint)
    ]
    assert events == (published, [{"podSelector": {}}])
    assert transfer == (
        [config.kv_transfer_port + rank for rank in range(engines)],
        [{"podSelector": {"matchLabels": {"a": "b"}}}],
    )
    assert {"name": "DFLASH_KV_TRANSFER_HOST", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}} in (
        container(resources)["env"]
    )
    assert len(set(ports.values())) == len(ports)
    assert all(len(name) <= LONGEST_PORT_NAME for name in ports)


@needs_helm
def test_the_values_of_a_prefill_server_that_the_page_shows_open_its_port_to_the_decode_servers(tmp_path: Path) -> None:
    page = (ROOT / "docs/disaggregation.md").read_text(encoding="utf-8")
    (given,) = re.findall(r"\n```console\n(settings:.*?)```", page, re.DOTALL)
    (tmp_path / "my.yaml").write_text(given, encoding="utf-8")
    command = [str(HELM), "template", "release", str(CHART), "-f", str(tmp_path / "my.yaml")]
    text = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    resources = {one["kind"]: one for one in yaml.safe_load_all(text) if one}
    config = EngineConfig.from_values(environment_settings(variables(resources)))
    assert (config.kv_role, config.kv_transfer_port) == ("prefill", 5700)
    peers = [{"podSelector": {"matchLabels": {"app.kubernetes.io/instance": "decode"}}}]
    assert resources["NetworkPolicy"]["spec"]["ingress"][-1] == {"ports": [{"port": "kv-transfer"}], "from": peers}


@needs_helm
@pytest.mark.parametrize(
    ("values", "strategy"),
    [
        ("", {"type": "Recreate"}),
        (
            "replicaCount=2,cache.enabled=false",
            {"type": "RollingUpdate", "rollingUpdate": {"maxSurge": 0, "maxUnavailable": 1}},
        ),
        ("replicaCount=2,cache.enabled=false,gpus=0", None),
        ("replicaCount=2,cache.enabled=false,strategy.type=Recreate", {"type": "Recreate"}),
        ("strategy.rollingUpdate.maxSurge=1", {"rollingUpdate": {"maxSurge": 1}}),
    ],
)
def test_an_upgrade_needs_no_gpu_more_unless_the_values_say_so(values: str, strategy: dict[str, Any] | None) -> None:
    assert render(values)["Deployment"]["spec"].get("strategy") == strategy


@needs_helm
def test_what_the_values_mount_and_how_they_confine_a_pod_is_in_it() -> None:
    spec = "extraVolumes[0].name=weights,extraVolumeMounts[0].name=weights,extraVolumeMounts[0].mountPath=/models"
    resources = render(
        f"{spec},initContainers[0].name=fetch,podSecurityContext.runAsUser=null,securityContext.readOnlyRootFilesystem=false,"
        "topologySpreadConstraints[0].maxSkew=1,podDisruptionBudget.enabled=true,podDisruptionBudget.maxUnavailable=2"
    )
    one = pod(resources)
    assert {"name": "weights"} in one["volumes"]
    assert {"name": "weights", "mountPath": "/models"} in container(resources)["volumeMounts"]
    assert (one["initContainers"], one["topologySpreadConstraints"]) == ([{"name": "fetch"}], [{"maxSkew": 1}])
    assert one["securityContext"] == {
        name: value for name, value in VALUES["podSecurityContext"].items() if name != "runAsUser"
    }
    assert container(resources)["securityContext"] == CONFINED | {"readOnlyRootFilesystem": False}
    budget = resources["PodDisruptionBudget"]["spec"]
    assert budget["maxUnavailable"] == 2
    assert budget["selector"] == resources["Deployment"]["spec"]["selector"]


@needs_helm
def test_with_keys_tritons_ports_stay_inside_the_pod() -> None:
    given = parser().parse_args(container(render("apiKeys.secretName=keys"))["args"])
    assert (triton_host(given), given.metrics_host) == ("127.0.0.1", "0.0.0.0")
    given = parser().parse_args(container(render())["args"])
    assert (triton_host(given), given.metrics_host) == ("0.0.0.0", "0.0.0.0")


@needs_helm
@pytest.mark.parametrize("values", ["", EVERYTHING, "gpus=0,cache.enabled=false"])
def test_settings_and_options_of_the_pod_exist(values: str) -> None:
    resources = render(values)
    ours = {name: value for name, value in variables(resources).items() if name.startswith("DFLASH_")}
    config = EngineConfig.from_values(environment_settings(ours))
    assert config.data_parallel_size == (4 if values == EVERYTHING else 1)
    assert config.device == ("cpu" if "gpus=0" in values else None)
    assert (config.max_num_seqs == 32, config.target_model == "a/b") == (values == EVERYTHING,) * 2
    arguments = container(resources)["args"]
    check_arguments(arguments)
    mounts = {one["name"] for one in container(resources)["volumeMounts"]}
    assert mounts == {one["name"] for one in pod(resources)["volumes"]}
    labels = resources["Deployment"]["spec"]["template"]["metadata"]["labels"]
    assert resources["Deployment"]["spec"]["selector"]["matchLabels"].items() <= labels.items()
    assert resources["Service"]["spec"]["selector"].items() <= labels.items()


@needs_helm
def test_a_pod_gets_the_gpus_that_its_engines_take() -> None:
    found = [container(render(values))["resources"]["limits"] for values in ("", "gpus=8", "gpus=0")]
    memory = {"memory": "32Gi"}
    assert found == [memory | {"nvidia.com/gpu": "1"}, memory | {"nvidia.com/gpu": "8"}, memory]
    assert "DFLASH_DATA_PARALLEL_SIZE" not in variables(render("gpus=4,settings.tensor_parallel_size=4"))


@needs_helm
def test_with_keys_the_service_has_no_port_that_checks_none() -> None:
    ports = [
        [one["name"] for one in render(values)["Service"]["spec"]["ports"]]
        for values in ("", "apiKeys.secretName=keys")
    ]
    assert ports == [["http", "grpc", "metrics", "openai"], ["openai"]]


@needs_helm
def test_the_autoscaler_and_the_monitor_are_of_this_deployment() -> None:
    assert render().keys() == {"Deployment", "Service", "PersistentVolumeClaim", "NetworkPolicy"}
    resources = render(EVERYTHING)
    hpa = resources["HorizontalPodAutoscaler"]["spec"]
    assert hpa["scaleTargetRef"]["name"] == resources["Deployment"]["metadata"]["name"]
    assert "replicas" not in resources["Deployment"]["spec"], "it would undo what the autoscaler does"
    (metric,) = hpa["metrics"]
    assert metric["pods"]["metric"]["name"] == "dflash_num_requests_waiting"
    monitor = resources["PodMonitor"]["spec"]
    labels = resources["Deployment"]["spec"]["template"]["metadata"]["labels"]
    assert monitor["selector"]["matchLabels"].items() <= labels.items()
    (endpoint,) = monitor["podMetricsEndpoints"]
    assert endpoint["port"] in {one["name"] for one in container(resources)["ports"]}


@needs_helm
@pytest.mark.parametrize(
    ("values", "words"),
    [
        ("replicaCount=2", r"set cache.accessModes to \[ReadWriteMany\]"),
        ("autoscaling.enabled=true,autoscaling.minReplicas=9,cache.enabled=false", "minReplicas is above"),
        ("gpus=many", r"gpus: Invalid type|at '/gpus': got string"),
        ("gpu=1", "dditional propert(y gpu is|ies 'gpu') not allowed"),
        ("extraArgs={--port=9001}", "--port is for the chart to say; set openai.enabled"),
        (
            "extraArgs={--no-access-log,--ssl-keyfile,k}",
            "--ssl-keyfile is for the chart to say; set openai.tlsSecretName",
        ),
        ("extraArgs={--exit-timeout=60}", "set exitTimeout"),
        ("extraArgs={--http-port=80}", "--http-port would move what probes and the service look for"),
        ("extraArgs={--tls-client-ca=ca.pem}", "--tls-client-ca would shut out the probes"),
        (f"{NO_FRONT_END},apiKeys.secretName=keys", "Triton checks no keys"),
        (f"{NO_FRONT_END},{HTTPS}", "openai.enabled is false"),
        (
            "extraEnv[0].name=DFLASH_API_KEYS",
            "extraEnv: DFLASH_API_KEYS is for the chart to say; set apiKeys.secretName",
        ),
        ("extraEnv[0].name=DFLASH_SERVE_HOST", "extraEnv: DFLASH_SERVE_HOST would move what probes"),
        (
            "kvTransfer.port=1,extraEnv[0].name=DFLASH_KV_TRANSFER_HOST",
            "DFLASH_KV_TRANSFER_HOST .* set kvTransfer.port",
        ),
        ("settings.kv_transfer_port=5700", "kv_transfer_port is for the chart to say; set kvTransfer.port"),
        ("settings.kv_events_endpoint=tcp://*:1", "kv_events_endpoint is for the chart to say; set kvEvents.enabled"),
        ("settings.kv_role=prefill", "the NetworkPolicy opens none; set kvTransfer.port"),
    ],
)
def test_values_that_cannot_work_are_refused_with_a_sentence(values: str, words: str) -> None:
    with pytest.raises(subprocess.CalledProcessError) as failed:
        render(values)
    assert re.search(words, failed.value.stderr)


@needs_helm
@pytest.mark.parametrize("values", ["", EVERYTHING, f"{HTTPS},networkPolicy.from[0].ipBlock.cidr=10.0.0.0/8"])
def test_resources_are_as_the_schemas_of_kubernetes_have_them(values: str) -> None:
    validate = pytest.importorskip("kubernetes_validate", reason="needs kubernetes-validate")
    for kind, resource in render(values).items():
        if kind != "PodMonitor":  # of the Prometheus operator
            validate.validate(resource, validate.latest_version(), strict=True)
