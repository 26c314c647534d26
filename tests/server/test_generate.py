"""Text over the wire: streamed or at once, gRPC or HTTP, alone or among others, it is the same."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest

from dflash_backend.config import asset_path
from dflash_backend.text.tokenizer import Tokenizer

pytestmark = pytest.mark.smoke

# Very random tokens are raw bytes often enough for characters that are split over tokens, complete and torn ones.
RANDOM = {"temperature": 8.0, "seed": 9, "max_tokens": 120, "ignore_eos": True}
GREEDY = {"temperature": 0, "max_tokens": 48}
PROMPT = "Tom has 3 boxes with 4 apples each. How many apples does he have? Übung 漢字 🙂"


def without_times(stats):
    return {name: value for name, value in stats.items() if not name.endswith("_s")}


@pytest.mark.parametrize("sampling", [GREEDY, RANDOM], ids=["greedy", "random"])
def test_streamed_deltas_join_to_the_whole_text_of_the_tokens_on_both_protocols(grpc_client, http_client, sampling):
    texts, ids = [], []
    for client in (grpc_client, http_client):
        deltas = list(client.stream(PROMPT, **sampling))
        whole = client.generate(PROMPT, **sampling)
        texts += ["".join(delta.text for delta in deltas), whole.text]
        ids += [tuple(token for delta in deltas for token in delta.token_ids), whole.token_ids]
        assert len(deltas) > 1
        assert [delta.finish_reason for delta in deltas[:-1]] == [None] * (len(deltas) - 1)
        assert deltas[-1].finish_reason == whole.finish_reason
        assert without_times(deltas[-1].spec_stats) == without_times(whole.spec_stats)
    assert len(set(texts)) == len(set(ids)) == 1
    assert texts[0] == Tokenizer.load(asset_path("demo", "pair", "target")).decode(ids[0])
    if sampling is RANDOM:
        assert any(ord(character) > 127 and character != "\ufffd" for character in texts[0]), "of several bytes"


def test_plain_json_over_http_puts_the_prompt_before_the_answer(post, grpc_client):
    answer = grpc_client.generate(PROMPT, **GREEDY).text
    body = post(text_input=PROMPT, max_tokens="48", temperature="0").json()
    assert body["text_output"] == PROMPT + answer
    assert post(text_input=PROMPT, exclude_input_in_output=True, **GREEDY).json()["text_output"] == answer


def test_an_id_of_the_request_comes_back_and_is_no_parameter(post):
    assert post(id="mine", text_input="Hello", max_tokens=2).json()["id"] == "mine"


def test_many_streams_at_once_get_what_each_gets_alone(grpc_client):
    prompts = [f"Write a short list of {n} things to pack." for n in range(12)]
    alone = [grpc_client.generate(prompt, temperature=0, max_tokens=24).text for prompt in prompts]

    def stream(prompt: str) -> str:
        return "".join(delta.text for delta in grpc_client.stream(prompt, temperature=0, max_tokens=24))

    with ThreadPoolExecutor(len(prompts)) as pool:
        assert list(pool.map(stream, prompts)) == alone
