"""Whatever is killed, nothing of a server stays: no process, no folder, no shared memory."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from dflash_cli.launcher import processes
from dflash_cli.launcher.guardian import ENV_FOLDERS_FILE, clean_up
from dflash_cli.launcher.leftovers import SEGMENT_PREFIX
from dflash_cli.launcher.processes import family, gone, marked, named, send
from dflash_cli.launcher.server_files import ServerFiles
from dflash_client import DFlashClient
from tests.client.conftest import toy_server
from tests.support.servers import PORT_OPTIONS, clean_environ
from tests.support.waiting import eventually

ROOT = Path(__file__).resolve().parents[2]
# Exit timeout 1 s, its margin, the guardian's own patience, and a loaded machine.
WITHIN_S = 30.0
ABANDON = """
import sys, time
from tests.client.conftest import toy_server
with toy_server({"TOY_CHILD": "1", "TOY_CANCEL_LOG": "/dev/null"}, exit_timeout_s=1) as server:
    print(server.grpc_url, server.pid, server._guardian.pid, server.folder, flush=True)
    while True:
        time.sleep(0.2)
        server.keep_safe()
"""


class Abandoned:
    """A launcher in a process of its own, and what belongs to its server."""

    def __init__(self, launcher: subprocess.Popen[str], line: str) -> None:
        self.launcher = launcher
        self.grpc_url, triton, guardian, folder = line.split()
        self.guardian, self.folder = int(guardian), Path(folder)
        self.env_folders = [Path(line) for line in (self.folder / ENV_FOLDERS_FILE).read_text().splitlines()]
        self.members = family(int(triton))
        self.triton = {p for p in self.members if p.pid == int(triton)}
        self.stub = named(self.members, "triton_python_backend_stub")

    def segments(self) -> list[Path]:
        return list(Path("/dev/shm").glob(f"{SEGMENT_PREFIX}{self.launcher.pid}_*"))

    def wait_until_nothing_is_left(self) -> None:
        def left() -> list[object]:
            stays = [self.folder, *self.env_folders]
            return [not gone(self.members, 0), *self.segments(), *filter(Path.exists, stays)]

        eventually(lambda: not any(left()), (self.members, self.folder, self.env_folders), WITHIN_S)
        assert not marked(str(self.folder))


@pytest.fixture
def abandoned() -> Iterator[Abandoned]:
    command = [sys.executable, "-c", ABANDON]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as launcher:
        assert launcher.stdout is not None
        one = Abandoned(launcher, launcher.stdout.readline())
        assert len(one.members) >= 3
        assert one.segments()
        assert one.env_folders
        assert all(path.exists() for path in one.env_folders)
        yield one
        launcher.kill()
        send(one.members, signal.SIGKILL)


def test_a_guardian_removes_the_environments_of_its_server_that_are_empty_and_no_others(
    tmp_path: Path, files_with_envs: ServerFiles
) -> None:
    order = {
        "mark": f"{files_with_envs.folder}=",
        "patience_s": 0.0,
        "folder": str(files_with_envs.folder),
        "segments": "/no/such/*",
    }
    clean_up(order, vars(processes))
    assert sorted(os.listdir(tmp_path)) == ["python_env_earlier", "python_env_later", "python_env_used"]
    assert not files_with_envs.folder.exists()


@pytest.mark.server
@pytest.mark.parametrize("stopped", ["nothing", "stub", "tritonserver"])
def test_nothing_stays_of_a_server_whose_launcher_is_killed_with_a_stream_in_flight(
    abandoned: Abandoned, stopped: str
) -> None:
    with DFlashClient(abandoned.grpc_url, timeout_s=WITHIN_S) as client:
        stream = client.stream("forever")
        next(stream)
        send({"nothing": set(), "stub": abandoned.stub, "tritonserver": abandoned.triton}[stopped], signal.SIGSTOP)
        abandoned.launcher.kill()
        abandoned.launcher.wait(10)
        abandoned.wait_until_nothing_is_left()
        with contextlib.suppress(Exception):
            stream.close()


@pytest.mark.server
def test_a_guardian_that_is_killed_is_replaced(abandoned: Abandoned) -> None:
    os.kill(abandoned.guardian, signal.SIGKILL)
    time.sleep(1)
    abandoned.launcher.kill()
    abandoned.launcher.wait(10)
    abandoned.wait_until_nothing_is_left()


@pytest.mark.server
def test_nothing_stays_of_a_server_that_is_killed() -> None:
    with toy_server({"TOY_CHILD": "1"}) as server:
        # Triton's Python backend makes environments, which it removes only when it ends by itself.
        members, folder, env_folders = family(server.pid), server.folder, server._running_files()._env_folders
        assert env_folders
        os.kill(server.pid, signal.SIGKILL)
    assert gone(members, 0)
    assert not folder.exists()
    assert not any(path.exists() for path in env_folders)
    assert not marked(str(folder))


@pytest.mark.server
@pytest.mark.parametrize("delay_s", [0.3, 1.0, 2.0])
def test_a_stop_while_the_model_loads_leaves_nothing(delay_s: float) -> None:
    command = [sys.executable, "-m", "dflash_cli.main", "serve", *PORT_OPTIONS]
    with tempfile.TemporaryDirectory(prefix="load-") as directory:
        environ = clean_environ(TMPDIR=directory)
        with subprocess.Popen(
            command, env=environ, stderr=subprocess.PIPE, text=True, start_new_session=True
        ) as process:
            assert process.stderr is not None
            for line in process.stderr:
                if "loading 0%" in line:
                    break
            members = family(process.pid)
            time.sleep(delay_s)
            process.send_signal(signal.SIGINT)
            process.stderr.read()
        assert process.returncode == 0
        assert gone(members, 0)
        assert os.listdir(directory) == []
