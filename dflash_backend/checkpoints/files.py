"""Which files of a model directory are read, that they may be, and which tensors they hold.

A checkpoint comes from elsewhere: its links must not lead us to files that are not part of it, and nothing in it is
executed. Every reader of a model directory calls `check_files` first. The safetensors library checks a file's header
against the file when it opens it; no tensor is read here, and torch is not imported.
"""

from __future__ import annotations

import json
import math
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from safetensors import SafetensorError, safe_open

from dflash_backend.checkpoints.gguf.blocks import BLOCKS
from dflash_backend.checkpoints.json_reader import JsonReader
from dflash_backend.checkpoints.spec import CheckpointError
from dflash_backend.checkpoints.tensor_names import EMBEDDING, HEAD, NameLayout, name_here, name_layout
from dflash_backend.error_text import MAX_REASON_CHARS, shown, what_ails

# What we and the tokenizer read, as patterns of a hub download.
MASK_EMBEDDING = "mask_embedding.pt"
TEMPLATES = "*.jinja"
READ_PATTERNS = ("*.json", "*.safetensors", TEMPLATES, "*.txt", "*.model", MASK_EMBEDDING)
# What of these is not read: the hub's `*` matches folders too, of which only that of chat templates is read, and
# Mistral's repositories have the weights a second time.
UNREAD_PATTERNS = (
    *(f"*/{pattern}" for pattern in READ_PATTERNS if pattern != TEMPLATES),
    "consolidated*.safetensors",
)
TEMPLATE_FOLDER = "additional_chat_templates"

PICKLED = (".bin", ".pt", ".pth", ".ckpt", ".pkl")
# Of a file's metadata: which tensors are blocks of which type of GGUF, as JSON.
GGUF_BLOCKS = "gguf_blocks"
INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"

# Bytes of an element of the types that are loaded, by their names in safetensors.
DTYPE_BYTES = {"F32": 4, "BF16": 2, "F16": 2, "I64": 8, "I32": 4, "U8": 1, "I8": 1, "F8_E4M3": 1}
FLOATS = {"F32", "BF16", "F16"}
MAX_NAMED = 4  # of files, in an error
COMPARED_NUMBERS = 1 << 22  # at once


@dataclass(frozen=True)
class TensorHeader:
    """One tensor: the file that it lies in, its dtype as safetensors names it, its shape, its name in the file.

    blocks: the type of GGUF that its rows are stored in, as bytes; empty where they are numbers. `dtype` and `shape`
    are those of the numbers in any case.
    """

    file: Path
    dtype: str
    shape: tuple[int, ...]
    name: str
    blocks: str = ""

    @property
    def num_bytes(self) -> int:
        """Size of its data. Raises `KeyError` for a type that is not loaded."""
        if self.blocks:
            numbers, num_bytes = BLOCKS[self.blocks]
            return math.prod(self.shape) // numbers * num_bytes
        return math.prod(self.shape) * DTYPE_BYTES[self.dtype]


def num_weights(name: str, header: TensorHeader) -> int:
    """How many numbers a tensor becomes in memory: a byte of MXFP4 two, its scales none."""
    numbers = math.prod(header.shape)
    if header.dtype != "U8":
        return numbers
    return 2 * numbers if name.endswith("_blocks") else 0


def check_files(directory: Path) -> None:
    """Check that every file that may be read is a plain file in the directory or in the hub's cache, whose snapshots
    are links to its blobs. Raises `CheckpointError` with the link and where it leads."""
    home = directory.resolve()
    gguf = sorted(path.name for path in directory.glob("*.gguf"))
    if gguf and not any(directory.glob("*.safetensors")):
        names = ", ".join(gguf[:MAX_NAMED]) + (" and others" if len(gguf) > MAX_NAMED else "")
        raise CheckpointError(
            f"{directory} has weights in GGUF alone ({names}): give the file itself, as in {directory / gguf[0]}"
        )
    for path in _readable(directory):
        try:
            real = path.resolve()
            mode = real.stat().st_mode
        except FileNotFoundError:
            raise CheckpointError(f"{path} is a link to {path.readlink()}, which does not exist") from None
        except (OSError, RuntimeError) as error:  # RuntimeError: links in a circle
            raise CheckpointError(f"{path} cannot be followed to a file: {error}") from None
        if not (real.is_relative_to(home) or real.is_relative_to(_hub_cache())):
            raise CheckpointError(
                f"{path} is a link that leads to {real}, outside the model directory and the hub cache "
                f"({_hub_cache()}); copy the file into the directory"
            )
        if not (stat.S_ISREG(mode) or (path.name == TEMPLATE_FOLDER and stat.S_ISDIR(mode))):
            raise CheckpointError(f"{path} is no plain file; a model directory holds plain files")


