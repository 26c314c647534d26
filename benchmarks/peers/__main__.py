"""`python -m benchmarks.peers`: this engine, vLLM's CPU build, llama.cpp's server and transformers, side by side.

Same weights, prompts, lengths and threads; each system in a process of its own, which waits while another runs. Systems
that are not installed are skipped with a sentence; benchmarks/README.md says how to install each. With `--out` each run
is written as it ends, and `--resume` goes on with a benchmark that was stopped. The exit status is 1 when a system
failed in some round, when a round had other numbers of tokens than asked for, or when this engine's drafts changed its
text in float32.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.peers import report
from benchmarks.peers.figures import Cell, Results, Sample, equal_share, fault
from benchmarks.peers.pairs import DFLASH, LONG, NGRAM, NONE, PAIRS, SHORT, Pair, find_pair, prompts
from benchmarks.peers.process import Side, SideError
from benchmarks.peers.run_log import RunLog, processor, tree
from benchmarks.peers.systems import LOAD_TIMEOUT_S, OURS, OURS_HTTP, SAMPLING, SYSTEMS, Context, System
from benchmarks.quiet import MOST_OTHERS
from dflash_backend.checkpoints import CheckpointError

# Tokens of a warm-up's answers and its prompts at most, and prompts of a run with one stream.
WARM_UP_TOKENS, WARM_UP_PROMPTS, PROMPTS_ALONE = 8, 8, 3
# Rounds of a cell that takes its time, at least.
LEAST_ROUNDS = 2
# Runs that other processes disturb are made again, so often at most.
MAX_REPEATS = 2


@dataclass(frozen=True)
class Work:
    """What one run of the program measures. max_tokens: of each answer. answer_s: of one run, at most. cell_s: a
    cell that has taken so long has no further rounds."""

    systems: tuple[str, ...]
    drafts: tuple[str, ...]
    kinds: tuple[str, ...]
    streams: tuple[int, ...]
    rounds: int
    max_tokens: int
    answer_s: float
    cell_s: float

    def num_prompts(self, streams: int) -> int:
        """Of a run."""
        return max(streams, PROMPTS_ALONE)

    def cells(self, pair: Pair, drafts: str) -> list[Cell]:
        """What is measured of a pair with such drafts."""
        return [Cell(pair.name, drafts, kind, streams) for kind in self.kinds for streams in self.streams]


class Bench:
    """Measures pair by pair. results: what was measured before, if anything. skips: sentences on what was not
    measured."""

    def __init__(self, context: Context, work: Work, log: RunLog, results: Results) -> None:
        self.results, self.skips = results, list[str]()
        self._context, self._work, self._log = context, work, log

    def measure(self, pair: Pair) -> None:
        """All cells of a pair."""
        for drafts in self._work.drafts:
            able = [name for name in self._work.systems if self._is_able(name, pair, drafts)]
            cells = {
                cell: [name for name in able if self._takes(name, cell)] for cell in self._work.cells(pair, drafts)
            }
            left = {cell: names for cell, names in cells.items() if not self._is_done(cell, names)}
            sides = self._start(pair, drafts, [name for name in able if any(name in each for each in left.values())])
            try:
                for cell, names in left.items():
                    self._cell(pair, cell, [name for name in names if name in sides], sides)
            finally:
                for side in sides.values():
                    side.close()
            self._compare(pair, drafts)

    def _is_able(self, name: str, pair: Pair, drafts: str) -> bool:
        system = SYSTEMS[name]
        if reason := system.missing(self._context, pair, drafts):
            self._skip(f"{system.title}, {pair.name}, drafts {drafts}: {reason}")
        return not reason

    def _takes(self, name: str, cell: Cell) -> bool:
        system = SYSTEMS[name]
        if cell.streams > 1 and cell.drafts in system.only_one_stream:
            self._skip(f"{system.title}, {cell}: it takes such drafts with one request at a time")
            return False
        return True

    def _num_rounds(self, cell: Cell, name: str) -> int:
        return len(self.results.samples.get(cell, {}).get(name, []))

    def _is_done(self, cell: Cell, names: list[str]) -> bool:
        """Whether each of these systems has its rounds: all, or some in a cell that has had its time."""
        done = {self._num_rounds(cell, name) for name in names}
        samples = [one for each in self.results.samples.get(cell, {}).values() for one in each if one is not None]
        had_its_time = sum(sample.seconds for sample in samples) >= self._work.cell_s
        least = min(self._work.rounds, LEAST_ROUNDS) if had_its_time else self._work.rounds
        return not done or (min(done) >= least and (len(done) == 1 or min(done) >= self._work.rounds))

    def _start(self, pair: Pair, drafts: str, names: list[str]) -> dict[str, Side]:
        sides: dict[str, Side] = {}
        for name in names:
            system = SYSTEMS[name]
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

    def _cell(self, pair: Pair, cell: Cell, takes: list[str], sides: dict[str, Side]) -> None:
        asked = prompts(pair, cell.prompts, self._work.num_prompts(cell.streams))
        takes = [name for name in takes if self._warm_up(cell, name, asked, sides)]
        number = min((self._num_rounds(cell, name) for name in takes), default=0)
        while not self._is_done(cell, takes):
            for name in takes[number % len(takes) :] + takes[: number % len(takes)]:
                if self._num_rounds(cell, name) == number:
                    self._run(cell, name, asked, sides)
            number += 1
        for name in takes:
            rates = [f"{one.tokens_per_s:.0f}" for one in self.results.samples[cell][name] if one is not None]
            _say(f"{cell}: {SYSTEMS[name].title} {', '.join(rates)} tokens/s")

    def _warm_up(self, cell: Cell, name: str, asked: list[list[int]], sides: dict[str, Side]) -> bool:
        """Let a system answer some prompts that do not count; whether it is fast enough to be measured."""
        first = asked[: min(cell.streams, WARM_UP_PROMPTS)]
        started = time.perf_counter()
        try:
            sides[name].run(first, cell.streams, WARM_UP_TOKENS)
        except SideError as error:
            self._drop(cell, name, error, sides)
            return False
        seconds = time.perf_counter() - started
        if (expected := seconds * len(asked) / len(first)) <= self._work.answer_s:
            return True
        self._skip(
            f"{SYSTEMS[name].title}, {cell}: a run would take {expected:.0f} s or more and may take "
            f"{self._work.answer_s:.0f} (--answer-timeout); {WARM_UP_TOKENS} tokens for each of {len(first)} prompts "
            f"took {seconds:.0f} s"
        )
        return False

    def _run(self, cell: Cell, name: str, asked: list[list[int]], sides: dict[str, Side]) -> None:
        before, sample = len(self.results.failures), None
        if name in sides:
            try:
                sample = self._sample(cell, sides[name], asked)
            except SideError as error:
                self._drop(cell, name, error, sides)
        if sample is not None and (wrong := fault(sample, len(asked), self._work.max_tokens)) is not None:
            self._fail(f"{SYSTEMS[name].title}, {cell}: {wrong}")
        self.results.add(cell, name, sample)
        failures = self.results.failures[before:]
        self._log.add(cell, name, self.results.versions.get(name, ""), sample, failures)

    def _sample(self, cell: Cell, side: Side, asked: list[list[int]]) -> Sample:
        """Of the runs that others disturb, the one that they disturb least."""
        sample = side.run(asked, cell.streams, self._work.max_tokens)
        for _ in range(MAX_REPEATS):
            if sample.others <= MOST_OTHERS:
                break
            again = side.run(asked, cell.streams, self._work.max_tokens)
            sample = min(sample, again, key=lambda each: each.others)
        return sample

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


def _sampling(text: str) -> dict[str, float]:
    found: dict[str, float] = {}
    for part in text.split(","):
        name, _, value = part.partition("=")
        try:
            found[name] = SAMPLING[name](value)
        except (KeyError, ValueError):
            raise argparse.ArgumentTypeError(f"'{part}' is none of {', '.join(SAMPLING)} with a number") from None
    if not found.get("temperature"):
        raise argparse.ArgumentTypeError("without a temperature above 0 the others do nothing: temperature=0.8")
    return found


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
    options.add_argument(
        "--sampling",
        type=_sampling,
        default={},
        metavar="NAME=NUMBER,...",
        help=f"of all requests: {', '.join(SAMPLING)}; greedy without it",
    )
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
    options.add_argument(
        "--answer-timeout",
        type=float,
        default=900.0,
        help="seconds for one run; a system that would need more is left out of the cell (%(default)s)",
    )
    options.add_argument(
        "--cell-minutes",
        type=float,
        default=30.0,
        help="after so long a cell has no further rounds; two it has (%(default)s)",
    )
    options.add_argument("--out", type=Path, help="where peers.md, peers.json and peers.png are written; else printed")
    options.add_argument(
        "--resume", action="store_true", help="go on with a benchmark that was stopped, whose runs are in --out"
    )
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
        cell_s=args.cell_minutes * 60,
    )


def first_results(args: argparse.Namespace, work: Work) -> tuple[RunLog, Results]:
    """Where runs are written, and those that are there already. Raises `ValueError` for those of something else."""
    log = RunLog(args.out)
    asked = {
        "max_tokens": work.max_tokens,
        "threads": args.threads,
        "drafter": args.drafter,
        "sampling": args.sampling,
        "processor": processor(),
        "tree": tree(),
    }
    if args.resume:
        return log, log.resume(asked)
    log.begin(asked)
    return log, Results()


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point."""
    options = parser()
    args = options.parse_args(argv)
    if args.drafter and len(args.pair) != 1:
        options.error("--drafter is for one pair: name it with --pair")
    if args.resume and args.out is None:
        options.error("--resume goes on with the runs in --out: name it")
    work = work_of(args)
    try:
        log, results = first_results(args, work)
    except ValueError as error:
        options.error(str(error))
    with tempfile.TemporaryDirectory() as folder:
        context = Context(args.peers.absolute(), Path(folder), args.threads, max(work.streams), args.sampling)
        bench = Bench(context, work, log, results)
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
        "sampling": args.sampling,
        "cores": os.cpu_count(),
        "processor": processor(),
        "tree": tree(),
        "command": re.sub(r" ?--((out|peers)[ =]\S+|resume)", "", " ".join(argv if argv is not None else sys.argv[1:])),
    }
    print(report.page(bench.results, bench.skips, settings))
    if args.out is not None:
        report.write(args.out, bench.results, bench.skips, json.loads(json.dumps(settings)))
    print("\n".join(bench.results.failures) or "no round failed")
    return int(bool(bench.results.failures))


if __name__ == "__main__":
    sys.exit(main())
