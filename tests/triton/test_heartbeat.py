"""The file whose age shows whether the output thread runs."""

from __future__ import annotations

import os

from dflash_backend.config import environment_settings
from dflash_backend.triton.heartbeat import HEARTBEAT_FILE, INTERVAL_S, Heartbeat


def test_the_file_is_made_and_touched_once_an_interval(tmp_path):
    file = tmp_path / "heartbeat"
    heartbeat = Heartbeat(str(file), print)
    heartbeat.beat(100.0)
    os.utime(file, (1, 1))
    heartbeat.beat(100.0 + INTERVAL_S / 2)
    assert file.stat().st_mtime == 1
    heartbeat.beat(100.0 + INTERVAL_S)
    assert file.stat().st_mtime > 1


def test_the_number_of_requests_is_beside_it_by_process(tmp_path):
    heartbeat = Heartbeat(str(tmp_path / "heartbeat"), print)
    for now, num_requests in ((100.0, 3), (101.0, 0)):
        heartbeat.beat(now, num_requests)
        assert (tmp_path / f"heartbeat-{os.getpid()}").read_text() == str(num_requests)


def test_without_a_file_nothing_is_done():
    Heartbeat(None, print).beat(100.0)


def test_a_file_that_cannot_be_touched_is_said_once(tmp_path):
    lines: list[str] = []
    heartbeat = Heartbeat(str(tmp_path / "nowhere" / "heartbeat"), lines.append)
    for now in (100.0, 200.0):
        heartbeat.beat(now)
    (line,) = lines
    assert line.endswith("of DFLASH_HEARTBEAT_FILE cannot be touched: No such file or directory")


def test_the_variable_is_no_setting():
    assert environment_settings({HEARTBEAT_FILE: "/tmp/x", "DFLASH_SEED": "1"}) == {"seed": "1"}
