"""Parameters, output format, tools and the API key, and the requests that come of them."""

from __future__ import annotations

import json
from typing import Any

from tests.frontend.playground.page import Playground
from tests.frontend.playground.standin import ANSWER, Control, K


def open_card(page: Playground, name: str) -> None:
    page.page.locator("summary", has_text=name).click()


def test_parameters_are_sent_as_they_are_and_left_out_where_empty(page: Playground, standin: Control) -> None:
    for field, value in {"temperature": "0.7", "top_p": "0.9", "max_tokens": "64", "seed": "5"}.items():
        page.page.fill(f"#{field}", value)
    page.page.locator("#k").fill("3")
    page.send("one")
    page.page.get_by_role("button", name="Reset settings").click()
    page.page.fill("#temperature", "")
    page.page.fill("#max_tokens", "")
    page.send("two")
    first, second = standin.requests
    expected = {"temperature": 0.7, "top_p": 0.9, "max_tokens": 64, "seed": 5, "num_speculative_tokens": 3}
    assert {name: first[name] for name in expected} == expected
    assert not set(expected) & set(second)


def test_k_goes_from_none_up_to_the_servers_own_which_is_not_sent(page: Playground, standin: Control) -> None:
    slider = page.page.locator(f"#k[min='0'][max='{K}']")
    slider.wait_for()
    assert (slider.input_value(), page.text("#k-text")) == (str(K), "server's")
    page.send("one")
    for value, text in (("0", "off"), (str(K - 1), str(K - 1)), (str(K), "server's")):
        slider.fill(value)
        assert page.text("#k-text") == text
        page.send("two")
    assert [one.get("num_speculative_tokens") for one in standin.requests] == [None, 0, K - 1, None]
    # The server's own stays that, whatever the next server's is.
    assert page.stored("localStorage")["dflash.settings"]["k"] == ""


def test_a_parameter_out_of_bounds_is_not_sent(page: Playground, standin: Control) -> None:
    page.page.fill("#temperature", "7")
    page.page.fill("#prompt", "one")
    page.page.keyboard.press("Enter")
    assert page.page.evaluate("document.activeElement.id") == "temperature"
    assert page.page.input_value("#prompt") == "one"
    assert standin.requests == []


FORMATS: list[tuple[str, str | None, dict[str, Any]]] = [
    ("json_object", None, {"response_format": {"type": "json_object"}}),
    (
        "json_schema",
        '{"type": "object"}',
        {
            "response_format": {
                "type": "json_schema",
                "json_schema": {"name": "answer", "strict": True, "schema": {"type": "object"}},
            }
        },
    ),
    ("regex", "[ab]+", {"structured_outputs": {"regex": "[ab]+"}}),
    ("choice", "yes\nno\n", {"structured_outputs": {"choice": ["yes", "no"]}}),
    ("grammar", 'start: "a"', {"structured_outputs": {"grammar": 'start: "a"'}}),
]


def test_the_output_format_is_sent(page: Playground, standin: Control) -> None:
    open_card(page, "Output format")
    for format, text, expected in FORMATS:
        standin.set(requests=[])
        page.page.select_option("#format", format)
        if text is not None:
            page.page.fill("#constraint", text)
        page.send("json")
        (request,) = standin.requests
        sent = {name: request[name] for name in ("response_format", "structured_outputs") if name in request}
        assert sent == expected
        found = page.page.locator(".answer").last.locator(".badge").all_text_contents()
        assert found == (["✓ parses as JSON"] if "json" in format else [])


def test_a_schema_that_is_no_json_is_said_beside_its_field(page: Playground, standin: Control) -> None:
    open_card(page, "Output format")
    page.page.select_option("#format", "json_schema")
    page.page.fill("#constraint", "{")
    assert "The schema is not valid JSON" in page.text("#constraint-error")
    page.page.fill("#prompt", "one")
    page.page.keyboard.press("Enter")
    assert page.page.evaluate("document.activeElement.id") == "constraint"
    assert standin.requests == []


def test_tools_are_called_and_their_results_sent(page: Playground, standin: Control) -> None:
    open_card(page, "Tools")
    page.page.get_by_role("button", name="Example").click()
    page.page.select_option("#tool_choice", "required")
    page.send("tools")
    assert page.page.locator(".tool-call b").all_text_contents() == ["get_weather", "get_weather"]
    assert page.page.locator(".tool-call pre").all_text_contents() == [
        '{\n  "city": "Oslo"\n}',
        '{\n  "city": "Rome"\n}',
    ]
    for index, result in enumerate(("4 degrees", "21 degrees")):
        page.page.get_by_label("Result of get_weather").nth(index).fill(result)
    page.page.get_by_role("button", name="Send results").click()
    page.wait()
    first, second = standin.requests
    assert first["tools"][0]["function"]["name"] == "get_weather"
    assert first["tool_choice"] == "required"
    _, assistant, *results = second["messages"]
    assert [call["function"]["arguments"] for call in assistant["tool_calls"]] == [
        '{"city": "Oslo"}',
        '{"city": "Rome"}',
    ]
    assert results == [
        {"role": "tool", "content": "4 degrees", "tool_call_id": "call_0"},
        {"role": "tool", "content": "21 degrees", "tool_call_id": "call_1"},
    ]
    assert page.answer == ANSWER


def test_settings_outlive_the_tab_and_the_key_does_not(page: Playground) -> None:
    page.page.fill("#temperature", "0.5")
    open_card(page, "Connection")
    page.page.fill("#api-key", "secret-key")
    page.send("one")
    assert page.stored()["dflash.key"] == "secret-key"
    assert "secret-key" not in json.dumps(page.stored("localStorage"))
    other = page.context.new_page()
    other.goto(page.page.url)
    assert other.input_value("#temperature") == "0.5"
    assert other.input_value("#api-key") == ""


def test_the_request_is_shown_as_code_without_the_key(page: Playground, standin: Control) -> None:
    open_card(page, "Connection")
    page.page.fill("#api-key", "secret-key")
    page.page.fill("#prompt", "It's one")
    shown = {}
    page.page.locator("#show-code").click()
    for language in ("curl", "Python", "JSON"):
        page.page.locator(".tabs label", has_text=language).click()
        shown[language] = page.text("#code-text")
    assert not any("secret-key" in text for text in shown.values())
    assert "It'\\''s one" in shown["curl"]
    asked = json.loads(shown["JSON"])
    assert asked["messages"] == [{"role": "user", "content": "It's one"}]
    compile(shown["Python"], "shown", "exec")
    page.page.keyboard.press("Escape")
    page.page.keyboard.press("Control+A")
    page.send("It's one")
    assert standin.requests == [asked]
