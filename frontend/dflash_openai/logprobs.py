"""Log-probabilities in the forms of OpenAI's API."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict
from typing import Any

from dflash_client.results import Logprob, TokenLogprobs


class LogprobWriter:
    """Writes the log-probabilities of a completion's tokens, `num_top` of the likeliest at each position.

    `as_token_ids` writes a token as `token_id:N` in place of its text, as vLLM's `return_tokens_as_token_ids` does.
    """

    def __init__(self, num_top: int, as_token_ids: bool) -> None:
        self._num_top, self._as_token_ids = num_top, as_token_ids
        self._offset = 0

    def chat(self, entries: Sequence[TokenLogprobs]) -> dict[str, Any]:
        """The form of chat completions."""
        return {"content": self.tokens(entries), "refusal": None}

    def tokens(self, entries: Sequence[TokenLogprobs]) -> list[dict[str, Any]]:
        """The form of each token in chat completions, and in responses."""
        content = []
        for entry in entries:
            (token_id, chosen), likeliest = chosen_of(entry), self._likeliest(entry)
            top = [self._chat_token(other, logprob) for other, logprob in likeliest]
            content.append({**self._chat_token(token_id, chosen), "top_logprobs": top})
        return content

    def completion(self, entries: Sequence[TokenLogprobs | None], first: tuple[int, str] = (0, "")) -> dict[str, Any]:
        """The form of completions. Offsets are in characters, from the beginning of the text. `first` is id and text of
        a prompt's first token, whose entry is None."""
        tokens: list[str] = []
        logprobs: list[float | None] = []
        offsets: list[int] = []
        top: list[dict[str, float] | None] = []
        for entry in entries:
            token_id, chosen = (first[0], Logprob(0.0, None, first[1])) if entry is None else chosen_of(entry)
            tokens.append(self._text(token_id, chosen))
            logprobs.append(None if entry is None else chosen.logprob)
            offsets.append(self._offset)
            self._offset += len(chosen.decoded_token or "")
            likeliest = self._likeliest(entry or {})
            top.append(None if entry is None else {self._text(*each): each[1].logprob for each in likeliest})
        return {
            "tokens": tokens,
            "token_logprobs": logprobs,
            "top_logprobs": top if self._num_top else None,
            "text_offset": offsets,
        }

    def _chat_token(self, token_id: int, logprob: Logprob) -> dict[str, Any]:
        text = self._text(token_id, logprob)
        return {"token": text, "logprob": logprob.logprob, "bytes": list((logprob.decoded_token or "").encode())}

    def _text(self, token_id: int, logprob: Logprob) -> str:
        return f"token_id:{token_id}" if self._as_token_ids else logprob.decoded_token or ""

    def _likeliest(self, entry: TokenLogprobs) -> Iterable[tuple[int, Logprob]]:
        """The likeliest tokens in their order. The chosen token comes with them, also where it is not one of them."""
        ranked = sorted(entry.items(), key=lambda item: item[1].rank or 0)
        return ranked[: self._num_top]


def of_prompt(entries: Sequence[TokenLogprobs | None]) -> list[dict[str, Any] | None]:
    """vLLM's `prompt_logprobs`: an object by token id for each token of the prompt, null for the first."""
    return [None if entry is None else {str(token): asdict(each) for token, each in entry.items()} for entry in entries]


def chosen_of(entry: TokenLogprobs) -> tuple[int, Logprob]:
    """The token of the completion, which comes first; a position without log-probabilities has none."""
    return next(iter(entry.items()), (0, Logprob(0.0)))
