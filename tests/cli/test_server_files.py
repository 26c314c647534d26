"""What a server has outside its processes, without a server."""

from __future__ import annotations

from pathlib import Path

import pytest

from dflash_cli.launcher import server_files
from dflash_cli.launcher.server_files import ServerFiles


def test_only_empty_environments_that_came_after_the_start_are_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server_files, "PYTHON_ENV_FOLDERS", (str(tmp_path), "python_env_*"))
    (tmp_path / "python_env_earlier").mkdir()
    files = ServerFiles()
    (tmp_path / "python_env_own").mkdir()
    (tmp_path / "python_env_used").mkdir()
    (tmp_path / "python_env_used" / "package").touch()
    files.note_env_folders()
    (tmp_path / "python_env_later").mkdir()
    files.note_env_folders()
    files.remove()
    assert {path.name for path in tmp_path.iterdir()} == {"python_env_earlier", "python_env_used", "python_env_later"}
    assert not files.folder.exists()
