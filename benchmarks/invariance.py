"""What `batch_invariant` costs: the demo pair with and without it, in turn, so that other work slows both alike.

Each round answers the same held-out prompts greedily, without the setting and with it, for each number of requests at
a time. The ratio is that of their times, the median of the rounds. Beside it: how many answers of each engine are not
its own with one request at a time. With the setting that must be none, else the exit status is 1.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from benchmarks.measure import run_engine
from benchmarks.progress import progress
from dflash_backend import LLM
from load_tests.markdown import markdown_table
from load_tests.prompts import load_prompts

HEADINGS = [
    "dtype",
    "k",
    "requests at a time",
    "tokens/s without",
    "with",
    "times as long",
    "differing without",
    "with",
]


@dataclass
class Way:
    """An engine, with or without the setting, and what came of it by number of requests at a time: seconds of each
    round, and the last round's answers."""

    llm: LLM
    seconds: dict[int, list[float]] = field(default_factory=dict)
    answers: dict[int, dict[int, list[int]]] = field(default_factory=dict)

    def round(self, prompts: list[list[int]], streams: int, max_tokens: int) -> None:
        """Answer every prompt."""
        result = run_engine("engine", self.llm, prompts, streams, max_tokens)
        self.seconds.setdefault(streams, []).append(result.seconds)
        self.answers[streams] = result.outputs

    def tokens_per_s(self, streams: int) -> float:
        """In the median round."""
        return sum(map(len, self.answers[streams].values())) / statistics.median(self.seconds[streams])

    def num_differing(self, streams: int, other: int) -> int:
        """Answers that are not those with `other` requests at a time."""
        return sum(answer != self.answers[other][index] for index, answer in self.answers[streams].items())


def compare(dtype: str, k: int, args: argparse.Namespace) -> tuple[list[list[str]], int]:
    """The rows of one pair of engines, and the number of answers that differ with the setting."""
    fixed: dict[str, Any] = {"dtype": dtype, "num_speculative_tokens": k, "enable_prefix_caching": False}
    ways = [Way(LLM(batch_invariant=wanted, **fixed)) for wanted in (False, True)]
    tokenizer = ways[0].llm.tokenizer
    prompts = [tokenizer.encode(row.prompt) for row in load_prompts(args.count)]
    for way in ways:
        run_engine("warm-up", way.llm, prompts[:4], 4, 16)
    so_far = progress(f"{dtype}, k = {k}")
    for done in range(args.rounds):
        so_far.step(done, args.rounds)
        for streams in args.streams:
            for way in ways:
                way.round(prompts, streams, args.max_tokens)
    rows, num_differing = [], 0
    for streams in args.streams:
        ratios = [on / off for off, on in zip(*(way.seconds[streams] for way in ways), strict=True)]
        differing = [way.num_differing(streams, args.streams[0]) for way in ways]
        num_differing += differing[1]
        speeds = [f"{way.tokens_per_s(streams):.0f}" for way in ways]
        rows.append([dtype, str(k), str(streams), *speeds, f"{statistics.median(ratios):.2f}", *map(str, differing)])
    return rows, num_differing


def main(arguments: Sequence[str] | None = None) -> int:
    """Entry point."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 8, 32], help="requests at a time (%(default)s)")
    parser.add_argument("--k", type=int, nargs="+", default=[0, 15], help="num_speculative_tokens (%(default)s)")
    parser.add_argument("--dtypes", nargs="+", default=["float32", "bfloat16"], help="%(default)s")
    parser.add_argument("--count", type=int, default=48, help="prompts (%(default)s)")
    parser.add_argument("--max-tokens", type=int, default=128, help="of each answer (%(default)s)")
    parser.add_argument("--rounds", type=int, default=3, help="%(default)s")
    args = parser.parse_args(arguments)
    rows, num_differing = [], 0
    for dtype in args.dtypes:
        for k in args.k:
            more, differing = compare(dtype, k, args)
            rows += more
            num_differing += differing
    print(markdown_table(HEADINGS, rows, "lrrrrrrr"))
    return int(num_differing > 0)


if __name__ == "__main__":
    sys.exit(main())
