"""The paged KV of target and drafter, how large it can be, and a guard that checks what is written to it."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from dflash_backend.attention import FP8, KVLayer
from dflash_backend.checkpoints.spec import AttentionCache, DecoderSpec
from dflash_backend.core.plan import ScheduledRequest, SchedulerOutput
from dflash_backend.drafters.base import DraftQueries
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


class KVWriteError(RuntimeError):
    """A KV write would have gone to a block that its request may not write."""


class WriteGuard:
    """`kv_write_guard`: checks the slots that each row of a step, or of a part of one, is about to write against the
    blocks that the plan lets it write (OWN). Slow: the host waits for the device in every phase."""

    def __init__(self, plan: SchedulerOutput, rows: Sequence[ScheduledRequest], block_size: int) -> None:
        """`plan.writable_block_ids` must be there."""
        assert plan.writable_block_ids is not None
        self._allowed = [plan.writable_block_ids.get(row.request_id, frozenset()) for row in rows]
        of_windows = plan.writable_window_block_ids or {}
        self._allowed_of_windows = [of_windows.get(row.request_id, frozenset()) for row in rows]
        self._step_id = plan.step_id
        self._block_size = block_size
        self._request_ids = [row.request_id for row in rows]
        # A row in flight may belong to a request that has ended: it may write less than its layout says.
        self._certain = np.array([row.num_unverified_drafts == 0 for row in rows])

    def check(
        self,
        phase: str,
        row_of_slot: torch.Tensor,
        slots: torch.Tensor,
        expected: torch.Tensor | None = None,
        allowed: Sequence[frozenset[int]] | None = None,
    ) -> None:
        """Raise `KVWriteError` for a slot that its row may not write, for one that is written twice, and where a row
        has no block for what it must write (RESERVE).

        row_of_slot: int32 `[n]`, -1 for padding. slots: int64 `[n]`, -1 for no write. expected: int32 `[R]`, how many
        slots each row should write, where that is certain. allowed: the blocks that each row may write; None: those of
        all layers but those with a window that have their own.
        """
        allowed = self._allowed if allowed is None else allowed
        rows, where = row_of_slot.cpu().numpy(), slots.cpu().numpy()
        written = where >= 0
        rows, where = rows[written], where[written]
        if (rows < 0).any():
            self._fail(phase, f"a padding token would write slot {int(where[rows < 0][0])}")
        count = len(self._request_ids)
        if expected is not None:
            lacking = np.bincount(rows, minlength=count)[:count] < expected.cpu().numpy()[:count]
            for row in (lacking & self._certain).nonzero()[0].tolist():
                self._fail(
                    phase,
                    f"request {self._request_ids[row]} has no block for some of the positions that it must write",
                )
        blocks = where // self._block_size
        for row, request_id in enumerate(self._request_ids):
            not_its_own = set(blocks[rows == row].tolist()) - allowed[row]
            if not_its_own:
                self._fail(
                    phase,
                    f"request {request_id} would write block {min(not_its_own)}, which is shared, published or not its "
                    f"own; its own are {sorted(allowed[row])}",
                )
        if len(np.unique(where)) != len(where):
            self._fail(phase, "a slot would be written twice")

    def check_windows(self, row_of_slot: torch.Tensor, slots: torch.Tensor) -> None:
        """`check` for layers with a window that have block ids of their own."""
        self.check("verify, layers with a window", row_of_slot, slots, allowed=self._allowed_of_windows)

    def check_draft(self, draft: DraftQueries, num_next_draft: torch.Tensor, lookahead_base: int) -> None:
        """`check` for the draft phase; num_next_draft: int32 `[R]`, the drafts of each row, for which the drafter
        writes `num_next_draft + lookahead_base` positions."""
        queries = torch.where(num_next_draft > 0, num_next_draft + draft.queries_beside_drafts, 0)
        expected = torch.where(num_next_draft > 0, num_next_draft + lookahead_base, 0)
        rows = torch.arange(len(num_next_draft), dtype=torch.int32, device=num_next_draft.device)
        per_row = queries if draft.layout.device is None else torch.full_like(queries, draft.query_len)
        self.check("draft", rows.repeat_interleave(per_row), draft.slots, expected)

    def _fail(self, phase: str, what: str) -> None:
        raise KVWriteError(f"kv_write_guard: step {self._step_id}, phase {phase}: {what}")
