"""Which n-grams prompt lookup matches, from the settings."""

from __future__ import annotations

from dataclasses import dataclass

from dflash_backend.checkpoints.describe import Facts
from dflash_backend.config import NGRAM, ConfigError, EngineConfig
from dflash_backend.drafters.spec import DraftSpec

DEFAULT_MAX = 5
DEFAULT_MIN = 2
DEFAULT_MIN_BESIDE, DEFAULT_MAX_BESIDE = 2, 16
"""Beside a drafter's model. docs/dflash.md has the measurement."""
DEFAULT_SPECULATIVE_TOKENS = 5
"""k: docs/dflash.md has the measurement."""


@dataclass(frozen=True, kw_only=True)
class NgramSpec(DraftSpec):
    """Prompt lookup of n-grams of `min_ngram` to `max_ngram` tokens."""

    method = NGRAM

    min_ngram: int
    max_ngram: int

    def summary(self, k: int) -> str:
        return f"prompt lookup of {self.lengths} (k = {k})"

    def facts(self) -> Facts:
        return [
            ("method", f"{NGRAM}: what followed the last tokens where they occurred before, in prompt or output"),
            ("n-grams", f"{self.lengths}, the longest that matches"),
            ("speculative tokens", f"{self.num_speculative_tokens}, unless num_speculative_tokens says otherwise"),
            ("weights, KV", "none"),
        ]

    @property
    def lengths(self) -> str:
        """Which n-grams, in words."""
        if self.min_ngram == self.max_ngram:
            return f"n-grams of {self.max_ngram} tokens"
        return f"n-grams of {self.min_ngram} to {self.max_ngram} tokens"


def read_ngram(config: EngineConfig) -> NgramSpec:
    """What the settings ask for, with `draft_model` n-gram. Raises `ConfigError` where they contradict each other."""
    if config.draft_revision:
        raise ConfigError(
            f"setting 'draft_revision' is '{config.draft_revision}' and draft_model is {NGRAM}, which has no "
            f"checkpoint; a directory of that name is ./{NGRAM}"
        )
    return _spec_of(config, DEFAULT_MIN, DEFAULT_MAX)


def read_lookup_beside(config: EngineConfig) -> NgramSpec | None:
    """What is looked up beside a drafter's model; None: nothing is. Raises `ConfigError` as `read_ngram`."""
    if config.prompt_lookup_min is None and config.prompt_lookup_max is None:
        return None
    return _spec_of(config, DEFAULT_MIN_BESIDE, DEFAULT_MAX_BESIDE)


def _spec_of(config: EngineConfig, default_min: int, default_max: int) -> NgramSpec:
    low, high = config.prompt_lookup_min, config.prompt_lookup_max
    if low is not None and high is not None and low > high:
        raise ConfigError(
            f"setting 'prompt_lookup_min' is {low} and 'prompt_lookup_max' is {high}; the shortest n-gram must not be "
            "longer than the longest"
        )
    most = high or max(default_max, low or 0)
    return NgramSpec(
        num_speculative_tokens=DEFAULT_SPECULATIVE_TOKENS, min_ngram=low or min(default_min, most), max_ngram=most
    )


def refuse_lookup(config: EngineConfig) -> None:
    """Raise `ConfigError` where a setting of prompt lookup is set and nothing is drafted."""
    for name in ("prompt_lookup_max", "prompt_lookup_min"):
        value = getattr(config, name)
        if value is not None:
            raise ConfigError(
                f"setting '{name}' is {value}, and no drafter drafts; set draft_model={NGRAM}, which needs none, or a "
                f"drafter, or leave {name} at auto"
            )
