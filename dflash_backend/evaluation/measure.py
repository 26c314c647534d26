"""A whole measurement: settings and a model in, figures and report files out."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dflash_backend.evaluation import report
from dflash_backend.evaluation.datasets import DEFAULT_SETS, load_questions, parse_source
from dflash_backend.evaluation.errors import InvalidSetting
from dflash_backend.evaluation.run import Answerer, Evaluation, Progress, Sampling, evaluate

# A model that answers, and what to say about it in the report.
Model = tuple[Answerer, dict[str, Any]]


@dataclass(frozen=True, slots=True)
class EvaluationSettings:
    """What to ask, and how answers are drawn. `datasets` are names or files, without any the embedded sets; `limit`
    takes the first rows of each, in the order of the DFlash authors' benchmark with `shuffle`."""

    datasets: Sequence[str]
    limit: int | None
    shuffle: bool
    sampling: Sampling


def measure(
    settings: EvaluationSettings, model: AbstractContextManager[Model], progress: Progress, directory: Path | None
) -> tuple[Evaluation, dict[str, Any]]:
    """Have all questions answered by `model`, which is entered once they are read. Returns the results and what the
    report says about the measurement; with `directory` the report's files are written there.

    Raises `InvalidSetting`, `EvaluationError` and what entering `model` raises.
    """
    try:
        sources = [parse_source(text) for text in settings.datasets or DEFAULT_SETS]
    except ValueError as error:
        raise InvalidSetting(str(error)) from None
    questions = load_questions(sources, settings.limit, settings.shuffle)
    if directory is not None:
        report.prepare(directory)
    sampling = settings.sampling
    with model as (answerer, about):
        evaluation = evaluate(answerer, questions, sampling, progress)
    about |= {
        "datasets": [group.name for group in evaluation.datasets],
        "limit": settings.limit,
        "shuffled": settings.shuffle,
        "max_tokens": sorted({sampling.max_tokens or question.max_tokens for question in questions}),
        "temperature": sampling.temperature,
        "seed": sampling.seed,
    }
    if directory is not None:
        report.write(directory, evaluation, about)
    return evaluation, about
