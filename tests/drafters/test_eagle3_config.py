"""EAGLE-3 configs: what both formats' fields mean, and what is refused by name."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from dflash_backend.checkpoints import CheckpointError, read_target
from dflash_backend.config import EngineConfig
from dflash_backend.drafters.describe import draft_facts
from dflash_backend.drafters.eagle3.config import ARCHITECTURES, DEEPSPEC, DEFAULT_DRAFTS, MAX_DRAFTS, NORMS, Eagle3Spec
from dflash_backend.drafters.eagle3.drafter import Eagle3Drafter
from dflash_backend.drafters.pairing import check_pair
from dflash_backend.drafters.registry import is_drafter, read_draft
from dflash_backend.drafters.resolve import resolve_pair
from tests.drafters.drafts import DRAFT_VOCAB_SIZE, make_eagle3, put
from tests.support.tiny_models import VOCAB_SIZE, make_target, save_checkpoint

IDS = "eagle_aux_hidden_state_layer_ids"
OUTER = ("architectures", "draft_vocab_size", "target_hidden_size", IDS, "torch_dtype")
OUTER += ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output", "logit_scale", "is_causal")


def make_authors(directory: Path, **changes: Any) -> None:
    make_eagle3(directory, **changes)


def make_speculators(directory: Path, **changes: Any) -> None:
    """The same drafter as the speculators library nests its fields."""
    tensors = make_eagle3(directory, layer="layers.0.", **changes)
    config = json.loads((directory / "config.json").read_text())
    outer = {name: config.pop(name) for name in OUTER if name in config}
    outer |= {
        "architectures": ["Eagle3DraftModel"],
        "speculators_model_type": "eagle3",
        "transformer_layer_config": config,
        "speculators_config": {
            "algorithm": "eagle3",
            "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": 4}],
            "verifier": {"name_or_path": "../t", "architectures": []},
        },
    }
    save_checkpoint(directory, outer, tensors)


FORMATS: dict[str, Callable[..., None]] = {"authors": make_authors, "speculators": make_speculators}


def read(directory: Path) -> Eagle3Spec:
    spec = read_draft(directory)
    assert isinstance(spec, Eagle3Spec)
    return spec


@pytest.mark.parametrize("name", FORMATS)
def test_a_config_is_read(name: str, tmp_path: Path) -> None:
    FORMATS[name](tmp_path / "d", norm_before_residual=True, fc_norm=True)
    assert is_drafter(tmp_path / "d")
    spec = read(tmp_path / "d")
    assert spec.target_layer_ids == (0, 2, 3), "boundary ids 1, 3 and 4"
    assert (spec.norm_before_residual, spec.norm_before_fc, spec.fc_norm, spec.norm_output) == (
        True,
        False,
        True,
        False,
    )
    assert (spec.vocab_size, spec.draft_vocab_size) == (VOCAB_SIZE, DRAFT_VOCAB_SIZE)
    assert (spec.has_embedding, spec.has_lm_head) == (False, True)
    assert (spec.causal, spec.decoder.sliding_windows, spec.decoder.qk_norm) == ((True,), (None,), False)
    assert spec.num_speculative_tokens == {"authors": DEFAULT_DRAFTS, "speculators": 4}[name]
    assert spec.max_speculative_tokens == MAX_DRAFTS
    assert spec.notes == ()
    Eagle3Drafter.check_weights(spec)


@pytest.mark.parametrize("name", FORMATS)
def test_norms_that_no_tensor_tells_are_said_where_no_field_names_them(name: str, tmp_path: Path) -> None:
    FORMATS[name](tmp_path, norm_before_residual=None, norm_output=None)
    spec = read(tmp_path)
    assert (spec.norm_before_residual, spec.norm_output) == (False, False)
    vllm = {"authors": "", "speculators": " (vLLM reads a missing norm_before_residual as true)"}[name]
    assert [note.partition(";")[0] for note in spec.notes] == [
        f"missing in config.json and read as norm_before_residual = false, norm_output = false{vllm}"
    ]
    put(tmp_path / "config.json", norm_before_residual=True)
    spec = read(tmp_path)
    assert spec.norm_before_residual
    assert ["read as norm_output = false" in note for note in spec.notes] == [True]


def make_deepspec(directory: Path, **changes: Any) -> None:
    """As DeepSpec's `build_draft_config` makes a config of the target's, and its class the tensors."""
    own = {
        "architectures": [DEEPSPEC],
        IDS: None,
        "target_layer_ids": [0, 1, 3],
        "num_target_layers": 5,
        "ttt_length": 7,
        "step_loss_decay": 0.8,
        "draft_num_hidden_layers": 1,
        "layer_types": ["full_attention"],
        "target_model_name_or_path": "org/target",
    }
    sizes = {"layer": "layers.0.", "qwen3": True, "embedding": True, "draft_vocab_size": VOCAB_SIZE}
    make_eagle3(directory, **sizes, **(own | changes))


def test_a_drafter_of_deepspec_is_read(tmp_path: Path) -> None:
    make_deepspec(tmp_path)
    assert is_drafter(tmp_path)
    spec = read(tmp_path)
    assert (spec.format, spec.method, spec.notes) == ("deepspec", "eagle3", ())
    assert (spec.target_layer_ids, spec.num_target_layers, spec.target_name) == ((0, 1, 3), 5, "org/target")
    assert (spec.num_speculative_tokens, spec.draft_vocab_size) == (7, VOCAB_SIZE)
    assert not any(getattr(spec, name) for name in NORMS)
    assert (spec.decoder.qk_norm, spec.layer_prefix, spec.normed_last_layer) == (True, "layers.0.", False)
    Eagle3Drafter.check_weights(spec)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"target_layer_ids": None}, "'target_layer_ids' is missing; expected the layer ids of the target's layers"),
        ({"target_layer_ids": [0, 1, 5]}, r"'target_layer_ids' is \[0, 1, 5\]; expected layer ids below .* \(5\)"),
        ({"target_layer_ids": [3, 1, 0]}, r"'target_layer_ids' is \[3, 1, 0\]; expected ascending ids"),
        ({"num_target_layers": None}, "'num_target_layers' is missing"),
        ({"num_hidden_layers": 2, "layer_types": None}, "'num_hidden_layers' is 2; expected 1"),
        ({"norm_before_residual": True}, "'norm_before_residual' is True; expected no such field: .* Qwen3Eagle3Model"),
        ({"fc_norm": True}, "'fc_norm' is True; expected no such field"),
        ({"ttt_length": 0}, "'ttt_length' is 0"),
    ],
)
def test_what_deepspec_does_not_write_is_refused(fields: dict[str, Any], message: str, tmp_path: Path) -> None:
    make_deepspec(tmp_path)
    put(tmp_path / "config.json", **fields)
    with pytest.raises(CheckpointError, match=message):
        read_draft(tmp_path)


@pytest.mark.parametrize("architecture", [name for name in ARCHITECTURES if name != DEEPSPEC])
def test_every_name_of_the_model_is_known(architecture: str, tmp_path: Path) -> None:
    make_eagle3(tmp_path, architectures=[architecture])
    assert is_drafter(tmp_path)
    assert read(tmp_path).method == "eagle3"


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({IDS: [2, 3, 5]}, (1, 2, 4)),
        ({IDS: None, "eagle_config": {IDS: [1, 2, 4]}}, (1, 2, 4)),
        ({IDS: None, "eagle_config": {"layer_ids": [2, 3, 5]}}, (1, 2, 4)),
        ({IDS: None, "aux_hidden_state_layer_ids": [2, 3, 5]}, (1, 2, 4)),
        ({IDS: [], "eagle_config": {IDS: []}}, ()),
        ({IDS: None}, ()),
    ],
)
def test_layers_are_named_by_either_convention(
    fields: dict[str, Any], expected: tuple[int, ...], tmp_path: Path
) -> None:
    """vLLM's field has boundary ids; the nested one, which SGLang reads, layer ids."""
    make_eagle3(tmp_path)
    put(tmp_path / "config.json", **fields)
    spec = read(tmp_path)
    assert (spec.target_layer_ids, spec.num_features, spec.notes) == (expected, 3, ())


