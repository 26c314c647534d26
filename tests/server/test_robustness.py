"""Small runs of the two checks that `benchmarks` has in full: malformed requests, and clients that go away."""

from __future__ import annotations

import asyncio

from checks import malformed, mixed
from tests.support.scale import SCALE


def test_each_malformed_request_is_refused_and_the_valid_ones_between_them_are_not(server):
    report = malformed.run(server.grpc_url, server.http_url, server.metrics_url, count=300, seed=0)
    assert report.misses == []
    assert report.valid == 300 // malformed.VALID_EVERY
    assert sum(report.refused.values()) + report.tritons_own == 300
    assert report.by_model > 100


def test_requests_among_others_that_are_dropped_get_what_they_get_alone_and_counters_are_exact(server):
    cases = mixed.draw(24, dropped=8, seed=1) if SCALE >= 4 else mixed.draw(15, dropped=5, seed=1)
    report = asyncio.run(mixed.run(server.grpc_url, server.http_url, server.metrics_url, cases))
    assert report.misses == []
    assert report.equal == len(cases) * 2 // 3
