"""Send, stream, stop, retry, edit, reload; what each step accepted; a comparison with drafts off."""

from __future__ import annotations

from typing import Any

import pytest

from tests.frontend.playground.page import Playground
from tests.frontend.playground.standin import (
    ACCEPTED,
    ANSWER,
    HTML,
    MARKDOWN,
    MAX_MODEL_LEN,
    PARTY,
    Control,
    words,
)


def test_an_answer_streams_and_its_steps_are_coloured(page: Playground, standin: Control) -> None:
    page.send("Hello there")
    assert page.answer == ANSWER
    by_step: dict[int, str] = {}
    for step, text in page.runs():
        by_step[step] = by_step.get(step, "") + text
    assert "".join(by_step.values()) == ANSWER
    assert [len(words(text)) for text in by_step.values()][:8] == list(ACCEPTED)
    shades = page.page.locator(".body .run").evaluate_all("runs => runs.map(run => run.className)")
    assert {"run s0", "run s4", "run s7"} <= set(shades)
    (request,) = standin.requests
    assert request["messages"] == [{"role": "user", "content": "Hello there"}]
    assert request["stream"] is True


def test_the_live_figures_are_those_of_the_stream(page: Playground) -> None:
    page.send("Hello")
    num_tokens = len(words(ANSWER))
    assert page.figure("steps") == num_tokens
    num_steps = 1 + len({step for step, _ in page.runs()} - {0})
    assert page.figure("acceptance") == pytest.approx((num_tokens - 1) / (num_steps - 1), abs=0.01)
    assert page.figure("drafts") == 7
    assert page.figure("ttft") > 0
    assert f"{num_tokens} tokens in {num_steps} steps" in page.text(".summary")
    used = f"Context: {30 + num_tokens} of {MAX_MODEL_LEN:,} tokens, 16 from the prefix cache"
    assert page.text("#context-text") == used
    meter = page.page.locator("#context-meter").evaluate("meter => meter.value")
    assert meter == pytest.approx((30 + num_tokens) / MAX_MODEL_LEN)
    # An answer of a second: the page tells no speed of one that came within a few milliseconds.
    page.send("slow 60")
    assert page.figure("speed") > 0


def test_a_server_that_tells_no_steps_has_its_own_counts_shown(page: Playground) -> None:
    """k is no count: 20 steps verified 130 drafts, most of them 7 each."""
    found = page.page.evaluate(
        """async () => {
            const { Answer, figures } = await import(new URL("static/answer.js", location.href));
            const answer = new Answer({});
            answer.add({ choices: [{ delta: { content: "one" } }] }, 10);
            answer.add({ choices: [{ delta: { content: " two" } }] }, 20);
            answer.add({
                choices: [], usage: { prompt_tokens: 30, completion_tokens: 61 },
                metrics: { speculative_decoding: {
                    num_spec_tokens: 7, num_spec_steps: 20, num_draft_tokens: 130, num_accepted_draft_tokens: 40 } },
            }, 30);
            return figures(answer);
        }"""
    )
    assert found["draftsPerStep"] == 6.5
    assert found["numTokens"] == 61


def test_steps_that_share_a_chunk_keep_their_own_text(page: Playground) -> None:
    page.send("merged")
    by_step: dict[int, str] = {}
    for step, text in page.runs():
        by_step[step] = by_step.get(step, "") + text
    tokens = words(PARTY)
    assert list(by_step.values()) == [
        "".join(tokens[:1]),
        "".join(tokens[1:6]),
        "".join(tokens[6:9]),
        "".join(tokens[9:]),
    ]


def test_stop_keeps_what_has_arrived_and_ends_the_request(page: Playground, standin: Control) -> None:
    page.send("slow 5000", wait=False)
    page.page.locator(".body .run").nth(3).wait_for()
    page.page.keyboard.press("Escape")
    page.wait()
    assert page.answer.startswith("word0 word1")
    assert "Stopped" in page.text(".note")
    page.page.wait_for_timeout(300)
    assert standin.state()["num_left"] == 1


def test_retry_asks_again_and_edit_replaces_the_prompt(page: Playground, standin: Control) -> None:
    page.send("first")
    page.page.get_by_role("button", name="Retry").click()
    page.wait()
    page.page.get_by_role("button", name="Edit").click()
    page.page.get_by_label("Edit the message").fill("second")
    page.page.keyboard.press("Enter")
    page.wait()
    assert [request["messages"] for request in standin.requests] == [
        [{"role": "user", "content": text}] for text in ("first", "first", "second")
    ]
    assert page.answers() == [ANSWER]


def test_a_retry_in_mid_stream_takes_the_page_over(page: Playground, standin: Control) -> None:
    page.send("slow 5000", wait=False)
    page.page.locator(".body .run").nth(3).wait_for()
    page.page.get_by_role("button", name="Edit").click()
    page.page.get_by_label("Edit the message").fill("second")
    page.page.keyboard.press("Enter")
    page.wait()
    assert page.answers() == [ANSWER]
    assert page.figure("steps") == len(words(ANSWER))
    assert standin.state()["num_left"] == 1


