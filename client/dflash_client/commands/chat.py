"""`dflash-triton chat`: talk to a running server; answers stream, and what speculation did is shown after each.

What was said goes to standard output, everything else to standard error. With piped standard input each line is a
message.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from dflash_client.client import DFlashClient
from dflash_client.commands.client_options import add_client_options, client_of, sampling_of
from dflash_client.commands.console import fail, say
from dflash_client.commands.timing import Report, TimedStream
from dflash_client.errors import ClientError, ConnectionFailed, InvalidArgument

MAX_TOKENS = 256
PROMPT = "> "
HELP = """/reset  forget what was said
/stats  tokens, speed and acceptance of the whole chat
/help   this list
/quit   end the chat, as Ctrl-D does
Ctrl-C cancels an answer; at the prompt it ends the chat."""


def add_parser(commands: Any) -> None:
    """Add the sub-command."""
    parser = commands.add_parser(
        "chat",
        help="talk to a running server",
        description="Talk to a running server; answers stream, and what speculation did is shown after each. With "
        "piped standard input each line is a message. /help lists the commands.",
    )
    add_client_options(parser, max_tokens=MAX_TOKENS)
    parser.add_argument("--system", metavar="TEXT", help="a system message before the first one")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Run the sub-command and return the exit status."""
    try:
        sampling = sampling_of(arguments)
        if str(sampling.get("n", 1)) != "1":
            raise ValueError("a chat has one answer at a time; leave n out")
        with client_of(arguments) as client:
            if not client.ready():
                return fail(
                    f"the model '{client.model}' does not answer at {client.address}; is the server running, and is "
                    f"this its {client.protocol} port?"
                )
            _converse(Chat(client, sampling, arguments.system))
    except ValueError as error:
        return fail(str(error), status=2)
    except ConnectionFailed as error:
        return fail(str(error))
    except KeyboardInterrupt:
        # At the prompt.
        print(file=sys.stderr)
    except BrokenPipeError:
        # The reader of our output is gone: nobody is left to tell, and flushing at exit must not fail again.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    return 0


@dataclass(slots=True)
class Totals:
    """What a chat came to so far. Cancelled answers have no statistics of the server's and count only as tokens."""

    answers: int = 0
    num_output_tokens: int = 0
    elapsed_s: float = 0.0
    num_drafts: int = 0
    num_accepted_tokens: int = 0

    def add(self, report: Report) -> None:
        """Count one answer."""
        stats = report.result.spec_stats
        self.answers += 1
        self.num_output_tokens += report.num_output_tokens
        self.elapsed_s += report.elapsed_s
        self.num_drafts += stats.get("num_drafts", 0)
        self.num_accepted_tokens += stats.get("num_accepted_tokens", 0)

    def as_line(self) -> str:
        """All of it, for people."""
        speed = self.num_output_tokens / self.elapsed_s if self.elapsed_s else 0.0
        drafts = self.num_drafts
        accepted = f"acceptance length {1 + self.num_accepted_tokens / drafts:.2f}" if drafts else "no drafts"
        return f"{self.answers} answers, {self.num_output_tokens} tokens, {speed:.1f} tokens/s, {accepted}"


class Chat:
    """The messages of a conversation. An answer that was cancelled stays as far as it came."""

    def __init__(self, client: DFlashClient, sampling: dict[str, Any], system: str | None) -> None:
        self._client, self._sampling = client, sampling
        self._system = [{"role": "system", "content": system}] if system else []
        self._messages: list[dict[str, str]] = []
        self.totals = Totals()

    def reset(self) -> None:
        """Forget what was said; the system message stays."""
        self._messages = []

    def ask(self, text: str) -> str:
        """Stream the answer to standard output; a line about it. Raises `ClientError`: then nothing was said."""
        messages = [*self._messages, {"role": "user", "content": text}]
        cancelled = False
        with self._client.stream(messages=[*self._system, *messages], **self._sampling) as stream:
            timed = TimedStream(stream)
            try:
                for delta in timed:
                    sys.stdout.write(delta.text)
                    sys.stdout.flush()
            except KeyboardInterrupt:
                cancelled = True
        report = timed.report()
        if report.result.text:
            self._messages = [*messages, {"role": "assistant", "content": report.result.text}]
        self.totals.add(report)
        return "cancelled" if cancelled else report.as_line()


def _converse(chat: Chat) -> None:
    """Read messages and commands until there are no more. Raises `ConnectionFailed` when the server is gone."""
    for line in _lines():
        text = line.strip()
        if text == "/quit":
            return
        if text.startswith("/"):
            _command(chat, text)
        elif text:
            _answer(chat, text)


def _answer(chat: Chat, text: str) -> None:
    """Ask, and show what came of it. An error ends the answer; the chat goes on, unless there is no server."""
    try:
        about = chat.ask(text)
    except ConnectionFailed:
        print(flush=True)
        raise
    except ClientError as error:
        print(flush=True)
        say(str(error) + (" (/reset starts over)" if isinstance(error, InvalidArgument) else ""))
        return
    print(flush=True)
    print(f"[{about}]", file=sys.stderr, flush=True)


def _command(chat: Chat, text: str) -> None:
    if text == "/reset":
        chat.reset()
        print("[what was said is forgotten]", file=sys.stderr)
    elif text == "/stats":
        print(f"[{chat.totals.as_line()}]", file=sys.stderr)
    elif text == "/help":
        print(HELP, file=sys.stderr)
    else:
        print(f"there is no command {text.split()[0]}; there are:\n{HELP}", file=sys.stderr)


def _lines() -> Iterator[str]:
    """What is typed, line by line, or the lines of piped input."""
    if not sys.stdin.isatty():
        yield from _piped_lines()
        return
    while True:
        try:
            yield input(PROMPT)
        except EOFError:
            print(file=sys.stderr)
            return


def _piped_lines() -> Iterator[str]:
    for number, line in enumerate(sys.stdin.buffer, 1):
        try:
            yield line.decode("utf-8")
        except UnicodeDecodeError as error:
            raise ValueError(f"line {number} of standard input is not UTF-8 text: {error.reason}") from error
