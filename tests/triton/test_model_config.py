"""What Triton is told of the model, and what a model directory of Triton's vLLM backend says."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from dflash_backend.config import ConfigError, EngineConfig, asset_path
from dflash_backend.triton.model_config import (
    INPUTS,
    OUTPUTS,
    check_model_config,
    complete_model_config,
    read_model_json,
    use_gpus_of_model,
)


def complete() -> dict[str, Any]:
    """A model's config as Triton gives it to the model."""
    return {
        "name": "m",
        "max_batch_size": 0,
        "model_transaction_policy": {"decoupled": True},
        "input": [{"name": name} for name in INPUTS],
        "output": [{"name": name} for name in OUTPUTS],
    }


class ModelConfig:
    """Stands in for the class of Triton's Python backend."""

    def __init__(self, config: dict[str, Any]) -> None:
        self.config = config

    def as_dict(self) -> dict[str, Any]:
        return self.config

    def add_input(self, tensor: dict[str, Any]) -> None:
        self.config["input"].append(tensor)

    def add_output(self, tensor: dict[str, Any]) -> None:
        self.config["output"].append(tensor)

    def set_model_transaction_policy(self, policy: dict[str, bool]) -> None:
        self.config["model_transaction_policy"] = policy

    def set_max_batch_size(self, size: int) -> None:
        self.config["max_batch_size"] = size


def test_the_shipped_config_has_the_inputs_and_outputs_of_the_tables() -> None:
    text = asset_path("model_repository", "dflash", "config.pbtxt").read_text(encoding="utf-8")
    tensor = r'\{ name: "(\w+)" data_type: (\w+) dims: \[ (-?\d+) \]( optional: true)? \}'
    found = {name: (kind, int(size), bool(optional)) for name, kind, size, optional in re.findall(tensor, text)}
    expected = {name: (*form, True) for name, form in INPUTS.items()}
    assert found == expected | {name: (*form, False) for name, form in OUTPUTS.items()}


def test_a_config_without_inputs_and_outputs_is_completed() -> None:
    config = ModelConfig({"name": "m", "max_batch_size": 0, "input": [{"name": "stream"}], "output": []})
    complete_model_config(config)
    check_model_config(config.config)
    assert [tensor["name"] for tensor in config.config["input"]].count("stream") == 1
    assert config.config["input"][1] == {
        "name": "text_input",
        "data_type": "TYPE_STRING",
        "dims": [1],
        "optional": True,
    }


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model_transaction_policy": {"decoupled": False}}, "has no `model_transaction_policy"),
        ({"model_transaction_policy": {}}, "has no `model_transaction_policy"),
        ({"max_batch_size": 8}, "max_batch_size above 0"),
        ({"input": [{"name": "text_input"}]}, "has no input delta_stream, describe, embedding_request"),
        ({"output": []}, "has no output cumulative_logprob"),
    ],
)
def test_a_config_that_cannot_work_is_refused_at_the_load(change: dict[str, Any], message: str) -> None:
    check_model_config(complete())
    with pytest.raises(ConfigError, match=message):
        check_model_config(complete() | change)


def test_a_model_json_of_the_vllm_backend_is_read(tmp_path: Path) -> None:
    path = tmp_path / "model.json"
    assert read_model_json(path) == {}
    path.write_text(
        json.dumps(
            {
                "model": "Qwen/Qwen3-8B",
                "gpu_memory_utilization": 0.5,
                "enforce_eager": True,
                "block_size": 32,
                "quantization": None,
                "tensor_parallel_size": 1,
                "data_parallel_size": 2,
                "enable_lora": "false",
                "disable_log_requests": "true",
                "speculative_config": {
                    "method": "dflash",
                    "model": "z-lab/Qwen3-8B-DFlash-b16",
                    "num_speculative_tokens": 15,
                },
            }
        )
    )
    config = EngineConfig.load({}, {}, model_json=read_model_json(path))
    assert (config.target_model, config.draft_model) == ("Qwen/Qwen3-8B", "z-lab/Qwen3-8B-DFlash-b16")
    assert (config.gpu_memory_utilization, config.enable_cuda_graphs, config.kv_block_size) == (0.5, False, 32)
    assert (config.num_speculative_tokens, config.data_parallel_size) == (15, 2)


def test_the_adapters_of_a_model_of_the_vllm_backend_are_read(tmp_path: Path) -> None:
    path, adapters = tmp_path / "model.json", tmp_path / "multi_lora.json"
    adapters.write_text('{"doll": "/adapters/doll", "sheep": "owner/sheep"}')
    path.write_text('{"model": "a/b", "enable_lora": "true", "max_lora_rank": 16, "max_loras": 2}')
    config = EngineConfig.load({}, {}, model_json=read_model_json(path))
    assert config.adapters == {"doll": "/adapters/doll", "sheep": "owner/sheep"}
    path.write_text('{"model": "a/b", "enable_lora": "false"}')
    assert EngineConfig.load({}, {}, model_json=read_model_json(path)).adapters == {}
    path.write_text('{"enable_lora": true}')
    for text in ("[]", "{}", "{"):
        adapters.write_text(text)
        with pytest.raises(ConfigError, match=r"multi_lora.json: it (must be a JSON object|is not JSON)"):
            read_model_json(path)


