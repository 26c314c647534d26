"""Two engines behind one model of a real server: the same answers, hits where the prefix is, one killed under load."""

from __future__ import annotations

import os
import signal
import threading

import httpx
import psutil
import pytest

from dflash_client import ClientError, DFlashClient
from load_tests.server_state import engine_pids
from tests.server.conftest import new_server
from tests.support.waiting import eventually

QUESTIONS = [
    "Sam fills 4 bags with 6 marbles each and gives away 7 marbles. How many marbles does Sam keep?",
    "What are the capitals of Norway, Hungary, Portugal and Japan?",
    "What is the sum of 3, 8 and 12?",
]


def metric(page: str, name: str) -> dict[str, float]:
    """The values of a metric, by engine."""
    found = {}
    for line in page.splitlines():
        if line.startswith(f"dflash:{name}{{"):
            labels, value = line.rsplit(" ", 1)
            found[labels.partition('engine="')[2].partition('"')[0]] = float(value)
    return found


@pytest.mark.slow
def test_two_engines_answer_as_one_and_one_that_is_killed_takes_its_own_streams_alone(grpc_client):
    right = [grpc_client.generate(question, max_tokens=64, temperature=0).text for question in QUESTIONS]
    long_prompt = "Repeat: " + "The old fox sees a quick bird in Paris. " * 12
    server = new_server({"data_parallel_size": "2", "report_cached_tokens": "true"})
    with server, DFlashClient(server.grpc_url, "grpc", timeout_s=120) as client:

        def page() -> str:
            return httpx.get(f"http://{server.metrics_url}/metrics", verify=False).text

        for _ in range(2):
            assert [client.generate(q, max_tokens=64, temperature=0).text for q in QUESTIONS] == right
        client.generate(long_prompt, max_tokens=2)
        again = client.generate(long_prompt, max_tokens=2)
        assert again.spec_stats["num_cached_tokens"] >= 100
        both = ["dflash_0_0-0", "dflash_0_0-1"]
        eventually(lambda: sorted(metric(page(), "requests_routed_total")) == both, "both are on the page")
        pids = engine_pids(server.pid)
        assert len(pids) == 2
        outcomes: list[str] = []

        def stream(number: int) -> None:
            try:
                tokens = sum(1 for _ in client.stream(f"Count {number}", max_tokens=600, ignore_eos=True, seed=number))
                outcomes.append("whole" if tokens else "empty")
            except ClientError as error:
                outcomes.append(type(error).__name__)

        threads = [threading.Thread(target=stream, args=(number,)) for number in range(4)]
        for thread in threads:
            thread.start()
        eventually(lambda: sorted(metric(page(), "num_requests_running").values()) == [2.0, 2.0])
        os.kill(pids[0], signal.SIGKILL)
        assert client.generate(QUESTIONS[0], max_tokens=64, temperature=0).text == right[0]
        assert httpx.get(f"http://{server.http_url}/v2/models/dflash/ready", verify=False).status_code == 200
        for thread in threads:
            thread.join(120)
        assert sorted(outcomes) == ["Internal", "Internal", "whole", "whole"]
        # The page may be one of before the death was noticed, on which both are ready too.
        eventually(lambda: metric(page(), "engine_restarts_total") == {"": 1.0}, "the restart is counted")
        eventually(lambda: set(metric(page(), "engine_ready").values()) == {1.0}, "both are ready")
        assert [client.generate(q, max_tokens=64, temperature=0).text for q in QUESTIONS] == right
    eventually(lambda: not any(psutil.pid_exists(pid) for pid in pids), "both engines are gone")
