"""`dflash-triton generate`: complete one prompt on a running server, streaming the text."""

from __future__ import annotations

import argparse
import sys
from typing import Any

from dflash_cli.commands.client_options import add_client_options, client_of, sampling_of
from dflash_cli.commands.console import INTERRUPTED, fail, remark, say, write
from dflash_cli.commands.timing import TimedStream
from dflash_client.errors import ClientError


def add_parser(commands: Any) -> None:
    """Add the sub-command."""
    parser = commands.add_parser(
        "generate",
        help="complete one prompt on a running server",
        description="Complete one prompt on a running server; the text streams to standard output.",
    )
    parser.add_argument("prompt", metavar="PROMPT", nargs="?", help="the prompt; '-' reads it from standard input")
    parser.add_argument("--prompt", dest="prompt_option", metavar="TEXT", help="the same as an option")
    parser.add_argument("--chat", action="store_true", help="send PROMPT as a chat message")
    parser.add_argument("--stats", action="store_true", help="print speed and acceptance to standard error afterwards")
    parser.add_argument("--json", action="store_true", help="print one JSON object in place of the text")
    add_client_options(parser)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Run the sub-command and return the exit status. After Ctrl-C `--stats` shows what had come."""
    try:
        prompt, sampling = _prompt(arguments), sampling_of(arguments)
        if str(sampling.get("n", 1)) != "1" and not arguments.json:
            raise ValueError("n above 1 gives several texts, which cannot stream into one; add --json")
        if arguments.enable_thinking is not None and not arguments.chat:
            raise ValueError("--thinking and --no-thinking are for the chat template, which --chat applies; add --chat")
        inputs = {"messages": [{"role": "user", "content": prompt}]} if arguments.chat else {"prompt": prompt}
        with client_of(arguments) as client, client.stream(**inputs, **sampling) as stream:
            timed = TimedStream(stream)
            interrupted = _show(timed, quiet=arguments.json)
    except ValueError as error:
        return fail(str(error), status=2)
    except ClientError as error:
        return fail(str(error))
    report = timed.report()
    if interrupted:
        say("cancelled")
    elif arguments.json:
        write(f"{report.as_json()}\n")
    elif report.result.logprobs is not None:
        remark(report.logprobs_as_text())
    if arguments.stats:
        remark(report.as_text())
    return INTERRUPTED if interrupted else 0


def _prompt(arguments: argparse.Namespace) -> str:
    given = [text for text in (arguments.prompt, arguments.prompt_option) if text is not None]
    if len(given) != 1:
        raise ValueError("give the prompt once: as an argument, with --prompt, or '-' to read it from standard input")
    if given[0] != "-":
        return str(given[0])
    try:
        return sys.stdin.buffer.read().decode("utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"standard input is not UTF-8 text: {error.reason} at byte {error.start}") from error


def _show(stream: TimedStream, quiet: bool) -> bool:
    """Write the text as it comes. Whether Ctrl-C ended it."""
    last = "\n"
    try:
        for delta in stream:
            if not quiet and delta.text:
                write(delta.text)
                last = delta.text[-1]
    except KeyboardInterrupt:
        return True
    finally:
        if not quiet and last != "\n":
            write("\n")
    return False
