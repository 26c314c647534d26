"""`dflash-triton serve`: run the server in the foreground until it is told to stop."""

from __future__ import annotations

import argparse
import json
import os
import shlex
import shutil
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dflash_cli.commands.console import fail
from dflash_cli.commands.log_lines import Lines
from dflash_cli.commands.security_options import (
    KEYS_VARIABLE,
    as_options,
    keys_environ,
    other_options,
    protecting_options,
    security_config,
)
from dflash_cli.commands.serve_log import ServeLog
from dflash_cli.commands.serve_options import LOOPBACK, SETTING_OPTIONS, add_serve_parser

if TYPE_CHECKING:
    from dflash_cli.launcher.frontend import FrontendProcess
    from dflash_cli.launcher.restarts import Keeper
    from dflash_cli.launcher.server import GrpcTls, TritonServer

EXAMPLE_PROMPT = "Sam fills 4 bags with 6 marbles each and gives away 7 marbles. How many marbles does Sam keep?"
# Of a model that is not the demo pair, which answers questions like the one above alone.
OTHER_PROMPT = "What is the capital of France?"
# Windows has no SIGHUP, and clients run there.
STOP_SIGNALS: tuple[signal.Signals, ...] = tuple(
    getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name)
)
# The lowest Triton whose known crashes by a single request are mended (docs/operators.md, Security).
SAFE_TRITON = "26.05"
# Options that take several values, and would take a model behind them for one.
LISTS = ("served_model_name", "allowed_hosts", "allowed_origins")


def add_parser(commands: Any) -> None:
    """Add the sub-command."""
    add_serve_parser(commands).set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Run the sub-command and return the exit status."""
    # Here and not above: these read the engine's settings, which `generate` does not need.
    from dflash_backend.config import ConfigError
    from dflash_cli.launcher.ports import AddressError
    from dflash_cli.launcher.restarts import Keeper, StopAsked
    from dflash_cli.launcher.server import LauncherError

    lines = Lines()
    log = ServeLog(lines, arguments.verbose)
    try:
        check_lists(arguments)
        frontend = _frontend(arguments, lines.say)
        server = _server(arguments, log, frontend.ready_url if frontend is not None else None)
        log.loads_demo_pair = server.serves_demo_pair
        if not (names_model(arguments, "target") or names_model(arguments, "draft")):
            lines.say("no MODEL is given: this serves the demo pair, a toy that comes with the project")
        for warning in warnings(arguments):
            lines.say(warning)
    except (ConfigError, LauncherError) as error:
        lines.flush()
        return fail(str(error), status=1 if isinstance(error, AddressError) else 2)
    keeper = Keeper(
        server,
        restart=not arguments.no_restart,
        hang_timeout_s=arguments.hang_timeout,
        say=lines.say,
        on_look=frontend.keep if frontend is not None else lambda: None,
    )

    def on_ready() -> None:
        if frontend is not None:
            _start_before(server, frontend, arguments.hang_timeout)
        for warning in log.ready():
            lines.say(f"warning: {warning}")
        lines.flush()
        with suppress(OSError):  # its reader may be gone, or its disk full: the server goes on
            print(_endpoints(server, frontend.url if frontend is not None else None), flush=True)

    with _signals_stop(keeper):
        try:
            if frontend is not None:
                server.settle_ports()
                frontend.launch(server.grpc_url, server.metrics_url)
            keeper.run(on_ready)
        except LauncherError as error:
            lines.say(str(error))
            return 1
        except StopAsked:
            log.stopping = True
            lines.say("stopping; once more to stop at once")
            return 0
        finally:
            if frontend is not None:
                frontend.drain()
            server.stop()
            if frontend is not None:
                frontend.stop()
            lines.flush()


def _start_before(server: TritonServer, frontend: FrontendProcess, hang_timeout_s: float) -> None:
    """Let the front end listen. A server that is in trouble ends the wait for it: the keeper looks after it next."""
    from dflash_cli.launcher.watch import Watch

    with closing(Watch(server, hang_timeout_s)) as watch:
        frontend.start(watch.trouble)


def _server(arguments: argparse.Namespace, log: ServeLog, ready_url: str | None) -> TritonServer:
    """The server that the options ask for; `ready_url` is the front end's. Raises `ConfigError` or `LauncherError`."""
    from dflash_cli.launcher.server import TritonServer

    return TritonServer(
        _settings(arguments),
        model_name=arguments.model_name,
        host=triton_host(arguments),
        metrics_host=arguments.metrics_host,
        http_port=arguments.http_port,
        grpc_port=arguments.grpc_port,
        metrics_port=arguments.metrics_port,
        explicit=arguments.explicit,
        allow_apis=arguments.allow_api,
        tls=_grpc_tls(arguments),
        extra_options=arguments.tritonserver_options,
        ready_timeout_s=arguments.load_timeout,
        exit_timeout_s=arguments.exit_timeout,
        ready_url=ready_url,
        environ={name: value for name, value in os.environ.items() if name != KEYS_VARIABLE},
        on_progress=log.progress,
        on_log=log,
    )


