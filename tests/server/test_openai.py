"""OpenAI's own client against a front end before a real server."""

from __future__ import annotations

import concurrent.futures
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest

from dflash_cli.launcher.frontend import FrontendProcess
from dflash_cli.launcher.server import TritonServer
from dflash_client import DFlashClient
from load_tests.server_state import MetricsPage
from tests.support.waiting import eventually

QUESTION = "Sam fills 4 bags with 6 marbles each and gives away 7 marbles. How many marbles does Sam keep?"
MESSAGES: list[Any] = [{"role": "user", "content": QUESTION}]


@pytest.fixture(scope="module")
def client(frontend: FrontendProcess) -> Iterator[openai.OpenAI]:
    with (
        httpx.Client(trust_env=False, verify=False, timeout=120) as http,
        openai.OpenAI(base_url=f"{frontend.url}/v1", api_key="none", max_retries=0, http_client=http) as client,
    ):
        yield client


def native(grpc_client: DFlashClient, **arguments: Any) -> str:
    return grpc_client.generate(**arguments).text


def test_a_chat_is_what_the_model_answers_natively(client: openai.OpenAI, grpc_client: DFlashClient) -> None:
    answer = client.chat.completions.create(model="dflash", messages=MESSAGES, temperature=0, max_tokens=90)
    assert answer.choices[0].message.content == native(grpc_client, messages=MESSAGES, temperature=0, max_tokens=90)
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage is not None
    assert answer.usage.completion_tokens > 20


@pytest.mark.parametrize("temperature", [0, 1])
def test_a_stream_is_the_whole_answer_in_parts(client: openai.OpenAI, temperature: float) -> None:
    fields: dict[str, Any] = {"model": "dflash", "prompt": QUESTION, "temperature": temperature, "seed": 7}
    whole = client.completions.create(**fields, max_tokens=60)
    chunks = list(client.completions.create(**fields, max_tokens=60, stream=True))
    assert "".join(chunk.choices[0].text for chunk in chunks) == whole.choices[0].text
    assert chunks[-1].choices[0].finish_reason == whole.choices[0].finish_reason


def test_token_ids_and_text_are_the_same_prompt(client: openai.OpenAI, frontend: FrontendProcess) -> None:
    tokens = httpx.post(f"{frontend.url}/tokenize", json={"prompt": QUESTION}, trust_env=False, verify=False).json()[
        "tokens"
    ]
    texts = [
        client.completions.create(model="dflash", prompt=prompt, temperature=0, max_tokens=30).choices[0].text
        for prompt in (QUESTION, tokens)
    ]
    assert texts[0] == texts[1] != ""


def test_a_stop_string_ends_the_answer(client: openai.OpenAI) -> None:
    answer = client.completions.create(model="dflash", prompt=QUESTION, temperature=0, max_tokens=90, stop=["Step 2"])
    assert answer.choices[0].finish_reason == "stop"
    assert "Step 1" in answer.choices[0].text
    assert "Step 2" not in answer.choices[0].text


def test_several_answers_with_seeds_are_different_and_the_same_again(client: openai.OpenAI) -> None:
    runs = [
        client.completions.create(model="dflash", prompt="Sam", n=3, seed=5, max_tokens=20, temperature=1.5)
        for _ in range(2)
    ]
    first, again = ([choice.text for choice in run.choices] for run in runs)
    assert first == again
    assert len(set(first)) > 1


@pytest.mark.parametrize("stream", [False, True])
def test_log_probabilities_are_of_the_tokens_that_came(client: openai.OpenAI, stream: bool) -> None:
    fields: dict[str, Any] = {"model": "dflash", "messages": MESSAGES, "temperature": 0, "max_tokens": 12}
    found = client.chat.completions.create(**fields, logprobs=True, top_logprobs=3, stream=stream)
    choices = [chunk.choices[0] for chunk in found] if stream else [found.choices[0]]
    entries = [entry for choice in choices if choice.logprobs for entry in choice.logprobs.content]
    assert len(entries) == 12
    for entry in entries:
        assert entry.logprob == max(top.logprob for top in entry.top_logprobs)
        assert len(entry.top_logprobs) == 3
        assert entry.logprob <= 0
    text = "".join(entry.token for entry in entries)
    assert text == "".join((choice.delta if stream else choice.message).content or "" for choice in choices)


