"""A target whose layers are shared by several processes, its ranks (Megatron's scheme, arXiv 1909.08053).

Each rank has some of the query heads with the K/V heads that they read, and some of the MLP's inner numbers, of every
expert where there are experts. The products into them give a rank its own outputs, those out of them a term of a sum
over all ranks: two sums for each layer. Rank 0 alone chooses tokens, drafts, and keeps requests: the others run the
layers on what it sends them. Only experts are chosen by every rank, by the whole router, from the same bits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch

from dflash_backend.attention import AttentionBackend, AttentionBatch, KVLayer
from dflash_backend.checkpoints.experts import MXFP4_GROUP
from dflash_backend.checkpoints.spec import DecoderSpec, TargetSpec
from dflash_backend.checkpoints.weights import Progress, WeightSource, load_weights
from dflash_backend.models.decoder import DecoderTarget, TargetWeights, is_unused
from dflash_backend.models.interface import PagedContext, TargetModel, TargetOutput
from dflash_backend.models.layers import LayerWeights
from dflash_backend.models.linear import Linear, ProductOf
from dflash_backend.models.mlp import Mlp
from dflash_backend.models.ops import LayerOps

Reduce = Callable[[torch.Tensor], torch.Tensor]
"""The sum of a tensor over all ranks, the same bits on each. It may take the tensor's memory."""

BY_ROWS = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj")
BY_COLUMNS = ("o_proj", "down_proj")
# Along which dimension gpt-oss's tensors of all experts of a layer are split; gate and up lie side by side there.
GPT_OSS_EXPERTS = {
    "gate_up_proj": 2,
    "gate_up_proj_bias": 1,
    "gate_up_proj_blocks": 1,
    "gate_up_proj_scales": 1,
    "down_proj": 1,
    "down_proj_blocks": 2,
    "down_proj_scales": 2,
}


class RankLostError(Exception):
    """A rank has ended or hangs, or a pass failed on one of them, after which they are out of step. No step can run any
    more: the engine must start anew."""


