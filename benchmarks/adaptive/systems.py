"""The engines that `python -m benchmarks.adaptive` compares."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

from benchmarks.adaptive.cells import Cell, ClosedLoop, prompts_of
from benchmarks.worse_drafters import random_drafter, shifted_drafter
from dflash_backend import LLM
from dflash_backend.checkpoints.spec import TargetSpec
from dflash_backend.config import EngineConfig, asset_path
from dflash_backend.drafters.resolve import ModelPair
from dflash_backend.engine import build
from dflash_backend.heap import freeze_heap
from dflash_backend.models import TargetModel

NONE, INJECT, FIXED, ADAPTIVE, NGRAM = "none", "none, injecting", "fixed k", "adaptive", "n-gram"
SETTINGS: dict[str, Any] = {"max_num_seqs": 64, "kv_cache_gb": 0.5}


def engine_of(**settings: Any) -> LLM:
    """An engine that has all the memory of its KV cache, as a server's: pages that the system gives while a slice runs
    would count against it, seconds for a pool on a machine whose own memory was never touched."""
    llm = LLM(**settings, **SETTINGS)
    llm.engine.runner.model.kv.claim()
    return llm


@contextmanager
def models_loaded_once() -> Iterator[None]:
    """Engines that are made meanwhile have each model in memory once: where weights lie changes the time of their
    products by some percent, and engines would differ by it."""
    load_models, load_target = build._load_models, build.load_target
    targets: dict[Path, TargetModel] = {}
    models: dict[tuple[Path, Path | None], build.LoadedModels] = {}

    def target_once(spec: TargetSpec, *args: Any, **options: Any) -> TargetModel:
        if spec.path not in targets:
            targets[spec.path] = load_target(spec, *args, **options)
        return targets[spec.path]

    def models_once(config: EngineConfig, pair: ModelPair, *args: Any) -> build.LoadedModels:
        drafter = pair.draft_model
        key = pair.target.path, None if drafter is None else drafter.path
        if drafter is None or key not in models:
            models[key] = load_models(config, pair, *args)
        return models[key]

    with (
        mock.patch.object(build, "load_target", target_once),
        mock.patch.object(build, "_load_models", models_once),
    ):
        yield


class Systems:
    """The engines, made as they are needed. One drafter's are kept at a time."""

    def __init__(self, folder: Path) -> None:
        self._drafts = {
            "demo": str(asset_path("demo", "pair", "draft")),
            "shifted": str(shifted_drafter(-1, folder)),
            "random": str(random_drafter(folder)),
        }
        self._plain = {NONE: engine_of(draft=""), NGRAM: engine_of(draft="ngram")}
        self._name = ""
        self._drafting: dict[str, LLM] = {}

    def loops(self, cell: Cell) -> dict[str, ClosedLoop]:
        """A closed loop for each system."""
        if cell.drafter != self._name:
            self._name, draft = cell.drafter, self._drafts[cell.drafter]
            gc.unfreeze()
            self._drafting = {}
            names = (FIXED, ADAPTIVE, INJECT) if cell.drafter == "random" else (FIXED, ADAPTIVE)
            self._drafting = {name: engine_of(draft=draft, adaptive_speculation=name == ADAPTIVE) for name in names}
            freeze_heap()  # as a server does: a look at all of it takes a tenth of a second, in one slice or another
        # N-grams do not depend on the drafter: they are measured once.
        plain = self._plain if cell.drafter == "demo" else {NONE: self._plain[NONE]}
        llms = plain | self._drafting
        prompts = prompts_of(cell, llms[NONE])
        return {
            name: ClosedLoop(llm, prompts, cell.streams, 0 if name == INJECT else None) for name, llm in llms.items()
        }
