"""The header of a GGUF file: fields of each type, where tensors begin, and what contradicts itself."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from dflash_backend.checkpoints import CheckpointError, find_model
from dflash_backend.checkpoints.gguf import reader

# How `struct` writes each type of value, in the order of GGUF's numbers for them.
FORMS = ("B", "b", "H", "h", "I", "i", "f", "?", "s", "a", "Q", "q", "d")
F32, Q8_0 = 0, 8


def text(value: str) -> bytes:
    data = value.encode()
    return struct.pack("<Q", len(data)) + data


def entry(form: str, value: Any) -> bytes:
    """A value of the type that `form` names: `as` and the like for an array of it."""
    if form[0] == "a":
        items = b"".join(entry(form[1], item) for item in value)
        return struct.pack("<IQ", FORMS.index(form[1]), len(value)) + items
    return text(value) if form == "s" else struct.pack(f"<{form}", value)


def write(
    path: Path,
    fields: list[tuple[str, str, Any]],
    tensors: Sequence[tuple[str, tuple[int, ...], int, int]] = (),
    size: int = 0,
    alignment: int = 32,
) -> Path:
    """tensors: name, shape (rows first), type and offset of each; `size` bytes of data."""
    data = b"GGUF" + struct.pack("<IQQ", 3, len(tensors), len(fields))
    for name, form, value in fields:
        data += text(name) + struct.pack("<I", FORMS.index(form[0])) + entry(form, value)
    for name, shape, kind, offset in tensors:
        data += text(name) + struct.pack(f"<I{len(shape)}QIQ", len(shape), *shape[::-1], kind, offset)
    path.write_bytes(data + bytes(-len(data) % alignment + size))
    return path


def test_fields_of_each_type_have_the_values_that_were_written(tmp_path: Path) -> None:
    values: dict[str, Any] = {
        "B": 255, "b": -1, "H": 65535, "h": -2, "I": 2**32 - 1, "i": -3, "f": 1e-05, "?": True, "s": "é▁",
        "Q": 2**64 - 1, "q": -(2**63), "d": 0.1,
    }  # fmt: skip
    fields = [(f"one.{form}", form, value) for form, value in values.items()]
    fields += [(f"all.{form}", f"a{form}", [value] * 3) for form, value in values.items()]
    read = reader.read_model(write(tmp_path / "m.gguf", [*fields, ("none", "as", []), ("off", "?", False)])).metadata
    expected = {name: value for name, _, value in fields} | {"none": [], "off": False}
    assert read == expected
    assert {name: type(value) for name, value in read.items()} == {
        name: type(value) for name, value in expected.items()
    }


@pytest.mark.parametrize("alignment", [32, 64, 8, 4096])
def test_tensors_begin_where_the_file_says(tmp_path: Path, alignment: int) -> None:
    fields = [] if alignment == 32 else [("general.alignment", "I", alignment)]
    tensors = [("a", (2, 64), Q8_0, 4 * alignment), ("b", (3,), F32, 0)]
    path = write(tmp_path / "m.gguf", fields, tensors, 4 * alignment + 136, alignment)
    found = reader.read_model(path).tensors
    start = path.stat().st_size - 4 * alignment - 136
    assert start % alignment == 0
    assert {name: (each.kind, each.shape, each.offset, each.num_bytes) for name, each in found.items()} == {
        "a": ("Q8_0", (2, 64), start + 4 * alignment, 136),
        "b": ("F32", (3,), start, 12),
    }


ONE = [("a", (8,), F32, 0)]


@pytest.mark.parametrize(
    ("fields", "tensors", "match"),
    [
        ([("x", "I", 1), ("x", "I", 2)], ONE, "the field 'x' is there twice"),
        ([], [*ONE, ("a", (8,), F32, 32)], "the tensor 'a' is there twice"),
        ([], [*ONE, ("b", (8,), F32, 28)], "the tensor 'b' begins within another"),
        ([], [("b", (8,), F32, 28), ("a", (8,), F32, 0)], "the tensor 'b' begins within another"),
        ([], [("a", (8,), F32, 40)], "the tensor 'a' ends after the file"),
        ([], [("a", (8,), 77, 0)], "the tensor 'a' in type 77, which the package gguf does not know"),
        ([], [("a", (4, 33), Q8_0, 0)], r"the tensor 'a' of Q8_0 has shape \[4, 33\]"),
        ([], [("a", (0, 32), Q8_0, 0)], r"the tensor 'a' of Q8_0 has shape \[0, 32\]"),
        ([], [("a", (1, 1, 1, 1, 1), F32, 0)], "the tensor 'a' has 5 dimensions"),
        ([("general.alignment", "I", 12)], ONE, "general.alignment is 12; expected a multiple of 8"),
        ([("general.alignment", "s", "x")], ONE, "general.alignment is 'x'; expected a multiple of 8"),
        ([("split.count", "H", 2)], ONE, "says that it is one of 2 files, and its name is not that of one"),
        ([("split.tensors.count", "i", 2)], ONE, "its files hold 1 tensors; expected 2, as it says"),
    ],
)
def test_what_contradicts_itself_is_refused(
    tmp_path: Path, fields: Any, tensors: Any, match: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write(tmp_path / "m.gguf", fields, tensors, 64)
    with pytest.raises(CheckpointError, match=match):
        reader.read_model(path)


def test_values_are_counted_over_all_fields(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reader, "MAX_ITEMS", 5)
    reader.read_model(write(tmp_path / "m.gguf", [("x", "aB", [1, 2, 3]), ("y", "as", ["a", "b"])]))
    with pytest.raises(CheckpointError, match="the field 'y' says that it has 3 values"):
        reader.read_model(write(tmp_path / "m.gguf", [("x", "aB", [1, 2, 3]), ("y", "as", ["a", "b", "c"])]))


def test_a_tensor_of_two_files_is_refused(tmp_path: Path) -> None:
    for i in (1, 2):
        write(tmp_path / f"m-0000{i}-of-00002.gguf", [("split.count", "H", 2)], ONE, 32)
    with pytest.raises(CheckpointError, match=r"tensor 'a' is in m-00001-of-00002.gguf as well"):
        reader.read_model(tmp_path / "m-00001-of-00002.gguf")


@pytest.mark.parametrize(
    ("content", "match"),
    [
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:1\n", "it is a pointer of Git LFS .* `git lfs pull`"),
        (
            b"<!DOCTYPE html><html>Not found</html>",
            r"begins with b'<!DO', not with b'GGUF', .*: it is truncated or damaged",
        ),
    ],
)
def test_what_lies_in_place_of_a_file_is_said(tmp_path: Path, content: bytes, match: str) -> None:
    (tmp_path / "m.gguf").write_bytes(content)
    with pytest.raises(CheckpointError, match=match):
        find_model(str(tmp_path / "m.gguf"), "target_model")
