"""The endpoints around generation: models, tokens, health, version, metrics, the OpenAPI document."""

from __future__ import annotations

import asyncio
import threading
import time
from pathlib import Path
from typing import Any, cast

import msgspec
import openai
import pytest
from prometheus_client.parser import text_string_to_metric_families
from starlette.testclient import TestClient

from dflash_client.errors import ClientError, Internal, RequestTimeout, Unavailable
from dflash_openai import notices
from dflash_openai.app import create_app
from dflash_openai.config import FrontendConfig
from dflash_openai.metrics import merged
from dflash_openai.readiness import Readiness
from dflash_openai.state import Frontend
from dflash_openai.triton_pool import TritonPool
from tests.client.tls_servers import Certificates, http_server
from tests.frontend.conftest import wait_until_ready
from tests.frontend.scripted_pool import MAX_MODEL_LEN, Script, ScriptedPool
from tests.support.waiting import eventually


def test_the_model_has_the_targets_name_and_tritons(client: openai.OpenAI) -> None:
    models = client.models.list().data
    assert [model.id for model in models] == ["toys/target", "dflash"]
    assert models[0].model_extra is not None
    assert models[0].model_extra["max_model_len"] == MAX_MODEL_LEN
    assert client.models.retrieve("toys/target").id == "toys/target"
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("other")


def test_tokens_and_text(http: TestClient) -> None:
    answer = http.post("/tokenize", json={"prompt": "ab", "return_token_strs": True}).json()
    assert answer == {"count": 2, "max_model_len": MAX_MODEL_LEN, "tokens": [97, 98], "token_strs": ["a", "b"]}
    chat = http.post("/tokenize", json={"messages": [{"role": "user", "content": "x"}]}).json()
    assert chat["tokens"] == [257, *b"user:x", 257, *b"a:"]
    assert http.post("/detokenize", json={"tokens": [97, 257]}).json() == {"prompt": "a<s>"}
    assert http.post("/detokenize", json={"tokens": []}).json() == {"prompt": ""}
    assert http.post("/detokenize", json={"tokens": [999]}).status_code == 400


@pytest.mark.parametrize(
    ("body", "kind"),
    [
        ({"messages": [{"role": "user", "content": "Hi"}]}, "chat.completion"),
        ({"prompt": "messages"}, "text_completion"),
        ({"prompt": "a", "user": "x"}, "text_completion"),
    ],
)
def test_sagemakers_invocations_are_chats_or_completions(body: Any, kind: str, http: TestClient) -> None:
    assert http.post("/invocations", json=body).json()["object"] == kind
    assert http.post("/ping").status_code == 200
    assert http.post("/invocations", content=b"{").json()["error"]["type"] == "invalid_request_error"


@pytest.mark.parametrize("slash", ["", "/"])
@pytest.mark.parametrize("path", ["/health/ready", "/ping"])
def test_readiness_follows_the_server(path: str, slash: str, http: TestClient, pool: ScriptedPool) -> None:
    def status() -> int:
        return http.get(path + slash, follow_redirects=False).status_code

    eventually(lambda: status() == 200, "ready")
    pool.unreachable = Unavailable("the engine restarts")
    eventually(lambda: status() == 503, "not ready", 2.0)
    answer = http.get(path + slash)
    assert answer.headers["retry-after"] == "1"
    assert "the engine restarts" in answer.json()["error"]["message"]
    pool.unreachable = None
    eventually(lambda: status() == 200, "ready again", 2.0)


@pytest.mark.parametrize("path", ["/health", "/health/", "/health/live", "/health/live/"])
def test_the_front_end_lives_whatever_its_server_does(path: str, http: TestClient, pool: ScriptedPool) -> None:
    pool.unreachable = Unavailable("the engine restarts")
    answer = http.get(path, follow_redirects=False)
    assert (answer.status_code, answer.content) == (200, b"")


@pytest.mark.parametrize(
    ("path", "words"),
    [
        ("/v1/embeddings", "text alone, so it has no embeddings"),
        ("/v1/audio/speech", "no audio"),
        ("/v1/responses/resp_1/cancel", "keeps no responses; send the whole conversation"),
        ("/v1/responses/compact", "compacts no conversation"),
        ("/v1/messages/batches", "send their requests to /v1/messages"),
        ("/v1/responsesx", "Not Found"),
    ],
)
def test_an_endpoint_of_the_apis_that_is_not_here_says_why(http: TestClient, path: str, words: str) -> None:
    answer = http.post(path, json={})
    assert answer.status_code == 404
    assert words in answer.json()["error"]["message"]


