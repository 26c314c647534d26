"""Argument types and options that sub-commands share."""

from __future__ import annotations

import argparse


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
        action="append",
        default=[],
        help="a setting of the engine (docs/settings.md); may be repeated",
    )


def port(text: str) -> int:
    """A port number, or 0 for any free one."""
    if not text.isascii() or not text.isdigit() or int(text) > 65535:
        raise argparse.ArgumentTypeError(f"{text!r} is not a port; allowed: 1 to 65535, or 0 for any free one")
    return int(text)


def positive_int(text: str) -> int:
    """A whole number above 0."""
    if not text.isascii() or not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number above 0")
    return int(text)


def non_negative_int(text: str) -> int:
    """A whole number of at least 0."""
    if not text.isascii() or not text.isdigit():
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least 0")
    return int(text)


def positive_float(text: str) -> float:
    """A number above 0."""
    number = _float(text)
    if not 0 < number < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number above 0")
    return number


def non_negative_float(text: str) -> float:
    """A number of at least 0."""
    number = _float(text)
    if not 0 <= number < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of at least 0")
    return number


def _float(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number") from None
