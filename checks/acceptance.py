"""What a wrong layer index costs: acceptance of the demo pair as it is, and with the drafter's features taken one layer
off. Such a mistake still runs and stays lossless, so that nothing but acceptance shows it.

`python -m checks.acceptance` prints what `dflash-triton eval` does, for all three, and exits with 1 when acceptance
of the pair as it is falls below its bounds, or when a wrong layer index costs nothing or changes an answer.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

from benchmarks.progress import progress
from benchmarks.worse_drafters import shifted_drafter
from dflash_backend import LLM
from dflash_backend.evaluation import Evaluation, EvaluationError, Question, Sampling, evaluate
from dflash_backend.evaluation.datasets import DEFAULT_SETS, Source, load_questions
from dflash_backend.evaluation.engine import EngineAnswerer
from dflash_backend.evaluation.report import tables

# What the demo pair has come to, over 50 held-out questions of each set, and how far below a run may be: half a token
# of 16 fewer is a defect. The last position of a block is accepted less often than any other.
ACCEPTANCE_LENGTH = 12.94
LEAST_SHARE = 0.97
LEAST_RATE_AT_LAST = 0.3
# A layer index that is off by one costs at least so much.
MOST_WHEN_SHIFTED = 0.95


def held_out(per_set: int) -> list[Question]:
    """The first `per_set` questions of each set that `dflash-triton eval` takes by default."""
    return load_questions([Source(name) for name in DEFAULT_SETS], per_set)


def measure(llm: LLM, questions: list[Question]) -> Evaluation:
    """Greedy answers and what they cost. Raises `EvaluationError`."""
    found = evaluate(EngineAnswerer(llm), questions, Sampling(), progress("answers").step)
    if found.failure:
        raise EvaluationError(found.failure)
    return found


def texts(evaluation: Evaluation) -> list[str]:
    """The answers, in the order of the questions."""
    return [result.answers[0].text for result in evaluation.results]


def misses(found: Evaluation) -> list[str]:
    """Which bounds the pair as it is misses, in words."""
    counts = found.overall.counts
    words = []
    if counts.acceptance_length < LEAST_SHARE * ACCEPTANCE_LENGTH:
        words.append(
            f"acceptance length {counts.acceptance_length:.2f}; at least {LEAST_SHARE:.0%} of {ACCEPTANCE_LENGTH}"
        )
    last = counts.per_position_rates[-1]
    if last < LEAST_RATE_AT_LAST:
        words.append(f"the last draft position is accepted at a rate of {last:.2f}; at least {LEAST_RATE_AT_LAST}")
    return words


def misses_shifted(offset: int, found: Evaluation, shifted: Evaluation) -> list[str]:
    """What layers off by `offset` should cost and do not, in words, and whether they change an answer."""
    words = [] if texts(found) == texts(shifted) else [f"layer ids {offset:+d} change an answer"]
    share = shifted.overall.counts.acceptance_length / found.overall.counts.acceptance_length
    if share > MOST_WHEN_SHIFTED:
        words.append(
            f"layer ids {offset:+d} leave {share:.1%} of the acceptance length; at most {MOST_WHEN_SHIFTED:.0%}"
        )
    return words


def main() -> int:
    """Entry point."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--prompts", type=int, default=100, help="held-out prompts of each set (%(default)s)")
    questions = held_out(parser.parse_args().prompts)
    found = measure(LLM(adaptive_speculation=False), questions)
    print(tables(found, {"drafter": "as it is"}))
    words = misses(found)
    length = found.overall.counts.acceptance_length
    with tempfile.TemporaryDirectory() as folder:
        for offset in (-1, 1):
            llm = LLM(draft=str(shifted_drafter(offset, Path(folder))), adaptive_speculation=False)
            shifted = measure(llm, questions)
            shorter = shifted.overall.counts.acceptance_length
            print(f"acceptance length, layer ids {offset:+d}: {shorter:.3f} ({shorter / length - 1:+.1%})")
            words += misses_shifted(offset, found, shifted)
    print("\n".join(words) or "every bound holds")
    return int(bool(words))


if __name__ == "__main__":
    sys.exit(main())
