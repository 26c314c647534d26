"""A target whose layers are shared by several processes, its ranks (Megatron's scheme, arXiv 1909.08053).

Each rank has a part of the weights (`shard.py`). The products into attention, delta nets and MLPs give a rank its own
outputs, those out of them a term of a sum over all ranks: two sums for each layer. The embeddings of a pass's tokens
are a sum as well, to which each rank gives those of its slice of the vocabulary, or rank 0 all (`vocabulary.py`). Rank
0 alone chooses tokens, drafts, and keeps requests: the others run the layers on what it sends them, and keep KV and
recurrent states of their heads. Only experts are chosen by every rank, by the whole router, from the same bits.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from dflash_backend.attention import AttentionBackend, AttentionBatch, KVLayer
from dflash_backend.checkpoints.spec import TargetSpec
from dflash_backend.checkpoints.weights import Progress
from dflash_backend.models.decoder import AnyLayerWeights, TargetWeights, load_target_weights, target_of
from dflash_backend.models.gemma4 import Gemma4Experts
from dflash_backend.models.hybrid_layers import DeltaNetLayerWeights
from dflash_backend.models.interface import PagedContext, TargetModel, TargetOutput
from dflash_backend.models.layers import LayerWeights
from dflash_backend.models.linear import Linear, ProductOf
from dflash_backend.models.mlp import Mlp
from dflash_backend.models.ops import LayerOps
from dflash_backend.models.peers import ALONE, Peers, RankLostError
from dflash_backend.models.recurrent_state import StateChange, StateCopies, StateLayout, StatePool, StateRows
from dflash_backend.parallel.shard import Shard, SlicedSource
from dflash_backend.parallel.vocabulary import (
    HeadPass,
    LinearPart,
    Lookup,
    OtherRanks,
    ParallelVocabulary,
    SlicedHead,
    Sums,
    VocabularyPart,
)

Reduce = Callable[[torch.Tensor], torch.Tensor]
"""The sum of a tensor over all ranks, the same bits on each. It may take the tensor's memory."""


class SummedLinear(LinearPart):
    """A product whose inputs are shared by the ranks: the sum of what each has of it."""

    __slots__ = ("_reduce",)

    def __init__(self, part: Linear, reduce: Reduce) -> None:
        super().__init__(part, part.bias)
        self._reduce = reduce

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self._reduce(self._part(x))

    def with_product(self, product_of: ProductOf) -> Linear:
        return SummedLinear(self._part.with_product(product_of), self._reduce)

    def rows(self, index: torch.Tensor | slice) -> Linear:
        return SummedLinear(self._part.rows(index), self._reduce)


@dataclass(frozen=True)
class SummedMlp:
    """An MLP, or experts, whose inner numbers are shared by the ranks: the sum of what each has of its outputs."""

    part: Mlp
    reduce: Reduce

    def with_product(self, product_of: ProductOf) -> SummedMlp:
        """The same weights, multiplied by what `product_of` chooses for each."""
        return replace(self, part=self.part.with_product(product_of))

    def forward(self, x: torch.Tensor, ops: LayerOps) -> torch.Tensor:
        """`[n, hidden]` -> `[n, hidden]`."""
        return self.reduce(self.part.forward(x, ops))


@dataclass(frozen=True)
class SummedGemma4Experts(Gemma4Experts):
    """Experts of Gemma 4 whose inner numbers are shared by the ranks."""

    reduce: Reduce

    @classmethod
    def of(cls, part: Gemma4Experts, reduce: Reduce) -> SummedGemma4Experts:
        """The sum of what each rank has of their outputs."""
        return cls(**vars(part), reduce=reduce)

    def forward(self, hidden: torch.Tensor, ops: LayerOps, eps: float) -> torch.Tensor:
        return self.reduce(super().forward(hidden, ops, eps))


def load_shard(
    spec: TargetSpec,
    shard: Shard,
    reduce: Reduce,
    max_positions: int,
    dtype: torch.dtype,
    device: torch.device,
    progress: Progress | None = None,
    ops: LayerOps | None = None,
    *,
    fp8: bool = False,
) -> TargetModel:
    """A rank's part of the target in `spec.path`; arguments as of `load_target`. Raises `CheckpointError`."""
    local = shard.spec(spec)
    weights = load_target_weights(
        local, dtype, device, progress, ops, fp8=fp8, part=lambda source: SlicedSource(source, shard, spec)
    )
    own = shard.vocabulary(spec.vocab_size)
    first_id = None if len(own) == spec.vocab_size else own.start
    return target_of(local, replace(_summed(weights, reduce), first_id=first_id), max_positions, ops)


def vocabulary_part(local: TargetModel, spec: TargetSpec, shard: Shard, sums: Sums) -> VocabularyPart | None:
    """A rank's slice of embedding and head of the target `spec`, of which it has `local`; None where rank 0 has all."""
    if not shard.splits_vocabulary:
        return None
    slices = [replace(shard, rank=rank).vocabulary(spec.vocab_size) for rank in range(shard.size)]
    return VocabularyPart(local, slices, shard.rank, sums)


def _summed(weights: TargetWeights, reduce: Reduce) -> TargetWeights:
    """The same weights, with sums over the ranks after what gives a term of one."""
    return replace(weights, layers=[_summed_layer(layer, reduce) for layer in weights.layers], share=reduce)


