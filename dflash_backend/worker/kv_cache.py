"""The paged KV of target and drafter, and how large it can be."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass

import numpy as np
import torch

from dflash_backend.attention import KVLayer
from dflash_backend.checkpoints.spec import DecoderSpec

CPU_ALIGNMENT = 64  # bytes, that of torch's own tensors


@dataclass(frozen=True)
class PagedKVCache:
    """KV layers of the target and of the drafter over the same block ids (TOGETHER)."""

    target: list[KVLayer]
    draft: list[KVLayer]
    block_size: int

    @classmethod
    def allocate(
        cls,
        target: DecoderSpec,
        draft: DecoderSpec | None,
        num_blocks: int,
        block_size: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> PagedKVCache:
        """Zeroed tensors: an unwritten position must hold finite numbers, since padding is read and masked. A model's
        layers of one shape are one tensor: the drafter's context goes to all of its layers in one launch."""

        def layers(spec: DecoderSpec) -> list[KVLayer]:
            counts = Counter(cache.token_shape for cache in spec.caches)
            shapes = {shape: (count, num_blocks, block_size, *shape) for shape, count in counts.items()}
            tensors = {shape: iter(_zeros(whole, dtype, device)) for shape, whole in shapes.items()}
            return [KVLayer(next(tensors[cache.token_shape])) for cache in spec.caches]

        return cls(layers(target), layers(draft) if draft is not None else [], block_size)

    def claim(self) -> None:
        """Have the system give all the memory now, not page by page as it is first written."""
        for layer in self.target + self.draft:
            if layer.data.device.type == "cpu":
                layer.data.zero_()


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Zeros of `shape`. On a CPU the system gives their memory page by page when it is first written, so that a large
    pool takes no time at the start, and no memory until it is used."""
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    size = math.prod(shape) * dtype.itemsize
    memory = np.zeros(size + CPU_ALIGNMENT, np.uint8)  # torch.zeros would write them
    start = -memory.ctypes.data % CPU_ALIGNMENT
    return torch.from_numpy(memory[start : start + size]).view(dtype).view(shape)


def bytes_per_block(target: DecoderSpec, draft: DecoderSpec | None, block_size: int, dtype: torch.dtype) -> int:
    """Bytes of one block over all layers of both models."""
    specs = [target] + ([draft] if draft is not None else [])
    per_token = sum(spec.kv_elements_per_token for spec in specs)
    return per_token * block_size * dtype.itemsize
