"""`dflash-triton serve`: run the server in the foreground until it is told to stop."""

from __future__ import annotations

import argparse
import json
import shlex
import shutil
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

from dflash_client.commands.arguments import add_settings_option, port
from dflash_client.commands.console import fail, say

if TYPE_CHECKING:
    from dflash_client.launcher import TritonServer
    from dflash_client.server_log import LogLine

EXAMPLE_PROMPT = "Sam fills 4 bags with 6 marbles each and gives away 7 marbles. How many marbles does Sam keep?"
STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class _Stop(Exception):
    """A signal asked for the end."""


def add_parser(commands: Any) -> None:
    """Add the sub-command."""
    parser = commands.add_parser(
        "serve",
        help="run a Triton server with a DFlash model",
        description="Run a Triton server with a DFlash model in the foreground; Ctrl-C stops it. Without --target it "
        "serves the demo pair that comes with the project.",
    )
    parser.add_argument("--target", metavar="DIR|ID", help="target model: directory or hub id")
    parser.add_argument("--draft", metavar="DIR|ID", help="DFlash drafter: directory or hub id; '' for no speculation")
    add_settings_option(parser)
    parser.add_argument("--model-name", default="dflash", metavar="NAME", help="name that clients use (%(default)s)")
    parser.add_argument("--host", default="0.0.0.0", help="address to listen on (%(default)s)")
    parser.add_argument("--http-port", type=port, default=8000, metavar="N", help="%(default)s; 0: any free one")
    parser.add_argument("--grpc-port", type=port, default=8001, metavar="N", help="%(default)s; 0: any free one")
    parser.add_argument("--metrics-port", type=port, default=8002, metavar="N", help="%(default)s; 0: any free one")
    parser.add_argument(
        "--explicit",
        action="store_true",
        help="let clients unload and load the model through Triton's repository API",
    )
    parser.add_argument("--verbose", action="store_true", help="show the whole log of the server")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Run the sub-command and return the exit status."""
    # Here and not above: these read the engine's settings, which `generate` does not need.
    from dflash_backend.config import ConfigError
    from dflash_client.launcher import LauncherError, TritonServer

    log = _Log(arguments.verbose)
    try:
        server = TritonServer(
            _settings(arguments),
            model_name=arguments.model_name,
            host=arguments.host,
            http_port=arguments.http_port,
            grpc_port=arguments.grpc_port,
            metrics_port=arguments.metrics_port,
            explicit=arguments.explicit,
            on_progress=say,
            on_log=log,
        )
    except (ConfigError, LauncherError) as error:
        return fail(str(error), status=2)
    with _signals_stop(server):
        try:
            server.start()
            log.loading = False
            print(_endpoints(server), flush=True)
            status = server.wait()
            return fail(f"the server ended by itself (status {status}): {server.failure()}")
        except LauncherError as error:
            return fail(str(error))
        except _Stop:
            say("stopping; once more to stop at once")
            return 0
        finally:
            server.stop()


def _settings(arguments: argparse.Namespace) -> dict[str, str]:
    settings = dict(arguments.settings)
    if arguments.target is not None:
        settings["target_model"] = arguments.target
    if arguments.draft is not None:
        settings["draft_model"] = arguments.draft
    return settings


@contextmanager
def _signals_stop(server: TritonServer) -> Iterator[None]:
    """A signal raises `_Stop` in the main thread; once the stop has begun, it makes the stop not wait."""

    def handler(number: int, frame: FrameType | None) -> None:
        if server.stopping:
            server.hurry()
        else:
            raise _Stop

    before = {number: signal.signal(number, handler) for number in STOP_SIGNALS}
    try:
        yield
    finally:
        for number, old in before.items():
            signal.signal(number, old)


class _Log:
    """Shows the server's log: all of it, or its warnings and, once the server is up, its errors. Before that an error
    ends the start, and is said once, with the failure."""

    # Said by Triton on every machine without a GPU, and on every stream that ends in an error.
    NOISE = ("pinned_memory_manager", "CudaDriverHelper", "DCGM", "NVML", "HandleCancellation called")

    def __init__(self, verbose: bool) -> None:
        self._verbose = verbose
        self.loading = True

    def __call__(self, line: LogLine) -> None:
        if self._verbose:
            print(line.raw, file=sys.stderr, flush=True)
        elif line.level in (("W",) if self.loading else ("W", "E", "F")) and not any(
            words in line.raw for words in self.NOISE
        ):
            say(line.text.partition("\n")[0])


def _endpoints(server: TritonServer) -> str:
    """What to know and one line to try, once the server is ready."""
    body = json.dumps({"text_input": EXAMPLE_PROMPT, "max_tokens": 96, "temperature": 0})
    name = "" if server.model_name == "dflash" else f" --model-name {server.model_name}"
    return "\n".join(
        [
            f"ready: model {server.model_name}",
            f"  gRPC     {server.grpc_url}",
            f"  HTTP     http://{server.http_url}/v2/models/{server.model_name}/generate",
            f"  metrics  http://{server.metrics_url}/metrics",
            "try:",
            f"  {_own_command()} generate {shlex.quote(EXAMPLE_PROMPT)} --url {server.grpc_url} --max-tokens 96"
            f" --temperature 0 --stats{name}",
            f"  curl -s http://{server.http_url}/v2/models/{server.model_name}/generate -d {shlex.quote(body)}",
            "Ctrl-C stops the server.",
        ]
    )


def _own_command() -> str:
    """How to call this very program from the shell that it runs in: its name where the PATH leads to it, else its
    path."""
    script = Path(sys.executable).with_name("dflash-triton")
    on_path = shutil.which("dflash-triton")
    if on_path and Path(on_path) == script:
        return "dflash-triton"
    if not script.is_file():
        return f"{shlex.quote(sys.executable)} -m dflash_client.cli"
    inside = script.is_relative_to(Path.cwd())
    return shlex.quote(str(script.relative_to(Path.cwd()) if inside else script))
