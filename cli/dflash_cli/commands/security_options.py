"""Options of the OpenAI front end's security: keys, limits, other sites' pages and HTTPS."""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dflash_cli.commands.arguments import (
    COUNT,
    FILE,
    REPEATED,
    SECONDS,
    SECONDS_OR_0,
    add_answer_options,
    positive_float,
    positive_int,
)

if TYPE_CHECKING:
    from dflash_openai.security import SecurityConfig

KEYS_VARIABLE = "DFLASH_API_KEYS"


def add_security_options(parser: argparse.ArgumentParser) -> None:
    """Add them, as groups of their own."""
    _add_keys(parser)
    _add_requests(parser)
    _add_tls(parser)
    parser.add_argument_group("traces of the OpenAI API").add_argument(
        "--otlp-traces-endpoint",
        metavar="URL",
        help="send a span of each request there, as in http://localhost:4318/v1/traces; needs the extra 'otel'",
    )


def _add_keys(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("keys of the OpenAI API")
    add = group.add_argument
    add(
        "--api-key-file",
        **FILE,
        **REPEATED,
        help=f"keys that are let in, a line each: NAME KEY [limits] (docs/security.md); also from {KEYS_VARIABLE}",
    )
    add(
        "--api-key",
        **REPEATED,
        metavar="KEY",
        help="one more key; who is on this machine can see it, so a file is better",
    )
    limits: dict[str, Any] = {"type": positive_int, "default": 0, "metavar": "N"}
    each = "of each key that has no limit of its own, in each front end (none)"
    add("--key-requests-per-minute", help=f"requests a minute {each}", **limits)
    add("--key-prompt-tokens-per-minute", help=f"tokens of prompts a minute {each}", **limits)
    add("--key-max-concurrency", help=f"requests at the same time {each}", **limits)
    add("--open-metrics", action="store_true", help="let /metrics answer without a key")


def _add_requests(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("requests to the OpenAI API")
    add = group.add_argument
    add("--max-body-mb", type=positive_float, default=8.0, metavar="MB", help="largest body of a request (%(default)g)")
    add("--body-timeout", **SECONDS, default=60.0, help="time for a body to come (%(default)g)")
    add(
        "--write-timeout",
        **SECONDS,
        default=60.0,
        help="time after which a client that does not read its answer is given up (%(default)g)",
    )
    add(
        "--keep-alive-timeout",
        **SECONDS,
        default=75.0,
        help="time after which a connection on which no request comes is closed; longer than that of a proxy in front "
        "(%(default)g)",
    )
    add(
        "--ping-interval",
        **SECONDS_OR_0,
        default=10.0,
        help="a stream that has sent nothing for so long sends a comment, so that no proxy ends it; 0: never "
        "(%(default)g)",
    )
    add("--max-prompt-tokens", **COUNT, default=0, help="longest prompt (what the model allows)")
    add(
        "--allowed-origins",
        nargs="+",
        default=[],
        metavar="ORIGIN",
        help="sites whose pages may use the server, such as https://chat.example; *: all (none)",
    )
    add(
        "--allowed-hosts",
        nargs="+",
        metavar="NAME",
        help="names that the server answers to (any; without keys on this machine alone: localhost)",
    )
    add("--no-access-log", action="store_true", help="do not write a line about each request")


def _add_tls(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("HTTPS of the OpenAI API")
    add = group.add_argument
    add("--tls-cert", "--ssl-certfile", metavar="FILE", help="the server's certificate and the chain above it, PEM")
    add("--tls-key", "--ssl-keyfile", metavar="FILE", help="the certificate's private key, PEM in PKCS #8")
    add(
        "--tls-client-ca",
        "--ssl-ca-certs",
        metavar="FILE",
        help="let in only clients with a certificate that this authority signed, PEM",
    )


def protecting_options(arguments: argparse.Namespace) -> list[str]:
    """The options that are given and without which more clients get in, or read what others send."""
    names = ("api_key_file", "api_key", "tls_cert", "tls_key", "tls_client_ca")
    return [_option(name) for name in names if getattr(arguments, name)]


def given_options(arguments: argparse.Namespace) -> dict[str, Any]:
    """The options of the OpenAI API that are given to `serve`: those whose value is not the default."""
    parser = argparse.ArgumentParser(add_help=False)
    add_answer_options(parser)
    add_security_options(parser)
    defaults = vars(parser.parse_args([]))
    return {name: value for name, default in defaults.items() if (value := getattr(arguments, name)) != default}


def other_options(arguments: argparse.Namespace) -> list[str]:
    """Those of them that protect nothing, and the names of the model."""
    names = [*given_options(arguments), *(["served_model_name"] if arguments.served_model_name is not None else [])]
    return [option for option in map(_option, names) if option not in protecting_options(arguments)]


def security_config(
    arguments: argparse.Namespace, is_loopback: bool, environ: Mapping[str, str] = os.environ
) -> SecurityConfig:
    """What the options and the environment say. `is_loopback`: the server listens on this machine alone. Raises
    ValueError with a sentence."""
    from dflash_openai.middleware.api_keys import KeyLimits, load_keys
    from dflash_openai.middleware.browser_guard import LOOPBACK_HOSTS
    from dflash_openai.security import SecurityConfig

    keys = load_keys(arguments.api_key, arguments.api_key_file, environ.get(KEYS_VARIABLE))
    hosts = arguments.allowed_hosts
    if hosts is None and is_loopback and not keys:
        hosts = LOOPBACK_HOSTS | {arguments.host.strip("[]")}
    return SecurityConfig(
        api_keys=keys,
        key_limits=KeyLimits(
            arguments.key_requests_per_minute, arguments.key_prompt_tokens_per_minute, arguments.key_max_concurrency
        ),
        open_metrics=arguments.open_metrics,
        allowed_origins=tuple(arguments.allowed_origins),
        allowed_hosts=None if hosts is None else frozenset(name.lower() for name in hosts),
        max_body_bytes=int(arguments.max_body_mb * 2**20),
        body_timeout_s=arguments.body_timeout,
        max_prompt_tokens=arguments.max_prompt_tokens,
        write_timeout_s=arguments.write_timeout,
        keep_alive_timeout_s=arguments.keep_alive_timeout,
        access_log=not arguments.no_access_log,
        tls=_tls(arguments),
    )


def security_warnings(config: SecurityConfig, is_loopback: bool, key_files: Sequence[Path] = ()) -> Iterator[str]:
    """What the operator must know before the first request. key_files: those that the keys came from."""
    from dflash_openai.security import open_to_others

    if config.tls is not None:
        yield from config.tls.warnings()
    for path in key_files:
        yield from open_to_others(path)
    if is_loopback:
        return
    if not config.api_keys:
        yield "WARNING: other machines reach the OpenAI API without a key; --api-key-file lets in only those with one"
    elif config.tls is None:
        yield "keys travel to the OpenAI API in the clear; give --tls-cert and --tls-key, or let a proxy do HTTPS"


def _tls(arguments: argparse.Namespace) -> Any:
    from dflash_openai.security import ServerTls

    cert, key, client_ca = arguments.tls_cert, arguments.tls_key, arguments.tls_client_ca
    if cert is None and key is None and client_ca is None:
        return None
    if cert is None or key is None:
        raise ValueError("HTTPS needs both --tls-cert and --tls-key")
    return ServerTls(cert, key, client_ca)


def as_options(arguments: argparse.Namespace) -> list[str]:
    """The given options for a process that is started, without keys: the command lines of processes can be seen."""
    options: list[str] = []
    for name, value in given_options(arguments).items():
        if name == "api_key_file":
            options += [f"--api-key-file={path}" for path in value]
        elif isinstance(value, list):
            options += [] if name == "api_key" else [_option(name), *value]
        else:
            options.append(_option(name) if value is True else f"{_option(name)}={value}")
    return options


def keys_environ(arguments: argparse.Namespace, environ: Mapping[str, str]) -> dict[str, str]:
    """`environ` with the keys of the command line, for a process that is started with `as_options`."""
    lines = [f"key-{number} {key}" for number, key in enumerate(arguments.api_key, 1)]
    if environ.get(KEYS_VARIABLE):
        lines.append(environ[KEYS_VARIABLE])
    return dict(environ) | ({KEYS_VARIABLE: "\n".join(lines)} if lines else {})


def _option(name: str) -> str:
    return f"--{name.replace('_', '-')}"
