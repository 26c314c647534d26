"""The engine's process, with a toy engine in it: what it takes, what it answers, and how it ends."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from dflash_backend.config import EngineConfig
from dflash_backend.core.drafter_swap import DrafterSwap
from dflash_backend.engine.process import EngineLoop
from dflash_backend.engine_client.client import SHUTDOWN_S, EngineClient, EngineError, QueueLoad, engine_command
from dflash_backend.messages import (
    ENCODER,
    END_SIGNAL,
    AbortRequests,
    EngineCoreOutputs,
    EngineFailed,
    GenerationRequest,
    RequestFailed,
    SamplingParams,
    SwapDrafter,
    TokenDelta,
)
from tests.engine_client import toy_process

COMMAND = engine_command("tests.engine_client.toy_process")
WAIT_S = 20.0


def start(**settings: object) -> EngineClient:
    return EngineClient(EngineConfig.from_values(settings), COMMAND)


@pytest.fixture
def engine():
    client = start()
    try:
        client.wait_until_ready(lambda message, fraction: None, WAIT_S)
        yield client
    finally:
        client.close()


def request(request_id: str, prompt: list[int], max_tokens: int = 5) -> GenerationRequest:
    return GenerationRequest(request_id, prompt, SamplingParams(max_tokens=max_tokens))


def receive_until(client: EngineClient, enough) -> list:
    """What the engine says, up to the first thing that is `enough`."""
    received: list = []
    deadline = time.monotonic() + WAIT_S
    while time.monotonic() < deadline:
        for message in client.receive(1000):
            parts = [*message.deltas, *message.failed] if isinstance(message, EngineCoreOutputs) else [message]
            received += parts
            if any(enough(part) for part in parts):
                return received
    raise AssertionError(f"not received in {WAIT_S} s: {received}")


def finished(request_id: str):
    return lambda part: isinstance(part, TokenDelta) and part.request_id == request_id and part.finish_reason


def test_loading_is_reported_before_the_engine_is_ready():
    client, progress = start(max_model_len=99), []
    try:
        ready = client.wait_until_ready(lambda message, fraction: progress.append((message, fraction)), WAIT_S)
        assert (progress, ready.max_model_len) == ([("toy", 0.5)], 99)
    finally:
        client.close()


def test_a_failed_load_says_why_and_leaves_nothing_running():
    client = start(max_model_len=toy_process.FAIL_AT)
    with pytest.raises(EngineError, match="^the toy cannot load with 13$"):
        client.wait_until_ready(lambda message, fraction: None, WAIT_S)
    assert not running(client.pid)


def test_a_death_while_loading_is_noticed_at_once():
    client = start(max_model_len=toy_process.DIE_AT)
    with pytest.raises(EngineError, match=r"died \(exit status 7\)"):
        client.wait_until_ready(lambda message, fraction: None, WAIT_S)


def test_a_load_that_takes_too_long_is_given_up():
    client = EngineClient(EngineConfig(), [sys.executable, "-c", "import sys; sys.stdin.read()"])
    with pytest.raises(EngineError, match=r"not ready within 0\.2 s"):
        client.wait_until_ready(lambda message, fraction: None, 0.2)


def test_each_step_yields_a_delta_and_the_last_one_has_stats(engine):
    engine.send(request("a", [1, 2], max_tokens=5))
    deltas = receive_until(engine, finished("a"))
    assert [delta.token_ids for delta in deltas] == [[1, 2, 1], [2, 1]]
    assert (deltas[-1].finish_reason, deltas[-1].stats.num_output_tokens) == ("length", 5)


@pytest.mark.parametrize(
    ("token", "status", "message"),
    [
        (toy_process.REFUSE, "UNAVAILABLE", "the toy refuses this prompt"),
        (toy_process.BREAK_IN_QUEUEING, "INTERNAL", "KeyError: 'the toy has no place for this prompt'"),
        (toy_process.GIVE_UP, "INTERNAL", "the toy gave up"),
    ],
    ids=["refused", "defect as it is queued", "given up"],
)
def test_a_request_that_cannot_be_served_ends_and_does_not_touch_the_others(engine, token, status, message):
    # It goes first, so that its answer cannot come after the other's last.
    engine.send(request("bad", [token]))
    engine.send(request("good", [1], max_tokens=30))
    received = receive_until(engine, finished("good"))
    (rejected,) = [part for part in received if isinstance(part, RequestFailed)]
    assert (rejected.request_id, rejected.status) == ("bad", status)
    assert message in rejected.message
    assert sum(len(part.token_ids) for part in received if isinstance(part, TokenDelta)) == 30


def test_an_aborted_request_yields_nothing_more(engine):
    engine.send(request("gone", [1], max_tokens=10**9))
    receive_until(engine, lambda part: True)
    engine.send(AbortRequests(["gone", "never-there"]))
    engine.send(request("next", [2]))
    receive_until(engine, finished("next"))
    assert engine.receive(100) == []


def test_the_engine_is_told_how_much_of_a_stopped_request_counts(engine):
    engine.send(request("s", [1], max_tokens=10**9))
    receive_until(engine, lambda part: True)
    engine.send(AbortRequests(["s", "never-there"], {"s": 2, "never-there": 1}))
    engine.send(request("next", [1], max_tokens=1))
    deadline = time.monotonic() + WAIT_S
    counts: list[int] = []
    while counts[-1:] != [3] and time.monotonic() < deadline:
        counts += [message.stats.num_generation_tokens for message in engine.receive(1000) if message.stats]
    assert counts[-1] == 2 + 1


def test_an_error_in_a_step_is_told_before_the_process_ends(engine):
    engine.send(request("b", [toy_process.BREAK]))
    assert receive_until(engine, lambda part: True) == [EngineFailed("the engine stopped: RuntimeError: the toy broke")]
    with pytest.raises(EngineError, match=r"died \(exit status 1\)"):
        receive_until(engine, lambda part: True)


def test_an_idle_engine_that_can_step_no_more_says_so_and_ends_before_a_request_comes(engine):
    engine.send(request("b", [toy_process.BREAK_LATER]))
    # Both may come at once.
    said = receive_until(engine, lambda part: isinstance(part, EngineFailed))
    assert any(map(finished("b"), said))
    assert said[-1] == EngineFailed("the engine stopped: RuntimeError: the toy is broken")
    with pytest.raises(EngineError, match=r"died \(exit status 1\)"):
        receive_until(engine, lambda part: True)


def test_a_killed_engine_is_noticed_with_its_signal(engine):
    os.kill(engine.pid, signal.SIGKILL)
    with pytest.raises(EngineError, match=r"died \(signal 9\)"):
        receive_until(engine, lambda part: True)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_what_reaches_all_processes_of_a_server_is_left_to_the_stub(engine, number):
    """A Ctrl-C in a terminal, and the stop of a service manager."""
    engine.send(request("a", [toy_process.SLOW], max_tokens=60))
    receive_until(engine, lambda part: True)
    os.kill(engine.pid, number)
    receive_until(engine, finished("a"))
    engine.send(request("b", [1]))
    receive_until(engine, finished("b"))
    start = time.monotonic()
    assert engine.close()
    assert time.monotonic() - start < SHUTDOWN_S
    assert not running(engine.pid)


def test_an_engine_that_loads_ends_with_sigterm():
    client = EngineClient(EngineConfig(), [sys.executable, "-c", "import sys; sys.stdin.read()"])
    os.kill(client.pid, signal.SIGTERM)
    with pytest.raises(EngineError, match=r"died \(signal 15\)"):
        client.wait_until_ready(lambda message, fraction: None, WAIT_S)


def test_an_engine_that_is_asked_by_its_signal_ends_cleanly(engine):
    os.kill(engine.pid, END_SIGNAL)
    with pytest.raises(EngineError, match=r"died \(exit status 0\)"):
        receive_until(engine, lambda part: True)


def test_closing_ends_a_busy_engine(engine):
    engine.send(request("a", [1], max_tokens=10**9))
    receive_until(engine, lambda part: True)
    engine.close()
    assert not running(engine.pid)


def test_the_sockets_leave_no_file_once_both_sides_are_connected(engine):
    assert not Path(engine._dir).exists()
    engine.send(request("a", [1]))
    receive_until(engine, finished("a"))


def start_stub(code: str, *arguments: str) -> subprocess.Popen[str]:
    """A process that prints a line once it has started an engine."""
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join(entry for entry in sys.path if entry)}
    return subprocess.Popen([sys.executable, "-c", code, *arguments], stdout=subprocess.PIPE, text=True, env=environ)


STUB = """
import sys, time
from dflash_backend.config import EngineConfig
from dflash_backend.engine.process import EngineLoop
from dflash_backend.engine_client.client import EngineClient, engine_command
client = EngineClient(EngineConfig(), engine_command("tests.engine_client.toy_process"))
if sys.argv[1] == "ready":
    client.wait_until_ready(lambda message, fraction: None, 20)
