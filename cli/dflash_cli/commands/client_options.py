"""Options of the sub-commands that talk to a running server: which one, how to reach it, and sampling parameters."""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dflash_cli.commands.arguments import (
    COUNT,
    COUNT_OR_0,
    NUMBER,
    REPEATED,
    SECONDS,
    header,
    non_negative_float,
    number,
    parameter,
    whole_number,
)
from dflash_client.sampling import NULL, Sampling

if TYPE_CHECKING:
    from dflash_client import DFlashClient

INPUTS = ("prompt", "messages")
# Parameters that are text: what is given is taken as it is, also where it reads as a number.
TEXTS = ("stop", "cache_salt", "lora_name", "tenant")
API_KEY_VARIABLE = "DFLASH_API_KEY"
URL_VARIABLE = "DFLASH_URL"


def add_connection_options(
    parser: argparse.ArgumentParser, url_needed: bool = True, timeout: float = 300, retries: bool = True
) -> None:
    """Add those that say which server, and how to reach it. Where no URL is needed, `url` may be None. retries: whether
    a request may be sent again."""
    group = parser.add_argument_group("the server")
    add = group.add_argument
    usual = f" (%(default)s, and the protocol's usual port; also from {URL_VARIABLE})" if url_needed else ""
    add(
        "--url",
        default=os.environ.get(URL_VARIABLE) or "localhost" if url_needed else None,
        metavar="URL",
        help=f"HOST:PORT, or a URL: grpc://, http://, grpcs://, https://{usual}",
    )
    add("--protocol", choices=("grpc", "http"), default="grpc", help="where the URL has none (%(default)s)")
    add("--model-name", default="dflash", metavar="NAME", help="the model (%(default)s)")
    add("--timeout", **SECONDS, default=timeout, help="seconds for an answer (%(default)g)")
    parser.set_defaults(retries=0)
    if retries:
        add(
            "--retries",
            **COUNT_OR_0,
            default=0,
            help="how often to send a request again that the server did not begin (%(default)s)",
        )
    add("--api-key", metavar="KEY", help=f"sent as 'Authorization: Bearer KEY'; also from {API_KEY_VARIABLE}")
    add(
        "--header",
        dest="headers",
        metavar="'NAME: VALUE'",
        type=header,
        **REPEATED,
        help="sent with every request, over gRPC as metadata; may be repeated",
    )
    add("--ca-cert", metavar="FILE", help="with TLS: PEM file of the authorities to trust")
    add("--client-cert", metavar="FILE", help="with TLS: PEM file of our certificate")
    add("--client-key", metavar="FILE", help="with TLS: PEM file of its key")


def add_client_options(parser: argparse.ArgumentParser, max_tokens: int | None = None) -> None:
    """Add all of them. `max_tokens` is the default; None leaves it to the server."""
    add_connection_options(parser)
    group = parser.add_argument_group("sampling (docs/clients.md has all parameters)")
    add = group.add_argument
    add("--max-tokens", **COUNT, default=max_tokens, help=f"most tokens to generate ({max_tokens or 'server: 16'})")
    add("--temperature", type=non_negative_float, metavar="T", help="0 is greedy (server: 1.0)")
    add("--top-p", type=number, metavar="P", help="keep the likeliest tokens that together have this probability")
    add("--top-k", type=whole_number, metavar="N", help="keep this many of the likeliest tokens")
    add("--min-p", type=number, metavar="P", help="keep tokens at least this likely, as a share of the likeliest")
    add("--seed", type=whole_number, metavar="N", help="same seed, same request: same text")
    add("--stop", action="append", metavar="TEXT", help="text that ends the answer; may be repeated")
    add("--n", **COUNT, help="completions (1)")
    add("--min-tokens", **COUNT_OR_0, help="tokens before anything may end the answer")
    add("--presence-penalty", **NUMBER, help="-2 to 2")
    add("--frequency-penalty", **NUMBER, help="-2 to 2")
    add("--repetition-penalty", **NUMBER, help="above 0; 1 is none")
    add("--logprobs", **COUNT_OR_0, help="log-probabilities, with this many of the likeliest")
    add("--num-speculative-tokens", **COUNT_OR_0, help="draft tokens in a step; 0: none")
    formats = group.add_mutually_exclusive_group()
    formats.add_argument("--json-schema", metavar="FILE", help="answer in JSON by this schema")
    formats.add_argument("--regex", metavar="REGEX", help="answer with a text of this regular expression")
    formats.add_argument("--choice", action="append", metavar="TEXT", help="answer with one of these; to be repeated")
    formats.add_argument("--grammar", metavar="FILE", help="answer with a text of this Lark grammar")
    add(
        "--thinking",
        dest="enable_thinking",
        action=argparse.BooleanOptionalAction,
        default=None,
        help="whether a chat template that knows this lets the model think first (the template's default)",
    )
    add(
        "--set-param",
        dest="parameters",
        metavar="NAME=VALUE",
        type=parameter,
        **REPEATED,
        help="any sampling parameter, such as logit_bias='{\"17\": -100}'; may be repeated",
    )


def client_of(arguments: argparse.Namespace) -> DFlashClient:
    """The client that the options describe. Raises `ValueError`."""
    from dflash_client import DFlashClient  # gRPC and httpx take a second, which a server is not to wait for

    return DFlashClient(
        arguments.url,
        arguments.protocol,
        arguments.model_name,
        arguments.timeout,
        arguments.retries,
        headers=dict(arguments.headers),
        api_key=arguments.api_key or os.environ.get(API_KEY_VARIABLE) or None,
        ca_cert=arguments.ca_cert,
        client_cert=arguments.client_cert,
        client_key=arguments.client_key,
    )


def sampling_of(arguments: argparse.Namespace) -> dict[str, Any]:
    """The sampling parameters; a value of `--set-param` that reads as JSON is sent as such, null too, any other as
    text. Raises `ValueError`."""
    given = {name: value for name in Sampling.__annotations__ if (value := getattr(arguments, name, None)) is not None}
    sampling = {name: value for name, value in given.items() if name != "timeout"}  # that is how long we wait
    sampling |= _structured_outputs(arguments)
    for name, text in arguments.parameters:
        if name in INPUTS:
            raise ValueError(f"'{name}' is not a sampling parameter")
        sampling[name] = _value(name, text)
    return sampling


def _structured_outputs(arguments: argparse.Namespace) -> dict[str, Any]:
    """The grammar that an option names, as a sampling parameter. Raises `ValueError` for a file that cannot be read."""
    if arguments.json_schema is not None:
        try:
            grammar: dict[str, Any] = {"json": json.loads(text_of(arguments.json_schema))}
        except json.JSONDecodeError as error:
            raise ValueError(f"{arguments.json_schema} is not JSON: {error}") from None
    elif arguments.grammar is not None:
        grammar = {"grammar": text_of(arguments.grammar)}
    else:
        grammar = {
            name: getattr(arguments, name) for name in ("regex", "choice") if getattr(arguments, name) is not None
        }
    return {"structured_outputs": grammar} if grammar else {}


def text_of(path: str | Path, option: str = "") -> str:
    """The text of a file. Raises `ValueError`, which begins with the `option` that names it."""
    try:
        return Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"{option} {path} cannot be read: {error}".lstrip()) from None


def _value(name: str, text: str) -> Any:
    try:
        value = json.loads(text)
    except ValueError:
        return text
    if name in TEXTS and not isinstance(value, str | list):
        return text
    return NULL if value is None else value