def _grpc_tls(arguments: argparse.Namespace) -> GrpcTls | None:
    """How gRPC is encrypted, if so. Raises `LauncherError` for half of what that takes."""
    from dflash_cli.launcher.server import GrpcTls, LauncherError

    given = arguments.grpc_tls_cert, arguments.grpc_tls_key
    if all(given):
        return GrpcTls(*given, arguments.grpc_tls_client_ca)
    if any(given) or arguments.grpc_tls_client_ca:
        raise LauncherError("TLS for gRPC needs both --grpc-tls-cert and --grpc-tls-key")
    return None


def _frontend(arguments: argparse.Namespace, say: Callable[[str], None]) -> FrontendProcess | None:
    """The OpenAI front end beside the server; None where there is to be none. Raises `LauncherError`."""
    from dflash_cli.launcher.frontend import FrontendProcess
    from dflash_cli.launcher.ports import is_loopback
    from dflash_cli.launcher.server import LauncherError

    if arguments.port == 0:
        if given := protecting_options(arguments):
            raise LauncherError(
                f"{given[0]} is for the OpenAI API, which --port 0 leaves out; Triton's own ports check no keys and "
                "have no HTTPS (docs/operators.md)"
            )
        return None
    if _grpc_tls(arguments) is not None:
        raise LauncherError(
            "gRPC is encrypted, and serve cannot know for which name; add --port 0 and run the OpenAI front end with: "
            "dflash-triton openai --triton grpcs://NAME:PORT --triton-ca-cert FILE"
        )
    for option in ("http_port", "grpc_port", "metrics_port"):
        if getattr(arguments, option) == arguments.port:
            name = option.replace("_", "-")
            raise LauncherError(f"--port and --{name} are both {arguments.port}; --port is that of the OpenAI API")
    from dflash_openai.config import check_answer_options
    from dflash_openai.telemetry import check_endpoint, endpoint_of

    try:
        security = security_config(arguments, is_loopback(arguments.host))
        # What the front end would end of once the model has loaded.
        check_answer_options(arguments.tool_call_parser, arguments.reasoning_parser, arguments.chat_template)
        if endpoint := arguments.otlp_traces_endpoint or endpoint_of(os.environ):
            check_endpoint(endpoint)
    except ValueError as error:
        raise LauncherError(str(error)) from None
    names = arguments.served_model_name
    options = ["--model-name", arguments.model_name, *(["--served-model-name", *names] if names else [])]
    options += [*as_options(arguments), "--drain-timeout", str(arguments.exit_timeout)]
    environ = keys_environ(arguments, os.environ)
    return FrontendProcess(arguments.host, arguments.port, options, environ, say, security.tls, arguments.hang_timeout)


def names_model(arguments: argparse.Namespace, kind: str) -> bool:
    """Whether the options or the environment name a model. kind: `target` or `draft`."""
    from dflash_backend.config import NGRAM, environment_name

    name = f"{kind}_model"
    of_options = {"target": (arguments.model, arguments.target), "draft": (arguments.draft,)}[kind]
    given = (*of_options, dict(arguments.settings).get(name), os.environ.get(environment_name(name)))
    return any(value not in (None, "", NGRAM) for value in given)


