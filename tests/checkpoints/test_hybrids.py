"""Hybrids are read as `transformers` reads them, and configs that make no sense are refused by name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from transformers import AutoConfig

from dflash_backend.checkpoints import CheckpointError
from dflash_backend.checkpoints.describe import decoder_facts
from tests.checkpoints.test_targets import read

NEXT = "Qwen3NextForCausalLM"
LINEAR, FULL = "linear_attention", "full_attention"


def test_missing_fields_take_the_defaults_of_transformers(tmp_path: Path) -> None:
    theirs = AutoConfig.for_model("qwen3_next")
    decoder = read(tmp_path, NEXT, head_dim=..., num_attention_heads=16).decoder
    net, moe = decoder.delta_net, decoder.moe
    assert net is not None
    assert moe is not None
    assert (net.num_key_heads, net.num_value_heads) == (theirs.linear_num_key_heads, theirs.linear_num_value_heads)
    assert (net.key_head_dim, net.value_head_dim) == (theirs.linear_key_head_dim, theirs.linear_value_head_dim)
    assert net.conv_width == theirs.linear_conv_kernel_dim
    assert decoder.rotary_dim == int(decoder.head_dim * theirs.rope_parameters["partial_rotary_factor"])
    assert (moe.num_experts, moe.experts_per_token) == (theirs.num_experts, theirs.num_experts_per_tok)
    assert (moe.intermediate_size, moe.shared_size) == (512, theirs.shared_expert_intermediate_size)
    assert moe.norm_topk_prob == theirs.norm_topk_prob


@pytest.mark.parametrize(
    ("fields", "attention"),
    [
        ({}, [3]),
        ({"full_attention_interval": 2}, [1, 3]),
        ({"layer_types": [FULL, LINEAR, LINEAR, FULL]}, [0, 3]),
    ],
)
def test_layers_with_attention_are_those_of_transformers(
    tmp_path: Path, fields: dict[str, Any], attention: list[int]
) -> None:
    theirs = AutoConfig.for_model("qwen3_next", num_hidden_layers=4, **fields)
    decoder = read(tmp_path, NEXT, **fields).decoder
    assert [index for index in range(4) if decoder.has_attention(index)] == attention
    assert [index for index, kind in enumerate(theirs.layer_types) if kind == FULL] == attention
    assert len(decoder.caches) == len(attention)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"layer_types": [LINEAR] * 4}, "without attention are not supported"),
        ({"layer_types": [LINEAR, FULL]}, "for each of the 4 layers"),
        ({"layer_types": ["sliding_attention", FULL, FULL, FULL]}, "'full_attention' or 'linear_attention'"),
        ({"linear_num_key_heads": 3, "linear_num_value_heads": 4}, "a multiple of linear_num_key_heads"),
        ({"linear_conv_kernel_dim": 1}, "linear_conv_kernel_dim"),
        ({"linear_key_head_dim": 0}, "linear_key_head_dim"),
        ({"partial_rotary_factor": 0.3, "head_dim": 10}, "partial_rotary_factor"),
        ({"partial_rotary_factor": 1.5}, "partial_rotary_factor"),
        ({"partial_rotary_factor": 0.25, "rope_parameters": {"partial_rotary_factor": 0.5}}, "the same as elsewhere"),
        ({"hidden_act": "gelu"}, "hidden_act"),
    ],
)
def test_fields_that_make_no_sense_are_refused(tmp_path: Path, fields: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        read(tmp_path, NEXT, **fields)


def test_a_part_of_a_head_is_rotated_in_hybrids_alone(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="a part of the head is not supported"):
        read(tmp_path, "Qwen3ForCausalLM", partial_rotary_factor=0.25)


def test_facts_name_the_layers_and_the_size_of_the_state(tmp_path: Path) -> None:
    facts = dict(decoder_facts(read(tmp_path, NEXT, head_dim=256).decoder))
    assert facts["attention"] == "gated delta net in layers 0-2, full, gated in layer 3"
    assert "convolution of 4" in facts["gated delta net"]
    assert "6.28 MiB" in facts["gated delta net"]
    assert facts["rotary embedding"].endswith("of 64 numbers of a head")
    assert facts["experts"].endswith("a shared one of size 512")
