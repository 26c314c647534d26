"""What a client and the metrics page get of requests, over a toy engine process and a stand-in for Triton's module."""

from __future__ import annotations

import json

import pytest

from dflash_backend.messages import AbortRequests, RequestStats
from dflash_backend.spec_stats import SpecDecodingStats
from dflash_backend.triton import reporter
from dflash_backend.triton.responses import spec_stats_json
from dflash_backend.triton.running_requests import MAX_SEPARATE_DELTAS
from tests.engine_client import toy_process
from tests.support.waiting import eventually
from tests.triton.fake_triton import Request
from tests.triton.serving import TEXT, joined, returning, submit


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
    asked = returning("finish_reason", "num_input_tokens", "num_output_tokens", "token_ids", "spec_stats")
    responses = submit(service, "ab", max_tokens=5, stream=True, **asked).all()
    outputs = [response.outputs for response in responses]
    assert [token_id for output in outputs for token_id in output["token_ids"]] == list(b"ababa")
    assert [output["num_output_tokens"][0] for output in outputs] == [len(output["token_ids"]) for output in outputs]
    assert [output["finish_reason"] for output in outputs] == ["None"] * (len(outputs) - 1) + ["length"]
    assert all(output["num_input_tokens"] == [2] for output in outputs)
    assert ["spec_stats" in output for output in outputs] == [False] * (len(outputs) - 1) + [True]
    assert json.loads(outputs[-1]["spec_stats"])["acceptance_length"] == 3.5


def test_a_stop_string_ends_the_request_at_once_with_its_stats_and_no_token_past_it(service, monkeypatch):
    sent, send = [], service._engines.send
    monkeypatch.setattr(service._engines, "send", lambda index, message: (sent.append(message), send(index, message)))
    asked = returning("finish_reason", "num_output_tokens", "token_ids", "logprobs", "spec_stats")
    responses = submit(service, "abcdef", 10**6, stream=True, sampling={"stop": "de", "logprobs": 0}, **asked).all()
    outputs = [response.outputs for response in responses]
    assert joined(responses) == "abc"
    assert [token_id for output in outputs for token_id in output["token_ids"]] == list(b"abcde")
    assert sum(len(json.loads(output["logprobs"])) for output in outputs) == 5
    assert all(output["num_output_tokens"][0] > 0 for output in outputs), "the end comes with the last tokens"
    assert outputs[-1]["finish_reason"] == "stop"
    assert json.loads(outputs[-1]["spec_stats"])["num_drafts"] == 4
    assert sent[0] == AbortRequests(["0"], {"0": 5}), "the engine must not count what lies past it"


def test_completions_of_one_request_come_together(service):
    names = ("finish_reason", "num_input_tokens", "num_output_tokens", "token_ids", "spec_stats", "cumulative_logprob")
    (whole,) = submit(service, "ab", max_tokens=4, sampling={"n": 3}, **returning(*names)).all()
    assert whole.outputs["text_output"] == ["ababab"] * 3
    assert whole.outputs["finish_reason"] == ["length"] * 3
    assert whole.outputs["num_input_tokens"] == [2]
    assert whole.outputs["num_output_tokens"] == [4, 4, 4]
    assert whole.outputs["token_ids"] == list(b"abab") * 3
    assert whole.outputs["cumulative_logprob"] == [-2.0] * 3
    assert [json.loads(stats)["num_drafts"] for stats in whole.outputs["spec_stats"]] == [4, 4, 4]


def test_streamed_completions_have_one_response_a_step_and_one_end(service, monkeypatch):
    steps, process = [], service._requests.process
    monkeypatch.setattr(service._requests, "process", lambda outputs: (steps.extend(outputs), process(outputs)))
    responses = submit(service, "abc", 30, stream=True, sampling={"n": 2}, return_finish_reason=True).all()
    texts = ["".join(response.outputs["text_output"][index] for response in responses) for index in range(2)]
    assert texts == ["abc" * 10] * 2
    assert responses[-1].outputs["finish_reason"] == ["length"] * 2
    # The second completion may reach the engine some steps after the first.
    assert len(responses) <= sum(bool(step.outputs.deltas) for step in steps)


