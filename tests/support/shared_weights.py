"""The demo pair's weights, and tables of rotary embeddings, are made once in a process: most engines of the tests are
the demo pair's, and that takes most of the time of building one. Nothing changes either once it is made."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from torch.utils._python_dispatch import _get_current_dispatch_mode

from dflash_backend.checkpoints.spec import DecoderSpec
from dflash_backend.config import asset_path
from dflash_backend.drafters import base as drafters
from dflash_backend.models import decoder
from dflash_backend.models.ops import select_ops
from dflash_backend.models.rope import Rotary

TARGET, DRAFT = asset_path("demo", "pair", "target"), asset_path("demo", "pair", "draft")


class ReadOnce:
    """What a function that reads a checkpoint returned for each key, and the progress that it reported."""

    def __init__(self) -> None:
        self._read: dict[object, tuple[Any, list[tuple[str, float]]]] = {}

    def read(self, key: object, load: Callable[[Any], Any], progress: Any) -> Any:
        """`load(progress)`, at the first time with a key; then what it returned, after the same progress."""
        if key not in self._read:
            reported: list[tuple[str, float]] = []

            def note(message: str, done: float) -> None:
                reported.append((message, done))
                if progress is not None:
                    progress(message, done)

            # Tests with and without `torch.inference_mode` share them.
            with torch.inference_mode(False):
                self._read[key] = load(note), reported
        elif progress is not None:
            for each in self._read[key][1]:
                progress(*each)
        return self._read[key][0]


def install() -> None:
    """Share them in this process."""
    load_target_weights, load_weights, once = decoder.load_target_weights, drafters.load_weights, ReadOnce()

    def target_weights(
        spec: Any, dtype: torch.dtype, device: torch.device, progress: Any, ops: Any, **options: Any
    ) -> Any:
        def load(progress: Any) -> Any:
            return load_target_weights(spec, dtype, device, progress, ops, **options)

        if not is_shared(spec.path, TARGET, device) or options != {"fp8": False}:
            return load(progress)
        return once.read((TARGET, dtype, (ops or select_ops(device)).keeps_quantised), load, progress)

    def draft_weights(
        directory: Path, read: Any, dtype: torch.dtype, device: torch.device, progress: Any = None, **options: Any
    ) -> Any:
        def load(progress: Any) -> Any:
            return load_weights(directory, read, dtype, device, progress=progress, **options)

        if not is_shared(directory, DRAFT, device):
            return load(progress)
        return once.read((DRAFT, dtype, options["keep_quantised"]), load, progress)

    decoder.load_target_weights, drafters.load_weights = target_weights, draft_weights  # type: ignore[assignment]
    decoder.Rotary = drafters.Rotary = rotary  # type: ignore[assignment, misc]


def rotary(spec: DecoderSpec, max_positions: int, device: torch.device, dtype: torch.dtype) -> Rotary:
    """`Rotary`, whose tables are as large as the demo pair's weights, of which the last few are kept."""
    if device.type != "cpu" or _get_current_dispatch_mode() is not None:
        return Rotary(spec, max_positions, device, dtype)
    return _rotary(spec, max_positions, dtype)


@lru_cache(maxsize=16)
def _rotary(spec: DecoderSpec, max_positions: int, dtype: torch.dtype) -> Rotary:
    with torch.inference_mode(False):
        return Rotary(spec, max_positions, torch.device("cpu"), dtype)


def is_shared(directory: Path, demo: Path, device: torch.device) -> bool:
    """Whether a checkpoint is the demo pair's, on a device that is there."""
    return directory == demo and device.type == "cpu" and _get_current_dispatch_mode() is None
