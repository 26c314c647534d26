"""Rates and concurrency of keys, and whose tenant a request is."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import httpx
import pytest
from starlette.requests import Request
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from dflash_openai.app import create_app
from dflash_openai.config import FrontendConfig
from dflash_openai.errors import ApiError
from dflash_openai.middleware.api_keys import ApiKey, KeyLimits
from dflash_openai.middleware.authentication import AuthenticationMiddleware
from dflash_openai.middleware.key_limits import KeyLimitsMiddleware, charge_prompt, tenant_of
from dflash_openai.middleware.token_bucket import TokenBucket
from tests.frontend.middleware.asgi import call, client, echo, error_of, http_scope

# The methods of each path of the front end.
PATHS = {
    route.path: route.methods or set() for route in create_app(FrontendConfig()).routes if isinstance(route, Route)
}
ALICE, BOB = "alice-secret-key", "bob-secret-key"


class Clock:
    """A clock that is set."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


def limited(limits: KeyLimits, clock: Callable[[], float], app: ASGIApp = echo) -> ASGIApp:
    keys = (ApiKey.of("alice", ALICE, limits), ApiKey.of("bob", BOB))
    return AuthenticationMiddleware(KeyLimitsMiddleware(app, KeyLimits(), clock), keys)


def send(app: ASGIApp, key: str, path: str = "/v1/completions") -> httpx.Response:
    return call(app, path=path, headers={"authorization": f"Bearer {key}"})


def test_a_bucket_lets_a_minutes_amount_through_at_once_and_then_refills(clock: Clock) -> None:
    bucket = TokenBucket(6, clock)
    for _ in range(6):
        assert bucket.wait_s() == 0
        bucket.take()
    assert bucket.wait_s() == pytest.approx(10)
    clock.now += 10
    assert bucket.wait_s() == 0
    clock.now += 1000
    assert bucket.wait_s(6) == 0
    bucket.take(6)
    assert bucket.wait_s() > 0, "what was not used in time is not saved up"


def test_an_amount_above_the_capacity_takes_a_full_bucket_into_debt(clock: Clock) -> None:
    bucket = TokenBucket(60, clock)
    assert bucket.wait_s(90) == 0
    bucket.take(90)
    assert bucket.wait_s(1) == pytest.approx(31)


def test_beyond_the_rate_there_is_a_429_that_says_when(clock: Clock) -> None:
    app = limited(KeyLimits(requests_per_minute=2), clock)
    assert [send(app, ALICE).status_code for _ in range(3)] == [200, 200, 429]
    refused = send(app, ALICE)
    assert refused.headers["retry-after"] == "30"
    error = error_of(refused)
    assert (error["type"], error["code"]) == ("rate_limit_error", "rate_limit_exceeded")
    assert "2 requests a minute" in error["message"]
    clock.now += 30
    assert send(app, ALICE).status_code == 200


def test_who_comes_back_when_it_was_told_is_let_in(clock: Clock) -> None:
    """7 a minute are one in 8.6 seconds: whole seconds are rounded up."""
    app = limited(KeyLimits(requests_per_minute=7), clock)
    assert [send(app, ALICE).status_code for _ in range(8)] == [200] * 7 + [429]
    clock.now += int(send(app, ALICE).headers["retry-after"])
    assert (clock.now, send(app, ALICE).status_code) == (109.0, 200)


@pytest.mark.parametrize("path", [path for path, methods in PATHS.items() if "POST" in methods and path != "/ping"])
def test_whatever_makes_the_model_or_its_tokenizer_work_has_limits_and_needs_a_key(path: str, clock: Clock) -> None:
    app = limited(KeyLimits(requests_per_minute=1), clock)
    assert call(app, path=path).status_code == 401
    assert [send(app, ALICE, path).status_code for _ in range(2)] == [200, 429]


