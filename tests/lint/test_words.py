"""Source and pages use the field's words: request index, accepted, argmax, filtered, add and remove, poll and reap."""

from __future__ import annotations

import re

import pytest

from tests.lint.source_files import ROOT, SOURCE_FOLDERS, python_files
from tests.lint.words import wrong_phrases, wrong_words


def test_the_source_has_no_private_words() -> None:
    found = [
        f"{file}:{wrong}"
        for file in python_files(*SOURCE_FOLDERS)
        for wrong in wrong_words((ROOT / file).read_text(encoding="utf-8"))
    ]
    assert not found, "\n".join(found)


def test_nothing_refers_to_pages_outside_the_repository() -> None:
    outside = re.compile("serving " "contract|design " r"page|\btrap[ _]\d", re.IGNORECASE)
    files = [*(ROOT / "tests").rglob("*.py"), *ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")]
    found = {file.relative_to(ROOT) for file in files if outside.search(file.read_text(encoding="utf-8"))}
    assert {str(file) for file in found} <= {"tests/lint/words.py", "tests/lint/test_words.py"}


def test_the_pages_have_no_private_words() -> None:
    found = [
        f"{page.relative_to(ROOT)}: {wrong}"
        for page in [*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md"), *(ROOT / "demo").glob("*.md")]
        for wrong in wrong_phrases(page.read_text(encoding="utf-8"))
    ]
    assert not found, "\n".join(found)


@pytest.mark.parametrize(
    ("source", "instead"),
    [
        ("class JudgedRows: ...", "to verify"),
        ("def best_in_tile(): ...", "argmax"),
        ("x = 1  # The draft stands.", "is accepted"),
        ('"""Holds rows. Called by `x`."""', "what it does"),
        ('def f():\n    """See `A.f`."""', "a sentence"),
        ('"""Writes nothing (trap 3)."""', "the fact"),
    ],
)
def test_a_private_word_is_found_with_what_to_write(source: str, instead: str) -> None:
    (wrong,) = wrong_words(source)
    assert instead in wrong.partition(" -> ")[2]


@pytest.mark.parametrize(
    "source",
    [
        "num_in_flight = 2  # requests in flight",
        "def check_best_of(headroom): ...",
        '"""None stands for "auto", and a server falls back to it. Like `LLM.judge`."""',
        'text = "nobody"',
    ],
)
def test_words_of_the_field_are_allowed(source: str) -> None:
    assert not list(wrong_words(source))
