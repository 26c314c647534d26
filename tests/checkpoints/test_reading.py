"""Checkpoints are read as written, defaults are the method's, and what is wrong is said with file, field and value."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from dflash_backend.checkpoints import CheckpointError
from dflash_backend.config import EngineConfig
from dflash_backend.drafters.resolve import resolve_pair
from dflash_backend.engine.build import LOAD_ERRORS, build_engine
from tests.drafters.drafts import put
from tests.support.tiny_models import MASK_TOKEN_ID, make_pair


@pytest.fixture
def pair(tmp_path: Path) -> Path:
    """A folder with a target `t` and a drafter `d`."""
    make_pair(tmp_path)
    return tmp_path


def config(pair: Path, **settings: Any) -> EngineConfig:
    values = {"target_model": str(pair / "t"), "draft_model": str(pair / "d")} | settings
    return EngineConfig.from_values(values)


def test_a_pair_is_read_with_k_from_the_block_size(pair: Path) -> None:
    read = resolve_pair(config(pair))
    assert read.draft is not None
    assert read.num_speculative_tokens == 7
    assert read.draft.target_layer_ids == (1, 3)
    assert read.draft.mask_token_id == MASK_TOKEN_ID
    assert read.draft.causal == (False, False)
    assert read.target.eos_token_ids == (0,)


def test_an_empty_draft_model_is_no_speculation_and_an_unset_one_warns(pair: Path) -> None:
    assert resolve_pair(config(pair, draft_model="")).draft is None
    unset = resolve_pair(config(pair, draft_model="auto"))
    assert unset.draft is None
    assert unset.warning is not None


def field(model: str, name: str, value: Any) -> Callable[[Path], None]:
    return lambda pair: put(pair / model / "config.json", **{name: value})


def truncate(pair: Path) -> None:
    file = pair / "t" / "model.safetensors"
    file.write_bytes(file.read_bytes()[:5000])


def garbage(pair: Path) -> None:
    (pair / "d" / "model.safetensors").write_bytes(b"not a model")


def change_tensors(change: Callable[[dict[str, torch.Tensor]], object]) -> Callable[[Path], None]:
    def apply(pair: Path) -> None:
        tensors = load_file(pair / "d" / "model.safetensors")
        change(tensors)
        save_file(tensors, pair / "d" / "model.safetensors")

    return apply


BROKEN: dict[str, tuple[Callable[[Path], None], str]] = {
    "no target config": (lambda pair: (pair / "t" / "config.json").unlink(), r"config\.json does not exist"),
    "no json": (lambda pair: (pair / "t" / "config.json").write_text("{"), r"config\.json is not valid JSON"),
    "json list": (lambda pair: (pair / "t" / "config.json").write_text("[]"), "expected a JSON object"),
    "text for a size": (field("t", "hidden_size", "32"), "'hidden_size' is '32'; expected an integer"),
    "heads that do not divide": (field("t", "num_key_value_heads", 3), "'num_key_value_heads' is 3.*divisor"),
    "no mask token": (field("d", "dflash_config", {}), "dflash_config: field 'mask_token_id' is missing"),
    "no dflash_config": (field("d", "dflash_config", None), "dflash_config: field 'mask_token_id' is missing"),
    "dflash_config of another type": (field("d", "dflash_config", [1]), "'dflash_config' is .*expected an object"),
    "layers of another target": (field("d", "num_target_layers", 9), "made for 9 target layers.*has 5"),
    "layer id too high": (
        field("d", "dflash_config", {"mask_token_id": 1, "target_layer_ids": [1, 5]}),
        "'target_layer_ids' is .*layer ids below num_target_layers",
    ),
    "boundary id too high": (
        field("d", "eagle_aux_hidden_state_layer_ids", [2, 6]),
        "'eagle_aux_hidden_state_layer_ids' is .*boundary ids up to num_target_layers",
    ),
    "no drafter": (field("d", "architectures", ["Qwen3ForCausalLM"]), "its authors' format has 'DFlashDraftModel'"),
    "a window of no size": (field("d", "layer_types", ["sliding_attention"] * 2), "'sliding_window' is missing"),
    "truncated weights": (truncate, r"model\.safetensors cannot be read as safetensors"),
    "garbage weights": (garbage, r"model\.safetensors cannot be read as safetensors"),
    "no weights": (lambda pair: (pair / "d" / "model.safetensors").unlink(), "has no .safetensors file"),
    "missing tensor": (change_tensors(lambda t: t.pop("fc.weight")), "tensor 'fc.weight' is missing"),
    "strange tensor": (change_tensors(lambda t: t.update(x=torch.zeros(2))), "tensor 'x' of shape .* not part"),
    "wrong shape": (
        change_tensors(lambda t: t.update({"fc.weight": t["fc.weight"][:, :-1].contiguous()})),
        r"'fc.weight' has shape \[32, 63\]; config.json asks for \[32, 64\]",
    ),
    "wrong dtype": (
        change_tensors(lambda t: t.update({"norm.weight": t["norm.weight"].int()})),
        "'norm.weight' is I32",
    ),
}


@pytest.mark.parametrize("case", BROKEN)
def test_what_is_wrong_with_a_checkpoint_is_said_in_a_sentence(pair: Path, case: str) -> None:
    break_it, expected = BROKEN[case]
    break_it(pair)
    with pytest.raises(LOAD_ERRORS) as caught:
        build_engine(config(pair))
    assert re.search(expected, str(caught.value), re.DOTALL), caught.value
    assert str(pair) in str(caught.value), "the message must say where"


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"target_model": "/no/such/model"}, "target_model is '/no/such/model', but there is no such directory"),
        ({"draft_model": "./nowhere"}, "draft_model is './nowhere'"),
        ({"num_speculative_tokens": 8}, "num_speculative_tokens is 8.*blocks of 8, so at most 7"),
        ({"draft_model": "", "num_speculative_tokens": 3}, "num_speculative_tokens is 3 but there is no drafter"),
        ({"max_model_len": 1024}, "'max_model_len' is 1024.*at most 512"),
        ({"kv_cache_gb": 1e-6}, "no room for a single block"),
        ({"max_num_batched_tokens": 4}, "max_num_batched_tokens"),
        ({"attention_backend": "flash_attn"}, "'flash_attn' is not available"),
    ],
)
def test_settings_that_do_not_fit_the_models_are_said_in_a_sentence(
    pair: Path, settings: dict[str, Any], expected: str
) -> None:
    with pytest.raises(LOAD_ERRORS, match=expected):
        build_engine(config(pair, **settings))


def test_a_file_in_place_of_a_directory_is_named(pair: Path) -> None:
    with pytest.raises(CheckpointError, match="is a file; expected a model directory"):
        build_engine(config(pair, target_model=str(pair / "t" / "config.json")))
