"""Text over the wire: streamed or at once, gRPC or HTTP, alone or among others, it is the same."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor

import pytest

pytestmark = pytest.mark.smoke

# Very random tokens are raw bytes often enough for characters that are split over tokens, complete and torn ones.
RANDOM = {"temperature": 8.0, "seed": 9, "max_tokens": 120, "ignore_eos": True}
GREEDY = {"temperature": 0, "max_tokens": 48}
PROMPT = "Tom has 3 boxes with 4 apples each. How many apples does he have? Übung 漢字 🙂"


def sse(response) -> list[dict]:
    assert response.status_code == 200
    return [json.loads(line.removeprefix("data: ")) for line in response.text.splitlines() if line.startswith("data: ")]


@pytest.mark.parametrize("sampling", [GREEDY, RANDOM], ids=["greedy", "random"])
def test_streamed_deltas_join_to_the_whole_text_on_both_protocols(grpc_client, http_client, sampling):
    texts, ids = [], []
    for client in (grpc_client, http_client):
        deltas = list(client.stream(PROMPT, **sampling))
        whole = client.generate(PROMPT, **sampling)
        texts += ["".join(delta.text for delta in deltas), whole.text]
        ids += [tuple(token for delta in deltas for token in delta.token_ids), whole.token_ids]
        assert len(deltas) > 1
        assert [delta.finish_reason for delta in deltas[:-1]] == [None] * (len(deltas) - 1)
        assert deltas[-1].finish_reason == whole.finish_reason
    assert len(set(texts)) == 1
    assert len(set(ids)) == 1


def test_random_output_has_whole_characters_of_several_bytes(grpc_client):
    text = grpc_client.generate(PROMPT, **RANDOM).text
    assert any(ord(character) > 127 and character != "\ufffd" for character in text)


def test_the_text_is_what_the_tokenizer_decodes(grpc_client):
    from dflash_backend.config import asset_path
    from dflash_backend.text.tokenizer import Tokenizer

    result = grpc_client.generate(PROMPT, **RANDOM)
    assert result.text == Tokenizer.load(asset_path("demo", "pair", "target")).decode(result.token_ids)


def test_plain_json_over_http_puts_the_prompt_before_the_answer(post, grpc_client):
    answer = grpc_client.generate(PROMPT, **GREEDY).text
    body = post(text_input=PROMPT, max_tokens="48", temperature="0").json()
    assert body["text_output"] == PROMPT + answer
    assert post(text_input=PROMPT, exclude_input_in_output=True, **GREEDY).json()["text_output"] == answer


def test_an_id_of_the_request_comes_back_and_is_no_parameter(post):
    assert post(id="mine", text_input="Hello", max_tokens=2).json()["id"] == "mine"


def test_token_ids_and_text_of_a_prompt_give_the_same_answer(grpc_client):
    from dflash_backend.config import asset_path
    from dflash_backend.text.tokenizer import Tokenizer

    ids = Tokenizer.load(asset_path("demo", "pair", "target")).encode(PROMPT)
    by_ids, by_text = grpc_client.generate(ids, **GREEDY), grpc_client.generate(PROMPT, **GREEDY)
    assert (by_ids.text, by_ids.num_input_tokens) == (by_text.text, len(ids))


def test_chat_messages_get_an_answer(grpc_client):
    result = grpc_client.generate(messages=[{"role": "user", "content": "What is 2 + 3?"}], **GREEDY)
    assert result.num_output_tokens > 0


def test_many_streams_at_once_get_what_each_gets_alone(grpc_client):
    prompts = [f"Write a short list of {n} things to pack." for n in range(12)]
    alone = [grpc_client.generate(prompt, temperature=0, max_tokens=24).text for prompt in prompts]

    def stream(prompt: str) -> str:
        return "".join(delta.text for delta in grpc_client.stream(prompt, temperature=0, max_tokens=24))

    with ThreadPoolExecutor(len(prompts)) as pool:
        assert list(pool.map(stream, prompts)) == alone


def test_a_stop_string_cuts_the_text_and_is_the_reason(grpc_client):
    whole = grpc_client.generate(PROMPT, **GREEDY).text
    stop = whole[5:9]
    deltas = list(grpc_client.stream(PROMPT, stop=[stop], **GREEDY))
    assert "".join(delta.text for delta in deltas) == whole[: whole.index(stop)]
    assert deltas[-1].finish_reason == "stop"
    assert deltas[-1].spec_stats["num_drafts"] > 0


def test_asked_for_outputs_come_with_the_last_response_and_the_others_do_not(post):
    flags = ("finish_reason", "num_input_tokens", "num_output_tokens", "token_ids", "spec_stats")
    asked = {f"return_{flag}": True for flag in flags}
    events = sse(post("generate_stream", text_input="Hello", stream=True, max_tokens=20, temperature=0, **asked))
    assert all(set(flags) - {"spec_stats"} <= set(event) for event in events)
    stats = json.loads(events[-1]["spec_stats"])
    assert len(stats["num_accepted_tokens_per_pos"]) == 15
    assert stats["num_drafts"] > 0
    assert stats["acceptance_length"] == pytest.approx(1 + stats["num_accepted_tokens"] / stats["num_drafts"], abs=1e-4)
    assert sum(stats["num_accepted_tokens_per_pos"]) == stats["num_accepted_tokens"]
    plain = post(text_input="Hello", max_tokens=2).json()
    assert not set(flags) & set(plain)
