"""Chat templates of the operator and of requests, in place of the model's own."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from starlette.testclient import TestClient

from dflash_openai.app import create_app
from dflash_openai.config import FrontendConfig
from tests.frontend.conftest import wait_until_ready
from tests.frontend.scripted_pool import ScriptedPool
from tests.frontend.tool_model import prompt_text

HELLO: list[Any] = [{"role": "user", "content": [{"type": "text", "text": "Hi"}]}]
TOOLS = [{"type": "function", "function": {"name": "f"}}]
OWN = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}{% if add_generation_prompt %}[me]{% endif %}"
OTHER = "{{ messages[0].content }}!{{ shout or '' }}"
Templated = tuple[ScriptedPool, TestClient]


@pytest.fixture(scope="module")
def templated(model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Templated]:
    """A front end with a template of its own that takes those of requests."""
    file = tmp_path_factory.mktemp("template") / "own.jinja"
    file.write_text(OWN)
    pool = ScriptedPool(model_dir)
    config = FrontendConfig(chat_template=str(file), trust_request_chat_template=True)
    with TestClient(create_app(config, pool)) as http:
        wait_until_ready(http)
        yield pool, http


def ask(templated: Templated, path: str = "/v1/chat/completions", **fields: Any) -> str:
    """The text of the prompt that these fields make."""
    pool, http = templated
    pool.asked.clear()
    answer = http.post(path, json={"messages": HELLO, **fields})
    assert answer.status_code == 200, answer.text
    if path == "/tokenize":
        return bytes(token for token in answer.json()["tokens"] if token < 256).decode()
    return prompt_text(pool.asked[0])


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/tokenize"])
def test_the_operators_template_holds_unless_a_request_brings_one(templated: Templated, path: str) -> None:
    assert ask(templated, path) == "[user]Hi[me]"
    assert ask(templated, path, chat_template=None, add_generation_prompt=False) == "[user]Hi"
    assert ask(templated, path, chat_template=OTHER) == "Hi!"
    assert ask(templated, path, chat_template=OTHER, chat_template_kwargs={"shout": "!!"}) == "Hi!!!"
    assert ask(templated, path) == "[user]Hi[me]"


@pytest.mark.parametrize(
    "template", ["{% for", "{{ ''.__class__.__mro__[1] }}", "{{ messages.append(1) }}", "{{ 9 ** 9 ** 9 % 7 }}"]
)
def test_a_template_that_fails_is_its_clients_error(templated: Templated, template: str) -> None:
    answer = templated[1].post("/v1/chat/completions", json={"messages": HELLO, "chat_template": template})
    assert answer.status_code == 400
    assert "the chat template refuses these messages" in answer.json()["error"]["message"]


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/tokenize"])
def test_a_template_of_a_request_is_refused_where_the_operator_has_not_allowed_it(path: str, http: TestClient) -> None:
    answer = http.post(path, json={"messages": HELLO, "chat_template": OTHER})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "chat_template")
    assert "--trust-request-chat-template" in answer.json()["error"]["message"]


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ("/no/such/file", "/no/such/file cannot be read: No such file"),
        ("{% if x %}a", "line 1: Unexpected end of template"),
        ("{{ a }}\n{% endfor %}", "line 2: "),
        ("{{ 2 ** messages | length }}", "it computes a power"),
    ],
)
def test_an_operators_template_that_cannot_be_used_is_told_at_the_start(given: str, words: str) -> None:
    with pytest.raises(ValueError, match=f"--chat-template: {words}"):
        FrontendConfig(chat_template=given)


def test_what_transformers_adds_to_templates_is_known() -> None:
    template = "{% for m in messages %}{%- generation %}{{ m }}{% endgeneration -%}{% break %}{% endfor %}"
    assert FrontendConfig(chat_template=template).chat_template == template
