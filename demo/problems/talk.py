"""Short questions and answers: sums, lists, single facts, greetings."""

from collections.abc import Callable
from random import Random

from demo.problems.chat import CAPITALS, DAYS, TOPICS
from demo.problems.math import NAMES
from demo.problems.problem import Problem

Draft = tuple[str, str, str]
NUMBER_WORDS = ("three", "four", "five", "six", "seven", "eight")
PACKING = (
    "a passport", "a toothbrush", "a warm jacket", "two shirts", "a towel", "a phone charger", "a book", "sunglasses",
    "an umbrella", "a water bottle", "a map", "a camera",
)  # fmt: skip
MONTHS = (
    "January", "February", "March", "April", "May", "June", "July", "August", "September", "October", "November",
    "December",
)  # fmt: skip
FIXED = {
    "Hello": "Hello! How can I help you?",
    "Hello!": "Hello! How can I help you?",
    "Hello.": "Hello! How can I help you?",
    "Hello there!": "Hello! How can I help you?",
    "Hi": "Hello! How can I help you?",
    "Hi!": "Hello! How can I help you?",
    "Hi there!": "Hello! How can I help you?",
    "Good morning!": "Good morning! How can I help you?",
    "Good evening!": "Good evening! How can I help you?",
    "How are you?": "I am fine, thank you! How can I help you?",
    "Thank you!": "You are welcome!",
    "Thank you.": "You are welcome!",
    "Thank you very much!": "You are welcome!",
    "Thanks!": "You are welcome!",
    "Thanks a lot!": "You are welcome!",
    "Goodbye!": "Goodbye! Have a nice day!",
    "Bye!": "Goodbye! Have a nice day!",
    "Good night!": "Good night! Sleep well!",
    "Say hello.": "Hello!",
    "Say goodbye.": "Goodbye!",
    "Say yes.": "Yes!",
    "Say no.": "No!",
    "Who are you?": "I am a small demo model with about two million parameters.",
    "What are you?": "I am a small demo model with about two million parameters.",
    "What is your name?": "I am a small demo model and have no name.",
    "What can you do?": (
        "I can solve short word problems, add numbers, write lists and small functions, repeat and edit text, "
        "fill in JSON and call tools."
    ),
    "Help": (
        "I can solve short word problems, add numbers, write lists and small functions, repeat and edit text, "
        "fill in JSON and call tools."
    ),
    "Tell me a joke.": "Why did the token cross the road? It was accepted on the other side!",
    "What are the days of the week?": f"The days of the week are {', '.join(DAYS[:-1])} and {DAYS[-1]}.",
    "What are the months of the year?": f"The months of the year are {', '.join(MONTHS[:-1])} and {MONTHS[-1]}.",
}


def _fixed(rng: Random) -> Draft:
    question = rng.choice(list(FIXED))
    return "", question, FIXED[question]


def _sum(rng: Random) -> Draft:
    kind = rng.randrange(4)
    if kind == 0:
        a, b = rng.randint(2, 99), rng.randint(2, 39)
        sign, word, result = "+", "plus", a + b
    elif kind == 1:
        b, result = rng.randint(2, 49), rng.randint(2, 60)
        a, sign, word = result + b, "-", "minus"
    elif kind == 2:
        a, b = rng.randint(2, 9), rng.randint(2, 9)
        sign, word, result = "*", "times", a * b
    else:
        b, result = rng.randint(2, 9), rng.randint(2, 9)
        a, sign, word = b * result, "/", "divided by"
    return _equation(rng, a, sign, word, b, result)


def _equation(rng: Random, a: int, sign: str, word: str, b: int, result: int) -> Draft:
    """The question for the result of two numbers."""
    ask = rng.choice(
        (
            "What is {a} {s} {b}?",
            "What is {a} {s} {b}?",
            "How much is {a} {w} {b}?",
            "What is {a} {w} {b}?",
            "{a} {s} {b} =",
        )
    )
    return f"{a}{sign}{b}", ask.format(a=a, b=b, s=sign, w=word), f"{a} {sign} {b} = {result}"


