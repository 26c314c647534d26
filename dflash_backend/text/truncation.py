"""Prompts that are made shorter: how many of their tokens are kept, and at which end."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TypeVar

from dflash_backend.text.parameter_values import read_int, text_that
from dflash_backend.text.sampling_params import Parameter

# The side at which tokens are left out.
SIDES = ("left", "right")
COUNT, SIDE = "truncate_prompt_tokens", "truncation_side"

# A list of token ids, or an array.
Ids = TypeVar("Ids", bound=Any)


@dataclass(frozen=True, slots=True)
class Truncation:
    """Of a prompt, at most `num_tokens`: the last ones, or the first. A text may still be no longer than any prompt."""

    num_tokens: int
    keeps_end: bool = True

    @classmethod
    def that_fits(cls, count: int, side: str | None, max_model_len: int, max_tokens: int | None) -> Truncation:
        """For a count that `is_allowed`; of -1 as many as fit beside `max_tokens` of the answer, or beside one."""
        if count == -1:
            count = max(1, max_model_len - max(1, max_tokens or 1))
        return cls(count, side != "right")

    def of(self, token_ids: Ids) -> Ids:
        """What is kept of a prompt."""
        return token_ids[-self.num_tokens :] if self.keeps_end else token_ids[: self.num_tokens]


def is_allowed(count: int, max_model_len: int) -> bool:
    """Whether a prompt may be made as short as that."""
    return count == -1 or 1 <= count < max_model_len


def allowed_counts(max_model_len: int) -> str:
    """Those that `is_allowed`, in words."""
    return f"an integer from 1 to {max_model_len - 1}, or -1 for as many as fit"


def take_truncation(values: dict[str, Any], max_model_len: int) -> Truncation | None:
    """Take it out of a request's parameters; None where the prompt stays as it is. Raises `ParameterError`."""

    def read_count(value: Any) -> int | None:
        count = read_int(value)
        return count if count is not None and is_allowed(count, max_model_len) else None

    count, side = values.pop(COUNT, None), values.pop(SIDE, None)
    if side is not None:
        side = Parameter(SIDE, text_that(SIDES.__contains__), "left, which keeps the end, or right").parse(side)
    if count is None:
        return None
    count = Parameter(COUNT, read_count, allowed_counts(max_model_len)).parse(count)
    return Truncation.that_fits(count, side, max_model_len, read_int(values.get("max_tokens")))
