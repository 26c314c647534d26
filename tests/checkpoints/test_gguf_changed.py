"""GGUF of architectures whose tensors llama.cpp's converter changes, and of drafters: each is what the same checkpoint
is in safetensors."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file as load_torch_file
from safetensors.torch import save_file as save_torch_file

from dflash_backend import LLM
from dflash_backend.checkpoints import CheckpointError, find_model, read_target
from dflash_backend.checkpoints.files import read_header
from dflash_backend.checkpoints.gguf import convert
from dflash_backend.config import asset_path
from dflash_backend.drafters.registry import read_draft
from dflash_backend.models import load_target
from dflash_backend.models.decoder import DecoderTarget
from dflash_backend.text.tokenizer import Tokenizer
from load_tests.prompts import load_prompts
from tests.checkpoints.test_gguf import ARCHITECTURES, cache, copy_target, field, make_gguf, numbers, refused
from tests.support.gguf_checkpoint import as_converter, write_gguf
from tests.support.tiny_models import GEMMA4_EXPERTS, VOCAB_SIZE, make_draft, make_target

__all__ = ["cache"]  # a fixture
# Those whose tensors llama.cpp's converter joins, cuts, turns over or changes.
CHANGED = {
    "qwen3next": ("Qwen3NextForCausalLM", {}),
    "qwen35": ("Qwen3_5ForCausalLM", {}),
    "qwen35moe": ("Qwen3_5MoeForCausalLM", {}),
    "gpt-oss": ("GptOssForCausalLM", {"swiglu_limit": 7.0}),
    "gemma4": ("Gemma4ForCausalLM", {}),
    "gemma4 with experts": ("Gemma4ForCausalLM", GEMMA4_EXPERTS),
}


def make_changed_gguf(path: Path, name: str, changes: dict[str, Any], **options: Any) -> Path:
    """As `make_gguf`, of those in `CHANGED`."""
    source = path.with_suffix(".source")
    copy_target(source, CHANGED[name][0], CHANGED[name][1] | changes)
    write_gguf(path, source, name.split()[0], **options)
    return source


@pytest.mark.parametrize(("name", "tied"), [(name, i % 2 == 0) for i, name in enumerate(CHANGED)])
def test_changed_tensors_are_changed_back(tmp_path: Path, name: str, tied: bool) -> None:
    """Bit for bit, but for norms that were kept with a 1, and for the logarithm of an exponential."""
    source = make_changed_gguf(tmp_path / "m.gguf", name, {"tie_word_embeddings": tied})
    directory = find_model(str(tmp_path / "m.gguf"), "target_model")
    found, expected = read_target(directory), read_target(source)
    assert found.architecture == expected.architecture == CHANGED[name][0]
    assert found.decoder == expected.decoder
    assert (found.vocab_size, found.tie_word_embeddings, found.notes) == (VOCAB_SIZE, tied, ())
    here, there = numbers(directory), numbers(source)
    assert here.keys() == there.keys()
    for tensor in there:
        assert here[tensor].shape == there[tensor].shape, tensor
        rounded = name.startswith("qwen") and tensor.endswith(("norm.weight", "A_log"))
        np.testing.assert_allclose(here[tensor], there[tensor], rtol=0, atol=2e-7 if rounded else 0, err_msg=tensor)


@pytest.mark.parametrize(("name", "kind"), [("qwen35", "F16"), ("qwen3next", "BF16"), ("gpt-oss", "F16")])
def test_changed_tensors_may_be_in_16_bits_and_larger_than_is_read_at_once(
    tmp_path: Path, name: str, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every second tensor, so that some are joined of several types: what is changed or joined so becomes float32."""
    monkeypatch.setattr(convert, "WHOLE_BYTES", 0)
    monkeypatch.setattr(convert, "NUMBERS_AT_ONCE", 100)
    rounded: dict[str, np.ndarray[Any, Any]] = {}

    def block(tensor: str, data: np.ndarray[Any, Any]) -> tuple[np.ndarray[Any, Any], str] | None:
        if (data.ndim == 1 and "norm" not in tensor) or sum(tensor.encode()) % 2:
            rounded[tensor] = data
            return None
        dtype = torch.float16 if kind == "F16" else torch.bfloat16
        halves = torch.tensor(np.ascontiguousarray(data)).to(dtype)
        rounded[tensor] = halves.float().numpy()
        return halves.view(torch.uint8).numpy(), kind

    source = make_changed_gguf(tmp_path / "m.gguf", name, {}, block=block)
    directory = find_model(str(tmp_path / "m.gguf"), "target_model")
    here = {key: each.float().numpy() for key, each in load_torch_file(directory / "model.safetensors").items()}
    back = as_converter(here, {}, name, json.loads((source / "config.json").read_text()))
    assert back.keys() == rounded.keys()
    for tensor, expected in rounded.items():
        np.testing.assert_allclose(back[tensor], expected, rtol=0, atol=2e-7, err_msg=tensor)


