"""A rank in a process of this machine that is reached over the network, and what starts it, in place of Ray."""

from __future__ import annotations

import pickle
import subprocess
import sys
from collections.abc import Sequence

from dflash_backend.engine.rank_messages import RemoteRank
from dflash_backend.engine.remote_rank import RankAddress, RemoteRankProcess

HOST = "127.0.0.1"


class ProcessLauncher:
    """As `remote_ranks.Launcher`."""

    host = HOST

    def __init__(self) -> None:
        self.processes: list[subprocess.Popen[bytes]] = []

    def open(self, num_ranks: int, engine_key: bytes) -> list[RankAddress]:
        addresses = []
        for rank in range(1, num_ranks + 1):
            command = [sys.executable, "-m", "tests.engine.rank_process", engine_key.decode(), f"machine {rank}"]
            process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
            self.processes.append(process)
        for process in self.processes:
            assert process.stdout is not None
            addresses.append(pickle.load(process.stdout))
        return addresses

    def run(self, setups: Sequence[RemoteRank]) -> None:
        for process, setup in zip(self.processes, setups, strict=True):
            assert process.stdin is not None
            pickle.dump(setup, process.stdin)
            process.stdin.flush()

    def ended(self, rank: int) -> str:
        return "" if self.processes[rank - 1].poll() is None else "its process has ended"

    def end(self) -> None:
        for process in self.processes:
            process.kill()
            process.wait()


def main() -> None:
    """A rank, until its engine is gone."""
    process = RemoteRankProcess()
    sys.stdout.buffer.write(pickle.dumps(process.open(HOST, sys.argv[2], sys.argv[1].encode())))
    sys.stdout.buffer.flush()
    process.run(pickle.load(sys.stdin.buffer))


if __name__ == "__main__":
    main()
