"""Tool calls that a real engine is made to write by a grammar, through the OpenAI front end."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from dflash_backend.config import asset_path
from dflash_cli.launcher.server import TritonServer
from tests.support.frontends import local_frontend

# As Qwen's and Hermes' templates, with the marks by which the front end knows the form of calls.
TEMPLATE = (
    "{% if tools %}<|im_start|>system\n<tool_call>{% for tool in tools %}{{ tool | tojson }}\n{% endfor %}<|im_end|>\n"
    "{% endif %}{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
CITY = {"type": "string", "enum": ["Oslo", "Lima"]}
PARAMETERS = {"type": "object", "properties": {"city": CITY}, "required": ["city"], "additionalProperties": False}
WEATHER: dict[str, Any] = {"name": "get_weather", "parameters": PARAMETERS}
NOW: dict[str, Any] = {"name": "now", "parameters": {"type": "object", "additionalProperties": False}}
QUESTION = "What is the weather in Oslo?"


@pytest.fixture(scope="module")
def client(server: TritonServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[openai.OpenAI]:
    """Before the demo pair, whose prompts another chat template writes."""
    directory = tmp_path_factory.mktemp("tools") / "target"
    shutil.copytree(asset_path("demo", "pair", "target"), directory, ignore=shutil.ignore_patterns("*.safetensors"))
    path = Path(directory, "tokenizer_config.json")
    path.write_text(json.dumps(json.loads(path.read_text()) | {"chat_template": TEMPLATE}))
    with (
        local_frontend(server, "--tokenizer", str(directory)) as frontend,
        httpx.Client(trust_env=False, verify=False, timeout=120) as http,
        openai.OpenAI(base_url=f"{frontend.url}/v1", api_key="none", max_retries=0, http_client=http) as client,
    ):
        yield client


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("stream", [False, True])
def test_a_required_call_is_one_of_the_tools_with_arguments_of_its_schema(
    client: openai.OpenAI, seed: int, stream: bool
) -> None:
    tools: Any = [{"type": "function", "function": function} for function in (WEATHER, NOW)]
    answer: Any = client.chat.completions.create(
        model="dflash",
        messages=[{"role": "user", "content": QUESTION}],
        tools=tools,
        tool_choice="required",
        parallel_tool_calls=False,
        max_tokens=120,
        seed=seed,
        stream=stream,
    )
    if stream:
        choices = [chunk.choices[0] for chunk in answer]
        calls = [call for choice in choices for call in choice.delta.tool_calls or []]
        reason = choices[-1].finish_reason
    else:
        calls, reason = answer.choices[0].message.tool_calls, answer.choices[0].finish_reason
    (call,) = calls
    arguments = json.loads(call.function.arguments)
    assert reason == "tool_calls"
    assert arguments in ([{"city": "Oslo"}, {"city": "Lima"}] if call.function.name == "get_weather" else [{}])


def test_a_response_calls_the_function_that_it_must(client: openai.OpenAI) -> None:
    answer = client.responses.create(
        model="dflash",
        input=QUESTION,
        tools=[{"type": "function", "strict": True, **WEATHER}],
        tool_choice={"type": "function", "name": "get_weather"},
        parallel_tool_calls=False,
        max_output_tokens=120,
    )
    (call,) = answer.output
    assert call.type == "function_call"
    assert json.loads(call.arguments)["city"] in ("Oslo", "Lima")
