"""Rotary embedding is read as `transformers` reads it, in every spelling, and what would be misread is refused."""

from __future__ import annotations

from typing import Any

import pytest
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from dflash_backend.checkpoints import CheckpointError, RopeSpec
from dflash_backend.checkpoints.json_reader import JsonReader
from dflash_backend.checkpoints.rope import addressable_positions, read_rope, unread_rope_fields

LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}


def read(positions: int = 4096, drafter: bool = False, **fields: Any) -> RopeSpec:
    return read_rope(JsonReader(fields, "config.json"), 64, positions, drafter)


def test_without_any_field_theta_is_ten_thousand() -> None:
    assert read() == RopeSpec(theta=10000.0)


@pytest.mark.parametrize(
    "fields",
    [
        {"rope_theta": 5e5},
        {"rope_parameters": {"rope_theta": 5e5, "rope_type": "default"}},
        {"rope_parameters": {"rope_type": "default"}, "rope_theta": 5e5},
        {"rope_theta": 1e4, "rope_parameters": {"rope_theta": 5e5}},
        {"rope_theta": 5e5, "rope_scaling": None, "rope_parameters": None},
        {"rope_scaling": {"type": "default"}, "rope_theta": 5e5},
    ],
)
def test_theta_is_found_in_every_place(fields: dict[str, Any]) -> None:
    assert read(**fields) == RopeSpec(theta=5e5)


@pytest.mark.parametrize("key", ["type", "rope_type"])
@pytest.mark.parametrize("field", ["rope_scaling", "rope_parameters"])
def test_scaling_is_read_from_both_fields_and_under_both_names(field: str, key: str) -> None:
    assert read(**{field: {key: "linear", "factor": 4}}) == RopeSpec(theta=1e4, kind="linear", factor=4.0)


def test_scaling_that_was_added_to_plain_parameters_counts() -> None:
    both = {"rope_parameters": {"rope_theta": 1e6, "rope_type": "default"}, "rope_theta": 1e6}
    assert read(**both, rope_scaling={"type": "linear", "factor": 2.0}).kind == "linear"
    with pytest.raises(CheckpointError, match="say different things"):
        read(rope_parameters={"rope_theta": 1e6}, rope_scaling={"type": "linear", "factor": 2.0})


@pytest.mark.parametrize(
    "scaling",
    [
        {"factor": 4.0},
        {"factor": 4.0, "original_max_position_embeddings": 1024},
        {"factor": None, "original_max_position_embeddings": 1024},
        {"factor": 4.0, "attention_factor": 1.5},
        {"factor": 4.0, "mscale": 0.7, "mscale_all_dim": 1.2},
        {"factor": 4.0, "mscale": 0.7},
        {"factor": 4.0, "mscale": 0, "mscale_all_dim": 1.0},
        {"factor": 1.0},
    ],
)
def test_yarn_has_the_attention_factor_of_transformers(scaling: dict[str, Any]) -> None:
    entry = {"rope_type": "yarn", "rope_theta": 10000.0} | scaling
    # Given after construction, as validation refuses a null factor that the computation handles.
    config = LlamaConfig(hidden_size=64, num_attention_heads=1, max_position_embeddings=4096)
    config.rope_parameters = entry | {
        "original_max_position_embeddings": scaling.get("original_max_position_embeddings", 4096)
    }
    expected = ROPE_INIT_FUNCTIONS["yarn"](config, "cpu")[1]
    rope = read(rope_parameters=entry)
    assert rope.attention_factor == pytest.approx(expected, rel=1e-12)
    assert rope.factor == pytest.approx(4.0 if scaling["factor"] != 1.0 else 1.0)


def test_attn_factor_multiplies_the_factor_that_is_not_given() -> None:
    """DeepSeek-R1-0528-Qwen3-8B's, which leaves scores as they are: as vLLM reads it."""
    scaling = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}
    published = read(131072, rope_scaling=scaling | {"attn_factor": 0.8782488562869419})
    assert published.attention_factor == pytest.approx(1.0, abs=1e-9)
    assert read(131072, rope_scaling=scaling).attention_factor == pytest.approx(1.13863, abs=1e-5)
    both = read(131072, rope_scaling=scaling | {"attn_factor": 0.5, "attention_factor": 1.5})
    assert both.attention_factor == 1.5
    with pytest.raises(CheckpointError, match="'attn_factor' is -1"):
        read(rope_scaling=scaling | {"attn_factor": -1})


def test_fields_that_are_not_read_are_said() -> None:
    def notes(**fields: Any) -> tuple[str, ...]:
        return unread_rope_fields(JsonReader(fields, "config.json"))

    yarn = {"type": "yarn", "factor": 2.0, "attn_factor": 1.0, "truncate": False, "original_max_position_embeddings": 8}
    assert notes() == notes(rope_scaling=yarn) == notes(rope_scaling=None, rope_parameters=LLAMA3) == ()
    assert notes(rope_scaling=yarn | {"finetuned": False, "gamma": None}) == ()
    (note,) = notes(rope_scaling=yarn | {"extrapolation_factor": 2}, rope_parameters={"rope_theta": 1, "factor": 4})
    assert "rope_scaling.extrapolation_factor = 2, rope_parameters.factor = 4; texts are worse" in note
    nested = {"full_attention": {"rope_type": "proportional", "partial_rotary_factor": 0.25, "attn_factor": 2}}
    assert "rope_parameters.full_attention.attn_factor = 2" in notes(rope_parameters=nested)[0]


