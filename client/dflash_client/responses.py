"""Turns the outputs of a response into deltas, the same for every transport.

A transport gives `Outputs`: each output of the model by name, as a list of its elements (strings, numbers).
With n completions, `text_output`, `finish_reason`, `num_output_tokens`, `cumulative_logprob`, `logprobs`, `steps`,
`stop_reason` and `spec_stats` have n elements, and `token_ids` holds the new ids of all completions, one after the
other.
"""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Iterable, Iterator, Mapping
from itertools import islice
from typing import Any

from dflash_client.errors import Internal
from dflash_client.results import Delta, Logprob, Step, TokenLogprobs

Outputs = Mapping[str, list[Any]]
# Of log-probabilities in one response: about 50 tokens with 20 of the likeliest.
LARGE_CHARS = 64 * 1024
_SEPARATOR = re.compile(r"[\s,]*")


class ResponseReader:
    """Reads the responses of one request, in order. `answered` says whether one has come."""

    _tells_reasons = False
    _num_completions = 0

    def __init__(self) -> None:
        self.answered = False
        self._finished: set[int] = set()

    def deltas(self, outputs: Outputs) -> Iterator[Delta]:
        """What is new in a response; nothing for completions that it does not move on. Raises `Internal` for outputs
        that do not fit together."""
        self.answered = True
        texts = outputs.get("text_output", [])
        self._num_completions = max(self._num_completions, len(texts))
        self._tells_reasons = self._tells_reasons or "finish_reason" in outputs
        token_ids = _split(outputs.get("token_ids", []), outputs.get("num_output_tokens"), len(texts))
        num_input_tokens = _element(outputs, "num_input_tokens", 0)
        of_prompt = _prompt_logprobs(_positions(outputs, "prompt_logprobs", 0))
        for index, text in enumerate(texts):
            delta = Delta(
                text=text,
                token_ids=token_ids[index],
                num_output_tokens=_element(outputs, "num_output_tokens", index, len(token_ids[index])),
                num_input_tokens=num_input_tokens,
                finish_reason=_reason(_element(outputs, "finish_reason", index)),
                spec_stats=_parsed(outputs, "spec_stats", index),
                index=index,
                logprobs=_logprobs(_positions(outputs, "logprobs", index)),
                cumulative_logprob=_element(outputs, "cumulative_logprob", index),
                prompt_logprobs=of_prompt if index == 0 else None,
                steps=_steps(_parsed(outputs, "steps", index)),
                stop_reason=_parsed(outputs, "stop_reason", index),
                kv_transfer_params=_parsed(outputs, "kv_transfer_params", 0) if index == 0 else None,
            )
            if (news := self._news(delta)) is not None:
                yield news

    @property
    def broke_off(self) -> bool:
        """Whether an answer that ended here lacks something: no response came, or a completion has not ended. A server
        that sends no `finish_reason` does not tell, and its answer counts as whole."""
        return not self.answered or (self._tells_reasons and len(self._finished) < self._num_completions)

    @staticmethod
    def takes_long(outputs: Outputs) -> bool:
        """Whether `deltas` of this response keep other tasks waiting: log-probabilities of thousands of tokens."""
        texts = [*outputs.get("logprobs", ()), *outputs.get("prompt_logprobs", ())]
        return any(len(text) > LARGE_CHARS for text in texts)

    def _news(self, delta: Delta) -> Delta | None:
        """What of a delta was not sent before, None for nothing: a completion that has ended is sent again, empty and
        with its reasons, while others go on, and its statistics come with the last of them."""
        if delta.index in self._finished:
            delta = dataclasses.replace(delta, finish_reason=None, stop_reason=None)
        elif delta.finish_reason is not None:
            self._finished.add(delta.index)
        has_output = bool(delta.text or delta.num_output_tokens or delta.prompt_logprobs)
        is_news = has_output or delta.finish_reason is not None or delta.spec_stats is not None
        return delta if is_news else None


def description(text: str) -> dict[str, Any]:
    """What a model says of itself. Raises `Internal` for anything but a JSON object."""
    found = _json(text, "text_output")
    if not isinstance(found, dict):
        raise Internal("the server's description of its model is not a JSON object")
    return found


def _split(token_ids: list[int], counts: list[int] | None, num_completions: int) -> list[tuple[int, ...]]:
    """Each completion's share of the new token ids."""
    if not token_ids:
        return [()] * num_completions
    if counts is None and num_completions == 1:
        return [tuple(token_ids)]
    if counts is None or len(counts) != num_completions or sum(counts) != len(token_ids):
        raise Internal(
            f"the server sent {len(token_ids)} token ids for {num_completions} completions and num_output_tokens "
            f"{counts}, which do not fit together"
        )
    ids = iter(token_ids)
    return [tuple(islice(ids, count)) for count in counts]


def _element(outputs: Outputs, name: str, index: int, default: Any = None) -> Any:
    """Element `index` of an output; `default` where the output is absent or shorter."""
    values = outputs.get(name)
    return values[index] if values is not None and index < len(values) else default


def _parsed(outputs: Outputs, name: str, index: int) -> Any:
    """Element `index` of an output that is JSON; None where the output is absent or shorter, or the text is empty."""
    return _json(_element(outputs, name, index), name) if name in outputs else None


def _reason(text: str | None) -> str | None:
    return None if text in (None, "", "None") else text


def _json(text: str | None, output: str) -> Any:
    if not text:
        return None
    try:
        return json.loads(text)
    except ValueError as error:
        raise Internal(f"the output '{output}' of the server is not JSON: {error}") from None


def _steps(entries: Any) -> tuple[Step, ...] | None:
    return None if entries is None else tuple(Step(*entry) for entry in entries)


def _positions(outputs: Outputs, name: str, index: int) -> Iterable[Any] | None:
    """The entries of an output that is a list in JSON; None as for `_parsed`. A long list is read entry by entry: the
    reader of the whole would keep all other threads waiting."""
    text = _element(outputs, name, index) if name in outputs else None
    return _entries(text, name) if text and len(text) > LARGE_CHARS else _json(text, name)


def _entries(text: str, output: str) -> Iterator[Any]:
    decoder = json.JSONDecoder()
    try:
        at = _SEPARATOR.match(text, text.index("[") + 1).end()  # type: ignore[union-attr]
        while text[at] != "]":
            entry, at = decoder.raw_decode(text, at)
            yield entry
            at = _SEPARATOR.match(text, at).end()  # type: ignore[union-attr]
    except (ValueError, IndexError) as error:
        raise Internal(f"the output '{output}' of the server is not JSON: {error}") from None


def _logprobs(entries: Iterable[Any] | None) -> tuple[TokenLogprobs, ...] | None:
    """One entry for each new token; a position without log-probabilities has an empty one."""
    if entries is None:
        return None
    return tuple({int(token): Logprob(**of_token) for token, of_token in (entry or {}).items()} for entry in entries)


def _prompt_logprobs(entries: Iterable[Any] | None) -> tuple[TokenLogprobs | None, ...] | None:
    """One entry for each token of the prompt, None where it has none; None for no entries."""
    found = _logprobs(entries)
    return tuple(of_token or None for of_token in found) if found else None
