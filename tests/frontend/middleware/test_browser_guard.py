"""Pages of other sites."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from dflash_openai.middleware.browser_guard import LOOPBACK_HOSTS, BrowserGuardMiddleware
from tests.frontend.middleware.asgi import call, collecting, echo, error_of, http_scope, receiving

CLOSED = BrowserGuardMiddleware(echo)
OPEN = BrowserGuardMiddleware(echo, ["https://chat.example"])
LOCAL = BrowserGuardMiddleware(echo, hosts=LOOPBACK_HOSTS)


@pytest.mark.parametrize("origin", ["https://evil.example", "http://localhost:3000", "null", "http://[", "file://"])
def test_pages_of_other_sites_are_refused(origin: str) -> None:
    response = call(CLOSED, headers={"origin": origin})
    assert response.status_code == 403
    assert error_of(response)["code"] == "origin_not_allowed"
    assert not any(name.startswith("access-control") for name in response.headers)
    assert call(OPEN, headers={"origin": origin}).status_code == 403


def test_the_servers_own_page_and_programs_are_let_in() -> None:
    assert call(CLOSED, headers={"origin": "http://localhost:9000"}).status_code == 200
    response = call(CLOSED)
    assert response.status_code == 200
    assert not any(name.startswith("access-control") for name in response.headers)


def test_origins_that_are_named_may_ask_and_read() -> None:
    origin = {"origin": "https://chat.example"}
    asked = {
        **origin,
        "access-control-request-method": "POST",
        "access-control-request-headers": "authorization,content-type",
    }
    preflight = call(OPEN, "OPTIONS", headers=asked)
    assert preflight.status_code == 200
    assert preflight.headers["access-control-allow-origin"] == "https://chat.example"
    assert call(OPEN, headers=origin).headers["access-control-allow-origin"] == "https://chat.example"
    assert "access-control-allow-credentials" not in preflight.headers
    assert call(BrowserGuardMiddleware(echo, ["*"]), headers={"origin": "https://any.example"}).status_code == 200


@pytest.mark.parametrize(
    "names",
    [
        "authorization,content-type,x-stainless-arch,x-stainless-lang,x-stainless-os,x-stainless-package-version,"
        "x-stainless-retry-count,x-stainless-runtime,x-stainless-runtime-version,x-stainless-timeout",
        "anthropic-dangerous-direct-browser-access,anthropic-version,content-type,x-api-key,x-stainless-lang",
    ],
)
def test_official_clients_may_ask_from_a_page_that_is_named(names: str) -> None:
    """They send headers of their own, of which the browser asks before."""
    asked = {"access-control-request-method": "POST", "access-control-request-headers": names}
    preflight = call(OPEN, "OPTIONS", headers={"origin": "https://chat.example", **asked})
    assert preflight.status_code == 200
    assert {*preflight.headers["access-control-allow-headers"].replace(" ", "").split(",")} >= {*names.split(",")}
    assert call(OPEN, "OPTIONS", headers={"origin": "https://evil.example", **asked}).status_code == 403


@pytest.mark.parametrize("host", ["localhost:9000", "127.0.0.1", "[::1]:9000", "LOCALHOST.:9000"])
def test_a_local_server_answers_to_local_names(host: str) -> None:
    assert call(LOCAL, headers={"host": host}).status_code == 200


@pytest.mark.parametrize("path", ["/health", "/health/live", "/health/ready", "/ping"])
@pytest.mark.parametrize("host", ["10.0.0.7:9000", "pod.cluster.local", ""])
def test_a_probe_asks_by_any_name_and_a_page_of_another_site_not(path: str, host: str) -> None:
    """As the kubelet and the container's health check, where --allowed-hosts has the name that clients use."""
    named = BrowserGuardMiddleware(echo, hosts={"llm.example"})
    assert call(named, "GET", path, headers={"host": host}).status_code == 200
    assert call(named, "GET", f"{path}/more", headers={"host": host}).status_code == 421
    assert call(named, "GET", path, headers={"host": host, "origin": "https://evil.example"}).status_code == 403


@pytest.mark.parametrize("host", ["rebound.example:9000", "localhost.evil.example", "[::", ""])
def test_a_local_server_answers_to_no_other_name(host: str) -> None:
    response = call(LOCAL, headers={"host": host})
    assert response.status_code == 421
    assert error_of(response)["code"] == "host_not_allowed"
    assert call(CLOSED, headers={"host": host}).status_code == 200


def test_a_request_for_two_hosts_is_refused() -> None:
    sent: list[Any] = []
    scope = http_scope(headers=(("host", "localhost"), ("host", "evil.example")))
    asyncio.run(CLOSED(scope, receiving(), collecting(sent)))
    assert sent[0]["status"] == 400
    assert b"more than one Host header" in sent[1]["body"]
