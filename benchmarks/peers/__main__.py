"""`python -m benchmarks.peers`: this engine, vLLM's CPU build, llama.cpp's server and transformers, side by side.

Same weights, prompts, lengths and threads; each system in a process of its own, which waits while another runs. Systems
that are not installed are skipped with a sentence; benchmarks/README.md says how to install each. The exit status is 1
when a system failed in some round, when a round had other numbers of tokens than asked for, or when this engine's
drafts changed its text in float32.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.peers import report
from benchmarks.peers.figures import Cell, Results, equal_share, fault
from benchmarks.peers.pairs import DFLASH, LONG, NGRAM, NONE, PAIRS, SHORT, Pair, find_pair, prompts
from benchmarks.peers.process import Side, SideError
from benchmarks.peers.systems import LOAD_TIMEOUT_S, OURS, OURS_HTTP, SYSTEMS, Context, System
from benchmarks.quiet import MOST_OTHERS
from dflash_backend.checkpoints import CheckpointError

# Tokens of a warm-up's answers, and prompts of a run with one stream.
WARM_UP_TOKENS, PROMPTS_ALONE = 8, 3
# Runs that other processes disturb are made again, so often at most.
MAX_REPEATS = 2


@dataclass(frozen=True)
class Work:
    """What one run of the program measures. max_tokens: of each answer."""

    systems: tuple[str, ...]
    drafts: tuple[str, ...]
    kinds: tuple[str, ...]
    streams: tuple[int, ...]
    rounds: int
    max_tokens: int
    answer_s: float

    def num_prompts(self, streams: int) -> int:
        """Of a run."""
        return max(streams, PROMPTS_ALONE)


class Bench:
    """Measures pair by pair. skips: sentences on what was not measured."""

    def __init__(self, context: Context, work: Work) -> None:
        self.results, self.skips = Results(), list[str]()
        self._context, self._work = context, work

    def measure(self, pair: Pair) -> None:
        """All cells of a pair."""
        for drafts in self._work.drafts:
            sides = self._start(pair, drafts)
            try:
                for kind in self._work.kinds:
                    for streams in self._work.streams:
                        self._cell(pair, Cell(pair.name, drafts, kind, streams), sides)
            finally:
                for side in sides.values():
                    side.close()
            self._compare(pair, drafts)

    def _start(self, pair: Pair, drafts: str) -> dict[str, Side]:
        sides: dict[str, Side] = {}
        for name in self._work.systems:
            system = SYSTEMS[name]
            if reason := system.missing(self._context, pair, drafts):
                self._skip(f"{system.title}, {pair.name}, drafts {drafts}: {reason}")
                continue
            _say(f"{pair.name}, drafts {drafts}: {system.title} loads")
            side = None
            try:
                side = start(system, self._context, pair, drafts, self._work.answer_s)
                version = side.ready(LOAD_TIMEOUT_S + 10)
            except (SideError, RuntimeError, OSError) as error:
                self._fail(f"{system.title}, {pair.name}, drafts {drafts}, did not start: {error}")
                if side is not None:
                    side.close()
                continue
            self.results.versions[name] = version
            sides[name] = side
        return sides

    def _cell(self, pair: Pair, cell: Cell, sides: dict[str, Side]) -> None:
        asked = prompts(pair, cell.prompts, self._work.num_prompts(cell.streams))
        takes = [name for name in sides if self._takes(name, cell)]
        for name in list(takes):
            try:
                sides[name].run(asked[: cell.streams], cell.streams, WARM_UP_TOKENS)
            except SideError as error:
                self._drop(cell, name, error, sides)
                takes.remove(name)
        for number in range(self._work.rounds):
            order = takes[number % len(takes) :] + takes[: number % len(takes)] if takes else []
            for name in order:
                if name in sides:
                    self._run(cell, name, asked, sides)
                else:
                    self.results.add(cell, name, None)
        for name in takes:
            rates = [f"{one.tokens_per_s:.0f}" for one in self.results.samples[cell][name] if one is not None]
            _say(f"{cell}: {SYSTEMS[name].title} {', '.join(rates)} tokens/s")

    def _takes(self, name: str, cell: Cell) -> bool:
        system = SYSTEMS[name]
        if cell.streams > 1 and cell.drafts in system.only_one_stream:
            self._skip(f"{system.title}, {cell}: it takes such drafts with one request at a time")
            return False
        return True

    def _run(self, cell: Cell, name: str, asked: list[list[int]], sides: dict[str, Side]) -> None:
        try:
            sample = sides[name].run(asked, cell.streams, self._work.max_tokens)
            for _ in range(MAX_REPEATS):
                if sample.others <= MOST_OTHERS:
                    break
                again = sides[name].run(asked, cell.streams, self._work.max_tokens)
                sample = min(sample, again, key=lambda each: each.others)
        except SideError as error:
            self._drop(cell, name, error, sides)
            self.results.add(cell, name, None)
            return
        self.results.add(cell, name, sample)
        if (wrong := fault(sample, len(asked), self._work.max_tokens)) is not None:
            self._fail(f"{SYSTEMS[name].title}, {cell}: {wrong}")

    def _drop(self, cell: Cell, name: str, error: SideError, sides: dict[str, Side]) -> None:
        self._fail(f"{SYSTEMS[name].title}, {cell}: {error}")
        sides.pop(name).close()

    def _compare(self, pair: Pair, drafts: str) -> None:
        """In float32 this engine's drafts leave its text as it is."""
        for cell, systems in self.results.samples.items():
            if (cell.pair, cell.drafts) != (pair.name, drafts) or pair.dtype != "float32" or drafts == NONE:
                continue
            plain = self.results.samples.get(report.reference(cell), {}).get(OURS, [])
            for name in (OURS, OURS_HTTP):
                share = equal_share(systems.get(name, []), plain)
                if share is not None and share < 1:
                    self._fail(f"{SYSTEMS[name].title}, {cell}: {share:.0%} of the answers are as without drafts")

    def _skip(self, sentence: str) -> None:
        self.skips.append(sentence)
        _say(f"skipped: {sentence}")

    def _fail(self, sentence: str) -> None:
        self.results.failures.append(sentence)
        _say(f"FAILED: {sentence}")


