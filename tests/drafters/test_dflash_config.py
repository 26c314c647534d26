"""Drafters of both formats are read as their authors meant them, and other methods are refused by name."""

from __future__ import annotations

import dataclasses
import itertools
import subprocess
import sys
from operator import attrgetter
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from dflash_backend.checkpoints import CheckpointError, RopeSpec, read_target
from dflash_backend.drafters.dflash.config import LogitsSpec
from dflash_backend.drafters.registry import read_draft
from tests.drafters.drafts import DRAFT_VOCAB_SIZE, edit, make_speculators, put
from tests.support.tiny_models import MASK_TOKEN_ID, VOCAB_SIZE, make_draft, make_target

SLIDING, FULL = "sliding_attention", "full_attention"
FORMATS = {"z-lab": make_draft, "speculators": make_speculators}
ZLAB, SPECULATORS, BOTH = ("z-lab",), ("speculators",), tuple(FORMATS)

Fields = dict[str, Any]


def change(directory: Path, fields: Fields) -> None:
    """Set fields of the config; `...` removes one. `layer.x` is of the decoder's own config, wherever the format has
    it, `dflash.x` of `dflash_config`."""

    def apply(data: Fields) -> None:
        for name, value in fields.items():
            place, _, field = name.rpartition(".")
            if place == "dflash":
                holder = data.setdefault("dflash_config", {})
            else:
                holder = data.get("transformer_layer_config", data) if place == "layer" else data
            holder.pop(field) if value is ... else holder.update({field: value})

    edit(directory / "config.json", apply)


def of_formats(rows: list[tuple[tuple[str, ...], Any, Any]]) -> Any:
    """One case for each format of each row."""
    cases = [(written, *rest) for formats, *rest in rows for written in formats]
    return pytest.mark.parametrize(("written", "fields", "expected"), cases)


ALIKE = {"layer.layer_types": [SLIDING, FULL], "layer.sliding_window": 8}
NEITHER = {"decoder.sliding_windows": (None, None), "causal": (False, False)}
NESTED_ROPE = {SLIDING: {"rope_theta": 7.0}, FULL: {"rope_theta": 9.0}}
SCALES = {"input_embedding_scale": 2, "output_multiplier": 0.5, "final_logit_softcapping": 30.0, "logit_scale": 0.25}
SCALED = {"input_embedding_scale": 2.0, "logits": LogitsSpec(0.5, 30.0, 0.25), "notes": ()}
OTHER_CLASS = {"layer.head_dim": None, "layer.hidden_size": 64, "layer.max_position_embeddings": None}
USED_WINDOW = (
    "layer_types has 'sliding_attention' and use_sliding_window is missing: the sliding_window of 8 is used, which "
    "Qwen3's config class in transformers would drop",
)
CAUSAL = "The sliding layers are causal, as in training; "
ELSE = ": if next to nothing is accepted, set causal=false, or the field"
CAUSAL_IN_ZLAB = (
    f"missing in config.json: is_causal. {CAUSAL}the authors' code up to April 2026 did not make them so{ELSE}",
)
CAUSAL_IN_SPECULATORS = (f"missing in config.json: sliding_window_non_causal. {CAUSAL}vLLM makes no layer so{ELSE}",)
NO_ANCHOR = (
    "missing in config.json and read as sample_from_anchor = false; if next to nothing is accepted, the drafter was "
    "trained otherwise: write the other value into config.json",
)


def block_k(asked: int) -> Fields:
    return {"speculators_config": {"proposal_methods": [{"speculative_tokens": asked}]}}


def slides(windows: tuple[int | None, ...], causal: tuple[bool, ...]) -> Fields:
    return {"decoder.sliding_windows": windows, "causal": causal}


