"""The demo pair's held-out questions, which load tests, benchmarks and checks ask, and long passages made of them.
Deterministic by seed."""

from __future__ import annotations

import functools
import json
from dataclasses import dataclass
from pathlib import Path
from random import Random

from dflash_backend.config import asset_path

CATEGORIES = ("math", "code", "chat")
NUM_HELD_OUT = 600
TURN_END = "<|im_end|>\n"
# Of this text with the demo tokenizer. Lengths of passages are estimated with it.
CHARACTERS_PER_TOKEN = 3.8


@dataclass(frozen=True)
class HeldOutPrompt:
    """A prompt rendered by the chat template; `answer` is the right answer where there is one."""

    id: str
    category: str
    prompt: str
    answer: str | None


def held_out_dir() -> Path:
    """Where the held-out sets lie in the repository."""
    return asset_path("demo", "held_out")


def load_prompts(count: int, categories: tuple[str, ...] = CATEGORIES) -> list[HeldOutPrompt]:
    """The first `count` held-out prompts, taking one of each category in turn."""
    columns = [_read(held_out_dir() / f"{category}.jsonl") for category in categories]
    interleaved = [row for rows in zip(*columns, strict=False) for row in rows]
    if count > len(interleaved):
        raise ValueError(f"{count} prompts were asked for; the held-out sets have {len(interleaved)}")
    return interleaved[:count]


def held_out(count: int, rng: Random) -> list[HeldOutPrompt]:
    """`count` held-out questions in a random order; they repeat only after all of them."""
    chosen: list[HeldOutPrompt] = []
    while len(chosen) < count:
        chosen += rng.sample(_all_held_out(), min(count - len(chosen), NUM_HELD_OUT))
    return chosen


def passage(num_tokens: int, rng: Random) -> str:
    """A conversation of `num_tokens` tokens or a little more, to stand for a long system prompt or a long history. It
    ends with the end of a turn."""
    wanted = num_tokens * CHARACTERS_PER_TOKEN
    turns: list[str] = []
    while wanted > 0:
        question = rng.choice(_all_held_out())
        turns.append(f"{question.prompt}{question.answer or 'Noted.'}{TURN_END}")
        wanted -= len(turns[-1])
    return "".join(turns)


@functools.cache
def _all_held_out() -> tuple[HeldOutPrompt, ...]:
    return tuple(load_prompts(NUM_HELD_OUT))


def _read(path: Path) -> list[HeldOutPrompt]:
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    return [HeldOutPrompt(row["id"], row["category"], row["prompt"], row["answer"]) for row in rows]
