"""What one running server has outside its processes: a temporary folder, shared memory, and environments of Triton."""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

from dflash_cli.launcher.guardian import ENV_FOLDERS_FILE
from dflash_cli.launcher.leftovers import FOLDER_PREFIX, LOCK, SEGMENT_PREFIX, hold, remove_leftovers
from dflash_cli.launcher.triton_install import LauncherError

SHARED_MEMORY = Path("/dev/shm")
READY_URL_FILE = "ready-url"
# A folder that Triton's Python backend makes as it is loaded, whatever TMPDIR says, and removes when it ends by itself.
PYTHON_ENV_FOLDERS = ("/tmp", "python_env_*")
# The name of a socket has at most 107 characters (`man 7 unix`); the engine's are `dflash-xxxxxxxx/out` in TMPDIR.
LONGEST_FOLDER = 107 - len("/dflash-xxxxxxxx/out")


class ServerFiles:
    """Made before a server is started; `remove` once its processes have ended.

    `folder` holds the model repository and the temporary files of the server's processes; `segment_prefix` begins the
    names of its shared memory. `locks` are descriptors that the server's processes inherit: while one of them lives,
    no other server takes these files for those of a dead one, which it removes. Raises `LauncherError` when the sockets
    in the folder would have too long a name.
    """

    def __init__(self) -> None:
        remove_leftovers(Path(tempfile.gettempdir()), SHARED_MEMORY)
        self.folder = _temporary_folder()
        self.segment_prefix = f"{SEGMENT_PREFIX}{os.getpid()}_{secrets.token_hex(4)}_"
        held = hold(self.folder / LOCK), hold(SHARED_MEMORY / f"{self.segment_prefix}{LOCK}")
        self.locks = [lock for lock in held if lock is not None]
        self._env_folders_before = _env_folders()
        self._env_folders: set[Path] | None = None

    @property
    def heartbeat(self) -> Path:
        """The file that the model touches about once a second, from when it is ready."""
        return self.folder / "heartbeat"

    @property
    def segments_pattern(self) -> str:
        """A glob pattern of the server's shared memory."""
        return str(SHARED_MEMORY / f"{self.segment_prefix}*")

    def _segments(self) -> list[Path]:
        return list(SHARED_MEMORY.glob(f"{self.segment_prefix}*"))

    def write(self, http_url: str, ready_url: str, api_key: str) -> None:
        """Note address and key, for the operator, and the URL that says whether requests are taken, for health checks
        that do not know how the server was started."""
        for name, text in (("http-address", http_url), (READY_URL_FILE, ready_url), ("api-key", api_key)):
            (self.folder / name).write_text(text + "\n", encoding="utf-8")

    def protect(self) -> None:
        """Make the shared memory its owner's alone: prompts lie in it, and Triton makes it readable to all."""
        for segment in self._segments():
            with contextlib.suppress(FileNotFoundError):
                segment.chmod(0o600)

    def note_env_folders(self) -> None:
        """Take the environments that are new for those of this server, and tell the guardian. To be called once a model
        of it loads, or it has failed; the first call counts, since later ones may find those of another server."""
        if self._env_folders is None:
            self._env_folders = _env_folders() - self._env_folders_before
            text = "".join(f"{path}\n" for path in self._env_folders)
            with contextlib.suppress(OSError):
                (self.folder / ENV_FOLDERS_FILE).write_text(text, encoding="utf-8")

    def remove(self) -> None:
        """Remove everything, also what a server that was killed has left. An environment in use is not empty, and so
        stays."""
        for segment in self._segments():
            segment.unlink(missing_ok=True)
        for path in self._env_folders or ():
            with contextlib.suppress(OSError):
                path.rmdir()
        shutil.rmtree(self.folder, ignore_errors=True)
        while self.locks:
            os.close(self.locks.pop())


@contextlib.contextmanager
def noted_ready_url(url: str | None) -> Iterator[None]:
    """Meanwhile a health check finds `url` as it finds that of a server. With None it finds nothing, as where no
    temporary files can be written."""
    with contextlib.ExitStack() as at_end:
        with contextlib.suppress(OSError):
            if url is not None:
                remove_leftovers(Path(tempfile.gettempdir()), SHARED_MEMORY)
                folder = Path(tempfile.mkdtemp(prefix=f"{FOLDER_PREFIX}{os.getpid()}-"))
                at_end.callback(shutil.rmtree, folder, ignore_errors=True)
                if (lock := hold(folder / LOCK)) is not None:
                    at_end.callback(os.close, lock)
                (folder / READY_URL_FILE).write_text(f"{url}\n", encoding="utf-8")
        yield


def _env_folders() -> set[Path]:
    """Those there are now, of all servers on this machine."""
    folder, pattern = PYTHON_ENV_FOLDERS
    return set(Path(folder).glob(pattern))


def _temporary_folder() -> Path:
    prefix = f"{FOLDER_PREFIX}{os.getpid()}-"
    parent = tempfile.gettempdir()
    longest = LONGEST_FOLDER - len(f"/{prefix}xxxxxxxx")
    if len(os.fsencode(parent)) > longest:
        raise LauncherError(
            f"the temporary directory {parent} has a name of {len(os.fsencode(parent))} bytes; sockets lie in it, "
            f"whose names Linux bounds, so at most {longest} are allowed: set TMPDIR to a shorter one, such as /tmp"
        )
    return Path(tempfile.mkdtemp(prefix=prefix))
