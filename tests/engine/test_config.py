"""Settings are declared once, and a bad one is named with value, source and what is allowed."""

from __future__ import annotations

import re
from typing import Any

import pytest

from dflash_backend.config import (
    SETTINGS,
    ConfigError,
    EngineConfig,
    asset_path,
    environment_settings,
)
from dflash_backend.settings import Setting
from docs.write_settings import config_parameters, settings_table


def test_the_environment_wins_over_the_file() -> None:
    config = EngineConfig.load({"max_num_seqs": "8", "dtype": "auto"}, {"DFLASH_MAX_NUM_SEQS": "9", "PATH": "/bin"})
    assert config.max_num_seqs == 9
    assert config.sources["max_num_seqs"] == "environment"
    assert config.dtype is None


def service_links(service: str) -> dict[str, str]:
    """What Kubernetes sets in each pod of the namespace for a Service with two ports."""
    links = {
        f"{service}_SERVICE_HOST": "10.0.0.7",
        f"{service}_SERVICE_PORT": "8000",
        f"{service}_PORT": "tcp://10.0.0.7:8000",
    }
    for name, port in (("HTTP", "8000"), ("KV_EVENTS", "5557")):
        links |= {f"{service}_SERVICE_PORT_{name}": port, f"{service}_PORT_{port}_TCP": f"tcp://10.0.0.7:{port}"}
        links |= {f"{service}_PORT_{port}_TCP_{each}": "10.0.0.7" for each in ("ADDR", "PORT", "PROTO")}
    return links


@pytest.mark.parametrize("service", ["DFLASH", "DFLASH_TRITON", "DFLASH_KV_TRANSFER", "DFLASH_PORT"])
def test_what_kubernetes_sets_for_a_service_is_no_setting(service: str) -> None:
    config = EngineConfig.load({}, service_links(service) | {"DFLASH_MAX_NUM_SEQS": "9"})
    assert (config.max_num_seqs, config.kv_transfer_port) == (9, 0)


def test_a_setting_with_the_name_of_a_service_link_and_a_misspelt_one_are_settings() -> None:
    links = service_links("DFLASH_KV_TRANSFER")
    assert environment_settings(links | {"DFLASH_KV_TRANSFER_PORT": "5700"}) == {"kv_transfer_port": "5700"}
    for name in ("DFLASH_KV_TRANSFERS_PORT", "DFLASH_SERVICE_HOST_", "DFLASH_TRITON_PORT_8000_TCP"):
        with pytest.raises(ConfigError, match="unknown setting"):
            EngineConfig.load({}, links | {name: "tcp://10.0.0.7:5700"})


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        ("kv_block_size", "16", 16),
        ("kv_block_size", 16.0, 16),
        ("gpu_memory_utilization", "0.5", 0.5),
        ("enable_prefix_caching", "False", False),
        ("enable_prefix_caching", True, True),
        ("num_speculative_tokens", " AUTO ", None),
        ("num_speculative_tokens", "0", 0),
        ("draft_model", "", ""),
        ("draft_model", "auto", None),
        ("rope_scaling", "", ""),
        ("rope_scaling", ' {"type": "yarn"} ', '{"type": "yarn"}'),
        ("rope_scaling", {"type": "yarn"}, '{"type": "yarn"}'),
        ("lora_modules", {"a": "b/c"}, '{"a": "b/c"}'),
    ],
)
def test_values_are_taken_as_text_or_as_python_values(name: str, value: Any, expected: Any) -> None:
    assert getattr(EngineConfig.from_values({name: value}), name) == expected


@pytest.mark.parametrize(
    ("name", "value", "allowed"),
    [
        ("kv_block_size", "0", "an integer from 1 to 1024"),
        ("kv_block_size", "sixteen", "an integer from 1 to 1024"),
        ("kv_block_size", 1.5, "an integer"),
        ("kv_block_size", True, "an integer"),
        ("gpu_memory_utilization", "0", "a number above 0 to 1"),
        ("gpu_memory_utilization", "nan", "a number above 0 to 1"),
        ("kv_cache_gb", "-1", "auto or a number above 0"),
        ("kv_cache_gb", "inf", "auto or a number above 0"),
        ("max_response_mb", "1e308", "a number above 0 to 1000000000"),
        ("max_step_time_ms", 1e308, "auto or a number above 0 to 1000000000"),
        ("max_server_memory_gb", "1e308", "a number from 0 to 1000000000"),
        ("max_queue_tokens", str(2**63), "an integer from 1 to 1000000000"),
        ("max_num_batched_tokens", 1_000_001, "an integer from 1 to 1000000"),
        ("seed", 2**63, "an integer from 0 to 9223372036854775807"),
        ("tenant_weights", "a=1e308", "a weight from 0.000001 to 1000000"),
        ("tenant_weights", "a=1e-308", "a weight from 0.000001 to 1000000"),
        ("tenant_weights", "a=nan", "a weight from 0.000001 to 1000000"),
        ("rope_scaling", "yarn", "a JSON object"),
        ("rope_scaling", "[4]", "a JSON object"),
        ("rope_scaling", 4.0, "a JSON object"),
        ("enable_overlap", "yes", "true or false"),
        ("device", "tpu", "auto or cpu or cuda"),
        ("draft_temperature_ratio", "2", "a number from 0 to 1"),
    ],
)
def test_a_bad_value_is_named_with_its_source_and_what_is_allowed(name: str, value: Any, allowed: str) -> None:
    with pytest.raises(ConfigError) as caught:
        EngineConfig.load({name: value}, {})
    message = str(caught.value)
    assert name in message
    assert repr(value) in message
    assert "config.pbtxt" in message
    assert allowed in message


