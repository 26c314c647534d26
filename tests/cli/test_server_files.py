"""What a server has outside its processes, without a server."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from dflash_cli.launcher.server_files import ServerFiles


def test_only_empty_environments_that_came_after_the_start_are_removed(
    tmp_path: Path, files_with_envs: ServerFiles
) -> None:
    files_with_envs.note_env_folders()
    files_with_envs.remove()
    assert {path.name for path in tmp_path.iterdir()} == {"python_env_earlier", "python_env_used", "python_env_later"}
    assert not files_with_envs.folder.exists()


@pytest.fixture
def files() -> Iterator[ServerFiles]:
    made = ServerFiles()
    yield made
    made.remove()


def test_requests_in_flight_are_those_of_all_models_that_have_just_said_so(files: ServerFiles) -> None:
    assert files.num_in_flight() is None, "no model has said anything"
    one, other = (files.folder / f"heartbeat.{pid}" for pid in (1, 2))
    one.write_text("0")
    assert files.num_in_flight() == 0
    other.write_text("3")
    assert files.num_in_flight() == 3
    os.utime(one, (time.time() - 60,) * 2)
    assert files.num_in_flight() is None, "one has not said so for long"
    one.unlink()
    assert files.num_in_flight() == 3
    other.write_text("")
    assert files.num_in_flight() is None, "it is being written"
