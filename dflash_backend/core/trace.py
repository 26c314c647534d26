"""A trace of the step loop in Chrome's trace format, for `chrome://tracing` and https://ui.perfetto.dev.

Made by `build_engine` when the setting `trace_dir` names a folder, and fed by `EngineCore` (requests and steps) and by
`engine/process.py` (messages). Without the setting there is no trace object and nothing is measured for it.

The files are in the JSON array format, one event a line, and every step is flushed: a viewer accepts an array that was
never closed, so the file of a process that was killed can be read too. At most two files exist: when the current one
has `max_steps` steps, the next one is begun and the one before it is deleted: between `max_steps` and twice as many
of the last steps are there whatever happens. Every file begins with the requests that were under way. Of processes that
have ended, the last `KEPT_FILES` stay, the others are deleted at a start.

Tracks: "steps" has a slice for each step with its rows as arguments, from when the worker could begin it to when its
drafts were there; "phases" has the worker's phases below it; "host" has what the engine did: schedule, submit, wait and
apply, which lie below the step before where steps overlap; "messages" has what passed between the engine and the
stub; each request is an asynchronous slice from its arrival to its end. The worker tells how long its phases took
and not when they began, so they are drawn one after the other; what is left of its time is drawn last, as "other".
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import re
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

from dflash_backend.core.plan import ModelRunnerOutput, SchedulerOutput

_log = logging.getLogger(__name__)

STEPS, PHASES, MESSAGES, HOST = 1, 2, 3, 4
BUFFER_BYTES = 4 << 20
# Of processes that have ended: four of them may be read still, such as one that died.
KEPT_FILES = 8
_FILE = re.compile(r"trace-(\d+)-\d+\.json")
_SEPARATOR = ",\n"
_TRACKS = {STEPS: "steps", PHASES: "phases", MESSAGES: "messages", HOST: "host"}


@dataclass(slots=True)
class StepTimes:
    """When the engine began to plan a step, had its plan, had submitted it, began to wait for its result, had it, had
    applied it, and had its drafts; seconds of the engine's clock. Without overlap a worker runs the step while it is
    submitted, and injects and drafts from `drafted_from` on; with overlap it goes on at once, and that is None."""

    started: float
    planned: float
    submitted: float
    waited: float = 0.0
    executed: float = 0.0
    applied: float = 0.0
    finished: float = 0.0
    drafted_from: float | None = None


class StepTrace:
    """Writes events to `trace-<pid>-<n>.json` in `directory`, until the disk takes none. For one thread."""

    def __init__(self, directory: Path, max_steps: int, clock: Callable[[], float] = time.monotonic) -> None:
        """`clock` is the engine's. Raises OSError when the folder cannot be made or written to."""
        directory.mkdir(parents=True, exist_ok=True)
        _delete_old(directory)
        self._directory = directory
        self._max_steps = max_steps
        self.clock = clock
        self._open_requests: dict[str, dict[str, Any]] = {}
        self._number = 0
        self._num_steps = 0
        self._executed = 0.0  # when the last step was
        self._paths: list[Path] = []
        # None once nothing more is written.
        self._file: TextIO | None = self._begin_file()

    def request_arrived(self, request_id: str, num_prompt_tokens: int, at: float) -> None:
        """A request was queued."""
        event = self._request_event("b", request_id, at, {"prompt tokens": num_prompt_tokens})
        self._open_requests[request_id] = event
        self._write(event)

    def request_ended(self, request_id: str, reason: str, num_output_tokens: int, at: float) -> None:
        """A request finished or was aborted."""
        if self._open_requests.pop(request_id, None) is not None:
            args = {"reason": reason, "output tokens": num_output_tokens}
            self._write(self._request_event("e", request_id, at, args))

    def step(
        self, plan: SchedulerOutput, result: ModelRunnerOutput, phase_seconds: Mapping[str, float], times: StepTimes
    ) -> None:
        """A step was run and applied, and has drafted."""
        if self._file is None:
            return
        rows = {
            row.request_id: {
                "computed": row.num_computed,
                "new": row.num_new,
                "drafts": row.num_draft,
                "verified": row_result.num_verified,
                "accepted": row_result.num_accepted,
                "yielded": len(row_result.token_ids),
                "drafts next": row.num_next_draft,
            }
            for row, row_result in zip(plan.rows, result.rows, strict=True)
        }
        args = {
            "tokens": sum(row.num_new for row in plan.rows) + sum(row.num_verified for row in result.rows),
            "drafts": sum(row.num_draft for row in plan.rows),
            "budget": plan.num_drafts,
            "verified": sum(row.num_verified for row in result.rows),
            "drafts next": sum(row.num_next_draft for row in plan.rows),
            "new requests": [new.request_id for new in plan.new_requests],
            "rows": rows,
        }
        # Steps run one after the other: one that was submitted after another began when that had ended.
        at = max(times.planned, self._executed)
        self._executed = times.finished
        self._slice(STEPS, f"step {plan.step_id}", at, times.finished, args)
        self._slice(HOST, "schedule", times.started, times.planned)
        self._slice(HOST, "submit", times.planned, times.submitted)
        for phase, seconds in phase_seconds.items():
            if phase == "inject" and times.drafted_from is not None:
                at = times.drafted_from
            end = min(at + seconds, times.finished)
            self._slice(PHASES, phase, at, end)
            at = end
        self._slice(PHASES, "other", at, times.finished)
        self._slice(HOST, "wait", times.waited, times.executed)
        self._slice(HOST, "apply", times.executed, times.applied)
        self._end_step()

    def messages(self, name: str, started: float, count: int) -> None:
        """`count` messages were handled, from `started` until now."""
        self._slice(MESSAGES, name, started, self.clock(), {"count": count})

    def close(self) -> None:
        """End the array and close the file. Nothing is written afterwards."""
        file, self._file = self._file, None
        if file is not None:
            try:
                file.write("\n]\n")
                file.close()
            except OSError as error:
                self._give_up(file, error)

    def _end_step(self) -> None:
        """Flush what a step wrote, and begin another file where this one has its steps."""
        if self._file is None:
            return
        try:
            self._file.flush()
            self._num_steps += 1
            if self._num_steps == self._max_steps:
                self.close()
                self._file = self._begin_file()
        except OSError as error:
            self._give_up(self._file, error)

    def _give_up(self, file: TextIO | None, error: OSError) -> None:
        """A trace is no reason for a request to fail: go on without."""
        self._file = None
        if file is not None:
            with contextlib.suppress(OSError):  # it writes what it holds, once more
                file.close()
        why = error.strerror or error
        _log.warning("trace_dir: %s cannot be written: %s; the engine goes on without a trace", self._directory, why)

    def _begin_file(self) -> TextIO:
        self._paths.append(self._directory / f"trace-{os.getpid()}-{self._number}.json")
        if len(self._paths) > 2:
            self._paths.pop(0).unlink(missing_ok=True)
        self._number += 1
        self._num_steps = 0
        # A buffer larger than what a step writes: the system gets whole lines only, so a kill leaves whole lines.
        file = self._paths[-1].open("w", encoding="utf-8", buffering=BUFFER_BYTES)
        file.write("[\n" + _SEPARATOR.join(map(_encoded, self._opening_events())))
        file.flush()
        return file

    def _opening_events(self) -> Iterable[dict[str, Any]]:
        """The names of the tracks, and the requests that began in an earlier file."""
        pid = os.getpid()
        yield {"ph": "M", "pid": pid, "name": "process_name", "args": {"name": "dflash engine"}}
        for track, name in _TRACKS.items():
            yield {"ph": "M", "pid": pid, "tid": track, "name": "thread_name", "args": {"name": name}}
        yield from self._open_requests.values()

    def _request_event(self, kind: str, request_id: str, at: float, args: dict[str, Any]) -> dict[str, Any]:
        return {
            "ph": kind,
            "cat": "request",
            "id": request_id,
            "name": request_id,
            "pid": os.getpid(),
            "tid": STEPS,
            "ts": _microseconds(at),
            "args": args,
        }

    def _slice(self, track: int, name: str, start: float, end: float, args: dict[str, Any] | None = None) -> None:
        duration = max(_microseconds(end) - _microseconds(start), 0.0)
        event = {"ph": "X", "name": name, "pid": os.getpid(), "tid": track, "ts": _microseconds(start)}
        self._write({**event, "dur": duration, "args": args or {}})

    def _write(self, event: dict[str, Any]) -> None:
        if self._file is None:
            return
        try:
            self._file.write(_SEPARATOR + _encoded(event))
        except OSError as error:
            self._give_up(self._file, error)


def _delete_old(directory: Path) -> None:
    """Delete files of processes that have ended, but for the last `KEPT_FILES`."""
    paths: list[Path] = []
    with contextlib.suppress(OSError):  # it may be one that only takes files
        paths += directory.iterdir()
    ended: list[tuple[float, Path]] = []
    for path in paths:
        found = _FILE.fullmatch(path.name)
        # In a container each start may have the same number.
        if found is not None and (int(found[1]) == os.getpid() or not Path("/proc", found[1]).exists()):
            with contextlib.suppress(OSError):  # another start may have deleted it
                ended.append((path.stat().st_mtime, path))
    for _, path in sorted(ended)[:-KEPT_FILES]:
        with contextlib.suppress(OSError):
            path.unlink()


def _encoded(event: dict[str, Any]) -> str:
    return json.dumps(event, separators=(",", ":"))


def _microseconds(seconds: float) -> float:
    return round(seconds * 1e6, 1)
