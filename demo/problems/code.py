"""Small Python functions described in a sentence: the prompt fixes every name, operator and constant."""

from collections.abc import Callable
from random import Random

from demo.problems.problem import Problem

NOUNS = (
    "values", "numbers", "scores", "prices", "sizes", "ages", "points", "marks", "weights", "counts", "levels",
    "rates", "steps", "codes", "items", "lengths", "heights", "times", "costs", "grades",
)  # fmt: skip
WORDS = (
    "words", "names", "lines", "titles", "labels", "tags", "keys", "cities", "fruits", "colors", "files",
    "users",
)  # fmt: skip
CONDITIONS = {
    "greater than": ">",
    "less than": "<",
    "equal to": "==",
    "different from": "!=",
    "at least": ">=",
    "at most": "<=",
}
CHANGES = {"add": "+", "subtract": "-", "multiply by": "*", "divide by": "/"}
VERBS = (
    "get", "find", "make", "build", "run", "check", "do", "use", "try", "show",
)  # fmt: skip

Draft = tuple[tuple[str, ...], str, str, str, str]


def _singular(noun: str) -> str:
    """The loop variable for a plural noun of this file."""
    if noun == "cities":
        return "city"
    return noun[:-1]


def _sum_if(rng: Random) -> Draft:
    noun, phrase, n = rng.choice(NOUNS), rng.choice(list(CONDITIONS)), rng.randint(0, 60)
    one = _singular(noun)
    task = f"adds up the {noun} that are {phrase} {n}"
    body = (
        f"    total = 0\n    for {one} in {noun}:\n        if {one} {CONDITIONS[phrase]} {n}:\n"
        f"            total += {one}\n    return total\n"
    )
    return (noun, phrase, str(n)), f"sum_{noun}", noun, task, body


def _count_if(rng: Random) -> Draft:
    noun, phrase, n = rng.choice(NOUNS), rng.choice(list(CONDITIONS)), rng.randint(0, 60)
    one = _singular(noun)
    task = f"counts the {noun} that are {phrase} {n}"
    body = (
        f"    count = 0\n    for {one} in {noun}:\n        if {one} {CONDITIONS[phrase]} {n}:\n"
        f"            count += 1\n    return count\n"
    )
    return (noun, phrase, str(n)), f"count_{noun}", noun, task, body


def _filter(rng: Random) -> Draft:
    noun, phrase, n = rng.choice(NOUNS), rng.choice(list(CONDITIONS)), rng.randint(0, 60)
    one = _singular(noun)
    task = f"returns a list of the {noun} that are {phrase} {n}"
    body = (
        f"    result = []\n    for {one} in {noun}:\n        if {one} {CONDITIONS[phrase]} {n}:\n"
        f"            result.append({one})\n    return result\n"
    )
    return (noun, phrase, str(n)), f"filter_{noun}", noun, task, body


def _change_each(rng: Random) -> Draft:
    noun, phrase, n = rng.choice(NOUNS), rng.choice(list(CHANGES)), rng.randint(2, 60)
    one = _singular(noun)
    task = f"takes the {noun} and applies {phrase} {n} to each of them"
    body = (
        f"    result = []\n    for {one} in {noun}:\n        result.append({one} {CHANGES[phrase]} {n})\n"
        f"    return result\n"
    )
    return (noun, phrase, str(n)), f"change_{noun}", noun, task, body


def _count_letter(rng: Random) -> Draft:
    noun, letter = rng.choice(WORDS), rng.choice("abcdefghilmnoprstuvw")
    one = _singular(noun)
    task = f'counts the {noun} that contain the letter "{letter}"'
    body = (
        f'    count = 0\n    for {one} in {noun}:\n        if "{letter}" in {one}:\n'
        f"            count += 1\n    return count\n"
    )
    return (noun, letter), f"count_{noun}", noun, task, body


def _longer_than(rng: Random) -> Draft:
    noun, n = rng.choice(WORDS), rng.randint(2, 30)
    one = _singular(noun)
    task = f"returns a list of the {noun} that are longer than {n} letters"
    body = (
        f"    result = []\n    for {one} in {noun}:\n        if len({one}) > {n}:\n"
        f"            result.append({one})\n    return result\n"
    )
    return (noun, str(n)), f"long_{noun}", noun, task, body


def _first(rng: Random) -> Draft:
    noun, n = rng.choice(NOUNS + WORDS), rng.randint(2, 30)
    task = f"sorts the {noun} and returns the first {n} of them"
    body = f"    result = sorted({noun})\n    return result[:{n}]\n"
    return (noun, str(n)), f"first_{noun}", noun, task, body


def _default(rng: Random) -> Draft:
    noun, n = rng.choice(NOUNS), rng.randint(0, 60)
    task = f"returns the largest of the {noun}, or {n} when there are no {noun}"
    body = f"    if not {noun}:\n        return {n}\n    return max({noun})\n"
    return (noun, str(n)), f"largest_{noun}", noun, task, body


FAMILIES: dict[str, Callable[[Random], Draft]] = {
    "sum_if": _sum_if,
    "count_if": _count_if,
    "filter": _filter,
    "change_each": _change_each,
    "count_letter": _count_letter,
    "longer_than": _longer_than,
    "first": _first,
    "default": _default,
}
PHRASINGS = (
    "Write a Python function named `{name}` that {task}.",
    "Please write a function `{name}` in Python that {task}.",
    "I need a Python function called `{name}` that {task}.",
)


def make_code(rng: Random) -> Problem:
    """One function to write; its content is the family with its names and constants."""
    family = rng.choice(list(FAMILIES))
    slots, stem, parameter, task, body = FAMILIES[family](rng)
    name = f"{rng.choice(VERBS)}_{stem}" if rng.random() < 0.5 else stem
    question = rng.choice(PHRASINGS).format(name=name, task=task)
    docstring = f"{task[0].upper()}{task[1:]}."
    quotes = '"""'
    reference = (
        f"Here is the function `{name}`:\n```python\ndef {name}({parameter}):\n"
        f"    {quotes}{docstring}{quotes}\n{body}```\n"
        f"Call `{name}` with a list of {parameter} to use it."
    )
    return Problem("code", f"code/{family}/{'/'.join(slots)}", question, reference)
