"""The service's life: its engine dies, hangs or fails to load, its server ends, its queue is full, it is closed."""

from __future__ import annotations

import os
import signal
import subprocess
import threading
import time
from pathlib import Path

import pytest

from dflash_backend.engine_client.client import EngineError
from tests.engine_client import toy_process
from tests.support.waiting import WAIT_S, eventually
from tests.triton.serving import joined, submit


def test_a_killed_engine_fails_requests_in_flight_and_refuses_later_ones_until_it_is_back(service):
    running = [submit(service, [toy_process.QUIET]) for _ in range(3)]
    eventually(lambda: not service._engines.supervisors[0].engine._unconfirmed)
    os.kill(service._engines.supervisors[0].engine.pid, signal.SIGKILL)
    errors = [sender.all()[0].error for sender in running]
    assert [error.code for error in errors] == ["INTERNAL"] * 3
    assert "died (signal 9)" in errors[0].message
    assert submit(service, "a").all()[0].error.code == "UNAVAILABLE"


def test_the_metrics_say_that_the_engine_is_gone_before_its_clients_do(service, triton):
    sender = submit(service, [toy_process.QUIET])
    gauge = ("dflash:engine_ready", "dflash_0_0")
    ready: list[float] = []
    sender.before_last = lambda: ready.append(triton.values[gauge])
    eventually(lambda: not service._engines.supervisors[0].engine._unconfirmed)
    eventually(lambda: triton.values[gauge] == 1)
    os.kill(service._engines.supervisors[0].engine.pid, signal.SIGKILL)
    assert sender.all()[0].error.code == "INTERNAL"
    assert ready == [0.0]


@pytest.mark.parametrize("confirmed", [True, False])
def test_an_error_in_the_engines_step_reaches_the_client_in_words(service, monkeypatch, confirmed):
    """A request that may have caused it is not told to come again, although the engine ended before it could say that
    the request had arrived."""
    if not confirmed:
        monkeypatch.setattr(
            type(service._engines.supervisors[0].engine), "is_unconfirmed", lambda engine, request_id: True
        )
    (response,) = submit(service, [toy_process.BREAK]).all()
    assert response.error.code == "INTERNAL"
    if confirmed:
        assert response.error.message == "INTERNAL: the engine stopped: RuntimeError: the toy broke"


def test_an_engine_that_ends_while_a_request_is_handed_over_is_blamed_on_it(service, monkeypatch):
    engine = service._engines.supervisors[0].engine
    send = engine.send

    def send_slowly(message):
        send(message)
        eventually(lambda: service._engines.supervisors[0].engine is not engine)

    monkeypatch.setattr(engine, "send", send_slowly)
    (response,) = submit(service, [toy_process.BREAK]).all()
    assert response.error.code == "INTERNAL"


def test_closing_lets_requests_finish_and_refuses_new_ones(service):
    sender = submit(service, "ab", max_tokens=3000, exclude_input_in_output=True)
    service.close()
    assert joined(sender.all()) == "ab" * 1500
    assert submit(service, "a").all()[0].error.code == "UNAVAILABLE"


def test_a_question_whether_requests_are_taken_is_none_that_was_refused(service, triton):
    service.close()
    for number in (1, 2):
        assert [submit(service, "a", describe=True).all()[0].error.code for _ in range(3)] == ["UNAVAILABLE"] * 3
        assert submit(service, "a", describe=False).all()[0].error.code == "UNAVAILABLE"
        service._reporter.report(time.monotonic(), 0)
        assert triton.values["dflash:request_errors_total", "UNAVAILABLE"] == number


def test_a_full_queue_refuses_at_once_and_takes_requests_again_when_it_empties(serve):
    service = serve(max_num_seqs=toy_process.NUM_ROWS, max_queue_size=1)
    waiting = [submit(service, [toy_process.QUIET]) for _ in range(2)]
    # Two wait for the two rows, whether or not the engine has confirmed it: one more fits, two do not.
    refused = submit(service, "ab", sampling={"n": 2})
    assert refused.answered
    (response,) = refused.all()
    assert response.error.code == "UNAVAILABLE"
    assert "2 requests wait already, this one has 2, and max_queue_size is 1" in response.error.message
    assert submit(service, "ab", max_tokens=2).all()[0].outputs["text_output"] == "abab"
    for sender in waiting:
        sender.cancelled = True
    assert [sender.all()[0].error.code for sender in waiting] == ["CANCELLED"] * 2
    # The engine receives the cancellations before these.
    for n in (1, 2):
        assert submit(service, "ab", sampling={"n": n}, max_tokens=2).all()[0].error is None


def test_a_load_that_fails_is_an_error_with_the_engines_sentence(serve, triton):
    """It has made no metric: Triton 2.51 crashes later when a model that made some fails to load while it replaces one
    that serves."""
    with pytest.raises(EngineError, match="the toy cannot load with 13"):
        serve(max_model_len=toy_process.FAIL_AT)
    assert "dflash: loading 50%: toy" in triton.lines
    assert not triton.values


