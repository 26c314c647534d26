"""`dflash-triton swap-drafter`: have a running server draft with another drafter, while it serves."""

from __future__ import annotations

import argparse
import math
import os
from pathlib import Path
from typing import Any

from dflash_cli.commands.arguments import COUNT_OR_0, FILE, non_negative_float
from dflash_cli.commands.client_options import add_connection_options, client_of, text_of
from dflash_cli.commands.console import fail, say
from dflash_client.errors import ClientError

KEY_VARIABLE = "DFLASH_CLIENT_ADMIN_KEY"


def add_parser(commands: Any) -> None:
    """Add the sub-command."""
    parser = commands.add_parser(
        "swap-drafter",
        help="have a running server draft with another drafter",
        description="Have a running server draft with another drafter, while it serves: no text changes, and no "
        "request waits. The server compares what is accepted of the new drafter's blocks with what was accepted "
        "before, and takes the old drafter back where too much is lost (docs/operators.md).",
    )
    parser.add_argument("draft", metavar="DIR|ID", help="the new drafter: a folder at the server, or a hub id")
    parser.add_argument("--revision", metavar="NAME", help="branch, tag or commit of a drafter from the hub")
    parser.add_argument(
        "--admin-key-file",
        **FILE,
        help=f"its text is the key in the server's own admin_key_file; or the key itself in {KEY_VARIABLE}",
    )
    parser.add_argument(
        "--window",
        **COUNT_OR_0,
        help="compare after this many verified blocks (server: 1000); 0: keep the new drafter in any case",
    )
    parser.add_argument(
        "--max-loss",
        type=non_negative_float,
        metavar="SHARE",
        help="of the accepted tokens of a block that may be lost, from 0 to 1 (server: 0.1)",
    )
    add_connection_options(parser, timeout=600.0, retries=False)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Run the sub-command and return the exit status."""
    options = {
        "draft_revision": arguments.revision,
        "window": arguments.window,
        "max_loss": arguments.max_loss,
    }
    # A server on this machine has another working directory.
    local = Path(arguments.draft)
    draft = str(local.absolute()) if local.exists() else arguments.draft
    try:
        key = _admin_key(arguments.admin_key_file)
        if arguments.max_loss is not None and not (math.isfinite(arguments.max_loss) and arguments.max_loss <= 1):
            raise ValueError(f"--max-loss is {arguments.max_loss:g}; allowed: a number from 0 to 1")
        with client_of(arguments) as client:
            given = {name: value for name, value in options.items() if value is not None}
            answer = client.swap_drafter(draft, key, timeout_s=arguments.timeout, **given)
    except ValueError as error:
        return fail(str(error), status=2)
    except ClientError as error:
        return fail(str(error))
    say(str(answer.get("message", answer)))
    return 0


def _admin_key(file: Path | None) -> str:
    if file is None:
        if not (key := os.environ.get(KEY_VARIABLE, "").strip()):
            raise ValueError(f"the server wants a key: give --admin-key-file FILE, or set {KEY_VARIABLE}")
        return key
    return text_of(file, "--admin-key-file").strip()
