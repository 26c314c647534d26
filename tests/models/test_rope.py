"""Rotary frequencies and tables are those of `transformers`, to the last bit, at any position."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from dflash_backend.checkpoints.spec import DecoderSpec, RopeSpec
from dflash_backend.models.rope import Rotary, inverse_frequencies

CPU = torch.device("cpu")
DEFAULT = RopeSpec(theta=10000.0)
LLAMA3 = RopeSpec(500000.0, "llama3", factor=8.0, original_max_positions=8192)
YARN = RopeSpec(1000000.0, "yarn", factor=4.0, original_max_positions=32768, attention_factor=1.1386294361119891)
CASES = [
    DEFAULT,
    RopeSpec(theta=1000000.0),
    RopeSpec(10000.0, "linear", factor=2.5),
    RopeSpec(10000.0, "dynamic", factor=2.0, original_max_positions=2048, length=2048),
    RopeSpec(10000.0, "dynamic", factor=2.0, original_max_positions=2048, length=5000),
    RopeSpec(500000.0, "dynamic", factor=3.0, original_max_positions=1000, length=30001),
    LLAMA3,
    dataclasses.replace(LLAMA3, factor=32.0),
    dataclasses.replace(LLAMA3, original_max_positions=300, low_freq_factor=0.5, high_freq_factor=7.0),
    YARN,
    dataclasses.replace(YARN, theta=10000.0, factor=40.0, original_max_positions=4096, attention_factor=1.0),
    dataclasses.replace(YARN, beta_fast=20.0, beta_slow=2.0),
    dataclasses.replace(YARN, truncate=False),
    # A ramp of no width.
    dataclasses.replace(YARN, original_max_positions=6, truncate=False),
]
# Fields of `transformers`, and ours where the name differs.
ORIGINAL = "original_max_position_embeddings"
OF_YARN = (ORIGINAL, "attention_factor", "beta_fast", "beta_slow", "truncate")
OF_LLAMA3 = (ORIGINAL, "low_freq_factor", "high_freq_factor")
OURS = {ORIGINAL: "original_max_positions"}


def reference(rope: RopeSpec, head_dim: int) -> LlamaRotaryEmbedding:
    """The embedding of `transformers` for the same parameters."""
    parameters: dict[str, Any] = {"rope_type": rope.kind, "rope_theta": rope.theta}
    if rope.kind != "default":
        parameters["factor"] = rope.factor
    names = {"yarn": OF_YARN, "llama3": OF_LLAMA3}.get(rope.kind, ())
    parameters |= {name: getattr(rope, OURS.get(name, name)) for name in names}
    config = LlamaConfig(
        hidden_size=4 * head_dim,
        num_attention_heads=4,
        max_position_embeddings=rope.original_max_positions or 131072,
        rope_parameters=parameters,
    )
    embedding = LlamaRotaryEmbedding(config)
    if rope.kind == "dynamic":
        # As if it had run that length. (Asked while it runs, it rounds the scaled base to float32 first.)
        embedding.inv_freq, _ = ROPE_INIT_FUNCTIONS["dynamic"](config, seq_len=rope.length)
        embedding.max_seq_len_cached = rope.length
    return embedding


def decoder(rope: RopeSpec, head_dim: int) -> DecoderSpec:
    return DecoderSpec(
        num_layers=1,
        hidden_size=4 * head_dim,
        intermediate_size=8,
        num_heads=4,
        num_kv_heads=4,
        head_dim=head_dim,
        rms_norm_eps=1e-6,
        rope=rope,
        qk_norm=False,
        qkv_bias=False,
        output_bias=False,
        mlp_bias=False,
        sliding_windows=(None,),
        max_len=131072,
    )


@pytest.mark.parametrize("head_dim", [80, 128])
@pytest.mark.parametrize("rope", CASES, ids=lambda rope: rope.kind)
def test_tables_equal_those_of_transformers(rope: RopeSpec, head_dim: int) -> None:
    theirs = reference(rope, head_dim)
    num_positions = rope.length or 20000
    ours = Rotary(decoder(rope, head_dim), num_positions, CPU, torch.float32)
    positions = torch.tensor([0, 1, 1000, num_positions // 2, num_positions - 1])
    cos, sin = theirs(torch.zeros(1), positions[None])
    assert torch.equal(inverse_frequencies(rope, head_dim), theirs.inv_freq)
    assert rope.attention_factor == theirs.attention_scaling
    assert torch.equal(ours.tables(positions)[0].squeeze(1), cos[0])
    half = head_dim // 2
    assert torch.equal(ours.tables(positions)[1].squeeze(1)[:, half:], sin[0, :, half:])
    assert torch.equal(ours.tables(positions)[1].squeeze(1)[:, :half], -sin[0, :, :half])


def test_each_scaling_changes_the_frequencies() -> None:
    """The cases above are not all one case."""
    for rope in (CASES[2], CASES[4], LLAMA3, YARN):
        plain = inverse_frequencies(RopeSpec(rope.theta), 128)
        assert not torch.equal(inverse_frequencies(rope, 128), plain)


def test_dynamic_frequencies_are_unscaled_up_to_the_original_length() -> None:
    rope = RopeSpec(10000.0, "dynamic", factor=4.0, original_max_positions=2048, length=100)
    assert torch.equal(inverse_frequencies(rope, 64), inverse_frequencies(DEFAULT, 64))


def test_a_kind_without_frequencies_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match="longrope"):
        inverse_frequencies(RopeSpec(10000.0, "longrope"), 64)
