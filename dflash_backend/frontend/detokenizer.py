"""Turns the tokens of one request into text as they come, and finds its stop strings. Used by the frontend and `LLM`.

The deltas joined are `tokenizer.decode` of all the tokens (up to a stop). For tokenizers that fall back to single bytes
by the run (SentencePiece), that holds where the bytes are valid UTF-8: an invalid byte there changes how characters
before it decode, after they were sent.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

from dflash_backend.messages import SamplingParams

REPLACEMENT = "\ufffd"


class Decoder(Protocol):
    """What is needed of a tokenizer."""

    eos_token_ids: tuple[int, ...]

    def decode(self, token_ids: list[int], skip_special_tokens: bool = True) -> str:
        """The text of `token_ids`."""
        ...


class TextDelta(NamedTuple):
    """New text. `stopped` says that a stop string ended it: no more text will come."""

    text: str
    stopped: bool


class Detokenizer:
    """The text of one request. Call `append` with the tokens of each step, in order."""

    def __init__(self, tokenizer: Decoder, sampling: SamplingParams) -> None:
        self._tokenizer = tokenizer
        self._skip_special_tokens = sampling.skip_special_tokens
        self._keep_stop_token = sampling.include_stop_str_in_output
        eos = () if sampling.ignore_eos else tokenizer.eos_token_ids
        self._stop_token_ids = frozenset((*eos, *sampling.stop_token_ids))
        self._stops = StopStrings(sampling.stop, sampling.include_stop_str_in_output) if sampling.stop else None
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
            return TextDelta("", True)
        if finished and token_ids and not self._keep_stop_token and token_ids[-1] in self._stop_token_ids:
            token_ids = token_ids[:-1]
        text = self._decode(token_ids, finished)
        if self._stops is None:
            return TextDelta(text, False)
        text, self._stopped = self._stops.append(text, finished)
        return TextDelta(text, self._stopped)

    def _decode(self, token_ids: list[int], finished: bool) -> str:
        """The new text, up to the last complete character: a cut-off one decodes to U+FFFD at the end."""
        if not token_ids and not finished:
            return ""
        self._window += token_ids
        text = self._tokenizer.decode(self._window, self._skip_special_tokens)
        complete = text if finished else text.rstrip(REPLACEMENT)
        delta = complete[self._num_chars_out :]
        if len(complete) < len(text):
            self._num_chars_out = max(self._num_chars_out, len(complete))
            return delta
        # Here the window ends with a character: what is new in it becomes the context of what follows.
        if len(self._window) > self._num_context and delta:
            del self._window[: self._num_context]
            self._num_context = len(self._window)
            text = self._tokenizer.decode(self._window, self._skip_special_tokens)
        self._num_chars_out = len(text)
        return delta


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

    def append(self, text: str, finished: bool) -> tuple[str, bool]:
        """What may leave of the text so far, and whether a stop string was found."""
        text = self._held + text
        found = [(start + len(stop), start) for stop in self._stops if (start := text.find(stop)) >= 0]
        if found:
            end, start = min(found)
            return text[: end if self._include else start], True
        held = 0 if finished else self._num_held(text)
        self._held = text[len(text) - held :]
        return text[: len(text) - held], False

    def _num_held(self, text: str) -> int:
        """The length of the longest end of `text` with which a stop string could begin."""
        for length in range(min(self._longest - 1, len(text)), 0, -1):
            if any(stop.startswith(text[-length:]) for stop in self._stops):
                return length
        return 0
