"""The launcher: refuses clearly, shows progress, says why a load failed, and leaves nothing behind."""

from __future__ import annotations

import os
import tempfile
import threading
import time
from contextlib import ExitStack
from pathlib import Path

import pytest

from dflash_backend.config import ConfigError
from dflash_cli.launcher.leftovers import LOCK, SEGMENT_PREFIX
from dflash_cli.launcher.processes import family, gone
from dflash_cli.launcher.server import LauncherError, TritonServer
from dflash_cli.launcher.server_files import ServerFiles
from dflash_cli.launcher.triton_install import find_triton
from dflash_client import DFlashClient
from tests.client.conftest import toy_server
from tests.support.scale import by_night
from tests.support.servers import local_server


def test_a_missing_server_is_told_with_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(LauncherError, match="pip install --no-deps nvidia-pytriton"):
        find_triton({"PATH": "/nowhere"})


def test_a_tritonserver_on_the_path_comes_first(tmp_path: Path) -> None:
    binary = tmp_path / "tritonserver"
    binary.write_text("#!/bin/sh\n")
    binary.chmod(0o755)
    install = find_triton({"PATH": str(tmp_path)})
    assert install.binary == binary
    assert install.prepare_backends(tmp_path / "backends") == []


def test_numpy_2_is_refused_for_the_embedded_server(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.metadata.version", lambda name: "2.1.0")
    with pytest.raises(LauncherError, match=r"numpy below 2, and this environment has 2\.1\.0"):
        find_triton({"PATH": "/nowhere"})


def test_a_python_without_a_stub_is_refused_with_those_that_have_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dflash_cli.launcher.triton_install.sys.version_info", type("V", (), {"major": 3, "minor": 99}))
    with pytest.raises(LauncherError, match=r"cannot run Python 3\.99; it can run .*3\.11"):
        find_triton({"PATH": "/nowhere"})


@pytest.mark.parametrize(
    ("settings", "environ", "message"),
    [
        ({"kv_blok_size": "16"}, {}, r"'kv_blok_size' \(--set\); did you mean 'kv_block_size'"),
        ({"kv_block_size": "0"}, {}, r"'kv_block_size' has the value '0' \(--set\)"),
        ({}, {"DFLASH_SEDE": "1"}, r"'sede' \(environment\); did you mean 'seed'"),
    ],
)
def test_bad_settings_are_refused_before_anything_starts(
    settings: dict[str, str], environ: dict[str, str], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        TritonServer(settings, environ=environ)


def test_directories_become_absolute_and_no_drafter_stays_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "models").mkdir()
    monkeypatch.chdir(tmp_path)
    server = TritonServer({"target_model": "models", "draft_model": ""}, environ={})
    assert server._environ["DFLASH_TARGET_MODEL"] == str(tmp_path / "models")
    assert server._environ["DFLASH_DRAFT_MODEL"] == ""


@pytest.mark.parametrize("given", ["ngram", "./ngram"])
def test_prompt_lookup_is_not_taken_for_a_directory_of_that_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, given: str
) -> None:
    (tmp_path / "ngram").mkdir()
    monkeypatch.chdir(tmp_path)
    server = TritonServer({"draft_model": given}, environ={})
    assert server._environ["DFLASH_DRAFT_MODEL"] == ("ngram" if given == "ngram" else str(tmp_path / "ngram"))


@pytest.mark.parametrize("name", ["", "../x", "a b", ".hidden"])
def test_a_model_name_that_is_no_folder_name_is_refused(name: str) -> None:
    with pytest.raises(LauncherError, match="model name"):
        TritonServer(model_name=name, environ={})


def leftovers() -> set[str]:
    """Temporary folders and shared memory of launchers in this process."""
    segments = {path.name for path in Path("/dev/shm").glob(f"{SEGMENT_PREFIX}{os.getpid()}_*")}
    return segments | {path.name for path in Path(tempfile.gettempdir()).glob(f"dflash-triton-{os.getpid()}-*")}


@pytest.mark.server
def test_a_stopped_server_leaves_no_process_no_file_and_no_shared_memory() -> None:
    before = leftovers()
    progress: list[str] = []
    # The toy's child has a session of its own, as a careless engine might.
    with toy_server({"TOY_CHILD": "1"}, model_name="renamed", on_progress=progress.append) as server:
        members = family(server.pid)
        assert len(members) >= 3
        guardian = family(server._guardian.pid)
        assert len(guardian) == 1
        # Its locks are its processes', so that a server which starts while its launcher is dead lets its files be.
        held = {os.readlink(path) for path in Path(f"/proc/{server.pid}/fd").iterdir()}
        assert {str(server.folder / LOCK), server._running_files().segments_pattern.replace("*", LOCK)} <= held
        ServerFiles().remove()
        with DFlashClient(server.http_url, "http", model="renamed", timeout_s=10) as client:
            assert client.generate("ready").text == "ready"
    assert gone(members | guardian, 0)
    assert leftovers() == before
    assert progress[:2] == ["loading weights 50%", "loading cache 100%"]