@pytest.mark.parametrize("path", ["/v1/models/", "/version/", "/metrics/"])
def test_a_slash_at_the_end_of_a_path_changes_nothing(path: str, http: TestClient) -> None:
    assert http.get(path, follow_redirects=False).status_code == 200
    assert http.get(path + "/", follow_redirects=False).status_code == 404


class SlowPool:
    """Servers that answer after `wait_s`."""

    def __init__(self) -> None:
        self.wait_s, self.num_asked = 0.0, 0

    async def probe(self, timeout_s: float) -> ClientError | None:
        self.num_asked += 1
        try:
            async with asyncio.timeout(timeout_s):
                await asyncio.sleep(self.wait_s)
        except TimeoutError:
            return RequestTimeout("silence")
        return None


def test_many_who_ask_for_readiness_share_one_question() -> None:
    async def run() -> tuple[list[str | None], int]:
        pool = SlowPool()
        readiness = Readiness(cast(TritonPool, pool))
        answers = await asyncio.gather(*(readiness.why_not() for _ in range(1000)))
        answers += await asyncio.gather(*(readiness.why_not() for _ in range(1000)))
        return answers, pool.num_asked

    assert asyncio.run(run()) == ([None] * 2000, 1)


def test_servers_that_fall_silent_are_not_ready_after_a_while_and_nobody_waits_for_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("dflash_openai.readiness.KEPT_S", 0.0)
    monkeypatch.setattr("dflash_openai.readiness.WAIT_S", 0.05)
    monkeypatch.setattr("dflash_openai.readiness.SILENCE_S", 0.3)

    async def run() -> None:
        pool = SlowPool()
        readiness = Readiness(cast(TritonPool, pool))
        assert await readiness.why_not() is None
        pool.wait_s = 100.0
        began = time.monotonic()
        assert await readiness.why_not() is None, "a server that is late is not yet one that hangs"
        assert time.monotonic() - began < 0.25
        while await readiness.why_not() is None:
            assert time.monotonic() - began < 1.0
        assert time.monotonic() - began > 0.25
        assert await readiness.why_not() == "silence"
        pool.wait_s = 0.0
        await asyncio.sleep(0.4)
        assert await readiness.why_not() is None
        readiness.close()

    asyncio.run(run())


def test_requests_before_the_model_is_there_are_told_why(model_dir: Path, caplog: pytest.LogCaptureFixture) -> None:
    notices.clear()
    pool = ScriptedPool(model_dir)
    pool.unreachable = Unavailable("it is loading")
    with TestClient(create_app(FrontendConfig(), pool)) as http:
        for path in ("/v1/models", "/health/ready", "/ping"):
            assert http.get(path).status_code == 503
        http.app.state.frontend._why_not = "it is loading"  # type: ignore[attr-defined]
        answer = http.post("/v1/completions", json={"prompt": "a"})
    assert answer.status_code == 503
    assert "it is loading" in answer.json()["error"]["message"]
    assert "the model is not ready: it is loading; its servers are asked again" in caplog.messages


