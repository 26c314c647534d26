"""Two models on the same questions, side by side: what `eval --against` shows."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from dflash_backend.evaluation.report import as_dict, groups, markdown_table, tables, title, write_files
from dflash_backend.evaluation.run import Evaluation, QuestionResult

FIRST, AGAINST = "first", "against"
PERPLEXITY, TEXT_TOKENS, TEXT_PIECE = "perplexity", "text_tokens", "text_piece"
Id = tuple[str, str, int]


@dataclass(frozen=True)
class Measured:
    """A model's results, what the report says about the measurement (with `perplexity`, `text_tokens` and
    `text_piece` where a text was scored), and its speed over all that it answered; None where nothing took time."""

    evaluation: Evaluation
    about: dict[str, Any]
    tokens_per_s: float | None

    @classmethod
    def of(cls, evaluation: Evaluation, about: dict[str, Any]) -> Measured:
        """With the speed of these results."""
        seconds = evaluation.seconds
        return cls(evaluation, about, evaluation.overall.num_tokens / seconds if seconds else None)


@dataclass(frozen=True)
class Comparison:
    """Two models: what both answered in full. `first` is the one that the other is held against."""

    first: Measured
    against: Measured

    @classmethod
    def of(cls, first: Measured, against: Measured) -> Comparison:
        """Both over the questions that both answered."""
        ids = [_ids(each.evaluation.results) for each in (first, against)]
        both = set(ids[0]) & set(ids[1])

        def common(measured: Measured, own: Sequence[Id]) -> Measured:
            found = measured.evaluation
            results = tuple(result for result, each in zip(found.results, own, strict=True) if each in both)
            left_out = found.num_left_out + len(found.results) - len(results)
            return replace(measured, evaluation=replace(found, results=results, num_left_out=left_out))

        return cls(common(first, ids[0]), common(against, ids[1]))

    @property
    def num_same(self) -> int:
        """Questions whose answers have the same text."""
        pairs = zip(self.first.evaluation.results, self.against.evaluation.results, strict=True)
        return sum([a.text for a in one.answers] == [a.text for a in other.answers] for one, other in pairs)

    @property
    def figures(self) -> dict[str, tuple[float | None, float | None]]:
        """Each figure of both models; None where there is none, and for perplexities of different tokens or of pieces
        of different lengths."""
        found = [_figures(measured) for measured in (self.first, self.against)]
        if any(self._differs(name) for name in (TEXT_TOKENS, TEXT_PIECE)):
            found[1][PERPLEXITY] = None
        return {name: (found[0][name], found[1][name]) for name in found[0]}

    def as_dict(self) -> dict[str, Any]:
        """JSON data."""
        return {
            **{name: as_dict(measured.evaluation, measured.about) for name, measured in self._named},
            "comparison": {
                **{name: dict(zip((FIRST, AGAINST), pair, strict=True)) for name, pair in self.figures.items()},
                "num_same_answers": self.num_same,
            },
        }

    def text(self) -> str:
        """Markdown: the figures of all questions, then accuracy and acceptance by group, and what was run."""
        rows = [("figure", FIRST, AGAINST, f"{AGAINST} / {FIRST}")]
        for name, (one, other) in self.figures.items():
            ratio = other / one if one and other is not None else None
            rows.append((name, _shown(one), _shown(other), _shown(ratio)))
        parts = [markdown_table(rows), markdown_table(self._by_group())]
        total = len(self.first.evaluation.results)
        parts.append(f"{self.num_same} of {total} answers have the same text.")
        if self._differs(TEXT_TOKENS):
            parts.append("The two have other tokens for the text, so their perplexities cannot be compared.")
        elif self._differs(TEXT_PIECE):
            parts.append(
                "The two read the text in pieces of different lengths, so their perplexities cannot be compared; give "
                "both the same max_model_len."
            )
        for name, measured in self._named:
            parts.append(f"## {name}\n\n{tables(measured.evaluation, measured.about).rstrip()}")
        return "\n\n".join(parts) + "\n"

    def _differs(self, name: str) -> bool:
        """Whether the two measurements say different things under a name."""
        return self.first.about.get(name) != self.against.about.get(name)

    def _by_group(self) -> list[tuple[str, ...]]:
        rows: list[tuple[str, ...]] = [("set", "accuracy", AGAINST, "acceptance_length", AGAINST)]
        for one, other in zip(groups(self.first.evaluation), groups(self.against.evaluation), strict=True):
            lengths = (f"{group.counts.acceptance_length:.3f}" for group in (one, other))
            rows.append((one.name, _shown(one.accuracy), _shown(other.accuracy), *lengths))
        return rows

    def write(self, directory: Path) -> None:
        """Write `eval.json`, `eval.md` and `eval.png`. Raises `EvaluationError`."""
        both = [replace(measured.evaluation.overall, name=name) for name, measured in self._named]
        heading = title(self.first.evaluation, self.first.about)
        write_files(directory, self.as_dict(), f"# Comparison\n\n{self.text()}", both, heading)

    @property
    def _named(self) -> tuple[tuple[str, Measured], ...]:
        return (FIRST, self.first), (AGAINST, self.against)


def _ids(results: Sequence[QuestionResult]) -> list[Id]:
    """What names each question: its data set, its id, and how many with that id came before it."""
    before: Counter[tuple[str, str]] = Counter()
    found = []
    for result in results:
        name = result.question.dataset, result.question.id
        found.append((*name, before[name]))
        before[name] += 1
    return found


def _figures(measured: Measured) -> dict[str, float | None]:
    group = measured.evaluation.overall
    return {
        "accuracy": group.accuracy,
        "acceptance_length": group.counts.acceptance_length,
        "mean_acceptance_length": group.mean_acceptance_length,
        "acceptance_rate": group.counts.acceptance_rate,
        PERPLEXITY: measured.about.get(PERPLEXITY),
        "tokens_per_s": measured.tokens_per_s,
    }


def _shown(value: float | None) -> str:
    return "-" if value is None else f"{value:.1f}" if value >= 1000 else f"{value:.3f}"
