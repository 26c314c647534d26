"""A second drafter, as unlike DFlash as the interface allows: k passes, no lookahead beyond k, and a context KV that
depends on the token behind each position, so that a prefix hit has the same token behind each block.

It proposes what followed the last token when it was seen before (prompt lookup). Its context KV holds, for each
position, the token that follows it.
"""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar

import torch

from dflash_backend.attention import AttentionBackend, KVLayer
from dflash_backend.checkpoints.files import TensorHeader
from dflash_backend.checkpoints.json_reader import JsonReader
from dflash_backend.checkpoints.spec import DecoderSpec, RopeSpec
from dflash_backend.drafters.base import (
    ContextBatch,
    DraftBatch,
    Drafter,
    DrafterFactory,
    Drafts,
    DraftSampler,
    LoadOptions,
)
from dflash_backend.drafters.registry import Formats, Method
from dflash_backend.drafters.spec import DraftModelSpec
from dflash_backend.models.interface import TargetModel
from tests.support.tiny_models import TARGET_LAYERS, VOCAB_SIZE

LOOKUP = "lookup"
DECODER = DecoderSpec(
    num_layers=1, hidden_size=32, intermediate_size=1, num_heads=1, num_kv_heads=1, head_dim=2, rms_norm_eps=1e-6,
    rope=RopeSpec(1e4), qk_norm=False, qkv_bias=False, output_bias=False, mlp_bias=False, sliding_windows=(None,),
    max_len=512,
)  # fmt: skip


class LookupSpec(DraftModelSpec):
    method = LOOKUP
    max_speculative_tokens = 6
    limit_in_words = "drafts at most 6 tokens"
    kind = "lookup"


def read(directory: Path, config: JsonReader, causal: bool | None) -> LookupSpec:
    return LookupSpec(
        path=directory,
        format="speculators",
        decoder=DECODER,
        num_speculative_tokens=config.integer("k"),
        target_layer_ids=(TARGET_LAYERS - 1,),
        causal=(True,),
        vocab_size=VOCAB_SIZE,
        draft_vocab_size=VOCAB_SIZE,
        target_hidden_size=DECODER.hidden_size,
        num_target_layers=TARGET_LAYERS,
        target_name=None,
        has_embedding=True,
        has_lm_head=True,
        dtype="float32",
    )


class LookupDrafter(Drafter[LookupSpec]):
    lookahead_base = 0
    autoregressive = True
    reads_next_tokens = True
    placeholder_id = 0
    capture = (TARGET_LAYERS - 1,)
    contexts: ClassVar[list[list[int]]] = []
    """The tokens behind the first, of each request at each pass, as its context KV has them."""

    def __init__(self, target: TargetModel, caches: list[KVLayer], backend: AttentionBackend) -> None:
        self.following = caches[0].slots[:, 0, 0, 0]
        self.block_size = caches[0].data.shape[1]

    @classmethod
    def check_weights(cls, spec: LookupSpec) -> dict[str, TensorHeader]:
        return {}

    @classmethod
    def load(cls, spec: LookupSpec, options: LoadOptions) -> DrafterFactory:
        return cls

    def inject(self, batch: ContextBatch) -> None:
        assert batch.next_token_ids is not None
        written = batch.slots >= 0
        self.following[batch.slots[written]] = batch.next_token_ids[written].to(self.following.dtype)

    def propose(self, batch: DraftBatch, sampler: DraftSampler) -> Drafts:
        logits, first, queries = [], 0, batch.queries
        assert queries is not None
        for row, num_queries in enumerate(queries.layout.query_lens.tolist()):
            mine = slice(first, first + num_queries)
            first += num_queries
            token, (anchor, *_) = int(queries.token_ids[mine][0]), queries.positions[mine].tolist()
            for index, slot in enumerate(queries.slots[mine].tolist()):
                if slot >= 0:
                    token = self._next(self._context(queries.layout.block_tables[row], anchor + index), token)
                    self.following[slot] = token
                logits.append(torch.nn.functional.one_hot(torch.tensor(token), VOCAB_SIZE) * 20.0)
        return sampler.choose(torch.stack(logits), queries.draft_positions())

    def _next(self, context: list[int], token: int) -> int:
        assert context[-1] == token
        self.contexts.append(context)
        seen = [i for i, before in enumerate(context[:-1]) if before == token]
        return context[seen[-1] + 1] if seen else (token + 1) % VOCAB_SIZE

    def _context(self, block_table: torch.Tensor, length: int) -> list[int]:
        """The tokens at positions 1 to `length`."""
        positions = torch.arange(length)
        blocks = block_table[positions // self.block_size]
        return self.following[blocks * self.block_size + positions % self.block_size].long().tolist()


METHOD = Method(lambda: LookupDrafter, Formats(("LookupDraftModel",), read, read))
