"""Only plain files of the directory, or of the hub's cache, are read; nothing in a checkpoint is executed."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub import constants
from safetensors.torch import load_file, save_file

from dflash_backend.checkpoints import CheckpointError, read_target
from dflash_backend.checkpoints.files import INDEX, check_files, read_header, weight_files
from dflash_backend.config import EngineConfig
from dflash_backend.drafters.registry import read_draft
from dflash_backend.engine.build import LOAD_ERRORS, build_engine
from dflash_backend.text.tokenizer import Tokenizer
from tests.support.tiny_models import make_pair, make_target


@pytest.fixture
def target(tmp_path: Path) -> Path:
    make_target(tmp_path / "t")
    return tmp_path / "t"


@pytest.mark.parametrize("name", ["config.json", "model.safetensors", "tokenizer.json", "chat_template.jinja"])
def test_a_link_out_of_the_directory_is_refused(target: Path, tmp_path: Path, name: str) -> None:
    outside = tmp_path / "secret"
    shutil.copy(target / "config.json", outside)
    (target / name).unlink(missing_ok=True)
    (target / name).symlink_to(outside)
    for read in (read_target, read_draft, Tokenizer.load):
        with pytest.raises(
            CheckpointError, match="a link that leads to .*secret, outside the model directory"
        ) as caught:
            read(target)
        assert str(target / name) in str(caught.value)


def test_a_shard_or_a_template_folder_may_not_lead_out_either(target: Path, tmp_path: Path) -> None:
    (tmp_path / "templates").mkdir()
    (target / "additional_chat_templates").symlink_to(tmp_path / "templates")
    with pytest.raises(CheckpointError, match="additional_chat_templates is a link that leads to"):
        check_files(target)


def test_a_link_within_the_directory_is_fine(target: Path) -> None:
    (target / "model.safetensors").rename(target / "weights")
    (target / "model.safetensors").symlink_to("weights")
    assert read_target(target).vocab_size == 97


def test_snapshots_of_the_hub_cache_are_links_to_its_blobs(
    target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = tmp_path / "hub"
    blobs, snapshot = cache / "models--a--b" / "blobs", cache / "models--a--b" / "snapshots" / "1"
    blobs.mkdir(parents=True)
    snapshot.mkdir(parents=True)
    for i, file in enumerate(sorted(target.iterdir())):
        shutil.copy(file, blobs / str(i))
        (snapshot / file.name).symlink_to(f"../../blobs/{i}")
    with pytest.raises(CheckpointError, match="outside the model directory and the hub cache"):
        read_target(snapshot)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(cache))
    assert read_target(snapshot).vocab_size == 97


@pytest.mark.parametrize(("link", "expected"), [("gone.json", "does not exist"), ("config.json", "cannot be followed")])
def test_a_link_to_nothing_or_to_itself_is_named(target: Path, link: str, expected: str) -> None:
    (target / "config.json").unlink()
    (target / "config.json").symlink_to(link)
    with pytest.raises(CheckpointError, match=rf"config\.json .*{expected}"):
        read_target(target)


def test_a_pipe_is_not_waited_for(target: Path) -> None:
    os.mkfifo(target / "generation_config.jinja")
    with pytest.raises(CheckpointError, match="is no plain file"):
        read_target(target)


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt", "weights.pth"])
def test_pickled_weights_are_refused_by_name(target: Path, name: str) -> None:
    (target / "model.safetensors").unlink()
    (target / name).write_bytes(b"")
    with pytest.raises(CheckpointError, match=f"pickled weights only .{name}.*only .safetensors"):
        read_target(target)


def test_a_mask_embedding_alone_is_no_weight_file(tmp_path: Path) -> None:
    (tmp_path / "mask_embedding.pt").write_bytes(b"")
    with pytest.raises(CheckpointError, match=r"has no \.safetensors file"):
        weight_files(tmp_path)


def test_code_in_a_checkpoint_is_not_run(tmp_path: Path) -> None:
    settings = make_pair(tmp_path, auto_map={"AutoModel": "modeling.Model"}) | {"kv_cache_gb": 0.01}
    ran = tmp_path / "ran"
    for directory in (tmp_path / "t", tmp_path / "d"):
        for name in ("modeling.py", "__init__.py", "tokenization.py"):
            (directory / name).write_text(f"open({str(ran)!r}, 'w')\n")
    said: list[str] = []
    build_engine(EngineConfig.from_values(settings), lambda message, fraction: said.append(message))
    assert not ran.exists()
    assert any("modeling.py" in line and "never run" in line for line in said)


def shard(directory: Path) -> None:
    """Split the weights in two, with an index."""
    tensors = load_file(directory / "model.safetensors")
    names = sorted(tensors)
    parts = {"a.safetensors": names[::2], "b.safetensors": names[1::2]}
    for file, part in parts.items():
        save_file({name: tensors[name] for name in part}, directory / file)
    (directory / "model.safetensors").unlink()
    weight_map = {name: file for file, part in parts.items() for name in part}
    (directory / INDEX).write_text(json.dumps({"weight_map": weight_map}))


def build(target: Path) -> None:
    settings = {"target_model": str(target), "draft_model": "", "kv_cache_gb": 0.01}
    build_engine(EngineConfig.from_values(settings))


def test_sharded_weights_load(target: Path) -> None:
    shard(target)
    build(target)


def break_index(target: Path, weight_map: Any) -> None:
    (target / INDEX).write_text(json.dumps({"weight_map": weight_map}))


@pytest.mark.parametrize(
    ("weight_map", "expected"),
    [
        ({"x": "../t/a.safetensors"}, "'../t/a.safetensors' is no file name"),
        ({"x": "/etc/passwd"}, "'/etc/passwd' is no file name"),
        ({"x": "a.bin"}, "'a.bin' is no file name of a safetensors file"),
        ({"x": "c.safetensors"}, "c.safetensors is named by .* but does not exist"),
        ({"x": 3}, "field 'x' is 3; expected a string"),
        ({}, "'weight_map' is empty"),
        (None, "'weight_map' is missing"),
    ],
)
def test_an_index_may_only_name_files_beside_it(target: Path, weight_map: Any, expected: str) -> None:
    shard(target)
    break_index(target, weight_map)
    with pytest.raises(LOAD_ERRORS, match=expected):
        build(target)


def test_a_tensor_in_two_shards_is_refused(target: Path) -> None:
    shard(target)
    tensors = load_file(target / "a.safetensors")
    name = sorted(tensors)[0]
    save_file(load_file(target / "b.safetensors") | {name: tensors[name]}, target / "b.safetensors")
    with pytest.raises(LOAD_ERRORS, match=rf"b\.safetensors: tensor '{name}' is in a\.safetensors as well"):
        build(target)


def write_safetensors(path: Path, header: Any, data: bytes) -> Path:
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)
    return path


def entry(dtype: Any = "F32", shape: Any = (2,), offsets: Any = (0, 8)) -> dict[str, Any]:
    return {"dtype": dtype, "shape": list(shape), "data_offsets": list(offsets)}


def test_a_header_that_safetensors_writes_is_read(tmp_path: Path) -> None:
    tensors = {
        "a": torch.zeros(2, 3, dtype=torch.bfloat16),
        "b": torch.zeros(4, dtype=torch.int64),
        "c": torch.ones(()),
    }
    save_file(tensors, tmp_path / "x.safetensors", metadata={"format": "pt"})
    found = read_header(tmp_path / "x.safetensors")
    assert {name: (t.dtype, t.shape, t.num_bytes) for name, t in found.items()} == {
        "a": ("BF16", (2, 3), 12),
        "b": ("I64", (4,), 32),
        "c": ("F32", (), 4),
    }


@pytest.mark.parametrize(
    ("header", "data", "expected"),
    [
        ([], b"", "invalid type: sequence"),
        ({"a": 3}, b"", "invalid type: integer `3`"),
        ({"a": entry(dtype="F5")}, bytes(8), "unknown variant `F5`"),
        ({"a": entry(shape=(-2,))}, bytes(8), "invalid value: integer `-2`"),
        ({"a": entry(shape=(2**40,))}, bytes(8), "invalid shape"),
        ({"a": entry(shape=(2**62, 2**62))}, bytes(8), "overflow"),
        ({"a": entry(offsets=(8, 0))}, bytes(8), "invalid offset for tensor `a`"),
        ({"a": entry(offsets=(4, 12))}, bytes(12), "invalid offset for tensor `a`"),
        ({"a": entry(), "b": entry(offsets=(4, 12))}, bytes(12), "invalid offset for tensor `b`"),
        ({"a": entry()}, bytes(4), "file not fully covered"),
        ({"a": entry()}, bytes(12), "file not fully covered"),
    ],
)
def test_a_header_that_lies_is_refused(tmp_path: Path, header: Any, data: bytes, expected: str) -> None:
    file = write_safetensors(tmp_path / "x.safetensors", header, data)
    with pytest.raises(CheckpointError, match=f"cannot be read as safetensors: .*{expected}.*; it is trunc") as caught:
        read_header(file)
    assert str(file) in str(caught.value)


@pytest.mark.parametrize(
    "content", [b"", b"1234567", (2**63).to_bytes(8, "little") + b"{}", bytes(8), b"\2" + bytes(7)]
)
def test_a_header_of_no_length_that_fits_is_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "x.safetensors").write_bytes(content)
    with pytest.raises(CheckpointError, match="truncated or damaged"):
        read_header(tmp_path / "x.safetensors")
