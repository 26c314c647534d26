"""Options of the sub-commands that talk to a running server: which one, and the sampling parameters."""

from __future__ import annotations

import argparse
import json
from typing import Any

from dflash_client.client import DFlashClient
from dflash_client.commands.arguments import assignment, non_negative_float, positive_float, positive_int

INPUTS = ("prompt", "messages")


def add_client_options(parser: argparse.ArgumentParser, max_tokens: int | None = None) -> None:
    """Add them. `max_tokens` is the default; None leaves it to the server."""
    parser.add_argument(
        "--url",
        default="localhost",
        metavar="HOST:PORT",
        help="the server (%(default)s, and the protocol's usual port)",
    )
    parser.add_argument("--protocol", choices=("grpc", "http"), default="grpc", help="%(default)s")
    parser.add_argument("--model-name", default="dflash", metavar="NAME", help="the model (%(default)s)")
    parser.add_argument(
        "--max-tokens",
        type=positive_int,
        default=max_tokens,
        metavar="N",
        help=f"most tokens to generate ({max_tokens or 'server: 16'})",
    )
    parser.add_argument("--temperature", type=non_negative_float, metavar="T", help="0 is greedy (server: 1.0)")
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


def client_of(arguments: argparse.Namespace) -> DFlashClient:
    """The client that the options describe. Raises `ValueError`."""
    return DFlashClient(arguments.url, arguments.protocol, arguments.model_name, arguments.timeout)


def sampling_of(arguments: argparse.Namespace) -> dict[str, Any]:
    """The sampling parameters; a value that reads as JSON is sent as such, any other as text. Raises `ValueError`."""
    sampling: dict[str, Any] = {"max_tokens": arguments.max_tokens, "temperature": arguments.temperature}
    for name, text in arguments.parameters:
        if name in INPUTS:
            raise ValueError(f"'{name}' is not a sampling parameter")
        try:
            sampling[name] = json.loads(text)
        except ValueError:
            sampling[name] = text
    return sampling
