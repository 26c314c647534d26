"""Keys, limits and refusals through the whole application."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import openai
import pytest
from starlette.testclient import TestClient

from dflash_openai.app import create_app
from dflash_openai.config import FrontendConfig
from dflash_openai.middleware.api_keys import ApiKey, KeyLimits
from dflash_openai.security import SecurityConfig
from tests.frontend.scripted_pool import ScriptedPool

ALICE, BOB = "alice-secret-key", "bob-secret-key"
KEYS = (ApiKey.of("alice", ALICE), ApiKey.of("bob", BOB))
Start = Callable[..., TestClient]


@pytest.fixture
def start(model_dir: Path, pool: ScriptedPool) -> Iterator[Start]:
    """Starts an application with these settings of its security, before the scripted model."""
    with ExitStack() as running:

        def started(**security: object) -> TestClient:
            app = create_app(FrontendConfig(security=SecurityConfig(**security)), pool)
            http = running.enter_context(TestClient(app, raise_server_exceptions=False))
            wait_until_ready(http)
            return http

        yield started


def wait_until_ready(http: TestClient) -> None:
    """The application asks the model for its description in the background."""
    deadline = time.monotonic() + 30
    while http.get("/health/ready").status_code != 200:
        assert time.monotonic() < deadline
        time.sleep(0.01)


def client_of(http: TestClient, key: str) -> openai.OpenAI:
    return openai.OpenAI(base_url="http://testserver/v1", api_key=key, max_retries=0, http_client=http)


def ask(client: openai.OpenAI, **options: object) -> str:
    messages = [{"role": "user", "content": "hello"}]
    return client.chat.completions.create(model="dflash", messages=messages, **options).choices[0].message.content


def test_a_keys_name_reaches_the_engine_as_the_tenant(start: Start, pool: ScriptedPool) -> None:
    http = start(api_keys=KEYS)
    ask(client_of(http, ALICE))
    client_of(http, BOB).completions.create(model="dflash", prompt=["a", "b"])
    ask(client_of(http, BOB), extra_body={"tenant": "bob"})
    assert [asked.sampling["tenant"] for asked in pool.asked] == ["alice", "bob", "bob", "bob"]


def test_no_key_may_name_anothers_tenant(start: Start, pool: ScriptedPool) -> None:
    http = start(api_keys=KEYS)
    with pytest.raises(openai.PermissionDeniedError, match="belongs to the tenant 'alice'"):
        ask(client_of(http, ALICE), extra_body={"tenant": "bob"})
    assert pool.asked == []


def test_without_keys_a_request_names_its_tenant_if_it_likes(http: TestClient, pool: ScriptedPool) -> None:
    client = client_of(http, "none")
    ask(client, extra_body={"tenant": "batch"})
    ask(client)
    assert [asked.sampling.get("tenant") for asked in pool.asked] == ["batch", None]


def test_a_wrong_key_raises_the_clients_own_exception(start: Start, pool: ScriptedPool) -> None:
    http = start(api_keys=KEYS)
    for path in ("/v1/models", "/metrics", "/openapi.json", "/version"):
        assert http.get(path).status_code == 401
    with pytest.raises(openai.AuthenticationError) as caught:
        ask(client_of(http, "not-the-key"))
    assert caught.value.code == "invalid_api_key"
    assert pool.asked == []


def test_limits_raise_the_clients_own_exception_with_a_time(start: Start) -> None:
    http = start(api_keys=KEYS, key_limits=KeyLimits(requests_per_minute=1))
    ask(client_of(http, ALICE))
    with pytest.raises(openai.RateLimitError) as caught:
        ask(client_of(http, ALICE))
    assert int(caught.value.response.headers["retry-after"]) > 50
    ask(client_of(http, BOB))


def test_tokens_of_prompts_are_limited(start: Start, pool: ScriptedPool) -> None:
    http = start(api_keys=KEYS, key_limits=KeyLimits(prompt_tokens_per_minute=12))
    client = client_of(http, ALICE)
    client.completions.create(model="dflash", prompt=["12345", "1234"])
    with pytest.raises(openai.RateLimitError, match="tokens of prompts a minute"):
        client.completions.create(model="dflash", prompt="12345678")
    assert len(pool.asked) == 2


def test_prompts_are_as_long_as_the_operator_says(start: Start) -> None:
    client = client_of(start(max_prompt_tokens=5), "none")
    client.completions.create(model="dflash", prompt=[1, 2, 3, 4, 5])
    with pytest.raises(openai.BadRequestError, match="6 tokens; allowed: 5"):
        client.completions.create(model="dflash", prompt=[1, 2, 3, 4, 5, 6])


def test_a_body_that_is_too_large_is_413(start: Start) -> None:
    client = client_of(start(max_body_bytes=1000), "none")
    with pytest.raises(openai.APIStatusError) as caught:
        client.completions.create(model="dflash", prompt="x" * 1000)
    assert caught.value.status_code == 413


def test_each_answer_has_a_request_id_that_openais_client_knows(start: Start) -> None:
    client = client_of(start(), "none")
    answer = client.completions.with_raw_response.create(
        model="dflash", prompt="a", extra_headers={"x-request-id": "mine-1"}
    )
    assert answer.request_id == "mine-1"


def test_pages_of_other_sites_are_refused(start: Start) -> None:
    http = start(allowed_origins=("https://chat.example",))
    assert http.get("/v1/models", headers={"origin": "https://evil.example"}).status_code == 403
    assert http.get("/v1/models", headers={"origin": "https://chat.example"}).status_code == 200
