"""Requests as agents send them: Codex CLI, the Agents SDK and others, with tools of all kinds. Written from what they
send, without their packages."""

from __future__ import annotations

import json
from typing import Any

import openai
import pytest
from starlette.testclient import TestClient

from dflash_openai import notices
from tests.frontend.scripted_pool import Script, ScriptedPool
from tests.frontend.tool_model import CALL, CITY, forcing, prompt_text, running  # noqa: F401

SHELL: Any = {"type": "function", "name": "exec_command", "strict": False, "parameters": CITY}
SPAWN: Any = {"type": "function", "name": "spawn", "parameters": CITY}
AGENTS: Any = {"type": "namespace", "name": "agents", "description": "Others", "tools": [SPAWN, {"type": "web_search"}]}
PATCH: Any = {
    "type": "custom",
    "name": "apply_patch",
    "description": "Change files",
    "format": {"type": "grammar", "syntax": "lark", "definition": 'start: "x"'},
}
HOSTED: list[Any] = [{"type": "web_search", "external_web_access": False}, {"type": "local_shell"}, {"type": "mcp"}]
CALLED = {"namespace": "agents", "name": "spawn"}
ALLOWED: Any = [{"type": "web_search"}, {"type": "function", "name": "exec_command"}]
CODEX: dict[str, Any] = {
    "instructions": "You are a coding agent.",
    "input": [
        {"type": "message", "role": "developer", "content": [{"type": "input_text", "text": "Rules"}]},
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "Hi"}]},
    ],
    "tools": [SHELL, AGENTS, PATCH, *HOSTED],
    "tool_choice": "auto",
    "parallel_tool_calls": True,
    "reasoning": {"effort": "medium", "summary": "auto"},
    "store": False,
    "stream": True,
    "include": ["reasoning.encrypted_content", "web_search_call.action.sources"],
    "prompt_cache_key": "x",
    "text": {"verbosity": "low"},
    "extra_body": {"client_metadata": {"session": "x"}},
}


def call_of(name: str, arguments: Any) -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {json.dumps(arguments)}}}\n</tool_call>'


def ask(client: openai.OpenAI, **more: Any) -> list[Any]:
    """The events of Codex's request."""
    return list(client.responses.create(model="dflash", **(CODEX | more)))


def test_codex_gets_its_answer_and_the_model_sees_the_tools_of_the_client_alone(
    client: openai.OpenAI, pool: ScriptedPool, caplog: pytest.LogCaptureFixture
) -> None:
    notices.clear()
    done = ask(client)[-1]
    assert (done.type, done.response.output_text) == ("response.completed", "Hello!")
    assert prompt_text(pool.asked[0]).startswith("exec_command;agents.spawn;apply_patch;system:You are")
    assert {message for message in caplog.messages if "this server" in message} == {
        *(f"tools of the type '{kind}' are left out: this server runs no tools itself"
          for kind in ("web_search", "local_shell", "mcp")),
        "'web_search_call.action.sources' in 'include' is ignored: this server has none of that",
    }  # fmt: skip


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize(
    ("seen", "arguments", "item"),
    [
        ("exec_command", {"city": "Oslo"}, {"type": "function_call", "name": "exec_command", "namespace": None}),
        ("agents.spawn", {"city": "Oslo"}, {"type": "function_call", "name": "spawn", "namespace": "agents"}),
        ("apply_patch", {"input": 'a\n"b"'}, {"type": "custom_tool_call", "name": "apply_patch", "input": 'a\n"b"'}),
        ("apply_patch", {"else": 1}, {"type": "custom_tool_call", "input": '{"else": 1}'}),
        ("agents.other", {}, {"type": "function_call", "name": "agents.other", "namespace": None}),
    ],
)
def test_a_call_comes_back_as_its_client_names_the_tool(
    client: openai.OpenAI, pool: ScriptedPool, seen: str, arguments: Any, item: dict[str, Any], stream: bool
) -> None:
    pool.script = Script((call_of(seen, arguments),))
    if stream:
        events = ask(client)
        (call,) = events[-1].response.output
        assert next(event.item for event in events if event.type == "response.output_item.done") == call
        kind = f"response.{item['type']}_{'input' if 'input' in item else 'arguments'}"
        pieces = [event.delta for event in events if event.type == f"{kind}.delta"]
        assert "".join(pieces) == (call.input if "input" in item else call.arguments)
        assert [event.type for event in events].count(f"{kind}.done") == 1
    else:
        (call,) = client.responses.create(model="dflash", **(CODEX | {"stream": False})).output
    assert {name: getattr(call, name, None) for name in item} == item
    if "input" not in item:
        assert json.loads(call.arguments) == arguments


def test_the_next_turn_has_the_calls_results_and_what_a_server_ran(client: openai.OpenAI, pool: ScriptedPool) -> None:
    turn = [
        {"type": "reasoning", "id": "rs_1", "summary": [], "content": None, "encrypted_content": "abc"},
        {"type": "web_search_call", "id": "ws_1", "status": "completed"},
        {
            "type": "function_call",
            "call_id": "1",
            "namespace": "agents",
            "name": "spawn",
            "arguments": '{"city": "Rome"}',
        },
        {"type": "custom_tool_call", "call_id": "2", "name": "apply_patch", "input": "x"},
        {"type": "function_call_output", "call_id": "1", "output": "Rain"},
        {"type": "custom_tool_call_output", "call_id": "2", "output": [{"type": "input_text", "text": "Done"}]},
    ]
    ask(client, input=[*CODEX["input"], *turn])
    assert prompt_text(pool.asked[0]).endswith("user:Hiassistant:<tool_call>Rome<tool_call>tool:Raintool:Donea:")