NUMBERS = [setting for setting in SETTINGS if setting.kind in (int, float)]


@pytest.mark.parametrize("setting", NUMBERS, ids=lambda setting: setting.name)
def test_every_number_has_bounds_within_which_it_can_be_computed_with(setting: Setting) -> None:
    assert getattr(EngineConfig.from_values({setting.name: setting.high}), setting.name) == setting.high
    # Bytes of gigabytes, and four times as many tokens, as integers of 64 bits.
    assert setting.high * 1e9 < 2**63 or setting.name == "seed"
    for value in (1e308, "1e308", -1e308, 2**63, str(2**63), 10**30, str(setting.high + 1)):
        with pytest.raises(ConfigError, match=f"'{setting.name}' .* allowed: {re.escape(setting.allowed)}"):
            EngineConfig.from_values({setting.name: value})


def test_an_unknown_name_is_answered_with_the_nearest_valid_one() -> None:
    with pytest.raises(ConfigError, match="unknown setting 'kv_blok_size'.*did you mean 'kv_block_size'"):
        EngineConfig.load({"kv_blok_size": "16"}, {})
    with pytest.raises(ConfigError, match="unknown setting 'max_seqs' .environment"):
        EngineConfig.load({}, {"DFLASH_MAX_SEQS": "3"})


def test_a_bad_value_in_the_file_is_an_error_also_where_the_environment_overrides_it() -> None:
    with pytest.raises(ConfigError, match="config.pbtxt"):
        EngineConfig.load({"max_num_seqs": "many"}, {"DFLASH_MAX_NUM_SEQS": "3"})


def test_the_shipped_config_has_every_setting_with_its_default_and_a_comment() -> None:
    text = asset_path("model_repository", "dflash", "config.pbtxt").read_text(encoding="utf-8")
    _, begin, written = text.partition("# Settings with their defaults. Change the values here")
    assert begin
    assert written.partition("\n")[2] == config_parameters(SETTINGS) + "\n", "run `make docs`"
    found = re.findall(r'(?m)^# \S.*\nparameters { key: "(\w+)" value { string_value: "(.*)" } }$', written)
    assert EngineConfig.load(dict(found), {}) == EngineConfig()
    assert [name for name, _ in found] == [setting.name for setting in SETTINGS]


def test_parameters_of_triton_and_its_vllm_backend_are_no_settings() -> None:
    given = {
        "EXECUTION_ENV_PATH": "$$TRITON_MODEL_DIRECTORY/env.tar.gz",
        "FORCE_CPU_ONLY_INPUT_TENSORS": "no",
        "REPORT_CUSTOM_METRICS": "True",
        "ENABLE_VLLM_HEALTH_CHECK": "false",
        "max_num_seqs": "7",
    }
    config = EngineConfig.load(given, {})
    assert (config.max_num_seqs, config.report_custom_metrics) == (7, True)
    assert EngineConfig.load({"REPORT_CUSTOM_METRICS": "false"}, {}).report_custom_metrics is False
    assert EngineConfig.load({}, {}).report_custom_metrics is None
    assert config.as_strings().keys() == {setting.name for setting in SETTINGS}
    for name in ("REPORT_CUSTOM_METRICS", "ENABLE_VLLM_HEALTH_CHECK"):
        with pytest.raises(ConfigError, match=f"'{name}' has the value 'perhaps' .*; allowed: true or false"):
            EngineConfig.load({name: "perhaps"}, {})
    with pytest.raises(ConfigError, match="unknown setting 'EXECUTION_ENV'"):
        EngineConfig.load({"EXECUTION_ENV": "x"}, {})


def test_a_model_json_wins_over_the_file_and_the_environment_over_both() -> None:
    config = EngineConfig.load(
        {"target_model": "", "max_num_seqs": "4"},
        {"DFLASH_MAX_NUM_SEQS": "6"},
        model_json={"target_model": "Qwen/Qwen3-8B", "max_num_seqs": 5},
    )
    assert (config.target_model, config.max_num_seqs) == ("Qwen/Qwen3-8B", 6)
    assert config.sources["target_model"] == "model.json"


def test_the_docs_table_has_a_row_for_every_setting() -> None:
    table = settings_table(SETTINGS)
    assert all(f"| `{setting.name}` |" in table for setting in SETTINGS)
