"""The questions that SmolLM2's drafter learns from."""

from __future__ import annotations

import json
import subprocess
import sys
import tomllib

from demo.questions import FILE, NUMBERS, measured_questions, questions


def test_they_differ_and_none_is_measured() -> None:
    measured = measured_questions()
    found = list(questions(2000, 0, measured))
    assert len({question.lower() for question in found}) == 2000
    assert not {question.lower() for question in found} & {question.lower() for question in measured}
    assert found == list(questions(2000, 0, measured)) != list(questions(2000, 1, measured))


def test_an_excluded_one_does_not_come() -> None:
    first = next(questions(1))
    assert first not in list(questions(50, excluded=frozenset([first.upper()])))


def test_every_word_in_braces_has_a_list_and_every_list_is_used() -> None:
    content = tomllib.loads(FILE.read_text())
    text = " ".join(content["sentences"])
    assert all(f"{{{name}}}" in text for name in [*content["words"], *NUMBERS])
    assert not any("{" in question or "}" in question for question in questions(2000))


def test_they_are_printed_as_chats() -> None:
    ended = subprocess.run(
        [sys.executable, "-m", "demo.questions", "3", "--seed", "1"], capture_output=True, text=True, check=True
    )
    rows = [json.loads(line) for line in ended.stdout.splitlines()]
    assert [row["messages"][0]["role"] for row in rows] == ["user"] * 3
    assert [row["messages"][0]["content"] for row in rows] == list(questions(3, 1, measured_questions()))
