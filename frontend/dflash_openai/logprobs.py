"""Log-probabilities in the forms of OpenAI's API."""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from dflash_backend.text.detokenizer import REPLACEMENT
from dflash_backend.text.tokenizer import Tokenizer
from dflash_client.results import Logprob, TokenLogprobs

_UTF8 = codecs.getincrementaldecoder("utf-8")


class LogprobWriter:
    """Writes the log-probabilities of a completion's tokens, `num_top` of the likeliest at each position; None for all
    that the model has given, of the tokens that the request names.

    A token has the bytes that it stands for, which joined are those of the text; one that is no whole characters is
    written as `bytes:` and its bytes (`bytes:\\xe4`), as OpenAI writes it. `as_token_ids` writes a token as
    `token_id:N` in place of its text, as vLLM's `return_tokens_as_token_ids` does.
    """

    def __init__(self, num_top: int | None, as_token_ids: bool, tokenizer: Tokenizer) -> None:
        self._num_top, self._as_token_ids, self._tokenizer = num_top, as_token_ids, tokenizer
        self._offset = 0

    def chat(self, entries: Sequence[TokenLogprobs]) -> dict[str, Any]:
        """The form of chat completions."""
        return {"content": self.tokens(entries), "refusal": None}

    def tokens(self, entries: Sequence[TokenLogprobs]) -> list[dict[str, Any]]:
        """The form of each token in chat completions, and in responses."""
        content = []
        for entry in entries:
            token_id, chosen = chosen_of(entry)
            top = [self._chat_token(other, logprob) for other, logprob in self._likeliest(entry)]
            content.append({**self._chat_token(token_id, chosen), "top_logprobs": top})
        return content

    def completion(
        self, entries: Sequence[TokenLogprobs | None], first: tuple[int, str] = (0, ""), echoed: str = ""
    ) -> dict[str, Any]:
        """The form of completions. Offsets are in characters, from the beginning of the text, which begins with
        `echoed`. `first` is id and text of a prompt's first token, whose entry is None. A special token that the
        prompt's text has not, such as one that the tokenizer put before it, has no characters there. The chosen token
        is among the likeliest, beside them where it is none of them, as in vLLM."""
        tokens: list[str] = []
        logprobs: list[float | None] = []
        offsets: list[int] = []
        top: list[dict[str, float] | None] = []
        for entry in entries:
            token_id, chosen = (first[0], Logprob(0.0, None, first[1])) if entry is None else chosen_of(entry)
            tokens.append(self._shown(token_id, chosen)[0])
            logprobs.append(None if entry is None else chosen.logprob)
            offsets.append(self._offset)
            text = chosen.decoded_token or ""
            is_added = self._offset < len(echoed) and self._tokenizer.token_bytes(token_id) is None
            self._offset += 0 if is_added and not echoed.startswith(text, self._offset) else len(text)
            top.append(None if entry is None else self._top(entry))
        return {"tokens": tokens, "token_logprobs": logprobs, "top_logprobs": top, "text_offset": offsets}

    def _top(self, entry: TokenLogprobs) -> dict[str, float]:
        """The chosen token first, as vLLM writes it, and the likeliest others by their texts; one whose text another
        has by its id."""
        chosen = chosen_of(entry)
        texts: dict[str, float] = {}
        for token_id, logprob in (chosen, *(each for each in self._likeliest(entry) if each[0] != chosen[0])):
            text = self._shown(token_id, logprob)[0]
            if not text and token_id != chosen[0]:
                text = self._tokenizer.token_texts([token_id])[0]
            texts[f"token_id:{token_id}" if text in texts else text] = logprob.logprob
        return texts

    def _chat_token(self, token_id: int, logprob: Logprob) -> dict[str, Any]:
        text, own = self._shown(token_id, logprob)
        return {"token": text, "logprob": logprob.logprob, "bytes": list(own)}

    def _shown(self, token_id: int, logprob: Logprob) -> tuple[str, bytes]:
        """What a token is called, and its bytes."""
        own = self._bytes(token_id, logprob.decoded_token or "")
        if self._as_token_ids:
            return f"token_id:{token_id}", own
        try:
            return own.decode(), own
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in own), own

    def _bytes(self, token_id: int, text: str) -> bytes:
        """The bytes of a token whose decoded text is `text`: those of the text, but for parts of characters. The token
        that completes a character has all of it as its text, and the tokens before it have none."""
        own = self._tokenizer.token_bytes(token_id)
        if own is None:
            return text.encode()
        decoder = _UTF8(errors="replace")
        is_part = REPLACEMENT in decoder.decode(own)
        begun = len(decoder.getstate()[0])
        whole = own[: len(own) - begun]
        # Another text is that of another tokenizer.
        fits = not text or text.endswith(REPLACEMENT) or bool(whole and text.encode().endswith(whole))
        return own if fits and (is_part or begun or text) else text.encode()

    def _likeliest(self, entry: TokenLogprobs) -> Sequence[tuple[int, Logprob]]:
        """The likeliest tokens in their order. The chosen token comes with them, also where it is not one of them."""
        ranked = sorted(entry.items(), key=lambda item: item[1].rank or 0)
        return ranked[: self._num_top]


def of_prompt(entries: Sequence[TokenLogprobs | None]) -> list[dict[str, Any] | None]:
    """vLLM's `prompt_logprobs`: an object by token id for each token of the prompt, null for the first."""
    return [None if entry is None else {str(token): asdict(each) for token, each in entry.items()} for entry in entries]


def chosen_of(entry: TokenLogprobs) -> tuple[int, Logprob]:
    """The token of the completion, which comes first; a position without log-probabilities has none."""
    return next(iter(entry.items()), (0, Logprob(0.0)))
