"""The front end on a scripted model, through OpenAI's own client."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import openai
import pytest
from starlette.testclient import TestClient

from dflash_openai.app import create_app
from dflash_openai.config import FrontendConfig
from tests.frontend.scripted_pool import Script, ScriptedPool
from tests.support.byte_tokenizer import model_dir, tokenizer  # noqa: F401


def wait_until_ready(http: TestClient) -> None:
    """Wait until the application has found its model."""
    deadline = time.monotonic() + 60
    while http.get("/health/ready").status_code != 200:
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.fixture(scope="session")
def running(model_dir: Path) -> Iterator[tuple[ScriptedPool, TestClient]]:  # noqa: F811
    """One application for all tests: it keeps nothing."""
    pool = ScriptedPool(model_dir)
    with TestClient(create_app(FrontendConfig(), pool), raise_server_exceptions=False) as http:
        wait_until_ready(http)
        yield pool, http


@pytest.fixture
def pool(running: tuple[ScriptedPool, TestClient]) -> ScriptedPool:
    """The model, with nothing asked yet and the usual script."""
    pool = running[0]
    pool.script, pool.unreachable = Script(), None
    pool.asked.clear()
    return pool


@pytest.fixture
def http(running: tuple[ScriptedPool, TestClient], pool: ScriptedPool) -> TestClient:
    return running[1]


@pytest.fixture
def client(http: TestClient) -> openai.OpenAI:
    return openai.OpenAI(base_url="http://testserver/v1", api_key="none", max_retries=0, http_client=http)
