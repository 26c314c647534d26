"""A server that dies or hangs is noticed, wholly ended, and started anew, but not for ever."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from dflash_cli.launcher.processes import Process, family, gone
from dflash_cli.launcher.restarts import Keeper, RestartBudget, StopAsked
from dflash_cli.launcher.server import STUB_NAME, LauncherError, TritonServer
from dflash_cli.launcher.watch import Silence, Watch
from dflash_client import DFlashClient
from dflash_client.errors import ClientError
from tests.cli.test_launcher import leftovers
from tests.client.conftest import toy_server
from tests.support.servers import change_model
from tests.support.waiting import eventually

HANG_S = 3.0
PATIENCE_S = 60.0


class Kept:
    """A toy server and what keeps it, in a thread."""

    def __init__(self, server: TritonServer, restart: bool) -> None:
        self.server = server
        self.said: list[str] = []
        self.error: BaseException | None = None
        self.ready = threading.Event()
        self.keeper = Keeper(server, restart=restart, hang_timeout_s=HANG_S, say=self.said.append)
        self.thread = threading.Thread(target=self._run)

    def _run(self) -> None:
        try:
            self.keeper.run(self.ready.set)
        except (LauncherError, StopAsked) as error:
            self.error = error

    def members(self) -> dict[str, Process]:
        """tritonserver and the stub."""
        (stub,) = self.server.stubs()
        (triton,) = (p for p in family(self.server.pid) if p.pid == self.server.pid)
        return {"stub": stub, "tritonserver": triton}

    def wait_until_ready_again(self) -> None:
        eventually(lambda: any("ready again" in line for line in self.said), self.said, PATIENCE_S)

    def answers(self) -> bool:
        """Whether the server answers."""
        try:
            with DFlashClient(self.server.grpc_url, timeout_s=5) as client:
                return client.generate("well").text == "well"
        except (ClientError, LauncherError):
            return False


@contextmanager
def kept(restart: bool = True, server: TritonServer | None = None) -> Iterator[Kept]:
    """A running server, by default a toy one, that is looked after. At the end nothing of it is left."""
    before = leftovers()
    one = Kept(server or toy_server(exit_timeout_s=1), restart)
    one.thread.start()
    try:
        assert one.ready.wait(PATIENCE_S)
        yield one
    finally:
        # From this thread a stop cannot be asked for as by a signal: the next new start is refused instead.
        one.keeper.restart = False
        if one.thread.is_alive() and one.server._process is not None:
            one.server._process.kill()
        one.thread.join(PATIENCE_S)
        one.server.stop()
    assert leftovers() == before


@pytest.mark.server
@pytest.mark.parametrize(
    ("victim", "number", "why"),
    [
        ("stub", signal.SIGKILL, "stub, has died"),
        ("stub", signal.SIGSTOP, "no sign of life for"),
        ("tritonserver", signal.SIGKILL, "tritonserver ended by itself (signal SIGKILL)"),
        ("tritonserver", signal.SIGSTOP, "tritonserver has not answered for"),
    ],
    ids=lambda value: getattr(value, "name", None) or str(value)[:4],
)
def test_what_dies_or_hangs_is_replaced_as_a_whole(victim: str, number: signal.Signals, why: str) -> None:
    with kept() as one:
        before = one.members()
        one.said.clear()
        os.kill(before[victim].pid, number)
        one.wait_until_ready_again()
        assert why in one.said[0], one.said
        assert "started anew at once" in one.said[0]
        eventually(one.answers, "an answer", PATIENCE_S)
        assert gone(before.values(), 0)


@pytest.mark.server
def test_without_restarts_the_first_trouble_is_the_end() -> None:
    with kept(restart=False) as one:
        os.kill(one.members()["stub"].pid, signal.SIGKILL)
        one.thread.join(PATIENCE_S)
        assert "has died" in str(one.error)


@pytest.mark.server
def test_a_stream_that_runs_when_the_stub_dies_ends_with_an_error_instead_of_hanging() -> None:
    with kept() as one, DFlashClient(one.server.grpc_url, timeout_s=PATIENCE_S) as client:
        stream = client.stream("forever")
        next(stream)
        began = time.monotonic()
        os.kill(one.members()["stub"].pid, signal.SIGKILL)
        with pytest.raises(ClientError) as caught:
            list(stream)
        assert time.monotonic() - began < 20
        assert caught.value.status != "DEADLINE_EXCEEDED"


@pytest.mark.server
def test_a_model_that_clients_unload_and_load_again_is_no_trouble() -> None:
    with toy_server(explicit=True) as server:
        watch = Watch(server, hang_timeout_s=2.0)
        for action in ("unload", "load"):
            assert change_model(server, action).is_success
            for _ in range(6):
                assert watch.trouble() is None, action
                time.sleep(0.5)
        (stub,) = server.stubs()
        os.kill(stub.pid, signal.SIGKILL)
        eventually(lambda: "has died" in (watch.trouble() or ""), "the death of the new stub")
        watch.close()


def test_one_model_of_several_that_hangs_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The file that they share is touched by those that go on."""
    stubs = {Process(pid, 1, 1, 1, STUB_NAME) for pid in (11, 12)}
    shared = tmp_path / "heartbeat"
    server: Any = SimpleNamespace(
        stubs=lambda: stubs, poll=lambda: None, keep_safe=lambda: None, explicit=False, heartbeat=shared, http_url="h:1"
    )
    monkeypatch.setattr("dflash_cli.launcher.watch.named", lambda processes, name: set(processes))
    monkeypatch.setattr(Watch, "_is_live", lambda self: True)
    clock = [100.0]
    monkeypatch.setattr("dflash_cli.launcher.watch.time.monotonic", lambda: clock[0])
    watch = Watch(server, hang_timeout_s=HANG_S)

    def looks(*alive: int) -> list[str | None]:
        found = []
        for _ in range(8):
            clock[0] += 0.5
            for path in (shared, *(tmp_path / f"heartbeat-{pid}" for pid in alive)):
                path.touch()
                os.utime(path, (clock[0], clock[0]))
            found.append(watch.trouble())
        return found

    assert looks(11, 12) == [None] * 8
    assert looks(11)[-1] == "the model has given no sign of life for 4 s"
    assert looks(11, 12)[-1] is None
    stubs.discard(Process(12, 1, 1, 1, STUB_NAME))
    assert looks(11) == [None] * 8
    watch.close()


