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

from dflash_backend.config import EngineConfig, environment_settings

ROOT = Path(__file__).resolve().parents[2]
CHART = ROOT / "deploy/helm/dflash-triton"
RUNTIME = ROOT / "deploy/kserve/servingruntime.yaml"
HELM = os.environ.get("HELM") or shutil.which("helm")
VALUES: dict[str, Any] = yaml.safe_load((CHART / "values.yaml").read_text(encoding="utf-8"))
EVERYTHING = (
    "gpus=4,podMonitor.enabled=true,autoscaling.enabled=true,cache.accessModes={ReadWriteMany},kvEvents.enabled=true,"
    "settings.max_num_seqs=32,apiKeys.secretName=keys,hfToken.secretName=hf,runtimeClassName=nvidia,model.target=a/b"
)
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


def test_the_schema_has_the_values_and_no_others() -> None:
    schema = json.loads((CHART / "values.schema.json").read_text(encoding="utf-8"))

    def check(values: dict[str, Any], properties: dict[str, Any], at: str) -> None:
        assert values.keys() == properties.keys() - {"global"}, at
        for name, value in values.items():
            if isinstance(value, dict) and "properties" in properties[name]:
                check(value, properties[name]["properties"], f"{at}.{name}")

    check(VALUES, schema["properties"], "values")


def test_the_kserve_runtime_is_one() -> None:
    runtime = yaml.safe_load(RUNTIME.read_text(encoding="utf-8"))
    assert (runtime["apiVersion"], runtime["kind"]) == ("serving.kserve.io/v1alpha1", "ServingRuntime")
    (one,) = runtime["spec"]["containers"]
    assert one["name"] == "kserve-container"
    check_arguments(one["args"])
    environ = {each["name"]: each["value"] for each in one["env"] if each["name"].startswith("DFLASH_")}
    EngineConfig.from_values(environment_settings(environ))
    mounts = {each["name"] for each in one["volumeMounts"]}
    assert mounts == {each["name"] for each in runtime["spec"]["volumes"]}


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
    timeout = next(int(one.partition("=")[2]) for one in arguments if one.startswith("--exit-timeout"))
    assert pod(resources)["terminationGracePeriodSeconds"] >= timeout + 15
    labels = resources["Deployment"]["spec"]["template"]["metadata"]["labels"]
    assert resources["Deployment"]["spec"]["selector"]["matchLabels"].items() <= labels.items()
    assert resources["Service"]["spec"]["selector"].items() <= labels.items()


@needs_helm
def test_a_pod_gets_the_gpus_that_its_engines_take() -> None:
    found = [container(render(values))["resources"].get("limits", {}) for values in ("", "gpus=8", "gpus=0")]
    assert found == [{"nvidia.com/gpu": "1"}, {"nvidia.com/gpu": "8"}, {}]
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
    assert render().keys() == {"Deployment", "Service", "PersistentVolumeClaim"}
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
        ("replicaCount=2", "set cache.accessModes to [ReadWriteMany]"),
        ("autoscaling.enabled=true,autoscaling.minReplicas=9,cache.enabled=false", "minReplicas is above"),
        ("gpus=many", "gpus: Invalid type"),
        ("gpu=1", "Additional property gpu is not allowed"),
    ],
)
def test_values_that_cannot_work_are_refused_with_a_sentence(values: str, words: str) -> None:
    with pytest.raises(subprocess.CalledProcessError) as failed:
        render(values)
    assert words in failed.value.stderr


@needs_helm
@pytest.mark.parametrize("values", ["", EVERYTHING])
def test_resources_are_as_the_schemas_of_kubernetes_have_them(values: str) -> None:
    validate = pytest.importorskip("kubernetes_validate", reason="needs kubernetes-validate")
    for kind, resource in render(values).items():
        if kind != "PodMonitor":  # of the Prometheus operator
            validate.validate(resource, validate.latest_version(), strict=True)
