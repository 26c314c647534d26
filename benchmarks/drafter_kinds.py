"""Drafters of several kinds for one target, side by side: acceptance by set of questions, and throughput.

`make demo-model DRAFTER=KIND` trains drafters for the demo target. Then

    python -m benchmarks.drafter_kinds DFlash=demo/pair-dflash/draft DSpark=demo/pair-dspark/draft

prints two tables. Acceptance is with a fixed number of drafts, each drafter's own and the smallest among them.
Throughput is with the server's own choice (`adaptive_speculation`), the median of rounds in which every drafter has its
turn, so that other work of the machine slows all alike. The outputs must be equal, else the exit status is 1.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.measure import Measurement, run_engine
from benchmarks.progress import progress
from dflash_backend import LLM
from dflash_backend.drafters.registry import read_draft
from load_tests.markdown import markdown_table
from load_tests.prompts import CATEGORIES, load_prompts

NONE = "no drafter"
# Requests in flight while acceptance is counted, which does not depend on it.
STREAMS = 8

Answers = dict[int, set[tuple[int, ...]]]


class Drafters:
    """The drafters to compare, by name, and the answers that the target gave with any of them."""

    def __init__(self, target: str | None, drafters: dict[str, Path], max_tokens: int) -> None:
        self.target = target
        self.drafters = drafters
        self.max_tokens = max_tokens
        self.differing = 0

    def engine(self, draft: str, **settings: Any) -> LLM:
        """An engine for the target and this drafter."""
        return LLM(target=self.target, draft=draft, enable_prefix_caching=False, **settings)

    def note(self, answers: Answers) -> None:
        """Count the prompts whose answers differ."""
        self.differing += sum(len(each) > 1 for each in answers.values())

    def acceptance(self, count: int) -> str:
        """Acceptance length of each drafter by set, `count` questions of each."""
        specs = {name: read_draft(path) for name, path in self.drafters.items()}
        least = min(spec.num_speculative_tokens for spec in specs.values())
        answers: dict[str, Answers] = {category: defaultdict(set) for category in CATEGORIES}
        rows = []
        for name, path in self.drafters.items():
            for k in sorted({least, specs[name].num_speculative_tokens}, reverse=True):
                row = [name, str(k)]
                llm = self.engine(str(path), num_speculative_tokens=k, adaptive_speculation=False)
                for category in CATEGORIES:
                    found = self._run(name, llm, (category,), count, STREAMS, answers[category])
                    row.append(f"{found.acceptance_length:.2f}")
                rows.append(row)
        for each in answers.values():
            self.note(each)
        return markdown_table(["drafter", "drafts", *CATEGORIES], rows, "lrrrr")

    def throughput(self, count: int, streams: Sequence[int], rounds: int) -> str:
        """Tokens a second of each drafter and without one, `count` questions of all sets together."""
        engines = {NONE: self.engine("")} | {name: self.engine(str(path)) for name, path in self.drafters.items()}
        speeds: dict[tuple[str, int], list[float]] = defaultdict(list)
        answers: Answers = defaultdict(set)
        for llm in engines.values():
            self._run("warm-up", llm, CATEGORIES, len(CATEGORIES), STREAMS, defaultdict(set))
        so_far = progress("rounds")
        for done in range(rounds):
            so_far.step(done, rounds)
            for number in streams:
                for name, llm in engines.items():
                    found = self._run(f"{name} {done}", llm, CATEGORIES, count, number, answers)
                    speeds[name, number].append(found.tokens_per_s)
        self.note(answers)
        rows = []
        for name in engines:
            row = [name]
            for number in streams:
                ratios = [own / other for own, other in zip(speeds[name, number], speeds[NONE, number], strict=True)]
                row.append(f"{statistics.median(speeds[name, number]):,.0f} ({statistics.median(ratios):.2f})")
            rows.append(row)
        return markdown_table(["drafter", *(f"{number} streams" for number in streams)], rows, "l" + "r" * len(streams))

    def _run(
        self, name: str, llm: LLM, categories: Sequence[str], count: int, streams: int, answers: Answers
    ) -> Measurement:
        prompts = [llm.tokenizer.encode(row.prompt) for row in load_prompts(count, tuple(categories))]
        found = run_engine(name, llm, prompts, streams, self.max_tokens)
        for index, tokens in found.outputs.items():
            answers[index].add(tuple(tokens))
        return found


def _named(text: str) -> tuple[str, Path]:
    name, _, path = text.partition("=")
    if not path:
        raise argparse.ArgumentTypeError(f"'{text}' is not NAME=DIR")
    return name, Path(path)


def main(arguments: Sequence[str] | None = None) -> int:
    """Entry point."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("drafters", type=_named, nargs="+", metavar="NAME=DIR", help="drafters of the target")
    parser.add_argument("--target", help="directory or hub id of the target; without it the demo target")
    parser.add_argument("--count", type=int, default=60, help="questions of a set, and of a round (%(default)s)")
    parser.add_argument("--max-tokens", type=int, default=256, help="of each answer (%(default)s)")
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 8, 32], help="requests in flight (1 8 32)")
    parser.add_argument("--rounds", type=int, default=5, help="%(default)s")
    args = parser.parse_args(arguments)
    drafters = Drafters(args.target, dict(args.drafters), args.max_tokens)
    print("Acceptance length\n\n" + drafters.acceptance(args.count), flush=True)
    print("\nTokens a second (over no drafter)\n\n" + drafters.throughput(args.count, args.streams, args.rounds))
    print(f"\n{drafters.differing} prompts with answers that differ")
    return int(drafters.differing > 0)


if __name__ == "__main__":
    sys.exit(main())
