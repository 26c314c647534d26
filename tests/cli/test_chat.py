"""`dflash-triton chat` with piped input and in a terminal, against a real Triton server with a toy model."""

from __future__ import annotations

import io
import os
import pty
import re
import select
import signal
import stat
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from dflash_cli.commands.chat import totals
from dflash_cli.commands.timing import Report
from dflash_cli.launcher.server import TritonServer
from dflash_cli.main import main
from dflash_client import Delta, DFlashClient, GenerationResult, Stream
from tests.client.conftest import one_more_cancellation, toy_server, url_of


@pytest.fixture
def chat(cli, toy: TritonServer):
    """Runs the command against the toy server with lines on standard input, as a pipe has them."""

    def chat(*lines: str, options: tuple[str, ...] = (), url: str = toy.grpc_url):
        return cli("chat", "--url", url, *options, typed="".join(line + "\n" for line in lines).encode())

    return chat


@pytest.mark.server
@pytest.mark.parametrize("protocol", ["grpc", "http"])
def test_each_line_is_answered_with_what_was_said_before(chat, toy: TritonServer, protocol: str) -> None:
    options = ("--protocol", protocol, "--system", "be")
    ended = chat("hé", "", "b", options=options, url=url_of(toy, protocol))
    first = "<system>be<user>hé"
    assert (ended.status, ended.out) == (0, f"{first}\n{first}<assistant>{first}<user>b\n")
    assert "acceptance length 2.50, 0 of 18 prompt tokens cached]" in ended.err


@pytest.mark.server
def test_commands_reset_count_and_end_the_chat(chat) -> None:
    ended = chat("a", "/reset", "b", "/stats", "/what now", "/quit", "c")
    assert (ended.status, ended.out) == (0, "<user>a\n<user>b\n")
    assert "[2 answers, 14 tokens, " in ended.err
    assert "there is no command /what now" in ended.err
    assert ended.err.count("forget what was said") == 1


def test_the_figures_of_a_chat_are_those_of_all_its_answers() -> None:
    reports = []
    for tokens, seconds, stats in (
        (10, 2.0, {"num_drafts": 4, "num_accepted_tokens": 6}),
        (3, 0.5, {}),
        (7, 1.5, {"num_drafts": 1, "num_accepted_tokens": 0}),
    ):
        result = GenerationResult.from_deltas([Delta("a", num_output_tokens=tokens, spec_stats=stats)])
        reports.append(Report(result, 0.1, seconds))
    assert totals(reports) == "3 answers, 20 tokens, 5.0 tokens/s, acceptance length 2.20"