def test_the_conversation_goes_on(page: Playground, standin: Control) -> None:
    page.page.locator("summary", has_text="System prompt").click()
    page.page.fill("#system", "Be brief.")
    page.send("one")
    page.send("two")
    assert standin.requests[-1]["messages"] == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "one"},
        {"role": "assistant", "content": ANSWER},
        {"role": "user", "content": "two"},
    ]


def test_a_reload_in_mid_stream_keeps_the_conversation(page: Playground) -> None:
    page.send("one")
    page.send("slow 5000", wait=False)
    page.page.locator(".answer").nth(1).locator(".body .run").nth(5).wait_for()
    page.page.fill("#prompt", "not sent yet")
    before = page.page.locator(".answer").last.locator(".body").text_content()
    page.page.reload()
    page.page.locator(".note", has_text="Interrupted").wait_for()
    first, second = page.answers()
    assert first == ANSWER
    assert second.startswith(before)
    assert page.page.input_value("#prompt") == "not sent yet"
    assert page.page.locator(".body .run").count() > 10
    page.page.get_by_role("button", name="Retry").last.click()
    page.page.locator("#stop").click()
    page.wait()


def test_a_comparison_shows_the_same_text_with_fewer_steps(page: Playground, standin: Control) -> None:
    page.page.locator("label", has_text="Compare with drafts off").click()
    page.page.fill("#temperature", "0.9")
    page.send("Hello")
    assert page.answers() == [ANSWER, ANSWER]
    with_drafts, without = standin.requests
    assert "num_speculative_tokens" not in with_drafts
    assert without["num_speculative_tokens"] == 0
    # The same noise for both, and neither begins behind the other's cached prompt.
    assert with_drafts["seed"] == without["seed"]
    assert with_drafts["cache_salt"] != without["cache_salt"]
    assert page.text(".verdict").startswith("✓ Same text, token for token · 11 instead of 38 steps")
    assert page.page.locator(".answer-label").all_text_contents() == ["With drafts", "Drafts off"]


def test_a_comparison_says_where_texts_differ(page: Playground) -> None:
    page.page.locator("label", has_text="Compare with drafts off").click()
    page.send("drift")
    assert page.text(".verdict").startswith(f"≠ Texts differ from character {ANSWER.index('17') + 2} on")


def test_html_of_a_model_is_text(page: Playground) -> None:
    page.send("html")
    assert page.answer == HTML
    assert page.page.locator(".body img, .body script, .body b").count() == 0
    assert page.page.evaluate("window.hacked") is None


def test_an_answer_is_formatted_where_its_steps_are_not_coloured(page: Playground) -> None:
    page.page.locator("label", has_text="Colour steps").click()
    page.send("markdown")
    formatted = page.page.locator(".formatted-text")
    assert formatted.get_by_role("heading", name="Title").is_visible()
    for selector, text in {
        "strong": "bold",
        "em": "slanted",
        "p code": "code",
        "li >> nth=1": "two <b>x</b>",
        "pre code": 'if a < b:\n    print("<img src=x onerror=alert(1)>")',
    }.items():
        assert formatted.locator(selector).text_content() == text
    assert formatted.locator("img, b").count() == 0
    assert page.page.locator(".body").is_hidden()
    page.page.locator("label", has_text="Colour steps").click()
    assert page.answer == MARKDOWN
    assert page.page.locator(".body").is_visible()


def test_of_a_server_without_drafts_answers_are_formatted_and_nothing_of_drafts_is_asked(
    open_page: Any, standin: Control
) -> None:
    standin.set(k=0)
    page = open_page()
    page.send("markdown")
    assert (
        page.page.locator(".formatted-text pre code").text_content() == MARKDOWN.split("```")[1].partition("\n")[2][:-1]
    )
    for selector in (".body", "#k", "label[for=k]", "#k-help", "label:has(#compare)"):
        assert page.page.locator(selector).is_hidden(), selector
    page.page.locator("label", has_text="Show their tokens").click()
    assert page.page.locator(".body").is_visible()
    assert page.answer == MARKDOWN


def test_reasoning_is_apart_from_the_answer(page: Playground) -> None:
    page.send("think")
    assert page.text(".reasoning .runs") == "First I think about it."
    assert page.answer == ANSWER


def test_an_answer_of_10000_tokens_stays_smooth(page: Playground) -> None:
    page.page.evaluate(
        """() => {
            window.frames = 0;
            const tick = () => { window.frames += 1; requestAnimationFrame(tick); };
            requestAnimationFrame(tick);
        }"""
    )
    before = page.cpu_s()
    page.send("long 10000")
    assert len(words(page.answer)) >= 10_000
    # Drawn as it streams, in processor time, which does not depend on what else the machine does.
    num_frames = page.page.evaluate("window.frames")
    assert num_frames > 20
    assert (page.cpu_s() - before) / num_frames < 0.04
    page.page.wait_for_timeout(200)  # the frame after the last one
    scroll = page.page.locator("#scroll")
    assert scroll.evaluate("node => node.scrollHeight - node.scrollTop - node.clientHeight") < 2
