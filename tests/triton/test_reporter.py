"""When the metrics page is brought up to date as requests end, on a clock that only the page's flushes move."""

from __future__ import annotations

from types import SimpleNamespace
from unittest.mock import MagicMock

import pytest

from dflash_backend.triton import reporter
from dflash_backend.triton.reporter import Reporter

FLUSH_S = 0.004


class Page:
    """Metrics whose flush takes `FLUSH_S`."""

    def __init__(self) -> None:
        self.now = 100.0
        self.num_flushes = 0

    def flush(self) -> None:
        self.now += FLUSH_S
        self.num_flushes += 1

    def set(self, name: str, value: float) -> None:
        pass


@pytest.fixture
def page(monkeypatch: pytest.MonkeyPatch) -> Page:
    page = Page()
    monkeypatch.setattr(reporter, "time", SimpleNamespace(monotonic=lambda: page.now, time=lambda: page.now))
    return page


@pytest.fixture
def finish(page: Page):
    """A request ends `after_s` seconds after the one before; whether it is on the page."""
    engine = SimpleNamespace(num_restarts=0, silence_s=0.0)
    reports = Reporter(page, MagicMock(), engine, lambda: True)

    def finish(after_s: float) -> bool:
        page.now += after_s
        reports.report_finished(page.now, 0)
        return not reports.has_finished

    return finish


def test_requests_that_end_shortly_after_each_other_are_on_the_page_at_once(finish):
    assert all(finish(after_s) for after_s in [60.0] + [0.001] * 9)
    assert all(finish(after_s) for after_s in [60.0] + [0.001] * 9)


def test_the_page_takes_a_share_of_the_threads_time_however_many_requests_end(page, finish):
    started = page.now
    finish(600.0)  # What was not used meanwhile is not used later.
    while page.now < started + 620.0:
        finish(0.001)
    most = reporter.FINISHED_SHARE * (20.0 + reporter.FINISHED_BURST_S)
    assert most - 0.1 < page.num_flushes * FLUSH_S < most + 0.1
