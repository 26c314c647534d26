"""What options of the front end set where a request says nothing, or whatever it says."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from starlette.testclient import TestClient

from dflash_openai.app import create_app
from dflash_openai.config import FrontendConfig
from tests.frontend.conftest import wait_until_ready
from tests.frontend.scripted_pool import Script, ScriptedPool
from tests.frontend.test_chat import LOGPROBS

BODIES: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "a", "logprobs": 1},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "a"}], "logprobs": True, "top_logprobs": 1},
}


@pytest.fixture(scope="module")
def http(model_dir: Path) -> Iterator[TestClient]:
    config = FrontendConfig(return_tokens_as_token_ids=True, enable_force_include_usage=True)
    pool = ScriptedPool(model_dir)
    pool.script = Script(("h",), logprobs=LOGPROBS)
    with TestClient(create_app(config, pool), raise_server_exceptions=False) as http:
        wait_until_ready(http)
        yield http


@pytest.mark.parametrize("path", list(BODIES))
@pytest.mark.parametrize(("asked", "as_ids"), [(None, True), (True, True), (False, False)])
def test_tokens_are_written_as_ids_unless_the_request_says_no(
    http: TestClient, path: str, asked: bool | None, as_ids: bool
) -> None:
    body = {**BODIES[path], "return_tokens_as_token_ids": asked}
    logprobs = http.post(path, json=body).json()["choices"][0]["logprobs"]
    tokens = logprobs["tokens"] if "tokens" in logprobs else [entry["token"] for entry in logprobs["content"]]
    assert tokens
    assert {token.startswith("token_id:") for token in tokens} == {as_ids}


@pytest.mark.parametrize("path", list(BODIES))
@pytest.mark.parametrize("options", [None, {"include_usage": False}, {"include_usage": True}])
def test_each_stream_ends_with_its_usage(http: TestClient, path: str, options: dict[str, Any] | None) -> None:
    text = http.post(path, json={**BODIES[path], "stream": True, "stream_options": options}).text
    *chunks, last = [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: {")]
    assert last["choices"] == []
    assert last["usage"]["completion_tokens"] > 0
    assert all(chunk.get("usage") is None for chunk in chunks)
    whole = http.post(path, json=BODIES[path])
    assert (whole.status_code, whole.json()["usage"]) == (200, last["usage"])