def start(system: System, context: Context, pair: Pair, drafts: str, answer_s: float) -> Side:
    """The process of a system."""
    environ = {"OMP_NUM_THREADS": str(context.threads)} | dict(system.environ(context))
    log = context.folder / f"{system.name}-side.log"
    return Side(system.command(context, pair, drafts), environ, log, answer_s)


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _names(choices: Sequence[str]) -> Any:
    def parse(text: str) -> tuple[str, ...]:
        names = tuple(text.split(","))
        for name in names:
            if name not in choices:
                raise argparse.ArgumentTypeError(f"'{name}' is none of {', '.join(choices)}")
        return names

    return parse


def _numbers(text: str) -> tuple[int, ...]:
    numbers = tuple(map(int, text.split(",")))
    if min(numbers) < 1:
        raise argparse.ArgumentTypeError(f"'{text}' has a number below 1")
    return numbers


def parser() -> argparse.ArgumentParser:
    """The options."""
    options = argparse.ArgumentParser(prog="python -m benchmarks.peers", description=__doc__)
    everything = {
        "--systems": (tuple(SYSTEMS), "systems"),
        "--pair": (PAIRS, "pairs"),
        "--drafts": ((NONE, NGRAM, DFLASH), "kinds of speculation"),
        "--prompts": ((SHORT, LONG), "kinds of prompts"),
    }
    for name, (choices, what) in everything.items():
        options.add_argument(
            name, type=_names(choices), default=choices, help=f"{what}, separated by commas: {','.join(choices)}"
        )
    options.add_argument("--streams", type=_numbers, help="requests in flight, separated by commas (1,8,32)")
    options.add_argument("--rounds", type=int, help="5; with --quick 2")
    options.add_argument("--max-tokens", type=int, help="of each answer (96; with --quick 32)")
    options.add_argument("--quick", action="store_true", help="1 and 8 streams, short prompts, in under ten minutes")
    options.add_argument("--drafter", default="", metavar="DIR", help="another drafter; with one pair")
    options.add_argument(
        "--threads", type=int, default=len(os.sched_getaffinity(0)), help="of each system (%(default)s)"
    )
    options.add_argument(
        "--peers",
        type=Path,
        default=Path(os.environ.get("PEERS_DIR", ".peers")),
        help="where vLLM and llama.cpp are installed (%(default)s, or PEERS_DIR; benchmarks/README.md)",
    )
    options.add_argument("--answer-timeout", type=float, default=900.0, help="seconds for one run (%(default)s)")
    options.add_argument("--out", type=Path, help="where peers.md, peers.json and peers.png are written; else printed")
    return options


def work_of(args: argparse.Namespace) -> Work:
    """What the options ask for."""
    kinds = tuple(args.prompts)
    if args.quick and kinds == (SHORT, LONG):
        kinds = (SHORT,)
    return Work(
        systems=args.systems,
        drafts=args.drafts,
        kinds=kinds,
        streams=args.streams or ((1, 8) if args.quick else (1, 8, 32)),
        rounds=args.rounds or (2 if args.quick else 5),
        max_tokens=args.max_tokens or (32 if args.quick else 96),
        answer_s=args.answer_timeout,
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point."""
    options = parser()
    args = options.parse_args(argv)
    if args.drafter and len(args.pair) != 1:
        options.error("--drafter is for one pair: name it with --pair")
    work = work_of(args)
    with tempfile.TemporaryDirectory() as folder:
        context = Context(args.peers.absolute(), Path(folder), args.threads, max(work.streams))
        bench = Bench(context, work)
        for name in args.pair:
            try:
                pair = find_pair(name, args.drafter)
            except CheckpointError as error:
                bench.skips.append(f"{name}: {error}")
                continue
            bench.measure(pair)
    settings = {
        "rounds": work.rounds,
        "threads": args.threads,
        "max_tokens": work.max_tokens,
        "cores": os.cpu_count(),
        "command": re.sub(r" ?--(out|peers)[ =]\S+", "", " ".join(argv if argv is not None else sys.argv[1:])),
    }
    print(report.page(bench.results, bench.skips, settings))
    if args.out is not None:
        report.write(args.out, bench.results, bench.skips, json.loads(json.dumps(settings)))
    print("\n".join(bench.results.failures) or "no round failed")
    return int(bool(bench.results.failures))


if __name__ == "__main__":
    sys.exit(main())
