"""POST /v1/chat/completions, as OpenAI's client sees it."""

from __future__ import annotations

from typing import Any

import openai

from tests.frontend.scripted_pool import MAX_MODEL_LEN, ScriptedPool

HELLO: list[Any] = [{"role": "user", "content": "Hi"}]


def test_an_answer_has_text_reason_and_usage(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(model="dflash", messages=HELLO)
    assert answer.object == "chat.completion"
    assert answer.id.startswith("chatcmpl-")
    (choice,) = answer.choices
    assert (choice.message.role, choice.message.content, choice.finish_reason) == ("assistant", "Hello!", "stop")
    assert answer.usage is not None
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + 6


def test_the_prompt_is_the_chat_template_and_the_answer_as_long_as_fits(
    client: openai.OpenAI, pool: ScriptedPool
) -> None:
    client.chat.completions.create(model="dflash", messages=HELLO)
    (asked,) = pool.asked
    assert asked.token_ids == [257, *b"user:Hi", 257, *b"a:"]
    assert asked.sampling == {"max_tokens": MAX_MODEL_LEN - len(asked.token_ids)}


def test_a_stream_has_the_role_first_then_text_then_the_reason(client: openai.OpenAI, pool: ScriptedPool) -> None:
    chunks = list(client.chat.completions.create(model="dflash", messages=HELLO, stream=True))
    assert pool.asked[0].stream
    assert chunks[0].choices[0].delta.role == "assistant"
    assert [chunk.choices[0].delta.content for chunk in chunks] == ["", "Hel", "lo", "!", None]
    assert [chunk.choices[0].finish_reason for chunk in chunks] == [None, None, None, None, "stop"]
    assert len({chunk.id for chunk in chunks}) == 1
