"""A server whose queue is short: whom it refuses, and how the OpenAI front end says that."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import httpx
import openai
import pytest

from dflash_cli.launcher.server import TritonServer
from dflash_client import DFlashClient, Unavailable
from dflash_client.errors import QueueFull
from load_tests.server_state import MetricsPage
from tests.server.conftest import SETTINGS, new_server
from tests.support.frontends import local_frontend
from tests.support.waiting import eventually

ROWS, WAITING = int(SETTINGS["max_num_seqs"]), 2


@pytest.fixture(scope="module")
def small() -> Iterator[TritonServer]:
    with new_server({"max_queue_size": str(WAITING)}) as server:
        yield server


@pytest.fixture(scope="module")
def direct(small: TritonServer) -> Iterator[DFlashClient]:
    with DFlashClient(small.grpc_url, "grpc", timeout_s=60) as client:
        yield client


def test_a_small_queue_refuses_no_client_of_an_idle_server(direct: DFlashClient) -> None:
    with ThreadPoolExecutor(3 * ROWS) as pool:
        sampling = {"max_tokens": 60, "ignore_eos": True}
        some = [pool.submit(direct.generate, "Hello", **sampling) for _ in range(ROWS)]
        assert all(one.result().num_output_tokens == 60 for one in some)
        many = [pool.submit(direct.generate, "Hello", **sampling) for _ in range(3 * ROWS)]
        refused = [one.exception() for one in many if one.exception() is not None]
    assert refused
    assert all(isinstance(error, Unavailable) and "max_queue_size is 2" in str(error) for error in refused)
    assert len(many) - len(refused) >= ROWS


def test_a_full_queue_is_a_429_with_retry_after(small: TritonServer, direct: DFlashClient) -> None:
    with (
        local_frontend(small) as frontend,
        httpx.Client(trust_env=False, verify=False, timeout=60) as http,
        openai.OpenAI(base_url=f"{frontend.url}/v1", api_key="x", max_retries=0, http_client=http) as client,
    ):
        busy = [direct.stream("a", max_tokens=1000, ignore_eos=True) for _ in range(ROWS + WAITING)]
        for stream in busy[:ROWS]:
            next(stream)
        with ThreadPoolExecutor(WAITING) as threads:
            waiting = [threads.submit(next, stream) for stream in busy[ROWS:]]
            queued = "dflash:num_requests_waiting"
            eventually(lambda: MetricsPage.read(small.metrics_url).value(queued) == WAITING, "queued")
            with pytest.raises(QueueFull):
                direct.generate("b", max_tokens=1)
            with pytest.raises(openai.RateLimitError) as caught:
                client.completions.create(model="dflash", prompt="b", max_tokens=1)
            assert caught.value.response.headers["retry-after"] == "1"
            for stream in busy:
                stream.cancel()
            for one in waiting:
                with pytest.raises(Exception, match="cancelled"):
                    one.result(20)