@pytest.mark.server
@pytest.mark.parametrize(
    ("environ", "ready_timeout_s", "message"),
    [
        # How Triton ends is its own affair: on a busy machine it may abort on its way out.
        (
            {"TOY_FAIL": "the model is too large"},
            60.0,
            r"ended while it loaded \((status 1|signal SIGABRT)\): the model is too large$",
        ),
        ({"TOY_HANG": "1"}, 1.0, r"not ready after \d+ s, and .* has said nothing new for 1 s \(--load-timeout\);"),
    ],
)
def test_a_load_that_fails_or_takes_too_long_is_given_up_with_the_reason_and_leaves_nothing(
    environ: dict[str, str], ready_timeout_s: float, message: str
) -> None:
    before = leftovers()
    with pytest.raises(LauncherError, match=message):
        toy_server(environ, ready_timeout_s=ready_timeout_s).start()
    assert leftovers() == before


@pytest.mark.server
def test_a_stop_cuts_off_a_request_that_outlasts_the_exit_timeout(tmp_path: Path) -> None:
    server = toy_server({"TOY_CANCEL_LOG": str(tmp_path / "log")}, exit_timeout_s=1)
    with server, DFlashClient(server.grpc_url, timeout_s=30) as client:
        stream = client.stream("forever")
        next(stream)
        pid = server.pid
        stopper = threading.Thread(target=server.stop)
        stopper.start()
        stopper.join(10)
        assert not stopper.is_alive()
        assert family(pid) == set()
        stream.close()


@pytest.mark.server
@pytest.mark.parametrize(
    ("num_requests", "exit_timeout_s", "least_s", "most_s"), [("0", 30, 2.5, 8), by_night("1", 5, 5, 15)]
)
def test_a_stream_that_triton_keeps_is_not_waited_for_once_the_model_has_no_requests(
    tmp_path: Path, num_requests: str, exit_timeout_s: int, least_s: float, most_s: float
) -> None:
    """What Triton keeps is a stream here that goes on for ever, while the model says how many requests it has."""
    environ = {"TOY_CANCEL_LOG": str(tmp_path / "log"), "TOY_REQUESTS": num_requests}
    server = toy_server(environ, exit_timeout_s=exit_timeout_s)
    with server, DFlashClient(server.grpc_url, timeout_s=30) as client, client.stream("forever") as stream:
        next(stream)
        began = time.monotonic()
        server.stop()
        assert least_s < time.monotonic() - began < most_s


@pytest.mark.server
def test_a_server_outlives_the_thread_that_started_it() -> None:
    with ExitStack() as stack:
        server = toy_server()
        starter = threading.Thread(target=stack.enter_context, args=(server,))
        starter.start()
        starter.join(60)
        with DFlashClient(server.grpc_url, timeout_s=10) as client:
            assert client.generate("still here").text == "still here"


def test_a_repository_must_hold_one_model(tmp_path: Path) -> None:
    before = leftovers()
    with pytest.raises(LauncherError, match="holds 0 models"):
        local_server(model_repository=tmp_path).start()
    assert leftovers() == before


def test_a_temporary_directory_with_too_long_a_name_is_refused_and_nothing_is_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = tmp_path / ("long" * 20)
    directory.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(directory))
    with pytest.raises(LauncherError, match=r"has a name of \d+ bytes; .* at most \d+ are allowed: set TMPDIR"):
        toy_server().start()
    assert os.listdir(directory) == []


@pytest.mark.server
def test_an_idle_server_stops_without_waiting_for_triton_to_look() -> None:
    """Triton looks once a second whether its models are unloaded, and then waits once more."""
    lines: list[str] = []
    took: list[float] = []
    while len(took) < 3 and (not took or took[-1] >= 3):
        server = toy_server(on_log=lambda line: lines.append(line.raw), exit_timeout_s=30)
        server.start()
        began = time.monotonic()
        server.stop()
        took.append(time.monotonic() - began)
    assert min(took) < 3, took
    assert not any("Exit timeout expired" in line for line in lines)


@pytest.mark.server
def test_the_reason_of_a_death_is_what_was_said_at_the_end() -> None:
    with toy_server() as server, DFlashClient(server.grpc_url, timeout_s=10) as client:
        client.generate("ready")
        os.kill(server.pid, 9)
        server.wait()
        assert server.failure() == ""