@dataclass(frozen=True)
class Shard:
    """The part `rank` of `size`."""

    rank: int
    size: int

    def spec(self, spec: TargetSpec) -> TargetSpec:
        """The target as this rank has it. The others than 0 read no head: theirs is never used."""
        tied = spec.tie_word_embeddings or self.rank > 0
        return replace(spec, decoder=self.decoder(spec.decoder), tie_word_embeddings=tied)

    def decoder(self, spec: DecoderSpec) -> DecoderSpec:
        """The layers' shape as this rank has them. With fewer K/V heads than ranks several ranks have the same one."""
        moe = spec.moe
        return replace(
            spec,
            moe=None if moe is None else replace(moe, intermediate_size=moe.intermediate_size // self.size),
            num_heads=spec.num_heads // self.size,
            num_kv_heads=max(1, spec.num_kv_heads // self.size),
            intermediate_size=spec.intermediate_size // self.size,
        )

    def part(self, num_parts: int) -> int:
        """Which of `num_parts` parts is this one's; fewer than ranks are each that of several."""
        return self.rank * num_parts // self.size


def unsupported(spec: TargetSpec, size: int) -> str | None:
    """Why a target cannot be shared by `size` ranks; None if it can."""
    decoder, moe = spec.decoder, spec.decoder.moe
    if decoder.gemma4 is not None:
        return "layers of Gemma 4 are not split yet; those of Qwen3, Qwen2, Llama, Mistral and gpt-oss are"
    if decoder.delta_net is not None or decoder.attention_gate:
        return "layers with a recurrent state or gated attention are not split yet; others are"
    is_dense = moe is None or not all(moe.sparse_layers)
    for count, name in (
        (decoder.num_heads, "attention heads"),
        (decoder.intermediate_size if is_dense else 0, "inner numbers of its MLP"),
        (0 if moe is None else moe.intermediate_size, "inner numbers of an expert"),
    ):
        if count % size:
            return f"its {count} {name} are no multiple of that; take a size that divides them"
    if moe is not None and moe.mxfp4 and moe.intermediate_size % (size * MXFP4_GROUP):
        groups = moe.intermediate_size // MXFP4_GROUP
        return f"the {groups} MXFP4 groups of an expert are no multiple of that; take a size that divides them"
    heads = decoder.num_kv_heads
    if heads % size and size % heads:
        return f"its {heads} K/V heads are neither a multiple nor a divisor of that; take a size that is one"
    return None


@dataclass(frozen=True)
class _Slice:
    """Which parts of a tensor are read, of `num_parts` along `dim`."""

    dim: int
    parts: tuple[int, ...]
    num_parts: int


class SlicedSource(WeightSource):
    """What one rank reads of a target: of the layers' projections, experts and sinks its part, of the rest all. The
    bias of a sum over ranks is rank 0's."""

    def __init__(self, whole: WeightSource, shard: Shard, spec: DecoderSpec) -> None:
        """spec: of the whole target."""
        super().__init__(whole.dtype, whole.device)
        self._whole = whole
        self._shard = shard
        self._kv_parts = min(shard.size, spec.num_kv_heads)
        self._is_gpt_oss = spec.moe is not None and spec.moe.swiglu is not None

    def read(self, name: str, out: torch.Tensor) -> None:
        *_, owner, kind = ["", *name.split(".")]
        taken = self._slice_of_experts(kind) if owner == "experts" else self._slice(owner, kind)
        if taken is not None:
            self._whole.read_slice(name, out, taken.dim, taken.parts, taken.num_parts)
            return
        self._whole.read(name, out)
        is_of_sum = kind == "down_proj_bias" or (owner in BY_COLUMNS and kind == "bias")
        if is_of_sum and self._shard.rank > 0:
            out.zero_()

    def _slice(self, owner: str, kind: str) -> _Slice | None:
        """Of a tensor `kind` of the module `owner`; None for all of it."""
        shard = self._shard
        if owner in BY_ROWS:
            num_parts = self._kv_parts if owner in ("k_proj", "v_proj") else shard.size
            return _Slice(0, (shard.part(num_parts),), num_parts)
        if owner in BY_COLUMNS and kind == "weight":
            return _Slice(1, (shard.rank,), shard.size)
        return _Slice(0, (shard.rank,), shard.size) if kind == "sinks" else None

    def _slice_of_experts(self, kind: str) -> _Slice | None:
        """Of the tensor `kind` that has all experts of a layer. Single experts are projections as others are."""
        rank, size = self._shard.rank, self._shard.size
        if self._is_gpt_oss:
            return _Slice(GPT_OSS_EXPERTS[kind], (rank,), size) if kind in GPT_OSS_EXPERTS else None
        if kind == "gate_up_proj":  # all of gate before all of up
            return _Slice(1, (rank, size + rank), 2 * size)
        return _Slice(2, (rank,), size)


class SummedLinear(Linear):
    """A product whose inputs are shared by the ranks: the sum of what each has of it."""

    __slots__ = ("_reduce",)

    def __init__(self, part: Linear, reduce: Reduce) -> None:
        super().__init__(part.weight, part.bias, part.product)
        self._reduce = reduce

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self._reduce(super().__call__(x))

    def with_product(self, product_of: ProductOf) -> Linear:
        return SummedLinear(super().with_product(product_of), self._reduce)


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


def load_shard(
    spec: TargetSpec,
    shard: Shard,
    reduce: Reduce,
    max_positions: int,
    dtype: torch.dtype,
    device: torch.device,
    progress: Progress | None = None,
    ops: LayerOps | None = None,
) -> DecoderTarget:
    """A rank's part of the target in `spec.path`; arguments as of `load_target`. Raises `CheckpointError`."""
    local = shard.spec(spec)
    weights = load_weights(
        spec.path,
        lambda source: TargetWeights.read(SlicedSource(source, shard, spec.decoder), local),
        dtype,
        device,
        ignored=lambda name: is_unused(local, name),
        progress=progress,
    )
    layers = [_summed(layer, reduce) for layer in weights.layers if isinstance(layer, LayerWeights)]
    return DecoderTarget(local, replace(weights, layers=list(layers)), max_positions, ops)


def _summed(layer: LayerWeights, reduce: Reduce) -> LayerWeights:
    return replace(layer, output=SummedLinear(layer.output, reduce), mlp=SummedMlp(layer.mlp, reduce))


@dataclass(frozen=True)
class SharedPass:
    """A pass of the layers, as rank 0 sends it to the others: what `PagedContext.prepare` takes, exact lengths, all on
    the host."""

    token_ids: torch.Tensor
    positions: torch.Tensor
    slots: torch.Tensor
    layout: AttentionBatch
    padded: bool

    def run(self, target: TargetModel, caches: list[KVLayer], backend: AttentionBackend, dtype: torch.dtype) -> None:
        """The pass on a rank that has no use for its outcome."""
        context = PagedContext.prepare(
            self.layout, self.positions, self.slots, backend, target.patterns, dtype, self.padded
        )
        target.forward(self.token_ids, context, caches, ())


class SharedTarget(TargetModel):
    """The target as rank 0 has it: a pass runs on all ranks, the rest here."""

    def __init__(
        self, spec: TargetSpec, local: DecoderTarget, send: Callable[[SharedPass], None], num_threads: int
    ) -> None:
        """spec: of the whole target. local: this rank's part. send: gives a pass to all other ranks. num_threads: of
        an operation of a pass, since the ranks share the machine."""
        self.spec = spec
        self.local = local
        self.patterns = local.patterns
        self.lm_head = local.lm_head
        self._send = send
        self._num_threads = num_threads

    def embed(self, token_ids: torch.Tensor) -> torch.Tensor:
        return self.local.embed(token_ids)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.local.logits(hidden)

    def forward(
        self, token_ids: torch.Tensor, context: PagedContext, caches: list[KVLayer], capture: tuple[int, ...]
    ) -> TargetOutput:
        assert context.layout is not None
        try:
            # A view of a table would be sent with all of the table.
            layout = replace(context.layout, block_tables=context.layout.block_tables.clone())
            tensors = (token_ids.clone(), context.positions.clone(), context.slots.clone())
            self._send(SharedPass(*tensors, layout, context.padded))
            with num_threads(self._num_threads):
                return self.local.forward(token_ids, context, caches, capture)
        except Exception as error:
            raise RankLostError(f"a pass over all ranks failed: {type(error).__name__}: {error}") from error


@contextmanager
def num_threads(number: int) -> Iterator[None]:
    """This many threads within operations, for the calling thread."""
    before = torch.get_num_threads()
    torch.set_num_threads(number)
    try:
        yield
    finally:
        torch.set_num_threads(before)
