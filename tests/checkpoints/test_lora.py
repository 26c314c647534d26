"""What of an adapter is read, and which adapters are refused, with a sentence that names adapter, file and field."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from dflash_backend.checkpoints import CheckpointError, read_target
from dflash_backend.checkpoints.lora import LoraAdapters, adapter_digest
from dflash_backend.config import ConfigError, EngineConfig
from dflash_backend.models import load_target
from tests.support.lora_adapter import Adapter, make_adapter
from tests.support.tiny_models import make_target

CPU = torch.device("cpu")
Q = "model.layers.0.self_attn.q_proj"
A, B = (f"base_model.model.{Q}.lora_{side}.weight" for side in "AB")


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A target of two layers as `transformers` has it, and its folder."""
    folder = tmp_path_factory.mktemp("target")
    return make_target(folder, num_hidden_layers=2), folder


@pytest.fixture
def adapter(target: Any, tmp_path: Path) -> Adapter:
    return make_adapter(tmp_path / "a", target[0], projections=("q_proj", "down_proj"))


def load(target: Any, adapter: Adapter) -> None:
    adapters = LoraAdapters({"mine": adapter.directory})
    load_target(read_target(target[1]), 64, torch.float32, CPU, adapters=adapters)


def change_config(adapter: Adapter, **fields: Any) -> None:
    path = adapter.directory / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))


def change_tensors(adapter: Adapter, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
    path = adapter.directory / "adapter_model.safetensors"
    tensors = load_file(path)
    change(tensors)
    path.unlink()
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, path)


def renamed(old: str, new: str) -> Callable[[dict[str, torch.Tensor]], object]:
    """Every tensor with `old` in its name gets `new` there."""

    def rename(tensors: dict[str, torch.Tensor]) -> None:
        for name in [name for name in tensors if old in name]:
            tensors[name.replace(old, new)] = tensors.pop(name)

    return rename


@pytest.mark.parametrize(
    ("fields", "down", "scale"),
    [
        ({"r": 4, "lora_alpha": 8}, 4, 2.0),
        ({"r": 4, "lora_alpha": 8, "use_rslora": True}, 4, 4.0),
        ({"r": 4, "lora_alpha": 8, "rank_pattern": {"q_proj": 2}}, 2, 4.0),
        ({"r": 4, "lora_alpha": 8, "alpha_pattern": {r"layers.0.self_attn.q_proj": 1.5}}, 4, 0.375),
        ({"r": 4, "lora_alpha": 8, "alpha_pattern": {"layers.1.self_attn.q_proj": 1.5, "v_proj": 3}}, 4, 2.0),
    ],
)
def test_an_adapters_scale_is_that_of_its_config(
    target: Any, tmp_path: Path, fields: dict[str, Any], down: int, scale: float
) -> None:
    made = make_adapter(tmp_path / "a", target[0], fields.pop("r"), ("q_proj",), **fields)
    (part,) = LoraAdapters({"a": made.directory}).parts(Q, 64, 32)
    assert (part.adapter, part.down.shape[0]) == (1, down)
    wanted_down, wanted_up, wanted_scale = made.halves[Q]
    assert wanted_scale == scale
    assert torch.equal(part.down, wanted_down)
    assert torch.allclose(part.up, wanted_up * scale)


@pytest.mark.parametrize("before", ["", "model.", "language_model.model.", "model.language_model."])
def test_the_layers_are_found_whatever_class_an_adapter_was_trained_with(
    target: Any, adapter: Adapter, before: str
) -> None:
    change_tensors(adapter, renamed("base_model.model.model.", f"base_model.model.{before}"))
    load(target, adapter)


def test_a_name_of_the_adapter_in_its_tensors_is_no_part_of_them(target: Any, adapter: Adapter) -> None:
    change_tensors(adapter, renamed(".weight", ".default.weight"))
    load(target, adapter)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"peft_type": "LOHA"}, "field 'peft_type' is 'LOHA'; expected \"LORA\""),
        ({"use_dora": True}, "'use_dora' is True, which is not supported: DoRA scales the target's own weights; merge"),
        (
            {"modules_to_save": ["lm_head"]},
            "'modules_to_save' is [\"lm_head\"], which is not supported: it has weights",
        ),
        ({"trainable_token_indices": [1]}, "it has embeddings of its own"),
        ({"target_parameters": ["experts.gate_up_proj"]}, "it adds to parameters that are no projection"),
        ({"fan_in_fan_out": True}, "its weights are transposed"),
        ({"bias": "all"}, "field 'bias' is 'all'; expected \"none\""),
        ({"lora_bias": True}, "its products have biases"),
        ({"init_lora_weights": "pissa_niter_4"}, "which changes the target's weights as well; convert it"),
        ({"a_new_kind_of_lora": {"x": 1}}, "field 'a_new_kind_of_lora' is {\"x\": 1}, which is not known here"),
        ({"r": 0}, "field 'r' is 0; expected an integer from 1"),
        ({"lora_alpha": None}, "field 'lora_alpha' is missing"),
        ({"r": 5}, "have another rank than the 5 that adapter_config.json says"),
        ({"rank_pattern": {"(": 4}}, "'(' is no regular expression"),
    ],
)
def test_a_config_that_means_something_else_is_refused(
    target: Any, adapter: Adapter, fields: dict[str, Any], message: str
) -> None:
    change_config(adapter, **fields)
    with pytest.raises(CheckpointError, match=re.escape(message)):
        load(target, adapter)