def test_layers_that_are_not_named_are_those_of_the_target_that_others_take(tmp_path: Path) -> None:
    make_target(tmp_path / "t", num_hidden_layers=9)
    make_eagle3(tmp_path / "d", **{IDS: None})
    settings = {"target_model": str(tmp_path / "t"), "draft_model": str(tmp_path / "d")}
    draft = resolve_pair(EngineConfig.from_values(settings)).draft_model
    assert draft is not None
    assert draft.target_layer_ids == (1, 3, 5), "boundary ids 2, 9 / 2 and 9 - 3"
    assert "by default" in dict(draft_facts(read(tmp_path / "d")))["features"]
    assert ["so the layer ids [1, 3, 5] are the method's default" in note for note in draft.notes] == [True]


def test_a_target_too_small_for_a_default_needs_its_layers_named(tmp_path: Path) -> None:
    make_target(tmp_path / "t")
    make_eagle3(tmp_path / "d", **{IDS: None})
    target = read_target(tmp_path / "t")
    with pytest.raises(CheckpointError, match=f"no default for a target of 5 layers; name them in {IDS}"):
        check_pair(target, read(tmp_path / "d").for_target(target))


def test_a_checkpoint_of_speculators_alone_finds_its_target(tmp_path: Path) -> None:
    make_target(tmp_path / "t")
    make_speculators(tmp_path / "d")
    pair = resolve_pair(EngineConfig.from_values({"draft_model": str(tmp_path / "d")}))
    assert pair.target.path == (tmp_path / "t").resolve()
    assert pair.num_speculative_tokens == 4