def _summed_layer(layer: AnyLayerWeights, reduce: Reduce) -> AnyLayerWeights:
    mlp = SummedMlp(layer.mlp, reduce)
    if isinstance(layer, DeltaNetLayerWeights):
        return replace(layer, net=replace(layer.net, output=SummedLinear(layer.net.output, reduce)), mlp=mlp)
    output = SummedLinear(layer.output, reduce)
    if isinstance(layer, LayerWeights):
        return replace(layer, output=output, mlp=mlp)
    experts = None if layer.experts is None else SummedGemma4Experts.of(layer.experts, reduce)
    return replace(layer, output=output, mlp=mlp, experts=experts)


@dataclass(frozen=True)
class ForwardPass:
    """A pass of the layers, as rank 0 sends it to the others: what a `PagedContext` takes, and the rows as
    recurrent layers see them, None where there are none."""

    token_ids: torch.Tensor
    positions: torch.Tensor
    slots: torch.Tensor
    layout: AttentionBatch
    padded: bool
    states: StateLayout | None = None


RankMessage = ForwardPass | StateChange | Lookup | HeadPass
"""What rank 0 sends to the others."""


class Follower:
    """A rank other than 0, which has no use for the outcome of a pass: its part of the layers, and what they keep."""

    def __init__(
        self,
        target: TargetModel,
        caches: list[KVLayer],
        backend: AttentionBackend,
        dtype: torch.dtype,
        pool: StatePool | None = None,
        vocabulary: VocabularyPart | None = None,
    ) -> None:
        """pool: of recurrent states, None where the target has none. dtype: of model and KV. vocabulary: None where
        rank 0 has all of it."""
        self._target = target
        self._caches = caches
        self._backend = backend
        self._dtype = dtype
        self._pool = pool
        self._rows: StateRows | None = None
        self._vocabulary = vocabulary

    def take_kv(self, caches: list[KVLayer]) -> None:
        """From now on KV is kept in `caches`."""
        self._caches = caches

    def run(self, step: RankMessage) -> None:
        """What rank 0 has done: a pass, or its head, or what it did to the states since."""
        if isinstance(step, ForwardPass):
            self._forward(step)
        elif isinstance(step, HeadPass):
            assert self._vocabulary is not None
            self._vocabulary.run(step)
        elif isinstance(step, Lookup):
            assert self._vocabulary is not None
            self._vocabulary.rows(step)
        elif isinstance(step, StateCopies):
            assert self._pool is not None
            self._pool.copy(step.pairs)
        else:
            assert self._rows is not None, "a commit without a pass"
            self._rows.commit(step.num_kept)

    def _forward(self, step: ForwardPass) -> None:
        states = None
        if self._pool is not None and step.states is not None:
            states = StateRows.of(self._pool, step.states)
        context = PagedContext(
            step.layout,
            step.positions,
            step.slots,
            self._backend,
            self._dtype,
            step.padded,
            states,
        )
        self._target.forward(step.token_ids, context, self._caches, ())
        self._rows = states


class TensorParallelTarget(TargetModel):
    """The target as rank 0 has it: a pass runs on all ranks, the rest here, but for what is split by vocabulary."""

    def __init__(
        self,
        spec: TargetSpec,
        local: TargetModel,
        ranks: OtherRanks,
        vocabulary: VocabularyPart | None = None,
        peers: Peers = ALONE,
    ) -> None:
        """spec: of the whole target. local: this rank's part. vocabulary: its slice of embedding and head; None where
        it has all of both. peers: what else is asked of the others."""
        self.spec = spec
        self.local = local
        self.patterns = local.patterns
        self.ranks = ranks
        self.peers = peers
        self._vocabulary = None if vocabulary is None else ParallelVocabulary(vocabulary, ranks)
        self.lm_head = local.lm_head if self._vocabulary is None else SlicedHead(local.lm_head, self._vocabulary)

    def embed(self, token_ids: torch.Tensor, scaled: bool = True) -> torch.Tensor:
        if self._vocabulary is None:
            return self.local.embed(token_ids, scaled)
        return self._vocabulary.look_up(Lookup(token_ids, scaled=scaled))

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        if self._vocabulary is None:
            return self.local.logits(hidden)
        return self._vocabulary.logits(hidden, of_target=True)

    def forward(
        self, token_ids: torch.Tensor, context: PagedContext, caches: list[KVLayer], capture: tuple[int, ...]
    ) -> TargetOutput:
        try:
            states = None if context.states is None else context.states.layout
            self.ranks.send(
                ForwardPass(token_ids, context.positions, context.slots, context.layout, context.padded, states)
            )
            return self.local.forward(token_ids, context, caches, capture)
        except Exception as error:
            raise RankLostError(f"a pass over all ranks failed: {type(error).__name__}: {error}") from error

    def check(self) -> None:
        """Raises `RankLostError` when a rank is lost."""
        if reason := self.ranks.lost:
            raise RankLostError(reason)

    def tell(self, change: StateChange) -> None:
        """Give a change of the states to all other ranks. Raises `RankLostError`."""
        try:
            self.ranks.send(change)
        except RuntimeError as error:
            raise RankLostError(f"a change of recurrent states did not reach all ranks: {error}") from error