@pytest.mark.server
def test_thinking_is_switched_in_the_chat(chat, monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[object] = []
    stream = DFlashClient.stream

    def noting(self: DFlashClient, *arguments: Any, **options: Any) -> Stream:
        sent.append(options.get("enable_thinking"))
        return stream(self, *arguments, **options)

    monkeypatch.setattr(DFlashClient, "stream", noting)
    lines = ("a", "/thinking on", "b", "/thinking default", "c", "/thinking maybe", "d")
    ended = chat(*lines, options=("--no-thinking",))
    assert ended.status == 0
    assert sent == [False, True, None, None]
    assert "there is no command /thinking maybe" in ended.err


@pytest.mark.server
def test_parameters_are_sent_and_two_slashes_begin_a_message_with_one(chat) -> None:
    ended = chat("hello", "/reset", "//etc", options=("--max-tokens", "8"))
    assert (ended.status, ended.out) == (0, "<user>he\n<user>/e\n")


@pytest.mark.server
def test_an_error_ends_the_answer_and_not_the_chat(chat) -> None:
    error = "dflash-triton: toy says INVALID_ARG (/reset starts over)\n"
    assert chat("a", "b", options=("--set-param", "refuse=INVALID_ARG")) == (0, "\n\n", error * 2)


@pytest.mark.server
def test_a_server_that_ends_meanwhile_ends_the_chat_with_1(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with toy_server() as server:

        class Input(io.BytesIO):
            def __next__(self) -> bytes:
                line = super().__next__()
                if line == b"b\n":
                    server.stop()
                return line

        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(Input(b"a\nb\nc\n")))
        assert main(["chat", "--url", server.grpc_url]) == 1
    out, err = capsys.readouterr()
    assert out.startswith("<user>a\n")
    assert server.grpc_url in err.splitlines()[-1]


@pytest.mark.server
def test_a_model_that_is_not_there_is_said_before_anything_is_typed(chat, toy: TritonServer) -> None:
    for url in (toy.grpc_url, f"http://{toy.http_url}"):
        ended = chat(options=("--model-name", "other"), url=url)
        assert ended.status == 1
        assert re.search("model 'other' (is not ready|is not found)|'other'", ended.err)


@pytest.mark.server
def test_in_a_terminal_ctrl_c_cancels_the_answer_and_then_ends_the_chat(toy: TritonServer, cancel_log: Path) -> None:
    with in_a_terminal("-c", TERMINAL, "chat", "--url", toy.grpc_url) as (process, screen):
        screen.read_until("> ")
        with one_more_cancellation(cancel_log):
            screen.type(b"forever\n")
            screen.read_until("xxx")
            process.send_signal(signal.SIGINT)
            screen.read_until("[cancelled]")
        screen.read_until("> ")
        process.send_signal(signal.SIGINT)
        assert process.wait(10) == 0


@pytest.mark.server
def test_in_a_terminal_lines_are_edited_and_kept_for_their_owner_alone(toy: TritonServer, tmp_path: Path) -> None:
    environ = os.environ | {"XDG_STATE_HOME": str(tmp_path), "TERM": "xterm"}
    kept = tmp_path / "dflash-triton" / "chat_history"

    def chat(typed: bytes, answer: str, *options: str) -> None:
        command = ("-m", "dflash_cli.main", "chat", "--url", toy.grpc_url, *options)
        with in_a_terminal(*command, env=environ) as (process, screen):
            screen.read_until("/help lists the commands")
            screen.read_until("> ")
            screen.type(typed)
            screen.read_until(answer)
            screen.read_until("> ")
            screen.type(b"/quit\n")
            assert process.wait(20) == 0

    # Left, and a letter between those that are there.
    chat(b"ac\x1b[Db\n", "<user>abc")
    assert kept.read_text().splitlines() == ["abc", "/quit"]
    assert stat.S_IMODE(kept.stat().st_mode) == 0o600
    # Up twice, over "/quit", in the next chat.
    chat(b"\x1b[A\x1b[A\n", "<user>abc")
    before = kept.read_text()
    chat(b"secret\n", "<user>secret", "--no-history")
    assert kept.read_text() == before


# The chat as it is, but for the message's role, which would stand before the toy's special prompt.
TERMINAL = """
import sys
import dflash_client
build = dflash_client.DFlashClient.stream
dflash_client.DFlashClient.stream = lambda self, messages, **sampling: build(self, messages[-1]["content"], **sampling)
from dflash_cli.main import main
sys.exit(main(sys.argv[1:]))
"""


class Screen:
    """What a program writes to its terminal, and what is typed there."""

    def __init__(self, terminal: int) -> None:
        self._terminal, self._rest = terminal, ""

    def type(self, keys: bytes) -> None:
        os.write(self._terminal, keys)

    def read_until(self, words: str) -> None:
        """Read up to `words` and over them."""
        while words not in self._rest:
            readable, _, _ = select.select([self._terminal], [], [], 20)
            assert readable, f"no {words!r} in {self._rest!r}"
            self._rest += os.read(self._terminal, 1024).decode()
        self._rest = self._rest.partition(words)[2]


@contextmanager
def in_a_terminal(*argv: str, env: dict[str, str] | None = None) -> Iterator[tuple[subprocess.Popen[bytes], Screen]]:
    """A Python program in a terminal of its own; it is killed at the end."""
    terminal, far_end = pty.openpty()
    streams = {"stdin": far_end, "stdout": far_end, "stderr": far_end}
    with subprocess.Popen([sys.executable, *argv], **streams, start_new_session=True, env=env) as process:
        os.close(far_end)
        try:
            yield process, Screen(terminal)
        finally:
            process.kill()
            os.close(terminal)