def test_fields_that_change_nothing_are_let_pass(target: Any, adapter: Adapter) -> None:
    change_config(adapter, peft_version="9.9", layers_to_transform=[0, 1], some_new_switch=False, exclude_modules="x")
    load(target, adapter)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (renamed("lora_A", "lora_magnitude_vector"), "is not supported; expected lora_A and lora_B of projections"),
        (renamed("self_attn.q_proj", "self_attn.qkv_proj"), "adds to qkv_proj; an adapter may add to q_proj, k_proj"),
        (renamed("model.layers.0.self_attn.q_proj", "lm_head"), "is not supported; expected lora_A and lora_B of"),
        (renamed("model.model.", "model.visual.model."), "is not supported; expected lora_A and lora_B of"),
        (
            renamed("layers.0.", "layers.7."),
            "and 1 more of the LoRA adapter 'mine' is for no projection of this target",
        ),
        (renamed("mlp.down_proj", "mlp.experts.3.down_proj"), "is for no projection of this target that an adapter"),
        (lambda tensors: tensors.pop(A), "is there without its other half, lora_A or lora_B"),
        (
            lambda tensors: tensors.update({A: torch.zeros(3, 31)}),
            "has the shape [3, 31]; the target's projection has 32",
        ),
        (
            lambda tensors: tensors.update({B: torch.zeros(65, 3)}),
            "has the shape [65, 3]; the target's projection has 64",
        ),
        (lambda tensors: tensors.update({A: torch.zeros(3, 32, 1)}), "is F32 [3, 32, 1]; expected a matrix of one of"),
        (lambda tensors: tensors.update({A: torch.zeros(3, 32, dtype=torch.int8)}), "is I8 [3, 32]; expected a matrix"),
        (lambda tensors: tensors[A].fill_(float("nan")), "has values that are no finite numbers"),
        (
            lambda tensors: tensors.update({A.replace(".weight", ".x.weight"): tensors[A].clone()}),
            "is there a second time, as",
        ),
        (lambda tensors: tensors.clear(), "has no tensors; the LoRA adapter 'mine' would add nothing"),
    ],
)
def test_tensors_that_do_not_belong_to_the_target_are_refused(
    target: Any, adapter: Adapter, change: Callable[[dict[str, torch.Tensor]], object], message: str
) -> None:
    change_tensors(adapter, change)
    with pytest.raises(CheckpointError, match=re.escape(message)):
        load(target, adapter)


def test_files_that_are_missing_or_would_run_code_are_named(target: Any, adapter: Adapter) -> None:
    weights = adapter.directory / "adapter_model.safetensors"
    weights.rename(adapter.directory / "adapter_model.bin")
    with pytest.raises(CheckpointError, match=r"it has adapter_model.bin, which would run code as it is read"):
        load(target, adapter)
    (adapter.directory / "adapter_model.bin").rename(weights)
    weights.write_bytes(b"no tensors")
    with pytest.raises(CheckpointError, match="cannot be read as safetensors"):
        load(target, adapter)
    (adapter.directory / "adapter_config.json").unlink()
    with pytest.raises(CheckpointError, match=r"adapter_config.json does not exist"):
        load(target, adapter)


def test_a_digest_differs_wherever_an_adapter_does(target: Any, tmp_path: Path) -> None:
    one, same, other = (
        make_adapter(tmp_path / name, target[0], seed=seed) for name, seed in (("a", 1), ("b", 1), ("c", 2))
    )
    assert adapter_digest(one.directory) == adapter_digest(same.directory) != adapter_digest(other.directory)
    change_config(same, lora_alpha=7)
    assert adapter_digest(one.directory) != adapter_digest(same.directory)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("a=b", "a JSON object"),
        ('{"": "x"}', "an adapter's name is printable text of 1 to 256 characters"),
        ({"a\n": "x"}, "an adapter's name is printable text"),
        ({"a": ""}, "the adapter 'a' has no folder"),
        ({"a": 3}, "the adapter 'a' has no folder"),
    ],
)
def test_bad_settings_say_what_an_adapter_is(value: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        EngineConfig.from_values({"lora_modules": value})
