"""The step trace: what it says, that it can always be read, and that it stays small."""

from __future__ import annotations

import errno
import itertools
import json
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from dflash_backend import LLM
from dflash_backend.config import ConfigError
from dflash_backend.core.engine import EngineCore
from dflash_backend.core.trace import HOST, KEPT_FILES, PHASES, STEPS, StepTrace
from tests.core.toy_engine import make_config, make_request
from tests.core.toy_worker import OverlappingToy, ToyWorker


class Ticks:
    """A clock that moves on by a millisecond each time that it is read."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        self.now += 0.001
        return self.now


def traced_core(directory: Path, max_steps: int = 1000, overlap: bool = False) -> tuple[EngineCore, StepTrace]:
    clock, config = Ticks(), make_config()
    trace = StepTrace(directory, max_steps, clock)
    worker = OverlappingToy(config) if overlap else ToyWorker(config)
    return EngineCore(config, worker, clock, trace, overlap), trace


def run(core: EngineCore, request_id: str, max_tokens: int = 12) -> None:
    core.add_request(make_request(request_id, list(range(1, 10)), max_tokens=max_tokens))
    while core.has_unfinished():
        core.step()
    core.collect_drafts()


def events(path: Path) -> list[dict[str, Any]]:
    """As a viewer reads it: the end of the array may be missing."""
    text = path.read_text()
    return json.loads(text if text.endswith("]\n") else text + "]")


def files(directory: Path) -> list[Path]:
    return sorted(directory.glob("*.json"), key=lambda path: int(path.stem.rpartition("-")[2]))


def named(found: list[dict[str, Any]], prefix: str) -> list[dict[str, Any]]:
    return [event for event in found if event["name"].startswith(prefix)]


def full_disk(*given: object, **named: object) -> Any:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@pytest.mark.parametrize("next_file", [False, True])
def test_a_full_disk_ends_the_trace_and_nothing_else(
    next_file: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    core, trace = traced_core(tmp_path, max_steps=2 if next_file else 1000)
    run(core, "before", max_tokens=1)
    if next_file:
        monkeypatch.setattr(Path, "open", full_disk)
    else:
        trace._file = SimpleNamespace(write=len, flush=full_disk, close=full_disk)  # type: ignore[assignment]
    run(core, "while it is full")
    run(core, "afterwards")
    trace.messages("send", 0.0, 1)
    trace.close()
    assert [record.getMessage() for record in caplog.records] == [
        f"trace_dir: {tmp_path} cannot be written: No space left on device; the engine goes on without a trace"
    ]


def test_a_step_shows_its_rows_and_what_was_accepted(tmp_path: Path) -> None:
    core, trace = traced_core(tmp_path)
    run(core, "a")
    trace.close()
    steps = named(events(files(tmp_path)[0]), "step ")
    assert len(steps) == core.stats().num_steps
    assert steps[0]["args"]["rows"]["a"]["new"] == 9
    rows = [step["args"]["rows"]["a"] for step in steps]
    # The worker accepted one more than was delivered: the request ended before the last of them.
    assert sum(row["accepted"] for row in rows) == core.stats().spec_decoding.num_accepted_tokens + 1
    assert sum(row["drafts"] for row in rows) == core.stats().spec_decoding.num_draft_tokens
    for step in steps:
        assert step["args"]["verified"] == step["args"]["budget"] == step["args"]["rows"]["a"]["verified"]


def slices(found: list[dict[str, Any]], track: int) -> list[tuple[str, float, float]]:
    """Name, start and end of the slices of a track, in order of their start."""
    kept = [e for e in found if e.get("tid") == track and e["ph"] == "X"]
    return sorted(((e["name"], e["ts"], e["ts"] + e["dur"]) for e in kept), key=lambda item: item[1:])


@pytest.mark.parametrize("overlap", [False, True])
def test_the_phases_fill_the_step_from_its_start_to_its_end(overlap: bool, tmp_path: Path) -> None:
    core, trace = traced_core(tmp_path, overlap=overlap)
    run(core, "a")
    trace.close()
    found = events(files(tmp_path)[0])
    steps, phases = slices(found, STEPS), slices(found, PHASES)
    assert [name for name, _, _ in phases] == ["other"] * core.stats().num_steps, "the toy measures no phases"
    assert [times for _, *times in steps] == [times for _, *times in phases]


def test_without_overlap_the_engine_waits_for_a_step_before_it_plans_the_next(tmp_path: Path) -> None:
    core, trace = traced_core(tmp_path)
    run(core, "a")
    trace.close()
    names = [name for name, _, _ in slices(events(files(tmp_path)[0]), HOST)]
    assert names == ["schedule", "submit", "wait", "apply"] * core.stats().num_steps


def test_with_overlap_a_step_is_planned_and_submitted_before_the_one_ahead_is_waited_for(tmp_path: Path) -> None:
    core, trace = traced_core(tmp_path, overlap=True)
    run(core, "a", max_tokens=40)
    trace.close()
    found = events(files(tmp_path)[0])
    names = [name for name, _, _ in slices(found, HOST)]
    assert names[:2] == ["schedule", "submit"]
    assert names[2:10] == ["schedule", "submit", "wait", "apply"] * 2
    steps = slices(found, STEPS)
    assert len(steps) == core.stats().num_steps
    for (_, _, end), (_, start, _) in itertools.pairwise(steps):
        assert start >= end, "a step began before the one ahead of it had ended"


def test_a_request_lasts_from_its_arrival_to_its_end(tmp_path: Path) -> None:
    core, trace = traced_core(tmp_path)
    run(core, "a", max_tokens=5)
    core.add_request(make_request("b", [1, 2]))
    core.abort(["b"])
    trace.close()
    lives = [(e["ph"], e["id"]) for e in events(files(tmp_path)[0]) if e.get("cat") == "request"]
    assert lives == [("b", "a"), ("e", "a"), ("b", "b"), ("e", "b")]
    ends = {e["id"]: e["args"] for e in events(files(tmp_path)[0]) if e["ph"] == "e"}
    assert ends == {"a": {"reason": "length", "output tokens": 5}, "b": {"reason": "abort", "output tokens": 0}}


def test_a_trace_that_was_never_closed_can_be_read_up_to_its_last_step(tmp_path: Path) -> None:
    core, _ = traced_core(tmp_path)
    run(core, "a")
    assert len(named(events(files(tmp_path)[0]), "step ")) == core.stats().num_steps


def test_only_the_last_two_files_are_kept_and_each_begins_with_what_runs(tmp_path: Path) -> None:
    core, trace = traced_core(tmp_path, max_steps=2)
    run(core, "a", max_tokens=40)
    trace.close()
    kept = [events(path) for path in files(tmp_path)]
    assert len(kept) == 2
    last = [int(event["name"].split()[1]) for found in kept for event in named(found, "step ")]
    assert last == list(range(core.stats().num_steps - len(last) + 1, core.stats().num_steps + 1))
    assert [e["id"] for e in kept[0] if e["ph"] == "b"] == ["a"]


def test_files_of_earlier_starts_stay_for_a_while(tmp_path: Path) -> None:
    """One that has died may be looked at; that of a process that runs, as of another engine, is never deleted."""
    ended = [tmp_path / f"trace-{2**22 + number}-{number % 2}.json" for number in range(KEPT_FILES + 3)]
    others = [tmp_path / name for name in (f"trace-{os.getppid()}-0.json", "trace-x-1.json", "trace-1-0.txt")]
    for age, path in enumerate([*others, *ended]):
        path.touch()
        os.utime(path, (age, age))
    own = tmp_path / f"trace-{os.getpid()}-5.json"  # of a process of the same number
    own.touch()
    os.utime(own, (0, 0))
    _, trace = traced_core(tmp_path)
    trace.close()
    assert {*tmp_path.iterdir()} == {*others, *ended[3:], tmp_path / f"trace-{os.getpid()}-0.json"}


def test_the_engine_traces_its_phases_when_the_setting_names_a_folder(tmp_path: Path) -> None:
    llm = LLM(trace_dir=str(tmp_path / "trace"), kv_cache_gb=0.05, max_model_len=256)
    llm.generate("What is 3 + 4?", max_tokens=8, temperature=0)
    names = {event["name"] for event in events(files(tmp_path / "trace")[0])}
    assert {"schedule", "verify", "accept", "inject", "draft", "apply"} <= names


def test_without_the_setting_there_is_no_trace() -> None:
    assert LLM(kv_cache_gb=0.05, max_model_len=256).engine.trace is None


def test_a_folder_that_cannot_be_written_to_stops_the_load_with_its_name(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="trace_dir"):
        LLM(trace_dir=str(tmp_path / "file" / "trace"), kv_cache_gb=0.05, max_model_len=256)
    with pytest.raises(ConfigError, match=r"no trace can be written \(it is no folder\); name a folder"):
        LLM(trace_dir=str(tmp_path / "file"), kv_cache_gb=0.05, max_model_len=256)