def test_more_drafts_than_passes_are_made_are_refused(tmp_path: Path) -> None:
    make_target(tmp_path / "t")
    make_eagle3(tmp_path / "d")
    settings = {"target_model": str(tmp_path / "t"), "draft_model": str(tmp_path / "d")}
    with pytest.raises(CheckpointError, match=r"num_speculative_tokens is 33; .* at most 32 tokens, each in a pass"):
        resolve_pair(EngineConfig.from_values(settings | {"num_speculative_tokens": 33}))


REFUSALS: list[tuple[dict[str, Any], str]] = [
    ({"num_hidden_layers": 2}, "'num_hidden_layers' is 2; expected 1"),
    ({"model_type": "deepseek_v3"}, "'model_type' is 'deepseek_v3'; expected one of llama, qwen3"),
    ({"norm_before_fc": True, "fc_norm": True}, "'fc_norm' is True; expected false, as norm_before_fc is true"),
    ({"norm_output": "yes"}, "'norm_output' is 'yes'; expected true or false"),
    ({IDS: [3, 1, 4]}, rf"'{IDS}' is \[3, 1, 4\]; expected ascending ids"),
    ({IDS: [1, 3, 3]}, rf"'{IDS}' is \[1, 3, 3\]; expected ascending ids"),
    ({IDS: [0, 3, 4]}, rf"'{IDS}' is \[0, 3, 4\]"),
    ({"eagle_config": {"use_aux_hidden_state": False}}, "eagle_config: field 'use_aux_hidden_state' is False"),
    ({"eagle_config": {"use_input_layernorm_in_first_layer": False}}, "without its input norm is not supported"),
    ({"eagle_config": {"use_last_layernorm": False}}, "without a final norm is not supported"),
    ({"eagle_config": {"use_mtp_layernorm": True}}, "norms of MTP are not part of EAGLE-3"),
    ({"eagle_config": {"next_layer_regular": False}}, "second layer that reads the embeddings"),
    ({"eagle_config": {"parallel_draft_step": 4}}, "'parallel_draft_step' is 4; expected 1: .* as P-EAGLE does"),
    ({"parallel_drafting": True}, "'parallel_drafting' is True; expected false: .* as P-EAGLE does"),
    ({"is_causal": False}, "'is_causal' is False; expected true: a drafter that drafts token by token is causal"),
    ({"has_lm_head": False}, "'has_lm_head' is False; expected what the weights beside it have"),
    ({"rope_scaling": {"rope_type": "mrope"}}, "mrope"),
    ({"quantization_config": {"quant_method": "gguf"}}, "quantised weights are not supported"),
    ({"attention_sink_bias": True}, "attention sinks are not supported"),
    ({"hidden_act": "gelu"}, "'hidden_act' is 'gelu'"),
]