class FailingServer:
    """A server that cannot be started again."""

    stopping = False

    def __init__(self) -> None:
        self.num_starts = 0

    def start(self) -> None:
        self.num_starts += 1
        if self.num_starts > 1:
            raise LauncherError("no such file")

    def stop(self, wait_for_requests: bool = True) -> None:
        pass


def test_new_starts_that_fail_are_given_up_with_the_last_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    slept: list[float] = []
    monkeypatch.setattr("dflash_cli.launcher.restarts.time.sleep", slept.append)
    server, said = FailingServer(), []
    keeper = Keeper(server, restart=True, hang_timeout_s=1.0, say=said.append)  # type: ignore[arg-type]
    monkeypatch.setattr(keeper, "_until_trouble", lambda: "it fell over")
    with pytest.raises(LauncherError, match="no such file; it was started anew 5 times within 10 minutes"):
        keeper.run(lambda: None)
    assert server.num_starts == 6
    assert slept == [0, 1, 2, 4, 8]
    assert len(said) == 5


def test_a_signal_during_a_replacement_ends_the_server_for_good() -> None:
    class Stopped(FailingServer):
        def stop(self, wait_for_requests: bool = True) -> None:
            self.stopping = True
            keeper.signalled()
            self.stopping = False

        def hurry(self) -> None:
            hurried.append(True)

    hurried: list[bool] = []
    server = Stopped()
    keeper = Keeper(server, restart=True, hang_timeout_s=1.0, say=lambda text: None)  # type: ignore[arg-type]
    keeper._until_trouble = lambda: "it fell over"  # type: ignore[method-assign]
    with pytest.raises(StopAsked):
        keeper.run(lambda: None)
    assert server.num_starts == 1
    assert hurried == [True], "a signal during a stop lets that not wait"


def test_the_budget_of_restarts_refills_with_time() -> None:
    budget = RestartBudget(limit=2, window_s=10)
    assert [budget.delay_s(now) for now in (0, 1, 2, 10.5, 11.5)] == [0, 1, None, 1, 1]


def test_silence_is_counted_only_from_look_to_look() -> None:
    silence = Silence()
    for elapsed in (0.5, 3600.0, 0.5):
        silence.look(elapsed, alive=False)
    assert silence.seconds == 6.0
    assert silence.longer_than(6.0)
    silence.look(0.5, alive=True)
    assert not silence.longer_than(0.0)