def test_one_keys_limits_are_nothing_to_another(clock: Clock) -> None:
    app = limited(KeyLimits(requests_per_minute=1), clock)
    assert [send(app, ALICE).status_code for _ in range(2)] == [200, 429]
    assert [send(app, BOB).status_code for _ in range(5)] == [200] * 5


def test_looks_at_the_health_are_free(clock: Clock) -> None:
    app = limited(KeyLimits(requests_per_minute=1), clock)
    assert [send(app, ALICE, "/health").status_code for _ in range(4)] == [200] * 4


def test_default_limits_hold_for_keys_without_their_own_and_for_clients_without_a_key(clock: Clock) -> None:
    keys = (ApiKey.of("alice", ALICE, KeyLimits(requests_per_minute=3)), ApiKey.of("bob", BOB))
    app = AuthenticationMiddleware(KeyLimitsMiddleware(echo, KeyLimits(requests_per_minute=1), clock), keys)
    assert [send(app, ALICE).status_code for _ in range(4)] == [200, 200, 200, 429]
    assert [send(app, BOB).status_code for _ in range(2)] == [200, 429]
    app = AuthenticationMiddleware(KeyLimitsMiddleware(echo, KeyLimits(requests_per_minute=1), clock), ())
    assert [call(app).status_code for _ in range(2)] == [200, 429]


def test_requests_that_run_count_until_they_end_however_that_is(clock: Clock) -> None:
    go_on = asyncio.Event()

    async def held(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["path"] == "/v1/fails":
            raise RuntimeError("planted")
        await go_on.wait()
        await echo(scope, receive, send)

    async def run() -> None:
        app = limited(KeyLimits(max_concurrency=2), clock, held)
        headers = {"authorization": f"Bearer {ALICE}"}
        async with client(app) as http:
            with pytest.raises(RuntimeError):
                await http.post("/v1/fails", headers=headers)
            two = [asyncio.create_task(http.post("/v1/x", headers=headers)) for _ in range(2)]
            await asyncio.sleep(0)
            while (refused := await http.post("/v1/x", headers=headers)).status_code != 429:
                pass
            assert "max_concurrency is 2" in error_of(refused)["message"]
            assert refused.headers["retry-after"] == "1"
            two[0].cancel()
            await asyncio.wait(two[:1])
            third = asyncio.create_task(http.post("/v1/x", headers=headers))
            go_on.set()
            assert [(await one).status_code for one in (two[1], third)] == [200, 200]

    asyncio.run(run())


def request_with(**state: object) -> Request:
    return Request({**http_scope(), "state": state})


def test_prompts_are_charged_by_their_tokens(clock: Clock) -> None:
    refusals: list[ApiError] = []

    async def charging(scope: Scope, receive: Receive, send: Send) -> None:
        try:
            charge_prompt(Request(scope), 70)
        except ApiError as error:
            refusals.append(error)
            await error.response()(scope, receive, send)
            return
        await echo(scope, receive, send)

    app = limited(KeyLimits(prompt_tokens_per_minute=100), clock, charging)
    assert [send(app, ALICE).status_code for _ in range(2)] == [200, 429]
    assert refusals[0].headers == {"retry-after": "24"}
    clock.now += 24
    assert send(app, ALICE).status_code == 200
    assert [send(app, BOB).status_code for _ in range(3)] == [200] * 3
    charge_prompt(request_with(), 10**9)


def test_a_keys_name_is_the_tenant() -> None:
    alice = request_with(api_key=ApiKey.of("alice", ALICE))
    assert tenant_of(alice, None) == "alice"
    assert tenant_of(alice, "alice") == "alice"
    with pytest.raises(ApiError, match="belongs to the tenant 'alice'") as caught:
        tenant_of(alice, "bob")
    assert (caught.value.status, caught.value.param) == (403, "tenant")
    assert tenant_of(request_with(api_key=None), "anyone") == "anyone"
    assert tenant_of(request_with(), None) is None
