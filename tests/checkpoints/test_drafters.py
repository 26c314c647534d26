"""Drafters of both formats are read as their authors meant them, and other methods are refused by name."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from dflash_backend.checkpoints import CheckpointError, RopeSpec, read_draft
from dflash_backend.checkpoints.spec import LogitsSpec
from tests.checkpoints.drafts import DRAFT_VOCAB_SIZE, edit, make_speculators, put
from tests.tiny_models import MASK_TOKEN_ID, VOCAB_SIZE, make_draft

SLIDING, FULL = "sliding_attention", "full_attention"
FORMATS = ("z-lab", "speculators")


@pytest.fixture(params=FORMATS)
def any_format(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """A drafter of either format."""
    make_draft(tmp_path) if request.param == "z-lab" else make_speculators(tmp_path)
    return tmp_path


@pytest.fixture
def zlab(tmp_path: Path) -> Path:
    make_draft(tmp_path)
    return tmp_path


@pytest.fixture
def speculators(tmp_path: Path) -> Path:
    make_speculators(tmp_path)
    return tmp_path


def set_dflash(directory: Path, **fields: Any) -> None:
    """Set fields of `dflash_config`."""
    edit(directory / "config.json", lambda data: data.setdefault("dflash_config", {}).update(fields))


def set_layer(directory: Path, **fields: Any) -> None:
    """Set fields of the decoder's own config, wherever the format has them."""
    edit(directory / "config.json", lambda data: data.get("transformer_layer_config", data).update(fields))


def test_a_zlab_drafter_is_read(zlab: Path) -> None:
    draft = read_draft(zlab)
    assert (draft.format, draft.block_size, draft.num_speculative_tokens) == ("z-lab", 8, 7)
    assert (draft.mask_token_id, draft.vocab_size, draft.draft_vocab_size) == (MASK_TOKEN_ID, VOCAB_SIZE, VOCAB_SIZE)
    assert (draft.num_target_layers, draft.target_hidden_size, draft.target_name) == (5, 32, None)
    assert (draft.has_embedding, draft.has_lm_head, draft.has_mask_embedding) == (False, False, False)
    assert not draft.maps_vocabulary


def test_a_speculators_drafter_is_read(speculators: Path) -> None:
    put(speculators / "config.json", target_hidden_size=48)
    draft = read_draft(speculators)
    assert (draft.format, draft.block_size, draft.num_speculative_tokens) == ("speculators", 8, 5)
    assert (draft.vocab_size, draft.draft_vocab_size) == (VOCAB_SIZE, DRAFT_VOCAB_SIZE)
    assert draft.maps_vocabulary
    assert draft.has_lm_head
    assert not draft.has_embedding
    assert draft.target_hidden_size == 48


def test_the_layers_own_config_class_gives_its_defaults(speculators: Path) -> None:
    set_layer(speculators, head_dim=None, hidden_size=64, max_position_embeddings=None)
    assert read_draft(speculators).decoder.max_len == 32768
    set_layer(speculators, model_type="llama")
    decoder = read_draft(speculators).decoder
    assert (decoder.head_dim, decoder.max_len) == (16, 2048)


@pytest.mark.parametrize("absent", ["missing", "null"])
def test_target_layer_ids_that_are_absent_take_the_default(zlab: Path, absent: str) -> None:
    set_dflash(zlab, target_layer_ids=None)
    if absent == "missing":
        edit(zlab / "config.json", lambda data: data["dflash_config"].pop("target_layer_ids"))
    assert read_draft(zlab).target_layer_ids == (1, 2)


def test_the_block_size_may_lie_in_dflash_config(zlab: Path) -> None:
    edit(zlab / "config.json", lambda data: data.pop("block_size"))
    set_dflash(zlab, block_size=4)
    assert read_draft(zlab).block_size == 4


def test_a_block_size_that_no_field_gives_is_the_authors_default_and_said(zlab: Path) -> None:
    edit(zlab / "config.json", lambda data: data.pop("block_size"))
    draft = read_draft(zlab)
    assert (draft.block_size, draft.notes) == (16, ("no field gives block_size; 16 is the authors' default",))


def test_boundary_ids_may_have_the_older_name(speculators: Path) -> None:
    edit(
        speculators / "config.json",
        lambda data: data.update(eagle_aux_hidden_state_layer_ids=data.pop("aux_hidden_state_layer_ids")),
    )
    assert read_draft(speculators).target_layer_ids == (1, 3)


def test_a_draft_vocabulary_that_is_not_named_is_the_targets(speculators: Path) -> None:
    put(speculators / "config.json", draft_vocab_size=None)
    assert read_draft(speculators).draft_vocab_size == VOCAB_SIZE


