"""Says when the metrics page is brought up to date, and writes the activity lines. Each flush costs round trips."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from dflash_backend.engine_client.engines import Engines
from dflash_backend.messages import EngineCoreOutputs
from dflash_backend.triton.activity_log import ActivityLog
from dflash_backend.triton.log import Log
from dflash_backend.triton.metric_specs import CACHE_CONFIG
from dflash_backend.triton.metrics import Metrics

# The greatest age of the metrics page, with changes and without.
BUSY_S = 0.25
IDLE_S = 1.0
# What the page says of requests is brought up to date before a request's last response leaves; the metrics of steps,
# which are most of the page, follow. In the long run that may take at most this share of the thread's time, and at once
# that share of FINISHED_BURST_S; then it is at most FINISHED_S old.
FINISHED_SHARE = 0.1
FINISHED_BURST_S = 0.5
FINISHED_S = 0.05


@dataclass(eq=False)
class Reporter:
    """Owned by the output thread; any thread may call `note_change`. takes_requests: whether the service does, whatever
    its engines do. has_drafter: whether a drafter's checkpoint is served."""

    metrics: Metrics
    log: Log
    engines: Engines
    takes_requests: Callable[[], bool]
    has_drafter: Callable[[], bool] = lambda: False

    def __post_init__(self) -> None:
        self._activity = ActivityLog()
        self._reported_at = self._requests_reported_at = self._next_finished_report_at = 0.0
        self._has_changed = False
        # A request has finished since the page last said so.
        self.has_finished = False
        self._num_restarts = 0
        # The values of `CACHE_CONFIG` on the page.
        self._cache_config = ("", "")

    def note_change(self) -> None:
        """Something was counted: the page is due sooner."""
        self._has_changed = True

    def note_finished(self) -> None:
        """A request has ended: the page is due at once, or nearly so."""
        self.has_finished = True
        self._activity.note_finished()

    def follow(self, index: int, outputs: EngineCoreOutputs) -> None:
        """Take the counters and times of the engine with this number."""
        self.metrics.observe_step(outputs.phase_seconds)
        if outputs.stats is not None:
            self.metrics.follow(outputs.stats, index)
            self._activity.follow(outputs.stats, index)

    def reset_engine(self, index: int) -> None:
        """The engine is gone: its gauges fall to 0 at once, and the next engine's counters start there."""
        self.metrics.reset_engine(index)
        self.metrics.flush()
        self._activity.restart(index)

    def report_if_due(self, now: float, num_requests: int) -> None:
        """Report when the page is too old at `now`, in seconds of `time.monotonic`."""
        if now - self._reported_at >= (BUSY_S if self._has_changed else IDLE_S):
            self.report(now, num_requests)
        elif self.has_finished and now - self._requests_reported_at >= FINISHED_S:
            self._report_requests(now, num_requests)

    def report_finished(self, now: float, num_requests: int) -> None:
        """Report what concerns requests, because some are about to get their last response, unless that took too large
        a share of time."""
        self.note_finished()
        if now >= self._next_finished_report_at - FINISHED_BURST_S:
            self._report_requests(now, num_requests)
            duration = time.monotonic() - now
            self._next_finished_report_at = max(self._next_finished_report_at, now) + duration / FINISHED_SHARE

    def report(self, now: float, num_requests: int) -> None:
        """Bring the whole metrics page up to date, and write the activity line if it is due. `num_requests` are in
        flight."""
        restarts = self.engines.num_restarts
        if restarts != self._num_restarts:
            self.metrics.count("dflash:engine_restarts_total", restarts - self._num_restarts)
            self._num_restarts = restarts
        # An engine that was started again may have found another amount of memory.
        cache_config = str(self.engines.ready.kv_block_size), str(self.engines.num_kv_blocks)
        if cache_config != self._cache_config:
            self._cache_config = cache_config
            self.metrics.inform(CACHE_CONFIG, cache_config)
        takes_requests = self.takes_requests()
        for index, engine in enumerate(self.engines.supervisors):
            self.metrics.set("dflash:engine_ready", float(takes_requests and engine.engine is not None), index)
            self.metrics.set("dflash:engine_silence_seconds", engine.silence_s, index)
        self.metrics.set("dflash:stub_heartbeat_timestamp_seconds", time.time())
        self.metrics.set("dflash:num_requests_in_flight", float(num_requests))
        self.metrics.flush()
        self._reported_at = self._requests_reported_at = now
        self._has_changed = self.has_finished = False
        if (line := self._activity.line(now)) is not None:
            self.log.info(line)
        if (warning := self._activity.warning()) is not None and self.has_drafter():
            self.log.warning(warning)

    def _report_requests(self, now: float, num_requests: int) -> None:
        """Bring the page up to date but for the metrics of steps."""
        self.metrics.set("dflash:num_requests_in_flight", float(num_requests))
        self.metrics.flush_requests()
        self._requests_reported_at = now
        self._has_changed = True
        self.has_finished = False
