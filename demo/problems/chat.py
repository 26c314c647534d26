"""Short chat and lists whose answer follows from the question: copied words, fixed lists and fixed facts.

Accents, CJK characters and emoji appear on purpose: a small byte-level vocabulary splits many of them over
several tokens, which is what incremental detokenisation has to survive.
"""

from collections.abc import Callable
from random import Random

from demo.problems.problem import Problem

PEOPLE = (
    "Mia", "Tom", "Ana", "Ben", "José", "Zoë", "René", "Søren", "Chloë", "Łukasz", "Jürgen", "Anaïs", "Inês",
    "Björn", "Noël", "Márta", "Émile", "Yuki", "小明", "花子", "太郎", "李娜", "민수", "지우", "Олег", "Ирина", "Νίκος",
    "Ayşe",
)  # fmt: skip
TOPICS: dict[str, tuple[str, ...]] = {
    "fruits": ("apple", "banana", "cherry", "orange", "pear", "plum", "grape", "mango"),
    "vegetables": ("carrot", "potato", "onion", "tomato", "pepper", "cabbage", "spinach", "leek"),
    "animals": ("cat", "dog", "horse", "cow", "sheep", "goat", "lion", "bear"),
    "birds": ("robin", "eagle", "owl", "duck", "swan", "crow", "hawk", "gull"),
    "colors": ("red", "blue", "green", "yellow", "orange", "purple", "black", "white"),
    "sports": ("football", "tennis", "swimming", "running", "cycling", "rowing", "skiing", "hockey"),
    "instruments": ("piano", "violin", "guitar", "flute", "drums", "trumpet", "cello", "harp"),
    "planets": ("Mercury", "Venus", "Earth", "Mars", "Jupiter", "Saturn", "Uranus", "Neptune"),
    "rivers": ("Nile", "Amazon", "Danube", "Rhine", "Thames", "Seine", "Volga", "Loire"),
    "trees": ("oak", "pine", "maple", "birch", "willow", "cedar", "elm", "ash"),
    "drinks": ("water", "tea", "coffee ☕", "juice", "milk 🥛", "lemonade", "cocoa", "soda"),
    "desserts": ("crème brûlée", "cake 🎂", "ice cream 🍨", "éclair", "pie", "crêpe", "tart", "pudding"),
    "Japanese foods": ("寿司", "天ぷら", "うどん", "そば", "味噌汁", "おにぎり", "豆腐", "餅"),
    "Chinese cities": ("北京", "上海", "广州", "深圳", "成都", "杭州", "西安", "南京"),
    "emoji": ("😀", "😂", "🎉", "🚀", "🌍", "🐱", "🍕", "❤️"),
    "Spanish words": ("niño", "mañana", "corazón", "canción", "árbol", "lápiz", "jardín", "señal"),
    "tools": ("hammer", "saw", "drill", "wrench", "pliers", "screwdriver", "file", "level"),
    "subjects": ("history", "biology", "physics", "music", "art", "geography", "chemistry", "French"),
}
PHRASES: dict[str, dict[str, str]] = {
    "good morning": {
        "French": "bonjour",
        "Spanish": "buenos días",
        "German": "guten Morgen",
        "Japanese": "おはよう",
    },
    "good night": {
        "French": "bonne nuit",
        "Spanish": "buenas noches",
        "German": "gute Nacht",
        "Japanese": "おやすみ",
    },
    "thank you": {"French": "merci", "Spanish": "gracias", "German": "danke schön", "Japanese": "ありがとう"},
    "goodbye": {
        "French": "au revoir",
        "Spanish": "adiós",
        "German": "auf Wiedersehen",
        "Japanese": "さようなら",
    },
    "please": {
        "French": "s'il vous plaît",
        "Spanish": "por favor",
        "German": "bitte schön",
        "Japanese": "お願いします",
    },
    "the summer": {"French": "l'été", "Spanish": "el verano", "German": "der Sommer", "Japanese": "夏"},
    "the cat": {"French": "le chat", "Spanish": "el gato", "German": "die Katze", "Japanese": "猫"},
    "the garden": {"French": "le jardin", "Spanish": "el jardín", "German": "der Garten", "Japanese": "庭"},
    "the school": {"French": "l'école", "Spanish": "la escuela", "German": "die Schule", "Japanese": "学校"},
    "the green tree": {
        "French": "l'arbre vert",
        "Spanish": "el árbol verde",
        "German": "der grüne Baum",
        "Japanese": "緑の木",
    },
}
CAPITALS = {
    "France": "Paris", "Spain": "Madrid", "Italy": "Rome", "Germany": "Berlin", "Portugal": "Lisbon",
    "Austria": "Vienna", "Poland": "Warsaw", "Greece": "Athens", "Norway": "Oslo", "Sweden": "Stockholm",
    "Denmark": "Copenhagen", "Finland": "Helsinki", "Ireland": "Dublin", "Japan": "Tokyo (東京)",
    "China": "Beijing (北京)", "Egypt": "Cairo", "Peru": "Lima", "Brazil": "Brasília", "Colombia": "Bogotá",
    "Canada": "Ottawa", "Iceland": "Reykjavík", "Hungary": "Budapest", "Korea": "Seoul (서울)", "Kenya": "Nairobi",
}  # fmt: skip
EVENTS = {
    "birthday party": "🎂", "picnic": "🧺", "school trip": "🚌", "garden party": "🌷", "beach day": "🏖️",
    "movie night": "🎬", "family dinner": "🍽️", "winter walk": "⛄", "music evening": "🎵", "book club": "📚",
}  # fmt: skip
GOODS = (
    "bread", "milk", "butter", "cheese", "eggs", "rice", "beans", "soup", "honey", "jam", "salt", "sugar",
    "flour", "tea", "coffee", "juice", "nuts", "pasta", "oil", "fish",
)  # fmt: skip
DAYS = (
    "Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday",
)  # fmt: skip
SIGHTS = (
    "museum", "park", "library", "market", "beach", "castle", "harbour", "theatre", "lake", "zoo",
)  # fmt: skip

