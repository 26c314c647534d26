"""A model by what a setting calls it: a directory, a file in GGUF, an id of the hub, a name of a package's model."""

from __future__ import annotations

from pathlib import Path

from dflash_backend.checkpoints.files import check_files
from dflash_backend.checkpoints.gguf.reader import SUFFIX, shard_pattern
from dflash_backend.checkpoints.hub import Report, from_hub
from dflash_backend.checkpoints.named import NAMED, named_file
from dflash_backend.checkpoints.spec import CheckpointError
from dflash_backend.error_text import shown


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
    if exists and path.is_file() and path.suffix.lower() == SUFFIX:  # what is no plain file may never end
        return _converted(path, report)
    if exists:
        raise CheckpointError(
            f"{setting} is '{name}', which is a file; expected a model directory, a file in GGUF ({SUFFIX}) or a hub id"
        )
    repository, colon, file = name.partition(":")
    if colon and file.endswith(SUFFIX) and not repository.startswith((".", "/", "~")) and repository.count("/") == 1:
        found = from_hub(repository, setting, revision, report, (shard_pattern(file),)) / file
        if not found.is_file():
            raise CheckpointError(f"{setting} is '{name}', but there is no file {file} in the hub's {repository}")
        return _converted(found, report)
    looks_like_id = name.count("/") == 1 and not name.startswith((".", "/", "~"))
    if not looks_like_id:
        raise CheckpointError(f"{setting} is '{name}', but there is no such directory or file; check the path")
    return from_hub(name, setting, revision, report)
