"""The generator is deterministic, its split is clean, and the committed held-out sets are what it makes."""

import json
from itertools import islice
from pathlib import Path
from random import Random

import pytest
from transformers import AutoTokenizer

from demo.chat_template import CHAT_TEMPLATE
from demo.data import CATEGORIES, WEIGHTS, held_out_rows, is_held_out, problems, render_chat, training_documents
from demo.problems import Problem, talk
from demo.problems.copy import ORDINALS
from demo.problems.tools import make_calls, tool_call, tools_message
from tests.support.scale import scaled

HELD_OUT = Path(__file__).parents[2] / "demo" / "held_out"
FIELDS = {"id", "category", "messages", "prompt", "reference", "answer"}


def committed_rows(category: str) -> list[dict]:
    lines = (HELD_OUT / f"{category}.jsonl").read_text(encoding="utf-8").splitlines()
    return [json.loads(line) for line in lines]


def test_the_same_seed_makes_the_same_documents():
    first = list(islice(training_documents(seed=3, long_share=0.1), 200))
    assert first == list(islice(training_documents(seed=3, long_share=0.1), 200))
    assert first != list(islice(training_documents(seed=4, long_share=0.1), 200))


@pytest.mark.parametrize("category", CATEGORIES)
def test_the_split_follows_the_content_and_nothing_else(category):
    for held_out in (False, True):
        for problem in islice(problems(Random(1), category, held_out), 300):
            assert is_held_out(problem.content) == held_out


@pytest.mark.parametrize("category", CATEGORIES)
def test_no_held_out_question_occurs_in_training(category):
    asked = {row["messages"][0]["content"] for row in committed_rows(category)}
    trained = {problem.question for problem in islice(problems(Random(2), category, held_out=False), scaled(5_000))}
    assert not asked & trained


def test_no_training_document_contains_a_held_out_question():
    documents = ["".join(s.text for s in d) for d in islice(training_documents(seed=0, long_share=0.05), scaled(1500))]
    text = "\n".join(["", *documents])
    for category in CATEGORIES:
        for row in committed_rows(category):
            question = row["messages"][-1]["content"]
            asked = (f"\n{question}\n", f"\n{question}<|im_end|>", f'"{question}"')
            assert not [one for one in asked if one in text], row["id"]


@pytest.mark.parametrize("category", CATEGORIES)
def test_committed_held_out_rows_are_what_the_generator_makes(category):
    rows = committed_rows(category)
    assert rows == held_out_rows(category, len(rows))


@pytest.mark.parametrize("category", CATEGORIES)
def test_held_out_rows_follow_the_schema(category):
    rows = committed_rows(category)
    assert len(rows) >= 150
    assert len({row["id"] for row in rows}) == len({row["prompt"] for row in rows}) == len(rows)
    for row in rows:
        assert set(row) == FIELDS
        assert row["category"] == category
        roles = [message["role"] for message in row["messages"]]
        assert roles[-1] == "user"
        assert category == "tools" or roles == ["user"]
        assert row["prompt"] == render_chat(row["messages"], add_generation_prompt=True)
        assert (row["answer"] is not None) == (category == "math")


def test_the_stated_answer_is_the_last_line_of_the_worked_solution():
    for row in committed_rows("math"):
        assert row["reference"].splitlines()[-1] == f"Answer: {row['answer']}"


def test_every_equation_of_a_worked_solution_holds():
    for problem in islice(problems(Random(5), "math", held_out=False), 2000):
        for line in problem.reference.splitlines()[1:3]:
            left, _, right = line.rstrip(".").rpartition(" and ")[2].partition(" = ")
            a, operator, b = left.split()
            results = {"+": int(a) + int(b), "-": int(a) - int(b), "*": int(a) * int(b), "/": int(a) / int(b)}
            assert results[operator] == int(right), problem


def test_every_code_answer_compiles():
    for problem in islice(problems(Random(6), "code", held_out=False), 500):
        compile(problem.reference.split("```python\n")[1].split("```")[0], problem.content, "exec")


def made(category: str, count: int, seed: int) -> list[Problem]:
    return list(islice(problems(Random(seed), category, held_out=False), count))


def family(problem: Problem) -> str:
    return problem.content.split("/")[1]


def test_repeated_and_quoted_text_stands_in_the_question():
    for problem in made("copy", 1000, seed=7):
        if family(problem) in ("repeat", "quoted", "quote"):
            assert problem.reference.strip('"') in problem.question
        if family(problem) == "repeat":
            assert problem.question.endswith(problem.reference)


def test_an_edited_text_keeps_every_other_word():
    for problem in made("copy", 1000, seed=8):
        if family(problem) in ("replace", "rename"):
            kept = set(problem.reference.split()) & set(problem.question.split())
            assert len(kept) >= len(set(problem.reference.split())) - 2


def test_a_sentence_is_quoted_by_its_number():
    for problem in made("copy", 1000, seed=9):
        if family(problem) == "quote":
            text = problem.question.partition(":")[2].strip()
            index = next((i for i, name in enumerate(ORDINALS) if f" {name} " in problem.question), -1)
            found = [f"{one.rstrip('.')}." for one in text.split(". ")]
            assert problem.reference == f'"{found[index]}"'


def test_every_short_sum_is_right():
    for problem in made("talk", 2000, seed=10):
        if family(problem) in ("sum", "long_sum"):
            for line in problem.reference.splitlines()[:2]:
                left, _, right = line.partition(" = ")
                assert eval(left) == int(right)


