"""The playground in Chromium, before the front end of a real server."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from dflash_cli.launcher.frontend import FrontendProcess
from tests.frontend.playground.chromium import chromium
from tests.frontend.playground.page import Playground

QUESTION = "Sam fills 4 bags with 6 marbles each and gives away 7 marbles. How many marbles does Sam keep?"


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with chromium() as browser:
        yield browser


@pytest.fixture
def page(browser: Any, frontend: FrontendProcess) -> Iterator[Playground]:
    page = Playground(browser.new_context(), f"{frontend.url}/")
    page.page.locator("#health[data-state=ready]").wait_for()
    yield page
    page.context.close()
    assert page.faults == []


@pytest.mark.parametrize("temperature", ["0", "1"])
def test_a_comparison_is_equal_token_for_token_with_fewer_steps(page: Playground, temperature: str) -> None:
    page.page.fill("#temperature", temperature)
    page.page.fill("#seed", "5")
    page.page.locator("label", has_text="Compare with drafts off").click()
    page.send(QUESTION)
    drafted, plain = page.answers()
    assert drafted == plain
    assert page.text(".verdict").startswith("✓ Same text, token for token")
    assert page.figure("acceptance") > 1.5
    drafted, plain = page.stored()["dflash.chat"]["turns"][1]["answers"]
    assert [step[0] for step in plain["steps"]] == [1] * plain["usage"]["completion_tokens"]
    # What the page counted by steps is what the server counted for the request.
    counted = [drafts for _, drafts, *_ in drafted["steps"] if drafts]
    assert len(counted) == drafted["server"]["num_spec_steps"]
    assert sum(counted) == drafted["server"]["num_draft_tokens"]
    assert sum(step[0] for step in drafted["steps"]) == drafted["usage"]["completion_tokens"]


def test_an_answer_follows_the_schema_that_was_written(page: Playground) -> None:
    page.page.locator("summary", has_text="Output format").click()
    page.page.select_option("#format", "json_schema")
    properties = {"ok": {"type": "boolean"}}
    schema = {"type": "object", "properties": properties, "required": ["ok"], "additionalProperties": False}
    page.page.fill("#constraint", json.dumps(schema))
    page.send(QUESTION)
    assert page.text(".badge") == "✓ parses as JSON"
    page.page.fill("#constraint", '{"type": "nonsense"}')
    page.send("Once more")
    assert "Request refused" in page.text(".error")


def test_a_prompt_longer_than_the_context_says_so(page: Playground) -> None:
    page.send("many words " * 2000)
    assert "Too long" in page.text(".error")
    assert "max_model_len" in page.text(".error")