@pytest.mark.parametrize(
    ("argument", "value", "setting", "expected"),
    [
        ("kv_cache_dtype", "auto", "kv_cache_dtype", None),
        ("kv_cache_dtype", "fp8", "kv_cache_dtype", "fp8"),
        ("kv_cache_dtype", "fp8_e4m3", "kv_cache_dtype", "fp8"),
        ("dtype", "half", "dtype", "float16"),
        ("dtype", "float", "dtype", "float32"),
        ("dtype", "auto", "dtype", None),
        ("tensor_parallel_size", 2, "tensor_parallel_size", 2),
        ("distributed_executor_backend", "ray", "distributed_executor", "ray"),
        ("distributed_executor_backend", "mp", "distributed_executor", "mp"),
        ("distributed_executor_backend", "uni", "distributed_executor", None),
        ("revision", "v2", "target_revision", "v2"),
        ("rope_scaling", {"rope_type": "yarn", "factor": 4.0}, "target_rope", {"rope_type": "yarn", "factor": 4.0}),
    ],
)
def test_arguments_of_vllm_that_are_settings_here_are_taken(
    tmp_path: Path, argument: str, value: Any, setting: str, expected: Any
) -> None:
    path = tmp_path / "model.json"
    path.write_text(json.dumps({"model": "some/target", argument: value}))
    config = EngineConfig.load({}, {}, model_json=read_model_json(path))
    assert getattr(config, setting) == expected


def test_arguments_of_vllm_that_change_nothing_here_are_taken(tmp_path: Path) -> None:
    path = tmp_path / "model.json"
    nothing = {"max_logprobs": 20, "served_model_name": ["a", "b"], "swap_space": 4, "tokenizer": "some/target"}
    path.write_text(json.dumps({"model": "some/target"} | nothing))
    assert read_model_json(path) == {"target_model": "some/target"}


@pytest.mark.parametrize(
    ("theirs", "ours"), [("kv_producer", "prefill"), ("kv_consumer", "decode"), ("kv_both", "both")]
)
def test_a_role_of_model_json_is_one_of_ours(theirs, ours, tmp_path):
    path = tmp_path / "model.json"
    path.write_text(json.dumps({"kv_transfer_config": {"kv_connector": "NixlConnector", "kv_role": theirs}}))
    assert read_model_json(path) == {"kv_role": ours, "kv_transfer_backend": "nixl"}


def test_an_argument_of_model_json_that_is_null_is_left_out(tmp_path):
    path = tmp_path / "model.json"
    nulls = ("speculative_config", "kv_transfer_config", "enforce_eager", "max_model_len", "load_format")
    path.write_text(json.dumps({"model": "some/target", **dict.fromkeys(nulls)}))
    assert read_model_json(path) == {"target_model": "some/target"}


@pytest.mark.parametrize(
    "speculation",
    [
        {"method": "ngram"},
        {"method": "ngram", "model": "ngram"},
        {"model": "[ngram]", "method": None},
        {"model": "ngram"},
    ],
)
def test_prompt_lookup_is_asked_for_as_in_vllm(tmp_path: Path, speculation: dict[str, Any]) -> None:
    path = tmp_path / "model.json"
    lookup = {"num_speculative_tokens": 4, "prompt_lookup_max": 6, "prompt_lookup_min": 3}
    path.write_text(json.dumps({"model": "Qwen/Qwen3-8B", "speculative_config": speculation | lookup}))
    config = EngineConfig.load({}, {}, model_json=read_model_json(path))
    assert (config.target_model, config.draft_model) == ("Qwen/Qwen3-8B", "ngram")
    assert (config.num_speculative_tokens, config.prompt_lookup_max, config.prompt_lookup_min) == (4, 6, 3)


@pytest.mark.parametrize("speculation", [{"method": "eagle3", "model": "a/drafter"}, {"model": "a/drafter"}])
def test_prompt_lookup_is_of_no_drafter_as_in_vllm(tmp_path: Path, speculation: dict[str, Any]) -> None:
    path = tmp_path / "model.json"
    lookup = {"num_speculative_tokens": 4, "prompt_lookup_max": 6, "prompt_lookup_min": 3}
    path.write_text(json.dumps({"model": "Qwen/Qwen3-8B", "speculative_config": speculation | lookup}))
    config = EngineConfig.load({}, {}, model_json=read_model_json(path))
    assert (config.draft_model, config.num_speculative_tokens) == ("a/drafter", 4)
    assert (config.prompt_lookup_max, config.prompt_lookup_min) == (None, None)


