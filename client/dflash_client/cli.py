"""`dflash-triton`: the command line. Each sub-command is a file in `commands/`.

Exit status: 0 fine, 1 failed, 2 bad usage.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from dflash_client.commands import chat, generate, inspect, serve
from dflash_client.commands import eval as eval_command


def parser() -> argparse.ArgumentParser:
    """The parser of the whole command line."""
    root = argparse.ArgumentParser(
        prog="dflash-triton",
        description="Serve language models through Triton with DFlash speculative decoding, and talk to them.",
    )
    commands = root.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for command in (serve, generate, chat, eval_command, inspect):
        command.add_parser(commands)
    return root


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command line and return its exit status."""
    arguments = parser().parse_args(argv)
    status: int = arguments.run(arguments)
    return status


if __name__ == "__main__":
    sys.exit(main())
