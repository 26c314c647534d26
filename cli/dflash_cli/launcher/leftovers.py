"""Removes what a server that was killed with its guardian has left: its temporary folder and its shared memory.

A container that runs out of memory is killed as a whole, and starts again with the same /tmp and /dev/shm. Each server
has a lock in its folder and one among its shared memory, which it holds while any of its processes lives; only what has
a lock that is free is removed. A process number would not do: a server in another container has numbers of its own.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

from dflash_cli.launcher.guardian import ENV_FOLDERS_FILE

# Newer Tritons protect shared memory whose name begins so from clients that register it.
SEGMENT_PREFIX = "triton_python_backend_shm_region_dflash_"
FOLDER_PREFIX = "dflash-triton-"
LOCK = "lock"
_SEGMENT_LOCK = re.compile(rf"({SEGMENT_PREFIX}\d+_[0-9a-f]{{8}}_){LOCK}")


def hold(lock: Path) -> int | None:
    """Make the file `lock` and lock it: a descriptor, which holds the lock as long as a process has it. None where the
    file system has no space or no locks; then nothing is ever removed. The file is locked before it has its name."""
    new = lock.with_name(f"{lock.name}.new")
    with contextlib.suppress(OSError), contextlib.ExitStack() as on_error:
        descriptor = os.open(new, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
        on_error.callback(os.close, descriptor)
        on_error.callback(new.unlink, missing_ok=True)
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        new.rename(lock)
        on_error.pop_all()
        return descriptor
    return None


def remove_leftovers(parent: Path, shared_memory: Path) -> None:
    """Remove what dead servers of this user have left in `parent`, a folder of temporary files, and `shared_memory`."""
    for lock in shared_memory.glob(f"{SEGMENT_PREFIX}*_{LOCK}"):
        name = _SEGMENT_LOCK.fullmatch(lock.name)
        with _taken(lock) as is_free:
            if name is None or not is_free:
                continue
            for segment in shared_memory.glob(f"{name[1]}*"):
                with contextlib.suppress(OSError):
                    segment.unlink()
    for folder in parent.glob(f"{FOLDER_PREFIX}*"):
        with _taken(folder / LOCK) as is_free:
            if is_free and not folder.is_symlink():
                remove_env_folders(folder)
                shutil.rmtree(folder, ignore_errors=True)


def remove_env_folders(folder: Path) -> None:
    """Remove the environments of Triton that a server has noted in its `folder`. One in use is not empty, and stays."""
    with contextlib.suppress(OSError):
        for path in (folder / ENV_FOLDERS_FILE).read_text(encoding="utf-8").splitlines():
            with contextlib.suppress(OSError):
                os.rmdir(path)


@contextlib.contextmanager
def _taken(lock: Path) -> Iterator[bool]:
    """Take a lock, without waiting; whether it is this user's and was free."""
    try:
        descriptor = os.open(lock, os.O_RDWR | os.O_NOFOLLOW)
    except OSError:
        yield False
        return
    try:
        is_free = os.fstat(descriptor).st_uid == os.geteuid()
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            is_free = False
        yield is_free
    finally:
        os.close(descriptor)