def test_yarn_starts_from_max_position_embeddings_where_it_names_no_length() -> None:
    assert read(rope_scaling={"type": "yarn", "factor": 2}).original_max_positions == 4096
    inside = {"type": "yarn", "factor": 2, "original_max_position_embeddings": 512}
    assert read(rope_scaling=inside).original_max_positions == 512
    assert read(rope_scaling=inside, original_max_position_embeddings=256).original_max_positions == 256


def test_llama3_is_read_with_all_its_factors() -> None:
    rope = read(rope_scaling=LLAMA3 | {"original_max_position_embeddings": 512}, rope_theta=5e5)
    assert rope == RopeSpec(5e5, "llama3", 8.0, 512, low_freq_factor=1.0, high_freq_factor=4.0)


@pytest.mark.parametrize(
    ("scaling", "expected"),
    [
        (None, 4096),
        ({"type": "linear", "factor": 2.0}, 8192),
        ({"type": "dynamic", "factor": 4.0}, 16384),
        ({"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 4096}, 16384),
        ({"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512}, 4096),
        (LLAMA3, 4096),
    ],
)
def test_the_positions_that_can_be_addressed_follow_from_the_scaling(scaling: Any, expected: int) -> None:
    assert addressable_positions(read(rope_scaling=scaling), 4096) == expected


def test_dynamic_frequencies_are_unscaled_up_to_the_trained_length() -> None:
    rope = read(rope_scaling={"type": "dynamic", "factor": 4.0})
    assert (rope.length, rope.original_max_positions) == (4096, 4096)


def test_a_drafter_takes_the_sliding_entry_of_nested_parameters() -> None:
    nested = {"sliding_attention": {"rope_theta": 7.0}, "full_attention": {"rope_theta": 9.0, "rope_type": "default"}}
    assert read(drafter=True, rope_parameters=nested).theta == 7.0
    with pytest.raises(CheckpointError, match="theta 7 and theta 9"):
        read(rope_parameters=nested)
    same = {kind: {"rope_theta": 7.0} for kind in nested}
    assert read(rope_parameters=same).theta == 7.0


def test_sections_of_a_drafter_make_no_difference_in_text() -> None:
    """speculators writes so for Qwen3.5, whose target rotates a quarter of a head and its drafter all of it."""
    sections = {"mrope_section": [22, 22, 20], "mrope_interleaved": True, "rope_type": "default", "rope_theta": 1e7}
    assert read(drafter=True, rope_parameters=sections | {"partial_rotary_factor": 1.0}) == RopeSpec(theta=1e7)
    with pytest.raises(CheckpointError, match="'partial_rotary_factor' is 0.25; expected 1"):
        read(drafter=True, rope_parameters=sections | {"partial_rotary_factor": 0.25})
    with pytest.raises(CheckpointError, match="mrope"):
        read(rope_parameters=sections)


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"rope_scaling": {"type": "longrope"}}, "'type' is 'longrope'; expected one of default, linear, dynamic"),
        ({"rope_scaling": {"rope_type": "mrope"}}, "'rope_type' is 'mrope'"),
        ({"rope_scaling": {"type": "mrope", "rope_type": "default"}}, "'type' is 'mrope'"),
        ({"rope_scaling": {"type": "linear", "rope_type": "yarn", "factor": 2}}, "the same as 'type' .linear"),
        ({"rope_scaling": {"rope_type": "default", "mrope_section": [1, 2]}}, "mrope"),
        ({"rope_scaling": {"type": "linear"}}, "'factor' is missing; expected a number of at least 1"),
        ({"rope_scaling": {"type": "linear", "factor": 0.5}}, "'factor' is 0.5"),
        ({"rope_scaling": {"type": "dynamic", "factor": float("inf")}}, "'factor' is inf"),
        ({"rope_scaling": LLAMA3 | {"high_freq_factor": 1.0}}, r"'high_freq_factor' is 1.0; expected more than low"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8}}, "'low_freq_factor' is missing"),
        ({"rope_scaling": {"type": "yarn", "factor": 2, "beta_fast": 1e300}}, "'beta_fast' is 1e"),
        ({"rope_scaling": {"type": "yarn", "factor": 2}, "rope_theta": 1}, "above 1, as yarn needs"),
        ({"rope_theta": 1e300}, "'rope_theta' is 1e"),
        ({"rope_theta": -1}, "'rope_theta' is -1"),
        ({"partial_rotary_factor": 0.5}, "'partial_rotary_factor' is 0.5; expected 1"),
        ({"rope_parameters": {"partial_rotary_factor": 0.25}}, "'partial_rotary_factor' is 0.25"),
        ({"rope_parameters": {"full_attention": {"partial_rotary_factor": 0.25}}}, "'partial_rotary_factor' is 0.25"),
    ],
)
def test_what_would_be_misread_is_refused(fields: dict[str, Any], expected: str) -> None:
    with pytest.raises(CheckpointError, match=expected):
        read(**fields)


def test_dynamic_scaling_needs_more_than_one_pair() -> None:
    fields = {"rope_scaling": {"type": "dynamic", "factor": 2.0}}
    with pytest.raises(CheckpointError, match="more than 2, as dynamic"):
        read_rope(JsonReader(fields, "config.json"), 2, 512, False)
