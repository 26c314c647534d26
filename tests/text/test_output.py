"""The output processor: tokens of the engine in, the answer out."""

from __future__ import annotations

import json
from collections.abc import Iterator

import msgspec
import pytest

from dflash_backend.messages import FinishReason, RequestStats, SamplingParams, TokenDelta, TokenLogprobs
from dflash_backend.spec_stats import SpecDecodingStats
from dflash_backend.text.output import CompletionState, RequestState, request_id_of
from dflash_backend.text.request import ParsedRequest, ReturnFlags
from dflash_backend.text.tokenizer import Tokenizer

NO_FLAGS = ReturnFlags()
STATS = RequestStats(2, 9, 0, SpecDecodingStats(3, 9, 6, [3, 2, 1]), 0, 0.5)


def state(
    tokenizer: Tokenizer, returns: ReturnFlags = NO_FLAGS, as_json: bool = True, stream: bool = False, **sampling
) -> RequestState:
    parsed = ParsedRequest(list(b"ab"), SamplingParams(**sampling), stream, "", returns)
    return RequestState("r", parsed, tokenizer, logprobs_as_json=as_json)


def delta(
    text: bytes, finish_reason: FinishReason | None = None, request_id: str = "r", logprobs: bool = False
) -> TokenDelta:
    entries = [TokenLogprobs([token], [-0.5], [1]) for token in text] if logprobs else None
    return TokenDelta(request_id, list(text), finish_reason, STATS, entries)


@pytest.mark.parametrize("engine_reason", [None, "length"])
@pytest.mark.parametrize("logprobs", [False, True])
def test_a_stop_string_ends_the_answer_in_the_delta_that_completes_it(
    tokenizer: Tokenizer, engine_reason: FinishReason | None, logprobs: bool
) -> None:
    request = state(tokenizer, stop=("cd",), logprobs=0)
    (completion,) = request.completions
    assert request.add(delta(b"abc", logprobs=logprobs)).stopped_at is None
    assert not request.finished
    added = request.add(delta(b"defg", engine_reason, logprobs=logprobs))
    # Also one that has ended by itself counted what lies past the stop string.
    assert added.stopped_at == 4
    assert request.finished
    assert (completion.finish_reason, "".join(completion.text)) == ("stop", "ab")
    assert (bytes(completion.token_ids), completion.num_tokens) == (b"abcd", 4)
    assert completion.cumulative_logprob == (-2.0 if logprobs else 0.0)
    # One of the last step's four tokens counts, so none of its three accepted drafts does.
    assert completion.stats is not None
    assert completion.stats.num_output_tokens == 9 - 3
    assert completion.stats.spec_decoding == SpecDecodingStats(3, 9, 3, [2, 1, 0])


def test_after_the_first_response_a_stream_gathers_as_many_tokens_as_were_asked_for(tokenizer: Tokenizer) -> None:
    parsed = ParsedRequest(list(b"ab"), SamplingParams(n=2), True, "", NO_FLAGS, stream_interval=4)
    request = RequestState("r", parsed, tokenizer)
    left = []
    for text, end, of in (
        *((b"a", None, "r"), (b"bcd", None, "r"), (b"A", None, "r/1"), (b"BCD", None, "r/1")),
        *(
            (b"e", None, "r"),
            (b"fg", None, "r"),
            (b"h", None, "r"),
            (b"i", "length", "r"),
            (b"E", None, "r/1"),
            (b"FGHI", None, "r/1"),
        ),
    ):
        request.add(delta(text, end, of))
        if request.has_output:
            left.append([bytes(one.token_ids).decode() for one in request.completions])
            request.clear()
    # The first tokens of each completion, four of one with what the other has by then, and an end leave at once.
    assert left == [["a", ""], ["bcd", "A"], ["efgh", "BCD"], ["i", ""], ["", "EFGHI"]]


def test_deltas_after_the_end_count_for_nothing(tokenizer: Tokenizer) -> None:
    request = state(tokenizer, stop=("b",))
    request.add(delta(b"ab"))
    assert request.add(delta(b"cd", "length")) == (0, 0.0, None)
    assert (request.num_new_tokens, request.completions[0].finish_reason) == (2, "stop")


def test_statistics_are_the_engines_where_nothing_is_trimmed(tokenizer: Tokenizer) -> None:
    request = state(tokenizer)
    request.add(delta(b"ab", "length"))
    assert request.completions[0].stats == STATS


@pytest.mark.parametrize("as_json", [True, False])
def test_logprobs_come_as_json_or_as_they_are(tokenizer: Tokenizer, as_json: bool) -> None:
    request = state(tokenizer, ReturnFlags(logprobs=True), as_json, logprobs=0)
    request.add(delta(b"ab", logprobs=True))
    (completion,) = request.completions
    assert [json.loads(text) for text in completion.logprobs_json] == [
        {str(ord(letter)): {"logprob": -0.5, "rank": 1, "decoded_token": letter}} for letter in "ab" if as_json
    ]
    assert [entry.token_ids for entry in completion.logprobs] == ([] if as_json else [[97], [98]])


def test_steps_have_the_text_that_each_of_them_completed(tokenizer: Tokenizer) -> None:
    request = state(tokenizer, ReturnFlags(steps=True), stop=("xy",))
    (completion,) = request.completions
    request.add(TokenDelta("r", list(b"abc"), num_draft_tokens=5))
    # The x may begin the stop string, so its text comes with the step after it; the y alone never does.
    request.add(TokenDelta("r", list(b"dx"), num_draft_tokens=4))
    request.add(TokenDelta("r", list(b"efxyg"), num_draft_tokens=7))
    assert completion.steps == [(3, 5, 3), (2, 4, 1), (4, 7, 3)]
    assert "".join(completion.text) == "abcdxef"
    completion.clear()
    assert completion.steps == []


