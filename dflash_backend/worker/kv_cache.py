"""The paged KV of target and drafter, and how large it can be."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch

from dflash_backend.attention import FP8, KVLayer
from dflash_backend.checkpoints.spec import AttentionCache, DecoderSpec
from dflash_kernels.huge_pages import zeroed_memory

SCALE_DTYPE = torch.float32


@dataclass(frozen=True)
class PagedKVCache:
    """KV layers of the target and of the drafter over the same block ids (TOGETHER), but for the target's layers with a
    window where `num_window_blocks` says that they have block ids of their own."""

    target: list[KVLayer]
    draft: list[KVLayer]
    block_size: int
    num_window_blocks: int = 0
    records: tuple[tuple[torch.Tensor, ...], ...] = ()
    """The same memory as `[layers, blocks, ...]`, of all layers, or of those with block ids of their own apart."""

    @classmethod
    def allocate(
        cls,
        target: DecoderSpec,
        draft: DecoderSpec | None,
        num_blocks: int,
        block_size: int,
        dtype: torch.dtype,
        device: torch.device,
        kv_dtype: torch.dtype | None = None,
        num_window_blocks: int = 0,
    ) -> PagedKVCache:
        """Zeroed tensors: an unwritten position must hold finite numbers, since padding is read and masked. A model's
        layers of one shape are one tensor: the drafter's context goes to all of its layers in one launch. kv_dtype: of
        the target's KV, `dtype` by default; FP8 is uint8 and scales. The drafter's is in `dtype`."""

        def layers(spec: DecoderSpec, dtype: torch.dtype, num_of_windows: int = 0) -> list[KVLayer]:
            def size(cache: AttentionCache) -> tuple[bool, tuple[int, ...]]:
                own = num_of_windows if cache.sliding_window is not None else 0
                return own > 0, (own or num_blocks, block_size, *cache.token_shape)

            counts = Counter(map(size, spec.caches))
            tensors: dict[tuple[bool, tuple[int, ...]], Iterator[KVLayer]] = {}
            for (own, shape), count in counts.items():
                whole = (count, *shape)
                if dtype == FP8:
                    codes, scales = _zeros(whole, torch.uint8, device), _zeros(whole[:-1], SCALE_DTYPE, device)
                    tensors[own, shape] = iter([KVLayer(*layer) for layer in zip(codes, scales, strict=True)])
                    records[own].extend((codes, scales))
                else:
                    data = _zeros(whole, dtype, device)
                    tensors[own, shape] = iter([KVLayer(each) for each in data])
                    records[own].append(data)
            return [next(tensors[size(cache)]) for cache in spec.caches]

        records: tuple[list[torch.Tensor], list[torch.Tensor]] = [], []
        of_target = layers(target, kv_dtype or dtype, num_window_blocks)
        of_draft = layers(draft, dtype) if draft is not None else []
        groups = records if num_window_blocks else records[:1]
        return cls(of_target, of_draft, block_size, num_window_blocks, tuple(map(tuple, groups)))

    def claim(self) -> None:
        """Have the system give all the memory now, not page by page as it is first written."""
        for layer in self.target + self.draft:
            for tensor in (layer.data, layer.scales):
                if tensor is not None and tensor.device.type == "cpu":
                    tensor.zero_()


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Zeros of `shape`. On a CPU the system gives their memory when it is first written, so that a large pool takes no
    time at the start, and no memory until it is used."""
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    size = math.prod(shape) * dtype.itemsize
    return torch.from_numpy(zeroed_memory(size)).view(dtype).view(shape)  # torch.zeros would write them


def bytes_per_token(caches: Iterable[AttentionCache], dtype: torch.dtype) -> int:
    """Bytes of one token's KV in these of a model's layers; of FP8 with its scales."""
    shapes = [cache.token_shape for cache in caches]
    size = sum(map(math.prod, shapes)) * dtype.itemsize
    if dtype == FP8:
        size += sum(math.prod(shape[:-1]) for shape in shapes) * SCALE_DTYPE.itemsize
    return size


def bytes_per_block(
    target: DecoderSpec,
    draft: DecoderSpec | None,
    block_size: int,
    dtype: torch.dtype,
    kv_dtype: torch.dtype | None = None,
) -> int:
    """Bytes of one block over all layers of both models; kv_dtype: as of `PagedKVCache.allocate`."""
    per_token = bytes_per_token(target.caches, kv_dtype or dtype)
    return (per_token + (bytes_per_token(draft.caches, dtype) if draft is not None else 0)) * block_size


def window_bytes_per_block(target: DecoderSpec, block_size: int, kv_dtype: torch.dtype) -> int:
    """Bytes of one block over the target's layers that have a window; kv_dtype: of the target's KV."""
    return bytes_per_token([each for each in target.caches if each.sliding_window is not None], kv_dtype) * block_size
