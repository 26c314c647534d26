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
# As Qwen3.5's: a system message that is not the first is refused.
FIRST_ALONE = (
    "{% for m in messages %}{% if m.role == 'system' and not loop.first %}"
    "{{ raise_exception('System message must be at the beginning.') }}{% endif %}[{{ m.role }}]{{ m.content }}"
    "{% endfor %}"
)
# As gpt-oss's: it is left out.
DROPPED = (
    "{% for m in messages %}{% if m.role != 'system' or loop.first %}[{{ m.role }}]{{ m.content }}{% endif %}"
    "{% endfor %}"
)
# As Gemma's and Mistral's: besides, no two turns of the user follow one another.
ALTERNATING = (
    "{% for m in messages %}{% if not loop.first and m.role in ('system', loop.previtem.role) %}"
    "{{ raise_exception('Conversation roles must alternate') }}{% endif %}[{{ m.role }}]{{ m.content }}{% endfor %}"
)
RULES: list[Any] = [
    {"role": "system", "content": "A"},
    {"role": "developer", "content": [{"type": "text", "text": "B"}]},
]
LATER: Any = {"role": "system", "content": "L"}


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


@pytest.mark.parametrize("template", [FIRST_ALONE, DROPPED, ALTERNATING, OWN])
def test_system_messages_at_the_beginning_are_one(templated: Templated, template: str) -> None:
    given = [*RULES, {"role": "system", "content": ""}, *HELLO]
    assert ask(templated, messages=given, chat_template=template).startswith("[system]A\n\nB[user]Hi")
    asked = {"instructions": "A", "input": [{"role": "developer", "content": "B"}, {"role": "user", "content": "Hi"}]}
    pool, http = templated
    for path, fields in (
        ("/v1/responses", asked),
        ("/v1/messages", {"system": "A", "messages": [{"role": "system", "content": "B"}, HELLO[0]], "max_tokens": 9}),
    ):
        pool.asked.clear()
        http.app.state.frontend.model().tokenizer.use_chat_template(template)  # type: ignore[attr-defined]
        try:
            assert http.post(path, json=fields).status_code == 200
        finally:
            http.app.state.frontend.model().tokenizer.use_chat_template(OWN)  # type: ignore[attr-defined]
        assert prompt_text(pool.asked[0]).startswith("[system]A\n\nB[user]Hi")


@pytest.mark.parametrize(
    ("template", "prompt"),
    [
        (OWN, "[system]A[user]Hi[system]L[user]Hi[me]"),
        (FIRST_ALONE, "[system]A[user]Hi[user]L[user]Hi"),
        (DROPPED, "[system]A[user]Hi[user]L[user]Hi"),
        (ALTERNATING, "[system]A[user]Hi\n\nL\n\nHi"),
        # A template that shows none of it.
        ("{{ messages[0].content }}", "A"),
    ],
)
def test_a_later_system_message_is_a_turn_of_the_user_where_the_template_does_not_take_it(
    templated: Templated, template: str, prompt: str
) -> None:
    assert ask(templated, messages=[RULES[0], *HELLO, LATER, *HELLO], chat_template=template) == prompt


def test_what_a_template_refuses_otherwise_is_told_as_the_client_sent_it(templated: Templated) -> None:
    template = "{{ raise_exception('I see ' + messages[-1].role) }}"
    sent = {"messages": [*HELLO, LATER], "chat_template": template}
    answer = templated[1].post("/v1/chat/completions", json=sent)
    assert answer.status_code == 400
    assert "I see system" in answer.json()["error"]["message"]


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
