"""The engine process dies under a real server, or the stub, or the server is told to end: what clients see then, and
what is left over."""

from __future__ import annotations

import os
import signal
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import psutil
import pytest

from checks import chaos
from dflash_cli.launcher.processes import Process, family, gone
from dflash_cli.launcher.server import TritonServer
from dflash_cli.launcher.server_files import LONGEST_FOLDER
from dflash_client import DFlashClient
from dflash_client.errors import ClientError, Unavailable
from load_tests.server_state import MetricsPage, engine_pids, processes_by_role
from tests.server.conftest import new_server
from tests.support.scale import scaled
from tests.support.waiting import eventually

USUAL_TMP = tempfile.gettempdir()  # `one` has another, for as long as its server runs
ROUNDS = scaled(1)  # an engine of each; `checks.chaos` has 20 in `make nightly`
STORY = "Tell me a story."


@pytest.fixture
def short_tmp(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A temporary directory for the launcher and its server alone; short, since sockets lie in it."""
    with tempfile.TemporaryDirectory(prefix="left-", dir=USUAL_TMP) as directory:
        monkeypatch.setattr("tempfile.tempdir", directory)
        monkeypatch.setenv("TMPDIR", directory)
        yield directory


def gauge(server: TritonServer, name: str) -> float:
    """A metric's value, summed over its labels."""
    return MetricsPage.read(server.metrics_url).value(name)


class OneServer(NamedTuple):
    """A server that several tests put to the test, the last of which ends it."""

    server: TritonServer
    count: chaos.LeftoverCount
    members: set[Process]
    """All its processes so far: each test adds those that it ends."""
    log: list[str]

    def kill(self, pid: int, number: signal.Signals) -> None:
        self.members.update(family(self.server.pid))
        os.kill(pid, number)

    def restarts(self) -> float:
        return gauge(self.server, "dflash:engine_restarts_total")


@pytest.fixture(scope="module")
def one() -> Iterator[OneServer]:
    """In a temporary directory of the longest name that is allowed, since sockets lie in it."""
    longest = LONGEST_FOLDER - len(f"/dflash-triton-{os.getpid()}-xxxxxxxx")
    with tempfile.TemporaryDirectory(prefix="left-") as short, pytest.MonkeyPatch.context() as patch:
        directory = Path(short, "x" * (longest - len(short) - 1))
        directory.mkdir()
        patch.setattr("tempfile.tempdir", str(directory))
        patch.setenv("TMPDIR", str(directory))
        count, log = chaos.LeftoverCount(str(directory)), list[str]()
        settings = chaos.SETTINGS | {"log_level": "debug", "engine_hang_timeout_s": "4"}
        with new_server(settings, exit_timeout_s=20, on_log=lambda line: log.append(line.text)) as server:
            assert len(str(server.folder)) == LONGEST_FOLDER
            yield OneServer(server, count, set(), log)


def test_an_engine_that_dies_or_hangs_is_replaced_and_readiness_follows(one):
    server = one.server
    with (
        DFlashClient(server.http_url, "http", timeout_s=60) as client,
        DFlashClient(server.grpc_url, timeout_s=60) as grpc,
    ):
        assert gauge(server, "dflash:engine_ready") == 1
        # Before it has served, so that the restart waits for a second.
        one.kill(engine_pids(server.pid)[0], signal.SIGKILL)
        eventually(lambda: not client.ready() and not grpc.ready(), "not ready", 1.0)
        for each in (client, grpc):
            assert isinstance(error := each.probe(), Unavailable)
            assert "the engine is being restarted after it died; try again" in str(error)
        eventually(lambda: gauge(server, "dflash:engine_ready") == 0, "not ready")
        with pytest.raises(Unavailable, match="the engine is being restarted after it died; try again"):
            client.generate("Hello", max_tokens=1)
        eventually(lambda: gauge(server, "dflash:engine_ready") == 1, "ready again")
        assert client.ready()
        assert grpc.ready()
        assert client.generate("Hello", max_tokens=2, ignore_eos=True).num_output_tokens == 2
        # Now it is idle.
        (hanging,) = engine_pids(server.pid)
        one.kill(hanging, signal.SIGSTOP)
        with pytest.raises(Unavailable, match="the engine is being restarted"):
            client.generate("Hello", max_tokens=1)
        eventually(lambda: gauge(server, "dflash:engine_ready") == 1, "ready again")
        assert client.generate("Hello", max_tokens=2, ignore_eos=True).num_output_tokens == 2
        assert not Path(f"/proc/{hanging}").exists()
        assert one.restarts() == 2


def test_every_stream_of_a_killed_engine_gets_internal_the_next_answers_are_right_and_sigterm_ends_it(one):
    """At SIGTERM the server finishes what runs and takes nothing new."""
    server, before = one.server, one.restarts()
    with DFlashClient(server.http_url, "http", timeout_s=60) as client:
        answer = chaos.right_answer(client)
        for _ in range(ROUNDS):
            one.members.update(family(server.pid))
            result = chaos.play(server, client, answer)
            assert result.kept, result
        eventually(lambda: one.restarts() == before + ROUNDS, "restarts are counted")
        eventually(lambda: gauge(server, "dflash:num_requests_running") == 0, "nothing runs")
        one.members.update(family(server.pid))
        stream_while_it_ends(client, psutil.Process(server.pid).terminate)
        server.wait()
        left = {p.pid for p in one.members if not gone({p}, 10.0)}
    server.stop()
    assert left == set()
    assert not (rest := one.count.since(one.members)), rest
    assert any(line.startswith("dflash: debug: request ") and STORY in line for line in one.log)


@pytest.mark.nightly
def test_a_rank_that_is_killed_or_hangs_under_load_is_an_engine_that_is_replaced(short_tmp):
    count = chaos.LeftoverCount(short_tmp)
    members: set[Process] = set()
    with (
        new_server(chaos.SETTINGS | {"tensor_parallel_size": "2"}) as server,
        DFlashClient(server.http_url, "http", timeout_s=60) as client,
    ):
        answer = chaos.right_answer(client)
        for stop in (False, True):
            members |= family(server.pid)
            result = chaos.play(server, client, answer, chaos.victim_of(1, 2, stop))
            assert result.victim == "rank 1"
            assert result.kept, result
        members |= family(server.pid)
    assert not (left := count.since(members)), left


def test_nothing_outlives_a_tritonserver_that_is_killed_with_requests_in_flight(short_tmp):
    count = chaos.LeftoverCount(short_tmp)
    with new_server() as server, DFlashClient(server.http_url, "http", timeout_s=30) as client:
        streams = [client.stream("Tell me a story.", max_tokens=900, ignore_eos=True) for _ in range(4)]
        for stream in streams:
            next(stream)
        members = family(server.pid)
        assert len(members) == 3
        os.kill(server.pid, signal.SIGKILL)
        assert gone(members, 10.0), "a process outlived tritonserver"
    assert not (left := count.since(members)), left


def test_an_unread_stream_ends_when_tritonserver_holds_too_much_and_a_killed_stub_takes_its_engine_along(short_tmp):
    count = chaos.LeftoverCount(short_tmp)
    with (
        new_server({"max_server_memory_gb": "0.001"}) as server,
        DFlashClient(server.grpc_url, "grpc", timeout_s=60) as client,
    ):
        members = family(server.pid)
        # Much longer than the second between two looks at the memory, on a fast machine too, and soon above 1 MB.
        much = {"n": 6, "num_speculative_tokens": 0, "logprobs": 20}
        stream = client.stream("Tell me a story.", max_tokens=900, ignore_eos=True, **much)
        deltas = [next(stream)]
        eventually(lambda: gauge(server, "dflash:num_requests_in_flight") == 0, "the stream has ended")
        with pytest.raises(Unavailable, match=r"tritonserver holds .* GB \(max_server_memory_gb\)"):
            deltas += stream
        assert 0 < sum(delta.num_output_tokens for delta in deltas) < 6 * 900
        assert client.generate("Hello", max_tokens=2, ignore_eos=True).num_output_tokens == 2
        ((engine,), (stub,)) = (processes_by_role(server.pid)[role] for role in ("engine", "stub"))
        stub.kill()
        assert psutil.wait_procs([engine], timeout=5.0)[1] == [], "the engine outlived its stub"
        server.hurry()
    assert not (left := count.since(members)), left


@pytest.mark.nightly
def test_a_server_whose_launcher_stops_it_finishes_what_runs_takes_nothing_new_and_logs_at_its_level(short_tmp):
    """The launcher sends SIGINT. The first test has SIGTERM, and tests/cli/test_launcher.py stops the toy model."""
    count = chaos.LeftoverCount(short_tmp)
    log: list[str] = []
    server = new_server({"log_level": "warning"}, exit_timeout_s=20, on_log=lambda line: log.append(line.text))
    with server, DFlashClient(server.http_url, "http", timeout_s=30) as client:
        members = family(server.pid)
        stream_while_it_ends(client, server.stop)
        left = {p.pid for p in members if not gone({p}, 2.0)}
    assert left == set()
    assert not (rest := count.since(members)), rest
    assert [line for line in log if line.startswith("dflash: ")] == []


def stream_while_it_ends(client: DFlashClient, end: Callable[[], None]) -> None:
    """A long answer that comes whole though the server is told to end as it begins; and a request that is refused."""
    stream = client.stream(STORY, temperature=0, max_tokens=600, ignore_eos=True)
    deltas = [next(stream)]
    ending = threading.Thread(target=end)
    ending.start()
    refused = first_refusal(client)
    deltas += stream
    ending.join()
    assert deltas[-1].finish_reason == "length"
    assert sum(delta.num_output_tokens for delta in deltas) == 600
    assert refused.status in ("UNAVAILABLE", "CONNECTION_FAILED", "CONNECTION_LOST"), refused


def first_refusal(client: DFlashClient) -> ClientError:
    """The error of the first request that is not taken any more."""

    def refusal() -> ClientError | None:
        try:
            client.generate("Hello", max_tokens=1)
        except ClientError as error:
            return error
        return None

    return eventually(refusal, "a refusal", within_s=20)
