"""`dflash-triton openai`: an OpenAI-compatible front end of a Triton server that runs elsewhere."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import logging
import os
from typing import Any

from dflash_cli.commands.arguments import (
    PORT,
    REPEATED,
    SECONDS,
    SECONDS_OR_0,
    add_answer_options,
    fields_of,
    non_negative_int,
)
from dflash_cli.commands.console import fail
from dflash_cli.commands.log_lines import Lines, LinesHandler
from dflash_cli.commands.security_options import add_security_options, security_config, security_warnings
from dflash_cli.commands.serve_options import HOST_ENV, LOOPBACK

DESCRIPTION = """\
Answer OpenAI's API with the model of one or more Triton servers. It keeps nothing, so any number of them may run. It
listens on this machine alone unless --host says otherwise."""


def add_parser(commands: Any) -> None:
    """Add the sub-command."""
    parser = commands.add_parser(
        "openai", help="answer OpenAI's API with the model of a running server", description=DESCRIPTION
    )
    _add_servers(parser)
    _add_listening(parser)
    add_security_options(parser)
    parser.set_defaults(run=run)


def _add_servers(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("the servers behind it").add_argument
    add(
        "--triton",
        action="append",
        metavar="URL",
        help="gRPC address of a Triton server, grpc://HOST:PORT; may be repeated for servers of the same model "
        "(grpc://127.0.0.1:8001)",
    )
    add(
        "--prefill",
        **REPEATED,
        metavar="URL",
        help="gRPC address of a prefill server (kv_role), which computes long prompts for those of --triton, decode "
        "servers; may be repeated",
    )
    add("--triton-ca-cert", metavar="FILE", help="with grpcs://: PEM file of the authorities to trust")
    add("--triton-client-cert", metavar="FILE", help="with grpcs://: PEM file of our certificate")
    add("--triton-client-key", metavar="FILE", help="with grpcs://: PEM file of its key")
    add(
        "--triton-metrics",
        **REPEATED,
        metavar="URL",
        help="where a server has its metrics, http://HOST:8002/metrics, to show them too; may be repeated",
    )
    add("--model-name", default="dflash", metavar="NAME", help="Triton's name of the model (%(default)s)")
    add("--tokenizer", metavar="DIR", help="directory with the target's tokenizer, where the server's is not here")


def _add_listening(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("the API").add_argument
    add(
        "--host",
        default=os.environ.get(HOST_ENV) or LOOPBACK,
        help=f"address to listen on; {HOST_ENV} in the environment, else {LOOPBACK}",
    )
    add("--port", **PORT, default=9000, help="%(default)s; 0: any free one")
    add(
        "--served-model-name",
        action="extend",
        nargs="+",
        default=[],
        metavar="NAME",
        help="what clients may call the model (the target's name and Triton's)",
    )
    add_answer_options(parser)
    add("--request-timeout", **SECONDS, default=3600.0, help="the longest that a request may take (%(default)g)")
    add(
        "--drain-timeout",
        **SECONDS_OR_0,
        default=30.0,
        help="what running requests have to finish at a stop (%(default)g); a second Ctrl-C does not wait",
    )
    # For `serve`: a pipe on which it sees that the front end does not hang, and one that it closes once the model has
    # loaded, for which the front end waits when it has imported what it needs.
    add("--heartbeat-fd", type=non_negative_int, help=argparse.SUPPRESS)
    add("--start-fd", type=non_negative_int, help=argparse.SUPPRESS)


def run(arguments: argparse.Namespace) -> int:
    """Run the sub-command and return the exit status."""
    from dflash_cli.launcher.ports import AddressError, is_loopback, reachable_host, settle_ports
    from dflash_cli.launcher.server_files import noted_ready_url
    from dflash_cli.launcher.triton_install import LauncherError
    from dflash_client.connection import Tls
    from dflash_openai.app import create_app
    from dflash_openai.config import FrontendConfig
    from dflash_openai.server import serve

    if arguments.start_fd is not None:
        _wait_for_start(arguments.start_fd)
    try:
        local = is_loopback(arguments.host)
        security = security_config(arguments, local)
        config = FrontendConfig(
            triton_urls=tuple(arguments.triton or ["grpc://127.0.0.1:8001"]),
            prefill_urls=tuple(arguments.prefill),
            triton_tls=Tls(arguments.triton_ca_cert, arguments.triton_client_cert, arguments.triton_client_key),
            triton_metrics_urls=tuple(arguments.triton_metrics),
            served_model_names=tuple(arguments.served_model_name),
            request_timeout_s=arguments.request_timeout,
            drain_timeout_s=arguments.drain_timeout,
            security=security,
            ping_interval_s=arguments.ping_interval,
            tracer=_tracer(arguments.otlp_traces_endpoint),
            **fields_of(FrontendConfig, arguments),
        )
        number = settle_ports(config.host, {"--port": config.port})["--port"]
        config = dataclasses.replace(config, port=number)
        app = create_app(config)
    except (LauncherError, ValueError) as error:
        return fail(str(error), status=1 if isinstance(error, AddressError) else 2)

    scheme = "http" if security.tls is None else "https"
    lines = Lines()
    for warning in security_warnings(security, local, arguments.api_key_file):
        lines.say(warning)
    _log_to(lines)

    def on_ready() -> None:
        with contextlib.suppress(OSError):
            print(f"OpenAI API at {scheme}://{reachable_host(config.host)}:{number}/v1", flush=True)

    # Beside a server of `serve`, and for who has no certificate where clients need one, there is nothing to note.
    alone = arguments.heartbeat_fd is None and (security.tls is None or security.tls.client_ca is None)
    with noted_ready_url(f"{scheme}://{reachable_host(config.host)}:{number}/health/ready" if alone else None):
        serve(app, config, on_ready)
    lines.flush()
    return 0


def _wait_for_start(fd: int) -> None:
    """Until the pipe's other end is closed. What takes long to import is there then."""
    from transformers import AutoTokenizer  # noqa: F401 - with it a model's tokenizer is read

    os.read(fd, 1)


def _tracer(endpoint: str | None) -> Any:
    """The tracer for an endpoint that was given, or that the SDK's own variables give. Raises ValueError."""
    from dflash_openai.telemetry import endpoint_of, make_tracer

    found = endpoint or endpoint_of(os.environ)
    return None if found is None else make_tracer(found)


def _log_to(lines: Lines) -> None:
    """Write the front end's own log, the line about each request included, and the warnings of libraries. The event
    loop logs: it must not wait for who reads that."""
    logging.basicConfig(handlers=[LinesHandler(lines)], format="%(asctime)s %(levelname)s %(message)s")
    logging.getLogger("dflash_openai").setLevel(logging.INFO)
