"""Seeded conversations for the demo pair: training documents and the held-out sets.

A conversation is a list of messages; most are rendered with the chat template, some as plain text
(`question`, newline, answer) so that a raw prompt without any template is answered too. The sets are disjoint
by construction: a problem belongs to held-out when the hash of its content says so, and nowhere else.
"""

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from random import Random
from typing import Any

from demo.problems import (
    Problem,
    is_held_out,
    make_calls,
    make_chat,
    make_code,
    make_copy,
    make_math,
    make_short_edit,
    make_small_sum,
    make_story,
    make_talk,
    make_tools,
)
from demo.problems.words import loose_words, numbers, sentences
from demo.prose import long_system_prompt, short_system_prompt

IM_START, IM_END, END_OF_TEXT, MASK = "<|im_start|>", "<|im_end|>", "<|endoftext|>", "<|mask|>"
SPECIAL_TOKEN_IDS = {END_OF_TEXT: 0, IM_START: 1, IM_END: 2, MASK: 3}
"""The tokenizer gives these the first ids, in this order."""
CATEGORIES = {
    "math": make_math,
    "code": make_code,
    "chat": make_chat,
    "talk": make_talk,
    "copy": make_copy,
    "tools": make_tools,
}
"""The categories that have a held-out set."""
GENERATORS = CATEGORIES | {"story": make_story}
WEIGHTS = {"math": 13, "code": 7, "chat": 16, "talk": 16, "copy": 27, "tools": 14, "story": 3}
"""How often a training document begins with each."""


@dataclass(frozen=True)
class Segment:
    """A stretch of a training document; the full loss is taken on answers only."""

    text: str
    is_answer: bool


def problems(rng: Random, category: str, held_out: bool) -> Iterator[Problem]:
    """Endless problems of one category from one side of the split."""
    make = GENERATORS[category]
    while True:
        problem = make(rng)
        if is_held_out(problem.content) == held_out:
            yield problem


def render_chat(messages: list[dict[str, str]], add_generation_prompt: bool = False) -> str:
    """The text that the tokenizer's chat template renders for the same messages."""
    text = "".join(f"{IM_START}{m['role']}\n{m['content']}{IM_END}\n" for m in messages)
    return text + (f"{IM_START}assistant\n" if add_generation_prompt else "")


def training_documents(
    seed: int | str, long_share: float = 0.0, sum_share: float = 0.0, copy_share: float = 0.0
) -> Iterator[list[Segment]]:
    """Endless training documents.

    `long_share` of them open with a long system prompt, `sum_share` are short sums, and `copy_share` are texts that
    are written twice or edited.
    """
    rng = Random(f"train/{seed}")
    streams = {name: problems(rng, name, held_out=False) for name in GENERATORS}
    while True:
        category = rng.choices(list(WEIGHTS), weights=list(WEIGHTS.values()))[0]
        kind = rng.random()
        if kind < long_share:
            yield _chat_document(rng, streams, category, long_system_prompt(rng))
        elif kind < long_share + sum_share:
            yield _sum_document(streams["math"]) if rng.random() < 0.5 else _lines_document(rng, make_small_sum)
        elif kind < long_share + sum_share + copy_share:
            yield _copy_document(rng) if rng.random() < 0.4 else _lines_document(rng, make_short_edit)
        elif category == "tools" and rng.random() < 0.6:
            yield _tools_document(rng, streams["tools"])
        elif category != "tools" and rng.random() < 0.25:
            yield _plain_document(next(streams[category]))
        else:
            system = short_system_prompt(rng) if rng.random() < 0.2 else None
            yield _chat_document(rng, streams, category, system)


def _sum_document(math: Iterator[Problem]) -> list[Segment]:
    """The equations of a few word problems without the words: more sums in fewer tokens."""
    segments: list[Segment] = []
    for _ in range(6):
        for line in next(math).reference.splitlines()[1:3]:
            left, _, result = line.rpartition(" and ")[2].partition("=")
            segments += [Segment(f"and {left}=", False), Segment(f"{result}\n", True)]
    return segments