@pytest.mark.parametrize("name", [*ARCHITECTURES, *CHANGED])
def test_each_architecture_in_q8_0_is_its_dequantised_weights(tmp_path: Path, name: str) -> None:
    """Quantised where rows have whole blocks of 32. What was read, changed as by the converter, is the file's."""
    quantised: dict[str, np.ndarray[Any, Any]] = {}
    kept = ("norm", "ssm_a", "ssm_conv1d", "ssm_dt", "sinks", "scale", "rope_freqs", "bias")

    def block(tensor: str, data: np.ndarray[Any, Any]) -> tuple[np.ndarray[Any, Any], str] | None:
        if data.ndim == 1 or data.shape[-1] % 32 or any(part in tensor for part in kept):
            return None
        rows = gguf.quants.quantize(np.ascontiguousarray(data), gguf.GGMLQuantizationType.Q8_0)
        quantised[tensor] = gguf.quants.dequantize(rows, gguf.GGMLQuantizationType.Q8_0)
        return rows, "Q8_0"

    changes = {"hidden_size": 64, "intermediate_size": 64}
    if name in ARCHITECTURES:
        source = make_gguf(tmp_path / "m.gguf", name, changes=changes, block=block)
    else:
        changes |= {"moe_intermediate_size": 32} if "moe_intermediate_size" in CHANGED[name][1] or "moe" in name else {}
        source = make_changed_gguf(tmp_path / "m.gguf", name, changes, block=block)
    directory = find_model(str(tmp_path / "m.gguf"), "target_model")
    assert read_target(directory).dtype in ("bfloat16", "float32")  # as most of the bytes say
    config = json.loads((source / "config.json").read_text())
    heads = {"q_proj": 4, "k_proj": 2} if name == "llama" else {}
    back = as_converter(numbers(directory), heads, name.split()[0], config if name in CHANGED else None)
    assert len(quantised) > 20
    for tensor, expected in quantised.items():
        assert np.array_equal(back[tensor], expected), tensor


