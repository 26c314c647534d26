"""Random requests to every endpoint: never a server error, never a hang, and a stream brings what the whole answer has.
The model writes random text, and refuses parameters as the real one does (`checks.random_requests` asks that one)."""

from __future__ import annotations

import itertools
from collections.abc import AsyncGenerator, Mapping, Sequence
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from starlette.testclient import TestClient

from checks.random_bodies import BODIES, TEXT, bodies, changed_bodies, full_bodies
from checks.random_requests import Post, try_body
from dflash_backend.text.sampling_params import ParameterError, parse_sampling_params
from dflash_client import Delta
from dflash_client.errors import InvalidArgument
from dflash_client.results import Logprob
from tests.frontend.scripted_pool import Asked, Script, ScriptedPool, ScriptedRequest
from tests.frontend.tool_model import forcing, running  # noqa: F401
from tests.support.scale import SCALE, scaled

PATHS = (*BODIES, "/invocations")
EXAMPLES = scaled(8, at_least=3)


class CheckedRequest(ScriptedRequest):
    """Refuses what the model would refuse."""

    def __init__(self, script: Script, asked: Asked) -> None:
        super().__init__(script, asked)
        self._sampling = asked.sampling

    async def deltas(self) -> AsyncGenerator[Delta, None]:
        try:
            parse_sampling_params(self._sampling, max_speculative_tokens=3, vocab_size=258, max_n=8)
        except ParameterError as error:
            raise InvalidArgument(str(error)) from None
        async for delta in super().deltas():
            yield delta


@pytest.fixture
def post(pool: ScriptedPool, http: TestClient, forcing: None, monkeypatch: pytest.MonkeyPatch) -> Post:  # noqa: F811
    def request(stream: bool, token_ids: Sequence[int], sampling: Mapping[str, Any], headers: Any = None) -> Any:
        return CheckedRequest(pool.script, Asked(stream, list(token_ids), dict(sampling), {}))

    monkeypatch.setattr(pool, "request", request)
    return lambda path, body: http.post(path, content=body)


def _encode(text: str) -> bytes:
    return text.encode(errors="surrogatepass")


def _script(texts: Sequence[str], reason: str, stats_apart: bool) -> Script:
    """A model that writes these texts, a token a byte, each token with its log-probability and that of another one."""
    logprobs = [
        [{byte: Logprob(-0.5, 1, chr(byte)), 65: Logprob(-1.0, 2, "A")} for byte in _encode(text)] for text in texts
    ]
    return Script(texts, reason, stats_apart=stats_apart, logprobs=logprobs, encode=_encode)


SCRIPTS = st.builds(
    _script,
    st.lists(TEXT.map(lambda text: text.replace("\ud83d", "")), min_size=1, max_size=4),
    st.sampled_from(["stop", "length"]),
    st.booleans(),
)


@pytest.mark.parametrize("path", PATHS)
def test_a_place_of_another_kind_is_an_error_of_the_client_in_every_object(
    path: str, post: Post, pool: ScriptedPool
) -> None:
    assert [*itertools.chain.from_iterable(try_body(post, path, body) for body in full_bodies(path))].count(
        "200"
    ) == len(full_bodies(path)), "the bodies are right before they are changed"
    # Some of them in each run; `checks.random_requests` sends all.
    for body in itertools.islice(changed_bodies(path), 0, None, round(1 / min(1.0, 0.0125 * SCALE))):
        for _ in try_body(post, path, body):
            pass


@pytest.mark.parametrize("path", PATHS)
def test_random_requests_are_answered_and_a_stream_brings_what_the_whole_answer_has(
    path: str, post: Post, pool: ScriptedPool
) -> None:
    @settings(max_examples=EXAMPLES, deadline=None, suppress_health_check=list(HealthCheck))
    @given(bodies(path), SCRIPTS)
    def send(body: dict[str, Any], script: Script) -> None:
        pool.script = script
        for _ in try_body(post, path, body):
            pass

    send()