@pytest.mark.parametrize(
    ("choice", "names"),
    [
        ("required", ["exec_command", "agents.spawn", "apply_patch"]),
        ({"type": "custom", "name": "apply_patch"}, ["apply_patch"]),
        (
            {"type": "allowed_tools", "mode": "auto", "tools": ALLOWED},
            ["exec_command"],
        ),
    ],
)
@pytest.mark.usefixtures("forcing")
def test_a_choice_of_tools_holds_for_those_of_the_client(
    client: openai.OpenAI, pool: ScriptedPool, choice: Any, names: list[str]
) -> None:
    ask(client, tool_choice=choice)
    assert prompt_text(pool.asked[0]).startswith("".join(f"{name};" for name in names) + "system:")


def test_with_tools_of_servers_alone_the_model_sees_none(client: openai.OpenAI, pool: ScriptedPool) -> None:
    pool.script = Script((CALL,))
    (message,) = ask(client, tools=HOSTED)[-1].response.output
    assert message.content[0].text == CALL
    assert prompt_text(pool.asked[0]).startswith("system:")


def test_a_chat_leaves_the_tools_of_servers_out_too(client: openai.OpenAI, pool: ScriptedPool) -> None:
    tools: Any = [{"type": "web_search"}, {"type": "function", "function": {"name": "now"}}]
    client.chat.completions.create(model="dflash", messages=[{"role": "user", "content": "Hi"}], tools=tools)
    assert prompt_text(pool.asked[0]).startswith("now;user:")


BROKEN = '{"city": "Os'
BROKEN_CALL = {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": BROKEN}}]}


@pytest.mark.parametrize(
    ("path", "turn"),
    [
        ("/v1/chat/completions", {"messages": [BROKEN_CALL]}),
        ("/v1/responses", {"input": [{"type": "function_call", "call_id": "1", "name": "f", "arguments": BROKEN}]}),
        ("/tokenize", {"messages": [BROKEN_CALL]}),
    ],
)
def test_a_conversation_goes_on_after_a_call_that_broke_off(path: str, turn: Any, http: TestClient) -> None:
    answer = http.post(path, json=turn)
    assert answer.status_code == 200, answer.text


@pytest.mark.parametrize("kind", [5, [], {}, True, ["function"], {"type": "function"}])
@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "Hi"}]}),
        ("/v1/responses", {"input": "Hi"}),
        ("/v1/messages", {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 5}),
        ("/tokenize", {"messages": [{"role": "user", "content": "Hi"}]}),
    ],
)
def test_a_tool_whose_type_is_no_text_is_refused(
    path: str, body: Any, kind: Any, http: TestClient, pool: ScriptedPool
) -> None:
    tools = [{"type": kind, "name": "f", "function": {"name": "f"}}]
    for given in (tools, [{"type": "namespace", "name": "n", "tools": tools}] if "responses" in path else tools):
        answer = http.post(path, json={**body, "tools": given})
        assert answer.status_code == 400, answer.text
        assert f"'tools' has a tool of the type {kind!r}; allowed: a text such as" in answer.json()["error"]["message"]
    assert not pool.asked


@pytest.mark.parametrize("choice", [None, "auto"])
@pytest.mark.parametrize("stream", [True, False])
def test_an_agent_with_a_typed_result_calls_its_tool_and_then_answers(
    client: openai.OpenAI, pool: ScriptedPool, choice: Any, stream: bool
) -> None:
    """As the Agents SDK with `tools` and `output_type`, and the AI SDK with `tools` and `Output.object`, send it."""
    weather = {"type": "function", "name": "get_weather", "parameters": CITY, "strict": True}
    result = {"type": "json_schema", "name": "final_output", "schema": CITY, "strict": True}
    more = {} if choice is None else {"tool_choice": choice}

    def answer(given: Any) -> Any:
        fields = {"input": given, "tools": [weather], "text": {"format": result}, "stream": stream, **more}
        made = client.responses.create(model="dflash", **fields)
        return list(made)[-1].response if stream else made

    pool.script = Script((CALL,))
    (call,) = answer("Hi").output
    assert (call.type, call.name) == ("function_call", "get_weather")
    pool.script = Script(('{"city": "Oslo"}',))
    turn = [{"role": "user", "content": "Hi"}, call.model_dump(exclude_none=True)]
    last = answer([*turn, {"type": "function_call_output", "call_id": call.call_id, "output": "Rain"}])
    assert last.output_text == '{"city": "Oslo"}'
    assert all("response_format" not in asked.sampling for asked in pool.asked)
    grammar = pool.asked[0].sampling["structured_outputs"]["grammar"]
    assert grammar.startswith("start: calls | format\n")
    # A strict function's arguments follow its schema.
    assert '"properties": {"city"' in grammar.partition("\nformat:")[0]