def test_a_front_end_that_cannot_take_its_model_says_why_and_tries_again(
    model_dir: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Whatever the reason: else it would never be ready, and nobody would know."""
    monkeypatch.setattr("dflash_openai.state.RETRY_S", 0.01)
    pool = ScriptedPool(model_dir)
    pool.unreachable = OSError("no such disk")  # type: ignore[assignment]
    with TestClient(create_app(FrontendConfig(), pool)) as http:
        eventually(lambda: "no such disk" in http.get("/v1/models").text)
        pool.unreachable = None
        wait_until_ready(http)
        eventually(lambda: http.get("/v1/models").status_code == 200)
    assert "cannot take its model" in caplog.text


def test_the_version_is_that_of_the_package(http: TestClient) -> None:
    assert http.get("/version").json()["version"]


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/responses"])
def test_a_stream_that_fails_after_its_beginning_is_counted_as_an_error(
    path: str, http: TestClient, pool: ScriptedPool
) -> None:
    """The alert of a front end that fails reads the statuses, and most answers are streams."""

    def counted() -> dict[str, float]:
        families = {family.name: family for family in text_string_to_metric_families(http.get("/metrics").text)}
        samples = families["dflash_openai:requests"].samples
        return {each.labels["status"]: each.value for each in samples if each.labels["path"] == path}

    before = counted()
    pool.script = Script(texts=("a",), error=Internal("broken"))
    body = {"prompt": "a"} if path == "/v1/completions" else {"input": "a"}
    assert http.post(path, json={**body, "stream": True}).status_code == 200
    after = counted()
    assert after["500"] == before.get("500", 0) + 1
    assert after.get("200") == before.get("200")


def test_metrics_count_requests_by_path_and_status(http: TestClient) -> None:
    http.post("/v1/completions", json={"prompt": "a", "stream": True})
    http.post("/v1/completions", json={"prompt": "a", "temperature": "warm"})
    http.get("/v1/made-up")
    families = {family.name: family for family in text_string_to_metric_families(http.get("/metrics").text)}
    counted = {
        (sample.labels["path"], sample.labels["status"]): sample.value
        for sample in families["dflash_openai:requests"].samples
    }
    assert counted["/v1/completions", "200"] >= 1
    assert counted["/v1/completions", "400"] >= 1
    assert counted["other", "404"] >= 1
    assert not any("made-up" in path for path, _ in counted)
    first = families["dflash_openai:time_to_first_event_seconds"].samples
    # Tests that ran before in this process count too.
    generating = {"/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/messages"}
    assert {sample.labels["path"] for sample in first} <= generating


PAGE = """# HELP a_total Things
# TYPE a_total counter
a_total{k="1"} 2
a_total 3
# TYPE h histogram
h_bucket{le="+Inf"} 1
h_sum 4
h_count 1
"""


def test_metrics_of_one_server_are_as_they_were() -> None:
    lines = list(merged({"one:8002": PAGE}))
    assert lines[-len(PAGE.splitlines()) :] == PAGE.splitlines()


def test_metrics_of_several_servers_are_grouped_and_labelled() -> None:
    text = "\n".join(merged({"one:8002": PAGE, "two:8002": PAGE, "gone:8002": None})) + "\n"
    families = {family.name: family for family in text_string_to_metric_families(text)}
    assert {sample.labels["server"] for sample in families["a"].samples} == {"one:8002", "two:8002"}
    assert len(families["h"].samples) == 6
    up = {sample.labels["server"]: sample.value for sample in families["dflash_openai:triton_up"].samples}
    assert up == {"one:8002": 1, "two:8002": 1, "gone:8002": 0}


def test_a_page_over_https_is_read_only_from_a_server_that_is_trusted(pool: ScriptedPool, tmp_path: Path) -> None:
    certificates = Certificates.make(tmp_path)
    with http_server(None) as clear, http_server(certificates) as unknown:
        urls = (f"http://{clear.address}/metrics", f"https://{unknown.address}/metrics")
        with TestClient(create_app(FrontendConfig(triton_metrics_urls=urls), pool)) as http:
            families = text_string_to_metric_families(http.get("/metrics").text)
        samples = [sample for family in families for sample in family.samples]
        up = {sample.labels["server"]: sample.value for sample in samples if sample.name == "dflash_openai:triton_up"}
        assert up == {clear.address: 1, unknown.address: 0}
        assert unknown.paths == []


def test_the_openapi_document_has_every_body(http: TestClient) -> None:
    document = http.get("/openapi.json").json()
    schemas = document["components"]["schemas"]
    for path in ("/v1/chat/completions", "/v1/completions", "/tokenize", "/detokenize"):
        reference = document["paths"][path]["post"]["requestBody"]["content"]["application/json"]["schema"]["$ref"]
        assert schemas[reference.rpartition("/")[2]]["additionalProperties"] is False


def test_the_front_end_looks_which_of_its_servers_say_nothing(model_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    looks: list[float] = []

    async def look(timeout_s: float) -> None:
        looks.append(timeout_s)

    pool = ScriptedPool(model_dir)
    monkeypatch.setattr(pool, "look", look)
    monkeypatch.setattr("dflash_openai.state.REFRESH_S", 0.01)
    with TestClient(create_app(FrontendConfig(), pool)) as http:
        wait_until_ready(http)
        eventually(lambda: len(looks) > 2)
    assert set(looks) == {5.0}


def test_a_request_that_has_begun_ends_though_the_model_is_described_anew(model_dir: Path) -> None:
    """As when a drafter takes the place of another: its first prompts are read by then, others not."""

    async def run() -> None:
        pool = ScriptedPool(model_dir)
        frontend = Frontend(FrontendConfig(), pool)
        await frontend._use(pool.description)
        before = frontend.model().prompts
        waits, goes_on = threading.Event(), threading.Event()
        for _ in range(before.threads._max_workers):
            before.threads.submit(lambda: (waits.set(), goes_on.wait(10)))
        assert waits.wait(10)
        waiting = asyncio.create_task(before.from_text("a"))
        await asyncio.sleep(0)
        await frontend._use(msgspec.structs.replace(pool.description, num_speculative_tokens=7))
        assert frontend.model().prompts is not before
        goes_on.set()
        assert await asyncio.wait_for(waiting, 10) == await before.from_text("a") != []
        await frontend.close()

    asyncio.run(run())