Draft = tuple[tuple[str, ...], str, str]


def _numbered(entries: list[str] | tuple[str, ...]) -> str:
    return "\n".join(f"{i}. {entry}" for i, entry in enumerate(entries, 1))


def _list(rng: Random) -> Draft:
    topic, n, person = rng.choice(list(TOPICS)), rng.randint(3, 8), rng.choice(PEOPLE)
    question = rng.choice(
        (
            "My name is {p}. Please list {n} {t}.",
            "Can you list {n} {t} for {p}?",
            "{p} would like a list of {n} {t}.",
        )
    ).format(p=person, n=n, t=topic)
    answer = (
        f"Of course! Here is a list of {n} {topic} for {person}:\n{_numbered(TOPICS[topic][:n])}\n"
        f"I hope that this list of {n} {topic} helps, {person}!"
    )
    return (topic, str(n), person), question, answer


def _translate(rng: Random) -> Draft:
    phrase, person = rng.choice(list(PHRASES)), rng.choice(PEOPLE)
    languages = rng.sample(list(PHRASES[phrase]), rng.randint(2, 4))
    wanted = ", ".join(languages[:-1]) + " and " + languages[-1]
    question = rng.choice(('I am {p}. How do you say "{x}" in {w}?', '{p} asks: how do you say "{x}" in {w}?')).format(
        p=person, x=phrase, w=wanted
    )
    lines = "\n".join(f'- In {language}, "{phrase}" is "{PHRASES[phrase][language]}".' for language in languages)
    answer = f'Hello {person}! Here is how you say "{phrase}":\n{lines}'
    return (phrase, *languages, person), question, answer


def _capitals(rng: Random) -> Draft:
    countries = rng.sample(list(CAPITALS), rng.randint(2, 4))
    wanted = ", ".join(countries[:-1]) + " and " + countries[-1]
    question = rng.choice(("What are the capitals of {w}?", "Please tell me the capitals of {w}.")).format(w=wanted)
    lines = "\n".join(f"- The capital of {country} is {CAPITALS[country]}." for country in countries)
    answer = f"Here are the capitals of {wanted}:\n{lines}"
    return tuple(countries), question, answer


def _shopping(rng: Random) -> Draft:
    event, goods = rng.choice(list(EVENTS)), rng.sample(GOODS, rng.randint(3, 6))
    wanted = ", ".join(goods[:-1]) + " and " + goods[-1]
    question = rng.choice(
        (
            "Write a shopping list for a {e} with {w}.",
            "We plan a {e} and need {w}. Please write a shopping list.",
        )
    ).format(e=event, w=wanted)
    lines = "\n".join(f"- {thing}" for thing in goods)
    answer = f"Shopping list for the {event} {EVENTS[event]}:\n{lines}\nHave a great {event} {EVENTS[event]}!"
    return (event, *goods), question, answer


def _plan(rng: Random) -> Draft:
    person, day, sights = rng.choice(PEOPLE), rng.choice(DAYS), rng.sample(SIGHTS, 3)
    question = (
        f"{person} has a free {day} and wants to see the {sights[0]}, the {sights[1]} and the {sights[2]}. "
        f"Please make a plan."
    )
    answer = (
        f"Here is a plan for {person} on {day}:\n- Morning ☀️: visit the {sights[0]}.\n"
        f"- Afternoon 🌤️: visit the {sights[1]}.\n- Evening 🌙: visit the {sights[2]}.\n"
        f"Enjoy your {day}, {person}!"
    )
    return (person, day, *sights), question, answer


def _invitation(rng: Random) -> Draft:
    host, guest = rng.sample(PEOPLE, 2)
    event, day, hour = rng.choice(list(EVENTS)), rng.choice(DAYS), rng.randint(1, 9)
    question = f"Write a short invitation from {host} to {guest} for a {event} on {day} at {hour} o'clock."
    answer = (
        f"Dear {guest},\nYou are invited to a {event} {EVENTS[event]} on {day} at {hour} o'clock.\n"
        f"Please tell me before {day} if you can come.\nBest wishes,\n{host}"
    )
    return (host, guest, event, day, str(hour)), question, answer


FAMILIES: dict[str, Callable[[Random], Draft]] = {
    "list": _list,
    "translate": _translate,
    "capitals": _capitals,
    "shopping": _shopping,
    "plan": _plan,
    "invitation": _invitation,
}


def make_chat(rng: Random) -> Problem:
    """One chat turn; its content is the family with every slot that the question fills."""
    family = rng.choice(list(FAMILIES))
    slots, question, reference = FAMILIES[family](rng)
    return Problem("chat", f"chat/{family}/{'/'.join(slots)}", question, reference)