def _readable(directory: Path) -> Iterator[Path]:
    try:
        for pattern in READ_PATTERNS:
            yield from directory.glob(pattern)
        templates = directory / TEMPLATE_FOLDER
        if templates.is_symlink() or templates.is_dir():
            yield templates
            yield from templates.glob("*.jinja")
    except OSError as error:
        raise CheckpointError(f"{directory} cannot be listed: {error.strerror}") from None


def _hub_cache() -> Path:
    from huggingface_hub.constants import HF_HUB_CACHE

    return Path(HF_HUB_CACHE).expanduser().resolve()


def weight_files(directory: Path) -> list[Path]:
    """The safetensors files of a checkpoint: those of its index where it has one, else `model.safetensors`, else all
    of them. Raises `CheckpointError`, by name where there are only pickled weights."""
    index = directory / INDEX
    if index.is_file():
        return _indexed_files(directory, JsonReader.load(index))
    if (directory / SINGLE).is_file():
        return [directory / SINGLE]
    files = sorted(directory.glob("*.safetensors"))
    if files:
        return files
    names = [path.name for path in directory.glob("*")] + _names_at_the_hub(directory)
    pickled = sorted(name for name in names if Path(name).suffix in PICKLED and name != MASK_EMBEDDING)
    if pickled:
        raise CheckpointError(
            f"{directory} has pickled weights only ({pickled[0]}); loading them could run code, so only .safetensors "
            "files are loaded: convert the checkpoint"
        )
    raise CheckpointError(f"{directory} has no .safetensors file; other weight formats are not loaded")


def number_files(directory: Path) -> list[Path]:
    """All files of a checkpoint that have numbers of the model: its weights, and a drafter's `MASK_EMBEDDING`. Raises
    `CheckpointError`."""
    mask = directory / MASK_EMBEDDING
    return [*weight_files(directory), *([mask] if mask.is_file() else [])]


def _names_at_the_hub(directory: Path) -> list[str]:
    """What the hub has of the model of a snapshot, outside folders, as its cache says; none for another directory."""
    if len(directory.parts) < 4 or directory.parent.name != "snapshots":
        return []
    kind, *owner_and_name = directory.parents[1].name.split("--", 2)
    try:
        from huggingface_hub import get_cached_repo_tree
        from huggingface_hub.errors import CachedRepoTreeNotFoundError
    except ImportError:  # an older library
        return []
    try:
        name, cache = "/".join(owner_and_name), directory.parents[2]
        files = get_cached_repo_tree(name, revision=directory.name, cache_dir=cache) if kind == "models" else []
    except (OSError, ValueError, CachedRepoTreeNotFoundError):
        return []
    return [file.path for file in files if "/" not in file.path]


def _indexed_files(directory: Path, index: JsonReader) -> list[Path]:
    weight_map = index.object("weight_map", required=True)
    names = sorted({weight_map.string(key) for key in weight_map.data})
    if not names:
        raise CheckpointError(f"{index.where}: 'weight_map' is empty; expected the file of every tensor")
    for name in names:
        if Path(name).name != name or not name.endswith(".safetensors") or "\0" in name:
            raise CheckpointError(
                f"{index.where}: {shown(name)} is no file name of a safetensors file in this directory"
            )
        if not (directory / name).is_file():
            raise CheckpointError(f"{directory / name} is named by {INDEX} but does not exist")
    return [directory / name for name in names]


def read_headers(directory: Path) -> dict[str, TensorHeader]:
    """The tensors of a checkpoint, name -> header, by the names of `tensor_names`, whatever prefix the files have.
    Raises `CheckpointError` where a file is broken or a name occurs twice."""
    tensors: dict[str, TensorHeader] = {}
    for file in weight_files(directory):
        for name, tensor in read_header(file).items():
            if name in tensors:
                raise CheckpointError(f"{file}: tensor '{name}' is in {tensors[name].file.name} as well")
            tensors[name] = tensor
    config = directory / "config.json"
    layout = name_layout(JsonReader.load(config)) if config.is_file() else None
    return tensors if layout is None else _named(tensors, layout)


