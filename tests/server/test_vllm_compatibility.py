"""What a client of Triton's vLLM backend sends, answered as that backend would: shapes, types, prompt, deltas, reasons.

Where the two differ on purpose: a step may yield several tokens, so there are fewer responses; a bad request is
INVALID_ARGUMENT and without an output in place of an error without a status and the text "N/A"; `num_input_tokens` has
the shape [1]; the inputs `image` and `embedding_request` are refused.
"""

from __future__ import annotations

import itertools
import json
import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import tritonclient.grpc as triton_grpc

from tests.server.conftest import settle
from tests.server.raw_grpc import WAIT_S, infer, inputs_of, text_of
from tests.support.scale import SCALE
from tests.support.waiting import eventually

PROMPT = "The most dangerous animal is"
GREEDY = {"temperature": "0", "top_p": "1"}
FLAGS = (
    "return_finish_reason",
    "return_cumulative_logprob",
    "return_logprobs",
    "return_num_input_tokens",
    "return_num_output_tokens",
)
CHOSEN = [
    (a, b, c, d, e)
    for a, b, c, d, e in itertools.product((None, True), repeat=len(FLAGS))
    # Any two flags in all their combinations; `make nightly` has those of all five.
    if SCALE >= 4 or ((a is b) == (d is None) and (a is c) == (e is None))
]
COMBINATIONS = [(*others, *flags) for *others, flags in itertools.product((True, False), (None, 0, 2), CHOSEN)]


@pytest.fixture
def ask(server):
    def ask(parameters=None, **inputs):
        return infer(server.grpc_url, inputs_of(**inputs), parameters)

    return ask


@pytest.fixture(scope="session")
def answer(server):
    """What the model says to the prompt, without it."""
    sampling = json.dumps(GREEDY)
    results, error = infer(server.grpc_url, inputs_of(text_input=PROMPT, stream=True, sampling_parameters=sampling))
    assert error is None
    return text_of(results)


@pytest.mark.parametrize(("as_input", "as_parameters"), [(True, False), (False, True), (True, True)])
def test_parameters_with_numbers_as_strings_work_as_an_input_as_request_parameters_and_as_both(
    ask, answer, as_input, as_parameters
):
    sent = {"sampling_parameters": json.dumps(GREEDY)} if as_input else {}
    (result,), error = ask(GREEDY if as_parameters else None, text_input=PROMPT, stream=False, **sent)
    assert error is None
    assert text_of([result]) == PROMPT + answer


def test_the_prompt_is_left_out_only_when_asked_without_streaming(ask, answer):
    for exclude, prefix in ((None, PROMPT), (False, PROMPT), (True, "")):
        (result,), _ = ask(GREEDY, text_input=PROMPT, stream=False, exclude_input_in_output=exclude)
        assert text_of([result]) == prefix + answer


def test_streamed_deltas_come_without_the_prompt(ask, answer):
    for exclude in (None, True):
        results, _ = ask(GREEDY, text_input=PROMPT, stream=True, exclude_input_in_output=exclude)
        assert len(results) > 1
        assert text_of(results) == answer


@pytest.mark.parametrize(
    ("parameters", "inputs", "message"),
    [
        (
            GREEDY,
            {"stream": True, "exclude_input_in_output": False},
            "Error generating stream: When streaming, `exclude_input_in_output` = False is not allowed.",
        ),
        ({"lora_name": "doll"}, {"stream": False}, "LoRA feature is not enabled."),
    ],
)
def test_errors_whose_whole_text_clients_of_that_backend_compare_are_the_same_word_for_word(
    ask, parameters, inputs, message
):
    _, error = ask(parameters, text_input=PROMPT, **inputs)
    assert error.message() == message


def test_every_combination_of_additional_outputs_has_their_form(server):
    def check(numbered):
        number, (stream, logprobs, *flags) = numbered
        # Not asking is as good as asking for false.
        asked = dict(zip(FLAGS, flags, strict=True))
        sent = {name: False if flag is None and number % 3 else flag for name, flag in asked.items()}
        sampling = GREEDY if logprobs is None else {**GREEDY, "logprobs": logprobs}
        inputs = inputs_of(text_input=PROMPT, stream=stream, sampling_parameters=json.dumps(sampling), **sent)
        results, error = infer(server.grpc_url, inputs, {name: str(value) for name, value in sampling.items()})
        assert error is None
        check_outputs(results, stream, logprobs, asked)

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(check, enumerate(COMBINATIONS)))