def check_lists(arguments: argparse.Namespace) -> None:
    """Raises `LauncherError` where no model is given and an option that takes several values seems to have taken it.
    The first value of each is its own."""
    from dflash_cli.launcher.server import LauncherError

    if names_model(arguments, "target"):
        return
    for name in LISTS:
        for value in (getattr(arguments, name) or ())[1:]:
            is_address = name == "allowed_origins" and "://" in value
            if Path(value).exists() or value.endswith(".gguf") or ("/" in value and not is_address):
                raise LauncherError(
                    f"no model is given, and --{name.replace('_', '-')} has '{value}', which looks like one; put the "
                    f"model first: dflash-triton serve {value} [options]"
                )


def triton_host(arguments: argparse.Namespace) -> str:
    """The address that Triton listens on: with keys this machine alone unless it is given, since Triton checks none."""
    if arguments.triton_host is not None:
        return str(arguments.triton_host)
    has_keys = arguments.api_key or arguments.api_key_file or os.environ.get(KEYS_VARIABLE)
    return LOOPBACK if has_keys and arguments.port else str(arguments.host)


def _settings(arguments: argparse.Namespace) -> dict[str, str]:
    """The settings that the options give. Raises `ConfigError` or `LauncherError`, which name the option."""
    from dflash_backend.config import check_setting
    from dflash_cli.launcher.server import LauncherError

    settings = dict(arguments.settings)
    if arguments.model is not None and arguments.target is not None:
        raise LauncherError(f"the model is given twice: {arguments.model} and --target {arguments.target}")
    given = {
        "target_model": ("MODEL", arguments.model) if arguments.model is not None else ("--target", arguments.target),
        "draft_model": ("--draft", arguments.draft),
        "lora_modules": ("--lora-modules", _adapters(arguments.lora_modules)),
        "target_revision": ("--revision", arguments.revision),
        "draft_revision": ("--draft-revision", arguments.draft_revision),
        **{name: (f"--{name.replace('_', '-')}", getattr(arguments, name)) for name in SETTING_OPTIONS},
    }
    for name, (option, value) in given.items():
        if value is not None and name in settings:
            raise LauncherError(f"{name} is given twice: by {option} and by --set")
        if value is not None:
            check_setting(name, str(value), option)
            settings[name] = str(value)
    return settings


def _adapters(modules: list[tuple[str, str]] | None) -> str | None:
    """The setting `lora_modules`. Raises `LauncherError` for a name that is given twice."""
    from dflash_cli.launcher.server import LauncherError

    names = [name for name, _ in modules or ()]
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise LauncherError(f"the adapter {twice!r} is given twice by --lora-modules")
    return None if modules is None else json.dumps(dict(modules))


def warnings(arguments: argparse.Namespace) -> Iterator[str]:
    """What the operator must know before the first request. Raises `LauncherError` without a Triton."""
    from dflash_cli.launcher.ports import is_loopback
    from dflash_cli.launcher.triton_install import find_triton

    host = triton_host(arguments)
    public = not is_loopback(host)
    if find_triton(os.environ).is_embedded:
        yield (
            "this Triton, 2.51 inside nvidia-pytriton, is for trying out on one machine: who reaches its ports can "
            f"crash it with one request; in production use a tritonserver of {SAFE_TRITON} or newer, as "
            "docker/Dockerfile does"
        )
        if public:
            yield (
                f"WARNING: other machines reach this Triton at {host}, which has known holes that "
                "let them crash it or run code (CVE-2025-23310, -23311, -23319, -23320, -23334)"
            )
    if arguments.port == 0 and os.environ.get(KEYS_VARIABLE):
        yield f"WARNING: --port 0 leaves out the OpenAI API, and Triton checks no keys: {KEYS_VARIABLE} has no effect"
    if arguments.port == 0 and (ignored := other_options(arguments)):
        yield f"WARNING: --port 0 leaves out the OpenAI API, for which these options are: {', '.join(ignored)}"
    if arguments.explicit and "model-repository" in arguments.allow_api:
        others = f"whoever reaches {host}, and" if public else "every user of this machine, and"
        yield (
            f"WARNING: with --explicit and --allow-api model-repository, {others} any web page in a browser on this "
            "machine, can run code as the user of this server"
        )
    if public and arguments.grpc_tls_cert is not None:
        yield "TLS is for gRPC alone; HTTP and metrics are not encrypted, so let a proxy do that or keep them private"