def test_a_speculators_drafter_without_speculators_config_drafts_the_whole_block(speculators: Path) -> None:
    put(speculators / "config.json", speculators_config=None)
    draft = read_draft(speculators)
    assert (draft.num_speculative_tokens, draft.target_name) == (7, None)


def test_a_mask_embedding_beside_the_weights_is_noticed(any_format: Path) -> None:
    (any_format / "mask_embedding.pt").write_bytes(b"")
    assert read_draft(any_format).has_mask_embedding


def test_speculators_decides_over_the_architecture(tmp_path: Path) -> None:
    make_speculators(tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["architectures"] == ["DFlashDraftModel"]
    assert read_draft(tmp_path).format == "speculators"


def test_a_drafter_takes_the_sliding_entry_of_nested_rotary_parameters(any_format: Path) -> None:
    nested = {SLIDING: {"rope_theta": 7.0}, FULL: {"rope_theta": 9.0}}
    set_layer(any_format, rope_parameters=nested)
    assert read_draft(any_format).decoder.rope == RopeSpec(theta=7.0)


# Precedence: the server's setting, is_causal, dflash_config.causal, sliding layers, not causal.
@pytest.mark.parametrize(
    ("setting", "is_causal", "causal", "expected"),
    [
        (None, None, None, (True, False)),
        (None, None, False, (False, False)),
        (None, None, True, (True, True)),
        (None, False, True, (False, False)),
        (None, True, False, (True, True)),
        (None, True, None, (True, True)),
        (False, True, True, (False, False)),
        (True, False, False, (True, True)),
        (True, None, None, (True, True)),
    ],
)
def test_the_first_rule_of_causality_that_is_present_decides(
    any_format: Path, setting: bool | None, is_causal: bool | None, causal: bool | None, expected: tuple[bool, bool]
) -> None:
    set_layer(any_format, layer_types=[SLIDING, FULL], sliding_window=8)
    put(any_format / "config.json", is_causal=is_causal)
    set_dflash(any_format, causal=causal)
    assert read_draft(any_format, setting).causal == expected


def test_full_layers_are_not_causal_by_themselves(any_format: Path) -> None:
    assert read_draft(any_format).causal == (False, False)


def test_speculators_may_say_that_sliding_layers_are_not_causal(speculators: Path) -> None:
    set_layer(speculators, layer_types=[SLIDING, FULL], sliding_window=8)
    put(speculators / "config.json", sliding_window_non_causal=True)
    draft = read_draft(speculators)
    assert draft.causal == (False, False)
    assert draft.decoder.sliding_windows == (8, None)


@pytest.mark.parametrize(
    ("layer", "dflash", "windows", "causal"),
    [
        ({"layer_types": [FULL, SLIDING], "sliding_window": 8}, {}, (None, 8), (False, True)),
        ({"layer_types": [FULL, SLIDING], "sliding_window": 8}, {"swa_window_size": 6}, (None, 6), (False, True)),
        ({"sliding_window": 8}, {"use_swa": True}, (8, 8), (False, False)),
        ({}, {"use_swa": True, "swa_window_size": 6}, (6, 6), (False, False)),
        ({"layer_types": [FULL, FULL]}, {"use_swa": True, "swa_window_size": 6}, (6, 6), (False, False)),
        ({"layer_types": [FULL, SLIDING]}, {"use_swa": True, "swa_window_size": 6}, (None, 6), (False, True)),
        ({"sliding_window": 8}, {"swa_window_size": 6}, (None, None), (False, False)),
        ({"sliding_window": 8, "use_sliding_window": False}, {}, (None, None), (False, False)),
        # Qwen3's config class makes layer types of these two, so that all references see a sliding layer, causal.
        ({"sliding_window": 8, "use_sliding_window": True, "max_window_layers": 1}, {}, (None, 8), (False, True)),
        ({"use_sliding_window": True, "max_window_layers": 1}, {}, (None, 4096), (False, True)),
        ({"use_sliding_window": True, "max_window_layers": 1}, {"swa_window_size": 6}, (None, 6), (False, True)),
    ],
)
def test_windows_are_found_in_every_place(
    any_format: Path, layer: dict[str, Any], dflash: dict[str, Any], windows: Any, causal: Any
) -> None:
    set_layer(any_format, **layer)
    set_dflash(any_format, **dflash)
    draft = read_draft(any_format)
    assert draft.decoder.sliding_windows == windows
    assert draft.causal == causal


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"aux_hidden_state_layer_ids": None}, "'aux_hidden_state_layer_ids' is missing"),
        ({"aux_hidden_state_layer_ids": [0, 3]}, r"'aux_hidden_state_layer_ids' is \[0, 3\]; expected .* at least 1"),
        ({"aux_hidden_state_layer_ids": []}, r"'aux_hidden_state_layer_ids' is \[\]"),
        ({"mask_token_id": None}, "'mask_token_id' is missing"),
        ({"sample_from_anchor": True}, "'sample_from_anchor' is True; expected false"),
        ({"projector_type": "domino"}, "'projector_type' is 'domino'; expected 'dflash'"),
        ({"shift_label": True}, "shifted by one position"),
        ({"speculators_model_type": "eagle3"}, "'speculators_model_type' is 'eagle3'; expected 'dflash'"),
        ({"speculators_model_type": "dspark"}, "'speculators_model_type' is 'dspark'"),
        ({"speculators_model_type": "dflash2"}, "'speculators_model_type' is 'dflash2'"),
        ({"transformer_layer_config": None}, "'transformer_layer_config' is missing"),
        ({"block_size": 1}, "'block_size' is 1; expected an integer from 2"),
    ],
)
def test_what_a_speculators_drafter_must_say_is_named(speculators: Path, fields: Any, expected: str) -> None:
    put(speculators / "config.json", **fields)
    with pytest.raises(CheckpointError, match=expected) as caught:
        read_draft(speculators)
    assert str(speculators / "config.json") in str(caught.value)