def check_outputs(results, stream, logprobs, asked) -> None:
    """The claims of that backend's tests about the outputs of one request."""
    assert stream or len(results) == 1
    sums = []
    for index, result in enumerate(results):
        outputs = {name.removeprefix("return_"): result.as_numpy(name.removeprefix("return_")) for name in FLAGS}
        assert {f"return_{name}" for name, array in outputs.items() if array is not None} == {
            name for name, flag in asked.items() if flag
        }
        text = result.as_numpy("text_output")
        assert (text.shape, text.dtype) == ((1,), np.object_)
        if asked["return_finish_reason"]:
            reasons = [b"stop", b"length"] if index == len(results) - 1 else [b"None"]
            assert outputs["finish_reason"].shape == (1,)
            assert outputs["finish_reason"][0] in reasons
        if asked["return_cumulative_logprob"]:
            assert (outputs["cumulative_logprob"].shape, outputs["cumulative_logprob"].dtype) == ((1,), np.float32)
            sums.append(float(outputs["cumulative_logprob"][0]))
        for name in ("num_input_tokens", "num_output_tokens"):
            if asked[f"return_{name}"]:
                assert (outputs[name].shape, outputs[name].dtype) == ((1,), np.uint32)
                assert outputs[name][0] > 0
        if asked["return_logprobs"]:
            entries = json.loads(outputs["logprobs"][0])
            assert (entries is None) == (logprobs is None)
            if entries is not None:
                check_logprobs(entries, logprobs, text[0].decode().removeprefix("" if stream else PROMPT))
                assert not asked["return_num_output_tokens"] or len(entries) == outputs["num_output_tokens"][0]
    assert len(set(sums)) == len(sums), "each response moves the sum on"


def check_logprobs(entries, logprobs, text) -> None:
    assert entries
    likeliest = ""
    for entry in entries:
        assert 1 <= len(entry) <= logprobs + 1
        for token_id, of_token in entry.items():
            assert int(token_id) >= 0
            assert set(of_token) == {"logprob", "rank", "decoded_token"}
            assert (type(of_token["logprob"]), type(of_token["rank"])) == (float, int)
        (first,) = [of_token for of_token in entry.values() if of_token["rank"] == 1]
        likeliest += first["decoded_token"]
    assert likeliest == text


def test_several_completions_are_elements_of_the_outputs(ask):
    sampling = {"n": "2", "temperature": "1", "seed": "5", "max_tokens": "8", "ignore_eos": "true"}
    flags = dict.fromkeys(FLAGS, True)
    (result,), _ = ask(sampling, text_input=PROMPT, stream=False, **flags)
    for name in ("text_output", "finish_reason", "cumulative_logprob", "logprobs", "num_output_tokens"):
        assert result.as_numpy(name).shape == (2,)
    texts = result.as_numpy("text_output").tolist()
    assert all(text.startswith(PROMPT.encode()) for text in texts)
    streamed, _ = ask(sampling, text_input=PROMPT, stream=True, **flags)
    assert [PROMPT + text_of(streamed, index) for index in range(2)] == [text.decode() for text in texts]


def test_requests_on_one_stream_are_each_answered(server, answer):
    results: list = []
    answered = threading.Semaphore(0)

    def on_response(result, error):
        results.append((result, error))
        answered.release()

    with triton_grpc.InferenceServerClient(server.grpc_url) as client:
        client.start_stream(on_response)
        for number in range(3):
            inputs = inputs_of(text_input=PROMPT, stream=False, sampling_parameters=json.dumps(GREEDY))
            outputs = [triton_grpc.InferRequestedOutput("text_output")]
            client.async_stream_infer("dflash", inputs, request_id=str(number), outputs=outputs, parameters=GREEDY)
        for _ in range(3):
            assert answered.acquire(timeout=WAIT_S)
        client.stop_stream()
    assert {result.get_response().id for result, _ in results} == {"0", "1", "2"}
    assert {result.as_numpy("text_output")[0].decode() for result, _ in results} == {PROMPT + answer}


def test_a_cancelled_stream_ends_with_cancelled(server, metric):
    errors: list = []
    settle(metric)
    before = metric("dflash:request_errors_total", status="CANCELLED")
    running = "dflash:num_requests_running"
    with triton_grpc.InferenceServerClient(server.grpc_url) as client:
        client.start_stream(lambda result, error: errors.append(error))
        sampling = {"temperature": "0", "max_tokens": "900", "ignore_eos": "true"}
        client.async_stream_infer("dflash", inputs_of(text_input=PROMPT, stream=False), parameters=sampling)
        eventually(lambda: metric(running) == 1, "it runs")
        client.stop_stream(cancel_requests=True)
    assert [error.status() for error in errors] == ["StatusCode.CANCELLED"]
    eventually(lambda: metric("dflash:request_errors_total", status="CANCELLED") == before + 1, "it is counted")
