"""The options of `dflash-triton serve`."""

from __future__ import annotations

import argparse
import os
from typing import Any

from dflash_cli.commands.arguments import (
    FILE,
    PORT,
    REPEATED,
    SECONDS_OR_0,
    ModelParser,
    add_answer_options,
    add_settings_option,
    assignment,
    non_negative_int,
)
from dflash_cli.commands.security_options import add_security_options
from dflash_cli.commands.version import package_version

DESCRIPTION = """\
Run a Triton server with a DFlash model, and OpenAI's API beside it, in the foreground; Ctrl-C stops both. Without a
model it serves the demo pair that comes with the project. It listens on this machine alone unless --host says
otherwise, and a server that dies or hangs is started anew. Options after -- go to tritonserver as they are."""


# For an image, whose users change the command line.
HOST_ENV = "DFLASH_SERVE_HOST"
LOOPBACK = "127.0.0.1"


# Settings that have an option of their own, for hands that know other servers.
SETTING_OPTIONS = ("max_model_len", "max_num_seqs", "dtype")


class _ServeParser(ModelParser):
    """Takes what follows `--` apart before anything else is read, since it is not ours."""

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> tuple[Any, list[str]]:
        """As the method of `ArgumentParser`; `tritonserver_options` becomes a list."""
        given = list(args)
        own, extra = given, []
        if "--" in given:
            at = given.index("--")
            own, extra = given[:at], given[at + 1 :]
        namespace, unknown = super().parse_known_args(own, namespace)
        namespace.tritonserver_options = extra
        return namespace, unknown


def add_serve_parser(commands: Any) -> argparse.ArgumentParser:
    """Add the sub-command with its options."""
    parser = _ServeParser.added_to(
        commands,
        "serve",
        help="run a Triton server with a DFlash model",
        description=DESCRIPTION,
        usage="dflash-triton serve [MODEL] [options] [-- options of tritonserver]",
        allow_abbrev=False,
    )
    _add_model(parser)
    add_answer_options(parser)
    _add_network(parser)
    _add_life_cycle(parser)
    add_security_options(parser)
    parser.add_argument("--version", action="version", version=f"dflash-triton {package_version()}")
    parser.add_argument("--verbose", action="store_true", help="show the whole log of the server")
    return parser


def _add_model(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("model")
    group.add_argument(
        "model",
        nargs="?",
        metavar="MODEL",
        help="target model, or a drafter that names its target: directory, hub id, file in GGUF or smollm2",
    )
    group.add_argument("--target", metavar="DIR|ID", help="the same, as an option")
    group.add_argument(
        "--draft",
        metavar="DIR|ID|ngram",
        help="DFlash drafter: directory, hub id, file in GGUF or smollm2; ngram: prompt lookup, without one; '' for no "
        "speculation",
    )
    group.add_argument(
        "--lora-modules",
        nargs="+",
        type=assignment,
        metavar="NAME=DIR|ID",
        help="LoRA adapters of the target, which requests choose by their names (docs/lora.md)",
    )
    group.add_argument("--revision", metavar="REV", help="branch, tag or commit of a target that comes from the hub")
    group.add_argument("--draft-revision", metavar="REV", help="the same of the drafter")
    group.add_argument("--max-model-len", metavar="N", help="longest prompt and answer together, in tokens")
    group.add_argument("--max-num-seqs", metavar="N", help="requests that run at the same time")
    group.add_argument("--dtype", metavar="TYPE", help="number type of weights and KV cache (docs/settings.md)")
    add_settings_option(parser)
    group.add_argument(
        "--model-name", default="dflash", metavar="NAME", help="Triton's name of the model (%(default)s)"
    )
    group.add_argument(
        "--served-model-name",
        nargs="+",
        metavar="NAME",
        help="what clients of the OpenAI API may call it (MODEL, and Triton's name)",
    )


def _add_network(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("network")
    group.add_argument(
        "--host",
        default=os.environ.get(HOST_ENV) or LOOPBACK,
        help=f"address to listen on; {HOST_ENV} in the environment, else {LOOPBACK}, which only this machine reaches; "
        "0.0.0.0: every address it has",
    )
    group.add_argument(
        "--triton-host",
        metavar="HOST",
        help=f"address for Triton's own ports (that of --host; with API keys, which Triton does not check, {LOOPBACK})",
    )
    group.add_argument(
        "--metrics-host",
        metavar="HOST",
        help="address for the metrics port (that of Triton's other ports); it tells what others have asked before",
    )
    group.add_argument(
        "--port", "--openai-port", **PORT, default=9000, help="of the OpenAI API (%(default)s); 0: without that API"
    )
    group.add_argument("--http-port", **PORT, default=8000, help="%(default)s; 0: any free one")
    group.add_argument("--grpc-port", **PORT, default=8001, help="%(default)s; 0: any free one")
    group.add_argument("--metrics-port", **PORT, default=8002, help="%(default)s; 0: any free one")
    group.add_argument("--grpc-tls-cert", **FILE, help="encrypt gRPC: the server's certificate, PEM")
    group.add_argument("--grpc-tls-key", **FILE, help="the certificate's private key, PEM")
    group.add_argument(
        "--grpc-tls-client-ca",
        **FILE,
        help="let in only gRPC clients with a certificate that this authority signed, PEM",
    )
    group.add_argument(
        "--explicit",
        action="store_true",
        help="let clients unload and load models through Triton's repository API, which lets them run code as the user "
        "of this server; they need the key, unless --allow-api model-repository is given",
    )
    group.add_argument(
        "--allow-api",
        **REPEATED,
        metavar="NAME",
        help="an API that needs no key: shared-memory, trace, logging or model-repository; may be repeated",
    )


def _add_life_cycle(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("life cycle")
    group.add_argument(
        "--load-timeout",
        **SECONDS_OR_0,
        default=1800.0,
        help="give up a load that has said nothing new for so many seconds (%(default)g; 0: never)",
    )
    group.add_argument(
        "--exit-timeout",
        type=non_negative_int,
        default=30,
        metavar="S",
        help="seconds that requests in flight have to finish at a stop (%(default)s); a second Ctrl-C does not wait",
    )
    group.add_argument(
        "--hang-timeout",
        **SECONDS_OR_0,
        default=30.0,
        help="seconds without a sign of life after which the server hangs and is replaced (%(default)g; 0: never)",
    )
    group.add_argument(
        "--no-restart",
        action="store_true",
        help="end with status 1 when the server dies or hangs, for an orchestrator that starts it anew",
    )
