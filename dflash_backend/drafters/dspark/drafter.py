"""The DSpark drafter: DFlash's forward, then a walk along each block that adds to each draft's logits what follows from
the draft before it. Its model has two heads more, which read the outputs of DFlash's stack.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Self

import torch
import torch.nn.functional as F

from dflash_backend.attention import AttentionBackend, KVLayer
from dflash_backend.checkpoints.weights import WeightSource
from dflash_backend.drafters.base import DraftQueries, Drafts, DraftSampler
from dflash_backend.drafters.dflash.config import DFlashSpec
from dflash_backend.drafters.dflash.drafter import DFlashDrafter, DFlashModel, DFlashWeights
from dflash_backend.drafters.dspark.config import GATED, RNN, VANILLA, DSparkSpec
from dflash_backend.models.interface import TargetModel
from dflash_backend.models.linear import Linear
from dflash_backend.models.ops import LayerOps
from dflash_kernels.log_odds import MAX_LOG_ODDS


@dataclass(frozen=True)
class MarkovHead:
    """What a draft's logits owe to the token before it.

    table: `[vocab_size, rank]`, embeddings of the target's tokens. bias: rank -> draft_vocab_size, from a latent vector
    to what is added to the logits. hidden: what a gated or recurrent head makes of the output at the draft; weight:
    what it multiplies by the rest, as `dflash_kernels.markov_step` has it; both None for a vanilla head.
    """

    table: torch.Tensor
    bias: Linear
    hidden: Linear | None
    weight: torch.Tensor | None
    is_recurrent: bool

    @classmethod
    def read(cls, source: WeightSource, spec: DSparkSpec) -> MarkovHead:
        """The head of a checkpoint that has one."""
        markov, size, prefix = spec.markov, spec.decoder.hidden_size, "markov_head."
        assert markov is not None
        rank = markov.rank
        table = source.tensor(f"{prefix}markov_w1.weight", spec.vocab_size, rank)
        bias = Linear.read(source, prefix, {"markov_w2": spec.draft_vocab_size}, rank)
        if markov.kind == VANILLA:
            return cls(table, bias, None, None, False)
        if markov.kind == GATED:
            joint = Linear.read(source, prefix, {"gate_proj": rank}, size + rank, bias=True)
            hidden, weight = joint.weight.split([size, rank], dim=1)
        else:
            joint = Linear.read(source, prefix, {"joint_proj": 3 * rank}, 2 * rank + size, bias=True)
            weight, hidden = joint.weight.split([2 * rank, size], dim=1)
        parts = Linear(hidden.contiguous(), joint.bias), weight.contiguous()
        return cls(table, bias, *parts, markov.kind == RNN)

    def project(self, hidden: torch.Tensor) -> torch.Tensor | None:
        """What `step` needs of outputs `[n, hidden]`: `[n, rank or 3 * rank]`; None for a vanilla head."""
        return None if self.hidden is None else self.hidden(hidden)

    def new_state(self, num_rows: int) -> torch.Tensor | None:
        """The state of a recurrent head before its first step, float32 `[num_rows, rank]`."""
        if not self.is_recurrent:
            return None
        return torch.zeros(num_rows, self.table.shape[1], dtype=torch.float32, device=self.table.device)

    def step(
        self, previous: torch.Tensor, projected: torch.Tensor | None, state: torch.Tensor | None, ops: LayerOps
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """The latent vectors `[n, rank]` of drafts behind the tokens `previous` (int64 `[n]`), and the next state.

        projected: what `project` made of the outputs at these drafts.
        """
        if projected is None or self.weight is None:
            return F.embedding(previous, self.table), None
        return ops.markov_step(previous, self.table, projected, self.weight, state)


@dataclass(frozen=True)
class ConfidenceHead:
    """How likely a draft is to be accepted. projection: the output at the draft, and with `reads_markov` behind it the
    Markov embedding of the token before the draft -> the log-odds."""

    projection: Linear
    reads_markov: bool

    @classmethod
    def read(cls, source: WeightSource, spec: DSparkSpec) -> ConfidenceHead:
        """The head of a checkpoint that has one."""
        size = spec.decoder.hidden_size
        if spec.confidence_reads_markov:
            assert spec.markov is not None
            size += spec.markov.rank
        return cls(Linear.read(source, "confidence_head.", {"proj": 1}, size, bias=True), spec.confidence_reads_markov)

    def log_odds(self, hidden: torch.Tensor, embeddings: torch.Tensor | None) -> torch.Tensor:
        """The log-odds of drafts, float32 `[n]`, within `MAX_LOG_ODDS` of 0.

        hidden: `[n, hidden]`. embeddings: `[n, rank]`, of the tokens before, where the head reads them.
        """
        features = hidden
        if self.reads_markov:
            assert embeddings is not None
            features = torch.cat([hidden, embeddings], dim=1)
        assert self.projection.bias is not None
        found = F.linear(features.float(), self.projection.weight.float(), self.projection.bias.float())[:, 0]
        return found.nan_to_num(nan=-MAX_LOG_ODDS).clamp(-MAX_LOG_ODDS, MAX_LOG_ODDS)


@dataclass(frozen=True)
class DSparkWeights(DFlashWeights):
    """The parameters of a drafter: those of DFlash, and its heads, None where it has none."""

    markov: MarkovHead | None
    confidence: ConfidenceHead | None

    @classmethod
    def read(cls, source: WeightSource, spec: DFlashSpec) -> Self:
        assert isinstance(spec, DSparkSpec)
        return cls(
            **vars(DFlashWeights.read(source, spec)),
            markov=MarkovHead.read(source, spec) if spec.markov is not None else None,
            confidence=ConfidenceHead.read(source, spec) if spec.has_confidence_head else None,
        )


class DSparkModel(DFlashModel):
    """The drafter's parameters and arithmetic. markov, confidence: as in `DSparkWeights`."""

    weights_class: ClassVar[type[DFlashWeights]] = DSparkWeights
    spec: DSparkSpec

    def __init__(
        self, spec: DSparkSpec, weights: DSparkWeights, max_positions: int, ops: LayerOps | None = None
    ) -> None:
        super().__init__(spec, weights, max_positions, ops)
        self.markov = weights.markov
        self.confidence = weights.confidence


