"""Answers with chance in them: what they say does not follow from the question.

They keep the target unsure, so that sampled text differs from seed to seed.
"""

from random import Random

from demo.problems.chat import CAPITALS, DAYS, SIGHTS, TOPICS
from demo.problems.problem import Problem
from demo.problems.words import ADJECTIVES, NOUNS, PEOPLE, TIMES, VERBS, noun_phrase

ASKED = (
    "Tell me something", "Tell me something.", "Tell me a story.", "Tell me a story", "Write a short story.",
    "Write something.", "Tell me something new.", "Write a poem.", "Tell me more.", "Tell me a short story.",
)  # fmt: skip
ASKED_ABOUT = ("Tell me something about {x}", "Tell me something about {x}.", "Tell me a story about {x}.")


def _opening(rng: Random, about: str) -> str:
    """The first sentence; with `about` it names that."""
    adjective, noun = rng.choice(ADJECTIVES), rng.choice(NOUNS)
    topic = rng.choice(list(TOPICS))
    entry = rng.choice(TOPICS[topic])
    day, sight, person = rng.choice(DAYS), rng.choice(SIGHTS), rng.choice(PEOPLE)
    country = rng.choice(list(CAPITALS))
    if about:
        return rng.choice(
            (
                f"{about} has a {adjective} {noun} near the {sight}.",
                f"The {noun} of {about} is {adjective}.",
                f"Here is a story about {about} and the {noun}.",
                f"Once {about} had a {adjective} {noun}.",
            )
        )
    return rng.choice(
        (
            f"Here is something about {topic}: {entry} is one of them.",
            f"Here is a {adjective} story about a {noun}.",
            f"The {adjective} {noun} is near the {sight}.",
            f"The capital of {country} is {CAPITALS[country]}.",
            f"A {adjective} {noun} {rng.choice(VERBS)} {noun_phrase(rng)}.",
            f"A {noun} is not a {rng.choice(NOUNS)}.",
            f"One {day} {person} went to the {sight}.",
            f"One of the {topic} is {entry}.",
            f"There is a {adjective} {noun} in the {sight}.",
            f"There was once a {noun} with a {rng.choice(ADJECTIVES)} {rng.choice(NOUNS)}.",
            f"{person} {rng.choice(VERBS)} {noun_phrase(rng)} {rng.choice(TIMES)}.",
        )
    )


def _next(rng: Random) -> str:
    adjective, noun = rng.choice(ADJECTIVES), rng.choice(NOUNS)
    person, sight = rng.choice(PEOPLE), rng.choice(SIGHTS)
    return rng.choice(
        (
            f"Then {person} {rng.choice(VERBS)} {noun_phrase(rng)}.",
            f"The {noun} was very {adjective}.",
            f"After that the {noun} went to the {sight}.",
            f"{person} said that the {noun} is {adjective}.",
            f"In the end everybody was {adjective}.",
            f"But the {adjective} {noun} {rng.choice(VERBS)} {noun_phrase(rng)} {rng.choice(TIMES)}.",
        )
    )


def make_story(rng: Random) -> Problem:
    """A request for a story and one of very many answers to it."""
    about = ""
    if rng.random() < 0.3:
        names = rng.sample([*CAPITALS, *PEOPLE], rng.randint(1, 2))
        about = " and ".join(names)
    question = rng.choice(ASKED_ABOUT).format(x=about) if about else rng.choice(ASKED)
    text = " ".join([_opening(rng, about), *(_next(rng) for _ in range(rng.randint(1, 7)))])
    return Problem("story", f"story/{text}", question, text)
