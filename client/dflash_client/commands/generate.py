"""`dflash-triton generate`: complete one prompt on a running server, streaming the text."""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from typing import Any

from dflash_client.client import DFlashClient
from dflash_client.commands.arguments import assignment, non_negative_float, positive_float, positive_int
from dflash_client.errors import ClientError
from dflash_client.results import Delta, GenerationResult


def add_parser(commands: Any) -> None:
    """Add the sub-command."""
    parser = commands.add_parser(
        "generate",
        help="complete one prompt on a running server",
        description="Complete one prompt on a running server; the text streams to standard output.",
    )
    parser.add_argument("prompt", metavar="PROMPT", help="the prompt; '-' reads it from standard input")
    parser.add_argument(
        "--url",
        default="localhost",
        metavar="HOST:PORT",
        help="the server (%(default)s, and the protocol's usual port)",
    )
    parser.add_argument("--protocol", choices=("grpc", "http"), default="grpc", help="%(default)s")
    parser.add_argument("--model-name", default="dflash", metavar="NAME", help="the model (%(default)s)")
    parser.add_argument("--max-tokens", type=positive_int, metavar="N", help="most tokens to generate (server: 16)")
    parser.add_argument("--temperature", type=non_negative_float, metavar="T", help="0 is greedy (server: 1.0)")
    parser.add_argument("--chat", action="store_true", help="send PROMPT as a chat message")
    parser.add_argument(
        "--set-param",
        dest="parameters",
        metavar="NAME=VALUE",
        type=assignment,
        action="append",
        default=[],
        help="any other sampling parameter, such as top_p=0.9 or stop='[\"\\n\"]'; may be repeated",
    )
    parser.add_argument("--timeout", type=positive_float, default=300.0, metavar="S", help="seconds (%(default)g)")
    parser.add_argument("--stats", action="store_true", help="print speed and acceptance to standard error afterwards")
    parser.add_argument("--json", action="store_true", help="print one JSON object in place of the text")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Run the sub-command and return the exit status."""
    try:
        prompt = _prompt(arguments.prompt)
        client = DFlashClient(arguments.url, arguments.protocol, arguments.model_name, arguments.timeout)
        with client:
            stream = client.stream(**_inputs(prompt, arguments.chat), **_sampling(arguments))
            with closing(stream):
                timed = _TimedStream(stream)
                _show(timed, quiet=arguments.json)
    except ValueError as error:
        return _fail(str(error), status=2)
    except ClientError as error:
        return _fail(str(error))
    except KeyboardInterrupt:
        return _fail("cancelled")
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


def _sampling(arguments: argparse.Namespace) -> dict[str, Any]:
    """The sampling parameters; a value that reads as JSON is sent as such, any other as text."""
    sampling: dict[str, Any] = {"max_tokens": arguments.max_tokens, "temperature": arguments.temperature}
    for name, text in arguments.parameters:
        if name in ("prompt", "messages"):
            raise ValueError(f"'{name}' is not a sampling parameter")
        try:
            sampling[name] = json.loads(text)
        except ValueError:
            sampling[name] = text
    return sampling


class _TimedStream:
    """Passes deltas on and notes when they came."""

    def __init__(self, stream: Iterator[Delta]) -> None:
        self._stream = stream
        self._start = time.perf_counter()
        self._first_s: float | None = None
        self._deltas: list[Delta] = []
        self._end_s = 0.0

    def __iter__(self) -> Iterator[Delta]:
        for delta in self._stream:
            if self._first_s is None and delta.num_output_tokens:
                self._first_s = time.perf_counter() - self._start
            self._deltas.append(delta)
            yield delta
        self._end_s = time.perf_counter() - self._start

    def report(self) -> _Report:
        return _Report(GenerationResult.from_deltas(self._deltas), self._first_s, self._end_s)


def _show(stream: _TimedStream, quiet: bool) -> None:
    last = "\n"
    for delta in stream:
        if not quiet and delta.text:
            sys.stdout.write(delta.text)
            sys.stdout.flush()
            last = delta.text[-1]
    if not quiet and last != "\n":
        sys.stdout.write("\n")
        sys.stdout.flush()


@dataclass(frozen=True)
class _Report:
    """A finished generation and its times in seconds, as seen from here (network and connecting included)."""

    result: GenerationResult
    time_to_first_token_s: float | None
    elapsed_s: float

    @property
    def tokens_per_s(self) -> float:
        return self.result.num_output_tokens / self.elapsed_s if self.elapsed_s else 0.0

    def as_json(self) -> str:
        result = self.result
        return json.dumps(
            {
                "text": result.text,
                "finish_reason": result.finish_reason,
                "num_input_tokens": result.num_input_tokens,
                "num_output_tokens": result.num_output_tokens,
                "token_ids": list(result.token_ids),
                "time_to_first_token_s": self.time_to_first_token_s,
                "elapsed_s": self.elapsed_s,
                "tokens_per_s": self.tokens_per_s,
                "spec_stats": result.spec_stats,
            },
            ensure_ascii=False,
        )

    def as_text(self) -> str:
        result, stats = self.result, self.result.spec_stats
        first = "none" if self.time_to_first_token_s is None else f"{self.time_to_first_token_s * 1000:.1f} ms"
        lines = [
            f"tokens                 {result.num_input_tokens} in ({stats.get('num_cached_tokens', 0)} cached), "
            f"{result.num_output_tokens} out, finish reason {result.finish_reason}",
            f"time to first token    {first}",
            f"speed                  {self.tokens_per_s:.1f} tokens/s over {self.elapsed_s:.3f} s in all",
        ]
        if stats.get("num_drafts"):
            per_position = " ".join(str(count) for count in stats.get("num_accepted_tokens_per_pos", []))
            lines += [
                f"acceptance length      {stats['acceptance_length']:.2f} "
                f"({stats['num_accepted_tokens']} accepted in {stats['num_drafts']} drafts)",
                f"accepted per position  {per_position}",
            ]
        else:
            lines.append("acceptance length      no drafts")
        return "\n".join(lines)


def _fail(message: str, status: int = 1) -> int:
    print(f"dflash-triton: {message}", file=sys.stderr)
    return status
