"""Loads another drafter beside the one that drafts, for `core.drafter_swap`."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from dflash_backend.config import ConfigError, EngineConfig
from dflash_backend.core.drafter_swap import DrafterSwap, SwapEndsEngine
from dflash_backend.drafters.base import Drafter, DrafterFactory, LoadOptions, draft_patterns
from dflash_backend.drafters.exchange import paired_tensors
from dflash_backend.drafters.pairing import check_pair
from dflash_backend.drafters.registry import drafter_class, read_draft
from dflash_backend.drafters.resolve import ModelPair, find_drafter
from dflash_backend.drafters.spec import DraftModelSpec
from dflash_backend.engine.sizing import at_length
from dflash_backend.error_text import first_line
from dflash_backend.messages import SwapDrafter
from dflash_backend.models.peers import RankLostError
from dflash_backend.worker import ModelRunner


@dataclass
class DrafterLoader:
    """pair: what the engine was built with. options: how its drafter was loaded, for `max_model_len` positions."""

    config: EngineConfig
    pair: ModelPair
    options: LoadOptions
    max_model_len: int
    runner: ModelRunner

    def __post_init__(self) -> None:
        self.drafting = self.pair.drafting
        """What drafts now, in words."""

    def load(self, wanted: SwapDrafter) -> DrafterSwap:
        """The drafter that is asked for, ready to take the other's place. Any thread may call it. Raises `ConfigError`
        or `CheckpointError` with a sentence: it is damaged, is not for this target, or needs an engine of its own."""
        try:
            make, words = self._load(wanted)
        except torch.OutOfMemoryError as error:
            raise ConfigError(f"no memory for a second drafter beside the first ({first_line(error)})") from None
        spare: list[tuple[Callable[[], Drafter[Any]], str]] = [(make, words)]

        def exchange() -> str:
            make_other, drafting = spare[0]
            try:
                before = self.runner.use_drafter(make_other())
            except RankLostError as error:
                raise SwapEndsEngine(str(error)) from error
            spare[0] = (lambda: before), self.drafting
            self.drafting = drafting
            return drafting

        return DrafterSwap(wanted, exchange)

    def _load(self, wanted: SwapDrafter) -> tuple[Callable[[], Drafter[Any]], str]:
        """What gives the drafter to the thread that steps, and what it is in words."""
        present = self.pair.draft_model
        assert present is not None, "there is no loader without a drafter that is a model"
        assert self.runner.model.drafter is not None
        if self.runner.mover is not None:
            raise ConfigError(
                "KV tiers and other servers (kv_host_gb, kv_disk_path, kv_role) hold the context KV of the present "
                "drafter; restart the server with the new one as draft_model"
            )
        directory = find_drafter(wanted.draft_model, "draft_model", wanted.draft_revision)
        spec = read_draft(directory, self.config.causal).for_target(self.pair.target)
        check_pair(self.pair.target, spec)
        if (difference := self._difference(present, spec)) is not None:
            raise ConfigError(f"the drafter in {directory} {difference}; restart the server with it as draft_model")
        at_its_length = at_length(dataclasses.replace(self.pair, draft=spec), self.max_model_len).draft_model
        make = drafter_class(spec).load(at_its_length, self.options)
        words = dataclasses.replace(self.pair, draft=spec).drafting
        if self.config.tensor_parallel_size > 1:
            # It may take rows of a head that ranks share, and only the thread that steps may ask the ranks.
            return (lambda: self._made(make, directory)), words
        drafter = self._made(make, directory)
        return (lambda: drafter), words

    def _made(self, make: DrafterFactory, directory: Path) -> Drafter[Any]:
        """The drafter over the engine's KV. Raises `ConfigError` where captured graphs cannot run it."""
        model = self.runner.model
        drafter = make(model.target, model.kv.draft, model.draft_backend or model.backend)
        if self.runner.captured:
            try:
                paired_tensors(model.drafter, drafter)
            except ValueError as error:
                raise ConfigError(
                    f"the drafter in {directory} differs from the one that CUDA graphs were captured with ({error}); "
                    "restart the server with it as draft_model"
                ) from None
        return drafter

    def _difference(self, present: DraftModelSpec, spec: DraftModelSpec) -> str | None:
        """What of another drafter this engine is not made for: its plans, blocks and KV follow the present one."""
        mine, theirs = drafter_class(present), drafter_class(spec)
        for name, words in (
            ("lookahead_base", "reserves other positions"),
            ("autoregressive", "drafts in another way"),
            ("reads_next_tokens", "reads other tokens"),
        ):
            if getattr(mine, name) != getattr(theirs, name):
                return f"{words} than the present one"
        if self.config.tensor_parallel_size > 1 and present.target_layer_ids != spec.target_layer_ids:
            return (
                f"reads the layers {list(spec.target_layer_ids)}, and the ranks give {list(present.target_layer_ids)}"
            )
        k = self.pair.num_speculative_tokens
        if spec.max_speculative_tokens < k:
            return f"proposes at most {spec.max_speculative_tokens} tokens, and num_speculative_tokens is {k}"
        forms = [(each.decoder.caches, draft_patterns(each)) for each in (present, spec)]
        if forms[0] != forms[1]:
            return f"has {_kv_form(spec)}, and the KV cache is made for {_kv_form(present)}"
        if spec.decoder.max_len < min(present.decoder.max_len, self.options.max_positions):
            return f"runs {spec.decoder.max_len} positions, and the present one {present.decoder.max_len}"
        return None


def _kv_form(spec: DraftModelSpec) -> str:
    decoder, patterns = spec.decoder, draft_patterns(spec)
    windows = dict.fromkeys(str(pattern.sliding_window or "all") for pattern in patterns)
    kinds = sorted({"causal" if pattern.causal else "not causal" for pattern in patterns})
    return (
        f"{decoder.num_layers} layers with {decoder.num_kv_heads} KV heads of {decoder.head_dim} and "
        f"{' and '.join(kinds)} attention to {', '.join(windows)} positions"
    )