class Mxfp4:
    """Random blocks of MXFP4 for experts' matrices; `numbers` are what the package makes of them, by tensor. others:
    how names end of tensors that are in Q8_0 instead."""

    def __init__(self, *others: str) -> None:
        self.numbers: dict[str, np.ndarray[Any, Any]] = {}
        self._others, self._rng = others, np.random.default_rng(5)

    def __call__(self, name: str, data: np.ndarray[Any, Any]) -> tuple[np.ndarray[Any, Any], str] | None:
        if not name.endswith(("_exps.weight", *self._others)):
            return None
        kind = "Q8_0" if name.endswith(self._others) else "MXFP4"
        if kind == "Q8_0":
            raw = gguf.quants.quantize(np.ascontiguousarray(data), gguf.GGMLQuantizationType.Q8_0)
        else:
            blocks = self._rng.integers(0, 256, (*data.shape[:-1], data.shape[-1] // 32, 17), np.uint8)
            blocks[..., 0] = self._rng.integers(115, 125, blocks.shape[:-1])
            raw = blocks.reshape(*data.shape[:-1], -1)
        self.numbers[name] = gguf.quants.dequantize(raw, gguf.GGMLQuantizationType[kind])
        return raw, kind


WIDE = {"hidden_size": 64, "intermediate_size": 96}


@pytest.mark.usefixtures("inference_mode")
def test_experts_of_gpt_oss_in_mxfp4_stay_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As OpenAI's checkpoints have them, to the bit; rows are read some at a time, of files and of large tensors."""
    monkeypatch.setattr(convert, "WHOLE_BYTES", 0)
    monkeypatch.setattr(convert, "NUMBERS_AT_ONCE", 1000)
    block = Mxfp4("attn_q.weight", "attn_output.weight")
    make_changed_gguf(tmp_path / "m.gguf", "gpt-oss", WIDE, block=block)
    directory = find_model(str(tmp_path / "m.gguf"), "target_model")
    assert (directory / "model.safetensors").stat().st_size < 1.1 * (tmp_path / "m.gguf").stat().st_size
    spec = read_target(directory)
    assert spec.decoder.moe is not None
    assert spec.decoder.moe.mxfp4
    target = load_target(spec, 64, torch.float32, torch.device("cpu"))
    assert isinstance(target, DecoderTarget)
    for number, layer in enumerate(target.layers):
        gate, up, down = (block.numbers[f"blk.{number}.ffn_{name}_exps.weight"] for name in ("gate", "up", "down"))
        assert np.array_equal(layer.weights.mlp.gate_up.numpy(), np.concatenate([gate, up], axis=1))
        assert np.array_equal(layer.weights.mlp.down.numpy(), down)


@pytest.mark.parametrize("plain", [True, False])
def test_numbers_of_mxfp4_that_does_not_stay_are_bfloat16(tmp_path: Path, plain: bool) -> None:
    """Which holds them exactly: for programs that read numbers alone, and where other experts are of another type."""
    block = Mxfp4(*(() if plain else ("ffn_down_exps.weight",)))
    source = make_changed_gguf(tmp_path / "m.gguf", "gpt-oss", WIDE, block=block)
    directory = convert.converted(tmp_path / "m.gguf", plain=plain)
    moe = read_target(directory).decoder.moe
    assert moe is not None
    assert not moe.mxfp4
    found = load_torch_file(directory / "model.safetensors")
    assert found["model.layers.0.mlp.experts.gate_up_proj"].dtype == torch.bfloat16
    here = {key: each.float().numpy() for key, each in found.items()}
    back = as_converter(here, {}, "gpt-oss", json.loads((source / "config.json").read_text()))
    assert all(np.array_equal(back[name], expected) for name, expected in block.numbers.items())


def test_experts_of_other_architectures_in_mxfp4_keep_their_blocks(tmp_path: Path) -> None:
    block = Mxfp4()
    changes = {"hidden_size": 64, "moe_intermediate_size": 32}
    make_gguf(tmp_path / "m.gguf", "qwen3moe", changes=changes, block=block)
    directory = find_model(str(tmp_path / "m.gguf"), "target_model")
    headers = read_header(directory / "model.safetensors")
    assert {header.blocks for name, header in headers.items() if ".experts." in name} == {"MXFP4"}
    back = as_converter(numbers(directory), {})
    assert all(np.array_equal(back[name], expected) for name, expected in block.numbers.items())


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"dflash_config": {"target_layer_ids": [1, 4], "mask_token_id": 5, "causal": True}},
        {
            "use_sliding_window": True,
            "sliding_window": 5,
            "layer_types": ["sliding_attention", "full_attention"],
            "block_size": 6,
        },
    ],
)
def test_a_drafter_is_the_one_in_safetensors(tmp_path: Path, changes: dict[str, Any]) -> None:
    make_draft(tmp_path / "source", **changes)
    write_gguf(tmp_path / "d.gguf", tmp_path / "source", "dflash")
    make_target(tmp_path / "target")
    target = read_target(tmp_path / "target")
    directory = find_model(str(tmp_path / "d.gguf"), "draft_model")
    found, expected = (read_draft(each, None).for_target(target) for each in (directory, tmp_path / "source"))
    assert found == replace(expected, path=directory, num_target_layers=None)
    here, there = numbers(directory), numbers(tmp_path / "source")
    assert here.keys() == there.keys()
    assert all(np.array_equal(here[name], there[name]) for name in there)


@pytest.mark.nightly
def test_a_drafter_in_gguf_drafts_as_the_one_in_safetensors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The demo pair's, whose drafts are accepted, against a demo target in GGUF as well."""
    pair = asset_path("demo", "pair")
    for name, architecture in (("target", "qwen3"), ("draft", "dflash")):
        (tmp_path / name).mkdir()
        shutil.copy(pair / name / "config.json", tmp_path / name)
        tensors = load_torch_file(pair / name / "model.safetensors")
        save_torch_file({key: each.float() for key, each in tensors.items()}, tmp_path / name / "model.safetensors")
        write_gguf(tmp_path / f"{name}.gguf", tmp_path / name, architecture)
    monkeypatch.chdir(tmp_path)
    prompt = Tokenizer.load(pair / "target").encode(load_prompts(1)[0].prompt)
    runs = []
    for target, draft in (("target.gguf", "draft.gguf"), (str(pair / "target"), str(pair / "draft"))):
        llm = LLM(target=target, draft=draft, dtype="float32", kv_cache_gb=0.02, adaptive_speculation=False)
        (output,) = llm.generate([prompt], max_tokens=40, temperature=0, ignore_eos=True)
        runs.append((output.token_ids, llm.stats().spec_decoding))
    assert runs[0] == runs[1]
    assert runs[0][1].acceptance_length > 4


