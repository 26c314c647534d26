"""The model as Triton calls it, without Triton."""

from __future__ import annotations

import importlib
import json
import os
import sys
from pathlib import Path
from types import ModuleType

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


@pytest.mark.parametrize(("kind", "visible"), [("GPU", "3"), ("CPU", "0,3")])
def test_an_instance_loads_on_the_gpu_that_triton_gave_it(
    triton_model: ModuleType, kind: str, visible: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,3")
    config = {
        "model_transaction_policy": {"decoupled": True},
        "input": [{"name": name} for name in model_config.INPUTS],
        "output": [{"name": name} for name in model_config.OUTPUTS],
    }
    triton_model.TritonPythonModel().initialize(
        {
            "model_config": json.dumps(config),
            "model_repository": str(tmp_path),
            "model_version": "1",
            "model_name": "dflash",
            "model_instance_name": "dflash_0_1",
            "model_instance_kind": kind,
            "model_instance_device_id": "1",
        }
    )
    assert os.environ["CUDA_VISIBLE_DEVICES"] == visible
