"""Figures that others publish for published weights, and how far below them a run counts as a defect."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from dflash_backend.evaluation import Evaluation, Question
from dflash_backend.evaluation.questions import Row

# Qwen3-8B with its b16 drafter, greedy, thinking off (arXiv 2602.06036, table 1): the mean over requests of each one's
# acceptance length.
QWEN3_8B_B16 = {"mt-bench": 4.24, "humaneval": 6.50, "gsm8k": 6.54}

# GSM8K is run in part, and a part may come out lower by this much; the tolerance of each set comes on top. Both, and
# the part of 200 rows, are those of vLLM's test_dflash_acceptance_rates.
GSM8K_SUBSET_SHARE = 0.975
TOLERANCE = 0.95
SUBSET = 200


@dataclass(frozen=True)
class SpeculatorsFigures:
    """What vLLM's test_speculators_correctness asserts of a checkpoint, on GSM8K with five examples before a question.

    acceptance_length is pooled over all requests, rates are those of the first positions.
    """

    name: str
    accuracy: float
    acceptance_length: float
    rates: tuple[float, ...]
    accuracy_tolerance: float = 0.97
    tolerance: float = 0.85


QWEN3_8B_SPECULATORS = SpeculatorsFigures(
    "nm-testing/dflash-qwen3-8b-speculators", 0.885, 3.45, (0.795, 0.611, 0.429, 0.282)
)
NUM_EXAMPLES = 5
STOP = ("Question", "Assistant:", "<|separator|>")
MAX_TOKENS = 256


def least_acceptance_length(dataset: str) -> float:
    """The acceptance length below which a run of the published pair on `dataset` counts as a defect."""
    return QWEN3_8B_B16[dataset] * (GSM8K_SUBSET_SHARE if dataset == "gsm8k" else 1.0) * TOLERANCE


def first_turns(questions: Sequence[Question]) -> list[Question]:
    """The questions without their follow-ups, as vLLM's test asks those of MT-Bench."""
    return [replace(question, follow_ups=()) for question in questions]


def defects_of_the_pair(found: Evaluation, dataset: str) -> list[str]:
    """What a run of the published pair misses of what its authors publish; empty where nothing."""
    least, mean = least_acceptance_length(dataset), found.overall.mean_acceptance_length
    if mean is not None and mean >= least:
        return []
    said = "missing" if mean is None else f"{mean:.3f}"
    return [f"{dataset}: the mean acceptance length of a request is {said}, expected at least {least:.3f}"]


def defects_of_speculators(found: Evaluation, published: SpeculatorsFigures) -> list[str]:
    """What a run of a speculators checkpoint misses; empty where nothing."""
    overall, rates = found.overall, found.overall.counts.per_position_rates
    figures = [
        ("accuracy", overall.accuracy, published.accuracy * published.accuracy_tolerance),
        ("acceptance length", overall.counts.acceptance_length, published.acceptance_length * published.tolerance),
    ] + [
        (f"acceptance rate at position {i}", rates[i] if i < len(rates) else None, rate * published.tolerance)
        for i, rate in enumerate(published.rates)
    ]
    return [
        f"{name} is {value}, expected at least {least:.3f}"
        for name, value, least in figures
        if value is None or value < least
    ]


def with_examples(examples: Sequence[Row], rows: Sequence[Row]) -> list[Question]:
    """GSM8K as text to continue, after the first examples of its training set with their solutions."""
    before = "".join(
        f"Question: {row.text('question')}\nAnswer: {row.text('answer')}\n\n" for row in examples[:NUM_EXAMPLES]
    )
    return [
        Question(
            id=f"gsm8k-{number}",
            dataset="gsm8k",
            category="gsm8k",
            prompt=f"{before}Question: {row.text('question')}\nAnswer:",
            answer=row.text("answer").rpartition("####")[2].strip(),
            max_tokens=MAX_TOKENS,
        )
        for number, row in enumerate(rows, 1)
    ]
