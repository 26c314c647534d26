"""The model as Triton calls it, without Triton."""

from __future__ import annotations

import importlib
import json
import os
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from dflash_backend.triton import model_config


@pytest.fixture
def triton_model(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    pb_utils = ModuleType("triton_python_backend_utils")
    pb_utils.TritonModelException = type("TritonModelException", (Exception,), {})  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "triton_python_backend_utils", pb_utils)
    monkeypatch.delitem(sys.modules, "dflash_backend.triton.model", raising=False)
    module = importlib.import_module("dflash_backend.triton.model")
    monkeypatch.setattr(module, "TritonService", lambda *args, **options: None)
    monkeypatch.setattr(module, "freeze_heap", lambda: None)
    return module


def arguments(repository: Path, kind: str = "CPU") -> dict[str, str]:
    """What Triton tells a model as it loads it."""
    config = {
        "model_transaction_policy": {"decoupled": True},
        "input": [{"name": name} for name in model_config.INPUTS],
        "output": [{"name": name} for name in model_config.OUTPUTS],
    }
    return {
        "model_config": json.dumps(config),
        "model_repository": str(repository),
        "model_version": "1",
        "model_name": "dflash",
        "model_instance_name": "dflash_0_1",
        "model_instance_kind": kind,
        "model_instance_device_id": "1",
    }


@pytest.mark.parametrize(("kind", "visible"), [("GPU", "3"), ("CPU", "0,3")])
def test_an_instance_loads_on_the_gpu_that_triton_gave_it(
    triton_model: ModuleType, kind: str, visible: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,3")
    triton_model.TritonPythonModel().initialize(arguments(tmp_path, kind))
    assert os.environ["CUDA_VISIBLE_DEVICES"] == visible


def test_a_model_is_ready_while_its_service_is_and_hands_it_each_request(
    triton_model: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[Any] = []
    service = SimpleNamespace(ready=True, submit=calls.append, close=lambda: calls.append("closed"))
    monkeypatch.setattr(triton_model, "TritonService", lambda *args, **options: service)
    model = triton_model.TritonPythonModel()
    model.initialize(arguments(tmp_path))
    assert model.is_ready() is True
    service.ready = False  # as while the engine is started again
    assert model.is_ready() is False
    model.execute(["a", "b"])
    model.finalize()
    assert calls == ["a", "b", "closed"]


@pytest.mark.parametrize(
    ("groups", "number"),
    [
        ([], 1),
        ([{"count": 1, "kind": "KIND_MODEL", "gpus": []}], 1),
        ([{"count": 2, "kind": "KIND_CPU"}], 2),
        ([{"count": 2, "kind": "KIND_GPU", "gpus": [0, 1]}, {"kind": "KIND_GPU", "gpus": [2]}], 5),
    ],
)
def test_a_service_knows_how_many_instances_there_are(
    triton_model: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, groups: list[Any], number: int
) -> None:
    made: list[dict[str, Any]] = []
    monkeypatch.setattr(triton_model, "TritonService", lambda *args, **options: made.append(options))
    given = arguments(tmp_path)
    given["model_config"] = json.dumps({**json.loads(given["model_config"]), "instance_group": groups})
    triton_model.TritonPythonModel().initialize(given)
    assert [options["num_instances"] for options in made] == [number]


@pytest.mark.parametrize(("backend", "as_vllm"), [("vllm", True), ("python", False)])
def test_a_model_of_the_backend_vllm_stands_in_for_one(
    triton_model: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, backend: str, as_vllm: bool
) -> None:
    made: list[dict[str, Any]] = []
    monkeypatch.setattr(triton_model, "TritonService", lambda *args, **options: made.append(options))
    given = arguments(tmp_path)
    given["model_config"] = json.dumps({**json.loads(given["model_config"]), "backend": backend})
    triton_model.TritonPythonModel().initialize(given)
    assert [options["as_vllm"] for options in made] == [as_vllm]
