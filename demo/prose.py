"""System prompts of any length: instructions and facts that come before an ordinary question.

The long ones have up to about 1,600 tokens. They teach the pair to answer the question at the end of a long
shared prefix as well as the same question alone.
"""

from random import Random

from demo.problems.chat import CAPITALS, EVENTS, GOODS, PEOPLE, SIGHTS

SHORT = (
    "You are a helpful assistant.",
    "You are a friendly assistant. Answer step by step.",
    "You answer questions about numbers, code and daily life.",
    "Be brief and correct.",
    "You are an assistant for a small school. Answer every question carefully.",
)
OPENINGS = (
    "You are an assistant that follows a handbook. Read the handbook first, then answer the question.",
    "The following document holds notes of our team. Read the notes, then help the user.",
    "These are the rules and facts of our office. Keep them in mind when you answer.",
)
RULES = (
    "Always answer politely and in full sentences.",
    "Show every step when a question asks for a number.",
    "Write code that is short and easy to read.",
    "Use a list when the user asks for several things.",
    "Never invent facts about people or places.",
    "Keep the names that the user gives in the question.",
    "End a worked problem with a line that states the answer.",
    "Do not repeat the question unless it helps the reader.",
    "When a word is not clear, use the most common meaning.",
    "Use the same units as the question.",
)


def short_system_prompt(rng: Random) -> str:
    """One sentence or two."""
    return rng.choice(SHORT)


def _fact(rng: Random) -> str:
    """One sentence of the kinds that fill a handbook."""
    kind = rng.randrange(6)
    if kind == 0:
        country = rng.choice(list(CAPITALS))
        return f"The office in {country} is in {CAPITALS[country]}."
    if kind == 1:
        return f"{rng.choice(PEOPLE)} looks after the {rng.choice(SIGHTS)} and the {rng.choice(SIGHTS)}."
    if kind == 2:
        return f"Room {rng.randint(1, 99)} holds {rng.randint(2, 60)} chairs and {rng.randint(1, 9)} tables."
    if kind == 3:
        event = rng.choice(list(EVENTS))
        return f"The next {event} {EVENTS[event]} is planned by {rng.choice(PEOPLE)}."
    if kind == 4:
        return f"We order {rng.randint(2, 50)} boxes of {rng.choice(GOODS)} from the {rng.choice(SIGHTS)} market."
    return rng.choice(RULES)


def document(rng: Random, sentences: int) -> str:
    """An opening and numbered sentences; about 20 tokens a sentence in the demo tokenizer."""
    lines = [f"{i}. {_fact(rng)}" for i in range(1, sentences + 1)]
    return "\n".join([rng.choice(OPENINGS), *lines])


def long_system_prompt(rng: Random) -> str:
    """A handbook of between about 60 and 1,600 tokens."""
    return document(rng, rng.randint(3, 80))