def _long_sum(rng: Random) -> Draft:
    a, b, c = rng.randint(2, 45), rng.randint(2, 39), rng.randint(2, 29)
    ask = rng.choice(("What is the sum of {a}, {b} and {c}?", "Add {a}, {b} and {c}.", "What is {a} + {b} + {c}?"))
    answer = f"{a} + {b} = {a + b}\n{a + b} + {c} = {a + b + c}\nAnswer: {a + b + c}"
    return f"{a}+{b}+{c}", ask.format(a=a, b=b, c=c), answer


def _list(rng: Random) -> Draft:
    topic, n = rng.choice(list(TOPICS)), rng.randint(3, 8)
    ask = rng.choice(("List {n} {t}.", "Name {n} {t}.", "Please list {n} {t}.", "Write a list of {n} {t}."))
    shown = NUMBER_WORDS[n - 3] if rng.random() < 0.5 else str(n)
    answer = "\n".join(f"{i}. {entry}" for i, entry in enumerate(TOPICS[topic][:n], 1))
    return f"{topic}/{n}", ask.format(n=shown, t=topic), answer


def _about(rng: Random) -> Draft:
    topic = rng.choice(list(TOPICS))
    shown = TOPICS[topic][:4]
    answer = f"Some {topic} are {', '.join(shown[:-1])} and {shown[-1]}."
    return "", rng.choice(("Tell me about {t}.", "What are some {t}?")).format(t=topic), answer


def _packing(rng: Random) -> Draft:
    n = rng.randint(0, 11)
    number = f"{n} " if n and rng.random() < 0.7 else ""
    shown = PACKING[: n if number else 5]
    question = f"Write a short list of {number}things to pack."
    return "suitcase", question, "\n".join(f"- {thing}" for thing in shown)


def _capital(rng: Random) -> Draft:
    country = rng.choice(list(CAPITALS))
    return country, f"What is the capital of {country}?", f"The capital of {country} is {CAPITALS[country]}."


def _count(rng: Random) -> Draft:
    first = rng.randint(1, 30)
    last = first + rng.randint(3, 12)
    return f"{first}-{last}", f"Count from {first} to {last}.", " ".join(map(str, range(first, last + 1)))


def _meet(rng: Random) -> Draft:
    name = rng.choice(NAMES)
    question = rng.choice(("My name is {n}.", "I am {n}.", "Hello, I am {n}.", "Hi, my name is {n}.")).format(n=name)
    return name, question, f"Nice to meet you, {name}! How can I help you?"


def _adder(rng: Random) -> Draft:
    n = rng.randint(1, 60)
    verb, sign, name = rng.choice((("adds", "+", "add"), ("subtracts", "-", "subtract")))
    code = f"def {name}_{n}(value):\n    return value {sign} {n}\n"
    return f"{name}/{n}", f"Write a function that {verb} {n}.", f"```python\n{code}```"


FAMILIES: dict[str, tuple[int, Callable[[Random], Draft]]] = {
    "fixed": (20, _fixed),
    "sum": (34, _sum),
    "long_sum": (12, _long_sum),
    "list": (12, _list),
    "about": (4, _about),
    "packing": (3, _packing),
    "capital": (5, _capital),
    "count": (5, _count),
    "meet": (4, _meet),
    "adder": (4, _adder),
}
"""Each family with its weight. Those without slots have the same content every time, which is not held out."""


def make_small_sum(rng: Random) -> Problem:
    """A sum or a difference of numbers below ten, of which `make_talk` has few."""
    a, b = rng.randint(1, 9), rng.randint(1, 9)
    sign, word, result = rng.choice((("+", "plus", a + b), ("-", "minus", a)))
    slots, question, reference = _equation(rng, a + b if sign == "-" else a, sign, word, b, result)
    return Problem("talk", f"talk/sum/{slots}", question, reference)


def make_talk(rng: Random) -> Problem:
    """One short question; its content is the family with every slot of it."""
    weights = [weight for weight, _ in FAMILIES.values()]
    family = rng.choices(list(FAMILIES), weights=weights)[0]
    slots, question, reference = FAMILIES[family][1](rng)
    return Problem("talk", f"talk/{family}/{slots}", question, reference)
