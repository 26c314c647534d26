"""The model in a Triton that an operator runs already: as a backend called `vllm`, with a config.pbtxt of theirs."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from dflash_backend.config import asset_path
from dflash_cli.launcher.server import LauncherError
from dflash_cli.launcher.triton_install import find_triton
from dflash_client import DFlashClient
from tests.server.existing_triton import ExistingTriton, existing_triton

# As the samples of Triton's vLLM backend have it: no inputs, no outputs, no policy.
VLLM_CONFIG = """
backend: "vllm"
instance_group [ { count: 1 kind: KIND_MODEL } ]
parameters { key: "REPORT_CUSTOM_METRICS" value { string_value: "true" } }
parameters { key: "ENABLE_VLLM_HEALTH_CHECK" value { string_value: "true" } }
parameters { key: "FORCE_CPU_ONLY_INPUT_TENSORS" value { string_value: "yes" } }
parameters { key: "kv_cache_gb" value { string_value: "0.05" } }
"""
NOT_DECOUPLED = VLLM_CONFIG + "model_transaction_policy { decoupled: false }\n"


def write_model(repository: Path, name: str, config: str, model_json: dict[str, object] | None = None) -> None:
    version = repository / name / "1"
    version.mkdir(parents=True)
    (repository / name / "config.pbtxt").write_text(config)
    if model_json is not None:
        (version / "model.json").write_text(json.dumps(model_json))


@pytest.fixture(scope="module")
def triton(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ExistingTriton]:
    """Three models of the backend `vllm`, one that must load and two that must not."""
    try:
        install = find_triton(os.environ)
    except LauncherError as error:
        pytest.skip(str(error))
    folder = tmp_path_factory.mktemp("existing")
    backends = folder / "backends"
    options = install.prepare_backends(backends)
    if not options:
        pytest.skip("the installed Triton has a backend directory of its own, which tests do not write into")
    (backends / "vllm").symlink_to(asset_path("backends", "vllm"))
    repository = folder / "models"
    demo = {"model": str(asset_path("demo", "pair", "target")), "max_num_seqs": 4, "enforce_eager": True}
    write_model(repository, "good", VLLM_CONFIG, demo)
    write_model(repository, "pipeline", VLLM_CONFIG, {**demo, "pipeline_parallel_size": 2})
    write_model(repository, "not_decoupled", NOT_DECOUPLED, demo)
    with existing_triton(install, options, repository, folder) as running:
        yield running


def test_a_config_of_the_vllm_backend_loads_and_is_completed(triton: ExistingTriton) -> None:
    assert triton.get("/v2/models/good/ready").status_code == 200, triton.log.read_text()[-3000:]
    config = triton.get("/v2/models/good/config").json()
    assert config["backend"] == "vllm", "Triton's OpenAI frontend asks for it"
    assert config["model_transaction_policy"]["decoupled"] is True
    assert {"text_input", "messages", "return_token_ids"} < {tensor["name"] for tensor in config["input"]}


def test_its_model_json_names_the_target(triton: ExistingTriton) -> None:
    with DFlashClient(f"127.0.0.1:{triton.grpc_port}", model="good", timeout_s=60) as client:
        result = client.generate("Sam fills 4 bags with 6 marbles each.", max_tokens=8, temperature=0)
        assert result.num_output_tokens == 8 or result.finish_reason == "stop"
        assert result.spec_stats["num_drafts"] == 0, "the model.json names no drafter"


@pytest.mark.parametrize(
    ("name", "reason"),
    [("pipeline", "'pipeline_parallel_size' is 2; allowed: 1"), ("not_decoupled", "decoupled")],
)
def test_a_model_that_cannot_work_is_refused_at_the_load(triton: ExistingTriton, name: str, reason: str) -> None:
    assert triton.get(f"/v2/models/{name}/ready").status_code == 400
    (entry,) = [one for one in triton.post("/v2/repository/index", {}).json() if one["name"] == name]
    assert reason in entry["reason"]
