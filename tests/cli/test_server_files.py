"""What a server has outside its processes, without a server."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from dflash_cli.launcher import server_files
from dflash_cli.launcher.leftovers import LOCK, SEGMENT_PREFIX
from dflash_cli.launcher.server_files import READY_URL_FILE, ServerFiles, noted_ready_url
from tests.support.waiting import eventually

# A launcher whose temporary files are in argv[1] and whose shared memory is in argv[2], with one process of a server.
LAUNCHER = """
import os, subprocess, sys, tempfile, time
from pathlib import Path
from dflash_cli.launcher import server_files
tempfile.tempdir, server_files.SHARED_MEMORY = sys.argv[1], Path(sys.argv[2])
files = server_files.ServerFiles()
files.write("", "http://127.0.0.1:1", "key")
(server_files.SHARED_MEMORY / f"{files.segment_prefix}model").touch()
environment = Path(sys.argv[1], f"python_env_{os.getpid()}")
environment.mkdir()
(files.folder / "env-folders").write_text(str(environment))
server = subprocess.Popen(["sleep", "60"], pass_fds=files.locks, stdout=subprocess.DEVNULL)
print(files.folder, files.segment_prefix, environment, server.pid, flush=True)
time.sleep(60)
"""


class Launcher:
    """One in a process of its own, and what its server has."""

    def __init__(self, temporary: Path, shared_memory: Path) -> None:
        command = [sys.executable, "-c", LAUNCHER, str(temporary), str(shared_memory)]
        self._process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert self._process.stdout is not None
        folder, self._prefix, environment, server = self._process.stdout.readline().split()
        self.folder, self._environment, self._shared_memory = Path(folder), Path(environment), shared_memory
        self._server = int(server)

    def left(self) -> list[str]:
        """Its segments' names without their prefix, and its folders that are there."""
        segments = sorted(path.name for path in self._shared_memory.glob(f"{self._prefix}*"))
        folders = [name for name in ("folder", "_environment") if getattr(self, name).exists()]
        return [*(name.removeprefix(self._prefix) for name in segments), *folders]

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()
        assert self._process.stdout is not None
        self._process.stdout.close()

    def kill_server(self) -> None:
        with suppress(ProcessLookupError):
            os.kill(self._server, signal.SIGKILL)


@pytest.fixture
def folders(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Path, Path]]:
    """Temporary files and shared memory, for this process and the launchers: short, as sockets want it."""
    with tempfile.TemporaryDirectory(prefix="left") as directory:
        temporary, shared_memory = Path(directory, "tmp"), Path(directory, "shm")
        temporary.mkdir()
        shared_memory.mkdir()
        monkeypatch.setattr("tempfile.tempdir", str(temporary))
        monkeypatch.setattr(server_files, "SHARED_MEMORY", shared_memory)
        yield temporary, shared_memory


def test_only_empty_environments_that_came_after_the_start_are_removed(
    tmp_path: Path, files_with_envs: ServerFiles
) -> None:
    files_with_envs.note_env_folders()
    files_with_envs.remove()
    assert {path.name for path in tmp_path.iterdir()} == {"python_env_earlier", "python_env_used", "python_env_later"}
    assert not files_with_envs.folder.exists()


def test_what_a_killed_server_has_left_is_removed_and_what_a_living_one_has_is_not(folders: tuple[Path, Path]) -> None:
    temporary, shared_memory = folders
    # The launcher of `draining` is killed, and its server lets its requests end.
    living, draining, dead = (Launcher(*folders) for _ in range(3))
    everything = [LOCK, "model", "folder", "_environment"]
    try:
        draining.kill()
        dead.kill()
        # Without a lock nothing says that it is dead: of an earlier version of this project.
        unlocked = temporary / "dflash-triton-1-abcdefgh", shared_memory / f"{SEGMENT_PREFIX}1_abcd1234_model"
        unlocked[0].mkdir()
        unlocked[1].touch()

        def left_after_a_start(launcher: Launcher) -> list[str]:
            ServerFiles().remove()
            return launcher.left()

        assert left_after_a_start(dead) == everything, "its server lives"
        dead.kill_server()
        eventually(lambda: not left_after_a_start(dead), "what the dead server had is gone")
        assert [one.left() for one in (living, draining)] == [everything, everything]
        draining.kill_server()
        eventually(lambda: not left_after_a_start(draining), "so is what the other one had")
        assert living.left() == everything
        assert all(path.exists() for path in unlocked)
    finally:
        for one in (living, draining, dead):
            one.kill()
            one.kill_server()


def test_files_are_their_owners_alone_and_two_servers_of_one_process_remove_their_own(
    folders: tuple[Path, Path],
) -> None:
    temporary, shared_memory = folders
    one, other = ServerFiles(), ServerFiles()
    assert len(one.locks) == len(other.locks) == 2
    for path in (*temporary.iterdir(), *shared_memory.iterdir()):
        assert path.stat().st_mode & 0o077 == 0
    one.remove()
    other.remove()
    assert one.locks == []
    assert [*temporary.iterdir(), *shared_memory.iterdir()] == []


def test_where_files_cannot_be_locked_a_server_has_none_and_loses_nothing(
    folders: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_locks(*_: object) -> None:
        raise OSError("no locks available")

    with monkeypatch.context() as patch:
        patch.setattr("fcntl.flock", no_locks)
        files = ServerFiles()
        assert files.locks == []
        ServerFiles().remove()
    ServerFiles().remove()
    assert files.folder.exists()
    files.remove()
    assert [path for folder in folders for path in folder.iterdir()] == []


def test_a_ready_url_is_there_while_it_is_noted(folders: tuple[Path, Path]) -> None:
    temporary, _ = folders
    with noted_ready_url("http://127.0.0.1:9000/health/ready"):
        ServerFiles().remove()
        (folder,) = temporary.glob("dflash-triton-*/")
        assert (folder / READY_URL_FILE).read_text() == "http://127.0.0.1:9000/health/ready\n"
    with noted_ready_url(None):
        assert list(temporary.iterdir()) == []
