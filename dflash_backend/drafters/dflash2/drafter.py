"""The DFlash2 drafter: DFlash's forward, then a walk along each block that chooses among the best tokens of each
position by what precedes them. Its model has a convolution along the block before and after each sublayer, and the
tables of the candidate selector.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Self

import torch

from dflash_backend.attention import AttentionPattern, KVLayer
from dflash_backend.checkpoints.spec import DecoderSpec
from dflash_backend.checkpoints.weights import WeightSource
from dflash_backend.drafters.base import DraftQueries, Drafts, DraftSampler
from dflash_backend.drafters.dflash.config import DFlashSpec
from dflash_backend.drafters.dflash.drafter import DFlashDrafter, DFlashModel, DFlashWeights
from dflash_backend.drafters.dflash2.config import CODEBOOK, ConvSpec, DFlash2Spec, SelectorSpec
from dflash_backend.models.interface import PagedContext
from dflash_backend.models.layers import DecoderLayer, LayerWeights
from dflash_backend.models.linear import Linear
from dflash_backend.models.ops import LayerOps, Rotation


@dataclass(frozen=True)
class ConvWeights:
    """The two convolutions around a sublayer, of its input and of its output.

    base: `[2, taps, hidden]`, the kernels that all queries share. projection: hidden -> 2 * taps * groups, what a query
    adds to them, from the sublayer's input before its convolution.
    """

    base: torch.Tensor
    projection: Linear

    @classmethod
    def read(cls, source: WeightSource, prefix: str, spec: ConvSpec, hidden: int) -> ConvWeights:
        """Those whose tensors' names begin with `prefix`."""
        num_dynamic = 2 * spec.kernel_size * (hidden // spec.group_size)
        return cls(
            source.tensor(f"{prefix}base_kernel", 2, spec.kernel_size, hidden),
            Linear.read(source, prefix, {"kernel_projection": num_dynamic}, hidden),
        )


@dataclass(frozen=True)
class Selector:
    """The candidate selector. projection: hidden -> rank. predecessors, successors: `[vocab_size, rank]`, a row for
    each token where an edge begins and where it ends."""

    projection: Linear
    predecessors: torch.Tensor
    successors: torch.Tensor

    @classmethod
    def read(cls, source: WeightSource, spec: SelectorSpec, hidden: int, vocab_size: int) -> Selector:
        """The selector of a checkpoint."""
        successors = CODEBOOK.replace("predecessor", "successor")
        return cls(
            Linear.read(source, "candidate_selector.", {"hidden_projection": spec.rank}, hidden),
            source.tensor(CODEBOOK + spec.codebook_suffix, vocab_size, spec.rank),
            source.tensor(successors + spec.codebook_suffix, vocab_size, spec.rank),
        )


@dataclass(frozen=True)
class DFlash2Weights(DFlashWeights):
    """The parameters of a drafter: those of DFlash; the convolutions around attention and MLP of each layer; the
    selector."""

    attention_convs: list[ConvWeights]
    mlp_convs: list[ConvWeights]
    selector: Selector

    @classmethod
    def read(cls, source: WeightSource, spec: DFlashSpec) -> Self:
        assert isinstance(spec, DFlash2Spec)
        hidden, layers = spec.decoder.hidden_size, range(spec.decoder.num_layers)
        base = DFlashWeights.read(source, spec)
        return cls(
            **vars(base),
            attention_convs=[
                ConvWeights.read(source, f"layers.{i}.attention_conv.", spec.conv, hidden) for i in layers
            ],
            mlp_convs=[ConvWeights.read(source, f"layers.{i}.mlp_conv.", spec.conv, hidden) for i in layers],
            selector=Selector.read(source, spec.selector, hidden, spec.vocab_size),
        )


class BlockConv:
    """The convolutions around one sublayer. They see queries of their own block only, and zeros before its anchor."""

    def __init__(self, weights: ConvWeights, ops: LayerOps) -> None:
        self.weights = weights
        self.ops = ops

    def prepare(self, x: torch.Tensor, block_index: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """What the sublayer takes in place of `x` `[n, hidden]`, and what `finish` needs: `[n, taps, groups]`.

        block_index: int64 `[n]`, each query's place in its block.
        """
        num_taps = self.weights.base.shape[1]
        before, after = self.weights.projection(x).unflatten(1, (2, num_taps, -1)).unbind(1)
        return self.ops.grouped_conv(x, self.weights.base[0], before, block_index), after

    def finish(self, x: torch.Tensor, dynamic: torch.Tensor, block_index: torch.Tensor) -> torch.Tensor:
        """What stands for the sublayer's output `x` `[n, hidden]`."""
        return self.ops.grouped_conv(x, self.weights.base[1], dynamic, block_index)


class ConvDecoderLayer(DecoderLayer):
    """A decoder layer with convolutions around attention and around the MLP."""

    def __init__(
        self,
        spec: DecoderSpec,
        weights: LayerWeights,
        pattern: AttentionPattern,
        ops: LayerOps,
        attention_conv: ConvWeights,
        mlp_conv: ConvWeights,
    ) -> None:
        super().__init__(spec, weights, pattern, ops)
        self.attention_conv = BlockConv(attention_conv, ops)
        self.mlp_conv = BlockConv(mlp_conv, ops)

    def forward(
        self, normed: torch.Tensor, hidden: torch.Tensor, context: PagedContext, cache: KVLayer, rotation: Rotation
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """As `DecoderLayer.forward`, with a context that has a `row_index`."""
        block_index = context.row_index
        assert block_index is not None
        normed, dynamic = self.attention_conv.prepare(normed, block_index)
        attended = self.weights.output(self._attend(normed, context, cache, rotation))
        attended = self.attention_conv.finish(attended, dynamic, block_index)
        normed, hidden = self.ops.add_rms_norm(attended, hidden, self.weights.post_norm, self.eps)
        normed, dynamic = self.mlp_conv.prepare(normed, block_index)
        return self.mlp_conv.finish(self.weights.mlp.forward(normed, self.ops), dynamic, block_index), hidden


class DFlash2Model(DFlashModel):
    """The drafter's parameters and arithmetic. `forward` needs a context with a `row_index`."""

    weights_class: ClassVar[type[DFlashWeights]] = DFlash2Weights

    def __init__(
        self, spec: DFlash2Spec, weights: DFlash2Weights, max_positions: int, ops: LayerOps | None = None
    ) -> None:
        super().__init__(spec, weights, max_positions, ops)
        self.selector = weights.selector

    def _layer(self, weights: DFlashWeights, index: int, pattern: AttentionPattern) -> DecoderLayer:
        assert isinstance(weights, DFlash2Weights)
        convs = weights.attention_convs[index], weights.mlp_convs[index]
        layer = self.ops.laid_out(weights.layers[index])
        return ConvDecoderLayer(self.spec.decoder, layer, pattern, self.ops, *convs)


class DFlash2Drafter(DFlashDrafter):
    """Runs a `DFlash2Model` for the worker. Context KV is DFlash's: convolutions are over a block's own queries."""

    model_class: ClassVar[type[DFlashModel]] = DFlash2Model
    reads_block_index: ClassVar[bool] = True
    model: DFlash2Model

    def _choose(
        self, outputs: torch.Tensor, logits: torch.Tensor, queries: DraftQueries, sampler: DraftSampler
    ) -> Drafts:
        """The walk from each row's anchor. With noise the candidates are the best with it, since the target may choose
        a token that is none of the likeliest; an edge counts as the logit that it is added to, divided by the
        temperature.

        How sure the drafter is of a draft are its log-odds at temperature 1 among all tokens, with the edges from the
        draft before it added to the logits of the candidates.
        """
        selector, spec = self.model.selector, self.model.spec
        assert isinstance(spec, DFlash2Spec)
        hidden = queries.of_drafts(outputs)
        scores, candidates = sampler.top_candidates(logits, queries.draft_positions(), spec.selector.top_k)
        starts = queries.row_starts()
        chosen, edges = self.model.ops.selector_walk(
            scores,
            candidates,
            selector.projection(hidden),
            selector.predecessors,
            selector.successors,
            queries.token_ids[starts[:-1]],
            # Of a row's queries all but the anchor's are at drafts.
            starts - torch.arange(len(starts), device=starts.device),
            sampler.temperature,
        )
        token_ids = candidates.gather(1, chosen[:, None])[:, 0]
        if not sampler.wants_confidence:
            return Drafts(token_ids)
        joined = logits.scatter_add(1, candidates, edges.to(logits.dtype))
        return Drafts(token_ids, sampler.ops.log_odds(joined, token_ids))
