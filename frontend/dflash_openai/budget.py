"""What one HTTP request may ask for in all, and what its answers may hold together: with many prompts as much as with
one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeGuard

from dflash_client import Delta
from dflash_openai.errors import ApiError, invalid
from dflash_openai.triton_pool import ModelDescription

# As the model sends them: a token of text, and one log-probability with its rank and the token's text.
BYTES_OF_TOKEN = 4
BYTES_OF_LOGPROB = 70
# The model sends a larger answer as it comes: all at once it would keep others waiting while it is read.
LARGEST_PIECE_BYTES = 1 << 20
# The parameters of a request, which are sent with each of its prompts.
MAX_SENT_BYTES = 64 * 2**20


def check_num_tokens(num_tokens: int, num_prompts: int, description: ModelDescription, num_servers: int) -> None:
    """Raise `ApiError` where several prompts have more tokens together than may wait in the servers' queues."""
    most = description.max_queue_tokens * num_servers
    if num_prompts > 1 and num_tokens > most:
        servers = f" x {num_servers} servers" if num_servers > 1 else ""
        raise invalid(
            f"the {num_prompts} prompts have more than {most} tokens together; allowed: max_queue_tokens "
            f"({description.max_queue_tokens}){servers}; send them in several requests",
            "prompt",
        )


def check_asked(
    num_prompt_tokens: Sequence[int],
    max_tokens: Sequence[int] | None,
    sampling: Mapping[str, Any],
    description: ModelDescription,
) -> None:
    """Raise `ApiError` where the answers would hold more than `max_response_mb` together. `num_prompt_tokens` has an
    entry for each prompt, and so has `max_tokens`, which is None where the client did not say: a single answer, of
    which no one can know how long it becomes, is counted as it comes."""
    n = sampling.get("n", 1)
    if not 1 <= n <= description.max_n:
        return  # the model says what is allowed
    num_prompts, of_prompts = len(num_prompt_tokens), sampling.get("prompt_logprobs")
    terms: list[tuple[int, str]] = []
    if is_count(of_prompts, description):
        num_tokens = sum(num_prompt_tokens)
        words = f"{num_tokens} tokens of {num_prompts} prompts x {1 + of_prompts} log-probabilities"
        terms.append((num_tokens * (1 + of_prompts) * BYTES_OF_LOGPROB, f"{words} x {BYTES_OF_LOGPROB} bytes"))
    if max_tokens is not None and num_prompts * n > 1:
        num_tokens = n * sum(max_tokens)
        words, each = f"{num_tokens} tokens of {num_prompts} prompts x {n} answers", BYTES_OF_TOKEN
        of_answers = num_logprobs(sampling)
        if is_count(of_answers, description):
            each += (1 + of_answers) * BYTES_OF_LOGPROB
            words += f" with {1 + of_answers} log-probabilities each"
        terms.append((num_tokens * each, f"{words} x {each} bytes"))
    num_bytes = sum(size for size, _ in terms)
    if num_bytes > description.max_response_mb * 1e6:
        arithmetic = " + ".join(words for _, words in terms)
        raise invalid(
            f"this request asks for answers of about {num_bytes / 1e6:.0f} MB: {arithmetic}; allowed: "
            f"{description.max_response_mb:g} MB (max_response_mb). Ask for fewer prompts, tokens, completions or "
            "log-probabilities at a time",
            "prompt_logprobs" if terms[0][0] * 2 > num_bytes and of_prompts is not None else "max_tokens",
        )


def is_count(of_likeliest: Any, description: ModelDescription) -> TypeGuard[int]:
    """Whether it is a number of log-probabilities. Of another the model says what is allowed."""
    return type(of_likeliest) is int and 0 <= of_likeliest <= description.vocab_size


def num_logprobs(sampling: Mapping[str, Any]) -> Any:
    """How many log-probabilities each token of an answer has beside its own; None for none at all."""
    if (of_likeliest := sampling.get("logprobs")) is None:
        return None
    return len(sampling.get("logprob_token_ids") or ()) or of_likeliest


def comes_in_pieces(num_prompt_tokens: int, max_tokens: int, sampling: Mapping[str, Any]) -> bool:
    """Whether the answer to one prompt may be so large, for its log-probabilities, that it must come in pieces."""
    of_prompt, of_answers = sampling.get("prompt_logprobs"), num_logprobs(sampling)
    sides = ((of_prompt, num_prompt_tokens), (of_answers, max_tokens * sampling.get("n", 1)))
    num_entries = sum(num_tokens * (1 + of_token) for of_token, num_tokens in sides if type(of_token) is int)
    return num_entries * BYTES_OF_LOGPROB > LARGEST_PIECE_BYTES


def check_sent(num_prompts: int, num_bytes: int) -> None:
    """Raise `ApiError` where parameters of `num_bytes` would be sent with too many prompts."""
    if num_prompts * num_bytes > MAX_SENT_BYTES:
        raise invalid(
            f"{num_prompts} prompts x {num_bytes} bytes of parameters are {num_prompts * num_bytes} bytes; allowed: "
            f"{MAX_SENT_BYTES}. Send fewer prompts at a time, or shorter parameters",
            "prompt",
        )


class ResponseBudget:
    """Counts what the answers to one HTTP request hold, as they come."""

    def __init__(self, max_response_mb: float) -> None:
        self._max_mb = max_response_mb
        self.num_bytes = 0

    def add(self, delta: Delta) -> None:
        """Count a delta. Raises `ApiError` once all of them are too much."""
        entries = (delta.logprobs or (), delta.prompt_logprobs or ())
        num_logprobs = sum(len(entry) for of_delta in entries for entry in of_delta if entry)
        self.num_bytes += len(delta.text) + BYTES_OF_TOKEN * len(delta.token_ids) + BYTES_OF_LOGPROB * num_logprobs
        if self.num_bytes > self._max_mb * 1e6:
            raise ApiError(
                400,
                f"the answers have grown past max_response_mb ({self._max_mb:g} MB) together; ask for fewer prompts, "
                "tokens, completions or log-probabilities",
            )
