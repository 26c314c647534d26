"""A model by what a setting calls it: a directory, or an id of the hub."""

from __future__ import annotations

from pathlib import Path

from dflash_backend.checkpoints.files import check_files
from dflash_backend.checkpoints.hub import Report, from_hub
from dflash_backend.checkpoints.spec import CheckpointError
from dflash_backend.error_text import shown


def find_model(name: str, setting: str, revision: str = "", report: Report | None = None) -> Path:
    """A directory, or a hub id that the hub or its local cache has, with its files checked. `revision` is a branch, a
    tag or a commit of the hub's. Raises `CheckpointError`."""
    path = _find(name, setting, revision, report)
    check_files(path)
    return path


def _find(name: str, setting: str, revision: str, report: Report | None) -> Path:
    try:
        path = Path(name).expanduser()
        is_dir, exists = path.is_dir(), path.exists()
    except (OSError, ValueError, RuntimeError) as error:  # too long, a null byte, no such user
        raise CheckpointError(f"{setting} is {shown(name)}, which cannot be a path ({error})") from None
    if is_dir and revision:
        raise CheckpointError(
            f"{setting} is '{name}', a directory, which has no revision '{revision}'; only a model of the hub has some"
        )
    if is_dir:
        return path
    if exists:
        raise CheckpointError(f"{setting} is '{name}', which is a file; expected a model directory or a hub id")
    looks_like_id = name.count("/") == 1 and not name.startswith((".", "/", "~"))
    if not looks_like_id:
        raise CheckpointError(f"{setting} is '{name}', but there is no such directory; check the path")
    return from_hub(name, setting, revision, report)
