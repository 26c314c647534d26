"""A scripted model whose chat template takes tools and thinks, for tests of chat and responses."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
from starlette.testclient import TestClient

from checks.byte_tokenizer import write_byte_tokenizer
from dflash_openai.app import create_app
from dflash_openai.config import FrontendConfig
from tests.frontend.conftest import wait_until_ready
from tests.frontend.scripted_pool import Asked, ScriptedPool

TEMPLATE = (
    "{% for t in tools or [] %}{{ t.function.name }};{% endfor %}"
    "{% for m in messages %}<s>{{ m.role }}:{{ m.reasoning_content or '' }}{{ m.content }}"
    "{% for c in m.tool_calls or [] %}<tool_call>{{ c.function.arguments.city }}{% endfor %}{% endfor %}"
    "{% if add_generation_prompt %}<s>a:{% if enable_thinking is false %}<think></think>{% endif %}{% endif %}"
)
CITY = {"type": "object", "properties": {"city": {"type": "string"}}}
CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Oslo"}}\n</tool_call>'


def running_tool_model(directory: Path) -> Iterator[tuple[ScriptedPool, TestClient]]:
    """The model's pool and the application before it."""
    write_byte_tokenizer(directory)
    (directory / "chat_template.jinja").unlink(missing_ok=True)
    path = directory / "tokenizer_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"chat_template": TEMPLATE}))
    pool = ScriptedPool(directory)
    with TestClient(create_app(FrontendConfig(), pool), raise_server_exceptions=False) as http:
        wait_until_ready(http)
        yield pool, http


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[ScriptedPool, TestClient]]:
    """As `tests.frontend.conftest.running`, of this model."""
    yield from running_tool_model(tmp_path_factory.mktemp("tools"))


@pytest.fixture
def forcing(pool: ScriptedPool, http: TestClient) -> Iterator[None]:
    """A server that takes grammars."""
    model = http.app.state.frontend.model()  # type: ignore[attr-defined]
    before = model.description
    # Of the servers too, which the front end asks now and then.
    pool.description = model.description = msgspec.structs.replace(before, structured_outputs=True)
    yield
    pool.description = model.description = before


def prompt_text(asked: Asked) -> str:
    """A prompt without its special tokens."""
    return bytes(i for i in asked.token_ids if i < 256).decode()
