"""Questions from the embedded sets, own files and published rows; bad rows are named by file, line and field."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from dflash_backend.evaluation import EvaluationError
from dflash_backend.evaluation.datasets import EMBEDDED_SETS, Source, load_questions, parse_source
from dflash_backend.evaluation.hub_sets import HUB_SETS

Write = Callable[..., Path]


@pytest.fixture
def write(tmp_path: Path) -> Write:
    """Write rows, objects or raw text, to a JSONL file."""

    def write(*rows: Any, name: str = "own.jsonl") -> Path:
        path = tmp_path / name
        lines = [row if isinstance(row, str) else json.dumps(row) for row in rows]
        path.write_text("\n".join(lines) + "\n", encoding="utf-8")
        return path

    return write


def test_the_embedded_sets_have_200_conversations_each_and_answers_to_the_word_problems() -> None:
    questions = load_questions([Source(name) for name in EMBEDDED_SETS])
    assert len(questions) == 200 * len(EMBEDDED_SETS)
    assert all(question.messages and question.num_turns == 1 for question in questions)
    assert {question.category for question in questions if question.answer is not None} == {"math"}


def test_the_limit_is_one_of_each_set() -> None:
    questions = load_questions([parse_source("math"), parse_source("chat")], 3)
    assert [question.dataset for question in questions] == ["math"] * 3 + ["chat"] * 3


def test_rows_of_ones_own_are_a_prompt_messages_or_turns(write: Write) -> None:
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]
    path = write(
        {"prompt": "Once", "id": 7},
        "",
        {"messages": messages, "category": "greeting", "answer": 3.5, "prompt": "the same, rendered"},
        {"turns": ["One", "Two", "Three"], "category": None, "more": "is not read"},
    )
    prompt, chat, turns = load_questions([parse_source(str(path))])
    assert (prompt.id, prompt.prompt, prompt.category, prompt.answer) == ("7", "Once", "own", None)
    assert (chat.id, chat.prompt, chat.messages) == ("own-2", None, tuple(messages))
    assert (chat.category, chat.answer) == ("own/greeting", "3.5")
    assert turns.messages == ({"role": "user", "content": "One"},)
    assert turns.follow_ups == ("Two", "Three")


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ("{", "this is not JSON"),
        ("[" * 100_000, "this is not JSON"),
        ("[1]", "this is list; expected a JSON object"),
        ({}, "no field 'prompt', 'messages' or 'turns'"),
        ({"prompt": None}, "no field 'prompt'"),
        ({"prompt": 3}, "field 'prompt' is 3; expected text"),
        ({"prompt": ""}, "field 'prompt' is \"\""),
        ('{"prompt": "half a pair \\ud800"}', "field 'prompt' is"),
        ({"prompt": "x", "category": 3}, "field 'category' is 3"),
        ({"prompt": "x", "answer": [4]}, r"field 'answer' is \[4\]; expected text or a number"),
        ({"prompt": "x", "answer": True}, "field 'answer' is true"),
        ({"prompt": "x", "mentions": []}, r"field 'mentions' is \[\]; expected text or a number, or a list of such"),
        ({"prompt": "x", "mentions": ["a", None]}, "field 'mentions' is .*; expected text or a number, or a list"),
        ({"prompt": "x", "mentions": [True]}, "field 'mentions' is true; expected text or a number"),
        ({"prompt": "x", "mentions": "a", "answer": "b"}, "there are both 'answer' and 'mentions'"),
        ({"prompt": "x", "id": {}}, "field 'id' is {}"),
        ({"turns": []}, r"field 'turns' is \[\]; expected a list of texts"),
        ({"turns": ["x", 2]}, "field 'turns'"),
        ({"turns": "x"}, "field 'turns'"),
        ({"messages": []}, "field 'messages'"),
        ({"messages": {"role": "user"}}, "field 'messages'"),
        ({"messages": ["x"]}, "field 'messages'"),
        ({"messages": [{"role": "user"}]}, "field 'messages'"),
        ({"messages": [{"role": "assistant", "content": "x"}]}, "field 'messages'"),
        ({"messages": [{"role": "user", "content": "x"}], "turns": ["x"]}, "both 'messages' and 'turns'"),
    ],
)
def test_a_bad_row_is_named_by_file_line_and_field(write: Write, row: Any, message: str) -> None:
    path = write({"prompt": "fine"}, row)
    with pytest.raises(EvaluationError, match=message) as caught:
        load_questions([parse_source(str(path))])
    assert str(caught.value).startswith(f"{path}, line 2: ")
    assert len(str(caught.value)) < 500


def test_a_file_that_is_no_text_is_refused_by_line(tmp_path: Path) -> None:
    path = tmp_path / "own.jsonl"
    path.write_bytes(b'{"prompt": "x"}\n\xff\xfe\n')
    with pytest.raises(EvaluationError, match=r"own.jsonl, line 2: this is not JSON in UTF-8"):
        load_questions([parse_source(str(path))])


def test_a_set_without_rows_and_a_set_named_twice_are_refused(write: Write) -> None:
    with pytest.raises(EvaluationError, match=r"own.jsonl has no rows"):
        load_questions([parse_source(str(write("")))])
    with pytest.raises(EvaluationError, match="two data sets are called 'math'"):
        load_questions([parse_source("math"), parse_source("math")])


@pytest.mark.parametrize("text", ["maths", "gsm8k=", "math=own.jsonl", "/no/such/file.jsonl", "."])
def test_what_is_neither_set_nor_file_is_refused_with_the_sets(text: str) -> None:
    with pytest.raises(
        ValueError, match="neither a file nor a data set; the sets are math, .*, talk, copy, tools, gsm8k"
    ):
        parse_source(text)


BOXED = "\nPlease reason step by step, and put your final answer within \\boxed{}."
GSM8K = {"question": "How many?", "answer": "2 + 1,200 = <<2+1200=1202>>1,202\n#### 1,202"}
HUMANEVAL = {"task_id": "HumanEval/0", "prompt": "def f():\n", "test": "assert f()", "canonical_solution": "  ..."}
MATH500 = {"problem": "What is x?", "subject": "Algebra", "level": 2, "unique_id": "test/a/1.json"}
MT_BENCH = {"category": "writing", "prompt_id": 81}
TURNS = ["Write a poem.", "Now in prose."]
OF_HUMANEVAL = (
    "Write a solution to the following problem and make sure that it passes the tests:\n```python\ndef f():\n\n```"
)
OF_MATH500 = {"id": "test/a/1.json", "category": "math500/Algebra"}
OF_MT_BENCH = {"follow_ups": ("Now in prose.",), "category": "mt-bench/writing"}


@pytest.mark.parametrize(
    ("name", "row", "asked", "expected"),
    [
        ("gsm8k", GSM8K, "How many?" + BOXED, {"answer": "1,202", "max_tokens": 2048}),
        ("humaneval", HUMANEVAL, OF_HUMANEVAL, {"id": "HumanEval/0", "answer": None}),
        # Answers that are numbers are scored.
        ("math500", MATH500 | {"answer": "27"}, "What is x?" + BOXED, OF_MATH500 | {"answer": "27"}),
        (
            "math500",
            MATH500 | {"answer": "\\frac{3}{4}"},
            "What is x?" + BOXED,
            OF_MATH500 | {"answer": "\\frac{3}{4}"},
        ),
        ("math500", MATH500 | {"answer": "10,\\!080"}, "What is x?" + BOXED, OF_MATH500 | {"answer": "10,\\!080"}),
        ("math500", MATH500 | {"answer": "3\\sqrt{4}"}, "What is x?" + BOXED, OF_MATH500 | {"answer": None}),
        ("math500", MATH500 | {"answer": "-1,000"}, "What is x?" + BOXED, OF_MATH500 | {"answer": "-1,000"}),
        (
            "mbpp",
            {"task_id": 11, "prompt": "Write f.", "code": "..."},
            "Write f.",
            {"answer": None, "max_tokens": 2048},
        ),
        ("mt-bench", MT_BENCH | {"turns": TURNS}, TURNS[0], OF_MT_BENCH),
        ("mt-bench", MT_BENCH | {"prompt": TURNS}, TURNS[0], OF_MT_BENCH),
    ],
)
def test_a_published_row_is_asked_and_scored_as_its_authors_do(
    write: Write, name: str, row: dict[str, Any], asked: str, expected: dict[str, Any]
) -> None:
    (question,) = load_questions([parse_source(f"{name}={write(row)}")])
    assert question.messages == ({"role": "user", "content": asked},)
    assert {field: getattr(question, field) for field in expected} == expected


def test_a_shuffled_set_has_the_authors_order_and_a_limit_keeps_its_beginning(write: Write) -> None:
    """`random.Random(42).shuffle` of the row numbers, as in their `benchmark.py`."""
    source = parse_source(f"mbpp={write(*({'prompt': str(i)} for i in range(10)))}")
    expected = [7, 3, 2, 8, 5, 6, 9, 4, 0, 1]
    for limit in (None, 4):
        asked = [int(question.messages[0]["content"]) for question in load_questions([source], limit, shuffle=True)]
        assert asked == expected[:limit]
    assert [q.id for q in load_questions([source], 2)] == ["mbpp-1", "mbpp-2"]


@pytest.mark.parametrize(
    ("name", "row", "field"),
    [
        ("gsm8k", {"question": "x", "answer": "no mark"}, "answer"),
        ("gsm8k", {"answer": "#### 3"}, "question"),
        ("humaneval", {"task_id": "x"}, "prompt"),
        ("mt-bench", {"category": "writing"}, "prompt"),
        ("math500", {"problem": "x"}, "answer"),
        ("math500", {"answer": "3"}, "problem"),
        ("mbpp", {"task_id": 2}, "prompt"),
    ],
)
def test_published_rows_that_lack_a_field_are_named(write: Write, name: str, row: dict[str, Any], field: str) -> None:
    with pytest.raises(EvaluationError, match=rf"own.jsonl, line 1: field '{field}'"):
        load_questions([parse_source(f"{name}={write(row)}")])


@pytest.mark.parametrize("name", HUB_SETS)
def test_without_the_datasets_library_it_says_what_to_install_or_give(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)  # as import sees a library that is not there
    with pytest.raises(EvaluationError, match=rf"install 'datasets>=4' .*--dataset {name}=FILE.jsonl"):
        load_questions([parse_source(name)])