@pytest.mark.parametrize(("fields", "message"), REFUSALS)
def test_what_would_be_misread_is_refused_by_field(fields: dict[str, Any], message: str, tmp_path: Path) -> None:
    make_eagle3(tmp_path)
    put(tmp_path / "config.json", **fields)
    with pytest.raises(CheckpointError, match=message):
        read_draft(tmp_path)


def test_a_drafter_is_never_made_to_see_what_follows(tmp_path: Path) -> None:
    make_eagle3(tmp_path)
    with pytest.raises(CheckpointError, match="is causal; leave the setting causal at auto"):
        read_draft(tmp_path, causal=False)
    assert read_draft(tmp_path, causal=True).causal == (True,)


def test_a_scale_that_the_library_does_not_know_is_refused(tmp_path: Path) -> None:
    make_speculators(tmp_path, logit_scale=0.5)
    with pytest.raises(CheckpointError, match="'logit_scale' is 0.5; .*not part of the library's EAGLE-3"):
        read_draft(tmp_path)


def test_what_is_not_known_is_said(tmp_path: Path) -> None:
    make_eagle3(tmp_path, eagle_config={"num_eagle_features": 3})
    assert read(tmp_path).notes == (
        "not known here and not read: eagle_config.num_eagle_features = 3; drafts are worse if one changes the "
        "arithmetic",
    )


@pytest.mark.parametrize(
    ("draft", "removed"),
    [
        ({}, "midlayer.hidden_norm.weight"),
        ({}, "fc.weight"),
        ({"norm_before_fc": True}, "input_norm.weight"),
        ({"fc_norm": True}, "fc_norm.2.weight"),
        ({}, "d2t"),
    ],
)
def test_a_tensor_that_its_config_asks_for_is_missed_by_name(
    draft: dict[str, Any], removed: str, tmp_path: Path
) -> None:
    tensors = make_eagle3(tmp_path, **draft)
    config = json.loads((tmp_path / "config.json").read_text())
    save_checkpoint(tmp_path, config, {name: tensor for name, tensor in tensors.items() if name != removed})
    with pytest.raises(CheckpointError, match=f"tensor '{removed}' is missing"):
        Eagle3Drafter.check_weights(read(tmp_path))


@pytest.mark.parametrize(
    "name", ["fc_norm.0.weight", "input_norm.weight", "mask_hidden", "layers.1.input_layernorm.weight"]
)
def test_a_tensor_that_its_config_does_not_ask_for_is_refused(name: str, tmp_path: Path) -> None:
    tensors = make_eagle3(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    save_checkpoint(tmp_path, config, tensors | {name: torch.zeros(32)})
    with pytest.raises(CheckpointError, match=f"tensor '{name}' of shape .* is not part of this model"):
        Eagle3Drafter.check_weights(read(tmp_path))


@pytest.mark.parametrize("layer", ["midlayer.", "layers.0."])
def test_heads_that_the_weights_do_not_have_are_noticed(layer: str, tmp_path: Path) -> None:
    make_eagle3(tmp_path, layer=layer)
    put(tmp_path / "config.json", num_attention_heads=8)
    with pytest.raises(
        CheckpointError, match=rf"'{layer}self_attn.q_proj.weight' has shape \[64, 64\]; the heads .* 128"
    ):
        read_draft(tmp_path)


def test_what_is_particular_to_the_method_is_said(tmp_path: Path) -> None:
    make_eagle3(tmp_path / "a")
    make_eagle3(tmp_path / "b", norm_before_residual=True, fc_norm=True, logit_scale=0.5)
    plain, other = dict(read(tmp_path / "a").facts()), dict(read(tmp_path / "b").facts())
    assert plain["drafting"] == "a token in each pass, from the output of the pass before"
    assert plain["variant"] == "none of norm_before_residual, norm_before_fc, fc_norm, norm_output"
    assert (other["variant"], other["logits"]) == ("norm_before_residual, fc_norm", "times 0.5")
