"""`dflash-triton chat`: talk to a running server; answers stream, and what speculation did is shown after each.

What was said goes to standard output, everything else to standard error. With piped standard input each line is a
message.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from dflash_cli.commands.client_options import add_client_options, client_of, sampling_of
from dflash_cli.commands.console import fail, remark, say, write
from dflash_cli.commands.line_editor import typed_lines
from dflash_cli.commands.timing import Report, TimedStream
from dflash_client.errors import ClientError, ConnectionFailed, InvalidArgument

if TYPE_CHECKING:
    from dflash_client import DFlashClient

MAX_TOKENS = 256
PROMPT = "> "
HELP = """/reset     forget what was said
/thinking  on, off or default: whether the model thinks first, where its chat template knows that
/stats     tokens, speed and acceptance of the whole chat
/help      this list
/quit      end the chat, as Ctrl-D does
//...       a message that begins with /
Ctrl-C cancels an answer; at the prompt it ends the chat."""
THINKING: dict[str, bool | None] = {"on": True, "off": False, "default": None}


def add_parser(commands: Any) -> None:
    """Add the sub-command."""
    parser = commands.add_parser(
        "chat",
        help="talk to a running server",
        description="Talk to a running server; answers stream, and what speculation did is shown after each. With "
        "piped standard input each line is a message. /help lists the commands.",
    )
    parser.add_argument("--system", metavar="TEXT", help="a system message before the first one")
    parser.add_argument("--no-history", action="store_true", help="keep no file of what is typed")
    add_client_options(parser, max_tokens=MAX_TOKENS)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Run the sub-command and return the exit status."""
    try:
        sampling = sampling_of(arguments)
        if str(sampling.get("n", 1)) != "1":
            raise ValueError("a chat has one answer at a time; leave n out")
        with client_of(arguments) as client:
            error = client.probe()
            if error is not None:
                return fail(str(error))
            if sys.stdin.isatty():
                remark(f"{client.model} at {client.address}; /help lists the commands, Ctrl-D ends the chat")
            _converse(Chat(client, sampling, arguments.system), keep_history=not arguments.no_history)
    except ValueError as error:
        return fail(str(error), status=2)
    except ConnectionFailed as error:
        return fail(str(error))
    except KeyboardInterrupt:
        # At the prompt.
        remark("")
    return 0


def totals(reports: Sequence[Report]) -> str:
    """What a chat came to so far. Cancelled answers have no statistics of the server's and count only as tokens."""
    stats = [report.result.spec_stats for report in reports]
    drafts = sum(each.get("num_drafts", 0) for each in stats)
    num_accepted = sum(each.get("num_accepted_tokens", 0) for each in stats)
    num_tokens = sum(report.num_output_tokens for report in reports)
    elapsed_s = sum(report.elapsed_s for report in reports)
    speed = num_tokens / elapsed_s if elapsed_s else 0.0
    accepted = f"acceptance length {1 + num_accepted / drafts:.2f}" if drafts else "no drafts"
    return f"{len(reports)} answers, {num_tokens} tokens, {speed:.1f} tokens/s, {accepted}"


class Chat:
    """The messages of a conversation. An answer that was cancelled stays as far as it came."""

    def __init__(self, client: DFlashClient, sampling: dict[str, Any], system: str | None) -> None:
        self._client, self._sampling = client, sampling
        self._system = [{"role": "system", "content": system}] if system else []
        self._messages: list[dict[str, str]] = []
        self.reports: list[Report] = []

    def reset(self) -> None:
        """Drop the conversation; the system message stays."""
        self._messages = []

    def let_think(self, wanted: bool | None) -> None:
        """Whether the model may think first from now on; None leaves it to the chat template."""
        self._sampling = {name: value for name, value in self._sampling.items() if name != "enable_thinking"}
        if wanted is not None:
            self._sampling["enable_thinking"] = wanted

    def ask(self, text: str) -> str:
        """Stream the answer to standard output; a line about it. Raises `ClientError`: then nothing was said."""
        messages = [*self._messages, {"role": "user", "content": text}]
        cancelled = False
        with self._client.stream(messages=[*self._system, *messages], **self._sampling) as stream:
            timed = TimedStream(stream)
            try:
                for delta in timed:
                    write(delta.text)
            except KeyboardInterrupt:
                cancelled = True
        report = timed.report()
        if report.result.text:
            self._messages = [*messages, {"role": "assistant", "content": report.result.text}]
        self.reports.append(report)
        return "cancelled" if cancelled else report.as_line()


def _converse(chat: Chat, keep_history: bool) -> None:
    """Read messages and commands until there are no more. Raises `ConnectionFailed` when the server is gone."""
    for line in typed_lines(PROMPT, keep_history) if sys.stdin.isatty() else _piped_lines():
        text = line.strip()
        if text == "/quit":
            return
        if text.startswith("/") and not text.startswith("//"):
            _command(chat, text)
        elif text:
            _answer(chat, text.removeprefix("/") if text.startswith("//") else text)


def _answer(chat: Chat, text: str) -> None:
    """Ask, and show what came of it. An error ends the answer; the chat goes on, unless there is no server."""
    try:
        about = chat.ask(text)
    except ConnectionFailed:
        write("\n")
        raise
    except ClientError as error:
        write("\n")
        say(str(error) + (" (/reset starts over)" if isinstance(error, InvalidArgument) else ""))
        return
    write("\n")
    remark(f"[{about}]")


def _command(chat: Chat, text: str) -> None:
    name, *rest = text.split()
    if name == "/thinking" and len(rest) == 1 and rest[0] in THINKING:
        chat.let_think(THINKING[rest[0]])
        remark(f"[thinking: {rest[0]}]")
    elif text == "/reset":
        chat.reset()
        remark("[what was said is forgotten]")
    elif text == "/stats":
        remark(f"[{totals(chat.reports)}]")
    elif text == "/help":
        remark(HELP)
    else:
        remark(f"there is no command {text}; there are:\n{HELP}")


def _piped_lines() -> Iterator[str]:
    for number, line in enumerate(sys.stdin.buffer, 1):
        try:
            yield line.decode("utf-8")
        except UnicodeDecodeError as error:
            raise ValueError(f"line {number} of standard input is not UTF-8 text: {error.reason}") from error
