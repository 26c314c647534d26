"""Turns the tokens of one completion into text as they arrive, and finds its stop strings.

The joined deltas equal what the tokens (up to a stop) add to the text of the prompt's last tokens, those after its last
special token: `decode(prompt + answer)[len(decode(prompt)):]`. So a decoder that takes the first space of a text away
leaves the answer's. For tokenizers that decode runs of single bytes
together (SentencePiece), this holds where the bytes are valid UTF-8: an invalid byte changes how characters before it
decode, after they were sent.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import NamedTuple, Protocol

from dflash_backend.messages import SamplingParams
from dflash_backend.text.stop_strings import StopStrings

REPLACEMENT = "\ufffd"
# The longest run of U+FFFD at the end that is held back. Of a longer one, which `logit_bias` can cause, only the last
# few may still become a character; the others leave, so that the window does not grow with the run.
MAX_REPLACEMENTS = 64
MAX_INCOMPLETE = 4
# Tokens in a row that add no text become context when they are more. Skipped tokens do not stay in the window at all.
MAX_SILENT = 64
# Tokens at the end of a prompt that an answer is decoded after, and how many more are tried where the first ones are
# parts of a character.
CONTEXT = 16
MORE_CONTEXT = 3


class Decoder(Protocol):
    """What is needed of a tokenizer."""

    eos_token_ids: tuple[int, ...]

    def decode(self, token_ids: list[int], skip_special_tokens: bool = True) -> str:
        """The text of `token_ids`."""
        ...


def context_of(tokenizer: Decoder, prompt_token_ids: Sequence[int]) -> list[int]:
    """The tokens at a prompt's end that the text of its answer goes on from. None after a special token, where a text
    begins."""
    tail = list(prompt_token_ids[-CONTEXT - MORE_CONTEXT :])
    for place in range(len(tail) - 1, -1, -1):
        if _is_silent(tokenizer, tail[place], True):
            tail = tail[place + 1 :]
            break
    for length in range(CONTEXT, len(tail)):
        if REPLACEMENT not in tokenizer.decode(tail[-length:]):
            return tail[-length:]
    return tail


class TextDelta(NamedTuple):
    """New text. `stopped`: a stop string ended it, and no more text follows. `num_tokens`: how many of the tokens
    belong to the answer, up to the one that completed the stop string."""

    text: str
    stopped: bool
    num_tokens: int


class Detokenizer:
    """The text of one completion. Call `append` with the tokens of each step, in order."""

    def __init__(self, tokenizer: Decoder, sampling: SamplingParams, context: Sequence[int] = ()) -> None:
        """`context`: the tokens before the first one, as `context_of` gives them for a prompt."""
        self._tokenizer = tokenizer
        self._skip_special_tokens = sampling.skip_special_tokens
        self._keep_stop_token = sampling.include_stop_str_in_output
        eos = sampling.ending(tokenizer.eos_token_ids)
        self._eos_token_ids = frozenset(eos)
        self._stop_token_ids = frozenset((*eos, *sampling.stop_token_ids))
        self._stops = StopStrings(sampling.stop, sampling.include_stop_str_in_output) if sampling.stop else None
        # Text of the first `min_tokens` tokens is not searched for the end of a stop string, as in vLLM.
        self._num_unsearched = sampling.min_tokens
        # The tokens that are decoded together. The first `_num_context` are context, whose text was returned already:
        # some decoders treat the first token of a text differently, so no new token may be the first.
        self._window: list[int] = list(context)
        self._num_context = len(self._window)
        before = tokenizer.decode(self._window, self._skip_special_tokens) if self._window else ""
        self._num_chars_out = len(before)
        # The text of a context that breaks off within a character, until the answer has decided what becomes of it.
        self._torn = before if before.endswith(REPLACEMENT) else ""
        self._stopped = False

    def append(self, token_ids: list[int], finished: bool) -> TextDelta:
        """The text that `token_ids` add. With `finished` they are the last, and the text that was held back follows.

        A last token that is an end-of-sequence or stop token adds no text, unless `include_stop_str_in_output`.
        """
        if self._stopped:
            return TextDelta("", True, 0)
        if self._stops is None:
            return TextDelta(self._decode(token_ids, finished), False, len(token_ids))
        return self._append_each(self._stops, token_ids, finished)

    def stop_reason(self, last_token_id: int) -> str | int | None:
        """What ended an answer that ended by itself, as vLLM tells it: the stop string, or the last token where the
        request names it as one that stops; None for the end of sequence."""
        if self._stopped:
            return None if self._stops is None else self._stops.found
        return last_token_id if last_token_id in self._stop_token_ids - self._eos_token_ids else None

    def would_add(self, token_id: int, last: bool) -> str:
        """The text that `token_id` would add as the next token; `last` as `finished` of `append`, stop strings aside.

        The token that completes a character adds all of it, and the tokens before that nothing; so does a skipped
        special token. The joined additions of the chosen tokens are the text.
        """
        is_left_out = last and not self._keep_stop_token and token_id in self._stop_token_ids
        window = self._window if is_left_out else [*self._window, token_id]
        text = self._tokenizer.decode(window, self._skip_special_tokens)
        return (text if last else _complete(text))[self._num_sent(text) :]

    def _num_sent(self, text: str) -> int:
        """How much of the window's text is not new. The last character of a context that breaks off within it is one,
        also where each of its bytes was a character until the answer completed it."""
        if self._torn and not text.startswith(self._torn):
            alike = itertools.takewhile(lambda pair: pair[0] == pair[1], zip(text, self._torn, strict=False))
            return sum(1 for _ in alike) + 1
        return self._num_chars_out

    def _append_each(self, stops: StopStrings, token_ids: list[int], finished: bool) -> TextDelta:
        """`append` token by token, to find the one that completes a stop string: no text past it may leave."""
        texts: list[str] = []
        for index, token_id in enumerate(token_ids):
            last = finished and index == len(token_ids) - 1
            new = self._decode([token_id], last)
            self._num_unsearched -= 1
            text, self._stopped = stops.append(new, last, search=self._num_unsearched < 0)
            texts.append(text)
            if self._stopped:
                return TextDelta("".join(texts), True, index + 1)
        if finished and not token_ids:
            text, self._stopped = stops.append(self._decode([], True), True)
            texts.append(text)
        return TextDelta("".join(texts), self._stopped, len(token_ids))

    def _decode(self, token_ids: list[int], finished: bool) -> str:
        """The new text, up to the last complete character: a cut-off one decodes to U+FFFD at the end."""
        if finished and token_ids and not self._keep_stop_token and token_ids[-1] in self._stop_token_ids:
            token_ids = token_ids[:-1]
        if not token_ids and not finished:
            return ""
        self._window += token_ids
        text = self._tokenizer.decode(self._window, self._skip_special_tokens)
        complete = text if finished else _complete(text)
        if not text.startswith(self._torn):
            self._num_chars_out, self._torn = self._num_sent(text), ""
        delta = complete[self._num_chars_out :]
        held_back = len(complete) < len(text)
        if held_back and len(token_ids) > 1:
            # One by one, so that the characters before the cut-off one leave the window.
            del self._window[-len(token_ids) :]
            return "".join([self._decode([token_id], False) for token_id in token_ids])
        if not finished and (held_back or not delta):
            self._window[-len(token_ids) :] = [one for one in token_ids if not self.is_skipped(one)]
        if held_back:
            self._num_chars_out = max(self._num_chars_out, len(complete))
            if len(self._window) > self._num_context + MAX_REPLACEMENTS and _num_replacements(text) > MAX_REPLACEMENTS:
                self._shorten()
            return delta
        # Here the window ends with a character: what is new in it becomes the context of what follows.
        if delta or len(self._window) > self._num_context + MAX_SILENT:
            self._torn = ""
            del self._window[: self._num_context]
            self._num_context = len(self._window)
            text = self._tokenizer.decode(self._window, self._skip_special_tokens)
        self._num_chars_out = len(text)
        return delta

    def is_skipped(self, token_id: int) -> bool:
        """Whether the decoder leaves the token out wherever it comes, as a special token; it need not be in the window.
        A token of a space may have no text as the first one, but then it has as the second."""
        return _is_silent(self._tokenizer, token_id, self._skip_special_tokens)

    def _shorten(self) -> None:
        """Keep only the end of a window that ends in a long run of U+FFFD: enough tokens for the text that is held
        back, also among tokens without text."""
        size = MAX_REPLACEMENTS
        while size < len(self._window):
            text = self._tokenizer.decode(self._window[-size:], self._skip_special_tokens)
            if _num_replacements(text) > MAX_INCOMPLETE:
                self._window, self._torn = self._window[-size:], ""
                self._num_context = len(self._window)
                self._num_chars_out = len(text) - MAX_INCOMPLETE
                return
            size *= 2


def _is_silent(tokenizer: Decoder, token_id: int, skip_special_tokens: bool) -> bool:
    return not tokenizer.decode([token_id, token_id], skip_special_tokens)


def _complete(text: str) -> str:
    """`text` without the character at its end that may be cut off."""
    count = _num_replacements(text)
    return text[: len(text) - (count if count <= MAX_REPLACEMENTS else MAX_INCOMPLETE)]


def _num_replacements(text: str) -> int:
    """How many U+FFFD `text` ends in."""
    return len(text) - len(text.rstrip(REPLACEMENT))
