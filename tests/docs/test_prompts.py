"""The demo pair answers every question that the pages, the command line and the docstrings ask, and gets it right."""

from __future__ import annotations

import base64
import json
import re
from pathlib import Path

import pytest

from dflash_backend import LLM
from tests.docs.conftest import ROOT

SOURCES = (
    *sorted(ROOT.glob("*.md")),
    *sorted((ROOT / "docs").glob("*.md")),
    ROOT / "demo" / "README.md",
    *sorted((ROOT / "cli").rglob("*.py")),
    *sorted((ROOT / "client").rglob("*.py")),
    ROOT / "dflash_backend" / "engine" / "llm.py",
    ROOT / "checks" / "malformed.py",
)
# Where a question begins; it goes to the next quotation mark.
BEFORE = (
    r"\bgenerate \"",
    r"\b(?:generate|stream)\(\s*\"",
    r"\bgenerate\(\s*f\"",
    r"\"(?:content|text_input|prompt)\\?\": \[?\\?\"",
    r"\bprompt = \"",
    r"EXAMPLE_PROMPT = \"",
    r"\[b\"",
    r"\becho \"",
    r"\bprintf '",
)
QUESTION = re.compile(rf"(?:{'|'.join(BEFORE)})([A-Z][^\"'\n]*?)(?=\\n|\\?\"|')")
TURNS = re.compile(r"\"turns\": (\[[^\]]*\])")
LISTS = re.compile(r"^PROMPTS = \(([^)]*)\)", re.MULTILINE)
ENCODED = re.compile(r"\"bytes_contents\": \[\"([^\"]+)\"\]")
ROW = re.compile(r"^\| `([^`|]+)` \| `([^`|]+)` \|$", re.MULTILINE)

NO_QUESTIONS = {"You are a helpful assistant.", "POST"}
"""Content of system messages, and a method of HTTP."""
SAM = """Let us solve it step by step.
Step 1: Sam fills 4 bags with 6 marbles each, and 4 * 6 = 24.
Step 2: Sam gives away 7 marbles, and 24 - 7 = 17.
Answer: 17"""
CAPITALS = {
    "Norway": "Oslo", "Hungary": "Budapest", "Portugal": "Lisbon", "Japan": "Tokyo (東京)", "Spain": "Madrid",
    "Denmark": "Copenhagen", "France": "Paris", "Italy": "Rome",
}  # fmt: skip
ANSWERS = {
    "Sam fills 4 bags with 6 marbles each and gives away 7 marbles. How many marbles does Sam keep?": SAM,
    "Thank you!": "You are welcome!",
    "Hello": "Hello! How can I help you?",
    "How are you?": "I am fine, thank you! How can I help you?",
    "What is the weather in Oslo?": None,
    "What is the weather in Madrid on Monday?": None,
    "The capital of Spain is ": None,
    "Sam fills 4 bags": None,
    "Sam": None,
    "Write a short list of things to pack.": ("- a passport\n- a toothbrush\n- a warm jacket\n- two shirts\n- a towel"),
    "Tell me about rivers.": "Some rivers are Nile, Amazon, Danube and Rhine.",
    "Write a function that adds 3.": "```python\ndef add_3(value):\n    return value + 3\n```",
}
"""What is right; None for what is no question, or needs a grammar or a tool."""


def answer_of(question: str) -> str | None:
    """The right answer; capitals are put together from the countries that the question names."""
    if "capitals of" in question:
        asked = question.rstrip("?").partition("capitals of ")[2]
        lines = [f"- The capital of {one} is {CAPITALS[one]}." for one in re.split(r", | and ", asked)]
        return "\n".join([f"Here are the capitals of {asked}:", *lines])
    return ANSWERS[question]


def asked_in(path: Path) -> set[str]:
    """The questions that a file asks the demo pair, `{first}` filled in."""
    text = path.read_text(encoding="utf-8")
    found = set(QUESTION.findall(text))
    found |= {turn for turns in TURNS.findall(text) for turn in json.loads(turns)}
    found |= {base64.b64decode(one).decode() for one in ENCODED.findall(text)}
    found |= {one for listed in LISTS.findall(text) for one in re.findall(r"\"([^\"]+)\"", listed)}
    return {one.replace("{first}", country) for one in found - NO_QUESTIONS for country in ("France", "Spain")}


def shown_in(path: Path) -> dict[str, str]:
    """The questions of a page's tables with the answers beside them; `\\n` is a line end."""
    return {
        question.replace("\\n", "\n"): answer.replace("\\n", "\n")
        for question, answer in ROW.findall(path.read_text(encoding="utf-8"))
    }


ASKED = sorted(set().union(*map(asked_in, SOURCES)))
SHOWN = shown_in(ROOT / "README.md")


@pytest.fixture(scope="module")
def answers() -> dict[str, tuple[str, str]]:
    """The answers to every question, asked as a message and as plain text."""
    llm = LLM()
    questions = [*ASKED, *SHOWN]
    as_messages = [llm.tokenizer.apply_chat_template([{"role": "user", "content": one}]) for one in questions]
    as_text = [llm.tokenizer.encode(f"{one}\n") for one in questions]
    sampling = [{"max_tokens": 160, "temperature": 0.0}] * len(questions)
    chat, plain = (llm.generate(prompts, sampling) for prompts in (as_messages, as_text))
    return {one: (a.text, b.text) for one, a, b in zip(questions, chat, plain, strict=True)}


def test_the_questions_of_the_pages_are_found() -> None:
    assert {"Thank you!", "Write a function that adds 3.", "Tell me about rivers."} <= set(ASKED)
    assert "What are the capitals of Spain and Italy?" in ASKED
    assert len(SHOWN) >= 8


@pytest.mark.parametrize("question", ASKED)
def test_a_question_of_the_pages_is_answered_right(question: str, answers: dict[str, tuple[str, str]]) -> None:
    expected = answer_of(question)
    if expected is not None:
        assert answers[question] == (expected, expected)


@pytest.mark.parametrize("question", SHOWN)
def test_the_table_of_the_readme_shows_what_comes(question: str, answers: dict[str, tuple[str, str]]) -> None:
    assert answers[question][0] == SHOWN[question]
