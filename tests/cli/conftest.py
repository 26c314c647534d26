"""The command line in this process."""

from __future__ import annotations

import io
import sys
from collections.abc import Callable
from typing import NamedTuple

import pytest

from dflash_cli.main import main
from tests.client.conftest import cancel_log, toy, unused_address  # noqa: F401


class Ended(NamedTuple):
    """How a command ended, and what it wrote."""

    status: int
    out: str
    err: str


Cli = Callable[..., Ended]


@pytest.fixture
def cli(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Cli:
    """Runs `dflash-triton` with some arguments; `typed` is its standard input, as from a pipe."""

    def run(*argv: object, typed: bytes = b"") -> Ended:
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(typed)))
        capsys.readouterr()  # what fixtures wrote
        try:
            status = main([str(argument) for argument in argv])
        except SystemExit as ended:
            status = int(ended.code or 0)
        return Ended(status, *capsys.readouterr())

    return run