@pytest.mark.parametrize(
    ("name", "value", "kind", "match"),
    [
        ("dflash.target_layers", [0, 3], "array", "'target_layers' is .*; expected the boundary ids"),
        ("dflash.attention.value_scale", 2.0, "float32", "'attention.value_scale' is 2.0; expected 1"),
        ("dflash.hidden_act", "gelu", "string", "'hidden_act' is 'gelu'; expected silu"),
        (
            "dflash.attention.sliding_window",
            4,
            "uint32",
            "'attention.sliding_window_pattern' is .*for each of 2 layers",
        ),
        ("tokenizer.ggml.mask_token_id", -1, "int32", "'tokenizer.ggml.mask_token_id' is -1"),
    ],
)
def test_a_drafter_that_would_be_misread_is_refused(
    tmp_path: Path, name: str, value: Any, kind: str, match: str
) -> None:
    make_draft(tmp_path / "source")
    write_gguf(tmp_path / "d.gguf", tmp_path / "source", "dflash", fields=field(name, value, kind))
    with pytest.raises(CheckpointError, match=match):
        find_model(str(tmp_path / "d.gguf"), "draft_model")


def test_a_drafter_with_a_markov_head_is_refused_by_its_tensor(tmp_path: Path) -> None:
    make_draft(tmp_path / "source")
    extra = {"markov_w1.weight": np.ones((VOCAB_SIZE, 4), "f4")}
    write_gguf(tmp_path / "d.gguf", tmp_path / "source", "dflash", extra=extra)
    with pytest.raises(CheckpointError, match=r"the tensor 'markov_w1.weight' is none that dflash is known to have"):
        find_model(str(tmp_path / "d.gguf"), "draft_model")


@pytest.mark.parametrize(
    ("name", "add", "match"),
    [
        (
            "qwen35",
            ("ssm.inner_size", 50, "uint32"),
            "'ssm.inner_size' is 50; expected a multiple of ssm.time_step_rank",
        ),
        (
            "qwen35",
            ("ssm.state_size", 9, "uint32"),
            r"the tensor blk.0.attn_qkv.weight has shape \[80, 32\]; expected \[84, 32\]",
        ),
        (
            "qwen35",
            ("ssm.state_size", (1 << 31) - 1, "uint32"),
            r"the tensor blk.0.attn_qkv.weight has shape \[80, 32\]; expected \[\d{10}, 32\]",
        ),
        (
            "qwen35",
            ("ssm.group_count", (1 << 31) - 1, "uint32"),
            r"the tensor blk.0.attn_qkv.weight has shape \[80, 32\]; expected \[\d{11}, 32\]",
        ),
        (
            "qwen3next",
            ("block_count", (1 << 31) - 1, "uint32"),
            "'block_count' is .*; expected an integer from 1 to 16384",
        ),
        ("qwen3next", ("attention.recurrent_layers", [True], "array"), "true or false for each of 5 layers"),
        (
            "gpt-oss",
            ("expert_count", 5, "uint32"),
            r"ffn_gate_exps.weight has shape \[6, 24, 32\]; expected \[5, 24, 32\]",
        ),
        ("gemma4", ("attention.sliding_window_pattern", [True] * 5, "array"), "false for the last layer"),
        ("gemma4", ("attention.head_count_kv", [2, 1, 1, 1, 1], "array"), "one number for all layers that slide"),
        ("gemma4", ("rope.dimension_count_swa", 8, "uint32"), "'rope.dimension_count_swa' is 8; expected 16"),
    ],
)
def test_changed_tensors_that_would_be_misread_are_refused(tmp_path: Path, name: str, add: Any, match: str) -> None:
    make_changed_gguf(tmp_path / "m.gguf", name, {}, fields=field(f"{name}.{add[0]}", *add[1:]))
    refused(tmp_path / "m.gguf", match)


def test_layers_that_draft_the_next_tokens_are_left_out(tmp_path: Path) -> None:
    extra = {"blk.5.nextn.eh_proj.weight": np.ones((32, 64), "f4")}

    def add(writer: gguf.GGUFWriter) -> None:
        field("qwen35.block_count", 6, "uint32")(writer)
        writer.add_uint32("qwen35.nextn_predict_layers", 1)

    source = make_changed_gguf(tmp_path / "m.gguf", "qwen35", {}, fields=add, extra=extra)
    directory = find_model(str(tmp_path / "m.gguf"), "target_model")
    assert numbers(directory).keys() == numbers(source).keys()
    assert read_target(directory).decoder == read_target(source).decoder
