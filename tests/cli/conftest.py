"""The command line in this process."""

from __future__ import annotations

import io
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest

from dflash_cli.launcher import server_files
from dflash_cli.launcher.server_files import ServerFiles
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


@pytest.fixture
def files_with_envs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ServerFiles:
    """Files of a server, and in `tmp_path` environments of Triton: an earlier one, its own, one of its own that is not
    empty, and a later one."""
    monkeypatch.setattr(server_files, "PYTHON_ENV_FOLDERS", (str(tmp_path), "python_env_*"))
    (tmp_path / "python_env_earlier").mkdir()
    files = ServerFiles()
    (tmp_path / "python_env_own").mkdir()
    (tmp_path / "python_env_used").mkdir()
    (tmp_path / "python_env_used" / "package").touch()
    files.note_env_folders()
    (tmp_path / "python_env_later").mkdir()
    return files
