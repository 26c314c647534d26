"""Prompt lookup, alone and beside a drafter, against no drafter, with one stream, on prompts of your choice.

`python -m benchmarks.ngram --prompts FILE` takes a line of JSON with a `prompt` for each, and with `--category` those
whose `category` it is; `benchmarks/quoting.jsonl` has some in the template of SmolLM2. By default they are held-out
texts that the demo pair copies, quotes and edits. Each round runs every prompt in every way, in turn, so that other
work of the machine slows all alike; the table has medians over rounds. The outputs must be equal, else the exit status
is 1.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.progress import progress
from dflash_backend import LLM
from dflash_backend.config import NGRAM
from dflash_backend.spec_stats import SpecDecodingStats
from load_tests.markdown import markdown_table
from load_tests.prompts import held_out_dir, load_prompts


@dataclass
class Way:
    """An engine and what came of it: seconds of each round, and of its last round tokens and counts."""

    llm: LLM
    seconds: list[float] = field(default_factory=list)
    outputs: list[list[int]] = field(default_factory=list)
    counts: SpecDecodingStats = field(default_factory=SpecDecodingStats)

    def round(self, prompts: Sequence[list[int]], max_tokens: int, ignore_eos: bool) -> None:
        """Answer each prompt by itself, greedily."""
        before, started = self.llm.stats().spec_decoding, time.perf_counter()
        outputs = [
            self.llm.generate([prompt], max_tokens=max_tokens, temperature=0, ignore_eos=ignore_eos)[0]
            for prompt in prompts
        ]
        self.seconds.append(time.perf_counter() - started)
        self.outputs = [output.token_ids for output in outputs]
        self.counts = self.llm.stats().spec_decoding - before

    @property
    def tokens_per_s(self) -> float:
        """Output tokens a second, in the median round."""
        return sum(map(len, self.outputs)) / statistics.median(self.seconds)

    def speedups(self, other: Way) -> list[float]:
        """How much faster this was than `other`, round by round."""
        return [theirs / own for own, theirs in zip(self.seconds, other.seconds, strict=True)]


def read_prompts(path: Path | None, category: str | None, count: int) -> list[str]:
    """The texts of at most `count` prompts of a file, or of the held-out ones, of a category."""
    if path is None:
        return [row.prompt for row in load_prompts(count, (category or "copy",))]
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    return [row["prompt"] for row in rows if category is None or row.get("category") == category][:count]


def compare(ways: dict[str, Way], prompts: Sequence[list[int]], args: argparse.Namespace) -> list[list[str]]:
    """The rows of the table, the first way being what the others are compared with."""
    for way in ways.values():
        way.round(prompts[:1], 16, args.ignore_eos)  # warm-up
        way.seconds.clear()
    so_far = progress("rounds")
    for done in range(args.rounds):
        so_far.step(done, args.rounds)
        for way in ways.values():
            way.round(prompts, args.max_tokens, args.ignore_eos)
    alone = next(iter(ways.values()))
    rows = []
    for name, way in ways.items():
        ratios = sorted(way.speedups(alone))
        length = f"{way.counts.acceptance_length:.2f}" if way.counts.num_drafts else "-"
        spread = f"{statistics.median(ratios):.2f} ({ratios[0]:.2f} to {ratios[-1]:.2f})"
        rows.append([name, f"{way.tokens_per_s:.0f}", spread, length])
    return rows


def main() -> int:
    """Entry point."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--target", help="directory or hub id of the target; without it the demo target")
    parser.add_argument("--prompts", type=Path, metavar="FILE", help="prompts, a line of JSON each")
    held_out = sorted(path.stem for path in held_out_dir().glob("*.jsonl"))
    parser.add_argument("--category", help=f"of the prompts; of the held-out ones {', '.join(held_out)} (copy)")
    parser.add_argument("--count", type=int, default=40, help="prompts at most (%(default)s)")
    parser.add_argument("--max-tokens", type=int, default=384, help="of each answer (%(default)s)")
    parser.add_argument("--ignore-eos", action="store_true", help="let each answer have all its tokens")
    parser.add_argument("--rounds", type=int, default=5, help="%(default)s")
    parser.add_argument("--k", type=int, nargs="+", default=[5], help="num_speculative_tokens (%(default)s)")
    parser.add_argument(
        "--draft", help="also with this drafter, and with n-grams beside it; without --target the demo's"
    )
    parser.add_argument("--beside", type=int, nargs="*", default=[4], help="prompt_lookup_min beside it (%(default)s)")
    parser.add_argument("--dtype", default="auto", help="%(default)s")
    args = parser.parse_args()
    is_known = args.prompts is not None or args.category in (None, *held_out)
    texts = read_prompts(args.prompts, args.category, args.count) if is_known else []
    if not texts:
        parser.error(f"no prompt has the category {args.category!r}")
    fixed = {"target": args.target, "max_num_seqs": 1, "enable_prefix_caching": False, "dtype": args.dtype}
    ways = {"no drafter": Way(LLM(draft="", **fixed))}
    ways |= {f"n-grams, k = {k}": Way(LLM(draft=NGRAM, num_speculative_tokens=k, **fixed)) for k in args.k}
    if args.draft is not None or args.target is None:
        ways["drafter"] = Way(LLM(draft=args.draft, **fixed))
        for least in args.beside:
            ways[f"drafter, n-grams of {least} beside"] = Way(LLM(draft=args.draft, prompt_lookup_min=least, **fixed))
    tokenizer = ways["no drafter"].llm.tokenizer
    prompts = [tokenizer.encode(text) for text in texts]
    rows = compare(ways, prompts, args)
    print(markdown_table(["", "tokens/s", "against no drafter", "acceptance length"], rows, "lrrr"))
    answers = defaultdict(set)
    for way in ways.values():
        for index, tokens in enumerate(way.outputs):
            answers[index].add(tuple(tokens))
    differ = sum(len(each) > 1 for each in answers.values())
    print(f"{len(prompts)} prompts, {differ} of them with answers that differ")
    return int(differ > 0)


if __name__ == "__main__":
    sys.exit(main())
