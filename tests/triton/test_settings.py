"""Every setting of the Triton side changes what a client gets, or what the engine is asked, through the whole service:
a setting that is parsed and not used fails here. `tests/engine/test_settings.py` does so for those of the engine."""

from __future__ import annotations

import json
import os
import shutil
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from checks.byte_tokenizer import EOS
from dflash_backend.config import EngineConfig
from dflash_backend.engine_client.client import EngineClient
from dflash_backend.engine_client.engines import EngineOutputs
from dflash_backend.messages import EngineCoreOutputs, GenerationRequest, RequestFailed
from dflash_backend.triton import running_requests
from dflash_backend.triton.service import TritonService
from tests.engine_client.toy_process import SLOW, TOKENS_PER_STEP
from tests.triton.fake_triton import FakeTriton, InferenceResponse, Request
from tests.triton.serving import COMMAND, submit


@pytest.fixture
def served(model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A service with some settings answers one request: its last response, and what the engine was asked."""
    shutil.copytree(model_dir, tmp_path / "model")
    recommended = {"eos_token_id": [7, EOS], "temperature": 0.25}
    (tmp_path / "model" / "generation_config.json").write_text(json.dumps(recommended), encoding="utf-8")
    asked: list[GenerationRequest] = []
    send = EngineClient.send

    def recorded(client: EngineClient, message: Any) -> None:
        if isinstance(message, GenerationRequest):
            asked.append(message)
        send(client, message)

    monkeypatch.setattr(EngineClient, "send", recorded)

    def served(settings: dict[str, Any], **request: Any) -> tuple[InferenceResponse, list[GenerationRequest]]:
        asked.clear()
        config = EngineConfig.from_values({"target_model": str(tmp_path / "model"), **settings})
        service = TritonService(config, "dflash", FakeTriton(), COMMAND)
        try:
            if "messages" not in request:
                return submit(service, **request).all()[-1], list(asked)
            sent = Request('{"max_tokens": 1}', **request)
            service.submit(sent)
            return sent.sender.all()[-1], list(asked)
        finally:
            service.close()

    return served


def test_request_timeout_s_goes_to_the_engine_with_every_completion(served: Any) -> None:
    _, asked = served({"request_timeout_s": 2.5}, text="ab", max_tokens=3, sampling={"n": 2})
    assert [message.deadline_s for message in asked] == [2.5, 2.5]
    _, asked = served({}, text="ab", max_tokens=3)
    assert [message.deadline_s for message in asked] == [0.0]


def test_max_response_mb_ends_an_answer_that_grows_past_it(served: Any) -> None:
    request = {"text": "ab", "max_tokens": 3000, "exclude_input_in_output": True}
    response, _ = served({"max_response_mb": 0.001}, **request)
    assert "past max_response_mb (0.001 MB)" in response.error.message
    response, _ = served({"max_response_mb": 1}, **request)
    assert response.error is None


def test_stream_interval_is_for_requests_that_ask_for_none(serve: Any) -> None:
    """The toy yields three tokens a step. The first response has what came first, the last what is left."""
    for setting, asked, expected in ((1, {}, {3}), (7, {}, {9}), (7, {"stream_interval": 4}, {6})):
        service = serve(stream_interval=setting, max_stream_responses_per_s=10**9)
        flags = {"stream": True, "exclude_input_in_output": True, "return_num_output_tokens": True}
        sent = submit(service, "ab", max_tokens=3 * 13, sampling=asked, **flags).all()
        counts = [response.outputs["num_output_tokens"][0] for response in sent]
        assert (counts[0], sum(counts)) == (3, 39)
        # A busy machine may bring several steps at once.
        assert min(counts[1:-1]) in expected


COUNTED = {"stream": True, "exclude_input_in_output": True, "return_num_output_tokens": True}
STEPS = 20


@pytest.mark.parametrize(
    ("rate", "num_streams", "asked", "as_vllm", "waits"),
    [
        (10**9, 2, {}, False, False),
        (200, 1, {}, False, False),  # a step takes longer than a response may wait
        (1, 1, {}, False, True),
        (1, 1, {}, True, False),
        (1, 2, {}, True, True),
        (1, 2, {"stream_interval": 1}, False, False),
    ],
)
def test_max_stream_responses_per_s_has_tokens_of_streams_wait(
    serve: Any,
    monkeypatch: pytest.MonkeyPatch,
    rate: int,
    num_streams: int,
    asked: dict[str, Any],
    as_vllm: bool,
    waits: bool,
) -> None:
    """A step takes 10 ms here, or more, and tokens wait half a second at most."""
    monkeypatch.setattr(running_requests, "MAX_WAIT_S", 0.5)
    service = serve(max_stream_responses_per_s=rate, as_vllm=as_vllm)
    streams = [
        submit(service, [SLOW, 98], TOKENS_PER_STEP * STEPS, sampling=asked, **COUNTED) for _ in range(num_streams)
    ]
    for stream in streams:
        responses = stream.all()
        counts = [response.outputs["num_output_tokens"][0] for response in responses]
        assert sum(counts) == TOKENS_PER_STEP * STEPS
        assert counts[0] == TOKENS_PER_STEP
        # The last response may come soon after the one before.
        assert (len(counts) < STEPS / 2) == waits


def tokens_before_the_end(monkeypatch: pytest.MonkeyPatch, serve: Any, number: int) -> int:
    """Two streams whose tokens may wait for a minute get this signal to their engine once some wait. Returns how many
    tokens the next response of one of them has, 0 for an error."""
    monkeypatch.setattr(running_requests, "MAX_WAIT_S", 60.0)
    service = serve(max_stream_responses_per_s=1)
    stream, other = (submit(service, [SLOW, 98], 30_000, **COUNTED) for _ in range(2))
    for _ in range(2):  # the first one, and the first that might have waited
        assert stream.next().error is None
    until = time.monotonic() + 30
    while len(service._requests._waiting) < 2 and time.monotonic() < until:
        time.sleep(0.005)
    engine = service._engines.supervisors[0].engine.pid
    os.kill(engine, number)
    try:
        response = stream.next()
        return 0 if response.error is not None else response.outputs["num_output_tokens"][0]
    finally:
        if number == signal.SIGSTOP:
            os.kill(engine, signal.SIGCONT)
            stream.cancelled = other.cancelled = True


def test_tokens_that_wait_leave_before_the_error_of_an_engine_that_is_lost(
    serve: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert tokens_before_the_end(monkeypatch, serve, signal.SIGKILL) >= TOKENS_PER_STEP


def test_tokens_that_wait_leave_before_the_error_of_their_request(serve: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(running_requests, "MAX_WAIT_S", 600.0)
    monkeypatch.setattr(running_requests.RunningRequests, "_wait_s", 600.0)
    service = serve(max_stream_responses_per_s=1)
    stream, _ = (submit(service, [SLOW, 98], 30_000, **COUNTED) for _ in range(2))
    for _ in range(2):
        assert stream.next().error is None
    process = service._requests.process

    def reject(outputs: list[EngineOutputs]) -> None:
        """As if the engine refused all requests once some tokens wait."""
        process(outputs)
        if len(service._requests._waiting) == 2:
            refused = [RequestFailed(request_id, "INTERNAL", "no more") for request_id in service._requests._waiting]
            process([EngineOutputs(0, EngineCoreOutputs(failed=refused))])

    monkeypatch.setattr(service._requests, "process", reject)
    *responses, last = stream.all()
    assert last.error.message.endswith("no more")
    assert [int(each.outputs["num_output_tokens"][0]) for each in responses] == [TOKENS_PER_STEP] * len(responses)
    assert responses


def test_tokens_that_wait_leave_in_time_though_the_engine_says_nothing_more(
    serve: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two streams and one response a second: after a second, long before an engine that hangs is given up."""
    started = time.monotonic()
    assert tokens_before_the_end(monkeypatch, serve, signal.SIGSTOP) >= TOKENS_PER_STEP
    assert time.monotonic() - started < 20


def test_stream_interval_of_a_request_is_checked(serve: Any) -> None:
    service = serve()
    for value in (0, -1, 1.5, "x"):
        (response,) = submit(service, "ab", sampling={"stream_interval": value}, stream=True).all()
        assert "'stream_interval' has the value" in response.error.message
        assert response.error.message.endswith("allowed: an integer from 1 on")


def test_report_cached_tokens_tells_those_without_a_salt(served: Any) -> None:
    told = []
    for value in (False, True):
        response, _ = served({"report_cached_tokens": value}, text="ab", max_tokens=3, return_spec_stats=True)
        told.append(json.loads(response.outputs["spec_stats"])["num_cached_tokens"])
    assert told == [None, 0]


def test_require_cache_salt_refuses_those_without_one(served: Any) -> None:
    response, asked = served({"require_cache_salt": True}, text="ab", max_tokens=3)
    assert response.error.code == "INVALID_ARG"
    assert "cache_salt" in response.error.message
    assert asked == []
    for settings, salt in (({"require_cache_salt": True}, {"cache_salt": "x"}), ({}, {})):
        response, _ = served(settings, text="ab", max_tokens=3, sampling=salt)
        assert response.error is None


def test_message_special_tokens_decides_what_a_special_token_in_a_message_is(served: Any) -> None:
    prompts = []
    for value in ("text", "control"):
        messages = json.dumps([{"role": "user", "content": "a<s>b"}])
        _, asked = served({"message_special_tokens": value}, messages=messages)
        prompts.append(asked[0].prompt_token_ids)
    assert len(prompts[0]) == len(prompts[1]) + len("<s>") - 1
    assert bytes(token for token in prompts[0] if token < 256).count(b"<s>") == 1


def test_generation_config_takes_the_defaults_that_the_checkpoint_recommends(served: Any) -> None:
    temperatures = []
    for settings in ({"generation_config": "none"}, {"generation_config": "auto"}):
        _, asked = served(settings, text="ab", max_tokens=1)
        temperatures.append(asked[0].sampling.temperature)
    assert temperatures == [1.0, 0.25]
