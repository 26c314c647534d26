"""When the metrics page is brought up to date as requests end, on a clock that only the page's flushes move."""

from __future__ import annotations

from types import SimpleNamespace
from unittest.mock import MagicMock

import pytest

from dflash_backend.messages import EngineCoreOutputs, EngineStats
from dflash_backend.spec_stats import SpecDecodingStats
from dflash_backend.triton import reporter
from dflash_backend.triton.reporter import Reporter

FLUSH_S = 0.004
BLOCKS = {"ready": SimpleNamespace(kv_block_size=16), "num_kv_blocks": 8}


class Page:
    """Metrics whose flush takes `FLUSH_S`. `num_flushes` are of what concerns requests, `num_whole` of all."""

    def __init__(self) -> None:
        self.now = 100.0
        self.num_flushes = self.num_whole = 0

    def flush_requests(self) -> None:
        self.now += FLUSH_S
        self.num_flushes += 1

    def flush(self) -> None:
        self.now += FLUSH_S
        self.num_whole += 1

    def set(self, name: str, value: float) -> None:
        pass

    def inform(self, name: str, values: tuple[str, str]) -> None:
        pass


@pytest.fixture
def page(monkeypatch: pytest.MonkeyPatch) -> Page:
    page = Page()
    monkeypatch.setattr(reporter, "time", SimpleNamespace(monotonic=lambda: page.now, time=lambda: page.now))
    return page


@pytest.fixture
def reports(page: Page) -> Reporter:
    engines = SimpleNamespace(num_restarts=0, supervisors=[], **BLOCKS)
    return Reporter(page, MagicMock(), engines, lambda: True)


@pytest.fixture
def finish(page: Page, reports: Reporter):
    """A request ends `after_s` seconds after the one before; whether it is on the page."""

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


def test_no_response_waits_for_the_metrics_of_steps_which_follow_within_the_age_of_a_busy_page(page, reports, finish):
    reports.report(page.now, 0)
    for _ in range(100):
        finish(0.01)
        assert page.num_whole <= 1 + (page.now - 100.0) / reporter.BUSY_S
        reports.report_if_due(page.now, 0)
    assert page.num_whole > (page.now - 100.0) / (reporter.BUSY_S + 2 * (0.01 + FLUSH_S))


def test_a_request_that_did_not_reach_the_page_at_once_does_so_soon(page, reports, finish):
    reports.report(page.now, 0)
    while finish(0.001):
        pass
    reports.report_if_due(page.now, 0)
    assert reports.has_finished
    page.now += reporter.FINISHED_S
    reports.report_if_due(page.now, 0)
    assert not reports.has_finished


@pytest.mark.parametrize("has_drafter", [True, False])
def test_a_drafter_that_drafts_in_vain_is_warned_of_in_the_log(page: Page, has_drafter: bool) -> None:
    """Prompt lookup is no drafter: where texts do not repeat it finds nothing."""
    log = MagicMock()
    page.follow = lambda stats, index: None
    page.observe_step = lambda seconds: None
    engines = SimpleNamespace(num_restarts=0, supervisors=[], **BLOCKS)
    reports = Reporter(page, log, engines, lambda: True, lambda: has_drafter)
    for _ in range(20):
        reports.note_finished()
    reports.follow(0, EngineCoreOutputs(stats=EngineStats(spec_decoding=SpecDecodingStats(500, 7500, 3))))
    for _ in range(3):
        page.now += 1.0
        reports.report(page.now, 0)
    said = [call.args[0] for call in log.warning.call_args_list]
    assert [text.startswith("next to no draft is accepted: acceptance length 1.01 over 500") for text in said] == [
        True
    ] * has_drafter


def test_each_engine_has_its_own_figures_and_the_model_those_of_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reporter, "time", SimpleNamespace(monotonic=lambda: 7.0, time=lambda: 1700.0))
    engines = SimpleNamespace(
        num_restarts=2,
        supervisors=[SimpleNamespace(engine=object(), silence_s=0.5), SimpleNamespace(engine=None, silence_s=31.0)],
        **BLOCKS,
    )
    takes_requests, metrics = True, MagicMock()
    reports = Reporter(metrics, MagicMock(), engines, lambda: takes_requests)
    reports.report(7.0, 5)
    told = {call.args[:1] + call.args[2:]: call.args[1] for call in metrics.set.call_args_list}
    assert told == {
        ("dflash:engine_ready", 0): 1.0,
        ("dflash:engine_ready", 1): 0.0,
        ("dflash:engine_silence_seconds", 0): 0.5,
        ("dflash:engine_silence_seconds", 1): 31.0,
        ("dflash:stub_heartbeat_timestamp_seconds",): 1700.0,
        ("dflash:num_requests_in_flight",): 5.0,
    }
    # A service that takes none makes no engine ready, and each restart counts once.
    takes_requests, engines.num_restarts = False, 5
    reports.report(8.0, 0)
    reports.report(9.0, 0)
    ready = [call.args[1] for call in metrics.set.call_args_list if call.args[0] == "dflash:engine_ready"]
    assert ready == [1.0, 0.0] + [0.0] * 4
    assert [call.args[1] for call in metrics.count.call_args_list] == [2, 3]
