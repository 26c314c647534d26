"""Turns the tokens of one completion into text as they arrive, and finds its stop strings.

The joined deltas equal `tokenizer.decode` of all tokens (up to a stop). For tokenizers that decode runs of single bytes
together (SentencePiece), this holds where the bytes are valid UTF-8: an invalid byte changes how characters before it
decode, after they were sent.
"""

from __future__ import annotations

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


class Decoder(Protocol):
    """What is needed of a tokenizer."""

    eos_token_ids: tuple[int, ...]

    def decode(self, token_ids: list[int], skip_special_tokens: bool = True) -> str:
        """The text of `token_ids`."""
        ...


class TextDelta(NamedTuple):
    """New text. `stopped`: a stop string ended it, and no more text follows. `num_tokens`: how many of the tokens
    belong to the answer, up to the one that completed the stop string."""

    text: str
    stopped: bool
    num_tokens: int


class Detokenizer:
    """The text of one completion. Call `append` with the tokens of each step, in order."""

    def __init__(self, tokenizer: Decoder, sampling: SamplingParams) -> None:
        self._tokenizer = tokenizer
        self._skip_special_tokens = sampling.skip_special_tokens
        self._keep_stop_token = sampling.include_stop_str_in_output
        eos = () if sampling.ignore_eos else tokenizer.eos_token_ids
        self._stop_token_ids = frozenset((*eos, *sampling.stop_token_ids))
        self._stops = StopStrings(sampling.stop, sampling.include_stop_str_in_output) if sampling.stop else None
        # Text of the first `min_tokens` tokens is not searched for the end of a stop string, as in vLLM.
        self._num_unsearched = sampling.min_tokens
        # The tokens that are decoded together. The first `_num_context` are context, whose text was returned already:
        # some decoders treat the first token of a text differently, so no new token may be the first.
        self._window: list[int] = []
        self._num_chars_out = 0
        self._num_context = 0
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

    def would_add(self, token_id: int, last: bool) -> str:
        """The text that `token_id` would add as the next token; `last` as `finished` of `append`, stop strings aside.

        The token that completes a character adds all of it, and the tokens before that nothing; so does a skipped
        special token. The joined additions of the chosen tokens are the text.
        """
        if last and not self._keep_stop_token and token_id in self._stop_token_ids:
            text = self._tokenizer.decode(self._window, self._skip_special_tokens)
        else:
            text = self._tokenizer.decode([*self._window, token_id], self._skip_special_tokens)
        return (text if last else _complete(text))[self._num_chars_out :]

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
        delta = complete[self._num_chars_out :]
        held_back = len(complete) < len(text)
        if held_back and len(token_ids) > 1:
            # One by one, so that the characters before the cut-off one leave the window.
            del self._window[-len(token_ids) :]
            return "".join([self._decode([token_id], False) for token_id in token_ids])
        if not finished and (held_back or not delta):
            self._window[-len(token_ids) :] = [one for one in token_ids if not self._is_skipped(one)]
        if held_back:
            self._num_chars_out = max(self._num_chars_out, len(complete))
            if len(self._window) > self._num_context + MAX_REPLACEMENTS and _num_replacements(text) > MAX_REPLACEMENTS:
                self._shorten()
            return delta
        # Here the window ends with a character: what is new in it becomes the context of what follows.
        if delta or len(self._window) > self._num_context + MAX_SILENT:
            del self._window[: self._num_context]
            self._num_context = len(self._window)
            text = self._tokenizer.decode(self._window, self._skip_special_tokens)
        self._num_chars_out = len(text)
        return delta

    def _is_skipped(self, token_id: int) -> bool:
        """Whether the decoder leaves the token out wherever it comes, as a special token, so that it need not be in the
        window. A token of a space may have no text as the first one, but then it has as the second."""
        return not self._tokenizer.decode([token_id, token_id], self._skip_special_tokens)

    def _shorten(self) -> None:
        """Keep only the end of a window that ends in a long run of U+FFFD: enough tokens for the text that is held
        back, also among tokens without text."""
        size = MAX_REPLACEMENTS
        while size < len(self._window):
            text = self._tokenizer.decode(self._window[-size:], self._skip_special_tokens)
            if _num_replacements(text) > MAX_INCOMPLETE:
                self._window = self._window[-size:]
                self._num_context = len(self._window)
                self._num_chars_out = len(text) - MAX_INCOMPLETE
                return
            size *= 2


def _complete(text: str) -> str:
    """`text` without the character at its end that may be cut off."""
    count = _num_replacements(text)
    return text[: len(text) - (count if count <= MAX_REPLACEMENTS else MAX_INCOMPLETE)]


def _num_replacements(text: str) -> int:
    """How many U+FFFD `text` ends in."""
    return len(text) - len(text.rstrip(REPLACEMENT))