def _copy_document(rng: Random) -> list[Segment]:
    """Texts without an order to repeat them: copying from far back is learned soonest where nothing else is asked."""
    segments: list[Segment] = []
    for _ in range(3):
        kind = rng.random()
        if kind < 0.5:
            text = loose_words(rng, rng.randint(3, 20))
        elif kind < 0.9:
            text = " ".join(sentences(rng, rng.randint(1, 2)))
        else:
            text = numbers(rng, rng.randint(2, 10))
        segments += [Segment(f"{text}\n", False), Segment(f"{text}\n", True)]
    return segments


def _lines_document(rng: Random, make: Callable[[Random], Problem]) -> list[Segment]:
    """Several short questions with their answers, a line each."""
    asked = (problem for problem in iter(lambda: make(rng), None) if not is_held_out(problem.content))
    segments: list[Segment] = []
    for problem in islice(asked, 5):
        segments += [Segment(f"{problem.question}\n", False), Segment(f"{problem.reference}\n", True)]
    return segments


def _tools_document(rng: Random, stream: Iterator[Problem]) -> list[Segment]:
    """Several calls of the same functions, or several JSON objects, in one conversation."""
    if rng.random() < 0.5:
        asked = (problem for problem in make_calls(rng) if not is_held_out(problem.content))
    else:
        asked = (problem for problem in stream if not problem.history)
    opening = ""
    segments: list[Segment] = []
    for problem in islice(asked, rng.randint(2, 5)):
        messages = problem.messages[1:] if segments and problem.history else problem.messages
        segments.append(Segment(opening + render_chat(messages, add_generation_prompt=True), False))
        segments.append(Segment(problem.reference + IM_END, True))
        opening = "\n"
    return segments


def _plain_document(problem: Problem) -> list[Segment]:
    return [Segment(f"{problem.question}\n", False), Segment(f"{problem.reference}{IM_END}", True)]


def _chat_document(
    rng: Random, streams: dict[str, Iterator[Problem]], category: str, system: str | None
) -> list[Segment]:
    """One to three turns; every assistant turn is an answer segment that ends in `<|im_end|>`.

    A problem with messages before its question is a conversation of its own.
    """
    turns = rng.choices((1, 2, 3), weights=(78, 15, 7))[0]
    segments: list[Segment] = []
    opening = render_chat([{"role": "system", "content": system}]) if system else ""
    while turns > 0:
        problem = next(streams[category])
        if problem.history:
            opening, turns = "", 1
            segments.clear()
        segments.append(Segment(opening + render_chat(problem.messages, add_generation_prompt=True), False))
        segments.append(Segment(problem.reference + IM_END, True))
        opening = "\n"
        category = rng.choice([name for name in WEIGHTS if name != "tools"])
        turns -= 1
    return segments


def held_out_rows(category: str, count: int, seed: int = 0) -> list[dict[str, Any]]:
    """Distinct held-out problems of one category in the schema of `demo/held_out/*.jsonl`."""
    stream = problems(Random(f"held_out/{category}/{seed}"), category, held_out=True)
    rows: list[dict[str, Any]] = []
    seen: set[str] = set()
    while len(rows) < count:
        problem = next(stream)
        if problem.content in seen:
            continue
        seen.add(problem.content)
        messages = problem.messages
        rows.append(
            {
                "id": f"{category}-{len(rows):03d}",
                "category": category,
                "messages": messages,
                "prompt": render_chat(messages, add_generation_prompt=True),
                "reference": problem.reference,
                "answer": problem.answer,
            }
        )
    return rows


def write_held_out(folder: Path, count: int = 200) -> None:
    """Write a file of `count` rows for each category."""
    folder.mkdir(parents=True, exist_ok=True)
    for category in CATEGORIES:
        lines = [json.dumps(row, ensure_ascii=False) for row in held_out_rows(category, count)]
        (folder / f"{category}.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