@pytest.mark.parametrize(("at_once", "shared"), [(MAX_SEPARATE_DELTAS, False), (MAX_SEPARATE_DELTAS + 1, True)])
def test_steps_that_arrive_together_have_a_response_each_unless_they_are_many(serve, monkeypatch, at_once, shared):
    """vLLM's own test of its streams counts a response for each token."""
    service = serve(as_vllm=True)
    waiting, sizes, process = [], [], service._requests.process

    def process_later(outputs):
        for output in outputs:
            waiting.append(output)
            deltas = [delta for message in waiting for delta in message.outputs.deltas]
            if len(deltas) == at_once or any(delta.finish_reason for delta in deltas):
                sizes.append(len(deltas))
                process(list(waiting))
                waiting.clear()

    monkeypatch.setattr(service._requests, "process", process_later)
    responses = submit(service, "abc", 300, stream=True, return_num_output_tokens=True).all()
    assert joined(responses) == "abc" * 100
    assert sum(response.outputs["num_output_tokens"][0] for response in responses) == 300
    assert len(sizes) > 2
    assert len(responses) == sum(1 if size > MAX_SEPARATE_DELTAS else size for size in sizes)
    assert (max(sizes) > MAX_SEPARATE_DELTAS) == shared


@pytest.mark.parametrize(("prompt", "n"), [(toy_process.REFUSE, 1), (toy_process.REFUSE_SECOND, 3)])
def test_what_the_engine_refuses_of_one_or_several_completions_ends_once_with_its_status(service, prompt, n):
    (response,) = submit(service, [prompt], 10**9, sampling={"n": n}).all()
    assert (response.error.code, response.error.message) == ("UNAVAILABLE", "UNAVAILABLE: the toy refuses this prompt")
    eventually(lambda: service._metrics._last[0].num_requests_running == 0)


def test_logprobs_are_a_list_with_an_object_for_each_token(service):
    asked = returning("logprobs", "cumulative_logprob")
    (whole,) = submit(service, "ab", 2, sampling={"logprobs": 1}, **asked).all()
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
    responses = submit(service, "ab", 9, stream=True, **returning("logprobs", "cumulative_logprob")).all()
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


def test_requests_are_counted_by_how_they_ended(service, triton):
    submit(service, "ab", max_tokens=6).all()
    submit(service, "abcd", max_tokens=6, sampling={"n": 3, "stop": "b"}).all()
    submit(service, "").all()
    # The next one may have a token before it ends with an error.
    assert triton.observed("dflash:time_to_first_token_seconds")[0] == 2
    assert triton.observed("dflash:request_queue_time_seconds") == (2, 1.0)
    submit(service, [toy_process.REFUSE_SECOND], sampling={"n": 3}).all()
    service.close()
    assert triton.values["dflash:request_success_total", "length"] == 1
    assert triton.values["dflash:request_success_total", "stop"] == 3
    assert triton.values["dflash:request_errors_total", "UNAVAILABLE"] == 1
    assert triton.values["dflash:prompt_tokens_total",] == 2 + 4
    assert triton.values["dflash:request_errors_total", "INVALID_ARGUMENT"] == 1
    assert triton.values["dflash:generation_tokens_total",] == 6 + 3 * 2
    assert triton.values["dflash:num_requests_running", "dflash_0_0"] == 0


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


def test_the_metrics_page_has_a_cancelled_request_without_waiting_for_the_next_regular_report(
    service, triton, monkeypatch
):
    monkeypatch.setattr(reporter, "BUSY_S", 1000.0)
    monkeypatch.setattr(reporter, "IDLE_S", 1000.0)
    sender = submit(service, [toy_process.QUIET], max_tokens=10**9)
    sender.cancelled = True
    assert sender.all()[0].error.code == "CANCELLED"
    eventually(lambda: triton.values.get(("dflash:request_errors_total", "CANCELLED")) == 1)


def test_where_kv_is_kept_comes_with_the_last_response_to_who_asks_for_it(service):
    asked = {"kv_transfer_params": {"do_remote_decode": True}}
    responses = submit(service, "ab", max_tokens=9, stream=True, sampling=asked).all()
    found = [response.outputs.get("kv_transfer_params") for response in responses]
    assert found[:-1] == [None] * (len(found) - 1)
    kept = json.loads(found[-1])
    assert (kept["do_remote_prefill"], kept["remote_host"], kept["remote_port"]) == (True, "toy", 7)
    assert kept["remote_num_blocks"] == 2
    (without,) = submit(service, [toy_process.KEEPS_NOTHING, 9], sampling=asked).all()
    assert without.outputs["kv_transfer_params"] == "null"
    (other,) = submit(service, "ab", sampling={"kv_transfer_params": {}}).all()
    assert "kv_transfer_params" not in other.outputs


@pytest.mark.parametrize(("told", "loaded"), [(True, {"host": 32}), (True, {}), (False, {"host": 32})])
def test_tokens_from_tiers_are_told_where_cached_tokens_are(told: bool, loaded: dict[str, int]) -> None:
    """Among requests that share the cache both would reveal what others have sent."""
    stats = RequestStats(70, 4, 64, SpecDecodingStats.zeros(3), 0, 0.5, loaded)
    found = json.loads(spec_stats_json(stats, told))
    assert found["num_cached_tokens"] == (64 if told else None)
    assert found.get("num_loaded_tokens", {}) == (loaded if told else {})