READINGS: list[tuple[tuple[str, ...], Fields, Fields]] = [
    (
        ZLAB,
        {},
        {"format": "z-lab", "block_size": 8, "num_speculative_tokens": 7, "mask_token_id": MASK_TOKEN_ID}
        | {"vocab_size": VOCAB_SIZE, "draft_vocab_size": VOCAB_SIZE, "maps_vocabulary": False}
        | {"num_target_layers": 5, "target_hidden_size": 32, "target_name": None}
        | {"has_embedding": False, "has_lm_head": False, "has_mask_embedding": False},
    ),
    (
        SPECULATORS,
        {"target_hidden_size": 48},
        {"format": "speculators", "block_size": 8, "num_speculative_tokens": 5, "target_hidden_size": 48}
        | {"vocab_size": VOCAB_SIZE, "draft_vocab_size": DRAFT_VOCAB_SIZE, "maps_vocabulary": True}
        | {"has_lm_head": True, "has_embedding": False},
    ),
    # The layer's own config class gives its defaults.
    (SPECULATORS, OTHER_CLASS, {"decoder.max_len": 32768}),
    (SPECULATORS, OTHER_CLASS | {"layer.model_type": "llama"}, {"decoder.head_dim": 16, "decoder.max_len": 2048}),
    # Layer ids that are missing or null are the method's default.
    (ZLAB, {"dflash.target_layer_ids": ...}, {"target_layer_ids": (1, 2)}),
    (ZLAB, {"dflash.target_layer_ids": None}, {"target_layer_ids": (1, 2)}),
    (ZLAB, {"block_size": ..., "dflash.block_size": 4}, {"block_size": 4}),
    (
        ZLAB,
        {"block_size": ...},
        {"block_size": 16, "notes": ("no field gives block_size; 16 is the authors' default",)},
    ),
    (
        SPECULATORS,
        {"aux_hidden_state_layer_ids": ..., "eagle_aux_hidden_state_layer_ids": [2, 4]},
        {"target_layer_ids": (1, 3)},
    ),
    (SPECULATORS, {"draft_vocab_size": None}, {"draft_vocab_size": VOCAB_SIZE}),
    (SPECULATORS, {"speculators_config": None}, {"num_speculative_tokens": 7, "target_name": None}),
    (BOTH, {"layer.rope_parameters": NESTED_ROPE}, {"decoder.rope": RopeSpec(theta=7.0)}),
    # dflash_config decides over the top level, and is not needed.
    (BOTH, {}, {"input_embedding_scale": 1.0, "logits": LogitsSpec(1.0, None, 1.0), "causal": (False, False)}),
    (BOTH, SCALES, SCALED),
    (BOTH, {f"dflash.{name}": value for name, value in SCALES.items()}, SCALED),
    (
        ZLAB,
        {"input_embedding_scale": 3.0, "output_multiplier": 3.0, "final_logit_softcapping": 3.0, "mask_token_id": 5}
        | {"dflash.input_embedding_scale": 1.0, "dflash.output_multiplier": 2.0, "dflash.final_logit_softcapping": 0},
        {"input_embedding_scale": 1.0, "logits": LogitsSpec(2.0, None, 1.0), "mask_token_id": MASK_TOKEN_ID},
    ),
    (
        ZLAB,
        {"dflash_config": None, "mask_token_id": 7, "target_layer_ids": [0, 2]},
        {"mask_token_id": 7, "target_layer_ids": (0, 2), "block_size": 8},
    ),
    # Windows, in every place where they are found.
    (BOTH, {"layer.layer_types": [FULL, SLIDING], "layer.sliding_window": 8}, slides((None, 8), (False, True))),
    (
        BOTH,
        {"layer.layer_types": [FULL, SLIDING], "layer.sliding_window": 8, "dflash.swa_window_size": 6},
        slides((None, 6), (False, True)),
    ),
    (BOTH, {"layer.sliding_window": 8, "dflash.use_swa": True}, slides((8, 8), (False, False))),
    (BOTH, {"dflash.use_swa": True, "dflash.swa_window_size": 6}, slides((6, 6), (False, False))),
    (
        BOTH,
        {"layer.layer_types": [FULL, FULL], "dflash.use_swa": True, "dflash.swa_window_size": 6},
        slides((6, 6), (False, False)),
    ),
    (
        BOTH,
        {"layer.layer_types": [FULL, SLIDING], "dflash.use_swa": True, "dflash.swa_window_size": 6},
        slides((None, 6), (False, True)),
    ),
    (BOTH, {"layer.sliding_window": 8, "dflash.swa_window_size": 6}, NEITHER),
    (BOTH, {"layer.sliding_window": 8, "layer.use_sliding_window": False}, NEITHER),
    # Qwen3's config class makes layer types of these, so that all references see a sliding layer, causal.
    (
        BOTH,
        {"layer.sliding_window": 8, "layer.use_sliding_window": True, "layer.max_window_layers": 1},
        slides((None, 8), (False, True)),
    ),
    (
        BOTH,
        {"layer.use_sliding_window": True, "layer.max_window_layers": 1},
        slides((None, 4096), (False, True)),
    ),
    (
        BOTH,
        {"layer.use_sliding_window": True, "layer.max_window_layers": 1, "dflash.swa_window_size": 6},
        slides((None, 6), (False, True)),
    ),
    # As in vLLM's test of its config conversion: windows at the top level win over the nested ones.
    (
        SPECULATORS,
        {"layer.layer_types": [FULL, FULL], "layer.sliding_window": 4}
        | {"layer_types": [FULL, SLIDING], "sliding_window": 8, "use_sliding_window": True},
        slides((None, 8), (False, True)),
    ),
    (SPECULATORS, ALIKE | {"sliding_window_non_causal": True}, slides((8, None), (False, False))),
    # A window that the config class would drop is used, and said.
    (ZLAB, ALIKE, {"decoder.sliding_windows": (8, None), "notes": USED_WINDOW + CAUSAL_IN_ZLAB}),
    (SPECULATORS, ALIKE, {"decoder.sliding_windows": (8, None), "notes": USED_WINDOW}),
    # And so is whether sliding layers are causal, where no field says it.
    (ZLAB, ALIKE | {"layer.use_sliding_window": True}, {"notes": CAUSAL_IN_ZLAB}),
    (ZLAB, ALIKE | {"layer.use_sliding_window": True, "is_causal": False}, {"notes": ()}),
    (SPECULATORS, ALIKE | {"layer.use_sliding_window": True}, {"notes": ()}),
    (
        SPECULATORS,
        ALIKE | {"layer.use_sliding_window": True, "sliding_window_non_causal": ...},
        slides((8, None), (True, False)) | {"notes": CAUSAL_IN_SPECULATORS},
    ),
    (
        SPECULATORS,
        ALIKE | {"layer.use_sliding_window": True, "sliding_window_non_causal": None, "dflash.causal": False},
        slides((8, None), (False, False)) | {"notes": ()},
    ),
    (SPECULATORS, {"sliding_window_non_causal": ...}, {"notes": ()}),
    (SPECULATORS, {"sample_from_anchor": ...}, {"notes": NO_ANCHOR}),
    # The library wrote the block size as k until April 2026, the published Qwen3-8B checkpoint among them.
    (SPECULATORS, block_k(7), {"num_speculative_tokens": 7, "notes": ()}),
    *(
        (
            SPECULATORS,
            block_k(asked),
            {"num_speculative_tokens": 7}
            | {"notes": (f"speculative_tokens is {asked}; k is 7, as the anchor takes one place of a block of 8",)},
        )
        for asked in (8, 12)
    ),
    # Fields of other methods that say nothing.
    (
        BOTH,
        {"dflash.attention_sink_bias": False, "dflash.enable_confidence_head": False}
        | {"dflash.final_logit_softcapping": None, "dflash.use_aux_hidden_state": True}
        | {"dflash.is_neox_style": True, "dflash.attention_value_scale": 1.0},
        {"notes": ()},
    ),
]


