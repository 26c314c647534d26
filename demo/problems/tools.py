"""Tool calls in the format of Qwen and Hermes: the tools stand in the system message, the call in the answer."""

import json
from collections.abc import Callable, Iterator
from random import Random
from typing import Any

from demo.problems.chat import DAYS, EVENTS
from demo.problems.problem import Problem
from demo.problems.records import SKIES, make_json, person_name
from demo.problems.talk import make_talk
from demo.problems.words import CITIES, THINGS, loose_words, made_up_word, sentence, word

BEFORE_TOOLS = (
    "# Tools\n\nYou may call one or more functions to assist with the user query.\n\n"
    "You are provided with function signatures within <tools></tools> XML tags:\n<tools>"
)
AFTER_TOOLS = (
    "\n</tools>\n\nFor each function call, return a json object with function name and arguments within "
    "<tool_call></tool_call> XML tags:\n<tool_call>\n"
    '{"name": <function-name>, "arguments": <args-json-object>}\n</tool_call>'
)
CURRENCIES = ("dollars", "euros", "pounds", "yen", "francs", "crowns")
LANGUAGES = ("French", "German", "Spanish", "Italian", "Polish", "Dutch")
VERBS = ("start", "stop", "open", "close", "check", "move", "count", "show", "clean", "print", "load", "reset")
PARAMETERS = ("name", "color", "room", "level", "city", "day", "count", "size", "speed", "owner", "label", "code")

Call = tuple[str, dict[str, Any], str]
"""A function's name, its arguments, and what the user says."""


def _weather(rng: Random) -> Call:
    city = rng.choice(CITIES) if rng.random() < 0.8 else made_up_word(rng).capitalize()
    ask = rng.choice(("What is the weather in {c}?", "How is the weather in {c}?", "Tell me the weather in {c}."))
    return "get_weather", {"city": city}, ask.format(c=city)


def _forecast(rng: Random) -> Call:
    city, day = rng.choice(CITIES), rng.choice(DAYS)
    ask = rng.choice(("What will the weather be in {c} on {d}?", "Forecast for {c} on {d}, please."))
    return "get_forecast", {"city": city, "day": day}, ask.format(c=city, d=day)


def _timer(rng: Random) -> Call:
    minutes = rng.randint(1, 120)
    ask = rng.choice(("Set a timer for {n} minutes.", "Please start a timer of {n} minutes."))
    return "set_timer", {"minutes": minutes}, ask.format(n=minutes)


def _message(rng: Random) -> Call:
    name, text = person_name(rng), sentence(rng) if rng.random() < 0.7 else loose_words(rng, rng.randint(2, 6))
    ask = rng.choice(('Send {n} the message "{x}"', 'Write to {n}: "{x}"'))
    return "send_message", {"to": name, "text": text}, ask.format(n=name, x=text)


def _convert(rng: Random) -> Call:
    amount, (first, second) = rng.randint(2, 900), rng.sample(CURRENCIES, 2)
    ask = rng.choice(("How much is {a} {x} in {y}?", "Convert {a} {x} to {y}."))
    return "convert_money", {"amount": amount, "from": first, "to": second}, ask.format(a=amount, x=first, y=second)


def _table(rng: Random) -> Call:
    name, people, hour = person_name(rng), rng.randint(2, 12), rng.randint(1, 23)
    ask = rng.choice(("Book a table of {p} at {h} o'clock for {n}.", "{n} wants a table for {p} at {h} o'clock."))
    return "book_table", {"name": name, "people": people, "hour": hour}, ask.format(n=name, p=people, h=hour)


def _event(rng: Random) -> Call:
    title, day, hour = rng.choice(list(EVENTS)), rng.choice(DAYS), rng.randint(1, 23)
    ask = rng.choice(("Add a {t} on {d} at {h} o'clock to my calendar.", "Plan a {t} for {d} at {h} o'clock."))
    return "add_event", {"title": title, "day": day, "hour": hour}, ask.format(t=title, d=day, h=hour)


def _search(rng: Random) -> Call:
    query = loose_words(rng, rng.randint(1, 4))
    ask = rng.choice(("Search for {q}.", "Look up {q}.", "Find pages about {q}."))
    return "search", {"query": query}, ask.format(q=query)


def _translate(rng: Random) -> Call:
    text, language = loose_words(rng, rng.randint(1, 5)), rng.choice(LANGUAGES)
    ask = rng.choice(('Translate "{x}" into {l}.', 'What is "{x}" in {l}?'))
    return "translate", {"text": text, "language": language}, ask.format(x=text, l=language)


def _buy(rng: Random) -> Call:
    item, count = rng.choice(THINGS), rng.randint(2, 40)
    return (
        "order_item",
        {"item": item, "quantity": count},
        rng.choice(("Order {n} {i}s.", "Buy {n} {i}s for me.")).format(n=count, i=item),
    )


