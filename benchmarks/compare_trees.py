"""Servers of several checkouts side by side, measured in turn: tokens/s of each over those of the first,
the median time to the first token and the 99th percentile between tokens.

`python -m benchmarks.compare_trees before=/src/old after=.` starts `dflash-triton serve` of each checkout (`make setup`
must have run there) with the demo pair of this one, or with `--target`, and streams the same prompts to one server
after the other, in short slices, so that a machine's drift meets all alike. Settings follow the folder, as in
`fixed=.:adaptive_speculation=false`. Prompts of later slices are those of the first ones again, so that long ones
(`--prompt-tokens`) are computed each time only with `enable_prefix_caching=false`.
Exits with 1 when a round's tokens differ between servers, or when a median ratio is below `--at-least`.
"""

from __future__ import annotations

import argparse
import contextlib
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from random import Random

import httpx
import psutil

from benchmarks.measure import Measurement
from benchmarks.progress import progress
from benchmarks.run import through_triton
from dflash_backend.config import asset_path
from dflash_cli.launcher.ports import settle_ports
from load_tests.markdown import markdown_table
from load_tests.prompts import load_prompts, passage

HOST = "127.0.0.1"
START_TIMEOUT_S = 300.0
STOP_TIMEOUT_S = 60.0
WARM_UP_ROUNDS = 3
PORTS = ("--http-port", "--grpc-port", "--metrics-port")


@dataclass
class Tree:
    """A checkout under a name, with settings of its server; and what was measured of it, a number for each round."""

    name: str
    folder: Path
    settings: list[str]
    grpc_url: str = ""
    process: psutil.Process | None = None
    tokens_per_s: list[float] = field(default_factory=list)
    cpu_s_per_token: list[float] = field(default_factory=list)
    first_token_s: list[float] = field(default_factory=list)
    between_s: list[float] = field(default_factory=list)

    @property
    def program(self) -> Path:
        """Its `dflash-triton`."""
        return self.folder / ".venv" / "bin" / "dflash-triton"


def parse_tree(text: str) -> Tree:
    """`NAME=FOLDER[:SETTING=VALUE,...]`. Raises ArgumentTypeError that says what is wrong."""
    name, equals, rest = text.partition("=")
    folder, _, settings = rest.partition(":")
    if not (name and equals and folder):
        raise argparse.ArgumentTypeError(f"{text!r} is not NAME=FOLDER[:SETTING=VALUE,...]")
    tree = Tree(name, Path(folder).resolve(), [each for each in settings.split(",") if each])
    if not tree.program.exists():
        raise argparse.ArgumentTypeError(f"{tree.program} does not exist: run `make setup` in {folder}")
    return tree


def serve_command(tree: Tree, models: list[str], ports: dict[str, int], takes_openai_port: bool) -> list[str]:
    """Its `serve`, Triton alone, with these models: the target, and the drafter where there is one."""
    command = [str(tree.program), "serve"]
    for flag, model in zip(("--target", "--draft"), models, strict=False):
        command += [flag, model]
    command += ["--host", HOST]
    for flag, port in ports.items():
        command += [flag, str(port)]
    if takes_openai_port:
        command += ["--openai-port", "0"]
    for setting in tree.settings:
        command += ["--set", setting]
    return command


@contextlib.contextmanager
def serving(tree: Tree, models: list[str], logs: Path) -> Iterator[None]:
    """The server of a tree, up and ready. Raises RuntimeError with the end of its log when it does not come up."""
    asked = subprocess.run([tree.program, "serve", "--help"], capture_output=True, text=True, timeout=60, check=False)
    ports = settle_ports(HOST, dict.fromkeys(PORTS, 0))
    log = logs / f"{tree.name}.log"
    with log.open("w") as out:
        command = serve_command(tree, models, ports, takes_openai_port="--openai-port" in asked.stdout)
        process = psutil.Popen(command, cwd=tree.folder, stdout=out, stderr=subprocess.STDOUT, start_new_session=True)
    try:
        deadline = time.monotonic() + START_TIMEOUT_S
        while not _is_ready(f"http://{HOST}:{ports['--http-port']}"):
            if process.poll() is not None or time.monotonic() > deadline:
                tail = "\n".join(log.read_text(errors="replace").splitlines()[-15:])
                raise RuntimeError(f"the server of {tree.name} did not come up:\n{tail}")
            time.sleep(0.2)
        tree.grpc_url, tree.process = f"{HOST}:{ports['--grpc-port']}", process
        yield
    finally:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.terminate()
        try:
            process.wait(STOP_TIMEOUT_S)
        except psutil.TimeoutExpired:
            process.kill()


def _is_ready(url: str) -> bool:
    try:
        return httpx.get(f"{url}/v2/health/ready", timeout=2).status_code == 200
    except httpx.HTTPError:
        return False


def cpu_seconds(process: psutil.Process) -> float:
    """Processor seconds of a process and of all that it started and that still run."""
    total = 0.0
    for each in (process, *process.children(recursive=True)):
        with contextlib.suppress(psutil.NoSuchProcess):
            times = each.cpu_times()
            total += times.user + times.system
    return total


def measure(tree: Tree, prompts: list[list[int]], streams: int, max_tokens: int) -> Measurement:
    """One slice through a tree's server; its figures are added to the tree's."""
    assert tree.process is not None
    before = cpu_seconds(tree.process)
    run = through_triton(tree.grpc_url, prompts, streams, max_tokens)
    tree.tokens_per_s.append(run.tokens_per_s)
    tree.first_token_s.append(run.first_token_p50_s or 0.0)
    tree.between_s += run.between_s
    tree.cpu_s_per_token.append((cpu_seconds(tree.process) - before) / run.num_tokens)
    return run


