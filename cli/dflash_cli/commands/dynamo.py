"""`dflash-triton dynamo`: a Triton server as a worker of NVIDIA Dynamo."""

from __future__ import annotations

import argparse
import importlib.util
from typing import Any

from dflash_backend.without_torch import leave_torch_out
from dflash_cli.commands.arguments import REPEATED, SECONDS
from dflash_cli.commands.console import fail

DESCRIPTION = """\
Register a running Triton server as a worker of NVIDIA Dynamo, whose frontend and KV-aware router then serve it beside
others. One process for each server, on a machine that has the tokenizer's files. It needs the package ai-dynamo."""
MISSING = "the package ai-dynamo is missing: in a checkout, pip install -e '.[dynamo]' (docs/scale.md)"


def add_parser(commands: Any) -> None:
    """Add the sub-command."""
    parser = commands.add_parser(
        "dynamo", help="register a running server as a worker of NVIDIA Dynamo", description=DESCRIPTION
    )
    add = parser.add_argument_group("the server").add_argument
    add("--triton", default="127.0.0.1:8001", metavar="URL", help="its gRPC address (%(default)s)")
    add("--model-name", default="dflash", metavar="NAME", help="Triton's name of the model (%(default)s)")
    add("--tokenizer", metavar="DIR", help="directory with the target's tokenizer, where the server's is not here")
    add(
        "--kv-events",
        **REPEATED,
        metavar="ADDRESS",
        help="where its KV events are read, tcp://HOST:PORT, once for each engine; by default what the server's "
        "kv_events_endpoint says, on this machine",
    )
    add("--wait", **SECONDS, default=600.0, help="for the server to be ready (%(default)g)")
    add("--request-timeout", **SECONDS, default=3600.0, help="the longest that a request may take (%(default)g)")
    add = parser.add_argument_group("Dynamo").add_argument
    add("--served-model-name", metavar="NAME", help="what clients call the model (the tokenizer's directory)")
    add("--namespace", default="dynamo", metavar="NAME", help="of the worker (%(default)s)")
    add("--component", default="backend", metavar="NAME", help="of the worker (%(default)s)")
    add(
        "--discovery-backend",
        default="etcd",
        choices=("etcd", "kubernetes", "file", "mem"),
        help="how frontends find it (%(default)s); file: through the folder in DYN_FILE_KV",
    )
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Serve until SIGTERM or Ctrl-C."""
    if importlib.util.find_spec("dynamo") is None or importlib.util.find_spec("dynamo.common") is None:
        return fail(MISSING)
    leave_torch_out()
    try:
        from dflash_cli.dynamo_engine import serve
    except ModuleNotFoundError as error:
        return fail(f"the package ai-dynamo needs {error.name}, which is missing: pip install {error.name}")
    from dflash_client import ClientError

    try:
        serve(arguments)
    except ClientError as error:
        return fail(f"{arguments.triton}: {error}")
    return 0