@of_formats(READINGS)
def test_what_a_config_says_is_read(tmp_path: Path, written: str, fields: Fields, expected: Fields) -> None:
    FORMATS[written](tmp_path)
    change(tmp_path, fields)
    draft = read_draft(tmp_path)
    assert {name: attrgetter(name)(draft) for name in expected} == expected


# Precedence: the server's setting, is_causal, dflash_config.causal, sliding layers, not causal.
@pytest.mark.parametrize("written", BOTH)
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
    tmp_path: Path, written: str, setting: bool | None, is_causal: bool | None, causal: bool | None, expected: Any
) -> None:
    FORMATS[written](tmp_path)
    change(tmp_path, ALIKE | {"is_causal": is_causal, "dflash.causal": causal})
    assert read_draft(tmp_path, setting).causal == expected


OTHER_ARITHMETIC = {
    "attention_sink_bias": (True, "attention sinks are not supported"),
    "logits_soft_cap": (30.0, "soft-capping of logits"),
    "attention_value_scale": (0.707, "scale of the values"),
    "use_aux_hidden_state": (False, "last hidden state alone is not supported"),
    "is_neox_style": (False, "interleaved rotary embedding"),
    "sample_from_anchor": (True, "does not sample from the anchor"),
    "projector_type": ("domino", "other projectors are not supported"),
    "selector_rank": (256, "candidate selector of DFlash2"),
    "fc_norm": (True, "as EAGLE-3 has it"),
    "markov_rank": (64, "Markov head of DSpark"),
    "enable_confidence_head": (True, "confidence head of DSpark"),
    "conv_kernel_size": (2, "convolutions of DFlash2"),
}
REFUSALS: list[tuple[tuple[str, ...], Fields, str]] = [
    (SPECULATORS, {"aux_hidden_state_layer_ids": None}, "'aux_hidden_state_layer_ids' is missing"),
    (SPECULATORS, {"aux_hidden_state_layer_ids": [0, 3]}, r"'aux_hidden_state_layer_ids' is \[0, 3\]; .* at least 1"),
    (SPECULATORS, {"aux_hidden_state_layer_ids": []}, r"'aux_hidden_state_layer_ids' is \[\]"),
    (SPECULATORS, {"mask_token_id": None}, "'mask_token_id' is missing"),
    (SPECULATORS, {"sample_from_anchor": True}, "'sample_from_anchor' is True; expected false"),
    (SPECULATORS, {"projector_type": "domino"}, "'projector_type' is 'domino'; expected 'dflash'"),
    (SPECULATORS, {"shift_label": True}, "shifted by one position"),
    (SPECULATORS, {"speculators_model_type": "peagle"}, "'speculators_model_type' is 'peagle'; expected 'dflash'"),
    (SPECULATORS, {"speculators_model_type": "mtp"}, "'speculators_model_type' is 'mtp'"),
    (SPECULATORS, {"transformer_layer_config": None}, "'transformer_layer_config' is missing"),
    (SPECULATORS, {"block_size": 1}, "'block_size' is 1; expected an integer from 2"),
    (
        BOTH,
        {"dflash.mask_token_id": None, "mask_token_id": None, "mask_token": "<|MASK|>"},
        r"'mask_token' is '<\|MASK\|>'; expected an id in mask_token_id",
    ),
    (BOTH, ALIKE | {"layer.use_sliding_window": False}, "'use_sliding_window' is False; expected true"),
    (BOTH, {"layer.num_hidden_layers": 1000}, "'num_hidden_layers' is 1000; the weights beside it hold 2 layers"),
    *(
        (ZLAB, {"architectures": [name], "auto_map": {"AutoModel": "x.Y"}}, f"{name}.*'DFlashDraftModel'.* is not run")
        for name in ("Gemma4DSparkModel", "EagleLlamaForCausalLM")
    ),
    *(
        (BOTH, {f"dflash.{field}": value}, f"'{field}' is .*; expected a number above 0")
        for field, value in itertools.product(SCALES, (-1.0, "2", True, float("inf")))
    ),
    *(
        (BOTH, {f"{place}{field}": value}, f"'{field}' is .*{reason}")
        for place, (field, (value, reason)) in itertools.product(("dflash.", "layer.", ""), OTHER_ARITHMETIC.items())
    ),
]


