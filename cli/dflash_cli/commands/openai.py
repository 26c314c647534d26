"""`dflash-triton openai`: an OpenAI-compatible front end of a Triton server that runs elsewhere."""

from __future__ import annotations

import argparse
import contextlib
from typing import Any

from dflash_cli.commands.arguments import port, positive_float
from dflash_cli.commands.console import fail

DESCRIPTION = """\
Answer OpenAI's API with the model of one or more Triton servers. It keeps nothing, so any number of them may run. It
listens on this machine alone unless --host says otherwise."""


def add_parser(commands: Any) -> None:
    """Add the sub-command."""
    parser = commands.add_parser(
        "openai", help="answer OpenAI's API with the model of a running server", description=DESCRIPTION
    )
    parser.add_argument(
        "--triton",
        action="append",
        metavar="URL",
        help="gRPC address of a Triton server, grpc://HOST:PORT; may be repeated for servers of the same model "
        "(grpc://127.0.0.1:8001)",
    )
    parser.add_argument("--model-name", default="dflash", metavar="NAME", help="Triton's name of it (%(default)s)")
    parser.add_argument(
        "--served-model-name",
        action="extend",
        nargs="+",
        default=[],
        metavar="NAME",
        help="what clients may call the model (the target's name and Triton's)",
    )
    parser.add_argument(
        "--tokenizer", metavar="DIR", help="directory with the target's tokenizer, where the server's is not here"
    )
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on (%(default)s)")
    parser.add_argument("--port", type=port, default=9000, metavar="N", help="%(default)s; 0: any free one")
    parser.add_argument(
        "--request-timeout",
        type=positive_float,
        default=3600.0,
        metavar="S",
        help="the longest that a request may take (%(default)g)",
    )
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Run the sub-command and return the exit status."""
    from dflash_cli.launcher.ports import reachable_host, settle_ports
    from dflash_cli.launcher.triton_install import LauncherError
    from dflash_openai.app import create_app
    from dflash_openai.config import FrontendConfig
    from dflash_openai.server import serve

    try:
        number = settle_ports(arguments.host, {"--port": arguments.port})["--port"]
        config = FrontendConfig(
            triton_urls=tuple(arguments.triton or ["grpc://127.0.0.1:8001"]),
            model_name=arguments.model_name,
            served_model_names=tuple(arguments.served_model_name),
            tokenizer=arguments.tokenizer,
            host=arguments.host,
            port=number,
            request_timeout_s=arguments.request_timeout,
        )
        app = create_app(config)
    except (LauncherError, ValueError) as error:
        return fail(str(error), status=2)

    def on_ready() -> None:
        with contextlib.suppress(OSError):
            print(f"OpenAI API at http://{reachable_host(config.host)}:{number}/v1", flush=True)

    serve(app, config, on_ready)
    return 0