class DSparkDrafter(DFlashDrafter):
    """Runs a `DSparkModel` for the worker. Context KV is DFlash's.

    Where it samples from the anchor, the anchor's output gives the first draft, and no query is at the last one.
    """

    model_class: ClassVar[type[DFlashModel]] = DSparkModel
    model: DSparkModel

    def __init__(
        self, model: DFlashModel, target: TargetModel, caches: list[KVLayer], backend: AttentionBackend
    ) -> None:
        super().__init__(model, target, caches, backend)
        self.lookahead_base = 0 if self.model.spec.from_anchor else 1

    def _choose(
        self, outputs: torch.Tensor, logits: torch.Tensor, queries: DraftQueries, sampler: DraftSampler
    ) -> Drafts:
        """How sure the drafter is of a draft is what its confidence head says behind the token before it; without that
        head, the log-odds of the draft among the logits that it was chosen by."""
        head, markov = self.model.confidence, self.model.markov
        hidden, asked = queries.of_drafts(outputs), sampler.wants_confidence
        if head is not None:
            sampler = sampler.without_confidence()
        if markov is None:
            drafts, before = super()._choose(outputs, logits, queries, sampler), None
        else:
            drafts, previous = self._walk(markov, outputs, hidden, logits, queries, sampler)
            before = F.embedding(previous, markov.table)
        if head is None or not asked:
            return drafts
        return Drafts(drafts.token_ids, head.log_odds(hidden, before))

    def _walk(
        self,
        markov: MarkovHead,
        outputs: torch.Tensor,
        hidden: torch.Tensor,
        logits: torch.Tensor,
        queries: DraftQueries,
        sampler: DraftSampler,
    ) -> tuple[Drafts, torch.Tensor]:
        """The drafts, from the first of each block to the last, and the token before each: int64 `[num_drafts]`, in the
        target's ids."""
        positions, projected, scale = queries.draft_positions(), markov.project(hidden), self.model.spec.logits.scale
        previous = queries.token_ids[queries.row_starts()[:-1]]
        state = self._first_state(markov, outputs, queries, previous)
        tokens, before = torch.empty_like(positions), torch.empty_like(positions)
        sure = torch.empty(len(tokens), dtype=torch.float32, device=tokens.device) if sampler.wants_confidence else None
        for rows, drafts in queries.draft_steps():
            if rows is not None:
                previous, state = previous[rows], None if state is None else state[rows]
            part = None if projected is None else projected[drafts]
            latent, state = markov.step(previous, part, state, self.model.ops)
            biased = logits[drafts] + (markov.bias(latent) if scale == 1 else markov.bias(latent) * scale)
            found = sampler.at(drafts).choose(biased, positions[drafts], self.model.id_map)
            before[drafts] = previous
            tokens[drafts] = previous = found.token_ids
            if sure is not None and found.confidence is not None:
                sure[drafts] = found.confidence
        return Drafts(tokens, sure), before

    def _first_state(
        self, markov: MarkovHead, outputs: torch.Tensor, queries: DraftQueries, anchors: torch.Tensor
    ) -> torch.Tensor | None:
        """The state of a recurrent head before each row's first draft. It is trained along all outputs of a block, so
        one that does not sample from the anchor has taken a step there already."""
        state = markov.new_state(len(anchors))
        if state is None or queries.from_anchor:
            return state
        at_anchors = markov.project(outputs[queries.row_starts()[:-1]])
        return markov.step(anchors, at_anchors, state, self.model.ops)[1]
