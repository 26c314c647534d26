"""A JSON schema and a text: the answer is one object with the text's data."""

import json
from collections.abc import Callable
from random import Random
from typing import Any

from demo.problems.chat import DAYS, EVENTS, GOODS
from demo.problems.problem import Problem
from demo.problems.words import CITIES, COLORS, PEOPLE, THINGS, joined, made_up_word, word

JOBS = ("teacher", "doctor", "farmer", "painter", "sailor", "baker", "driver", "singer", "writer", "nurse")
SKIES = ("sunny", "cloudy", "rainy", "windy", "snowy", "foggy")
TYPES = {str: "string", int: "integer", bool: "boolean", float: "number"}

Record = tuple[dict[str, Any], str]


def person_name(rng: Random) -> str:
    """A first name from the list, or a made-up one."""
    return rng.choice(PEOPLE) if rng.random() < 0.7 else made_up_word(rng).capitalize()


def _person(rng: Random) -> Record:
    name, age, city, job = person_name(rng), rng.randint(5, 95), rng.choice(CITIES), rng.choice(JOBS)
    text = rng.choice(
        (
            f"{name} is {age} years old, lives in {city} and works as a {job}.",
            f"{name} from {city} is a {job} and {age} years old.",
            f"I met {name} in {city}, a {job} of {age} years.",
        )
    )
    return {"name": name, "age": age, "city": city, "job": job}, text


def _order(rng: Random) -> Record:
    customer, item, quantity = person_name(rng), rng.choice(THINGS), rng.randint(2, 60)
    price, color, paid = rng.randint(2, 400), rng.choice(COLORS), rng.random() < 0.5
    paying = "has paid" if paid else "has not paid yet"
    text = rng.choice(
        (
            f"{customer} orders {quantity} {color} {item}s for {price} dollars and {paying}.",
            f"For {price} dollars {customer} bought {quantity} {item}s in {color}. {customer} {paying}.",
        )
    )
    fields = {"customer": customer, "item": item, "quantity": quantity, "color": color, "price": price, "paid": paid}
    return fields, text


def _event(rng: Random) -> Record:
    title, day, hour = rng.choice(list(EVENTS)), rng.choice(DAYS), rng.randint(1, 23)
    place, guests = rng.choice(CITIES), rng.sample(PEOPLE, rng.randint(1, 4))
    text = rng.choice(
        (
            f"The {title} in {place} is on {day} at {hour} o'clock. {joined(guests)} will come.",
            f"On {day} at {hour} o'clock there is a {title} in {place} with {joined(guests)}.",
        )
    )
    return {"title": title, "day": day, "hour": hour, "place": place, "guests": guests}, text


def _book(rng: Random) -> Record:
    title = " ".join(word(rng).capitalize() for _ in range(rng.randint(1, 3)))
    author, pages, year = person_name(rng), rng.randint(20, 900), rng.randint(1900, 2025)
    text = rng.choice(
        (
            f'"{title}" by {author} has {pages} pages and came out in {year}.',
            f'In {year} {author} wrote "{title}", a book of {pages} pages.',
        )
    )
    return {"title": title, "author": author, "pages": pages, "year": year}, text


def _weather(rng: Random) -> Record:
    city, day, sky, temperature = rng.choice(CITIES), rng.choice(DAYS), rng.choice(SKIES), rng.randint(-20, 38)
    text = rng.choice(
        (
            f"On {day} it is {sky} in {city} with {temperature} degrees.",
            f"{city} is {sky} on {day}, and the temperature is {temperature} degrees.",
        )
    )
    return {"city": city, "day": day, "sky": sky, "temperature": temperature}, text


def _basket(rng: Random) -> Record:
    name, items = person_name(rng), rng.sample(GOODS, rng.randint(2, 5))
    total = rng.randint(3, 99)
    text = rng.choice(
        (f"{name} buys {joined(items)} and pays {total} dollars.", f"{joined(items)} cost {name} {total} dollars.")
    )
    return {"name": name, "items": items, "total": total}, text


def _pairs(rng: Random) -> Record:
    """Keys that no other record has, each named in the text."""
    fields: dict[str, Any] = {}
    count = rng.randint(2, 4)
    while len(fields) < count:
        key = word(rng)
        fields[key] = rng.randint(0, 999) if rng.random() < 0.5 else rng.choice((*COLORS, made_up_word(rng)))
    return fields, "The " + joined([f"{key} is {value}" for key, value in fields.items()]) + "."


RECORDS: tuple[Callable[[Random], Record], ...] = (_person, _order, _event, _book, _weather, _basket, _pairs)


def schema_of(fields: dict[str, Any]) -> dict[str, Any]:
    """The JSON schema of an object with these values."""

    def of(value: Any) -> dict[str, Any]:
        if isinstance(value, list):
            return {"type": "array", "items": {"type": "string"}}
        return {"type": TYPES[type(value)]}

    return {"type": "object", "properties": {key: of(value) for key, value in fields.items()}, "required": list(fields)}


def make_json(rng: Random) -> Problem:
    """One object to fill; its content is the object."""
    fields, text = rng.choice(RECORDS)(rng)
    names = list(fields)
    if rng.random() < 0.5:
        rng.shuffle(names)
    wanted = {name: fields[name] for name in names[: rng.randint(2, len(names))]}
    schema = json.dumps(schema_of(wanted))
    ask = rng.choice(
        (
            "Fill this JSON schema with data from the text.\nSchema: {s}\nText: {x}",
            "Answer in JSON that follows this schema: {s}\n{x}",
            "Text: {x}\nWrite the data as JSON with this schema:\n{s}",
        )
    )
    answer = json.dumps(wanted, ensure_ascii=False)
    return Problem("tools", f"json/{answer}", ask.format(s=schema, x=text), answer)