@of_formats(REFUSALS)
def test_what_would_be_misread_is_refused_by_field(tmp_path: Path, written: str, fields: Fields, expected: str) -> None:
    FORMATS[written](tmp_path)
    change(tmp_path, fields)
    with pytest.raises(CheckpointError, match=expected) as caught:
        read_draft(tmp_path)
    assert str(tmp_path / "config.json") in str(caught.value)


@pytest.mark.parametrize("written", BOTH)
def test_a_mask_embedding_beside_the_weights_is_noticed(tmp_path: Path, written: str) -> None:
    FORMATS[written](tmp_path)
    (tmp_path / "mask_embedding.pt").write_bytes(b"")
    assert read_draft(tmp_path).has_mask_embedding


@pytest.mark.parametrize(("claimed", "shipped"), [(True, False), (False, True)])
def test_a_head_of_its_own_must_be_there_where_the_config_says_so(tmp_path: Path, claimed: bool, shipped: bool) -> None:
    make_draft(tmp_path, has_own_lm_head=claimed)
    if shipped:
        tensors = load_file(tmp_path / "model.safetensors")
        save_file(tensors | {"lm_head.weight": torch.zeros(VOCAB_SIZE, 32)}, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=f"'has_own_lm_head' is {claimed}; expected {str(shipped).lower()}"):
        read_draft(tmp_path)
    put(tmp_path / "config.json", has_own_lm_head=shipped)
    assert read_draft(tmp_path).has_lm_head is shipped


def test_reading_a_drafter_imports_no_torch() -> None:
    script = "import sys, dflash_backend.checkpoints; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.strip() == "False"


def test_a_drafter_without_a_soft_cap_has_that_of_its_target_as_in_vllm(tmp_path: Path) -> None:
    """Where it multiplies by the target's head."""
    make_target(tmp_path / "gemma", architecture="Gemma4ForCausalLM")
    make_target(tmp_path / "plain")
    gemma, plain = read_target(tmp_path / "gemma"), read_target(tmp_path / "plain")
    make_draft(tmp_path / "draft")
    draft = read_draft(tmp_path / "draft")
    assert draft.for_target(gemma).logits == LogitsSpec(softcap=20.0)
    assert draft.for_target(plain) is draft
    make_draft(tmp_path / "capped", final_logit_softcapping=5.0)
    assert read_draft(tmp_path / "capped").for_target(gemma).logits == LogitsSpec(softcap=5.0)
    own_head = dataclasses.replace(draft, has_lm_head=True)
    assert own_head.for_target(gemma) is own_head
