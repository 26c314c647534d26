"""What a generation yields: `Delta` while it streams, `GenerationResult` when it is done."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, NamedTuple


@dataclass(frozen=True, slots=True)
class Logprob:
    """The log-probability of a token at one position, and its rank there (1: the likeliest)."""

    logprob: float
    rank: int | None = None
    decoded_token: str | None = None


# By token id: the token that was chosen, and the likeliest ones beside it.
TokenLogprobs = dict[int, Logprob]


class Step(NamedTuple):
    """What one step of the engine added: tokens, of which all but one are accepted drafts, drafts that it verified, and
    characters of text."""

    num_tokens: int
    num_draft_tokens: int
    num_chars: int


@dataclass(frozen=True, slots=True)
class Delta:
    """What one response of the server has that is new for one completion: text, and the tokens that it came from.

    `index` numbers the completions of a request, 0 to n - 1. `finish_reason` is set on the last delta of a completion
    that has output, and on no other; `spec_stats` come with it or, where other completions go on, in a delta of their
    own after it. `num_output_tokens` counts `token_ids`; `logprobs` has an entry for each of them, if they
    were asked for. `cumulative_logprob` is that of the completion so far. `spec_stats` has the fields
    that the server sends, such as `acceptance_length` and `num_cached_tokens`. `prompt_logprobs`, of the first
    completion's deltas, has an entry for each token of the prompt, the first of which is None, if they were asked for.
    `steps` is None unless the request had `return_steps`; a delta has more than one where the server was busy.
    `stop_reason` is the stop string or stop token that ended the completion, None where something else did.
    `kv_transfer_params`, of the first completion's last delta: by what another server fetches the prompt's KV.
    """

    text: str
    token_ids: tuple[int, ...] = ()
    num_output_tokens: int = 0
    num_input_tokens: int | None = None
    finish_reason: str | None = None
    spec_stats: dict[str, Any] | None = None
    index: int = 0
    logprobs: tuple[TokenLogprobs, ...] | None = None
    cumulative_logprob: float | None = None
    prompt_logprobs: tuple[TokenLogprobs | None, ...] | None = None
    steps: tuple[Step, ...] | None = None
    stop_reason: str | int | None = None
    kv_transfer_params: dict[str, Any] | None = None

    @property
    def is_statistics(self) -> bool:
        """Whether it has nothing but `spec_stats`, of a completion that ended before."""
        has_output = self.text or self.num_output_tokens or self.logprobs or self.prompt_logprobs
        return not has_output and self.finish_reason is None


@dataclass(frozen=True, slots=True)
class Completion:
    """One finished completion. `finish_reason` is `stop`, `length` or `abort`; `stop_reason` is the stop string or stop
    token that ended it, None where something else did."""

    text: str
    finish_reason: str | None = None
    token_ids: tuple[int, ...] = ()
    num_output_tokens: int = 0
    logprobs: tuple[TokenLogprobs, ...] | None = None
    cumulative_logprob: float | None = None
    spec_stats: dict[str, Any] = field(default_factory=dict)
    stop_reason: str | int | None = None


@dataclass(frozen=True, slots=True)
class GenerationResult:
    """A finished request: its `n` completions, without the prompt. What is said of one is said of the first.

    `prompt_logprobs` has an entry for each token of the prompt, the first of which is None, if they were asked for.
    `kv_transfer_params` say where a prefill server keeps the prompt's KV; None where none is kept."""

    completions: tuple[Completion, ...]
    num_input_tokens: int = 0
    prompt_logprobs: tuple[TokenLogprobs | None, ...] | None = None
    kv_transfer_params: dict[str, Any] | None = None

    @property
    def text(self) -> str:
        """The first completion's text."""
        return self.completions[0].text

    @property
    def finish_reason(self) -> str | None:
        """Why the first completion ended."""
        return self.completions[0].finish_reason

    @property
    def token_ids(self) -> tuple[int, ...]:
        """The first completion's tokens."""
        return self.completions[0].token_ids

    @property
    def num_output_tokens(self) -> int:
        """How many tokens the first completion has."""
        return self.completions[0].num_output_tokens

    @property
    def logprobs(self) -> tuple[TokenLogprobs, ...] | None:
        """Log-probabilities for each token of the first completion, if `logprobs` was asked for."""
        return self.completions[0].logprobs

    @property
    def cumulative_logprob(self) -> float | None:
        """The sum of the log-probabilities of the first completion's tokens, if `logprobs` was asked for."""
        return self.completions[0].cumulative_logprob

    @property
    def spec_stats(self) -> dict[str, Any]:
        """What speculation and the prefix cache did for the first completion."""
        return self.completions[0].spec_stats

    @classmethod
    def from_deltas(cls, deltas: Iterable[Delta]) -> GenerationResult:
        """Join the deltas of one request."""
        deltas = list(deltas)
        by_index: dict[int, list[Delta]] = {0: []}
        for delta in deltas:
            by_index.setdefault(delta.index, []).append(delta)
        return cls(
            tuple(_joined(by_index[index]) for index in sorted(by_index)),
            _last((delta.num_input_tokens for delta in deltas), 0),
            _all_entries(delta.prompt_logprobs for delta in deltas),
            _last(delta.kv_transfer_params for delta in deltas),
        )


def _joined(deltas: list[Delta]) -> Completion:
    """The deltas of one completion as a whole; of what is set now and then, the last counts."""
    return Completion(
        text="".join(delta.text for delta in deltas),
        finish_reason=_last(delta.finish_reason for delta in deltas),
        token_ids=tuple(token for delta in deltas for token in delta.token_ids),
        num_output_tokens=sum(delta.num_output_tokens for delta in deltas),
        logprobs=_all_entries(delta.logprobs for delta in deltas),
        cumulative_logprob=_last(delta.cumulative_logprob for delta in deltas),
        spec_stats=_last((delta.spec_stats for delta in deltas), {}),
        stop_reason=_last(delta.stop_reason for delta in deltas),
    )


def _last(values: Iterable[Any], default: Any = None) -> Any:
    """The last of them that is not None."""
    for value in values:
        default = default if value is None else value
    return default


def _all_entries(parts: Iterable[tuple[Any, ...] | None]) -> tuple[Any, ...] | None:
    """The entries of all parts; None where there is no part."""
    found = [part for part in parts if part is not None]
    return tuple(chain.from_iterable(found)) if found else None
