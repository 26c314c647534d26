"""Targets of every family are read as `transformers` reads them; others are refused by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoConfig

from dflash_backend.checkpoints import TARGET_ARCHITECTURES, CheckpointError, TargetSpec, read_target
from dflash_backend.checkpoints.decoder_fields import DTYPES
from dflash_backend.checkpoints.describe import target_facts
from tests.support.tiny_models import FAMILIES

MODEL_TYPES = {architecture: config.model_type for architecture, (_, config, _) in FAMILIES.items()}
SLIDING, FULL = "sliding_attention", "full_attention"
GEMMA, PLAIN = "Gemma4ForCausalLM", {"hidden_size_per_layer_input": 0}
PROPORTIONAL = {"rope_type": "proportional", "rope_theta": 1e6}


def read(directory: Path, architecture: str = "Qwen3ForCausalLM", **fields: Any) -> TargetSpec:
    """Read a config with the fields that every checkpoint has, and `fields`; `...` leaves one out."""
    config: dict[str, Any] = {
        "architectures": [architecture],
        "hidden_size": 128,
        "intermediate_size": 64,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "vocab_size": 97,
    } | fields
    config = {name: value for name, value in config.items() if value is not ...}
    (directory / "config.json").write_text(json.dumps(config))
    save_file({f"model.layers.{i}.x": torch.zeros(1) for i in range(4)}, directory / "model.safetensors")
    return read_target(directory)


def test_the_cases_are_of_every_architecture() -> None:
    assert set(TARGET_ARCHITECTURES) == set(MODEL_TYPES)


@pytest.mark.parametrize(
    ("architecture", "head_dim"),
    [(name, ...) for name in MODEL_TYPES if name != "Gemma4ForCausalLM"]
    + [("LlamaForCausalLM", None), ("MistralForCausalLM", None)],
)
def test_missing_fields_take_the_defaults_of_transformers(tmp_path: Path, architecture: str, head_dim: Any) -> None:
    heads = {"num_attention_heads": 32, "hidden_size": 256}
    theirs_own = {} if head_dim is ... else {"head_dim": None}
    theirs = AutoConfig.for_model(MODEL_TYPES[architecture], **heads, **theirs_own)
    ours = read(tmp_path, architecture, **heads, num_key_value_heads=..., head_dim=head_dim).decoder
    assert ours.num_kv_heads == theirs.num_key_value_heads
    assert ours.head_dim == (getattr(theirs, "head_dim", None) or 256 // 32)
    assert ours.max_len == theirs.max_position_embeddings
    assert ours.rms_norm_eps == theirs.rms_norm_eps
    assert ours.rope.theta == theirs.rope_parameters["rope_theta"]
    assert ours.output_bias == getattr(theirs, "attention_bias", False)
    assert ours.rope.kind == theirs.rope_parameters["rope_type"]
    windows: tuple[int | None, ...] = (None,) * 4
    if architecture == "MistralForCausalLM":
        windows = (theirs.sliding_window,) * 4
    if architecture == "GptOssForCausalLM":
        windows = tuple(theirs.sliding_window if kind == SLIDING else None for kind in theirs.layer_types[:4])
    assert ours.sliding_windows == windows


@pytest.mark.parametrize("architecture", MODEL_TYPES)
def test_no_field_is_needed_that_the_config_class_does_not_have(tmp_path: Path, architecture: str) -> None:
    """Published files have the fields of their class alone: those of Qwen3.5 with experts have no intermediate_size."""
    known = FAMILIES[architecture][1].__dataclass_fields__
    sizes = ("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim", "vocab_size")
    missing = {name: ... for name in sizes if name not in known}
    spec = read(tmp_path, architecture, **missing, **(PLAIN if architecture == GEMMA else {}))
    assert (spec.decoder.num_layers, spec.vocab_size) == (4, 97)


def test_an_mlp_in_some_layers_needs_its_size(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="'intermediate_size' is missing"):
        read(tmp_path, "Qwen3MoeForCausalLM", intermediate_size=..., mlp_only_layers=[0])
    with pytest.raises(CheckpointError, match="'intermediate_size' is missing"):
        read(tmp_path, "LlamaForCausalLM", intermediate_size=...)


def test_null_key_heads_are_as_many_as_query_heads(tmp_path: Path) -> None:
    assert read(tmp_path, "MistralForCausalLM", num_key_value_heads=None).decoder.num_kv_heads == 4


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"use_sliding_window": False, "sliding_window": 8, "max_window_layers": 0}, (None,) * 4),
        ({"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 3}, (None, None, None, 8)),
        ({"use_sliding_window": True, "sliding_window": 8}, (None,) * 4),
        ({"use_sliding_window": True, "sliding_window": None, "max_window_layers": 0}, (None,) * 4),
        ({"use_sliding_window": True, "max_window_layers": 1}, (None, 4096, 4096, 4096)),
        (
            {"use_sliding_window": True, "sliding_window": 8, "layer_types": [SLIDING, FULL, SLIDING, FULL]},
            (8, None, 8, None),
        ),
        ({"layer_types": [FULL] * 4}, (None,) * 4),
    ],
)
@pytest.mark.parametrize("architecture", ["Qwen3ForCausalLM", "Qwen2ForCausalLM"])
def test_qwen_windows_are_those_of_transformers(
    tmp_path: Path, architecture: str, fields: dict[str, Any], expected: tuple[int | None, ...]
) -> None:
    theirs = AutoConfig.for_model(MODEL_TYPES[architecture], num_hidden_layers=4, **fields)
    windows = tuple(theirs.sliding_window if kind == SLIDING else None for kind in theirs.layer_types)
    assert read(tmp_path, architecture, **fields).decoder.sliding_windows == expected == windows


def test_mistral_and_qwen_moe_have_one_window_for_all_layers(tmp_path: Path) -> None:
    assert read(tmp_path, "MistralForCausalLM", sliding_window=8).decoder.sliding_windows == (8,) * 4
    assert read(tmp_path, "MistralForCausalLM", sliding_window=None).decoder.sliding_windows == (None,) * 4
    moe = {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 28}
    assert read(tmp_path, "Qwen3MoeForCausalLM", **moe).decoder.sliding_windows == (8,) * 4


def test_llama_biases_are_what_the_config_says(tmp_path: Path) -> None:
    decoder = read(tmp_path, "LlamaForCausalLM", attention_bias=True, mlp_bias=True).decoder
    assert (decoder.output_bias, decoder.mlp_bias) == (True, True)
    decoder = read(tmp_path, "MistralForCausalLM", attention_bias=True, mlp_bias=True).decoder
    assert (decoder.output_bias, decoder.mlp_bias) == (False, False), "Mistral reads neither field"


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, (True,) * 4),
        ({"decoder_sparse_step": 2}, (False, True, False, True)),
        ({"mlp_only_layers": [0, 3]}, (False, True, True, False)),
        ({"mlp_only_layers": [1], "decoder_sparse_step": 2}, (False, False, False, True)),
    ],
)
def test_experts_are_in_the_layers_that_the_config_says(tmp_path: Path, fields: dict[str, Any], expected: Any) -> None:
    own = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "norm_topk_prob": True}
    moe = read(tmp_path, "Qwen3MoeForCausalLM", **own, **fields).decoder.moe
    assert moe is not None
    assert moe.sparse_layers == expected
    assert (moe.num_experts, moe.experts_per_token, moe.intermediate_size, moe.norm_topk_prob) == (8, 2, 24, True)


def test_missing_fields_of_experts_take_the_defaults_of_transformers(tmp_path: Path) -> None:
    moe = read(tmp_path, "Qwen3MoeForCausalLM").decoder.moe
    assert moe is not None
    assert (moe.num_experts, moe.experts_per_token, moe.intermediate_size, moe.norm_topk_prob) == (128, 8, 768, False)


def test_gpt_oss_takes_the_defaults_of_transformers(tmp_path: Path) -> None:
    theirs = AutoConfig.for_model("gpt_oss")
    decoder = read(tmp_path, "GptOssForCausalLM").decoder
    yarn, rope, moe = theirs.rope_parameters, decoder.rope, decoder.moe
    assert (rope.factor, rope.truncate) == (yarn["factor"], yarn["truncate"])
    assert rope.original_max_positions == yarn["original_max_position_embeddings"]
    assert (rope.beta_fast, rope.beta_slow) == (yarn["beta_fast"], yarn["beta_slow"])
    assert moe is not None
    assert moe.swiglu is not None
    assert (moe.swiglu.alpha, moe.swiglu.limit) == (theirs.swiglu_alpha, theirs.swiglu_limit)
    assert (moe.num_experts, moe.experts_per_token) == (theirs.num_local_experts, theirs.num_experts_per_tok)
    assert (decoder.qkv_bias, decoder.output_bias, decoder.sinks) == (True, True, True)


def test_gpt_oss_is_read_as_openai_publishes_it(tmp_path: Path) -> None:
    """The fields of openai/gpt-oss-20b that matter, with fewer layers."""
    scaling = {"beta_fast": 32.0, "beta_slow": 1.0, "factor": 32.0, "original_max_position_embeddings": 4096}
    spec = read(
        tmp_path,
        "GptOssForCausalLM",
        attention_bias=True,
        experts_per_token=4,
        head_dim=64,
        hidden_size=2880,
        initial_context_length=4096,
        intermediate_size=2880,
        layer_types=[SLIDING, FULL, SLIDING, FULL],
        max_position_embeddings=131072,
        num_attention_heads=64,
        num_experts_per_tok=4,
        num_key_value_heads=8,
        num_local_experts=32,
        quantization_config={"modules_to_not_convert": ["model.layers.*.self_attn"], "quant_method": "mxfp4"},
        rms_norm_eps=1e-05,
        rope_scaling={**scaling, "rope_type": "yarn", "truncate": False},
        rope_theta=150000,
        sliding_window=128,
        swiglu_limit=7.0,
    )
    decoder = spec.decoder
    assert decoder.sliding_windows == (128, None, 128, None)
    assert (decoder.rope.theta, decoder.rope.factor, decoder.rope.truncate) == (150000.0, 32.0, False)
    assert decoder.moe is not None
    assert decoder.moe.mxfp4
    assert (decoder.moe.num_experts, decoder.moe.experts_per_token) == (32, 4)
    assert decoder.max_len == 131072


def test_gemma_4_takes_the_defaults_of_transformers(tmp_path: Path) -> None:
    theirs = AutoConfig.for_model("gemma4_text", num_hidden_layers=6, allow_global_per_layer_attribute_access=True)
    missing = {"num_key_value_heads": ..., "head_dim": ...}
    plain = {"hidden_size_per_layer_input": 0, "num_attention_heads": 8, "num_hidden_layers": 4}
    spec = read(tmp_path, "Gemma4ForCausalLM", **plain, **missing)
    decoder = spec.decoder
    assert decoder.gemma4 is not None
    assert spec.tie_word_embeddings == theirs.tie_word_embeddings
    assert (decoder.num_kv_heads, decoder.head_dim) == (theirs.num_key_value_heads, theirs.head_dim)
    assert (decoder.max_len, decoder.rms_norm_eps) == (theirs.max_position_embeddings, theirs.rms_norm_eps)
    assert decoder.sliding_windows == (theirs.sliding_window,) * 3 + (None,)
    assert decoder.gemma4.global_layers == (False, False, False, True)
    whole = theirs.per_layer_config["full_attention"]
    assert (decoder.gemma4.num_kv_heads, decoder.gemma4.head_dim) == (whole.num_key_value_heads, whole.head_dim)
    assert (decoder.gemma4.keys_are_values, decoder.gemma4.softcap, decoder.moe) == (False, None, None)
    sliding, own = (theirs.rope_parameters[kind] for kind in (SLIDING, FULL))
    assert (decoder.rope.theta, decoder.rope.kind) == (sliding["rope_theta"], sliding["rope_type"])
    rope = decoder.gemma4.rope
    assert (rope.theta, rope.kind) == (own["rope_theta"], own["rope_type"])
    assert rope.share == own["partial_rotary_factor"]
    # Layers of two kinds keep KV of two shapes.
    assert [cache.token_shape for cache in decoder.caches] == [(2, 4, 256)] * 3 + [(2, 4, 512)]
    assert decoder.head_dims == {256, 512}


def test_gemma_4_12b_takes_the_defaults_of_its_own_class(tmp_path: Path) -> None:
    theirs = AutoConfig.for_model("gemma4_unified_text", num_hidden_layers=4)
    decoder = read(tmp_path, "Gemma4UnifiedForCausalLM", num_attention_heads=8).decoder
    assert decoder.max_len == theirs.max_position_embeddings
    assert decoder.sliding_windows == (theirs.sliding_window,) * 3 + (None,)
    with pytest.raises(CheckpointError, match="'hidden_size_per_layer_input' is 256; expected 0"):
        read(tmp_path, "Gemma4UnifiedForCausalLM", num_attention_heads=8, hidden_size_per_layer_input=256)


def test_gemma_4_is_read_as_google_publishes_it(tmp_path: Path) -> None:
    """The fields of a 31B that matter, with fewer layers, and as `transformers` saves the same heads."""
    fields = {
        "attention_k_eq_v": True,
        "final_logit_softcapping": 30.0,
        "head_dim": 256,
        "hidden_activation": "gelu_pytorch_tanh",
        "hidden_size_per_layer_input": 0,
        "layer_types": [SLIDING, SLIDING, FULL, SLIDING],
        "num_attention_heads": 32,
        "num_key_value_heads": 16,
        "num_kv_shared_layers": 0,
        "sliding_window": 1024,
        "use_bidirectional_attention": "vision",
    }
    published = read(tmp_path, "Gemma4ForCausalLM", **fields, global_head_dim=512, num_global_key_value_heads=4)
    own = published.decoder.gemma4
    assert own is not None
    assert (own.num_kv_heads, own.head_dim, own.keys_are_values, own.softcap) == (4, 512, True, 30.0)
    # The last layer sees everything, whatever the file says.
    assert own.global_layers == (False, False, True, True)
    heads = {"head_dim": 512, "num_key_value_heads": 4}
    saved = read(tmp_path, "Gemma4ForCausalLM", **fields, per_layer_config={"2": heads, "3": heads})
    assert saved.decoder == published.decoder
    described = dict(target_facts(published))
    assert "in layers with a window" in described["heads"]
    assert described["layers that see everything"].startswith("2, with 4 heads of size 512 for keys, whose values are")
    assert described["logits"] == "soft-capped at 30"


def with_weights(directory: Path, fields: dict[str, Any], *parts: tuple[torch.dtype, int]) -> TargetSpec:
    """The config of `read` beside weights of these dtypes and numbers of elements, and a large tensor of integers."""
    read(directory, **fields)
    tensors = {f"model.layers.{i}.x": torch.zeros(1000, dtype=torch.int32) for i in range(4)}
    parts = tuple((dtype, size) for dtype, size in parts if size)
    tensors |= {f"model.part{i}.weight": torch.zeros(size, dtype=dtype) for i, (dtype, size) in enumerate(parts)}
    # Scales of quantised weights say nothing of what the model was saved in.
    tensors["model.layers.0.mlp.up_proj.weight_scale_inv"] = torch.zeros(500)
    save_file(tensors, directory / "model.safetensors")
    return read_target(directory)


@pytest.mark.parametrize("fields", [{}, {"dtype": "auto"}, {"torch_dtype": "auto"}, {"dtype": "torch.auto"}])
@pytest.mark.parametrize(("dtype", "name"), [(getattr(torch, name), name) for name in DTYPES])
def test_a_dtype_that_no_field_says_is_that_of_the_weights(
    tmp_path: Path, fields: dict[str, Any], dtype: torch.dtype, name: str
) -> None:
    """openai/gpt-oss-20b says none."""
    spec = with_weights(tmp_path, fields, (dtype, 10))
    assert (spec.dtype, spec.notes) == (name, ())


def test_of_weights_of_several_dtypes_that_with_the_most_bytes_counts_and_is_said(tmp_path: Path) -> None:
    most = with_weights(tmp_path, {}, (torch.float32, 40), (torch.bfloat16, 100))
    assert most.dtype == "bfloat16"
    assert ["0.00 MiB of bfloat16, 0.00 MiB of float32: bfloat16, that of the most bytes" in x for x in most.notes] == [
        True
    ]
    # 60 numbers of 4 bytes are more than 100 of 2.
    assert with_weights(tmp_path, {}, (torch.float32, 60), (torch.bfloat16, 100)).dtype == "float32"
    said = with_weights(tmp_path, {"dtype": "float16"}, (torch.float32, 60), (torch.bfloat16, 100))
    assert (said.dtype, said.notes) == ("float16", ())


SPELLINGS = {
    "float32": ("float32", "torch.float32", "float", "torch.float", "fp32", "F32", "FLOAT32"),
    "bfloat16": ("bfloat16", "torch.bfloat16", "bf16", "BF16"),
    "float16": ("float16", "torch.float16", "half", "torch.half", "fp16", "FP16", "f16"),
}


@pytest.mark.parametrize(("name", "spelling"), [(name, each) for name, all_of in SPELLINGS.items() for each in all_of])
def test_the_dtype_is_read_under_both_names_and_in_every_spelling(tmp_path: Path, name: str, spelling: str) -> None:
    for field in ("dtype", "torch_dtype"):
        assert read(tmp_path, **{field: spelling}).dtype == name


@pytest.mark.parametrize("value", ["float64", "int8", "float8_e4m3fn", "", 16, ["bfloat16"]])
def test_other_dtypes_are_refused_with_those_that_there_are(tmp_path: Path, value: Any) -> None:
    with pytest.raises(CheckpointError, match="'dtype' is .*; expected (one of float32, bfloat16, float16|a string)"):
        read(tmp_path, dtype=value)


def test_fields_that_contradict_each_other_are_said(tmp_path: Path) -> None:
    spec = read(tmp_path, dtype="float16", torch_dtype="bf16")
    assert (spec.dtype, spec.notes) == ("float16", ("dtype is float16 and is used; torch_dtype is bfloat16",))
    assert read(tmp_path, dtype="float16", torch_dtype="half").notes == ()
    spec = with_weights(tmp_path, {"dtype": "auto", "torch_dtype": "bfloat16"}, (torch.float16, 10))
    note = "dtype is auto: float16, that of the weights, is used; torch_dtype is bfloat16"
    assert (spec.dtype, spec.notes) == ("float16", (note,))
    assert with_weights(tmp_path, {"dtype": "auto", "torch_dtype": "half"}, (torch.float16, 10)).notes == ()


def test_fields_of_rotary_scaling_that_are_not_read_are_said(tmp_path: Path) -> None:
    spec = read(tmp_path, rope_scaling={"rope_type": "linear", "factor": 2.0, "attn_factor": 0.5})
    assert "rope_scaling.attn_factor = 0.5" in dict(target_facts(spec))["warning"]


YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}


@pytest.mark.parametrize(
    ("architecture", "own", "changed"),
    [
        ("Qwen3ForCausalLM", {"rope_theta": 1e6, "rope_scaling": None}, {"rope_scaling": YARN}),
        (
            "LlamaForCausalLM",
            {"rope_parameters": {"rope_theta": 5e5, "rope_type": "linear", "factor": 2.0}},
            {"rope_parameters": {"rope_theta": 5e5} | YARN},
        ),
        (
            "Qwen3_5ForCausalLM",
            {"rope_parameters": {"rope_theta": 1e7, "partial_rotary_factor": 0.5, "mrope_section": [2, 1, 1]}},
            {"rope_parameters": {"rope_theta": 1e7, "partial_rotary_factor": 0.5} | YARN},
        ),
        (
            "Qwen2ForCausalLM",
            {"original_max_position_embeddings": 4096, "rope_scaling": {"type": "linear", "factor": 8.0}},
            {"original_max_position_embeddings": None, "rope_scaling": YARN},
        ),
    ],
)
def test_the_setting_rope_scaling_is_as_if_the_file_said_it(
    tmp_path: Path, architecture: str, own: dict[str, Any], changed: dict[str, Any]
) -> None:
    expected = read(tmp_path, architecture, max_position_embeddings=40960, **own | changed).decoder
    plain = read(tmp_path, architecture, max_position_embeddings=40960, **own).decoder
    found = read_target(tmp_path, YARN).decoder
    assert found == expected != plain
    assert found.max_len == 131072


@pytest.mark.parametrize(
    ("architecture", "scaling", "expected"),
    [
        ("Qwen3ForCausalLM", {"factor": 4.0}, "'rope_type' is missing; expected one of default"),
        ("Qwen3ForCausalLM", {"rope_type": "longrope"}, "'rope_type' is 'longrope'; expected one of default"),
        ("Qwen3ForCausalLM", {"rope_type": "yarn", "facto": 4}, "'facto' is 4; expected no such field: yarn has "),
        ("Qwen3ForCausalLM", {"rope_type": "linear"}, "with the setting rope_scaling: rope_parameters: field 'factor'"),
        ("Qwen3ForCausalLM", {"full_attention": YARN}, "'rope_type' is missing"),
        (GEMMA, YARN, "Gemma 4 has one for each kind of layer: leave it out"),
    ],
)
def test_a_rope_scaling_that_would_be_misread_is_refused(
    tmp_path: Path, architecture: str, scaling: dict[str, Any], expected: str
) -> None:
    read(tmp_path, architecture, **PLAIN)
    with pytest.raises(CheckpointError, match=expected) as caught:
        read_target(tmp_path, scaling)
    assert "rope_scaling" in str(caught.value)


def test_a_target_of_dual_chunk_attention_ends_where_its_chunks_begin(tmp_path: Path) -> None:
    """Qwen2.5-7B-Instruct-1M: beyond, it was meant for other distances than those of the usual attention."""
    chunks = {"chunk_size": 262144, "local_size": 8192, "original_max_position_embeddings": 262144}
    fields = {"max_position_embeddings": 1010000, "dual_chunk_attention_config": chunks}
    spec = read(tmp_path, "Qwen2ForCausalLM", **fields)
    assert spec.decoder.max_len == 262144
    assert "beyond 262144 positions, which is not built" in dict(target_facts(spec))["warning"]
    plain = read(tmp_path, "Qwen2ForCausalLM", **fields | {"dual_chunk_attention_config": None})
    assert (plain.decoder.max_len, plain.notes) == (1010000, ())
    del chunks["original_max_position_embeddings"]
    with pytest.raises(CheckpointError, match="dual_chunk_attention_config: field 'original_max_position_embedding"):
        read(tmp_path, "Qwen2ForCausalLM", **fields)


def test_another_architecture_is_refused_with_the_list(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="GemmaForCausalLM.*this server runs " + ", ".join(TARGET_ARCHITECTURES)):
        read(tmp_path, "GemmaForCausalLM")


def test_code_of_a_checkpoint_is_ignored_where_the_architecture_is_known(tmp_path: Path) -> None:
    auto_map = {"AutoModel": "modeling.Model"}
    assert read(tmp_path, auto_map=auto_map).architecture == "Qwen3ForCausalLM"
    with pytest.raises(CheckpointError, match=r"auto_map\) is not run"):
        read(tmp_path, "MyForCausalLM", auto_map=auto_map)


@pytest.mark.parametrize(
    ("architecture", "fields", "expected"),
    [
        ("Qwen3ForCausalLM", {"quantization_config": {"quant_method": "gguf"}}, "quantised weights are not supported"),
        ("LlamaForCausalLM", {"hidden_act": "gelu"}, "'hidden_act' is 'gelu'; expected 'silu'"),
        ("LlamaForCausalLM", {"partial_rotary_factor": 0.5}, "'partial_rotary_factor' is 0.5"),
        ("LlamaForCausalLM", {"final_logit_softcapping": 30.0}, "soft-capping of logits"),
        ("LlamaForCausalLM", {"attn_logit_softcapping": 50.0}, "soft-capping of attention scores"),
        ("Qwen3ForCausalLM", {"attention_sink_bias": True}, "attention sinks"),
        ("Qwen3ForCausalLM", {"layer_types": [SLIDING] * 4}, "'layer_types' is .*give no window"),
        ("Qwen3ForCausalLM", {"layer_types": [FULL]}, "each of the 4 layers"),
        ("Qwen3ForCausalLM", {"layer_types": ["chunked_attention"] * 4}, "each of the 4 layers"),
        ("LlamaForCausalLM", {"layer_types": [SLIDING] * 4}, "this family does not mix layers"),
        ("MistralForCausalLM", {"sliding_window": 8, "layer_types": [SLIDING, FULL] * 2}, "does not mix layers"),
        ("Qwen3MoeForCausalLM", {"num_experts": 2, "num_experts_per_tok": 3}, "'num_experts_per_tok' is 3"),
        ("Qwen3MoeForCausalLM", {"mlp_only_layers": [4]}, "'mlp_only_layers' is .4.; expected layers below"),
        ("GptOssForCausalLM", {"sliding_window": None}, "'sliding_window' is missing; expected a number of positions"),
        ("GptOssForCausalLM", {"swiglu_limit": -1}, "'swiglu_limit' is -1; expected a number above 0"),
        ("GptOssForCausalLM", {"num_local_experts": 3}, "'num_experts_per_tok' is missing"),
        ("GptOssForCausalLM", {"quantization_config": {"quant_method": "hqq"}}, "quantised weights are not supported"),
        ("Qwen3MoeForCausalLM", {"quantization_config": {"quant_method": "mxfp4"}}, "quantised weights are not"),
        (GEMMA, {}, "'hidden_size_per_layer_input' is missing; expected 0: embeddings of each layer's own"),
        (GEMMA, {"hidden_size_per_layer_input": 256}, "'hidden_size_per_layer_input' is 256; expected 0"),
        (GEMMA, PLAIN | {"num_kv_shared_layers": 2}, "'num_kv_shared_layers' is 2; expected 0: KV that layers share"),
        (GEMMA, PLAIN | {"use_bidirectional_attention": "all"}, "a target's text is causal"),
        (GEMMA, PLAIN | {"hidden_activation": "silu"}, "'hidden_activation' is 'silu'; expected 'gelu_pytorch_tanh'"),
        (GEMMA, PLAIN | {"attn_logit_softcapping": 50.0}, "soft-capping of attention scores"),
        (GEMMA, PLAIN | {"layer_types": [SLIDING, "linear_attention"] * 2}, "for each of the 4 layers"),
        (GEMMA, PLAIN | {"global_head_dim": 33}, "'global_head_dim' is 33; expected an even number"),
        (
            GEMMA,
            PLAIN | {"attention_k_eq_v": True, "num_global_key_value_heads": 3},
            "a divisor of num_attention_heads",
        ),
        (GEMMA, PLAIN | {"rope_parameters": {"rope_type": "default"}}, "an object for each layer type"),
        (
            GEMMA,
            PLAIN | {"rope_parameters": {FULL: PROPORTIONAL | {"partial_rotary_factor": 1e-4}}},
            "one pair at least",
        ),
        (GEMMA, PLAIN | {"rope_parameters": {SLIDING: {"rope_type": "longrope"}}}, "'rope_type' is 'longrope'"),
        (GEMMA, PLAIN | {"per_layer_config": {"0": {"head_dim": 8}}}, "the same for each layer of 'full_attention'"),
        (GEMMA, PLAIN | {"per_layer_config": {"3": {"num_attention_heads": 8}}}, "only heads may differ"),
        (GEMMA, PLAIN | {"enable_moe_block": True}, "'num_experts' is missing"),
        (GEMMA, PLAIN | {"final_logit_softcapping": -1}, "'final_logit_softcapping' is -1"),
        ("Qwen3ForCausalLM", {"head_dim": 15}, "an even number"),
        ("LlamaForCausalLM", {"head_dim": None, "num_attention_heads": 6}, "a multiple of num_attention_heads"),
        ("Qwen3ForCausalLM", {"num_hidden_layers": 5}, "'num_hidden_layers' is 5; the weights beside it hold 4"),
        ("Qwen3ForCausalLM", {"max_position_embeddings": 2**31}, "'max_position_embeddings' is 2147483648"),
        ("Qwen3ForCausalLM", {"dtype": "float8_e4m3fn"}, "'dtype' is .*one of float32, bfloat16, float16"),
    ],
)
def test_what_would_be_misread_is_refused(
    tmp_path: Path, architecture: str, fields: dict[str, Any], expected: str
) -> None:
    with pytest.raises(CheckpointError, match=expected) as caught:
        read(tmp_path, architecture, **fields)
    assert str(tmp_path / "config.json") in str(caught.value)
