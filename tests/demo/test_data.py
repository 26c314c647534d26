"""The generator is deterministic, its split is clean, and the committed held-out sets are what it makes."""

import json
from itertools import islice
from pathlib import Path
from random import Random

import pytest

from demo.data import CATEGORIES, held_out_rows, is_held_out, problems, render_chat, training_documents

HELD_OUT = Path(__file__).parents[2] / "demo" / "held_out"
FIELDS = {"id", "category", "messages", "prompt", "reference", "answer"}


def committed_rows(category: str) -> list[dict]:
    lines = (HELD_OUT / f"{category}.jsonl").read_text(encoding="utf-8").splitlines()
    return [json.loads(line) for line in lines]


def test_the_same_seed_makes_the_same_documents():
    first = list(islice(training_documents(seed=3, long_share=0.1), 200))
    assert first == list(islice(training_documents(seed=3, long_share=0.1), 200))
    assert first != list(islice(training_documents(seed=4, long_share=0.1), 200))


@pytest.mark.parametrize("category", CATEGORIES)
def test_the_split_follows_the_content_and_nothing_else(category):
    for held_out in (False, True):
        for problem in islice(problems(Random(1), category, held_out), 300):
            assert is_held_out(problem.content) == held_out


@pytest.mark.parametrize("category", CATEGORIES)
def test_no_held_out_question_occurs_in_training(category):
    asked = {row["messages"][0]["content"] for row in committed_rows(category)}
    trained = {problem.question for problem in islice(problems(Random(2), category, held_out=False), 20_000)}
    assert not asked & trained


def test_no_training_document_contains_a_held_out_question():
    documents = ["".join(s.text for s in d) for d in islice(training_documents(seed=0, long_share=0.05), 3000)]
    text = "\n".join(documents)
    for category in CATEGORIES:
        assert not [row["id"] for row in committed_rows(category) if row["messages"][0]["content"] in text]


@pytest.mark.parametrize("category", CATEGORIES)
def test_committed_held_out_rows_are_what_the_generator_makes(category):
    rows = committed_rows(category)
    assert rows == held_out_rows(category, len(rows))


@pytest.mark.parametrize("category", CATEGORIES)
def test_held_out_rows_follow_the_schema(category):
    rows = committed_rows(category)
    assert len(rows) >= 150
    assert len({row["id"] for row in rows}) == len({row["prompt"] for row in rows}) == len(rows)
    for row in rows:
        assert set(row) == FIELDS
        assert row["category"] == category
        assert [message["role"] for message in row["messages"]] == ["user"]
        assert row["prompt"] == render_chat(row["messages"], add_generation_prompt=True)
        assert (row["answer"] is not None) == (category == "math")


def test_the_stated_answer_is_the_last_line_of_the_worked_solution():
    for row in committed_rows("math"):
        assert row["reference"].splitlines()[-1] == f"Answer: {row['answer']}"


def test_every_equation_of_a_worked_solution_holds():
    for problem in islice(problems(Random(5), "math", held_out=False), 2000):
        for line in problem.reference.splitlines()[1:3]:
            left, _, right = line.rstrip(".").rpartition(" and ")[2].partition(" = ")
            a, operator, b = left.split()
            results = {"+": int(a) + int(b), "-": int(a) - int(b), "*": int(a) * int(b), "/": int(a) / int(b)}
            assert results[operator] == int(right), problem


def test_every_code_answer_compiles():
    for problem in islice(problems(Random(6), "code", held_out=False), 500):
        compile(problem.reference.split("```python\n")[1].split("```")[0], problem.content, "exec")
