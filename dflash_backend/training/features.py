"""The target as a teacher: what a drafter reads of it, computed by the code that serves it."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from dflash_backend.attention import AttentionBackend, AttentionBatch
from dflash_backend.engine.llm import LLM
from dflash_backend.models.interface import PagedContext, TargetModel
from dflash_backend.models.recurrent_state import StateLayout, StatePool, StateRows
from dflash_backend.training.network import Tables
from dflash_backend.worker.batch import spans
from dflash_backend.worker.kv_cache import PagedKVCache


class Teacher:
    """A target that an engine has loaded, over KV of its own."""

    def __init__(self, llm: LLM) -> None:
        model = llm.engine.runner.model
        self.target: TargetModel = model.target
        self.device, self.dtype = model.device, model.dtype
        self._backend: AttentionBackend = model.backend
        self._block_size = model.kv.block_size
        self._kv: PagedKVCache | None = None

    @torch.no_grad()
    def features(self, rows: Sequence[Sequence[int]], capture: tuple[int, ...]) -> Tensor:
        """The outputs of the layers `capture` at every token of `rows`, which are causal and know nothing of one
        another: `[rows, longest row, layers * hidden]` in the target's dtype, 0 behind a row's end. The number of
        layers means the final hidden state, after the norm."""
        lens = np.array([len(row) for row in rows], dtype=np.int64)
        width = -(-int(lens.max()) // self._block_size)
        tables = np.arange(len(rows) * width, dtype=np.int64).reshape(len(rows), width)
        row, position = spans(np.zeros(len(rows), dtype=np.int64), lens)
        slots = tables[row, position // self._block_size] * self._block_size + position % self._block_size
        kv = self._pages(tables.size)
        context = PagedContext(
            AttentionBatch(lens, lens, torch.from_numpy(tables).to(self.device)),
            torch.from_numpy(position).to(self.device),
            torch.from_numpy(slots).to(self.device),
            self._backend,
            self.dtype,
            states=self._states(lens),
        )
        tokens = torch.tensor([token for each in rows for token in each], device=self.device)
        found = self.target.forward(tokens, context, kv.target, capture)
        assert found.features is not None

        out = torch.zeros(len(rows), int(lens.max()), found.features.shape[-1], dtype=self.dtype, device=self.device)
        out[torch.from_numpy(row), torch.from_numpy(position)] = found.features
        return out

    def _pages(self, num_blocks: int) -> PagedKVCache:
        if self._kv is None or self._kv.target[0].data.shape[0] < num_blocks:
            decoder = self.target.spec.decoder
            self._kv = PagedKVCache.allocate(decoder, None, num_blocks, self._block_size, self.dtype, self.device)
        return self._kv

    def _states(self, lens: np.ndarray) -> StateRows | None:
        """Of rows that begin, where layers have states."""
        decoder = self.target.spec.decoder
        if decoder.delta_net is None:
            return None
        pool = StatePool.allocate(decoder, len(lens), self.dtype, self.device)
        numbers = (np.arange(len(lens)), np.zeros(len(lens)), np.cumsum(lens) - lens, lens)
        index, starts, first, own = (torch.from_numpy(each.astype(np.int32)).to(self.device) for each in numbers)
        return StateRows.of(pool, StateLayout(index, starts, first, own, lens, int(lens.sum())))

    @torch.no_grad()
    def tables(self, dtype: torch.dtype, scaled: bool, draft_tokens: Tensor | None) -> Tables:
        """Embedding and LM head in `dtype`. scaled: as the target's first layer reads an embedding. draft_tokens: int64
        `[n]`, ascending, the tokens that a drafter can propose; None for all."""
        vocab = self.target.spec.vocab_size
        embedding = self.target.embed(torch.arange(vocab, device=self.device), scaled).to(dtype, copy=True)
        gemma4 = self.target.spec.decoder.gemma4
        softcap = None if gemma4 is None else gemma4.softcap
        if draft_tokens is None:
            return Tables(embedding, self.target.lm_head.weight.to(dtype, copy=True), softcap=softcap)
        draft_ids = torch.zeros(vocab, dtype=torch.int64, device=self.device)
        draft_tokens = draft_tokens.to(self.device)
        draft_ids[draft_tokens] = torch.arange(len(draft_tokens), device=self.device)
        head = self.target.lm_head.rows(draft_tokens).weight.to(dtype, copy=True)
        return Tables(embedding, head, draft_ids, softcap=softcap)
