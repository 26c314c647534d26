"""What ends one request must not reach the others: clients that leave, and whatever Triton does not take."""

from __future__ import annotations

import threading
from types import SimpleNamespace

import pytest

from dflash_backend.triton.server_memory import ServerMemory
from tests.engine_client import toy_process
from tests.support.waiting import WAIT_S, eventually
from tests.triton.fake_triton import Request
from tests.triton.serving import joined, submit


@pytest.mark.parametrize(
    ("prompt", "stream", "n"), [([toy_process.QUIET], False, 3), ("ab", False, 1), ("ab", True, 4)]
)
def test_a_cancelled_request_ends_with_all_its_completions_whether_it_yields_tokens_or_not(service, prompt, stream, n):
    sender = submit(service, prompt, max_tokens=10**9, sampling={"n": n}, stream=stream)
    if stream:
        sender.next()
    sender.cancelled = True
    assert sender.all()[-1].error.code == "CANCELLED"
    (after,) = submit(service, "a", max_tokens=2, exclude_input_in_output=True).all()
    assert after.outputs["text_output"] == "aa"
    eventually(lambda: service._metrics._last[0].num_requests_running == 0)


def test_a_cancelled_request_is_in_the_log_as_tests_of_the_vllm_backend_look_for_it(serve, triton):
    service = serve(as_vllm=True)
    sender = submit(service, [toy_process.QUIET], max_tokens=10**9)
    sender.cancelled = True
    assert sender.all()[-1].error.code == "CANCELLED"
    said = ["dflash: [vllm] Cancelling the request", "dflash: [vllm] Successfully cancelled the request"]
    eventually(lambda: [line for line in triton.lines if "[vllm]" in line] == said)


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
    eventually(lambda: service._metrics._last[0].num_requests_running == 0)  # the engine was told
    service.close()
    assert triton.values["dflash:request_errors_total", "INTERNAL"] == 1


def test_a_last_response_that_cannot_be_sent_ends_its_request_and_no_other(service, triton):
    other = submit(service, "ab", max_tokens=1500, stream=True)
    broken = submit(service, "ab", max_tokens=30, failures=10**9)
    eventually(lambda: broken.answered)
    assert joined(other.all()) == "ab" * 750
    assert service.ready
    eventually(lambda: any("could not be told of its error" in line for line in triton.lines))
    assert not service._requests
    service.close()
    assert triton.values["dflash:request_errors_total", "INTERNAL"] == 1


def test_an_error_is_counted_before_its_client_has_it(service):
    request = Request(sampling_parameters="{}", text_input="")
    counted = []
    request.sender.before_last = lambda: counted.append(
        [count for (name, *_), count in service._metrics._counts.items() if name == "dflash:request_errors_total"]
    )
    service.submit(request)
    (answer,) = request.sender.all()
    assert answer.error is not None
    assert [sum(each) for each in counted] == [1]


def test_a_refusal_that_cannot_be_sent_affects_no_other(service):
    request = Request(sampling_parameters="{}", text_input="")
    request.sender.failures = 10**9
    service.submit(request)
    assert submit(service, "a", max_tokens=2).all()[0].error is None


def test_an_answer_that_does_not_fit_the_shared_memory_is_refused_while_that_can_still_be_said(service):
    sizes = []
    service._fits_shared_memory = lambda num_bytes: sizes.append(num_bytes) or num_bytes < 500
    (large,) = submit(service, "ab", max_tokens=1000).all()
    assert large.error.code == "INTERNAL"
    assert "does not fit the shared memory between Triton and the model (/dev/shm)" in large.error.message
    (small,) = submit(service, "ab", max_tokens=100, exclude_input_in_output=True).all()
    assert small.outputs["text_output"] == "ab" * 50
    # Triton stores a text with its length, and of these answers a text is all there is.
    assert sizes == [len("ab") + 1000 + 4, 100 + 4]


def test_a_request_that_triton_cannot_be_asked_about_ends_and_no_other(service):
    other = submit(service, "ab", max_tokens=1500, stream=True)
    sender = submit(service, [toy_process.QUIET], max_tokens=10**9)
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


def test_a_log_that_triton_does_not_take_stops_nothing(serve, triton, capsys):
    def broken(text: str) -> None:
        raise RuntimeError("no shared memory is left for a line")

    triton.Logger.log_info = broken
    service = serve()
    assert submit(service, "ab", max_tokens=2).all()[0].error is None
    service.close()
    assert (
        "dflash: ready: toy, drafter the first; KV (not in the log: no shared memory is left for a line)"
        in capsys.readouterr().err
    )


def test_a_fault_in_one_requests_text_ends_that_request_alone(service, monkeypatch):
    other = submit(service, "ab", max_tokens=1500, stream=True)
    broken = submit(service, "ab", max_tokens=10**9, stream=True)
    broken.next()
    states = [request.state for request in service._requests._requests.values()]
    (state,) = [state for state in states if state.parsed.sampling.max_tokens > 10**6]
    monkeypatch.setattr(state, "add", lambda delta: 1 / 0)
    assert broken.all()[-1].error.code == "INTERNAL"
    assert joined(other.all()) == "ab" * 750