@pytest.mark.parametrize(
    ("field", "value", "expected"),
    [
        ("attention_sink_bias", True, "attention sinks are not supported"),
        ("logits_soft_cap", 30.0, "soft-capping of logits"),
        ("attention_value_scale", 0.707, "scale of the values"),
        ("use_aux_hidden_state", False, "last hidden state alone is not supported"),
        ("is_neox_style", False, "interleaved rotary embedding"),
        ("sample_from_anchor", True, "does not sample from the anchor"),
        ("projector_type", "domino", "other projectors are not supported"),
        ("selector_rank", 256, "candidate selector of DFlash2"),
        ("fc_norm", True, "as EAGLE-3 has it"),
        ("markov_rank", 64, "Markov head of DSpark"),
        ("enable_confidence_head", True, "confidence head of DSpark"),
        ("conv_kernel_size", 2, "convolutions of DFlash2"),
    ],
)
@pytest.mark.parametrize("place", [set_dflash, set_layer, lambda path, **f: put(path / "config.json", **f)])
def test_fields_that_change_the_arithmetic_are_refused(
    any_format: Path, place: Any, field: str, value: Any, expected: str
) -> None:
    place(any_format, **{field: value})
    with pytest.raises(CheckpointError, match=f"'{field}' is .*{expected}"):
        read_draft(any_format)


def by_top_level(directory: Path, **fields: Any) -> None:
    put(directory / "config.json", **fields)


@pytest.mark.parametrize("place", [set_dflash, by_top_level])
def test_scales_are_read_in_both_places(any_format: Path, place: Any) -> None:
    plain = read_draft(any_format)
    assert (plain.input_embedding_scale, plain.logits) == (1.0, LogitsSpec(1.0, None, 1.0))
    place(any_format, input_embedding_scale=2, output_multiplier=0.5, final_logit_softcapping=30.0, logit_scale=0.25)
    draft = read_draft(any_format)
    assert (draft.input_embedding_scale, draft.logits) == (2.0, LogitsSpec(0.5, 30.0, 0.25))
    assert draft.notes == ()


def test_dflash_config_decides_over_the_top_level(zlab: Path) -> None:
    fields = {"input_embedding_scale": 3.0, "output_multiplier": 3.0, "final_logit_softcapping": 3.0}
    put(zlab / "config.json", **fields, mask_token_id=5)
    set_dflash(zlab, input_embedding_scale=1.0, output_multiplier=2.0, final_logit_softcapping=0)
    draft = read_draft(zlab)
    assert (draft.input_embedding_scale, draft.logits) == (1.0, LogitsSpec(2.0, None, 1.0))
    assert draft.mask_token_id == MASK_TOKEN_ID


@pytest.mark.parametrize(
    "field", ["input_embedding_scale", "output_multiplier", "final_logit_softcapping", "logit_scale"]
)
@pytest.mark.parametrize("value", [-1.0, "2", True, float("inf")])
def test_a_scale_must_be_a_number_above_zero(any_format: Path, field: str, value: Any) -> None:
    set_dflash(any_format, **{field: value})
    with pytest.raises(CheckpointError, match=f"'{field}' is .*; expected a number above 0"):
        read_draft(any_format)