def quartiles(values: list[float]) -> tuple[float, float, float]:
    """The median, and the borders of the middle half."""
    low, median, high = statistics.quantiles(values, n=4)
    return median, low, high


def ratios(tree: Tree, first: Tree) -> list[float]:
    """Tokens/s of a tree over those of the first, round by round."""
    return [mine / other for mine, other in zip(tree.tokens_per_s, first.tokens_per_s, strict=True)]


def report(trees: list[Tree]) -> str:
    """The table."""
    rows = []
    for tree in trees:
        pairs = zip(trees[0].cpu_s_per_token, tree.cpu_s_per_token, strict=True)
        by_wall = "{:.3f} ({:.3f} to {:.3f})".format(*quartiles(ratios(tree, trees[0])))
        by_cpu = "{:.3f} ({:.3f} to {:.3f})".format(*quartiles([first / mine for first, mine in pairs]))
        latencies = zip(tree.first_token_s, trees[0].first_token_s, strict=True)
        by_first = "{:.3f} ({:.3f} to {:.3f})".format(*quartiles([mine / first for mine, first in latencies]))
        first_ms = f"{1e3 * statistics.median(tree.first_token_s):.1f} ms"
        between = f"{1e3 * statistics.quantiles(tree.between_s, n=100)[-1]:.1f} ms" if len(tree.between_s) > 1 else "-"
        tokens = f"{statistics.median(tree.tokens_per_s):.0f}"
        rows.append([tree.name, tokens, by_wall, by_cpu, first_ms, by_first, between])
    over = f"over {trees[0].name} (middle half)"
    header = ["", "tokens/s", over, "by the server's processor time", "first token", f"its time {over}"]
    header.append("p99 between tokens")
    return markdown_table(header, rows, "lrrrrrr")


def run_rounds(trees: list[Tree], prompts: list[list[int]], args: argparse.Namespace) -> int:
    """All rounds; returns in how many of them the servers' tokens differ."""
    count = max(args.prompts, 2 * args.streams)
    for tree in trees:
        for _ in range(WARM_UP_ROUNDS):
            measure(tree, prompts[:count], args.streams, args.max_tokens)
        for figures in (tree.tokens_per_s, tree.cpu_s_per_token, tree.first_token_s, tree.between_s):
            figures.clear()
    different, so_far = 0, progress("rounds")
    for done in range(args.rounds):
        so_far.step(done, args.rounds)
        part = [prompts[(done * count + index) % len(prompts)] for index in range(count)]
        turn = done % len(trees)
        runs = [measure(each, part, args.streams, args.max_tokens) for each in trees[turn:] + trees[:turn]]
        different += any(run.outputs != runs[0].outputs for run in runs)
    return different


def read_prompts(target: str, num_tokens: int) -> list[list[int]]:
    """96 prompts as a target's token ids: held-out questions, or passages of this many tokens."""
    from dflash_backend.config import EngineConfig
    from dflash_backend.drafters.resolve import resolve_target_dir
    from dflash_backend.text.tokenizer import Tokenizer

    tokenizer = Tokenizer.load(resolve_target_dir(EngineConfig.from_values({"target_model": target})))
    if not num_tokens:
        return [tokenizer.encode(row.prompt) for row in load_prompts(96)]
    return [tokenizer.encode(passage(2 * num_tokens, Random(seed)))[:num_tokens] for seed in range(96)]


def main() -> int:
    """Entry point."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("trees", nargs="+", type=parse_tree, metavar="NAME=FOLDER[:SETTING=VALUE,...]")
    parser.add_argument("--target", help="of all servers, with no drafter but --draft; by default this demo pair")
    parser.add_argument("--draft", help="beside --target")
    parser.add_argument("--prompt-tokens", type=int, default=0, metavar="N", help="of each prompt, about; 0: questions")
    parser.add_argument("--streams", type=int, default=1, help="%(default)s")
    parser.add_argument("--rounds", type=int, default=21, help="%(default)s, at least 2")
    parser.add_argument("--prompts", type=int, default=8, help="of a slice, at least two for each stream (%(default)s)")
    parser.add_argument("--max-tokens", type=int, default=128, help="of each answer (%(default)s)")
    parser.add_argument("--at-least", type=float, default=0.0, metavar="RATIO", help="for each median ratio")
    args = parser.parse_args()
    if args.rounds < 2:
        parser.error("--rounds must be 2 or more, for a middle half")
    trees: list[Tree] = args.trees
    pair = asset_path("demo", "pair")
    models = [str(pair / "target"), str(pair / "draft")]
    if args.target:
        models = [args.target, *([args.draft] if args.draft else [])]
    prompts = read_prompts(models[0], args.prompt_tokens)
    with tempfile.TemporaryDirectory() as logs, contextlib.ExitStack() as stack:
        for tree in trees:
            stack.enter_context(serving(tree, models, Path(logs)))
        different = run_rounds(trees, prompts, args)
    print(report(trees))
    print(f"rounds with different tokens: {different} of {args.rounds}")
    slow = [tree.name for tree in trees if statistics.median(ratios(tree, trees[0])) < args.at_least]
    if slow:
        print(f"below {args.at_least}: {', '.join(slow)}")
    return int(bool(different or slow))


if __name__ == "__main__":
    sys.exit(main())
