"""The prompts that every benchmark runs: the demo pair's held-out questions, interleaved over the categories."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from dflash_backend.config import asset_path

CATEGORIES = ("math", "code", "chat")


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


def _read(path: Path) -> list[HeldOutPrompt]:
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    return [HeldOutPrompt(row["id"], row["category"], row["prompt"], row["answer"]) for row in rows]
