"""A target whose layers are shared by several processes, its ranks (Megatron's scheme, arXiv 1909.08053).

Each rank has some of the query heads with the K/V heads that they read, and some of the MLP's inner numbers. The
products into them give a rank its own outputs, those out of them a term of a sum over all ranks: two sums for each
layer. Rank 0 alone chooses tokens, drafts, and keeps requests: the others run the layers on what it sends them, so
nothing is ever decided by two.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch

from dflash_backend.attention import AttentionBackend, AttentionBatch, KVLayer
from dflash_backend.checkpoints.spec import DecoderSpec, TargetSpec
from dflash_backend.checkpoints.weights import Progress, WeightSource, load_weights
from dflash_backend.models.decoder import DecoderTarget, TargetWeights, is_unused
from dflash_backend.models.interface import PagedContext, TargetModel, TargetOutput
from dflash_backend.models.layers import LayerWeights
from dflash_backend.models.linear import Linear, ProductOf
from dflash_backend.models.mlp import DenseMlp
from dflash_backend.models.ops import LayerOps

Reduce = Callable[[torch.Tensor], torch.Tensor]
"""The sum of a tensor over all ranks, the same bits on each. It may take the tensor's memory."""

BY_ROWS = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj")
BY_COLUMNS = ("o_proj", "down_proj")


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
        return replace(
            spec,
            num_heads=spec.num_heads // self.size,
            num_kv_heads=max(1, spec.num_kv_heads // self.size),
            intermediate_size=spec.intermediate_size // self.size,
        )

    def part(self, num_parts: int) -> int:
        """Which of `num_parts` parts is this one's; fewer than ranks are each that of several."""
        return self.rank * num_parts // self.size


def unsupported(spec: TargetSpec, size: int) -> str | None:
    """Why a target cannot be shared by `size` ranks; None if it can."""
    decoder = spec.decoder
    if decoder.moe is not None:
        return "its experts are not split over ranks yet; targets without experts are"
    if decoder.gemma4 is not None:
        return "layers of Gemma 4 are not split yet; those of Qwen3, Qwen2, Llama and Mistral are"
    if decoder.delta_net is not None or decoder.attention_gate or decoder.sinks:
        return "layers with a recurrent state, gated attention or attention sinks are not split yet; others are"
    for count, name in (
        (decoder.num_heads, "attention heads"),
        (decoder.intermediate_size, "inner numbers of its MLP"),
    ):
        if count % size:
            return f"its {count} {name} are no multiple of that; take a size that divides them"
    heads = decoder.num_kv_heads
    if heads % size and size % heads:
        return f"its {heads} K/V heads are neither a multiple nor a divisor of that; take a size that is one"
    return None


class SlicedSource(WeightSource):
    """What one rank reads of a target: of the layers' projections its part, of the rest all. The bias of a sum over
    ranks is rank 0's."""

    def __init__(self, whole: WeightSource, shard: Shard, num_kv_heads: int) -> None:
        """num_kv_heads: of the whole target."""
        super().__init__(whole.dtype, whole.device)
        self._whole = whole
        self._shard = shard
        self._kv_parts = min(shard.size, num_kv_heads)

    def read(self, name: str, out: torch.Tensor) -> None:
        _, _, tail = name.rpartition("layers.")
        *_, projection, kind = ["", *tail.split(".")]
        if projection in BY_ROWS:
            num_parts = self._kv_parts if projection in ("k_proj", "v_proj") else self._shard.size
            self._whole.read_slice(name, out, 0, self._shard.part(num_parts), num_parts)
        elif projection in BY_COLUMNS and kind == "weight":
            self._whole.read_slice(name, out, 1, self._shard.rank, self._shard.size)
        else:
            self._whole.read(name, out)
            if projection in BY_COLUMNS and self._shard.rank > 0:
                out.zero_()


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
        lambda source: TargetWeights.read(SlicedSource(source, shard, spec.decoder.num_kv_heads), local),
        dtype,
        device,
        ignored=lambda name: is_unused(local, name),
        progress=progress,
    )
    layers = [_summed(layer, reduce) for layer in weights.layers if isinstance(layer, LayerWeights)]
    return DecoderTarget(local, replace(weights, layers=list(layers)), max_positions, ops)


def _summed(layer: LayerWeights, reduce: Reduce) -> LayerWeights:
    assert isinstance(layer.mlp, DenseMlp), "see `unsupported`"
    mlp = replace(layer.mlp, down=SummedLinear(layer.mlp.down, reduce))
    return replace(layer, output=SummedLinear(layer.output, reduce), mlp=mlp)


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
