"""What the frontend tells of a request's times."""

from __future__ import annotations

import time
from types import SimpleNamespace

import pytest

from dflash_backend.config import EngineConfig
from dflash_backend.messages import TokenDelta
from dflash_backend.triton.flight import Flight
from dflash_backend.triton.service import FrontendService
from tests.triton.fake_triton import FakeTriton
from tests.triton.test_service import COMMAND, submit


@pytest.fixture
def triton():
    return FakeTriton()


@pytest.fixture
def service(model_dir, triton):
    service = FrontendService(EngineConfig(target_model=str(model_dir)), "dflash", triton, COMMAND)
    yield service
    service.close()


class Clock:
    """Seconds that pass only when the engine says something."""

    SECONDS_PER_DELTA = 2.0

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 1000.0
        for module in ("service", "flight"):
            stand_in = SimpleNamespace(monotonic=lambda: self.now, time=time.time)
            monkeypatch.setattr(f"dflash_backend.triton.{module}.time", stand_in)
        add = Flight.add

        def add_later(flight: Flight, delta: TokenDelta) -> tuple[int, float]:
            self.now += self.SECONDS_PER_DELTA
            return add(flight, delta)

        monkeypatch.setattr(Flight, "add", add_later)


def test_latencies_are_measured_between_the_events_that_they_are_named_after(service, triton, monkeypatch):
    """Five steps of three tokens: the first token two seconds after the arrival, the last one eight after that."""
    clock = Clock(monkeypatch)
    submit(service, "ab", max_tokens=15).all()
    assert clock.now == 1010.0
    service.close()
    assert triton.observed("dflash:time_to_first_token_seconds") == (1, 2.0)
    assert triton.observed("dflash:e2e_request_latency_seconds") == (1, 10.0)
    assert triton.observed("dflash:request_time_per_output_token_seconds") == (1, pytest.approx(8.0 / 14))
    assert triton.observed("dflash:request_queue_time_seconds") == (1, 0.5)
    # Two tokens came with the first one, and four times three came together, two seconds after those before.
    assert triton.observed("dflash:inter_token_latency_seconds") == (14, pytest.approx(8.0))
    buckets = triton.buckets("dflash:inter_token_latency_seconds")
    assert [buckets[bound] for bound in ("0.0005", "0.5", "1", "+Inf")] == [2, 2, 14, 14]


def test_of_several_completions_the_first_to_run_ends_the_wait(service, triton):
    submit(service, "ab", max_tokens=6, sampling={"n": 3}).all()
    service.close()
    assert triton.observed("dflash:request_queue_time_seconds") == (1, 0.5)
