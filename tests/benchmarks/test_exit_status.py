"""Each benchmark that judges exits with 1 when one of its measurements is bad. What they measure is made up."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import benchmarks
from benchmarks import cpu_products

Rounds = Iterator[bool]
LLM = SimpleNamespace(tokenizer=SimpleNamespace(encode=lambda text: [1]))


def words(rounds: Rounds) -> list[str]:
    return [] if next(rounds) else ["a bound"]


def of_cpu_products(rounds: Rounds) -> dict[str, Any]:
    # One that is slower and is not taken is no miss.
    slower = cpu_products.MOST_SLOWER * 1.01e-6

    def measured(*_: Any) -> tuple[float, float, bool]:
        good = next(rounds)
        return 1e-6, slower, not good

    return {
        "cpu_product": SimpleNamespace(HAS_ONEDNN=True), "measured": measured, "DEMO": ((8, 8),), "LARGER": ((9, 9),),
        "ROWS": (1, 2), "torch": SimpleNamespace(set_num_threads=print, inference_mode=nullcontext),
    }  # fmt: skip


def of_invariance(rounds: Rounds) -> dict[str, Any]:
    return {"compare": lambda *_: ([["x"] * 8], int(not next(rounds)))}


def of_run(rounds: Rounds) -> dict[str, Any]:
    report = SimpleNamespace(write=lambda *_: "", misses=lambda *_: words(rounds))
    made = SimpleNamespace(runs=[])
    return {
        "load_prompts": lambda count: [], "LLM": lambda **_: LLM, "run_all": lambda *_: made,
        "measure_prefix": lambda *_: None, "report": report,
    }  # fmt: skip


def of_router(rounds: Rounds) -> dict[str, Any]:
    return {"simulate": lambda *_: None, "_table": lambda outcomes: "", "_missed": lambda outcomes: words(rounds)}


def of_scheduler(rounds: Rounds) -> dict[str, Any]:
    return {"measure": lambda *_: None, "table": lambda costs: "", "misses": lambda costs: words(rounds)}


def of_ngram(rounds: Rounds) -> dict[str, Any]:
    good = [next(rounds) for _ in range(3)]

    def way(llm: Any) -> Any:
        ways.append(None)
        return SimpleNamespace(llm=LLM, outputs=[[i] if ok or len(ways) < 2 else [i, i] for i, ok in enumerate(good)])

    ways: list[None] = []
    return {
        "Way": way, "LLM": lambda **_: LLM, "read_prompts": lambda *_: ["x"] * 3, "compare": lambda *_: [["x"] * 4],
    }  # fmt: skip


def of_compare_trees(rounds: Rounds) -> dict[str, Any]:
    return {
        "parse_tree": lambda text: SimpleNamespace(name=text), "read_prompts": lambda *_: [],
        "serving": lambda *_: nullcontext(), "run_rounds": lambda *_: int(not next(rounds)), "report": lambda trees: "",
        "ratios": lambda *_: [0.8, 0.98 if next(rounds) else 0.96, 1.5],
    }  # fmt: skip


def of_sampling_parameters(rounds: Rounds) -> dict[str, Any]:
    def rate(built: Any, asked: Any, max_tokens: int, parameters: dict[str, Any]) -> float:
        return 100.0 if not parameters or max_tokens == 8 else 90.0 if next(rounds) else 40.0

    return {
        "find_pair": lambda name: SimpleNamespace(target=name), "prompts": lambda *_: [[1]],
        "EngineConfig": SimpleNamespace(from_values=dict), "build_engine": dict, "tokens_per_second": rate,
    }  # fmt: skip


# The number of rounds of each, its options, and what stands in for its work.
PROGRAMS: dict[str, tuple[int, list[str], Callable[[Rounds], dict[str, Any]]]] = {
    "cpu_products": (4, [], of_cpu_products),
    "invariance": (4, [], of_invariance),
    "run": (1, [], of_run),
    "router": (1, [], of_router),
    "scheduler": (1, [], of_scheduler),
    "ngram": (3, [], of_ngram),
    "sampling_parameters": (
        4,
        ["--rounds", "1", "--streams", "1", "2", "--only", "top_p", "min_p", "--at-least", "0.8"],
        of_sampling_parameters,
    ),
    "compare_trees": (3, ["a", "b", "--at-least", "0.97"], of_compare_trees),
}
# Of these the verdict is seen in their own tests.
ELSEWHERE = {
    "coarse_head",
    "drafter_kinds",
    "float_weights",
    "recurrent_hits",
    "vocabulary_split",
    "wide_rows",
    "window_blocks",
}


@pytest.mark.parametrize(
    ("name", "bad"), [(name, bad) for name, (count, *_) in PROGRAMS.items() for bad in (None, *range(count))]
)
def test_one_bad_round_is_enough(name: str, bad: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    count, options, made = PROGRAMS[name]
    module = import_module(f"benchmarks.{name}")
    rounds = iter([number != bad for number in range(count)])
    for attribute, stand_in in made(rounds).items():
        monkeypatch.setattr(module, attribute, stand_in)
    monkeypatch.setattr(sys, "argv", [name, *options])
    try:
        status = module.main()
    except SystemExit as ended:
        status = ended.code
    assert status == int(bad is not None)
    assert next(rounds, None) is None, "every round counts"


def test_every_benchmark_that_judges_is_here_or_has_a_test_of_its_own() -> None:
    """`openai` only prints."""
    folder = Path(benchmarks.__file__).parent
    judges = {path.stem for path in folder.glob("*.py") if "sys.exit(" in path.read_text(encoding="utf-8")}
    assert judges - set(PROGRAMS) == ELSEWHERE | {"openai"}
