"""Questions as people ask them, made of the sentences and words of `questions.toml`: prompts for `dflash-triton train`.

    python -m demo.questions 10000 > questions.jsonl

A drafter that learns from the questions that a small target writes itself meets other ones when people ask. None of
these is among `checks/questions.jsonl`, which measures it.
"""

from __future__ import annotations

import argparse
import json
import random
import tomllib
from collections.abc import Iterator
from pathlib import Path

FILE = Path(__file__).with_suffix(".toml")
MEASURED = Path(__file__).parents[1] / "checks" / "questions.jsonl"
NUMBERS = {"n": range(2, 60), "m": range(2, 13)}


def questions(count: int, seed: int = 0, excluded: frozenset[str] = frozenset()) -> Iterator[str]:
    """Yield `count` different questions, none of them excluded: the same ones for the same seed."""
    content = tomllib.loads(FILE.read_text(encoding="utf-8"))
    words = content["words"] | {name: list(map(str, numbers)) for name, numbers in NUMBERS.items()}
    rng, seen = random.Random(seed), {question.lower() for question in excluded}
    while count:
        question = rng.choice(content["sentences"])
        for name, choices in words.items():
            while f"{{{name}}}" in question:
                question = question.replace(f"{{{name}}}", rng.choice(choices), 1)
        if question.lower() not in seen:
            seen.add(question.lower())
            count -= 1
            yield question


def measured_questions() -> frozenset[str]:
    """The questions of `checks/questions.jsonl`."""
    rows = map(json.loads, MEASURED.read_text(encoding="utf-8").splitlines())
    return frozenset(turn for row in rows for turn in row["turns"])


def main() -> None:
    """Print questions, a chat in JSON a line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("count", type=int, help="how many")
    parser.add_argument("--seed", type=int, default=0, help="(0)")
    arguments = parser.parse_args()
    for question in questions(arguments.count, arguments.seed, measured_questions()):
        print(json.dumps({"messages": [{"role": "user", "content": question}]}))


if __name__ == "__main__":
    main()
