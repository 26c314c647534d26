"""Arithmetic word problems in two worked steps, over numbers a small model can learn.

The answer side repeats the words of the question, so that everything but the results can be copied, and ends
in a line `Answer: N`.
"""

from collections.abc import Callable
from random import Random

from demo.problems.problem import Problem

NAMES = (
    "Mia", "Tom", "Ana", "Ben", "Lea", "Sam", "Eva", "Max", "Ida", "Leo", "Nora", "Paul", "Rosa", "Hugo",
    "Lily", "Omar", "Vera", "Finn", "Zoe", "Jack", "Emma", "Noah", "Sara", "Luis", "Anna", "Karl", "Ruth",
    "Adam", "Nina", "Erik",
)  # fmt: skip
ITEMS = (
    "apples", "pears", "plums", "books", "pens", "stamps", "coins", "cards", "shells", "stones", "cookies",
    "candles", "buttons", "marbles", "tickets", "oranges", "lemons", "pencils", "stickers", "flowers",
)  # fmt: skip
CONTAINERS = ("bags", "boxes", "baskets", "jars", "trays", "packs")

Draft = tuple[tuple[int, ...], str, str, int]


def _lines(first: str, second: str, result: int) -> str:
    """The common frame of every worked answer."""
    return f"Let us solve it step by step.\nStep 1: {first}.\nStep 2: {second}.\nAnswer: {result}"


def _containers(rng: Random) -> Draft:
    name, item, box = rng.choice(NAMES), rng.choice(ITEMS), rng.choice(CONTAINERS)
    a, b, c = rng.randint(2, 9), rng.randint(2, 9), rng.randint(2, 29)
    ab, r = a * b, a * b + c
    question = (
        f"{name} has {a} {box} with {b} {item} each and then gets {c} more {item}. "
        f"How many {item} does {name} have in total?"
    )
    first = f"{name} has {a} {box} with {b} {item} each, and {a} * {b} = {ab}"
    second = f"{name} then gets {c} more {item}, and {ab} + {c} = {r}"
    return (a, b, c), question, _lines(first, second, r), r


def _give_away(rng: Random) -> Draft:
    name, item, box = rng.choice(NAMES), rng.choice(ITEMS), rng.choice(CONTAINERS)
    a, b = rng.randint(3, 9), rng.randint(3, 9)
    ab = a * b
    c = rng.randint(2, ab - 2)
    r = ab - c
    question = (
        f"{name} fills {a} {box} with {b} {item} each and gives away {c} {item}. How many {item} does {name} keep?"
    )
    first = f"{name} fills {a} {box} with {b} {item} each, and {a} * {b} = {ab}"
    second = f"{name} gives away {c} {item}, and {ab} - {c} = {r}"
    return (a, b, c), question, _lines(first, second, r), r


def _gain_and_lose(rng: Random) -> Draft:
    name, other, item = rng.choice(NAMES), rng.choice(NAMES), rng.choice(ITEMS)
    a, b = rng.randint(5, 60), rng.randint(5, 39)
    ab = a + b
    c = rng.randint(3, min(ab - 2, 49))
    r = ab - c
    question = (
        f"{name} has {a} {item}. {other} brings {b} more {item}, and then {name} loses {c} {item}. "
        f"How many {item} are left?"
    )
    first = f"{name} has {a} {item} and {other} brings {b} more {item}, and {a} + {b} = {ab}"
    second = f"{name} loses {c} {item}, and {ab} - {c} = {r}"
    return (a, b, c), question, _lines(first, second, r), r


def _change(rng: Random) -> Draft:
    name, item = rng.choice(NAMES), rng.choice(ITEMS)
    a, b = rng.randint(2, 9), rng.randint(2, 9)
    ab = a * b
    c = rng.choice([v for v in (20, 30, 40, 50, 60, 70, 80, 90, 100) if v > ab])
    r = c - ab
    question = (
        f"{name} buys {a} {item} that cost {b} dollars each and pays with {c} dollars. "
        f"How many dollars does {name} get back?"
    )
    first = f"{name} buys {a} {item} that cost {b} dollars each, and {a} * {b} = {ab}"
    second = f"{name} pays with {c} dollars, and {c} - {ab} = {r}"
    return (a, b, c), question, _lines(first, second, r), r


def _savings(rng: Random) -> Draft:
    name = rng.choice(NAMES)
    a, b, c = rng.randint(2, 9), rng.randint(2, 9), rng.randint(5, 39)
    ab, r = a * b, a * b + c
    question = (
        f"{name} saves {a} dollars every week for {b} weeks and already had {c} dollars. "
        f"How many dollars does {name} have now?"
    )
    first = f"{name} saves {a} dollars every week for {b} weeks, and {a} * {b} = {ab}"
    second = f"{name} already had {c} dollars, and {ab} + {c} = {r}"
    return (a, b, c), question, _lines(first, second, r), r


def _pages(rng: Random) -> Draft:
    name = rng.choice(NAMES)
    a, b = rng.randint(2, 9), rng.randint(2, 9)
    ab = a * b
    c = ab + rng.randint(3, 30)
    r = c - ab
    question = (
        f"A book has {c} pages. {name} reads {a} pages every day for {b} days. "
        f"How many pages does {name} still have to read?"
    )
    first = f"{name} reads {a} pages every day for {b} days, and {a} * {b} = {ab}"
    second = f"The book has {c} pages, and {c} - {ab} = {r}"
    return (a, b, c), question, _lines(first, second, r), r


def _share(rng: Random) -> Draft:
    name, item = rng.choice(NAMES), rng.choice(ITEMS)
    b, q, c = rng.randint(2, 9), rng.randint(2, 9), rng.randint(2, 39)
    a = b * q
    r = q + c
    question = (
        f"{name} shares {a} {item} equally among {b} friends, and each friend already had {c} {item}. "
        f"How many {item} does each friend have now?"
    )
    first = f"{name} shares {a} {item} equally among {b} friends, and {a} / {b} = {q}"
    second = f"Each friend already had {c} {item}, and {q} + {c} = {r}"
    return (a, b, c), question, _lines(first, second, r), r


def _together(rng: Random) -> Draft:
    name, other, item = rng.choice(NAMES), rng.choice(NAMES), rng.choice(ITEMS)
    a, b = rng.randint(5, 45), rng.randint(2, 39)
    ab, r = a + b, 2 * a + b
    question = (
        f"{name} collects {a} {item}. {other} collects {b} {item} more than that. "
        f"How many {item} do they have together?"
    )
    first = f"{other} collects {b} {item} more than {name}, and {a} + {b} = {ab}"
    second = f"{name} collects {a} {item}, and {ab} + {a} = {r}"
    return (a, b), question, _lines(first, second, r), r


FAMILIES: dict[str, Callable[[Random], Draft]] = {
    "containers": _containers,
    "give_away": _give_away,
    "gain_and_lose": _gain_and_lose,
    "change": _change,
    "savings": _savings,
    "pages": _pages,
    "share": _share,
    "together": _together,
}


def make_math(rng: Random) -> Problem:
    """One word problem; its content is the family and its numbers, not the names in it."""
    family = rng.choice(list(FAMILIES))
    numbers, question, reference, result = FAMILIES[family](rng)
    content = f"math/{family}/{'/'.join(map(str, numbers))}"
    return Problem("math", content, question, reference, str(result))
