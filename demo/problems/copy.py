"""Text that is given and comes back: repeated, edited or quoted. Most of each answer stands in its question."""

from collections.abc import Callable
from random import Random

from demo.problems.chat import make_chat
from demo.problems.code import make_code
from demo.problems.math import make_math
from demo.problems.problem import Problem, is_held_out
from demo.problems.words import THINGS, loose_words, made_up_word, numbers, sentences, word

ORDINALS = ("first", "second", "third", "fourth")

Draft = tuple[str, str]


def passage(rng: Random) -> str:
    """A line or a few: sentences, loose words, numbers, or what another problem says."""
    kind = rng.random()
    if kind < 0.5:
        return " ".join(sentences(rng, rng.choices((1, 2, 3, 4), weights=(4, 3, 2, 1))[0]))
    if kind < 0.7:
        return loose_words(rng, rng.randint(1, 14))
    if kind < 0.8:
        return numbers(rng, rng.randint(1, 10))
    if kind < 0.9:
        problem = make_math(rng)
        while is_held_out(problem.content):
            problem = make_math(rng)
        return problem.question
    return make_chat(rng).reference


def _repeat(rng: Random) -> Draft:
    text = passage(rng)
    ask = rng.choice(
        (
            "Repeat: {x}", "Repeat: {x}", "Repeat this: {x}", "Repeat after me: {x}", "Repeat the following text:\n{x}",
            "Copy this text: {x}", "Copy: {x}", "Please repeat: {x}", "Write this again: {x}", "Say this again: {x}",
        )
    )  # fmt: skip
    return ask.format(x=text), text


def _quoted(rng: Random) -> Draft:
    text = loose_words(rng, rng.randint(1, 8)) if rng.random() < 0.5 else sentences(rng, 1)[0]
    return rng.choice(('Repeat "{x}"', 'Say "{x}"', 'Please write "{x}".')).format(x=text), text


def _replace(rng: Random) -> Draft:
    text = " ".join(sentences(rng, rng.randint(1, 3))) if rng.random() < 0.7 else loose_words(rng, rng.randint(4, 12))
    return _replacement(rng, text)


def _replacement(rng: Random, text: str) -> Draft:
    """One word of the text by another."""
    words = [one.strip(".,") for one in text.split()]
    old = rng.choice([one for one in words if words.count(one) == 1 or rng.random() < 0.2] or words)
    new = word(rng)
    # The word as a whole: "he" in "the" stays.
    answer = " ".join(new + one[len(old) :] if one.strip(".,") == old else one for one in text.split())
    ask = rng.choice(
        (
            "Replace {a} by {b} in: {x}", "Replace {a} with {b} in: {x}", 'Replace "{a}" by "{b}" in: {x}',
            'Replace the word "{a}" with "{b}" in this text: {x}', "Replace {a} by {b} in this text:\n{x}",
        )
    )  # fmt: skip
    return ask.format(a=old, b=new, x=text), answer


def _quote(rng: Random) -> Draft:
    return _quotation(rng, sentences(rng, rng.randint(2, 4)))


def _quotation(rng: Random, found: list[str]) -> Draft:
    """One of the sentences, by its number."""
    index = rng.randrange(len(found))
    which = "last" if index == len(found) - 1 and rng.random() < 0.5 else ORDINALS[index]
    ask = rng.choice(
        ("Quote the {n} sentence of: {x}", "Quote the {n} sentence of this text: {x}", "Quote the {n} sentence:\n{x}")
    )
    return ask.format(n=which, x=" ".join(found)), f'"{found[index]}"'


def _rename(rng: Random) -> Draft:
    problem = make_code(rng)
    code = problem.reference.split("```python\n")[1].split("```")[0]
    old = code.split("(")[0].removeprefix("def ")
    new = "_".join(word(rng) for _ in range(rng.randint(1, 2)))
    ask = rng.choice(("Rename the function `{a}` to `{b}`:", "Rename `{a}` to `{b}` in this code:"))
    renamed = code.replace(f"def {old}(", f"def {new}(", 1)
    return f"{ask.format(a=old, b=new)}\n```python\n{code}```", f"```python\n{renamed}```"


def _entries(rng: Random) -> list[str]:
    found: list[str] = []
    count = rng.randint(2, 6)
    while len(found) < count:
        one = made_up_word(rng) if rng.random() < 0.3 else rng.choice(THINGS)
        if one not in found:
            found.append(one)
    return found


def _bullets(entries: list[str]) -> str:
    return "\n".join(f"- {entry}" for entry in entries)


def _add_entry(rng: Random) -> Draft:
    *entries, new = _entries(rng)
    return f"Add {new} to the end of this list:\n{_bullets(entries)}", _bullets([*entries, new])


def _remove_entry(rng: Random) -> Draft:
    entries = _entries(rng)
    gone = rng.choice(entries)
    return f"Remove {gone} from this list:\n{_bullets(entries)}", _bullets([one for one in entries if one != gone])


def _number_lines(rng: Random) -> Draft:
    entries = _entries(rng)
    numbered = "\n".join(f"{i}. {entry}" for i, entry in enumerate(entries, 1))
    return f"Number these lines:\n{_bullets(entries)}", numbered


FAMILIES: dict[str, tuple[int, Callable[[Random], Draft]]] = {
    "repeat": (30, _repeat),
    "quoted": (8, _quoted),
    "replace": (26, _replace),
    "quote": (18, _quote),
    "rename": (8, _rename),
    "add_entry": (4, _add_entry),
    "remove_entry": (4, _remove_entry),
    "number_lines": (3, _number_lines),
}
"""Each family with its weight."""


def make_short_edit(rng: Random) -> Problem:
    """A word replaced or a sentence quoted in a text of a few words.

    The shorter the text, the more of its answer depends on the edit, and the less on copying.
    """
    if rng.random() < 0.6:
        family, (question, reference) = "replace", _replacement(rng, loose_words(rng, rng.randint(1, 7)))
    else:
        short = [f"{loose_words(rng, rng.randint(1, 4)).capitalize()}." for _ in range(rng.randint(2, 4))]
        family, (question, reference) = "quote", _quotation(rng, short)
    return Problem("copy", f"copy/{family}/{question}", question, reference)


def make_copy(rng: Random) -> Problem:
    """One text to give back; its content is the whole question."""
    weights = [weight for weight, _ in FAMILIES.values()]
    family = rng.choices(list(FAMILIES), weights=weights)[0]
    question, reference = FAMILIES[family][1](rng)
    return Problem("copy", f"copy/{family}/{question}", question, reference)
