"""Reading Triton's log: progress as it comes, and the one sentence that says why a load failed."""

import io
import os

import pytest

from dflash_cli.launcher.server_log import LogLine, ServerLog, parse_line
from tests.support.waiting import eventually

FAILED_LOAD = r"""W1121 09:04:18.462090 4409 pinned.cc:273] "Unable to allocate pinned system memory"
dflash: loading target
E1121 09:04:18.797863 4409 backend_model.cc:692] "ERROR: Failed: ValueError: bad\n\nAt:\n  model.py(10)\n"
E1121 09:04:18.797952 4409 model.cc:642] "failed to load 'dflash' version 1: Internal: %s\n\nAt:\n  /x/model.py(10)\n"
+-------+
| Model |
+-------+
error: creating server: Internal - failed to load all models
"""


def read(text: str) -> ServerLog:
    log = ServerLog(io.StringIO(text))
    log.join(5)
    return log


@pytest.mark.parametrize(
    ("raw", "sentence"),
    [
        ("ConfigError: setting 'x' has the value 'y'", "setting 'x' has the value 'y'"),
        ("dflash_backend.config.ConfigError: unknown: 'a: b'", "unknown: 'a: b'"),
        ("c_python_backend_utils.TritonModelException: no model in /m", "no model in /m"),
        (r"ConfigError: one line\nand another", "one line\nand another"),
        (r"CheckpointError: architectures is [\"A\", \"C:\\new\"]", 'architectures is ["A", "C:\\new"]'),
    ],
)
def test_a_failed_load_is_told_in_the_models_own_words(raw: str, sentence: str) -> None:
    assert read(FAILED_LOAD % raw).failure() == sentence


def test_without_a_models_words_triton_s_fatal_line_is_told() -> None:
    log = read('I1121 09:04:18.4 1 a.cc:1] "fine"\nerror: creating server: Internal - no backend\n')
    assert log.failure() == "error: creating server: Internal - no backend"


def test_without_any_reason_the_end_of_the_log_is_told_without_tables() -> None:
    assert read("+--+\n| a |\n+--+\nlast words\n").failure() == "last words"


@pytest.mark.parametrize(
    "raw", ["dflash: loading target 40%", 'I1121 09:04:07.284592 4186 model.py:7] "dflash: loading target 40%"']
)
def test_progress_is_found_in_plain_lines_and_in_tritons(raw: str) -> None:
    assert parse_line(raw + "\n").progress == "loading target 40%"


def test_other_lines_are_not_progress() -> None:
    assert parse_line('I1121 09:04:07.284592 4186 model_lifecycle.cc:472] "loading: toy:1"').progress is None


def test_lines_are_passed_on_in_order() -> None:
    seen: list[LogLine] = []
    log = ServerLog(io.StringIO("a\nb\n"), seen.append)
    log.join(5)
    assert [line.text for line in seen] == ["a", "b"]


def test_the_last_words_are_those_after_the_server_was_ready_and_without_backtraces() -> None:
    source, sink = os.pipe()
    log = ServerLog(os.fdopen(source, encoding="utf-8"))
    with os.fdopen(sink, "w", encoding="utf-8") as writer:
        writer.write("E1121 09:04:18.7 1 a.cc:1] \"failed to load 'dflash' version 1: old trouble\"\n")
        writer.flush()
        eventually(log.lines)
        log.mark_ready()
        writer.write('I1121 09:04:19.1 1 a.cc:1] "fine"\nSignal (11) received.\n')
        writer.write(" 0# 0x000055F1 in tritonserver\n14# 0x00007F1 in /lib/libc.so.6\n\n")
    log.join(5)
    assert log.last_words() == "Signal (11) received."


def test_a_listener_whose_output_is_gone_does_not_end_the_reading() -> None:
    def broken(line: LogLine) -> None:
        raise BrokenPipeError

    log = ServerLog(io.StringIO("a\nb\n"), broken)
    log.join(5)
    assert [line.text for line in log.lines()] == ["a", "b"]
