"""What the processes of a server hold."""

from __future__ import annotations

from pathlib import Path

from dflash_cli.launcher.processes import family
from dflash_cli.launcher.server import TritonServer
from load_tests.server_state import engine_pids


def test_no_process_but_the_engine_holds_torch(server: TritonServer) -> None:
    holding = {one.pid for one in family(server.pid) if "libtorch" in Path(f"/proc/{one.pid}/maps").read_text()}
    assert holding == set(engine_pids(server.pid))
