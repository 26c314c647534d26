"""The frontend as a whole, over a toy engine process and a stand-in for Triton's module."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from dflash_backend.config import EngineConfig
from dflash_backend.engine_client.client import EngineError, engine_command
from dflash_backend.triton.server_memory import ServerMemory
from dflash_backend.triton.service import FrontendService
from tests.engine_client import toy_engine
from tests.triton.fake_triton import FakeTriton, Request

COMMAND = engine_command("tests.engine_client.toy_engine")
WAIT_S = 20.0
TEXT = "漢字🙂 é"


@pytest.fixture
def triton():
    return FakeTriton()


@pytest.fixture
def service(model_dir, triton):
    service = FrontendService(EngineConfig(target_model=str(model_dir)), "dflash", triton, COMMAND)
    yield service
    service.close()


def submit(service: FrontendService, text=TEXT, max_tokens=15, **inputs):
    values = {"max_tokens": max_tokens, **inputs.pop("sampling", {})}
    prompt = {"input_ids": text} if isinstance(text, list) else {"text_input": text}
    request = Request(sampling_parameters=json.dumps(values), **prompt, **inputs)
    service.submit(request)
    return request.sender


def joined(responses) -> str:
    return "".join(response.outputs["text_output"] for response in responses)


def test_streamed_deltas_join_to_the_text_that_comes_at_once(service):
    repeats = 500
    tokens = repeats * len(TEXT.encode())
    streamed = submit(service, max_tokens=tokens, stream=True).all()
    (whole,) = submit(service, max_tokens=tokens, exclude_input_in_output=True).all()
    assert joined(streamed) == whole.outputs["text_output"] == TEXT * repeats
    assert all("\ufffd" not in response.outputs["text_output"] for response in streamed)
    assert len(streamed) > 1


def test_the_prompt_comes_first_without_streaming(service):
    (whole,) = submit(service, "abc", max_tokens=3).all()
    assert whole.outputs == {"text_output": "abcabc"}


def test_outputs_that_were_asked_for_count_what_is_new_in_each_response(service):
    flags = ("finish_reason", "num_input_tokens", "num_output_tokens", "token_ids", "spec_stats")
    responses = submit(service, "ab", max_tokens=5, stream=True, **{f"return_{flag}": True for flag in flags}).all()
    outputs = [response.outputs for response in responses]
    assert [token_id for output in outputs for token_id in output["token_ids"]] == list(b"ababa")
    assert [output["num_output_tokens"][0] for output in outputs] == [len(output["token_ids"]) for output in outputs]
    assert [output["finish_reason"] for output in outputs] == ["None"] * (len(outputs) - 1) + ["length"]
    assert all(output["num_input_tokens"] == [2] for output in outputs)
    assert ["spec_stats" in output for output in outputs] == [False] * (len(outputs) - 1) + [True]
    assert json.loads(outputs[-1]["spec_stats"])["acceptance_length"] == 3.5


def test_a_stop_string_ends_the_request_with_its_stats(service):
    sampling = {"stop": "d"}
    responses = submit(
        service, "abcdef", 10**6, stream=True, sampling=sampling, return_finish_reason=True, return_spec_stats=True
    ).all()
    assert joined(responses) == "abc"
    assert responses[-1].outputs["finish_reason"] == "stop"
    assert json.loads(responses[-1].outputs["spec_stats"])["num_drafts"] == 4


def test_no_token_past_the_one_that_completes_a_stop_string_leaves(service):
    flags = {"return_num_output_tokens": True, "return_token_ids": True, "return_logprobs": True}
    sampling = {"stop": "de", "logprobs": 0}
    (whole,) = submit(service, "abcdef", 100, exclude_input_in_output=True, sampling=sampling, **flags).all()
    assert whole.outputs["text_output"] == "abc"
    assert whole.outputs["token_ids"] == list(b"abcde")
    assert whole.outputs["num_output_tokens"] == [5]
    assert len(json.loads(whole.outputs["logprobs"])) == 5


def test_what_a_stop_string_ends_comes_in_one_last_response_with_its_tokens(service):
    flags = {"return_num_output_tokens": True, "return_spec_stats": True}
    responses = submit(service, "abcdef", 10**6, stream=True, sampling={"stop": "f"}, **flags).all()
    assert all(response.outputs["num_output_tokens"][0] > 0 for response in responses)


def test_completions_of_one_request_come_together(service):
    flags = ("finish_reason", "num_input_tokens", "num_output_tokens", "token_ids", "spec_stats", "cumulative_logprob")
    asked = {f"return_{flag}": True for flag in flags}
    (whole,) = submit(service, "ab", max_tokens=4, sampling={"n": 3}, **asked).all()
    assert whole.outputs["text_output"] == ["ababab"] * 3
    assert whole.outputs["finish_reason"] == ["length"] * 3
    assert whole.outputs["num_input_tokens"] == [2]
    assert whole.outputs["num_output_tokens"] == [4, 4, 4]
    assert whole.outputs["token_ids"] == list(b"abab") * 3
    assert whole.outputs["cumulative_logprob"] == [-2.0] * 3
    assert [json.loads(stats)["num_drafts"] for stats in whole.outputs["spec_stats"]] == [4, 4, 4]


def test_streamed_completions_have_one_response_a_step_and_one_end(service):
    responses = submit(service, "abc", 30, stream=True, sampling={"n": 2}, return_finish_reason=True).all()
    texts = ["".join(response.outputs["text_output"][index] for response in responses) for index in range(2)]
    assert texts == ["abc" * 10] * 2
    assert responses[-1].outputs["finish_reason"] == ["length"] * 2
    assert len(responses) <= 10


def test_one_completion_that_the_engine_refuses_ends_the_request_once(service):
    (response,) = submit(service, [toy_engine.REFUSE_SECOND], 10**9, sampling={"n": 3}).all()
    assert (response.error.code, response.error.message) == ("UNAVAILABLE", "UNAVAILABLE: the toy refuses this prompt")
    service.close()
    assert service._metrics._last.num_requests_running == 0


def test_cancelling_a_request_ends_all_its_completions(service):
    sender = submit(service, "ab", 10**9, stream=True, sampling={"n": 4})
    sender.next()
    sender.cancelled = True
    assert sender.all()[-1].error.code == "CANCELLED"
    submit(service, "a", max_tokens=2).all()
    service.close()
    assert service._metrics._last.num_requests_running == 0


def test_logprobs_are_a_list_with_an_object_for_each_token(service):
    flags = {"return_logprobs": True, "return_cumulative_logprob": True}
    (whole,) = submit(service, "ab", 2, exclude_input_in_output=True, sampling={"logprobs": 1}, **flags).all()
    assert json.loads(whole.outputs["logprobs"]) == [
        {
            "97": {"logprob": -0.5, "rank": 1, "decoded_token": "a"},
            "98": {"logprob": -1.5, "rank": 2, "decoded_token": "b"},
        },
        {
            "98": {"logprob": -0.5, "rank": 1, "decoded_token": "b"},
            "99": {"logprob": -1.5, "rank": 2, "decoded_token": "c"},
        },
    ]
    assert whole.outputs["cumulative_logprob"] == [-1.0]


def test_logprobs_that_no_parameter_asked_for_are_null_and_their_sum_is_there(service):
    flags = {"return_logprobs": True, "return_cumulative_logprob": True}
    responses = submit(service, "ab", 9, stream=True, **flags).all()
    assert {response.outputs["logprobs"] for response in responses} == {"null"}
    sums = [response.outputs["cumulative_logprob"][0] for response in responses]
    assert sums == sorted(set(sums), reverse=True)
    assert sums[-1] == -4.5


def test_decoded_tokens_of_each_response_join_to_its_text(service):
    responses = submit(service, TEXT, 60, stream=True, sampling={"logprobs": 0}, return_logprobs=True).all()
    for response in responses:
        entries = [entry for token in json.loads(response.outputs["logprobs"]) for entry in token.values()]
        assert "".join(entry["decoded_token"] for entry in entries) == response.outputs["text_output"]


def test_the_times_of_a_steps_phases_are_observed(service, triton):
    submit(service, "ab", 3).all()
    service.close()
    steps, verify_s = triton.observed("dflash:step_seconds", "verify")
    assert steps > 0
    assert verify_s == steps * 0.25
    assert triton.observed("dflash:step_seconds", "draft") == (steps, steps * 0.125)


def test_bad_requests_are_answered_and_the_others_go_on(service):
    good = submit(service, "ab", max_tokens=300, exclude_input_in_output=True)
    bad = [
        submit(service, ""),
        submit(service, b"\xff"),
        submit(service, "a", max_tokens=0),
        submit(service, "a" * 512),
    ]
    assert [sender.all()[0].error.code for sender in bad] == ["INVALID_ARG"] * 4
    assert joined(good.all()) == "ab" * 150


def test_what_the_engine_refuses_keeps_its_status(service):
    (response,) = submit(service, [toy_engine.REFUSE]).all()
    assert (response.error.code, response.error.message) == ("UNAVAILABLE", "UNAVAILABLE: the toy refuses this prompt")


@pytest.mark.parametrize("prompt", [[toy_engine.QUIET], list(b"ab")])
def test_a_cancelled_request_ends_whether_it_yields_tokens_or_not(service, prompt):
    sender = submit(service, prompt, max_tokens=10**9)
    sender.cancelled = True
    assert sender.all()[0].error.code == "CANCELLED"
    (after,) = submit(service, "a", max_tokens=2, exclude_input_in_output=True).all()
    assert after.outputs["text_output"] == "aa"


def test_a_killed_engine_fails_requests_in_flight_and_refuses_later_ones_until_it_is_back(service):
    flying = [submit(service, [toy_engine.QUIET]) for _ in range(3)]
    eventually(lambda: not service._engine.engine._unconfirmed)
    os.kill(service._engine.engine.pid, signal.SIGKILL)
    errors = [sender.all()[0].error for sender in flying]
    assert [error.code for error in errors] == ["INTERNAL"] * 3
    assert "died (signal 9)" in errors[0].message
    assert submit(service, "a").all()[0].error.code == "UNAVAILABLE"


def test_an_error_in_the_engines_step_reaches_the_client_in_words(service):
    (response,) = submit(service, [toy_engine.BREAK]).all()
    assert (response.error.code, response.error.message) == (
        "INTERNAL",
        "INTERNAL: the engine stopped: RuntimeError: the toy broke",
    )


def test_who_may_have_caused_the_engines_error_is_not_told_to_send_it_again(service, monkeypatch):
    """Although the engine ended before it could say that the request had arrived."""
    monkeypatch.setattr(type(service._engine.engine), "is_unconfirmed", lambda engine, request_id: True)
    (response,) = submit(service, [toy_engine.BREAK]).all()
    assert response.error.code == "INTERNAL"


def test_an_engine_that_ends_while_a_request_is_handed_over_is_blamed_on_it(service, monkeypatch):
    engine = service._engine.engine
    send = engine.send

    def send_slowly(message):
        send(message)
        eventually(lambda: service._engine.engine is not engine)

    monkeypatch.setattr(engine, "send", send_slowly)
    (response,) = submit(service, [toy_engine.BREAK]).all()
    assert response.error.code == "INTERNAL"


def test_closing_lets_requests_finish_and_refuses_new_ones(service):
    sender = submit(service, "ab", max_tokens=3000, exclude_input_in_output=True)
    service.close()
    assert joined(sender.all()) == "ab" * 1500
    assert submit(service, "a").all()[0].error.code == "UNAVAILABLE"


def test_a_full_queue_refuses_at_once_and_takes_requests_again_when_it_empties(model_dir, triton):
    config = EngineConfig(target_model=str(model_dir), max_num_seqs=toy_engine.NUM_ROWS, max_queue_size=1)
    service = FrontendService(config, "dflash", triton, COMMAND)
    try:
        waiting = [submit(service, [toy_engine.QUIET]) for _ in range(2)]
        # Two wait for the two rows, whether or not the engine has said so yet: there is room for one more, not for two.
        refused = submit(service, "ab", sampling={"n": 2})
        assert refused.answered
        (response,) = refused.all()
        assert response.error.code == "UNAVAILABLE"
        assert "2 requests wait already, this one has 2, and max_queue_size is 1" in response.error.message
        assert submit(service, "ab", max_tokens=2).all()[0].outputs["text_output"] == "abab"
        for sender in waiting:
            sender.cancelled = True
        assert [sender.all()[0].error.code for sender in waiting] == ["CANCELLED"] * 2
        # The engine hears of the cancellations before it hears of these.
        for n in (1, 2):
            assert submit(service, "ab", sampling={"n": n}, max_tokens=2).all()[0].error is None
    finally:
        service.close()


def test_a_load_that_fails_is_an_error_with_the_engines_sentence(model_dir, triton):
    config = EngineConfig(target_model=str(model_dir), max_model_len=toy_engine.FAIL_AT)
    with pytest.raises(EngineError, match="the toy cannot load with 13"):
        FrontendService(config, "dflash", triton, COMMAND)
    assert "dflash: loading 50%: toy" in triton.lines


def test_requests_are_counted_by_how_they_ended(service, triton):
    submit(service, "ab", max_tokens=6).all()
    submit(service, "abcd", max_tokens=6, sampling={"n": 3, "stop": "b"}).all()
    submit(service, "").all()
    submit(service, [toy_engine.REFUSE_SECOND], sampling={"n": 3}).all()
    service.close()
    assert triton.values["dflash:request_success_total", "length"] == 1
    assert triton.values["dflash:request_success_total", "stop"] == 3
    assert triton.values["dflash:request_errors_total", "UNAVAILABLE"] == 1
    assert triton.values["dflash:prompt_tokens_total",] == 2 + 4
    assert triton.values["dflash:request_errors_total", "INVALID_ARGUMENT"] == 1
    assert triton.values["dflash:generation_tokens_total",] == 6 + 3 * 2
    assert triton.values["dflash:num_requests_running", "dflash_0_0"] == 0
    assert triton.observed("dflash:time_to_first_token_seconds")[0] == 2
    assert triton.observed("dflash:request_queue_time_seconds") == (2, 1.0)


# What Triton does not take must end one request and no more.


def in_flight(service: FrontendService) -> int:
    return len(service._flights)


def eventually(reached) -> None:
    deadline = time.monotonic() + WAIT_S
    while not reached():
        assert time.monotonic() < deadline, f"not within {WAIT_S} s"
        time.sleep(0.01)


@pytest.mark.parametrize("sampling", [{}, {"n": 3}])
def test_a_response_that_cannot_be_sent_ends_its_request_with_an_error_and_no_other(service, triton, sampling):
    other = submit(service, "ab", max_tokens=1500, stream=True)
    broken = submit(service, "ab", max_tokens=10**9, stream=True, sampling=sampling)
    broken.next()
    broken.failures = 1
    error = broken.all()[-1].error
    assert (error.code, "could not be handed to Triton" in error.message) == ("INTERNAL", True)
    assert "dflash_1_ab" not in error.message  # the name of the shared memory is the server's
    assert joined(other.all()) == "ab" * 750
    assert submit(service, "a", max_tokens=2, exclude_input_in_output=True).all()[0].outputs["text_output"] == "aa"
    service.close()
    # The engine was told: nothing ran on.
    assert service._metrics._last.num_requests_running == 0
    assert triton.values["dflash:request_errors_total", "INTERNAL"] == 1


def test_a_last_response_that_cannot_be_sent_ends_its_request_and_no_other(service, triton):
    other = submit(service, "ab", max_tokens=1500, stream=True)
    broken = submit(service, "ab", max_tokens=30)
    broken.failures = 10**9
    eventually(lambda: broken.answered)
    assert joined(other.all()) == "ab" * 750
    assert service.ready
    eventually(lambda: not service._flights)
    service.close()
    assert triton.values["dflash:request_errors_total", "INTERNAL"] == 1
    assert any("could not be told of its error" in line for line in triton.lines)


def test_a_refusal_that_cannot_be_sent_hurts_nobody(service):
    request = Request(sampling_parameters="{}", text_input="")
    request.sender.failures = 10**9
    service.submit(request)
    assert submit(service, "a", max_tokens=2).all()[0].error is None


def test_an_answer_without_room_in_the_shared_memory_is_refused_while_that_can_still_be_said(service):
    rooms = []
    service._has_room = lambda num_bytes: rooms.append(num_bytes) or num_bytes < 500
    (large,) = submit(service, "ab", max_tokens=1000).all()
    assert large.error.code == "INTERNAL"
    assert "does not fit the shared memory between Triton and the model (/dev/shm)" in large.error.message
    (small,) = submit(service, "ab", max_tokens=100, exclude_input_in_output=True).all()
    assert small.outputs["text_output"] == "ab" * 50
    # Triton stores a text with its length, and of these answers a text is all there is.
    assert rooms == [len("ab") + 1000 + 4, 100 + 4]


def test_a_request_that_triton_cannot_be_asked_about_ends_and_no_other(service):
    other = submit(service, "ab", max_tokens=1500, stream=True)
    sender = submit(service, [toy_engine.QUIET], max_tokens=10**9)
    sender.unreachable = True
    (response,) = sender.all()
    assert (response.error.code, "could not be asked" in response.error.message) == ("INTERNAL", True)
    assert joined(other.all()) == "ab" * 750


def test_metrics_that_triton_does_not_take_stop_nothing_and_arrive_later(service, triton):
    triton.metrics_fail = True
    submit(service, "ab", max_tokens=6).all()
    eventually(lambda: any("metrics could not be handed to Triton" in line for line in triton.lines))
    assert submit(service, "ab", max_tokens=6).all()[0].error is None
    triton.metrics_fail = False
    service.close()
    assert triton.values["dflash:generation_tokens_total",] == 12
    assert len([line for line in triton.lines if "metrics could not" in line]) == 1


def test_a_log_that_triton_does_not_take_stops_nothing(model_dir, triton, capsys):
    def broken(text: str) -> None:
        raise RuntimeError("no shared memory is left for a line")

    triton.Logger.log_info = broken
    service = FrontendService(EngineConfig(target_model=str(model_dir)), "dflash", triton, COMMAND)
    assert submit(service, "ab", max_tokens=2).all()[0].error is None
    service.close()
    assert "dflash: ready: toy (not in the log: no shared memory is left for a line)" in capsys.readouterr().err


def test_a_fault_in_one_requests_text_ends_that_request_alone(service, monkeypatch):
    other = submit(service, "ab", max_tokens=1500, stream=True)
    broken = submit(service, "ab", max_tokens=10**9, stream=True)
    broken.next()
    (flight,) = [flight for flight in service._flights.values() if flight.parsed.sampling.max_tokens > 10**6]
    monkeypatch.setattr(flight, "add", lambda delta: 1 / 0)
    assert broken.all()[-1].error.code == "INTERNAL"
    assert joined(other.all()) == "ab" * 750


@pytest.mark.parametrize("stream", [True, False])
def test_a_request_whose_responses_hold_too_much_ends_with_an_error(model_dir, triton, stream):
    config = EngineConfig(target_model=str(model_dir), max_response_mb=0.5)
    service = FrontendService(config, "dflash", triton, COMMAND)
    try:
        sampling = {"n": 2, "logprobs": 3}
        responses = submit(
            service, "ab", max_tokens=10**9, stream=stream, sampling=sampling, return_logprobs=True
        ).all()
        sent = sum(len(text) for response in responses[:-1] for text in response.outputs["logprobs"])
        assert (sent > 0) is stream
        assert sent <= 500_000
        assert responses[-1].error.code == "INVALID_ARG"
        assert "has grown past max_response_mb (0.5 MB)" in responses[-1].error.message
        assert submit(service, "ab", max_tokens=50).all()[0].error is None
    finally:
        service.close()
    assert service._metrics._last.num_requests_running == 0


def test_an_output_thread_that_dies_answers_everybody_says_why_and_ends_the_process(model_dir, triton, capsys):
    ended = threading.Event()
    service = FrontendService(EngineConfig(target_model=str(model_dir)), "dflash", triton, COMMAND, abandon=ended.set)
    senders = [submit(service, [toy_engine.QUIET]) for _ in range(3)]
    senders[0].failures = 10**9
    pid = service._engine.engine.pid
    service._activity.line = lambda now: 1 / 0
    assert ended.wait(WAIT_S)
    for sender in senders[1:]:
        (response,) = sender.all()
        assert (response.error.code, "the model stopped working" in response.error.message) == ("INTERNAL", True)
    assert "dflash: the model stops: ZeroDivisionError: division by zero; the server must be restarted" in triton.lines
    assert "in <lambda>" in capsys.readouterr().err
    assert not Path(f"/proc/{pid}").exists()
    assert submit(service, "a").all()[0].error.code == "UNAVAILABLE"


def test_a_service_that_is_closed_does_not_end_the_process(model_dir, triton):
    ended = threading.Event()
    service = FrontendService(EngineConfig(target_model=str(model_dir)), "dflash", triton, COMMAND, abandon=ended.set)
    service.close()
    assert not ended.is_set()


def test_a_model_that_fails_to_load_has_made_no_metric(model_dir, triton):
    """Triton 2.51 crashes later when a model that made some fails to load while it replaces one that serves."""
    with pytest.raises(EngineError):
        FrontendService(
            EngineConfig(target_model=str(model_dir), max_model_len=toy_engine.FAIL_AT), "dflash", triton, COMMAND
        )
    assert not triton.values


def test_a_request_that_never_reached_a_dead_engine_may_be_sent_again(service):
    os.kill(service._engine.engine.pid, signal.SIGKILL)
    for _ in range(20):
        (response,) = submit(service, "a").all()
        assert (response.error.code, "is being restarted" in response.error.message) == ("UNAVAILABLE", True)


def test_a_hanging_engine_is_replaced_and_everybody_is_told(model_dir, triton):
    config = EngineConfig(target_model=str(model_dir), engine_hang_timeout_s=1.5)
    service = FrontendService(config, "dflash", triton, COMMAND)
    try:
        running = submit(service, "ab", max_tokens=10**9, stream=True)
        running.next()
        eventually(lambda: not service._engine.engine._unconfirmed)
        os.kill(service._engine.engine.pid, signal.SIGSTOP)
        late = submit(service, "ab", max_tokens=4)
        error = running.all()[-1].error
        assert (error.code, "the engine hangs" in error.message) == ("INTERNAL", True)
        assert late.all()[0].error.code == "UNAVAILABLE"
        eventually(lambda: service.ready)
        assert submit(service, "ab", max_tokens=4).all()[0].error is None
        eventually(lambda: triton.values["dflash:engine_restarts_total",] == 1)
    finally:
        service.close()


def test_the_heartbeat_file_is_touched_for_as_long_as_the_output_thread_goes_on(
    model_dir, triton, tmp_path, monkeypatch
):
    file = tmp_path / "heartbeat"
    monkeypatch.setenv("DFLASH_HEARTBEAT_FILE", str(file))
    service = FrontendService(EngineConfig(target_model=str(model_dir)), "dflash", triton, COMMAND)
    eventually(file.exists)
    before = file.stat().st_mtime_ns
    eventually(lambda: file.stat().st_mtime_ns > before)
    service.close()
    last = file.stat().st_mtime_ns
    time.sleep(1.5)
    assert file.stat().st_mtime_ns == last


def test_this_process_ends_with_the_server(model_dir, triton):
    ended = threading.Event()
    server = subprocess.Popen(["sleep", "600"])
    config = EngineConfig(target_model=str(model_dir))
    service = FrontendService(config, "dflash", triton, COMMAND, server_pid=server.pid, abandon=ended.set)
    # The engine would kill the process of this test.
    service._engine.close()
    server.kill()
    assert ended.wait(WAIT_S)
    service.close()
    server.wait()


def test_tokens_prompts_and_completions_are_observed_as_vllm_does(service, triton):
    submit(service, "abc", max_tokens=7).all()
    submit(service, "ab", max_tokens=5, sampling={"n": 3}).all()
    submit(service, "a", max_tokens=1).all()
    service.close()
    # Each token but the first of a completion.
    assert triton.observed("dflash:inter_token_latency_seconds")[0] == 6 + 3 * 4
    assert triton.observed("dflash:request_time_per_output_token_seconds")[0] == 2
    assert triton.observed("dflash:request_prompt_tokens") == (3, 3 + 2 + 1)
    assert triton.observed("dflash:request_generation_tokens") == (5, 7 + 3 * 5 + 1)
    assert triton.observed("dflash:request_params_n") == (3, 1 + 3 + 1)


@pytest.mark.parametrize("stream", [True, False])
def test_the_metrics_page_has_a_request_before_its_client_has_the_end_of_the_answer(service, triton, stream):
    names = ("dflash:generation_tokens_total", "dflash:e2e_request_latency_seconds_count")
    for number in range(1, 6):
        pages: list[list[float]] = []
        request = Request(sampling_parameters=json.dumps({"max_tokens": 6}), text_input="ab", stream=stream)
        request.sender.before_last = lambda pages=pages: pages.append([triton.values[name,] for name in names])
        service.submit(request)
        request.sender.all()
        assert pages == [[6.0 * number, float(number)]]
        # At a rate that leaves the time for it.
        time.sleep(0.2)


def test_gauges_tell_of_a_hanging_engine_what_the_frontend_knows(service, triton):
    eventually(lambda: triton.values["dflash:frontend_heartbeat_timestamp_seconds", "dflash_0_0"] > time.time() - 5)
    os.kill(service._engine.engine.pid, signal.SIGSTOP)
    sender = submit(service, "ab", max_tokens=6)
    eventually(lambda: triton.values["dflash:num_requests_in_flight", "dflash_0_0"] == 1)
    eventually(lambda: triton.values["dflash:engine_silence_seconds", "dflash_0_0"] > 1)
    assert triton.values["dflash:num_requests_running", "dflash_0_0"] == 0
    os.kill(service._engine.engine.pid, signal.SIGCONT)
    sender.all()
    eventually(lambda: triton.values["dflash:num_requests_in_flight", "dflash_0_0"] == 0)
    eventually(lambda: triton.values["dflash:engine_silence_seconds", "dflash_0_0"] < 1)


def test_the_stream_that_was_sent_the_most_ends_when_the_server_holds_too_much(service, triton):
    held = [0]
    service._server_memory = ServerMemory(10**9, lambda: held[0])
    small = submit(service, "ab", max_tokens=10**9, stream=True)
    large = submit(service, "ab", max_tokens=10**9, stream=True, sampling={"logprobs": 5}, return_logprobs=True)
    eventually(lambda: any(f.responder.num_bytes_sent > 2 << 20 for f in list(service._flights.values())))
    held[0] = 2 * 10**9
    error = large.all()[-1].error
    assert (error.code, "tritonserver holds 2.0 GB (max_server_memory_gb)" in error.message) == ("UNAVAILABLE", True)
    assert any("the stream that was sent the most" in line for line in triton.lines)
    assert not small.answered
    small.cancelled = True
    assert small.all()[-1].error.code == "CANCELLED"


def test_a_server_that_holds_much_for_other_reasons_keeps_its_streams(service, triton):
    looks: list[int] = []
    service._server_memory = ServerMemory(10**9, lambda: looks.append(1) or 2 * 10**9)
    sender = submit(service, "ab", max_tokens=3000, stream=True)
    assert joined(sender.all()) == "ab" * 1500
    eventually(lambda: looks)


# Triton's thread adds requests while the output thread looks at them; its newest it takes out when the engine has died.


def test_a_request_that_is_taken_out_while_triton_is_asked_about_it_hurts_nobody(service):
    sender = submit(service, [toy_engine.QUIET])
    taken = threading.Event()

    def vanish() -> bool:
        service._flights.popitem()
        taken.set()
        return True

    sender.is_cancelled = vanish
    assert taken.wait(WAIT_S)
    assert submit(service, "ab", max_tokens=2).all()[0].error is None


def test_requests_that_come_while_the_largest_stream_is_looked_for_hurt_nobody(service):
    class Growing:
        responder = SimpleNamespace(num_bytes_sent=0)

        @property
        def parsed(self) -> SimpleNamespace:
            service._flights[str(len(service._flights))] = Growing()
            return SimpleNamespace(stream=True)

    service._flights["0"] = Growing()
    service._end_largest_stream()
    assert len(service._flights) == 2
    service._flights.clear()
