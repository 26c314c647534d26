"""Refuses prompts that do not fit the model, before they cost much."""

from __future__ import annotations

from dflash_backend.text.tokenizer import InputError, Tokenizer
from dflash_backend.text.truncation import Truncation

# Of messages, with what the chat template gets beside them. JSON may write one character as six, and each message also
# has a role and field names.
MAX_MESSAGES_CHARS = 65_536
MESSAGES_CHARS_PER_TOKEN = 64
# Of a prompt's text, where its tokens may be longer than that: only runs of white space have as many for each token,
# and the regular expressions of tokenizers take seconds for millions of spaces, or fail.
FREE_CHARS = 65_536
CHARS_PER_TOKEN = 16


class PromptTooLong(InputError):
    """The prompt does not fit `max_model_len`."""


def check_num_tokens(num_tokens: int, max_model_len: int) -> None:
    """Raise `PromptTooLong` unless the prompt and one token of the answer fit."""
    if num_tokens + 1 > max_model_len:
        raise PromptTooLong(
            f"the prompt has {num_tokens} tokens and the answer needs at least 1, but max_model_len is "
            f"{max_model_len}; shorten the prompt"
        )


def check_fits(text: str, tokenizer: Tokenizer, max_model_len: int, kept: Truncation | None = None) -> None:
    """Raise `PromptTooLong` for a text that is certainly too long, also to be tokenised and then made shorter, as
    `kept` says: tokenising it would keep other clients waiting."""
    if len(text) > most_chars(tokenizer, max_model_len):
        raise too_long(f"{len(text)} characters", tokenizer, max_model_len)
    if kept is None and tokenizer.has_more_tokens(text, max_model_len):
        raise PromptTooLong(
            f"the prompt has {len(text)} characters, which are too many tokens: max_model_len is "
            f"{max_model_len}; shorten the prompt"
        )


def most_chars(tokenizer: Tokenizer, max_model_len: int) -> int:
    """The most characters that a prompt may have: no more than `max_model_len` tokens can stand for."""
    return min(max_model_len * tokenizer.max_token_chars, FREE_CHARS + max_model_len * CHARS_PER_TOKEN)


def too_long(size: str, tokenizer: Tokenizer, max_model_len: int) -> PromptTooLong:
    """The error of a prompt whose `size`, in words, cannot fit."""
    return PromptTooLong(
        f"the prompt has {size}, but max_model_len is {max_model_len} tokens, for which at most "
        f"{most_chars(tokenizer, max_model_len)} characters are allowed; shorten the prompt"
    )
