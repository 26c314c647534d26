"""Argument types and options that sub-commands share."""

from __future__ import annotations

import argparse
import json
import math
import sys
from dataclasses import fields
from pathlib import Path
from typing import Any, Self

# What a request can carry: integers of 64 bits, with or without a sign.
MAX_INT = 2**64 - 1


class ModelParser(argparse.ArgumentParser):
    """Of a command that takes a `model` first or none: the value of an option that does not exist is not taken for
    it."""

    @classmethod
    def added_to(cls, commands: Any, name: str, **options: Any) -> Self:
        """A sub-command with a parser of this class."""
        usual, commands._parser_class = commands._parser_class, cls
        try:
            parser: Self = commands.add_parser(name, **options)
        finally:
            commands._parser_class = usual
        return parser

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> tuple[Any, list[str]]:
        """As the method of `ArgumentParser`."""
        given = list(args)
        namespace, unknown = super().parse_known_args(given, namespace)
        if namespace.model in given:
            before = given[given.index(namespace.model) - 1] if given.index(namespace.model) else ""
            if before in unknown:
                unknown.insert(unknown.index(before) + 1, namespace.model)
                namespace.model = None
        return namespace, unknown


def assignment(text: str) -> tuple[str, str]:
    """`NAME=VALUE` as a pair; the value may be empty and may hold `=`."""
    name, separator, value = text.partition("=")
    if not separator or not name.strip():
        raise argparse.ArgumentTypeError(f"{text!r} is not NAME=VALUE")
    return name.strip(), value


def add_settings_option(parser: argparse.ArgumentParser) -> None:
    """Add `--set`: `settings` becomes a list of `(name, value)`."""
    parser.add_argument(
        "--set",
        dest="settings",
        metavar="NAME=VALUE",
        type=assignment,
        **REPEATED,
        help="a setting of the engine (docs/settings.md); may be repeated",
    )


def port(text: str) -> int:
    """A port number, or 0 for any free one."""
    if not text.isascii() or not text.isdigit() or int(text) > 65535:
        raise argparse.ArgumentTypeError(f"{text!r} is not a port; allowed: 1 to 65535, or 0 for any free one")
    return int(text)


def add_answer_options(parser: argparse.ArgumentParser) -> None:
    """Add those that say how requests of the OpenAI API are read and how the model writes its answers."""
    group = parser.add_argument_group("answers of the OpenAI API")
    group.add_argument(
        "--tool-call-parser",
        default="auto",
        metavar="NAME",
        help="how the model writes tool calls: hermes, llama3_json, mistral, qwen3_coder, openai (gpt-oss) or none; "
        "%(default)s follows its chat template",
    )
    group.add_argument(
        "--reasoning-parser",
        default="auto",
        metavar="NAME",
        help="how it writes what it thinks: qwen3, deepseek_r1, mistral, openai_gptoss or none; %(default)s follows "
        "its chat template",
    )
    group.add_argument(
        "--chat-template",
        metavar="FILE",
        help="chat template in place of the tokenizer's own, for models that have none, or one without tools; the "
        "Triton model's own input 'messages' keeps the tokenizer's",
    )
    group.add_argument(
        "--trust-request-chat-template",
        action="store_true",
        help="let requests bring a chat template of their own, a program that runs here; else they get 400",
    )
    group.add_argument(
        "--reject-unknown-fields",
        action="store_true",
        help="answer 400 to a request with a field that is not known; else it is ignored, and the log names it once",
    )
    group.add_argument(
        "--return-tokens-as-token-ids",
        action="store_true",
        help="write the tokens of log-probabilities as token_id:N where a request does not say how",
    )
    group.add_argument(
        "--enable-force-include-usage",
        action="store_true",
        help="end each stream of a chat or of completions with its usage, also where the request does not ask for it",
    )


def fields_of(kind: type, arguments: argparse.Namespace) -> dict[str, Any]:
    """The arguments that a dataclass has fields for, by the same names."""
    return {entry.name: getattr(arguments, entry.name) for entry in fields(kind) if entry.name in arguments}


def parameter(text: str) -> tuple[str, str]:
    """As `assignment`; names may be written with dashes, as options are."""
    name, value = assignment(text)
    return name.replace("-", "_"), value


def json_object(text: str) -> dict[str, Any]:
    """A JSON object."""
    try:
        value = json.loads(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r} is not JSON: {error}") from None
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError(f"{text!r} is no JSON object, such as '{{\"enable_thinking\": true}}'")
    return value


def header(text: str) -> tuple[str, str]:
    """`NAME: VALUE` as a pair."""
    name, separator, value = text.partition(":")
    if not separator or not name.strip():
        # Without the text itself, which may be a key.
        raise argparse.ArgumentTypeError("a header is NAME: VALUE, as in --header 'X-Team: blue'")
    return name.strip(), value.strip()


def positive_int(text: str) -> int:
    """A whole number above 0."""
    return _whole(text, "a whole number above 0", 1)


def non_negative_int(text: str) -> int:
    """A whole number of at least 0."""
    return _whole(text, "a whole number of at least 0", 0)


def whole_number(text: str) -> int:
    """A whole number, negative ones too."""
    return _whole(text, "a whole number", -MAX_INT)


def number(text: str) -> float:
    """A finite number."""
    return _float(text, "a finite number", -sys.float_info.max)


def _whole(text: str, kind: str, least: int) -> int:
    digits = text.removeprefix("-")
    if not digits.isascii() or not digits.isdigit() or int(text) < least:
        raise argparse.ArgumentTypeError(f"{text!r} is not {kind}")
    if int(text) > MAX_INT:
        raise argparse.ArgumentTypeError(f"{text!r} is too large; allowed: at most {MAX_INT}")
    return int(text)


def positive_float(text: str) -> float:
    """A number above 0."""
    return _float(text, "a number above 0", math.nextafter(0, 1))


def non_negative_float(text: str) -> float:
    """A number of at least 0."""
    return _float(text, "a number of at least 0", 0)


def _float(text: str, kind: str, least: float) -> float:
    try:
        value = float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number") from None
    if not least <= value < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} is not {kind}")
    return value


# What options have in common that take the same: how many, seconds, a file.
COUNT: dict[str, Any] = {"type": positive_int, "metavar": "N"}
COUNT_OR_0: dict[str, Any] = {"type": non_negative_int, "metavar": "N"}
NUMBER: dict[str, Any] = {"type": number, "metavar": "X"}
SECONDS: dict[str, Any] = {"type": positive_float, "metavar": "S"}
SECONDS_OR_0: dict[str, Any] = {"type": non_negative_float, "metavar": "S"}
PORT: dict[str, Any] = {"type": port, "metavar": "N"}
FILE: dict[str, Any] = {"type": Path, "metavar": "FILE"}
REPEATED: dict[str, Any] = {"action": "append", "default": []}
