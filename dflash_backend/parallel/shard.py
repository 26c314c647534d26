"""Which part of a target's weights a rank has, and how it reads no more than these.

A rank has some of the query heads with the K/V heads that they read, of a gated delta net some of the key heads with
their value heads, and some of the MLP's inner numbers, of every expert where there are experts.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

import torch

from dflash_backend.checkpoints.experts import MXFP4_GROUP
from dflash_backend.checkpoints.quantization.kept import KeptWeight
from dflash_backend.checkpoints.quantization.slices import Slice
from dflash_backend.checkpoints.spec import DecoderSpec, DeltaNetSpec, MoeSpec, TargetSpec
from dflash_backend.checkpoints.weights import NO_SLICES, Slices, WeightSource

BY_ROWS = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj")
BY_COLUMNS = ("o_proj", "down_proj", "out_proj")
# The projections and vectors of a gated delta net that have numbers of one head after the other; in those of `MIXED`
# the queries of all heads come first, then the keys, then the values.
BY_DELTA_HEADS = ("in_proj_z", "in_proj_b", "in_proj_a", "in_proj_qkvz", "in_proj_ba", "A_log", "dt_bias")
MIXED = ("in_proj_qkv", "conv1d")
EMBEDDING = "embed_tokens.weight"
HEAD = "lm_head.weight"
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


@dataclass(frozen=True)
class Shard:
    """The part `rank` of `size`."""

    rank: int
    size: int
    splits_vocabulary: bool = False
    """Whether each rank has some rows of embedding and head; else rank 0 has all."""

    def vocabulary(self, vocab_size: int) -> range:
        """The tokens whose rows of embedding and head this rank has."""
        if self.splits_vocabulary:
            return range(self.rank * vocab_size // self.size, (self.rank + 1) * vocab_size // self.size)
        return range(0 if self.rank else vocab_size)

    def spec(self, spec: TargetSpec) -> TargetSpec:
        """The target as this rank has it. With no rows of the vocabulary it reads no head."""
        own = len(self.vocabulary(spec.vocab_size))
        tied = spec.tie_word_embeddings or not own
        return replace(spec, decoder=self.decoder(spec.decoder), vocab_size=own, tie_word_embeddings=tied)

    def decoder(self, spec: DecoderSpec) -> DecoderSpec:
        """The layers' shape as this rank has them. With fewer K/V heads than ranks several ranks have the same one."""
        own = spec.gemma4
        return replace(
            spec,
            moe=None if spec.moe is None else self._experts(spec.moe),
            delta_net=None if spec.delta_net is None else self._delta_net(spec.delta_net),
            gemma4=None if own is None else replace(own, num_kv_heads=max(1, own.num_kv_heads // self.size)),
            num_heads=spec.num_heads // self.size,
            num_kv_heads=max(1, spec.num_kv_heads // self.size),
            intermediate_size=spec.intermediate_size // self.size,
        )

    def _experts(self, moe: MoeSpec) -> MoeSpec:
        shared = None if moe.shared_size is None else moe.shared_size // self.size
        return replace(moe, intermediate_size=moe.intermediate_size // self.size, shared_size=shared)

    def _delta_net(self, net: DeltaNetSpec) -> DeltaNetSpec:
        keys, values = net.num_key_heads // self.size, net.num_value_heads // self.size
        return replace(net, num_key_heads=keys, num_value_heads=values)

    def part(self, num_parts: int) -> int:
        """Which of `num_parts` parts is this one's; fewer than ranks are each that of several."""
        return self.rank * num_parts // self.size


def unsupported(spec: TargetSpec, size: int) -> str | None:
    """Why a target cannot be shared by `size` ranks; None if it can."""
    decoder, moe = spec.decoder, spec.decoder.moe
    for count, name in _divided(decoder):
        if count % size:
            return f"its {count} {name} are no multiple of that; take a size that divides them"
    if moe is not None and moe.mxfp4 and moe.intermediate_size % (size * MXFP4_GROUP):
        groups = moe.intermediate_size // MXFP4_GROUP
        return f"the {groups} MXFP4 groups of an expert are no multiple of that; take a size that divides them"
    for heads in dict.fromkeys(cache.num_kv_heads for cache in decoder.caches):
        if heads % size and size % heads:
            return f"its {heads} K/V heads are neither a multiple nor a divisor of that; take a size that is one"
    return None


def _divided(decoder: DecoderSpec) -> Iterator[tuple[int, str]]:
    """What is split evenly, with its name."""
    moe, net = decoder.moe, decoder.delta_net
    yield decoder.num_heads, "attention heads"
    if net is not None:
        yield net.num_key_heads, "key heads of a gated delta net"
    if moe is None or not all(moe.sparse_layers) or decoder.gemma4 is not None:  # Gemma 4 has an MLP beside them
        yield decoder.intermediate_size, "inner numbers of its MLP"
    if moe is not None:
        yield moe.intermediate_size, "inner numbers of an expert"
        yield moe.shared_size or 0, "inner numbers of its shared expert"


class SlicedSource(WeightSource):
    """What one rank reads of a target: of the layers' projections, experts, delta nets and sinks its part, of embedding
    and head its rows, of the rest all. The bias of a sum over ranks is rank 0's."""

    def __init__(self, whole: WeightSource, shard: Shard, spec: TargetSpec) -> None:
        """spec: of the whole target."""
        super().__init__(whole.dtype, whole.device, whole.keep_quantised)
        self._whole = whole
        self._shard = shard
        self._spec = spec.decoder
        self._vocab_size = spec.vocab_size

    def tensor(self, name: str, *shape: int, dtype: torch.dtype | None = None) -> torch.Tensor:
        """As of any source; of an embedding that rank 0 alone has no rows."""
        if name.endswith(EMBEDDING) and not shape[0]:
            return self.empty(*shape)
        return super().tensor(name, *shape, dtype=dtype)

    def read(self, name: str, out: torch.Tensor, taken: Slice | None = None) -> None:
        self._whole.read(name, out, self._slice(name))
        owner, kind = _ends(name)
        is_of_sum = kind == "down_proj_bias" or (owner in BY_COLUMNS and kind == "bias")
        if is_of_sum and self._shard.rank > 0:
            out.zero_()

    def read_projection(self, name: str, out: torch.Tensor, taken: Slice | None = None) -> None:
        self._whole.read_projection(name, out, self._slice(name))

    def keeps(
        self, names: Mapping[str, int], in_features: int, *, ordered: bool = True, slices: Slices = NO_SLICES
    ) -> bool:
        own = {name: taken for name in names if (taken := self._slice(name)) is not None}
        return self._whole.keeps(names, in_features, ordered=ordered, slices=own)

    def read_kept(self, name: str, out_features: int, in_features: int, taken: Slice | None = None) -> KeptWeight:
        return self._whole.read_kept(name, out_features, in_features, self._slice(name))

    def _slice(self, name: str) -> Slice | None:
        """What is read of the tensor `name`; None for all of it."""
        owner, kind = _ends(name)
        rank, size = self._shard.rank, self._shard.size
        if f"{owner}.{kind}" in (EMBEDDING, HEAD):
            return self._slice_of_vocabulary()
        if owner == "experts":
            return self._slice_of_experts(kind)
        if owner in ("k_proj", "v_proj"):
            num_parts = min(size, self._num_kv_heads(name))
            return Slice(0, (self._shard.part(num_parts),), num_parts)
        if owner in MIXED:
            return self._slice_of_mixed()
        if owner in BY_COLUMNS:
            return Slice(1, (rank,), size) if kind == "weight" else None
        by_rows = owner in BY_ROWS or kind == "sinks" or owner in BY_DELTA_HEADS or kind in BY_DELTA_HEADS
        return Slice(0, (rank,), size) if by_rows else None

    def _slice_of_vocabulary(self) -> Slice | None:
        if not self._shard.splits_vocabulary:
            return None
        own = self._shard.vocabulary(self._vocab_size)
        unit = math.gcd(own.start, own.stop, self._vocab_size)
        return Slice(0, tuple(range(own.start // unit, own.stop // unit)), self._vocab_size // unit)

    def _num_kv_heads(self, name: str) -> int:
        """Of the layer that the tensor `name` is of."""
        if self._spec.gemma4 is None:
            return self._spec.num_kv_heads
        words = name.split(".")
        return self._spec.of_layer(int(words[words.index("layers") + 1])).num_kv_heads

    def _slice_of_mixed(self) -> Slice:
        """Of a tensor that has the queries of all heads of a delta net, then the keys, then the values."""
        net, rank, size = self._spec.delta_net, self._shard.rank, self._shard.size
        assert net is not None
        keys, values = net.key_size // size, net.value_size // size
        unit = math.gcd(keys, values)
        keys, values = keys // unit, values // unit
        starts = (rank * keys, keys), ((size + rank) * keys, keys), (2 * size * keys + rank * values, values)
        parts = tuple(first + i for first, count in starts for i in range(count))
        return Slice(0, parts, net.conv_size // unit)

    def _slice_of_experts(self, kind: str) -> Slice | None:
        """Of the tensor `kind` that has all experts of a layer. Single experts are projections as others are."""
        rank, size, moe = self._shard.rank, self._shard.size, self._spec.moe
        if moe is not None and moe.swiglu is not None:
            return Slice(GPT_OSS_EXPERTS[kind], (rank,), size) if kind in GPT_OSS_EXPERTS else None
        if kind == "gate_up_proj":  # all of gate before all of up
            return Slice(1, (rank, size + rank), 2 * size)
        return Slice(2, (rank,), size)


def _ends(name: str) -> tuple[str, str]:
    """The module that a tensor is of, and what it is there."""
    *_, owner, kind = ["", *name.split(".")]
    return owner, kind
