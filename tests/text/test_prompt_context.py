"""The text of an answer goes on from that of its prompt."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from checks.byte_tokenizer import START
from dflash_backend.messages import SamplingParams, TokenDelta, TokenLogprobs
from dflash_backend.text.detokenizer import CONTEXT, Detokenizer, context_of
from dflash_backend.text.output import RequestState
from dflash_backend.text.request import ParsedRequest, ReturnFlags
from dflash_backend.text.tokenizer import Tokenizer
from tests.support.sentencepiece_tokenizer import ID, WORDS, byte_ids, write_sentencepiece_tokenizer

HELLO, WORLD, COMMA, SPACE, UNK = ID["▁Hello"], ID["▁world"], ID[","], ID["▁"], ID["<unk>"]


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    directory = tmp_path_factory.mktemp("llama")
    write_sentencepiece_tokenizer(directory)
    return Tokenizer.load(directory)


def answer_text(tokenizer: Tokenizer, prompt: list[int], answer: list[int], size: int = 1) -> str:
    """The joined deltas of an answer, `size` tokens a step."""
    detokenizer = Detokenizer(tokenizer, SamplingParams(ignore_eos=True), context_of(tokenizer, prompt))
    steps = [answer[start : start + size] for start in range(0, len(answer), size)]
    return "".join(detokenizer.append(list(step), step is steps[-1]).text for step in steps)


def expected_text(tokenizer: Tokenizer, prompt: list[int], answer: list[int]) -> str:
    special = set(tokenizer.special_token_ids.values())
    begin = max((place + 1 for place, token_id in enumerate(prompt) if token_id in special), default=0)
    return tokenizer.decode(prompt[begin:] + answer)[len(tokenizer.decode(prompt[begin:])) :]


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        ([HELLO], " world, Hello"),
        ([ID["<s>"], HELLO], " world, Hello"),
        ([*byte_ids("京" * 9)], " world, Hello"),
        ([HELLO] * 50, " world, Hello"),
        ([SPACE], " world, Hello"),
        ([ID["<s>"]], "world, Hello"),
        ([HELLO, ID["</s>"]], "world, Hello"),
        ([], "world, Hello"),
    ],
)
def test_the_first_space_of_an_answer_is_left_where_it_goes_on_from_text(
    llama: Tokenizer, prompt: list[int], expected: str
) -> None:
    assert answer_text(llama, prompt, [WORLD, COMMA, HELLO]) == expected


pieces = st.one_of(
    st.sampled_from([[ID[word]] for word in WORDS]),
    st.sampled_from([byte_ids(text) for text in ("京", "é", "京都" * 9, "x")]),
    st.just([ID["</s>"]]),
)
token_lists = st.lists(pieces, max_size=12).map(lambda found: [token_id for piece in found for token_id in piece])


@settings(max_examples=150, deadline=None)
@given(prompt=token_lists, answer=token_lists.filter(bool), size=st.integers(1, 4))
def test_an_answer_adds_to_any_prompt_what_decoding_both_adds(
    llama: Tokenizer, prompt: list[int], answer: list[int], size: int
) -> None:
    assert answer_text(llama, prompt, answer, size) == expected_text(llama, prompt, answer)


@settings(max_examples=100, deadline=None)
@given(
    prompt=st.lists(st.one_of(st.integers(0, START), st.sampled_from([*"漢é".encode()])), max_size=30),
    answer=st.lists(st.integers(0, START), min_size=1, max_size=20),
)
def test_so_it_does_where_tokens_are_bytes(tokenizer: Tokenizer, prompt: list[int], answer: list[int]) -> None:
    """Also of prompts that break off within a character."""
    assert answer_text(tokenizer, prompt, answer) == expected_text(tokenizer, prompt, answer)


def test_nothing_of_an_answer_is_lost_that_completes_the_prompts_last_character(llama: Tokenizer) -> None:
    first, second, third = byte_ids("京")
    assert answer_text(llama, [first, second], [third, ID["a"], COMMA]) == "a,"
    assert answer_text(llama, [first, second], [ID["a"]]) == "a"


def test_a_prompt_costs_a_few_tokens_however_long_it_is(llama: Tokenizer) -> None:
    assert context_of(llama, [HELLO] * 1000) == [HELLO] * CONTEXT
    # The first of the last 16 tokens is the second byte of a character.
    assert len(context_of(llama, byte_ids("京") * 50)) == 18


def test_the_log_probabilities_of_prompt_and_answer_have_the_texts_tokens(llama: Tokenizer) -> None:
    """Of each of n completions, joined and up to a stop string."""
    prompt = [ID["<s>"], HELLO, *byte_ids("京"), WORLD, SPACE]
    sampling = SamplingParams(n=2, prompt_logprobs=0, logprobs=1, stop=(",",), ignore_eos=True)
    parsed = ParsedRequest(prompt, sampling, False, "", ReturnFlags(logprobs=True))
    state = RequestState("r", parsed, llama)
    of_prompt = [TokenLogprobs([token_id, UNK], [-0.5, -1.0], [1, 2]) for token_id in prompt[1:]]
    for request_id in ("r", "r/1"):
        entries = [TokenLogprobs([token_id, HELLO], [-0.5, -1.0], [1, 2]) for token_id in (WORLD, COMMA)]
        state.add(TokenDelta(request_id, [WORLD, COMMA], "stop", None, entries, of_prompt))
        of_prompt = []
    assert state.prompt_logprobs is not None
    first, *rest = map(json.loads, state.prompt_logprobs.json)
    own = [next(iter(entry.values()))["decoded_token"] for entry in rest]
    assert first is None
    assert own == ["Hello", "", "", "京", " world", " "]
    assert "".join(own) == llama.decode(prompt)
    assert rest[0][str(UNK)]["decoded_token"] == "<unk>"
    for completion in state.completions:
        assert "".join(completion.text) == " world"
        texts = [[each["decoded_token"] for each in json.loads(text).values()] for text in completion.logprobs_json]
        assert texts == [[" world", " Hello"], [",", " Hello"]]


def test_what_ended_an_answer_is_told(llama: Tokenizer) -> None:
    def ended(tokens: list[int], **sampling: object) -> str | int | None:
        parsed = ParsedRequest([HELLO], SamplingParams(**sampling), False, "", ReturnFlags())
        state = RequestState("r", parsed, llama)
        state.add(TokenDelta("r", tokens, "stop"))
        return state.completions[0].stop_reason

    assert ended([WORLD, COMMA], stop=("xyz", "ld,")) == "ld,"
    assert ended([WORLD, COMMA], stop_token_ids=(COMMA,)) == COMMA
    assert ended([WORLD, ID["</s>"]], stop_token_ids=(COMMA, ID["</s>"]), stop=("xyz",)) is None
    assert ended([WORLD, ID["</s>"]], stop_token_ids=(ID["</s>"],), ignore_eos=True) == ID["</s>"]
    assert ended([WORLD], stop=("xyz",)) is None
