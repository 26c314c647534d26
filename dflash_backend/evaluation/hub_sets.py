"""GSM8K, MATH-500, HumanEval, MBPP and MT-Bench: where they lie on the hub, and the prompts that the DFlash authors
make of them.

The rows come through the `datasets` library (`pip install 'datasets>=4'`), or from a file that has them as
published.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dflash_backend.error_text import first_line
from dflash_backend.evaluation.errors import EvaluationError
from dflash_backend.evaluation.questions import Question, Row, category_of, read_rows
from dflash_backend.evaluation.scoring import is_number

# What the DFlash authors let a model write for each turn.
MAX_TOKENS = 2048


Fields = dict[str, Any]


@dataclass(frozen=True, slots=True)
class HubSet:
    """A published data set. `read`: what a question has of a row, by its fields; `id` and `category`: the row's fields
    that name it, where it has such."""

    name: str
    repository: str
    config: str | None
    split: str
    read: Callable[[Row], Fields]
    id: str = ""
    category: str = ""


# What the authors add to a mathematical question.
STEP_BY_STEP = "\nPlease reason step by step, and put your final answer within \\boxed{}."


def _asked(text: str) -> Fields:
    return {"messages": ({"role": "user", "content": text},)}


def _gsm8k(row: Row) -> Fields:
    """Grade-school word problems (arXiv 2110.14168). The answer follows `####` in the published solution."""
    solution = row.text("answer")
    if "####" not in solution:
        raise row.fail("answer", "a solution that ends in '#### ANSWER', as in the published set")
    return _asked(row.text("question") + STEP_BY_STEP) | {"answer": solution.rpartition("####")[2].strip()}


def _math500(row: Row) -> Fields:
    """Competition mathematics in seven subjects (arXiv 2305.20050). Only answers that are numbers are scored: one
    formula can be written in many ways."""
    answer = row.text("answer")
    return _asked(row.text("problem") + STEP_BY_STEP) | {"answer": answer if is_number(answer) else None}


def _mbpp(row: Row) -> Fields:
    """Python functions from a sentence (arXiv 2108.07732), the sanitised set. Their tests are not run, as for
    HumanEval."""
    return _asked(row.text("prompt"))


def _humaneval(row: Row) -> Fields:
    """Python functions to complete (arXiv 2107.03374). Their tests are not run, since that would execute what a
    model wrote."""
    ask = "Write a solution to the following problem and make sure that it passes the tests:\n"
    return _asked(f"{ask}```python\n{row.text('prompt')}\n```")


def _mt_bench(row: Row) -> Fields:
    """Conversations of two turns in eight categories (arXiv 2306.05685). The hub's copy calls the turns `prompt`, the
    authors' own file `turns`."""
    first, *rest = row.texts("turns" if row.has("turns") else "prompt")
    return _asked(first) | {"follow_ups": tuple(rest)}


HUB_SETS: dict[str, HubSet] = {
    one.name: one
    for one in (
        HubSet("gsm8k", "openai/gsm8k", "main", "test", _gsm8k),
        HubSet("math500", "HuggingFaceH4/MATH-500", None, "test", _math500, "unique_id", "subject"),
        HubSet("humaneval", "openai/openai_humaneval", None, "test", _humaneval, "task_id"),
        HubSet("mbpp", "google-research-datasets/mbpp", "sanitized", "test", _mbpp),
        HubSet("mt-bench", "HuggingFaceH4/mt_bench_prompts", None, "train", _mt_bench, category="category"),
    )
}


def read_hub_set(hub_set: HubSet, file: Path | None) -> Iterator[Question]:
    """The questions of a set, from `file` where it is given, else from the hub. Raises `EvaluationError`."""
    rows: Iterable[Row] = read_rows(file) if file is not None else _fetch(hub_set)
    name = hub_set.name
    for number, row in enumerate(rows, 1):
        own = hub_set.read(row)
        row_id, category = row.text(hub_set.id, f"{name}-{number}"), row.text(hub_set.category, name)
        yield Question(row_id, name, category_of(name, category), max_tokens=MAX_TOKENS, **own)


def _fetch(hub_set: HubSet) -> Iterator[Row]:
    """The rows of a set from the hub, or from the local cache where it has them."""
    name = hub_set.name
    instead = f"or give the published rows as a file: --dataset {name}=FILE.jsonl"
    try:
        from datasets import load_dataset
        from datasets.exceptions import DatasetsError
        from huggingface_hub.errors import HfHubHTTPError
    except ImportError:
        raise EvaluationError(
            f"{name} comes from the hub through the 'datasets' library, which is not installed; run pip install "
            f"'datasets>=4' 'pyarrow<26', {instead}"
        ) from None
    # The bases of the hub's own error are those of whichever HTTP library its client uses.
    try:
        rows = load_dataset(hub_set.repository, hub_set.config, split=hub_set.split)
    except (OSError, ValueError, RuntimeError, DatasetsError, *HfHubHTTPError.__bases__) as error:
        raise EvaluationError(
            f"{name} ({hub_set.repository}) cannot be had from the hub ({first_line(error)}); connect to it, {instead}"
        ) from None
    for number, data in enumerate(rows, 1):
        yield Row(data, f"{hub_set.repository}, row {number}")