def test_a_request_ends_with_its_last_completion(tokenizer: Tokenizer) -> None:
    request = state(tokenizer, n=3)
    assert request.engine_ids == ["r", "r/1", "r/2"]
    assert {request_id_of(engine_id) for engine_id in request.engine_ids} == {"r"}
    for engine_id in ("r/2", "r"):
        request.add(delta(b"ab", "length", engine_id))
        assert not request.finished
        assert not request.has_output
    request.add(delta(b"c", "length", "r/1"))
    assert request.finished
    assert ["".join(completion.text) for completion in request.completions] == ["ab", "c", "ab"]


@pytest.mark.parametrize(
    ("asked", "returns", "expected"),
    [
        (5, ReturnFlags(logprobs=True), 5),
        (5, ReturnFlags(), None),
        (5, ReturnFlags(cumulative_logprob=True), 0),
        (None, ReturnFlags(logprobs=True), None),
    ],
)
def test_the_engine_is_asked_for_the_logprobs_that_the_client_gets_to_see(
    tokenizer: Tokenizer, asked: int | None, returns: ReturnFlags, expected: int | None
) -> None:
    requests = list(state(tokenizer, returns, logprobs=asked, n=2, seed=7).generation_requests((256,), 2.5))
    assert [request.sampling.logprobs for request in requests] == [expected] * 2
    assert [(request.sampling.n, request.sampling.seed) for request in requests] == [(1, 7), (1, 8)]
    assert [(request.request_id, request.deadline_s) for request in requests] == [("r", 2.5), ("r/1", 2.5)]


def test_the_bytes_of_a_request_are_those_of_its_completions_without_a_look_at_each(tokenizer: Tokenizer) -> None:
    parsed = ParsedRequest(list(b"ab"), SamplingParams(n=2, logprobs=0, prompt_logprobs=0), False, "pré", NO_FLAGS)
    request = RequestState("r", parsed, tokenizer)
    first, second = request.completions

    def total() -> int:
        assert request.prompt_logprobs is not None
        return first.num_bytes + second.num_bytes + request.prompt_logprobs.num_bytes

    assert request.num_bytes == total() == 2 * 4
    request.add(TokenDelta("r", [], prompt_logprobs=[TokenLogprobs([98], [-0.5], [1])]))
    request.add(delta(b"c", logprobs=True))
    request.add(delta(b"de", request_id="r/1", logprobs=True))
    assert request.num_bytes == total() > 8
    request.clear()
    assert request.num_bytes == total() == 0
    # With n completions a step has n deltas, so none may look at all of them.
    request.completions = ForOne(request.completions)
    request.add(delta(b"f"))
    assert request.num_bytes == total() > 0


class ForOne(list[CompletionState]):
    """Completions that cannot be gone through."""

    def __iter__(self) -> Iterator[CompletionState]:
        raise AssertionError("a delta of one completion looks at all")


def test_log_probabilities_of_the_prompt_wait_for_the_next_response(tokenizer: Tokenizer) -> None:
    request = state(tokenizer, prompt_logprobs=1)
    assert request.prompt_logprobs is not None
    entry = TokenLogprobs([98, 99], [-0.5, -float("inf")], [1, 2])
    request.add(TokenDelta("r", [], prompt_logprobs=[entry]))
    assert not request.has_output
    request.add(delta(b"c"))
    texts = [json.loads(text) for text in request.prompt_logprobs.json]
    assert texts == [
        None,
        {
            "98": {"logprob": -0.5, "rank": 1, "decoded_token": "b"},
            "99": {"logprob": -9999.0, "rank": 2, "decoded_token": "c"},
        },
    ]
    assert request.num_bytes > len(request.prompt_logprobs.json[1])
    request.clear()
    request.add(delta(b"d"))
    assert request.prompt_logprobs.json == []


def test_many_log_probabilities_of_the_prompt_are_responses_of_their_own(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dflash_backend.text.output.PROMPT_PIECE", 8)
    entries = [TokenLogprobs([98 + position], [-0.5], [1]) for position in range(10)]
    whole = msgspec.structs.replace(delta(b"c"), prompt_logprobs=entries)
    in_one = state(tokenizer, prompt_logprobs=1)
    assert list(in_one.parts(whole)) == [whole]
    streamed = state(tokenizer, stream=True, prompt_logprobs=1)
    sent: list[list[str]] = []
    for part in streamed.parts(whole):
        streamed.add(part)
        assert streamed.has_output
        assert streamed.prompt_logprobs is not None
        sent.append(streamed.prompt_logprobs.json)
        streamed.clear()
    assert [len(one) for one in sent] == [5, 4, 2]  # null for the first token
    assert [list(json.loads(text) or {}) for one in sent for text in one] == [[], *([str(98 + i)] for i in range(10))]
    small = TokenDelta("r", [], prompt_logprobs=entries[:3])
    assert list(streamed.parts(small)) == [small]
    streamed.add(small)
    assert not streamed.has_output


def test_only_the_first_completion_is_asked_for_those_of_the_prompt(tokenizer: Tokenizer) -> None:
    asked = [one.sampling.prompt_logprobs for one in state(tokenizer, n=3, prompt_logprobs=1).generation_requests(())]
    assert asked == [1, None, None]
