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
from pathlib import Path
from typing import Any

import pytest

from dflash_cli.launcher.server import TritonServer
from dflash_cli.main import main
from dflash_client import DFlashClient, Stream
from tests.client.conftest import one_more_cancellation, toy_server


def say(monkeypatch: pytest.MonkeyPatch, *lines: str) -> None:
    """Put lines on standard input, as a pipe does."""
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO("".join(line + "\n" for line in lines).encode())))


@pytest.mark.server
@pytest.mark.parametrize("protocol", ["grpc", "http"])
def test_each_line_is_answered_with_what_was_said_before(
    toy: TritonServer, protocol: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    url = toy.grpc_url if protocol == "grpc" else toy.http_url
    say(monkeypatch, "hé", "", "b")
    assert main(["chat", "--url", url, "--protocol", protocol, "--system", "be"]) == 0
    first = "<system>be<user>hé"
    out, err = capsys.readouterr()
    assert out == f"{first}\n{first}<assistant>{first}<user>b\n"
    assert "acceptance length 2.50, 0 of 18 prompt tokens cached]" in err


@pytest.mark.server
def test_commands_reset_count_and_end_the_chat(
    toy: TritonServer, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    say(monkeypatch, "a", "/reset", "b", "/stats", "/what now", "/quit", "c")
    assert main(["chat", "--url", toy.grpc_url]) == 0
    out, err = capsys.readouterr()
    assert out == "<user>a\n<user>b\n"
    assert "[2 answers, 14 tokens, " in err
    assert "there is no command /what now" in err
    assert err.count("forget what was said") == 1


@pytest.mark.server
def test_two_slashes_begin_a_message_with_one(
    toy: TritonServer, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    say(monkeypatch, "//etc")
    assert main(["chat", "--url", toy.grpc_url]) == 0
    assert capsys.readouterr().out == "<user>/etc\n"


@pytest.mark.server
def test_thinking_is_switched_in_the_chat(
    toy: TritonServer, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    sent: list[object] = []
    stream = DFlashClient.stream

    def noting(self: DFlashClient, *arguments: Any, **options: Any) -> Stream:
        sent.append(options.get("enable_thinking"))
        return stream(self, *arguments, **options)

    monkeypatch.setattr(DFlashClient, "stream", noting)
    say(monkeypatch, "a", "/thinking on", "b", "/thinking default", "c", "/thinking maybe", "d")
    assert main(["chat", "--url", toy.grpc_url, "--no-thinking"]) == 0
    assert sent == [False, True, None, None]
    assert "there is no command /thinking maybe" in capsys.readouterr().err


@pytest.mark.server
def test_parameters_are_sent(
    toy: TritonServer, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    say(monkeypatch, "hello")
    assert main(["chat", "--url", toy.grpc_url, "--max-tokens", "8"]) == 0
    assert capsys.readouterr().out == "<user>he\n"


@pytest.mark.server
def test_an_error_ends_the_answer_and_not_the_chat(
    toy: TritonServer, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    say(monkeypatch, "a", "b")
    assert main(["chat", "--url", toy.grpc_url, "--set-param", "refuse=INVALID_ARG"]) == 0
    out, err = capsys.readouterr()
    assert out == "\n\n"
    assert err == "dflash-triton: toy says INVALID_ARG (/reset starts over)\n" * 2


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


@pytest.mark.parametrize("protocol", ["grpc", "http"])
def test_no_server_is_said_before_anything_is_typed(
    protocol: str, unused_address: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["chat", "--url", unused_address, "--protocol", protocol]) == 1
    assert f"answers at {unused_address}; is it running" in capsys.readouterr().err


@pytest.mark.server
def test_a_model_that_is_not_there_is_said_before_anything_is_typed(
    toy: TritonServer, capsys: pytest.CaptureFixture[str]
) -> None:
    for url in (toy.grpc_url, f"http://{toy.http_url}"):
        assert main(["chat", "--url", url, "--model-name", "other"]) == 1
        assert re.search("model 'other' (is not ready|is not found)|'other'", capsys.readouterr().err)


@pytest.mark.parametrize("parameter", ["n=2", "messages=[]"])
def test_what_makes_no_sense_in_a_chat_ends_with_2(parameter: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["chat", "--set-param", parameter]) == 2
    assert parameter.partition("=")[0] in capsys.readouterr().err


@pytest.mark.server
def test_in_a_terminal_ctrl_c_cancels_the_answer_and_then_ends_the_chat(toy: TritonServer, cancel_log: Path) -> None:
    terminal, far_end = pty.openpty()
    command = [sys.executable, "-c", TERMINAL, "chat", "--url", toy.grpc_url]
    with subprocess.Popen(command, stdin=far_end, stdout=far_end, stderr=far_end, start_new_session=True) as process:
        os.close(far_end)
        screen = Screen(terminal)
        try:
            screen.read_until("> ")
            with one_more_cancellation(cancel_log):
                os.write(terminal, b"forever\n")
                screen.read_until("xxx")
                process.send_signal(signal.SIGINT)
                screen.read_until("[cancelled]")
            screen.read_until("> ")
            process.send_signal(signal.SIGINT)
            assert process.wait(10) == 0
        finally:
            process.kill()
            os.close(terminal)


@pytest.mark.server
def test_in_a_terminal_lines_are_edited_and_kept_for_their_owner_alone(toy: TritonServer, tmp_path: Path) -> None:
    environ = os.environ | {"XDG_STATE_HOME": str(tmp_path), "TERM": "xterm"}
    kept = tmp_path / "dflash-triton" / "chat_history"

    def chat(*keys: tuple[bytes, str], options: tuple[str, ...] = ()) -> None:
        terminal, far_end = pty.openpty()
        command = [sys.executable, "-m", "dflash_cli.main", "chat", "--url", toy.grpc_url, *options]
        with subprocess.Popen(
            command, stdin=far_end, stdout=far_end, stderr=far_end, start_new_session=True, env=environ
        ) as process:
            os.close(far_end)
            screen = Screen(terminal)
            try:
                screen.read_until("/help lists the commands")
                for typed, answer in keys:
                    screen.read_until("> ")
                    os.write(terminal, typed)
                    screen.read_until(answer)
                screen.read_until("> ")
                os.write(terminal, b"/quit\n")
                assert process.wait(20) == 0
            finally:
                process.kill()
                os.close(terminal)

    # Left, and a letter between those that are there.
    chat((b"ac\x1b[Db\n", "<user>abc"))
    assert kept.read_text().splitlines() == ["abc", "/quit"]
    assert stat.S_IMODE(kept.stat().st_mode) == 0o600
    # Up twice, over "/quit", in the next chat.
    chat((b"\x1b[A\x1b[A\n", "<user>abc"))
    before = kept.read_text()
    chat((b"secret\n", "<user>secret"), options=("--no-history",))
    assert kept.read_text() == before


# The chat as it is, but for the message's role, which would stand before the toy's special prompt.
TERMINAL = """
import sys
import dflash_cli.commands.chat as chat
build = chat.DFlashClient.stream
chat.DFlashClient.stream = lambda self, messages, **sampling: build(self, messages[-1]["content"], **sampling)
from dflash_cli.main import main
sys.exit(main(sys.argv[1:]))
"""


class Screen:
    """What a program writes to its terminal."""

    def __init__(self, terminal: int) -> None:
        self._terminal, self._rest = terminal, ""

    def read_until(self, words: str) -> None:
        """Read up to `words` and over them."""
        while words not in self._rest:
            readable, _, _ = select.select([self._terminal], [], [], 20)
            assert readable, f"no {words!r} in {self._rest!r}"
            self._rest += os.read(self._terminal, 1024).decode()
        self._rest = self._rest.partition(words)[2]
