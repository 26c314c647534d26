"""What `serve` says: nothing that can make it wait, each line once, and what matters again when it is ready."""

from __future__ import annotations

import fcntl
import logging
import os
import time
from pathlib import Path

import pytest

from dflash_backend.engine.process import LOG_FORMAT
from dflash_cli.commands.log_lines import WAITING_LINES, Lines
from dflash_cli.commands.serve_log import ServeLog
from dflash_cli.launcher.server_log import parse_line


class Kept(Lines):
    """Keeps what it is given."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def put(self, line: str) -> None:
        self.lines.append(line)


def log_of(*raw: str, verbose: bool = False) -> tuple[ServeLog, list[str]]:
    kept = Kept()
    log = ServeLog(kept, verbose)
    for line in raw:
        log(parse_line(line))
    return log, kept.lines


def test_lines_without_a_reader_are_dropped_and_counted_and_no_writer_waits() -> None:
    reader, writer = os.pipe()
    fcntl.fcntl(writer, 1031, 4096)  # F_SETPIPE_SZ
    lines = Lines(writer)
    number = WAITING_LINES + 500
    began = time.monotonic()
    for index in range(number):
        lines.put(f"line {index} " + "x" * 100)
    assert time.monotonic() - began < 5
    lines.flush(0.2)
    read = b""
    deadline = time.monotonic() + 10
    while b"were dropped" not in read and time.monotonic() < deadline:
        read += os.read(reader, 65536)
    text = read.decode()
    assert "line 0 " in text
    assert "lines of the log were dropped, since nobody read them in time" in text
    os.close(reader)


def test_a_full_disk_loses_lines_but_not_those_that_come_when_there_is_space(tmp_path: Path) -> None:
    descriptor = os.open("/dev/full", os.O_WRONLY)
    lines = Lines(descriptor)
    for _ in range(3):
        lines.put("lost")
    lines.flush()
    # The same descriptor leads elsewhere from now on.
    file = os.open(tmp_path / "log", os.O_WRONLY | os.O_CREAT)
    os.dup2(file, descriptor)
    lines.put("kept")
    lines.flush()
    assert (tmp_path / "log").read_text().startswith("kept\ndflash-triton: 3 lines of the log were dropped")


@pytest.mark.parametrize("verbose", [False, True])
def test_each_line_of_the_load_is_shown_once(verbose: bool) -> None:
    raw = 'I1121 09:04:07.284592 4186 model.py:7] "dflash: loading 40%: target"'
    log, lines = log_of(raw, verbose=verbose)
    log.progress("loading 40%: target")
    assert sum("loading 40%" in line for line in lines) == 1


def test_of_the_demo_pair_no_checkpoint_is_described_unless_that_takes_long() -> None:
    log, lines = log_of()
    told = ["loading 0%: reading checkpoints", "loading 5%: target: layers: 8", "loading 90%: drafter: a: 1 of 1 MB"]
    for log.loads_demo_pair in (True, False):
        for text in (*told, f"{told[1]} (5 s so far)"):
            log.progress(text)
    shown = [line.removeprefix("dflash-triton: ") for line in lines]
    assert shown == [told[0], f"{told[1]} (5 s so far)", *told, f"{told[1]} (5 s so far)"]


def test_activity_is_shown_and_other_information_is_not() -> None:
    _, lines = log_of(
        'I1121 09:04:07.2 41 model.py:7] "dflash: activity: prompt 1.0 tokens/s"',
        'I1121 09:04:07.2 41 model.py:7] "dflash: settings: a=b"',
    )
    assert lines == ["dflash-triton: activity: prompt 1.0 tokens/s"]


def test_warnings_and_errors_of_the_engines_process_are_shown_and_other_libraries_are_not() -> None:
    def line(name: str, level: int, message: str) -> str:
        return logging.Formatter(LOG_FORMAT).format(logging.LogRecord(name, level, "", 0, message, None, None))

    log, shown = log_of()
    log.ready()
    for raw in (
        line("dflash_backend.worker.kv_disk", logging.WARNING, "kv_disk_path: /kv cannot be written: no space"),
        line("dflash_backend.worker.runner", logging.ERROR, "step 7 failed"),
        line("dflash_backend.worker.runner", logging.INFO, "dull"),
        line("transformers.utils", logging.WARNING, "deprecated"),
        "dflash: engine: no level",
    ):
        log(parse_line(raw))
    assert shown == [
        "dflash-triton: engine: kv_disk_path: /kv cannot be written: no space",
        "dflash-triton: engine: step 7 failed",
    ]


def test_an_engine_that_ends_with_its_server_has_not_died() -> None:
    log, lines = log_of()
    log.ready()
    log.stopping = True
    said = "dflash: the engine process died (exit status 0); the engine is started again in 1 s"
    for level in "WE":
        log(parse_line(f'{level}1121 09:04:07.2 41 a.py:7] "{said}"'))
    assert lines == []
    log(parse_line('W1121 09:04:07.2 41 a.cc:7] "a model is not unloaded"'))
    log(parse_line('E1121 09:04:07.2 41 a.py:7] "dflash: an error"'))
    assert lines == ["dflash-triton: a model is not unloaded", "dflash-triton: an error"]


def test_what_the_model_warned_of_while_it_loaded_is_told_again_when_it_is_ready() -> None:
    warning = 'W1121 09:04:07.2 41 model.py:7] "dflash: no draft_model is set for X: it is served without speculation"'
    log, lines = log_of(warning, warning, 'W1121 09:04:07.2 41 a.cc:7] "Unable to allocate pinned system memory"')
    assert log.ready() == ["no draft_model is set for X: it is served without speculation"]
    assert lines[0] == "dflash-triton: no draft_model is set for X: it is served without speculation"