def _named(headers: dict[str, TensorHeader], layout: NameLayout) -> dict[str, TensorHeader]:
    """The tensors by the names of `layout`. Each header keeps the name that its file has. Raises `CheckpointError`
    where two would have the same name."""
    found: dict[str, TensorHeader] = {}
    for stored, header in headers.items():
        name = name_here(stored, layout)
        if name in found:
            raise CheckpointError(
                f"{header.file}: tensors '{found[name].name}' and '{stored}' are both '{name}' once the prefixes of "
                "their names are taken away; expected one of them"
            )
        found[name] = header
    embedding = layout.decoder + EMBEDDING
    if layout.tied and embedding not in found and HEAD in found:
        found[embedding] = found.pop(HEAD)  # one tensor for both, saved by the other name
    return found


def read_header(file: Path) -> dict[str, TensorHeader]:
    """The tensors of one file, name -> header. Raises `CheckpointError`."""
    try:
        with safe_open(file, framework="np") as reader:
            slices = {name: reader.get_slice(name) for name in reader.keys()}  # noqa: SIM118  it is no mapping
            found = {name: TensorHeader(file, s.get_dtype(), tuple(s.get_shape()), name) for name, s in slices.items()}
            stored = (reader.metadata() or {}).get(GGUF_BLOCKS)
    except (SafetensorError, OSError) as error:
        raise broken_file(file, error) from None
    return found if stored is None else found | _in_blocks(file, found, stored)


def _in_blocks(file: Path, headers: dict[str, TensorHeader], stored: str) -> dict[str, TensorHeader]:
    """The headers of the tensors that are blocks of GGUF. stored: the file's metadata `GGUF_BLOCKS`. Raises
    `CheckpointError` where that contradicts the tensors."""
    try:
        kinds = json.loads(stored)
        found = {}
        for name, kind in kinds.items():
            (numbers, num_bytes), header = BLOCKS[kind], headers[name]
            *before, last = header.shape
            if header.dtype != "U8" or not before or last % num_bytes:
                raise ValueError
            found[name] = TensorHeader(file, "F32", (*before, last // num_bytes * numbers), name, kind)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise CheckpointError(
            f"{file}: its metadata '{GGUF_BLOCKS}' is not that of its tensors; convert it again"
        ) from None
    return found


def have_equal_numbers(one: TensorHeader, other: TensorHeader) -> bool:
    """Whether two tensors have the same shape and numbers, whatever float type each has. Raises `CheckpointError` where
    a file is broken."""
    # Blocks of one type are compared by their bytes.
    if one.shape != other.shape or one.blocks != other.blocks or not {one.dtype, other.dtype} <= FLOATS:
        return False
    import torch  # what else is read of files costs no torch

    rows = max(1, COMPARED_NUMBERS // max(1, math.prod(one.shape[1:])))
    try:
        with safe_open(one.file, framework="pt") as first, safe_open(other.file, framework="pt") as second:
            of_one, of_other = first.get_slice(one.name), second.get_slice(other.name)
            return all(
                torch.equal(of_one[at : at + rows].float(), of_other[at : at + rows].float())
                for at in range(0, one.shape[0], rows)
            )
    except (SafetensorError, OSError) as error:
        raise broken_file(one.file, error) from None


def broken_file(file: Path, error: Exception) -> CheckpointError:
    """The error for a file that the safetensors library does not read."""
    reason = str(error).removeprefix("Error while deserializing header: ")
    if len(reason) > MAX_REASON_CHARS:  # it may repeat a name of the header
        reason = reason[:MAX_REASON_CHARS] + "..."
    return CheckpointError(f"{file} cannot be read as safetensors: {reason}; {what_ails(file)}")


def code_files(directory: Path) -> list[str]:
    """The Python files of a checkpoint, which are never run."""
    return sorted(path.name for path in directory.glob("*.py"))


def part_of_bytes(part: int, whole: int) -> str:
    """As in `0.25 of 1.50 GB`, or in MB where the whole has no GB."""
    unit, size = ("GB", 1e9) if whole >= 1e9 else ("MB", 1e6)
    return f"{part / size:.2f} of {whole / size:.2f} {unit}"