def test_short_questions_without_a_number_or_name_are_trained_on():
    """Their content is always the same, so that its hash decides for all of them."""
    for name in ("fixed", "about"):
        assert not is_held_out(f"talk/{name}/")
    assert not is_held_out("talk/packing/suitcase")
    assert all("{" not in answer for answer in talk.FIXED.values())


def follows(value: object, schema: dict) -> bool:
    """Whether a value has the types of a schema, as far as the generator's schemas go."""
    if schema["type"] == "object":
        assert isinstance(value, dict)
        return value.keys() == schema["properties"].keys() and all(
            follows(value[name], one) for name, one in schema["properties"].items()
        )
    if schema["type"] == "array":
        assert isinstance(value, list)
        return all(follows(one, schema["items"]) for one in value)
    return type(value) is {"string": str, "integer": int, "boolean": bool}[schema["type"]]


def test_a_tool_call_names_an_offered_function_and_has_its_parameters():
    calls = [problem for problem in made("tools", 1000, seed=11) if problem.reference.startswith("<tool_call>")]
    assert len(calls) > 300
    for problem in calls:
        call = json.loads(problem.reference.splitlines()[1])
        offered = [json.loads(line) for line in problem.history[0][1].splitlines() if line.startswith('{"type"')]
        function = next(tool["function"] for tool in offered if tool["function"]["name"] == call["name"])
        assert function["parameters"]["required"] == list(call["arguments"])
        assert follows(call["arguments"], function["parameters"])


def test_filled_json_follows_its_schema_and_its_data_stands_in_the_text():
    filled = [problem for problem in made("tools", 600, seed=12) if problem.content.startswith("json/")]
    assert len(filled) > 150
    for problem in filled:
        start = problem.question.index('{"type"')
        schema, _ = json.JSONDecoder().raw_decode(problem.question[start:])
        data = json.loads(problem.reference)
        assert follows(data, schema)
        assert list(data) == schema["required"]
        for value in data.values():
            for one in value if isinstance(value, list) else [value]:
                assert isinstance(one, bool) or str(one) in problem.question


def test_the_chat_template_renders_tools_as_training_did():
    tokenizer = AutoTokenizer.from_pretrained(str(Path(__file__).parents[2] / "demo" / "pair" / "target"))
    problem = next(one for one in made("tools", 1000, seed=13) if len(one.history) == 3)
    (_, system), (_, question), (_, call) = problem.history
    tools = [json.loads(line) for line in system.splitlines() if line.startswith('{"type"')]
    name, arguments = (json.loads(call.splitlines()[1])[key] for key in ("name", "arguments"))
    assert system == tools_message(tools)
    assert call == tool_call(name, arguments)
    result = problem.question.removeprefix("<tool_response>\n").removesuffix("\n</tool_response>")
    for content in ("", None):
        messages = [
            {"role": "user", "content": question},
            {
                "role": "assistant",
                "content": content,
                "tool_calls": [{"function": {"name": name, "arguments": arguments}}],
            },
            {"role": "tool", "content": result},
        ]
        rendered = tokenizer.apply_chat_template(
            messages, tools=tools, tokenize=False, add_generation_prompt=True, chat_template=CHAT_TEMPLATE
        )
        assert rendered == render_chat(problem.messages, add_generation_prompt=True)


def test_two_tool_answers_share_a_turn_and_a_system_message_stays_before_the_tools():
    tokenizer = AutoTokenizer.from_pretrained(str(Path(__file__).parents[2] / "demo" / "pair" / "target"))
    assert tokenizer.chat_template == CHAT_TEMPLATE
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Hi"},
        {"role": "tool", "content": "1"},
        {"role": "tool", "content": "2"},
    ]
    tool = {"type": "function", "function": {"name": "f", "parameters": {}}}
    rendered = tokenizer.apply_chat_template(messages, tools=[tool], tokenize=False)
    assert rendered.startswith("<|im_start|>system\nBe brief.\n\n# Tools\n")
    assert rendered.count("<|im_start|>system") == 1
    assert rendered.endswith(
        "<|im_start|>user\n<tool_response>\n1\n</tool_response>\n<tool_response>\n2\n</tool_response><|im_end|>\n"
    )


def test_stories_answer_one_question_in_many_ways():
    answers: dict[str, set[str]] = {}
    for problem in made("story", 2000, seed=14):
        answers.setdefault(problem.question, set()).add(problem.reference.split()[0])
    beginnings = answers["Tell me something"]
    assert {"Here", "A", "The", "One", "There"} <= beginnings


def test_every_category_is_trained_on():
    assert set(CATEGORIES) < set(WEIGHTS)


def test_calls_in_one_conversation_are_of_the_offered_functions():
    for seed in range(40):
        calls = list(islice(make_calls(Random(seed)), 6))
        assert len({problem.history for problem in calls}) == 1
        offered = [json.loads(line) for line in calls[0].history[0][1].splitlines() if line.startswith('{"type"')]
        by_name = {tool["function"]["name"]: tool["function"] for tool in offered}
        for problem in calls:
            call = json.loads(problem.reference.splitlines()[1])
            assert follows(call["arguments"], by_name[call["name"]]["parameters"])
            assert all(str(value) in problem.question for value in call["arguments"].values())
