"""`dflash-triton generate`: complete one prompt on a running server, streaming the text."""

from __future__ import annotations

import argparse
import os
import sys
from typing import Any

from dflash_client.commands.client_options import add_client_options, client_of, sampling_of
from dflash_client.commands.console import fail
from dflash_client.commands.timing import TimedStream
from dflash_client.errors import ClientError


def add_parser(commands: Any) -> None:
    """Add the sub-command."""
    parser = commands.add_parser(
        "generate",
        help="complete one prompt on a running server",
        description="Complete one prompt on a running server; the text streams to standard output.",
    )
    parser.add_argument("prompt", metavar="PROMPT", help="the prompt; '-' reads it from standard input")
    add_client_options(parser)
    parser.add_argument("--chat", action="store_true", help="send PROMPT as a chat message")
    parser.add_argument("--stats", action="store_true", help="print speed and acceptance to standard error afterwards")
    parser.add_argument("--json", action="store_true", help="print one JSON object in place of the text")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Run the sub-command and return the exit status."""
    try:
        inputs, sampling = _inputs(_prompt(arguments.prompt), arguments.chat), sampling_of(arguments)
        if str(sampling.get("n", 1)) != "1" and not arguments.json:
            raise ValueError("n above 1 gives several texts, which cannot stream into one; add --json")
        with client_of(arguments) as client, client.stream(**inputs, **sampling) as stream:
            timed = TimedStream(stream)
            _show(timed, quiet=arguments.json)
    except ValueError as error:
        return fail(str(error), status=2)
    except ClientError as error:
        return fail(str(error))
    except KeyboardInterrupt:
        return fail("cancelled")
    except BrokenPipeError:
        # The reader of our output is gone: nobody is left to tell, and flushing at exit must not fail again.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    report = timed.report()
    if arguments.json:
        print(report.as_json())
    if arguments.stats:
        print(report.as_text(), file=sys.stderr)
    return 0


def _prompt(argument: str) -> str:
    if argument != "-":
        return argument
    try:
        return sys.stdin.buffer.read().decode("utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"standard input is not UTF-8 text: {error.reason} at byte {error.start}") from error


def _inputs(prompt: str, chat: bool) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": prompt}]} if chat else {"prompt": prompt}


def _show(stream: TimedStream, quiet: bool) -> None:
    last = "\n"
    for delta in stream:
        if not quiet and delta.text:
            sys.stdout.write(delta.text)
            sys.stdout.flush()
            last = delta.text[-1]
    if not quiet and last != "\n":
        sys.stdout.write("\n")
        sys.stdout.flush()
