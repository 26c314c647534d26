"""Errors have OpenAI's form and the status that its client makes the right exception of."""

from __future__ import annotations

import openai
import pytest
from starlette.testclient import TestClient

from dflash_client.errors import ClientError, Internal, InvalidArgument, QueueFull, Unavailable
from tests.frontend.scripted_pool import Script, ScriptedPool


@pytest.mark.parametrize(
    ("behind", "status", "raised"),
    [
        (InvalidArgument("sampling parameter 'top_p' has the value 7"), 400, openai.BadRequestError),
        (QueueFull("2 requests wait already and max_queue_size is 2"), 429, openai.RateLimitError),
        (Unavailable("the engine restarts"), 503, openai.InternalServerError),
        (Internal("out of memory"), 500, openai.InternalServerError),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_a_failure_of_the_model_has_its_status(
    behind: ClientError,
    status: int,
    raised: type[openai.APIStatusError],
    stream: bool,
    client: openai.OpenAI,
    pool: ScriptedPool,
) -> None:
    pool.script = Script(texts=(), error=behind)
    with pytest.raises(raised) as caught:
        client.completions.create(model="dflash", prompt="a", stream=stream)
    assert caught.value.status_code == status
    assert str(behind) in caught.value.message
    if status in (429, 503):
        assert caught.value.response.headers["retry-after"] == "1"
    if status == 400:
        assert caught.value.param == "top_p"


def test_an_unknown_field_is_named(http: TestClient) -> None:
    answer = http.post("/v1/completions", json={"prompt": "a", "temperatur": 1})
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "temperatur"
    assert "did you mean 'temperature'?" in answer.json()["error"]["message"]


def test_another_model_does_not_exist(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError) as caught:
        client.completions.create(model="gpt-4", prompt="a")
    assert caught.value.code == "model_not_found"
