"""Text for prompts: the demo pair's held-out questions, and long passages made of them. Deterministic by seed."""

from __future__ import annotations

import functools
from random import Random

from benchmarks.workload import HeldOutPrompt, load_prompts

NUM_HELD_OUT = 600
TURN_END = "<|im_end|>\n"
# Of this text with the demo tokenizer. Passages aim at a length by it; nothing depends on the length exactly.
CHARACTERS_PER_TOKEN = 3.8


def turn(text: str) -> str:
    """A user's turn in the demo pair's chat format, up to where the answer begins."""
    return f"<|im_start|>user\n{text}{TURN_END}<|im_start|>assistant\n"


def held_out(count: int, rng: Random) -> list[HeldOutPrompt]:
    """`count` held-out questions in a random order, with repetition only where there are not so many."""
    chosen: list[HeldOutPrompt] = []
    while len(chosen) < count:
        chosen += rng.sample(_everything(), min(count - len(chosen), NUM_HELD_OUT))
    return chosen


def passage(num_tokens: int, rng: Random) -> str:
    """A conversation about other things, of `num_tokens` tokens or a little more: what a long system prompt or a long
    history looks like to the model. It ends with the end of a turn."""
    wanted = num_tokens * CHARACTERS_PER_TOKEN
    turns: list[str] = []
    while wanted > 0:
        question = rng.choice(_everything())
        turns.append(f"{question.prompt}{question.answer or 'Noted.'}{TURN_END}")
        wanted -= len(turns[-1])
    return "".join(turns)


@functools.cache
def _everything() -> tuple[HeldOutPrompt, ...]:
    return tuple(load_prompts(NUM_HELD_OUT))
