"""A model by what a setting calls it: a directory, a file in GGUF, an id of the hub, a name of a package's model."""

from __future__ import annotations

from pathlib import Path

from dflash_backend.checkpoints.files import check_files
from dflash_backend.checkpoints.gguf.reader import SUFFIX, is_gguf, shard_pattern
from dflash_backend.checkpoints.hub import Report, from_hub
from dflash_backend.checkpoints.named import NAMED, named_file
from dflash_backend.checkpoints.spec import CheckpointError
from dflash_backend.error_text import shown

NO_DRAFTER = ("none", "no", "off", "false", "null")
HUB_ADDRESSES = ("http://", "https://", "hf.co/", "huggingface.co/")


def find_model(name: str, setting: str, revision: str = "", report: Report | None = None) -> Path:
    """The directory of a model, with its files checked. `name`: the directory, or a hub id that the hub or its local
    cache has; a file in GGUF, or `id:file` for one of the hub, which is converted first; or one of `NAMED`. `revision`
    is a branch, a tag or a commit of the hub's. Raises `CheckpointError`."""
    path = _find(name, setting, revision, report)
    check_files(path)
    return path


def _converted(path: Path, report: Report | None) -> Path:
    from dflash_backend.checkpoints.gguf.convert import converted  # with the library of tokenizers

    return converted(path, report)


def _find(name: str, setting: str, revision: str, report: Report | None) -> Path:
    if name in NAMED:
        return _converted(named_file(name), report)
    if not name.strip():
        # Path("") is the folder that one happens to be in.
        raise CheckpointError(f"{setting} is empty; give a model directory, a file in GGUF ({SUFFIX}) or a hub id")
    try:
        path = Path(name).expanduser()
        is_dir, exists = path.is_dir(), path.exists()
    except (OSError, ValueError, RuntimeError) as error:  # too long, a null byte, no such user
        raise CheckpointError(f"{setting} is {shown(name)}, which cannot be a path ({error})") from None
    if exists and revision:
        raise CheckpointError(
            f"{setting} is '{name}', a {'directory' if is_dir else 'file'}, which has no revision '{revision}'; only a "
            "model of the hub has some"
        )
    if is_dir:
        return path
    if exists and path.is_file() and is_gguf(path):  # what is no plain file may never end
        return _converted(path, report)
    if exists:
        raise CheckpointError(
            f"{setting} is '{name}', which is a file; expected a model directory, a file in GGUF ({SUFFIX}) or a hub id"
        )
    if path.is_symlink():
        raise CheckpointError(f"{setting} is '{name}', a link to {path.readlink()}, which does not exist")
    repository, colon, file = name.partition(":")
    if not _looks_like_id(repository):
        raise CheckpointError(
            f"{setting} is '{name}', but there is no such directory or file; {_what_instead(name, setting)}"
        )
    if not colon:
        return from_hub(name, setting, revision, report)
    if not file.lower().endswith(SUFFIX):
        raise CheckpointError(
            f"{setting} is '{name}', and '{file}' names no file in GGUF; expected as in {repository}:FILE{SUFFIX}"
        )
    found = from_hub(repository, setting, revision, report, (shard_pattern(file),)) / file
    if not found.is_file():
        raise CheckpointError(f"{setting} is '{name}', but there is no file {file} in the hub's {repository}")
    return _converted(found, report)


def _looks_like_id(name: str) -> bool:
    return name.count("/") == 1 and not name.startswith((".", "/", "~"))


def _what_instead(name: str, setting: str) -> str:
    """What one may have meant by a name that is neither a path nor an id."""
    if "draft" in setting and name.lower() in NO_DRAFTER:
        return "an empty one ('') is for no speculation"
    if name.lower().startswith(HUB_ADDRESSES) or (
        name.lower().endswith(SUFFIX) and _looks_like_id(Path(name).parent.as_posix())
    ):
        return f"a model of the hub is named OWNER/NAME, and a file in GGUF of it OWNER/NAME:FILE{SUFFIX}"
    return "check the path"
