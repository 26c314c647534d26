"""The drafter of prompt lookup: no model, no KV, no features; it reads the tokens that the worker keeps."""

from __future__ import annotations

from dflash_backend.checkpoints.files import TensorHeader
from dflash_backend.drafters.base import (
    ContextBatch,
    DraftBatch,
    Drafter,
    DrafterFactory,
    Drafts,
    DraftSampler,
    LoadOptions,
)
from dflash_backend.drafters.ngram.config import NgramSpec
from dflash_backend.models.ops import LayerOps


class NgramDrafter(Drafter[NgramSpec]):
    """Looks drafts up with `ops`. Every row that drafts gets all of its drafts, matched or not: the core plans with
    their number before the tokens are known. The target rejects those that are wrong."""

    lookahead_base = None
    autoregressive = False
    reads_next_tokens = False
    capture = ()
    placeholder_id = None

    def __init__(self, spec: NgramSpec, ops: LayerOps) -> None:
        self.spec = spec
        self.ops = ops

    @classmethod
    def check_weights(cls, spec: NgramSpec) -> dict[str, TensorHeader]:
        return {}

    @classmethod
    def load(cls, spec: NgramSpec, options: LoadOptions) -> DrafterFactory:
        return lambda target, caches, backend: cls(spec, options.ops)

    def inject(self, batch: ContextBatch) -> None:
        """Nothing: it has no context KV."""

    def propose(self, batch: DraftBatch, sampler: DraftSampler) -> Drafts:
        """`[R, k]`, the surer the more tokens matched. There are no logits to choose from, so the sampler has no part
        in it."""
        spec = self.spec
        drafts, matched = self.ops.prompt_lookup(
            batch.tokens, batch.computed, batch.req_idx, batch.num_drafts, batch.k, spec.min_ngram, spec.max_ngram
        )
        return Drafts(drafts, matched)