print(client.pid, client._dir, flush=True)
time.sleep(600)
"""


@pytest.mark.parametrize("when", ["ready", "loading"])
def test_an_engine_ends_with_its_stub_however_that_went(when):
    with start_stub(STUB, when) as stub:
        pid, directory = stub.stdout.readline().split()
        stub.kill()
    deadline = time.monotonic() + WAIT_S
    while running(int(pid)) or Path(directory).exists():
        assert time.monotonic() < deadline, "the engine outlived its stub"


STUCK = """
import ctypes, subprocess, sys
from dflash_backend.config import EngineConfig
from dflash_backend.engine.process import EngineLoop
from dflash_backend.engine_client.client import EngineClient, engine_command
server = subprocess.Popen(["sleep", "600"])
client = EngineClient(EngineConfig(), engine_command("tests.engine_client.toy_process"), server.pid)
client.wait_until_ready(lambda message, fraction: None, 20)
print(server.pid, client.pid, flush=True)
# PyDLL keeps the interpreter's lock.
ctypes.PyDLL(None).sleep(600)
"""


def test_a_stub_that_is_stuck_with_the_interpreters_lock_ends_with_its_server_and_so_does_the_engine():
    with start_stub(STUCK) as stub:
        server, engine = map(int, stub.stdout.readline().split())
        assert running(engine)
        os.kill(server, signal.SIGKILL)
        try:
            assert stub.wait(WAIT_S) == -signal.SIGKILL
        finally:
            stub.kill()
    deadline = time.monotonic() + WAIT_S
    while running(engine):
        assert time.monotonic() < deadline, "the engine outlived its server"


def test_an_idle_engine_speaks_now_and_then(engine):
    received = [engine.receive(5000) for _ in range(3)]
    assert all(isinstance(message, EngineCoreOutputs) for messages in received for message in messages)
    assert all(received)


def test_an_idle_engine_says_what_came_of_moves():
    """Blocks that were kept for other servers are let go of while there are no requests."""
    sent, said = [], [EngineCoreOutputs(kv_events=[]), EngineCoreOutputs(stats="now")]
    core = SimpleNamespace(
        has_unfinished=lambda: False, is_moving=False, is_keeping=True, advance_moves=lambda: said.pop(0),
        num_waiting=0, num_free_rows=1, crowded_tenants=dict,
    )  # fmt: skip

    def receive(timeout_ms: int) -> list[bytes]:
        if not said:
            loop.end()
        return []

    channel = SimpleNamespace(receive=receive, send=sent.append)
    loop = EngineLoop(SimpleNamespace(core=core, check=lambda: None, trace=None, drafters=None), channel)
    loop.run()
    assert [message.stats for message in sent if message.stats] == ["now"]


def test_an_engine_speaks_within_a_step_that_takes_long(monkeypatch):
    """The stub takes its silence for a hang; after a failed step many run one after the other."""
    sent, now = [], [100.0]
    monkeypatch.setattr("dflash_backend.engine.process.time.monotonic", lambda: now[0])
    core = SimpleNamespace(
        has_unfinished=lambda: True, collect_drafts=lambda: None, is_moving=False, is_keeping=False,
        num_waiting=0, num_free_rows=1, crowded_tenants=dict,
    )  # fmt: skip

    def step() -> EngineCoreOutputs:
        for _ in range(10):
            now[0] += 0.5
            core.beat()
        loop.end()
        return EngineCoreOutputs(stats="now")

    core.step = step
    channel = SimpleNamespace(receive=lambda timeout_ms: [], send=sent.append)
    loop = EngineLoop(SimpleNamespace(core=core, check=lambda: None, trace=None, drafters=None), channel)
    loop._spoke_at = now[0]
    loop.run()
    assert [message.stats for message in sent] == [None] * 5 + ["now"]
    assert [message.queue is None for message in sent] == [True] * 5 + [False]


def test_a_drafter_that_loads_for_too_long_is_given_up_and_another_one_may_come(monkeypatch):
    monkeypatch.setattr("dflash_backend.engine.process.DRAFTER_LOAD_S", 0.1)
    sent: list[EngineCoreOutputs] = []
    swapped: list[str] = []
    may_load, has_loaded = threading.Event(), threading.Event()

    def load(wanted: SwapDrafter) -> DrafterSwap:
        if wanted.swap_id == "hangs":
            may_load.wait(WAIT_S)
            has_loaded.set()
        return DrafterSwap(wanted, lambda: "")

    def ask(swap_id: str) -> list[bytes]:
        return [ENCODER.encode(SwapDrafter(draft_model="d", swap_id=swap_id))]

    def inputs() -> Iterator[list[bytes]]:
        deadline = time.monotonic() + WAIT_S
        yield ask("hangs")
        while not any(message.drafter_swaps for message in sent):
            assert time.monotonic() < deadline, "the drafter is not given up"
            yield []
        yield ask("next")
        while not swapped:
            assert time.monotonic() < deadline, "the next drafter is not loaded"
            yield []
        may_load.set()
        has_loaded.wait(WAIT_S)
        time.sleep(0.05)
        yield []
        loop.end()
        yield []

    core = SimpleNamespace(
        has_unfinished=lambda: False, is_moving=False, is_keeping=False, num_waiting=0, num_free_rows=1,
        crowded_tenants=dict, check_swap=lambda: None, swap_drafter=lambda swap: swapped.append(swap.wanted.swap_id),
    )  # fmt: skip
    turns = inputs()
    channel = SimpleNamespace(receive=lambda timeout_ms: time.sleep(0.001) or next(turns), send=sent.append)
    drafters = SimpleNamespace(load=load)
    loop = EngineLoop(SimpleNamespace(core=core, check=lambda: None, trace=None, drafters=drafters), channel)
    loop.run()
    (said,) = [said for message in sent for said in message.drafter_swaps]
    assert (said.swap_id, said.outcome, said.status) == ("hangs", "refused", "UNAVAILABLE")
    assert "it was not loaded within 0.1 s" in said.message
    assert swapped == ["next"]


def test_requests_are_confirmed_before_they_are_worked_on(engine):
    engine.send(request("a", [toy_process.BREAK]))
    assert engine.is_unconfirmed("a")
    receive_until(engine, lambda part: isinstance(part, EngineFailed))
    assert not engine.is_unconfirmed("a")
    # Whoever sends more now, finds it among those that wait.
    assert engine.queue_load() == engine.queue_load("") == QueueLoad(1, 1, toy_process.NUM_ROWS)
    assert engine.queue_load("other") == QueueLoad(1, 0, toy_process.NUM_ROWS)


def test_requests_that_were_aborted_before_a_stopped_engine_received_them_do_not_wait(engine):
    os.kill(engine.pid, signal.SIGSTOP)
    for name in "abc":
        engine.send(request(name, [1]))
    assert engine.queue_load("").of_tenant == 3
    engine.send(AbortRequests(["a", "c"]))
    assert engine.queue_load("").of_tenant == 1
    os.kill(engine.pid, signal.SIGCONT)
    receive_until(engine, finished("b"))
    assert engine.queue_load("").of_tenant == 0


def test_an_engine_that_hangs_is_ended_all_the_same(engine):
    os.kill(engine.pid, signal.SIGSTOP)
    assert engine.alive
    assert engine.close(hung=True)
    assert not running(engine.pid)
    assert not engine.alive


def running(pid: int) -> bool:
    """Whether a process runs; one that ended and was not waited for does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False