def test_usage_tells_cached_tokens_to_those_who_salt_the_cache(client: openai.OpenAI) -> None:
    fields: dict[str, Any] = {"model": "dflash", "messages": MESSAGES, "max_tokens": 1}
    cached = []
    for _ in range(2):
        usage = client.chat.completions.create(**fields, extra_body={"cache_salt": "openai-usage"}).usage
        assert usage is not None
        assert usage.prompt_tokens_details is not None
        cached.append(usage.prompt_tokens_details.cached_tokens)
    assert cached[0] == 0
    assert cached[1] is not None
    assert cached[1] > 0


def test_speculation_counts_agree_with_the_answer(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(model="dflash", messages=MESSAGES, temperature=0, max_tokens=60)
    assert answer.model_extra is not None
    assert answer.usage is not None
    stats = answer.model_extra["metrics"]["speculative_decoding"]
    histogram = stats["acceptance_histogram"]
    assert len(histogram) == stats["num_spec_tokens"] + 1
    assert sum(histogram) == stats["num_spec_steps"] > 0
    accepted = sum(number * count for number, count in enumerate(histogram))
    assert accepted == stats["num_accepted_draft_tokens"]
    assert accepted + stats["num_spec_steps"] <= answer.usage.completion_tokens


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"top_p": 7}, "top_p"),
        ({"temperature": -1}, "temperature"),
        ({"n": 1000}, "n"),
        ({"logprobs": 99}, "logprobs"),
        ({"logit_bias": {"99999": 1}}, "logit_bias"),
        ({"stop": [""]}, "stop"),
        ({"extra_body": {"use_beam_search": True}}, "use_beam_search"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_what_the_model_refuses_is_a_400_that_names_the_parameter(
    client: openai.OpenAI, fields: dict[str, Any], param: str, stream: bool
) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        client.completions.create(model="dflash", prompt="a", stream=stream, **fields)
    assert caught.value.param == param


def test_a_client_that_leaves_frees_its_request(client: openai.OpenAI, server: TritonServer) -> None:
    stream = client.completions.create(
        model="dflash", prompt="a", max_tokens=1000, stream=True, extra_body={"ignore_eos": True}
    )
    next(iter(stream))
    stream.close()
    eventually(lambda: MetricsPage.read(server.metrics_url).value("dflash:num_requests_in_flight") == 0, "freed")


def test_many_clients_at_once_get_their_own_answers(client: openai.OpenAI, grpc_client: DFlashClient) -> None:
    prompts = [f"Sam fills {number} bags" for number in range(2, 18)]

    def ask(prompt: str) -> str:
        return client.completions.create(model="dflash", prompt=prompt, temperature=0, max_tokens=20).choices[0].text

    with concurrent.futures.ThreadPoolExecutor(16) as threads:
        texts = list(threads.map(ask, prompts))
    assert texts == [native(grpc_client, prompt=prompt, temperature=0, max_tokens=20) for prompt in prompts]


def test_many_streams_at_once_are_each_whole_and_in_order(client: openai.OpenAI, grpc_client: DFlashClient) -> None:
    """Their deltas come from the model together, their first and last responses do not."""
    prompts = [f"Sam fills {number} bags" for number in range(2, 18)]
    asked = {"temperature": 0, "max_tokens": 120}

    def ask(prompt: str) -> tuple[str, list[int]]:
        extra = {"ignore_eos": True, "return_token_ids": True}
        stream = client.completions.create(model="dflash", prompt=prompt, stream=True, extra_body=extra, **asked)
        choices = [chunk.choices[0] for chunk in stream if chunk.choices]
        return "".join(choice.text for choice in choices), [id for choice in choices for id in choice.token_ids or ()]

    expected = [grpc_client.generate(prompt, ignore_eos=True, **asked) for prompt in prompts]
    for _ in range(3):
        with concurrent.futures.ThreadPoolExecutor(16) as threads:
            got = list(threads.map(ask, prompts))
        assert got == [(one.text, list(one.token_ids)) for one in expected]


def test_metrics_have_the_front_ends_and_tritons(frontend: FrontendProcess) -> None:
    page = httpx.get(f"{frontend.url}/metrics", trust_env=False, verify=False).text
    assert "dflash_openai:requests_total{" in page
    assert "\ndflash:engine_ready{" in page
