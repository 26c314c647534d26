"""The page by keyboard, for screen readers, on a phone, in light and dark, without motion."""

from __future__ import annotations

from typing import Any

import pytest

from tests.frontend.playground.page import Playground
from tests.frontend.playground.standin import ANSWER, Control

PHONE = {"viewport": {"width": 360, "height": 740}, "has_touch": True, "is_mobile": True}


def focused(page: Playground) -> str:
    return str(page.page.evaluate("document.activeElement.id || document.activeElement.className"))


def test_a_chat_needs_no_mouse(page: Playground, standin: Control) -> None:
    keyboard = page.page.keyboard
    assert focused(page) == "prompt"
    keyboard.type("line one")
    keyboard.press("Shift+Enter")
    keyboard.type("line two")
    keyboard.press("Enter")
    page.wait()
    assert standin.requests[0]["messages"][0]["content"] == "line one\nline two"
    # The last prompt again, by the arrow key.
    keyboard.press("ArrowUp")
    keyboard.press("Control+A")
    keyboard.type("changed")
    keyboard.press("Enter")
    page.wait()
    assert standin.requests[1]["messages"] == [{"role": "user", "content": "changed"}]
    page.page.locator("#model").focus()
    page.page.locator("#theme").focus()
    keyboard.press("/")
    assert focused(page) == "prompt"


def test_every_control_is_reached_with_tab_and_has_a_name(page: Playground) -> None:
    page.send("tools")
    page.page.evaluate("document.querySelectorAll('details').forEach(details => details.open = true)")
    unnamed = page.page.evaluate(
        """() => [...document.querySelectorAll('button, input, select, textarea')].filter(node =>
            node.checkVisibility() && node.tabIndex < 0 ||
            !(node.textContent.trim() || node.ariaLabel || node.labels?.length)).map(node => node.outerHTML)"""
    )
    assert unnamed == []


def test_arrow_keys_go_through_the_steps_of_an_answer(page: Playground) -> None:
    page.send("Hello")
    page.page.locator(".body").focus()
    for _ in range(2):
        page.page.keyboard.press("ArrowRight")
    said = "Step 2: 5 tokens (4 of 7 drafts accepted and the model's own token)"
    assert page.text(".tip").startswith(said)
    assert page.page.locator(".run.now").text_content() == " us solve it step by"
    page.page.locator("#announce", has_text=said).wait_for(state="attached")


def test_the_end_of_an_answer_is_announced(page: Playground) -> None:
    page.send("Hello")
    page.page.locator("#announce", has_text=ANSWER.splitlines()[-1]).wait_for(state="attached")
    assert "38 tokens in 11 steps" in page.text("#announce")
    assert page.page.locator(".answer").get_attribute("aria-busy") == "false"


def test_a_phone_has_all_of_it_without_scrolling_sideways(open_page: Any, standin: Control) -> None:
    page = open_page(**PHONE)
    page.page.locator("label", has_text="Compare with drafts off").tap()
    page.page.fill("#prompt", "Hello")
    page.page.locator("#send").tap()
    page.wait()
    assert page.answers() == [ANSWER, ANSWER]
    assert page.page.evaluate("document.documentElement.scrollWidth") == 360
    assert page.page.locator("#strip").is_visible()
    page.page.locator("#panel-toggle").tap()
    page.page.fill("#temperature", "0.5")
    assert page.page.evaluate("document.querySelector('#main').inert")
    page.page.keyboard.press("Escape")
    page.page.locator("#panel").wait_for(state="hidden")
    assert focused(page) == "panel-toggle"
    page.page.locator(".body .run").nth(1).tap()
    assert page.text(".tip").startswith("Step 2: 5 tokens")


def test_buttons_of_the_phone_are_large_enough_for_a_thumb(open_page: Any) -> None:
    page = open_page(**PHONE)
    page.send("Hello")
    small = page.page.evaluate(
        """() => [...document.querySelectorAll('button')].filter(node => node.checkVisibility())
            .filter(node => node.offsetHeight < 24 || node.offsetWidth < 24).map(node => node.outerHTML)"""
    )
    assert small == []


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_colours_follow_the_system_until_they_are_chosen(open_page: Any, scheme: str) -> None:
    page = open_page(color_scheme=scheme)

    def is_dark() -> bool:
        colour = page.page.evaluate("getComputedStyle(document.body).backgroundColor")
        return int(colour.removeprefix("rgb(").partition(",")[0]) < 128

    assert is_dark() == (scheme == "dark")
    seen = []
    for _ in range(2):
        page.page.locator("#theme").click()
        seen.append(is_dark())
    assert seen == [False, True]
    page.page.reload()
    assert is_dark()


def test_nothing_moves_for_those_who_ask_for_that(open_page: Any) -> None:
    page = open_page(reduced_motion="reduce")
    page.send("slow 200", wait=False)
    page.page.locator(".body .run").nth(2).wait_for()
    assert page.page.evaluate("document.getAnimations().length") == 0
    page.page.keyboard.press("Escape")
    page.wait()
