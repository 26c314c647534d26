"""What a person sees when a request fails, and the way on from there."""

from __future__ import annotations

from typing import Any

from tests.frontend.playground.page import Playground
from tests.frontend.playground.standin import ANSWER, Control, running_standin


def test_a_key_that_is_missing_is_asked_for(open_page: Any, standin: Control) -> None:
    standin.set(api_key="right")
    page = open_page()
    assert page.page.locator("#health").get_attribute("title") == "Server: API key needed"
    page.send("one")
    assert "API key refused" in page.text(".error")
    page.page.get_by_role("button", name="Enter API key").click()
    page.page.keyboard.type("right")
    page.page.keyboard.press("Tab")
    page.page.locator("#health[data-state=ready]").wait_for()
    page.page.locator(".error").get_by_role("button", name="Retry").click()
    page.page.locator(".summary", has_text="tokens").wait_for()
    page.wait()
    assert page.answers() == [ANSWER]


def test_a_server_that_wants_a_key_is_never_called_ready(open_page: Any, standin: Control) -> None:
    standin.set(api_key="right")
    page = open_page()
    page.page.evaluate(
        """() => {
            window.states = [];
            const options = { attributeFilter: ["data-state"] };
            new MutationObserver(() => states.push(document.querySelector("#health").dataset.state))
                .observe(document.querySelector("#health"), options);
        }"""
    )
    page.send("one")
    page.page.get_by_role("button", name="Enter API key").click()
    for key in ("wrong", "also wrong"):
        with page.page.expect_response("**/v1/models"):
            page.page.locator("#api-key").fill(key)
            page.page.keyboard.press("Tab")
    page.page.wait_for_timeout(200)
    assert page.page.evaluate("states") == []


def test_a_busy_server_may_be_asked_again_when_it_says(page: Playground, standin: Control) -> None:
    standin.set(num_busy=1)
    page.send("one")
    assert "Server busy" in page.text(".error")
    retry = page.page.locator(".error").get_by_role("button", name="Retry")
    assert retry.is_disabled()
    assert retry.text_content() == "Retry in 1 s"
    retry.click()  # once it can be clicked
    page.page.locator(".summary", has_text="tokens").wait_for()
    page.wait()
    assert page.answers() == [ANSWER]


def test_a_prompt_that_is_too_long_says_what_to_do(page: Playground) -> None:
    page.send("toolong")
    assert "max_model_len is 4096" in page.text(".error")
    assert "Begin a new chat" in page.text(".error")


def test_an_error_in_mid_stream_keeps_what_has_arrived(page: Playground) -> None:
    for script, words in {
        "failing": "the engine ended",
        "broken": "The connection ended before the answer did",
    }.items():
        page.send(script)
        assert words in page.text(".error")
        assert page.answer
        assert ANSWER.startswith(page.answer)


def test_a_server_that_is_gone_is_said_and_found_again(open_page: Any) -> None:
    with running_standin() as server:
        page = open_page(server.url)
        page.send("one")
        server.stop()
        page.send("two")
        assert "Server unreachable" in page.text(".error")
        page.page.locator("#health[data-state=unreachable]").wait_for()
        # What says so is drawn without the server, once, and not in the colour of what went well.
        widths = "buttons => buttons.map(button => button.querySelector('use').getBBox().width > 0)"
        assert page.page.get_by_role("button", name="Retry").evaluate_all(widths) == [True, True]
        assert page.page.locator(".assistant").last.get_by_role("button", name="Retry").count() == 1
        assert page.text("#live-state") == "error"
        colour = "(node, side) => getComputedStyle(node)[side]"
        bad = page.page.locator(".error").evaluate(colour, "borderLeftColor")
        assert page.page.locator("#live-state").evaluate(colour, "color") == bad
        server.start()
        page.page.locator(".error").get_by_role("button", name="Retry").click()
        page.page.locator(".error").wait_for(state="detached")
        page.page.locator(".summary", has_text="tokens").nth(1).wait_for()
        page.wait()
        assert page.answers() == [ANSWER, ANSWER]