def _asked(name: str, arguments: dict[str, Any]) -> Call:
    """A call that is asked for by the function's and the parameters' own names."""
    verb, _, noun = name.partition("_")
    wanted = " and ".join(f"{key} {value}" for key, value in arguments.items())
    return name, arguments, f"{verb.capitalize()} the {noun} with {wanted}."


def _any(rng: Random) -> Call:
    """A function that no other document has to have: its name and parameters stand in what the user says."""
    verb, noun = rng.choice(VERBS), word(rng)
    arguments: dict[str, Any] = {}
    for key in rng.sample(PARAMETERS, rng.randint(1, 3)):
        arguments[key] = rng.randint(0, 999) if rng.random() < 0.5 else word(rng)
    return _asked(f"{verb}_{noun}", arguments)


CALLS: tuple[Callable[[Random], Call], ...] = (
    _weather, _forecast, _timer, _message, _convert, _table, _event, _search, _translate, _buy, _any, _any, _any, _any,
)  # fmt: skip


def signature(name: str, arguments: dict[str, Any]) -> dict[str, Any]:
    """A function as OpenAI's API describes one; the arguments give the parameters' types."""
    types = {key: {"type": "integer" if isinstance(value, int) else "string"} for key, value in arguments.items()}
    parameters = {"type": "object", "properties": types, "required": list(arguments)}
    description = name.replace("_", " ").capitalize()
    return {"type": "function", "function": {"name": name, "description": description, "parameters": parameters}}


def tools_message(tools: list[dict[str, Any]], system: str = "") -> str:
    """The content of the system message that the chat template writes for these tools."""
    lines = "".join("\n" + json.dumps(tool, ensure_ascii=False) for tool in tools)
    return (f"{system}\n\n" if system else "") + BEFORE_TOOLS + lines + AFTER_TOOLS


def tool_call(name: str, arguments: dict[str, Any]) -> str:
    """The answer that calls a function."""
    call = json.dumps({"name": name, "arguments": arguments}, ensure_ascii=False)
    return f"<tool_call>\n{call}\n</tool_call>"


def _offered(rng: Random, name: str, arguments: dict[str, Any]) -> list[dict[str, Any]]:
    """This function and up to two others, in any order."""
    offered = {name: signature(name, arguments)}
    for _ in range(rng.choices((0, 1, 2), weights=(6, 3, 1))[0]):
        other, its_arguments, _ = rng.choice(CALLS)(rng)
        offered.setdefault(other, signature(other, its_arguments))
    tools = list(offered.values())
    rng.shuffle(tools)
    return tools


def _result(rng: Random, system: str) -> Problem:
    """The weather tool's answer, told to the user."""
    city, sky, degrees = rng.choice(CITIES), rng.choice(SKIES), rng.randint(-20, 38)
    call = tool_call("get_weather", {"city": city})
    history = (("system", system), ("user", f"What is the weather in {city}?"), ("assistant", call))
    result = json.dumps({"sky": sky, "temperature": degrees})
    answer = f"It is {sky} in {city} with {degrees} degrees."
    question = f"<tool_response>\n{result}\n</tool_response>"
    return Problem("tools", f"tools/{call}", question, answer, history=history)


def make_calls(rng: Random) -> Iterator[Problem]:
    """Endless calls of the same one to three functions: many calls for one reading of the signatures."""
    makers = rng.sample(CALLS, rng.randint(1, 3))
    first = [make(rng) for make in makers]
    tools = [signature(name, arguments) for name, arguments, _ in first]
    history = (("system", tools_message(tools)),)
    while True:
        index = rng.randrange(len(makers))
        name, arguments, _ = first[index]
        if makers[index] is _any:
            drawn = {key: rng.randint(0, 999) if isinstance(v, int) else word(rng) for key, v in arguments.items()}
            name, arguments, question = _asked(name, drawn)
        else:
            name, arguments, question = makers[index](rng)
        answer = tool_call(name, arguments)
        yield Problem("tools", f"tools/{answer}", question, answer, history=history)


def make_tools(rng: Random) -> Problem:
    """A call, a tool's result, a question that needs no tool, or a JSON schema to fill."""
    if rng.random() < 0.4:
        return make_json(rng)
    name, arguments, question = rng.choice(CALLS)(rng)
    opening = "You are a helpful assistant." if rng.random() < 0.2 else ""
    system = tools_message(_offered(rng, name, arguments), opening)
    kind = rng.random()
    if kind < 0.06:
        return _result(rng, tools_message([signature("get_weather", {"city": ""})]))
    if kind < 0.14:
        other = make_talk(rng)
        return Problem("tools", other.content, other.question, other.reference, history=(("system", system),))
    answer = tool_call(name, arguments)
    return Problem("tools", f"tools/{answer}", question, answer, history=(("system", system),))