@pytest.mark.parametrize(
    ("parameter", "log_stats", "expected"),
    [
        ("true", None, True),
        ("true", {"disable_log_stats": False}, True),
        ("true", {"disable_log_stats": True}, None),
        ("true", {"disable_log_stats": "True"}, None),
        ("false", {"disable_log_stats": True}, False),
        (None, {"disable_log_stats": True}, None),
    ],
)
def test_vllms_metrics_are_there_only_where_its_parameter_and_the_model_json_both_say_so(
    tmp_path: Path, parameter: str | None, log_stats: dict[str, Any] | None, expected: bool | None
) -> None:
    (tmp_path / "model.json").write_text(json.dumps({"model": "a/b"} | (log_stats or {})))
    parameters = {} if parameter is None else {"REPORT_CUSTOM_METRICS": parameter}
    config = EngineConfig.load(parameters, {}, model_json=read_model_json(tmp_path / "model.json"))
    assert config.report_custom_metrics is expected


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "it is not JSON"),
        ('{"disable_log_stats": "perhaps"}', "'disable_log_stats' is \"perhaps\"; allowed: true or false"),
        ("[]", "it must be a JSON object"),
        ('{"kv_transfer_config": {}}', "'kv_transfer_config' has the connector None and the role None; allowed: 'Nixl"),
        (
            '{"kv_transfer_config": {"kv_connector": "LMCacheConnectorV1", "kv_role": "kv_both"}}',
            "'kv_transfer_config' has the connector 'LMCacheConnectorV1'",
        ),
        ('{"pipeline_parallel_size": 2}', "'pipeline_parallel_size' is 2; allowed: 1"),
        ('{"model": "a/b", "tokenizer": "c/d"}', "'tokenizer' has no counterpart here"),
        ('{"max_logprobs": 21}', "'max_logprobs' is 21; allowed: 0 to 20"),
        (
            '{"enable_lora": "true"}',
            "multi_lora.json does not exist; with 'enable_lora' it names the adapters' folders",
        ),
        (
            '{"speculative_config": {"method": "medusa"}}',
            "has the method 'medusa'; allowed: 'dflash', 'dflash2', 'dspark', 'eagle3', 'ngram'",
        ),
        ('{"speculative_config": {"method": "ngram", "model": "x/y"}}', "the method 'ngram' and the model 'x/y'"),
        ('{"speculative_config": {"draft_tensor_parallel_size": 2}}', "'draft_tensor_parallel_size', which has no"),
    ],
)
def test_a_model_json_that_asks_for_something_else_is_refused_by_name(
    tmp_path: Path, content: str, message: str
) -> None:
    path = tmp_path / "model.json"
    path.write_text(content)
    with pytest.raises(ConfigError, match=message):
        read_model_json(path)


@pytest.mark.parametrize(
    ("kind", "device_id", "before", "after"),
    [
        ("GPU", "0", None, "0"),
        ("GPU", "2", None, "2"),
        ("GPU", "1", "4,6", "6"),
        ("GPU", "1", "GPU-aa, GPU-bb", "GPU-bb"),
        ("CPU", "0", "4,6", "4,6"),
        ("MODEL", "0", None, None),
    ],
)
def test_an_instance_of_a_gpu_runs_on_that_gpu(
    kind: str, device_id: str, before: str | None, after: str | None
) -> None:
    environ = {} if before is None else {"CUDA_VISIBLE_DEVICES": before}
    use_gpus_of_model({"model_instance_kind": kind, "model_instance_device_id": device_id}, {}, environ)
    assert environ.get("CUDA_VISIBLE_DEVICES") == after


@pytest.mark.parametrize(
    ("device_ids", "before", "after"),
    [("1", None, "1"), ("0, 1", None, "0,1"), ("1,0", "4,6", "6,4"), ("", "4,6", "4,6"), (" ", None, None)],
)
def test_a_model_runs_on_the_gpus_that_its_config_names(device_ids: str, before: str | None, after: str | None) -> None:
    environ = {} if before is None else {"CUDA_VISIBLE_DEVICES": before}
    instance = {"model_instance_kind": "MODEL", "model_instance_device_id": "0"}
    use_gpus_of_model(instance, {"GPU_DEVICE_IDS": device_ids}, environ)
    assert environ.get("CUDA_VISIBLE_DEVICES") == after
    assert EngineConfig.load({"GPU_DEVICE_IDS": device_ids}, {}) is not None


@pytest.mark.parametrize(
    ("device_ids", "kind", "message"),
    [
        ("all", "MODEL", "'GPU_DEVICE_IDS' has the value 'all' .*; allowed: different numbers of GPUs, such as 0,1"),
        ("0,,1", "MODEL", "has the value '0,,1'"),
        ("-1", "MODEL", "has the value '-1'"),
        ("1,1", "MODEL", "has the value '1,1'"),
        ("0,2", "MODEL", "names GPU 2 .*, and the server sees 2: CUDA_VISIBLE_DEVICES is '4,6'"),
        ("0", "GPU", "KIND_GPU and the parameter 'GPU_DEVICE_IDS'; keep one of them"),
    ],
)
def test_gpus_that_cannot_be_meant_are_refused(device_ids: str, kind: str, message: str) -> None:
    environ = {"CUDA_VISIBLE_DEVICES": "4,6"}
    instance = {"model_instance_kind": kind, "model_instance_device_id": "0"}
    with pytest.raises(ConfigError, match=message):
        use_gpus_of_model(instance, {"GPU_DEVICE_IDS": device_ids}, environ)
    assert environ == {"CUDA_VISIBLE_DEVICES": "4,6"}
