"""Turns the tokens of one request into text as they come, and finds its stop strings. Used by the frontend and `LLM`.

The deltas joined are `tokenizer.decode` of all the tokens (up to a stop). For tokenizers that fall back to single bytes
by the run (SentencePiece), that holds where the bytes are valid UTF-8: an invalid byte there changes how characters
before it decode, after they were sent.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

from dflash_backend.messages import SamplingParams

REPLACEMENT = "\ufffd"
# Of a longer run of U+FFFD at the end, which a client can ask for with `logit_bias`, only the last few may still become
# a character: the others leave, so that the window does not grow with the run.
MAX_REPLACEMENTS = 64
MAX_INCOMPLETE = 4


class Decoder(Protocol):
    """What is needed of a tokenizer."""

    eos_token_ids: tuple[int, ...]

    def decode(self, token_ids: list[int], skip_special_tokens: bool = True) -> str:
        """The text of `token_ids`."""
        ...


class TextDelta(NamedTuple):
    """New text. `stopped` says that a stop string ended it: no more text will come. `num_tokens` of the tokens belong
    to the answer: all of them, or those up to the one that completed the stop string."""

    text: str
    stopped: bool
    num_tokens: int


class Detokenizer:
    """The text of one request. Call `append` with the tokens of each step, in order."""

    def __init__(self, tokenizer: Decoder, sampling: SamplingParams) -> None:
        self._tokenizer = tokenizer
        self._skip_special_tokens = sampling.skip_special_tokens
        self._keep_stop_token = sampling.include_stop_str_in_output
        eos = () if sampling.ignore_eos else tokenizer.eos_token_ids
        self._stop_token_ids = frozenset((*eos, *sampling.stop_token_ids))
        self._stops = StopStrings(sampling.stop, sampling.include_stop_str_in_output) if sampling.stop else None
        # Text of the first `min_tokens` tokens is not searched for the end of a stop string, as in vLLM.
        self._num_unsearched = sampling.min_tokens
        # A window of tokens is decoded at a time. It begins with `_num_context` tokens whose text is out already: some
        # decoders treat the first token of a text in another way, so no new token may be the first.
        self._window: list[int] = []
        self._num_chars_out = 0
        self._num_context = 0
        self._stopped = False

    def append(self, token_ids: list[int], finished: bool) -> TextDelta:
        """The text that `token_ids` add. `finished` says that they are the last: what was held back comes out.

        A last token that is an end-of-sequence or stop token adds no text, unless `include_stop_str_in_output`.
        """
        if self._stopped:
            return TextDelta("", True, 0)
        if self._stops is None:
            return TextDelta(self._decode(token_ids, finished), False, len(token_ids))
        return self._append_each(self._stops, token_ids, finished)

    def would_add(self, token_id: int, last: bool) -> str:
        """The text that `token_id` would add if it came next; `last` as `finished` of `append`, stop strings aside.

        A part of a character adds nothing, and the token that completes the character adds all of it; a special token
        that is skipped adds nothing. So what the chosen tokens add, joined, is the text.
        """
        if last and not self._keep_stop_token and token_id in self._stop_token_ids:
            text = self._tokenizer.decode(self._window, self._skip_special_tokens)
        else:
            text = self._tokenizer.decode([*self._window, token_id], self._skip_special_tokens)
        return (text if last else _complete(text))[self._num_chars_out :]

    def _append_each(self, stops: StopStrings, token_ids: list[int], finished: bool) -> TextDelta:
        """`append` token by token, to know the one that completes a stop string: nothing past it may leave."""
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
        delta = complete[self._num_chars_out :]
        if len(complete) < len(text):
            self._num_chars_out = max(self._num_chars_out, len(complete))
            if len(self._window) > self._num_context + MAX_REPLACEMENTS and len(text) - len(complete) == MAX_INCOMPLETE:
                self._shorten()
            return delta
        # Here the window ends with a character: what is new in it becomes the context of what follows.
        if len(self._window) > self._num_context and delta:
            del self._window[: self._num_context]
            self._num_context = len(self._window)
            text = self._tokenizer.decode(self._window, self._skip_special_tokens)
        self._num_chars_out = len(text)
        return delta

    def _shorten(self) -> None:
        """Keep of a window that ends in a long run of U+FFFD its end only."""
        self._window = self._window[-MAX_REPLACEMENTS:]
        self._num_context = len(self._window)
        text = self._tokenizer.decode(self._window, self._skip_special_tokens)
        self._num_chars_out = max(0, len(text) - MAX_INCOMPLETE)


def _complete(text: str) -> str:
    """`text` without the character at its end that may be cut off."""
    complete = text.rstrip(REPLACEMENT)
    return complete if len(text) - len(complete) <= MAX_REPLACEMENTS else text[:-MAX_INCOMPLETE]


class StopStrings:
    """Cuts a text that comes in pieces at the stop string that is complete first.

    The result does not depend on where the pieces were cut: text that may be the beginning of a stop string is held
    back until it is clear, and of stop strings that end at the same character the longest counts.
    """

    def __init__(self, stops: tuple[str, ...], include: bool) -> None:
        """`include` says that the stop string itself belongs to the text."""
        self._stops = stops
        self._include = include
        self._longest = max(map(len, stops))
        self._held = ""
        # So much of `_held` came unsearched: a stop string counts only if it ends past it.
        self._num_unsearched = 0

    def append(self, text: str, finished: bool, search: bool = True) -> tuple[str, bool]:
        """What may leave of the text so far, and whether a stop string was found. Without `search` none that ends in
        this piece counts."""
        text = self._held + text
        if not search:
            self._num_unsearched = len(text)
        found = [(end, end - len(stop)) for stop in self._stops if (end := self._end_of(stop, text)) >= 0]
        if found:
            end, start = min(found)
            return text[: end if self._include else start], True
        held = 0 if finished else self._num_held(text)
        self._held = text[len(text) - held :]
        self._num_unsearched = max(0, self._num_unsearched - (len(text) - held))
        return text[: len(text) - held], False

    def _end_of(self, stop: str, text: str) -> int:
        """Where the first occurrence of `stop` that counts ends in `text`; -1 without one."""
        start = text.find(stop, max(0, self._num_unsearched - len(stop) + 1))
        return start + len(stop) if start >= 0 else -1

    def _num_held(self, text: str) -> int:
        """The length of the longest end of `text` with which a stop string could begin."""
        for length in range(min(self._longest - 1, len(text)), 0, -1):
            if any(stop.startswith(text[-length:]) for stop in self._stops):
                return length
        return 0