def test_a_zlab_config_needs_no_dflash_config(zlab: Path) -> None:
    put(zlab / "config.json", dflash_config=None, mask_token_id=7, target_layer_ids=[0, 2])
    draft = read_draft(zlab)
    assert (draft.mask_token_id, draft.target_layer_ids, draft.block_size) == (7, (0, 2), 8)


def test_a_mask_token_that_is_text_is_refused_by_name(any_format: Path) -> None:
    set_dflash(any_format, mask_token_id=None)
    put(any_format / "config.json", mask_token_id=None, mask_token="<|MASK|>")
    with pytest.raises(CheckpointError, match=r"'mask_token' is '<\|MASK\|>'; expected an id in mask_token_id"):
        read_draft(any_format)


@pytest.mark.parametrize(("claimed", "shipped"), [(True, False), (False, True)])
def test_a_head_of_its_own_must_be_there_where_the_config_says_so(zlab: Path, claimed: bool, shipped: bool) -> None:
    put(zlab / "config.json", has_own_lm_head=claimed)
    if shipped:
        tensors = load_file(zlab / "model.safetensors")
        save_file(tensors | {"lm_head.weight": torch.zeros(VOCAB_SIZE, 32)}, zlab / "model.safetensors")
    with pytest.raises(CheckpointError, match=f"'has_own_lm_head' is {claimed}; expected {str(shipped).lower()}"):
        read_draft(zlab)
    put(zlab / "config.json", has_own_lm_head=shipped)
    assert read_draft(zlab).has_lm_head is shipped


def test_speculators_windows_may_stand_at_the_top_level(speculators: Path) -> None:
    """As in vLLM's test of its config conversion; there they win over the nested ones."""
    set_layer(speculators, layer_types=[FULL, FULL], sliding_window=4)
    put(speculators / "config.json", layer_types=[FULL, SLIDING], sliding_window=8, use_sliding_window=True)
    draft = read_draft(speculators)
    assert draft.decoder.sliding_windows == (None, 8)
    assert draft.causal == (False, True)


def test_a_window_that_the_config_class_would_drop_is_used_and_said(any_format: Path) -> None:
    set_layer(any_format, layer_types=[FULL, SLIDING], sliding_window=8)
    draft = read_draft(any_format)
    assert draft.decoder.sliding_windows == (None, 8)
    assert "use_sliding_window is missing: the sliding_window of 8 is used" in draft.notes[0]
    set_layer(any_format, use_sliding_window=True)
    assert read_draft(any_format).notes == ()


@pytest.mark.parametrize(("asked", "k"), [(7, 7), (8, 7), (12, 7)])
def test_a_k_of_the_whole_block_leaves_the_anchor_its_place(speculators: Path, asked: int, k: int) -> None:
    """The library wrote the block size as k until April 2026, the published Qwen3-8B checkpoint among them."""
    put(speculators / "config.json", speculators_config={"proposal_methods": [{"speculative_tokens": asked}]})
    draft = read_draft(speculators)
    assert draft.num_speculative_tokens == k
    said = (f"speculative_tokens is {asked}; k is 7, as the anchor takes one place of a block of 8",)
    assert draft.notes == (() if asked == k else said)


def test_a_false_flag_changes_nothing(any_format: Path) -> None:
    set_dflash(any_format, attention_sink_bias=False, enable_confidence_head=False, final_logit_softcapping=None)
    set_dflash(any_format, use_aux_hidden_state=True, is_neox_style=True, attention_value_scale=1.0)
    assert read_draft(any_format).notes == ()


def test_layers_that_slide_and_do_not_are_refused(any_format: Path) -> None:
    set_layer(any_format, layer_types=[SLIDING, FULL], sliding_window=8, use_sliding_window=False)
    with pytest.raises(CheckpointError, match="'use_sliding_window' is False; expected true"):
        read_draft(any_format)


@pytest.mark.parametrize("architecture", ["Qwen3DSparkModel", "DFlash2DraftModel", "LlamaForCausalLMEagle3"])
def test_drafters_of_other_methods_are_refused_by_name(zlab: Path, architecture: str) -> None:
    put(zlab / "config.json", architectures=[architecture], auto_map={"AutoModel": "x.Y"})
    with pytest.raises(CheckpointError, match=f"{architecture}.*'DFlashDraftModel'.*code .* is not run"):
        read_draft(zlab)


def test_weights_with_fewer_layers_than_the_config_are_refused(any_format: Path) -> None:
    set_layer(any_format, num_hidden_layers=1000)
    with pytest.raises(CheckpointError, match="'num_hidden_layers' is 1000; the weights beside it hold 2 layers"):
        read_draft(any_format)


def test_reading_a_drafter_imports_no_torch() -> None:
    script = "import sys, dflash_backend.checkpoints; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.strip() == "False"
