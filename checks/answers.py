"""What a demo pair answers to fresh held-out problems of each kind, and how many tokens a step yields.

`python -m checks.answers [--pair demo/pair] [--problems 200] [--temperature 0]` prints a line for each category, with
its families.
"""

from __future__ import annotations

import argparse
import json
from collections import defaultdict
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from random import Random

from demo.data import CATEGORIES, problems, render_chat
from demo.evaluate import stated_answer
from demo.problems import Problem
from dflash_backend import LLM
from dflash_backend.config import asset_path
from dflash_backend.spec_stats import SpecDecodingStats

MAX_TOKENS = 220


def fresh(category: str, count: int) -> list[Problem]:
    """Distinct problems of the held-out side, most of them in no file."""
    found: dict[str, Problem] = {}
    stream = problems(Random(f"answers/{category}"), category, held_out=True)
    while len(found) < count:
        problem = next(stream)
        found.setdefault(problem.content, problem)
    return list(islice(found.values(), count))


def is_right(problem: Problem, text: str) -> bool:
    """Whether the text is the reference, of a word problem whether it states the answer."""
    return text == problem.reference if problem.answer is None else stated_answer(text) == problem.answer


def family(problem: Problem) -> str:
    """The kind of problem within its category; a tool call's is `call`."""
    name, _, rest = problem.content.partition("/")
    return "call" if rest.startswith("<tool_call>") else rest.partition("/")[0] if name == problem.category else name


def lines(pair: Path, count: int, temperature: float, categories: list[str]) -> Iterator[str]:
    """Ask everything and say what came, a line for each category."""
    llm = LLM(target=str(pair / "target"), draft=str(pair / "draft"), max_num_seqs=16)
    for category in categories:
        asked = fresh(category, count)
        prompts = [render_chat(problem.messages, add_generation_prompt=True) for problem in asked]
        sampling = [{"max_tokens": MAX_TOKENS, "temperature": temperature, "seed": i} for i in range(count)]
        outputs = llm.generate(prompts, sampling)
        right: dict[str, list[bool]] = defaultdict(list)
        for problem, output in zip(asked, outputs, strict=True):
            right[family(problem)].append(is_right(problem, output.text))
        stats = SpecDecodingStats.total(output.stats.spec_decoding for output in outputs if output.stats is not None)
        families = {name: f"{sum(of)}/{len(of)}" for name, of in sorted(right.items())}
        share = sum(map(sum, right.values())) / count
        length = stats.acceptance_length
        yield f"{category:6} {share:6.1%} right, acceptance length {length:5.2f}  {json.dumps(families)}"


def main() -> None:
    """Entry point."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pair", type=Path, default=Path(asset_path("demo", "pair")), help="%(default)s")
    parser.add_argument("--problems", type=int, default=200, help="of each category (%(default)s)")
    parser.add_argument("--temperature", type=float, default=0.0, help="%(default)s")
    parser.add_argument("--category", action="append", choices=list(CATEGORIES), help="all without it")
    given = parser.parse_args()
    for line in lines(given.pair, given.problems, given.temperature, given.category or list(CATEGORIES)):
        print(line, flush=True)


if __name__ == "__main__":
    main()