class PanicException(BaseException):
    """What a panic of Rust raises is no `Exception`."""


@pytest.mark.parametrize("method", ["encode_batch_fast", "decode"])
def test_a_tokenizer_that_panics_refuses_the_request_and_is_counted(service, triton, monkeypatch, method):
    fast = service._tokenizer._fast

    class Failing:
        def __getattr__(self, name):
            return getattr(fast, name)

        def fail(self, *given, **more):
            raise PanicException("at /a/path.rs:1")

    setattr(Failing, method, Failing.fail)
    monkeypatch.setattr(service._tokenizer, "_fast", Failing())
    (answer,) = submit(service, "ab", max_tokens=1).all()
    assert answer.error.code == "INVALID_ARG"
    assert "it failed with PanicException" in answer.error.message
    assert "path" not in answer.error.message
    monkeypatch.undo()
    assert joined(submit(service, "ab", max_tokens=4, stream=True).all()) == "abab"
    service.close()
    assert triton.values["dflash:request_errors_total", "INVALID_ARGUMENT"] == 1


@pytest.mark.parametrize("stream", [True, False])
def test_a_request_whose_responses_hold_too_much_ends_with_an_error(serve, stream):
    service = serve(max_response_mb=0.5)
    sampling = {"n": 2, "logprobs": 3}
    responses = submit(service, "ab", max_tokens=10**9, stream=stream, sampling=sampling, return_logprobs=True).all()
    sent = sum(len(text) for response in responses[:-1] for text in response.outputs["logprobs"])
    assert (sent > 0) is stream
    assert sent <= 500_000
    assert responses[-1].error.code == "INVALID_ARG"
    assert "has grown past max_response_mb (0.5 MB)" in responses[-1].error.message
    assert submit(service, "ab", max_tokens=50).all()[0].error is None
    eventually(lambda: service._metrics._last[0].num_requests_running == 0)


def test_the_stream_that_was_sent_the_most_ends_when_the_server_holds_too_much(service, triton):
    requests = service._requests._requests

    def sent() -> list[int]:
        return [request.responder.num_bytes_sent for request in list(requests.values())]

    service._requests._server_memory = ServerMemory(10**9, lambda: 10**9 + sum(sent()))
    small = submit(service, "ab", max_tokens=10**9, stream=True)
    large = submit(service, "ab", max_tokens=10**9, stream=True, sampling={"logprobs": 5}, return_logprobs=True)
    error = large.all()[-1].error
    assert (error.code, "tritonserver holds 1.0 GB (max_server_memory_gb)" in error.message) == ("UNAVAILABLE", True)
    assert any("the stream that was sent the most" in line for line in triton.lines)
    assert not small.answered
    small.cancelled = True
    assert small.all()[-1].error.code == "CANCELLED"


def test_a_large_request_ends_no_stream_and_is_said_to_hold_the_memory(serve, triton):
    service = serve(max_response_mb=10_000.0)
    held = [10**9]
    service._requests._server_memory = ServerMemory(10**9, lambda: held[0])
    large = submit(service, "ab", max_tokens=10**9, stream=True, sampling={"logprobs": 5}, return_logprobs=True)
    (request,) = eventually(lambda: list(service._requests._requests.values()))
    eventually(lambda: request.responder.num_bytes_sent > 2 << 20)
    for _ in range(2):
        # More in a second than any stream is sent.
        held[0] += 10**12
        size = held[0] / 1e9
        said = f"tritonserver holds {size:.1f} GB (max_server_memory_gb) and grew by more than was sent: large requests"
        eventually(lambda said=said: any(said in line for line in triton.lines))
    assert not large.answered
    large.cancelled = True
    assert large.all()[-1].error.code == "CANCELLED"


def test_a_server_that_holds_much_for_other_reasons_keeps_its_streams(service, triton):
    looks: list[int] = []
    service._requests._server_memory = ServerMemory(10**9, lambda: looks.append(1) or 2 * 10**9)
    sender = submit(service, "ab", max_tokens=3000, stream=True)
    assert joined(sender.all()) == "ab" * 1500
    eventually(lambda: looks)


def test_a_request_that_is_taken_out_while_triton_is_asked_about_it_affects_no_other(service):
    sender = submit(service, [toy_process.QUIET])
    taken = threading.Event()

    def vanish() -> bool:
        service._requests._requests.popitem()
        taken.set()
        return True

    sender.is_cancelled = vanish
    assert taken.wait(WAIT_S)
    assert submit(service, "ab", max_tokens=2).all()[0].error is None


def test_requests_that_come_while_the_largest_stream_is_looked_for_affect_no_other(service):
    requests = service._requests._requests

    class Growing:
        responder = SimpleNamespace(num_bytes_sent=0)

        @property
        def state(self) -> SimpleNamespace:
            requests[str(len(requests))] = Growing()
            return SimpleNamespace(parsed=SimpleNamespace(stream=True))

    requests["0"] = Growing()
    service._requests._server_memory = SimpleNamespace(
        is_over=lambda now: True, is_of_requests=False, is_of_responses=True, num_bytes=0
    )
    service._requests.check_server_memory(0.0)
    assert len(requests) == 2
    requests.clear()
