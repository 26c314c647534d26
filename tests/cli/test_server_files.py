"""What a server has outside its processes, without a server."""

from __future__ import annotations

from pathlib import Path

from dflash_cli.launcher.server_files import ServerFiles


def test_only_empty_environments_that_came_after_the_start_are_removed(
    tmp_path: Path, files_with_envs: ServerFiles
) -> None:
    files_with_envs.note_env_folders()
    files_with_envs.remove()
    assert {path.name for path in tmp_path.iterdir()} == {"python_env_earlier", "python_env_used", "python_env_later"}
    assert not files_with_envs.folder.exists()
