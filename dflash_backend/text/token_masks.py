"""Tokens that a request does not want: `allowed_token_ids`, and the token ids of `bad_words`."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol

import msgspec

from dflash_backend.messages import SamplingParams
from dflash_backend.text.sampling_params import ParameterError


class PartEncoder(Protocol):
    """The part of a tokenizer that is needed here."""

    def encode_part(self, text: str) -> list[int]:
        """Token ids of a text within a text: without special tokens around it."""


def bad_word_token_ids(words: Iterable[str], tokenizer: PartEncoder, vocab_size: int) -> tuple[tuple[int, ...], ...]:
    """The token ids of `words`, as they are tokenised at the beginning of a text and behind a space, as in vLLM. The
    last token of each is hidden where the output ends with the others.

    Two forms differ from vLLM's, so that a word is not let through: one behind a space is also taken where it has
    another number of tokens than the word alone.
    """
    found: dict[tuple[int, ...], None] = {}
    for word in words:
        alone = tuple(tokenizer.encode_part(word.lstrip() or word))
        spaced = tuple(tokenizer.encode_part(f" {word.lstrip()}"))
        found[alone] = None
        if spaced[-len(alone) :] != alone:
            found[spaced] = None
    return tuple(ids for ids in found if ids and max(ids) < vocab_size)


def resolve_token_masks(
    sampling: SamplingParams, tokenizer: PartEncoder, eos_token_ids: Sequence[int], vocab_size: int
) -> SamplingParams:
    """The parameters with the token ids of their bad words. Raises `ParameterError` where it may happen that no token
    can be sampled."""
    if sampling.bad_words:
        ids = bad_word_token_ids(sampling.bad_words, tokenizer, vocab_size)
        sampling = msgspec.structs.replace(sampling, bad_words_token_ids=ids)
    if sampling.allowed_token_ids or sampling.bad_words:
        _check_any_left(sampling, eos_token_ids, vocab_size)
    return sampling


def _check_any_left(sampling: SamplingParams, eos_token_ids: Sequence[int], vocab_size: int) -> None:
    hidden = {ids[-1] for ids in sampling.bad_words_token_ids}
    if sampling.min_tokens > 0:
        hidden |= set(sampling.stop_token_ids) | (set() if sampling.ignore_eos else set(eos_token_ids))
    if sampling.allowed_token_ids:
        none_left = hidden.issuperset(sampling.allowed_token_ids)
    else:
        none_left = len({token_id for token_id in hidden if token_id < vocab_size}) == vocab_size
    if none_left:
        raise ParameterError(
            "the sampling parameters leave no token: 'bad_words' and 'min_tokens', which hides tokens that end the "
            "answer, can hide each of 'allowed_token_ids'"
        )
