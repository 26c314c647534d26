"""`dflash-triton`: the command line. Each sub-command is a file in `commands/`.

Exit status: 0 fine, 1 failed, 2 bad usage, 130 ended by Ctrl-C.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib import import_module
from types import FrameType
from typing import NoReturn

from dflash_cli.commands.console import INTERRUPTED, OutputFailed, escape_unknown_characters, fail, say
from dflash_cli.commands.version import package_version

# What a command imports before it begins, which takes a second or more; what else it needs it imports on its way.
IMPORTS = {
    "serve": "dflash_cli.launcher.server",
    "generate": "dflash_client.client",
    "chat": "dflash_client.client",
    "swap-drafter": "dflash_client.client",
    "eval": "dflash_backend.evaluation.measure",
    "inspect": "dflash_backend.engine.inspection",
    "openai": "dflash_openai.server",
    "train": "dflash_backend.training.run",
}
# Those that leave torch out.
WITHOUT_TORCH = frozenset({"openai"})


def parser() -> argparse.ArgumentParser:
    """The parser of the whole command line."""
    from dflash_cli.commands import chat, dynamo, generate, inspect, openai, serve, swap_drafter, train
    from dflash_cli.commands import eval as eval_command

    root = argparse.ArgumentParser(
        prog="dflash-triton",
        description="Serve language models through Triton with DFlash speculative decoding, and talk to them.",
    )
    root.add_argument("--version", action="version", version=f"dflash-triton {package_version()}")
    commands = root.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for command in (serve, openai, dynamo, generate, chat, eval_command, inspect, train, swap_drafter):
        command.add_parser(commands)
    for name, sub in commands.choices.items():
        sub.set_defaults(command=name, parser=sub)
    return root


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command line and return its exit status."""
    escape_unknown_characters()
    try:
        return _run(argv)
    except KeyboardInterrupt:
        say("cancelled")
        return INTERRUPTED


def _run(argv: Sequence[str] | None) -> int:
    with _imports_can_be_interrupted():
        from dflash_cli.commands.hints import hint
        from dflash_cli.commands.packages import is_missing_package, package_missing

        root = parser()
    try:
        arguments, unknown = root.parse_known_args(argv)
        if unknown:
            arguments.parser.error(
                f"unrecognized arguments: {' '.join(unknown)}{hint(arguments.command, arguments.parser, unknown)}"
            )
        try:
            with _imports_can_be_interrupted():
                if arguments.command in WITHOUT_TORCH:
                    import_module("dflash_backend.without_torch").leave_torch_out()
                if arguments.command in IMPORTS:
                    import_module(IMPORTS[arguments.command])
            status: int = arguments.run(arguments)
        except ImportError as error:
            if not is_missing_package(error):
                raise
            return fail(package_missing(error, arguments.command))
        return status
    except OutputFailed as error:
        return fail(str(error)) if str(error) else 1


def entry() -> NoReturn:
    """What the installed program `dflash-triton` runs."""
    status = main()
    # Everything is said: from here on Ctrl-C ends the process without a word.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    sys.exit(status)


@contextmanager
def _imports_can_be_interrupted() -> Iterator[None]:
    """Ctrl-C while modules are imported ends the process at once, where an exception would come out of the middle of
    some library."""

    def end(number: int, frame: FrameType | None) -> None:
        os.write(2, b"dflash-triton: cancelled\n")
        os._exit(INTERRUPTED)

    if signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield
        return
    signal.signal(signal.SIGINT, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)


if __name__ == "__main__":
    entry()
