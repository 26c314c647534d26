"""Text for prompts: the demo pair's held-out questions, and long passages made of them. Deterministic by seed."""

from __future__ import annotations

import functools
from random import Random

from benchmarks.workload import HeldOutPrompt, load_prompts

NUM_HELD_OUT = 600
TURN_END = "<|im_end|>\n"
# Of this text with the demo tokenizer. Lengths of passages are estimated with it.
CHARACTERS_PER_TOKEN = 3.8


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
