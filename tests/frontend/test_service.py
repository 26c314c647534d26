"""The frontend as a whole, over a toy engine process and a stand-in for Triton's module."""

from __future__ import annotations

import json
import os
import signal

import pytest

from dflash_backend.config import EngineConfig
from dflash_backend.frontend.engine_client import EngineError, engine_command
from dflash_backend.frontend.service import FrontendService
from tests.frontend import toy_engine
from tests.frontend.fake_triton import FakeTriton, Request

COMMAND = engine_command("tests.frontend.toy_engine")
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
    assert (response.error.code, response.error.message) == ("UNAVAILABLE", "the toy refuses this prompt")


@pytest.mark.parametrize("prompt", [[toy_engine.QUIET], list(b"ab")])
def test_a_cancelled_request_ends_whether_it_yields_tokens_or_not(service, prompt):
    sender = submit(service, prompt, max_tokens=10**9)
    sender.cancelled = True
    assert sender.all()[0].error.code == "CANCELLED"
    (after,) = submit(service, "a", max_tokens=2, exclude_input_in_output=True).all()
    assert after.outputs["text_output"] == "aa"


def test_a_killed_engine_fails_requests_in_flight_and_later_ones_at_once(service):
    flying = [submit(service, [toy_engine.QUIET]) for _ in range(3)]
    os.kill(service._engine.pid, signal.SIGKILL)
    errors = [sender.all()[0].error for sender in flying]
    assert [error.code for error in errors] == ["INTERNAL"] * 3
    assert "died (signal 9)" in errors[0].message
    assert submit(service, "a").all()[0].error.code == "INTERNAL"


def test_an_error_in_the_engines_step_reaches_the_client_in_words(service):
    (response,) = submit(service, [toy_engine.BREAK]).all()
    assert (response.error.code, response.error.message) == (
        "INTERNAL",
        "the engine stopped: RuntimeError: the toy broke",
    )


def test_closing_lets_requests_finish_and_refuses_new_ones(service):
    sender = submit(service, "ab", max_tokens=3000, exclude_input_in_output=True)
    service.close()
    assert joined(sender.all()) == "ab" * 1500
    assert submit(service, "a").all()[0].error.code == "UNAVAILABLE"


def test_a_load_that_fails_is_an_error_with_the_engines_sentence(model_dir, triton):
    config = EngineConfig(target_model=str(model_dir), max_model_len=toy_engine.FAIL_AT)
    with pytest.raises(EngineError, match="the toy cannot load with 13"):
        FrontendService(config, "dflash", triton, COMMAND)
    assert "dflash: loading 50%: toy" in triton.lines


def test_requests_are_counted_by_how_they_ended(service, triton):
    submit(service, "ab", max_tokens=6).all()
    submit(service, "").all()
    service.close()
    assert triton.values["dflash:request_success_total", "length"] == 1
    assert triton.values["dflash:request_errors_total", "INVALID_ARGUMENT"] == 1
    assert triton.values["dflash:generation_tokens_total",] == 6
    assert triton.values["dflash:num_requests_running",] == 0
    assert len(triton.observed["dflash:time_to_first_token_seconds"]) == 1
    assert triton.observed["dflash:request_queue_time_seconds"] == [0.5]
