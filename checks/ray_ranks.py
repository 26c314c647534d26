"""A target that two nodes of a Ray cluster share, served through Triton: its answers, and the loss of a node.

`python -m checks.ray_ranks` starts two nodes on this machine, the other one in a network namespace where that is
allowed (`--loopback`: at another loopback address), compares the answers with those of one process, and in each round
removes the other node with 16 streams in flight and brings it back: killed with all its processes, or with `--unplug`
without a network, or with `--stop` with all its processes stopped, which both show only once it has said nothing for a
while; the bound is the same. In the last round it kills the engine, with
which its ranks have to end. It prints a line for each round as `checks.chaos` does, what clients were told, and what is
left over. The exit status is 0 when every bound was kept.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import tempfile
import threading
from dataclasses import dataclass
from typing import Literal

from checks import chaos
from checks.ray_nodes import RayNodes
from dflash_cli.launcher.processes import Process, family, gone
from dflash_cli.launcher.server import TritonServer
from dflash_client import DFlashClient
from load_tests.prompts import load_prompts

SETTINGS = chaos.SETTINGS | {"tensor_parallel_size": "2", "distributed_executor": "ray"}
# How long a node is away: an engine that starts meanwhile has to wait for it.
AWAY_S = 6.0
# How long Ray takes to start a node, and to find it, and how much longer ranks take to start on it.
NODE_START_S = 10.0
END_S = 5.0
Loss = Literal["remove", "unplug", "stop"]
MAX_TOKENS = 48


@dataclass(frozen=True)
class LostNode(chaos.Victim):
    """The other node, which comes back after a while. how: what happens to it."""

    nodes: RayNodes | None = None
    how: Loss = "remove"

    @property
    def name(self) -> str:
        return "node"

    def end(self, server_pid: int) -> None:
        assert self.nodes is not None
        getattr(self.nodes, self.how)()
        threading.Timer(AWAY_S, self.nodes.add).start()


def lost_node(nodes: RayNodes, how: Loss) -> LostNode:
    """What a round ends, with its bounds."""
    return LostNode(0, signal.SIGKILL, 0.0, AWAY_S + NODE_START_S + chaos.RANKS_START_S, nodes, how)


def answers(server: TritonServer, prompts: list[str]) -> list[str]:
    """Greedy ones, one after the other."""
    with DFlashClient(server.http_url, "http", timeout_s=chaos.GIVE_UP_S) as client:
        return [client.generate(prompt, temperature=0, max_tokens=MAX_TOKENS).text for prompt in prompts]


def ranks_there(nodes: RayNodes) -> set[Process]:
    """The processes of ranks on the other node."""
    found = set()
    for process in nodes.processes_there():
        with open(f"/proc/{process.pid}/cmdline", "rb") as file:
            if b"_RayRank" in file.read():
                found.add(process)
    return found


def server_of(settings: dict[str, str], directory: str, nodes: RayNodes) -> TritonServer:
    """A server on free ports, that is not started."""
    environ = os.environ | nodes.environ | {"TMPDIR": directory}
    return TritonServer(settings, host="127.0.0.1", http_port=0, grpc_port=0, metrics_port=0, environ=environ)


def check(nodes: RayNodes, rounds: int, how: Loss, num_prompts: int, directory: str) -> bool:
    """Whether everything was kept; prints it."""
    prompts = [row.prompt for row in load_prompts(num_prompts)]
    with server_of(dict(chaos.SETTINGS), directory, nodes) as alone:
        expected = answers(alone, prompts)
    count = chaos.LeftoverCount(directory)
    members: set[Process] = set()
    with (
        server_of(SETTINGS, directory, nodes) as server,
        DFlashClient(server.http_url, "http", timeout_s=chaos.GIVE_UP_S) as client,
    ):
        where = "a namespace of its own" if nodes.network.separate else "another loopback address"
        print(f"rank 0 at {nodes.network.here}, rank 1 at {nodes.network.there}, {where}")
        kept = len(ranks_there(nodes)) == 1
        found = answers(server, prompts)
        equal = sum(map(str.__eq__, found, expected))
        print(f"answers equal to those of one process: {equal} of {len(prompts)}", flush=True)
        kept = kept and equal == len(prompts)
        answer = chaos.right_answer(client)
        print(chaos.HEADING)
        for number in range(1, rounds + 1):
            members |= family(server.pid) | ranks_there(nodes)
            result = chaos.play(server, client, answer, lost_node(nodes, how))
            kept = kept and result.kept and all(nodes.network.there in message for message in result.messages)
            print(chaos.line(number, result), *sorted(result.messages), sep="\n  ", flush=True)
        members |= ranks_there(nodes)
        result = chaos.play(server, client, answer, chaos.Victim(starts_later_s=chaos.RANKS_START_S))
        print(chaos.line(rounds + 1, result), flush=True)
        kept = kept and result.kept and len(ranks_there(nodes)) == 1
        members |= family(server.pid) | ranks_there(nodes)
    ended = gone(members, END_S)
    left = count.since(members)
    print(f"left over: {len(left.processes)} processes, {len(left.files)} files" + (f": {left}" if left else ""))
    return kept and ended and not left


def nodes_of(loopback: bool, unplug: bool) -> RayNodes:
    """The nodes in two namespaces where that is allowed."""
    if loopback:
        return RayNodes()
    nodes = RayNodes(separate=True)
    try:
        nodes.network.open()
    except OSError as error:
        if unplug:
            raise SystemExit(f"--unplug needs a network namespace, which may not be made here ({error})") from None
        return RayNodes()
    nodes.network.close()
    return nodes


def main() -> int:
    """Entry point."""
    parser = argparse.ArgumentParser(description="Share a target between two Ray nodes, and remove one under load.")
    parser.add_argument("--rounds", type=int, default=3, help="%(default)s")
    parser.add_argument("--prompts", type=int, default=40, help="answers that are compared (%(default)s)")
    parser.add_argument("--unplug", action="store_true", help="cut the node off in place of killing it")
    parser.add_argument("--loopback", action="store_true", help="no network namespace")
    parser.add_argument("--stop", action="store_true", help="stop its processes (SIGSTOP) in place of killing them")
    options = parser.parse_args()
    if options.unplug and options.stop:
        parser.error("one of --unplug and --stop")
    how: Loss = "unplug" if options.unplug else "stop" if options.stop else "remove"
    with tempfile.TemporaryDirectory(prefix="ray-check-") as directory:
        tempfile.tempdir = directory
        with nodes_of(options.loopback, options.unplug) as nodes:
            return 0 if check(nodes, options.rounds, how, options.prompts, directory) else 1


if __name__ == "__main__":
    sys.exit(main())