def test_an_output_thread_that_dies_answers_all_requests_logs_why_and_ends_the_process(serve, triton, capsys):
    ended = threading.Event()
    service = serve(abandon=ended.set)
    senders = [submit(service, [toy_process.QUIET], failures=failures) for failures in (10**9, 0, 0)]
    pid = service._engines.supervisors[0].engine.pid
    service._reporter._activity.line = lambda now: 1 / 0
    assert ended.wait(WAIT_S)
    for sender in senders[1:]:
        (response,) = sender.all()
        assert (response.error.code, "the model stopped working" in response.error.message) == ("INTERNAL", True)
    assert "dflash: the model stops: ZeroDivisionError: division by zero; the server must be restarted" in triton.lines
    assert "in <lambda>" in capsys.readouterr().err
    assert not Path(f"/proc/{pid}").exists()
    assert submit(service, "a").all()[0].error.code == "UNAVAILABLE"


def test_a_service_that_is_closed_does_not_end_the_process(serve):
    ended = threading.Event()
    service = serve(abandon=ended.set)
    service.close()
    assert not ended.is_set()


def test_closing_waits_for_what_runs_and_takes_nothing_new(serve, triton):
    service = serve()
    running = submit(service, [toy_process.SLOW, 5, 6], max_tokens=120, stream=True)
    running.next()
    closing = threading.Thread(target=service.close)
    closing.start()
    eventually(lambda: service._closing)
    assert submit(service, "a").all()[0].error.code == "UNAVAILABLE"
    responses = running.all()
    closing.join(WAIT_S)
    assert not closing.is_alive()
    assert all(response.error is None for response in responses)
    assert not any("were still running" in line for line in triton.lines)


def test_a_request_that_never_reached_a_dead_engine_may_be_sent_again(service):
    os.kill(service._engines.supervisors[0].engine.pid, signal.SIGKILL)
    for _ in range(20):
        (response,) = submit(service, "a").all()
        assert (response.error.code, "is being restarted" in response.error.message) == ("UNAVAILABLE", True)


def test_a_hanging_engine_is_replaced_and_all_requests_are_answered(serve, triton):
    service = serve(engine_hang_timeout_s=1.5)
    running = submit(service, "ab", max_tokens=10**9, stream=True)
    running.next()
    eventually(lambda: not service._engines.supervisors[0].engine._unconfirmed)
    os.kill(service._engines.supervisors[0].engine.pid, signal.SIGSTOP)
    late = submit(service, "ab", max_tokens=4)
    error = running.all()[-1].error
    assert (error.code, "the engine hangs" in error.message) == ("INTERNAL", True)
    assert late.all()[0].error.code == "UNAVAILABLE"
    eventually(lambda: service.ready)
    assert submit(service, "ab", max_tokens=4).all()[0].error is None
    eventually(lambda: triton.values["dflash:engine_restarts_total",] == 1)


def test_the_heartbeat_file_is_touched_for_as_long_as_the_output_thread_goes_on(serve, tmp_path, monkeypatch):
    file = tmp_path / "heartbeat"
    monkeypatch.setenv("DFLASH_HEARTBEAT_FILE", str(file))
    service = serve()
    eventually(file.exists)
    before = file.stat().st_mtime_ns
    eventually(lambda: file.stat().st_mtime_ns > before)
    service.close()
    last = file.stat().st_mtime_ns
    time.sleep(1.5)
    assert file.stat().st_mtime_ns == last


def test_this_process_ends_with_the_server(serve):
    ended = threading.Event()
    server = subprocess.Popen(["sleep", "600"])
    service = serve(server_pid=server.pid, abandon=ended.set)
    # The engine would kill the process of this test.
    service._engines.close()
    server.kill()
    assert ended.wait(WAIT_S)
    service.close()
    server.wait()


def test_gauges_tell_of_a_hanging_engine_what_the_service_knows(service, triton):
    eventually(lambda: triton.values["dflash:stub_heartbeat_timestamp_seconds", "dflash_0_0"] > time.time() - 5)
    os.kill(service._engines.supervisors[0].engine.pid, signal.SIGSTOP)
    sender = submit(service, "ab", max_tokens=6)
    eventually(lambda: triton.values["dflash:num_requests_in_flight", "dflash_0_0"] == 1)
    eventually(lambda: triton.values["dflash:engine_silence_seconds", "dflash_0_0"] > 1)
    assert triton.values["dflash:num_requests_running", "dflash_0_0"] == 0
    os.kill(service._engines.supervisors[0].engine.pid, signal.SIGCONT)
    sender.all()
    eventually(lambda: triton.values["dflash:num_requests_in_flight", "dflash_0_0"] == 0)
    eventually(lambda: triton.values["dflash:engine_silence_seconds", "dflash_0_0"] < 1)