@contextmanager
def _signals_stop(keeper: Keeper) -> Iterator[None]:
    """A signal ends the run; once the stop has begun, it makes the stop not wait. The end of a session is none for a
    server that `nohup` started."""
    numbers = [each for each in STOP_SIGNALS if each.name != "SIGHUP" or signal.getsignal(each) != signal.SIG_IGN]
    before = {number: signal.signal(number, lambda *_: keeper.signalled()) for number in numbers}
    try:
        yield
    finally:
        for number, old in before.items():
            signal.signal(number, old)


def _endpoints(server: TritonServer, openai_url: str | None) -> str:
    """What to know and lines to try, once the server is ready."""
    name = "" if server.model_name == "dflash" else f" --model-name {server.model_name}"
    grpc_url = f"grpcs://{server.grpc_url}" if server.grpc_tls else server.grpc_url
    return "\n".join(
        [
            f"ready: model {server.model_name}",
            *([] if openai_url is None else [f"  page     {openai_url}/", f"  OpenAI   {openai_url}/v1"]),
            f"  gRPC     {grpc_url}",
            f"  HTTP     http://{server.http_url}/v2/models/{server.model_name}/generate",
            f"  metrics  http://{server.metrics_url}/metrics",
            *_key_lines(server),
            "try:",
            *_tries(server, f"--url {grpc_url} --max-tokens 96 --temperature 0 --stats{name}"),
            "Ctrl-C stops the server.",
        ]
    )


def _tries(server: TritonServer, options: str) -> list[str]:
    """Two commands that get an answer: a question for the demo pair's text, a chat message for another model."""
    url = f"http://{server.http_url}/v2/models/{server.model_name}/generate"
    command, given = f"{_own_command()} generate {shlex.quote(EXAMPLE_PROMPT)}", {"text_input": EXAMPLE_PROMPT}
    if not server.serves_demo_pair:
        messages = json.dumps([{"role": "user", "content": OTHER_PROMPT}])
        command, given = f"{_own_command()} generate --chat {shlex.quote(OTHER_PROMPT)}", {"messages": messages}
    body = json.dumps({**given, "max_tokens": 96, "temperature": 0})
    return [f"  {command} {options}", f"  curl -s {url} -d {shlex.quote(body)}"]


def _key_lines(server: TritonServer) -> list[str]:
    """Where the key is that the restricted APIs ask for, and how to send it."""
    from dflash_cli.launcher.server_options import KEY_HEADER

    if not server.restricted_apis:
        return []
    apis, file = ", ".join(server.restricted_apis), server.folder / "api-key"
    lines = [f"  {apis}: need the header {KEY_HEADER} with the key in {file}"]
    if server.explicit and "model-repository" in server.restricted_apis:
        url = f"http://{server.http_url}/v2/repository/models/{server.model_name}/unload"
        key = f'"{KEY_HEADER}: $(cat {shlex.quote(str(file))})"'
        lines.append(f"  curl -s -X POST -H {key} {url}    # and .../load")
    return lines


def _own_command() -> str:
    """How to call this very program from the shell that it runs in: its name where the PATH leads to it, else its
    path."""
    script = Path(sys.executable).with_name("dflash-triton")
    on_path = shutil.which("dflash-triton")
    if on_path and Path(on_path) == script:
        return "dflash-triton"
    if not script.is_file():
        return f"{shlex.quote(sys.executable)} -m dflash_cli.main"
    inside = script.is_relative_to(Path.cwd())
    return shlex.quote(str(script.relative_to(Path.cwd()) if inside else script))
