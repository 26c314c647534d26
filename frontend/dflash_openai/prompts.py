"""Turns messages and texts into token ids, in threads: the event loop goes on meanwhile."""

from __future__ import annotations

import asyncio
import itertools
import os
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from dflash_backend.error_text import shown
from dflash_backend.text.chat import PromptError, pop_options
from dflash_backend.text.client_json import texts
from dflash_backend.text.parameter_values import whole_number
from dflash_backend.text.prompt_size import (
    MAX_MESSAGES_CHARS,
    MESSAGES_CHARS_PER_TOKEN,
    PromptTooLong,
    check_fits,
    check_num_tokens,
)
from dflash_backend.text.tokenizer import InputError, Tokenizer
from dflash_backend.text.truncation import Truncation
from dflash_openai.errors import ApiError, invalid, refusing
from dflash_openai.system_messages import rendered

# A role and content, and the tokens between messages.
MIN_TOKENS_OF_MESSAGE = 2

Result = TypeVar("Result")


class PromptBuilder:
    """Token ids of prompts, which are checked to fit `max_model_len` and the vocabulary."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        max_model_len: int,
        vocab_size: int,
        max_prompt_tokens: int = 0,
        threads: ThreadPoolExecutor | None = None,
    ) -> None:
        """max_prompt_tokens: the longest prompt that the operator allows; 0: as long as the model does. threads: those
        of another builder; None: threads of its own."""
        self.tokenizer = tokenizer
        self.max_model_len, self.vocab_size = max_model_len, vocab_size
        self._max_prompt_tokens = max_prompt_tokens
        self.threads = threads or ThreadPoolExecutor(min(8, os.cpu_count() or 1), thread_name_prefix="prompts")

    async def from_messages(
        self,
        messages: Sequence[Mapping[str, Any]],
        options: Mapping[str, Any],
        variables: Mapping[str, Any],
        truncation: Truncation | None = None,
    ) -> list[int]:
        """Token ids of messages through the chat template, with its variables: `options` are those that the client
        named, `variables` ours. Raises `ApiError`."""
        with refusing(PromptError, "chat_template_kwargs"):
            variables = {**pop_options({"chat_template_kwargs": dict(options)}), **variables}
        return await self._run("messages", lambda: self._chat(messages, variables, truncation), truncation)

    async def from_text(
        self, text: str, add_special_tokens: bool = True, truncation: Truncation | None = None
    ) -> list[int]:
        """Token ids of a text. Raises `ApiError`."""
        return await self._run("prompt", lambda: self._text(text, add_special_tokens, truncation), truncation)

    def check_token_ids(
        self, token_ids: Sequence[Any], param: str = "prompt", truncation: Truncation | None = None
    ) -> list[int]:
        """Token ids that a client sent. Raises `ApiError`."""
        if truncation is not None:
            token_ids = truncation.of(list(token_ids))
        self._check_num_tokens(param, len(token_ids))
        kinds = set(map(type, token_ids))
        if float in kinds:
            token_ids = list(map(whole_number, token_ids))
        elif kinds == {int} and min(token_ids) >= 0 and max(token_ids) < self.vocab_size:
            return self._checked(param, list(token_ids))
        for position, token_id in enumerate(token_ids):
            if type(token_id) is not int or not 0 <= token_id < self.vocab_size:
                raise invalid(
                    f"the prompt has {shown(token_id)} at position {position}; allowed: token ids from 0 to "
                    f"{self.vocab_size - 1}",
                    param,
                )
        return self._checked(param, list(token_ids))

    def close(self) -> None:
        """End the threads."""
        self.threads.shutdown(wait=False, cancel_futures=True)

    async def _run(self, param: str, build: Callable[[], list[int]], truncation: Truncation | None = None) -> list[int]:
        try:
            token_ids = await asyncio.get_running_loop().run_in_executor(self.threads, build)
        except PromptTooLong as error:
            raise self._too_long(error, param) from None
        except (PromptError, InputError) as error:
            raise invalid(str(error), param) from None
        return self._checked(param, token_ids if truncation is None else truncation.of(token_ids))

    def _checked(self, param: str, token_ids: list[int]) -> list[int]:
        if not token_ids:
            raise invalid("the prompt is empty; it must have at least one token", param)
        self._check_num_tokens(param, len(token_ids))
        return token_ids

    def _check_num_tokens(self, param: str, num_tokens: int) -> None:
        try:
            check_num_tokens(num_tokens, self.max_model_len)
            if 0 < self._max_prompt_tokens < num_tokens:
                raise PromptTooLong(
                    f"the prompt has {num_tokens} tokens; allowed: {self._max_prompt_tokens} (--max-prompt-tokens)"
                )
        except PromptTooLong as error:
            raise self._too_long(error, param) from None

    def _too_long(self, error: PromptTooLong, param: str) -> ApiError:
        """By the words of OpenAI and vLLM, which clients such as LiteLLM look for."""
        length = self.max_model_len
        if 0 < self._max_prompt_tokens < length:
            length = self._max_prompt_tokens
        message = f"This model's maximum context length is {length} tokens. However, {error}"
        return invalid(message, param, "context_length_exceeded")

    def _chat(
        self, messages: Sequence[Mapping[str, Any]], options: Mapping[str, Any], truncation: Truncation | None
    ) -> list[int]:
        if truncation is None and MIN_TOKENS_OF_MESSAGE * len(messages) > self.max_model_len:
            raise PromptTooLong(
                f"there are {len(messages)} messages, which are too many tokens: max_model_len is {self.max_model_len}"
            )
        self._check_size(messages, options)
        chat = rendered(messages, lambda given: self.tokenizer.render_chat(given, **options))
        check_fits(chat.text, self.tokenizer, self.max_model_len, truncation)
        return self.tokenizer.encode_chat(chat)

    def _check_size(self, messages: Sequence[Mapping[str, Any]], options: Mapping[str, Any]) -> None:
        """Raise `PromptTooLong` for more text than the model's own input of messages may have: looking for special
        tokens in it would keep other requests waiting, also in what the chat template leaves out."""
        allowed = MAX_MESSAGES_CHARS + MESSAGES_CHARS_PER_TOKEN * self.max_model_len
        # A text of no characters takes a moment as well.
        sizes = itertools.accumulate(len(text) + 1 for text in texts([messages, options]))
        if any(size > allowed for size in sizes):
            raise PromptTooLong(
                f"the messages, with tools and variables of the chat template, have more than {allowed} characters, "
                f"but max_model_len is {self.max_model_len} tokens; shorten them"
            )

    def _text(self, text: str, add_special_tokens: bool, truncation: Truncation | None) -> list[int]:
        check_fits(text, self.tokenizer, self.max_model_len, truncation)
        return self.tokenizer.encode(text, add_special_tokens) if text else []
