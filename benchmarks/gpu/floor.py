"""The floor of a decode cycle: the least bytes that it must move and operations that it must do, by phase.

A phase cannot take less time than its bytes over the copy bandwidth, nor than its operations over the matrix rate; the
larger of the two is its floor, and a cycle's floor is the sum over its phases, which depend on one another. Counted are
weights, once a phase, KV of the context, logits and features. Not counted are activations between operations, norms
and everything of a request's size: a fused implementation could keep them on the chip, so the floor stays a floor.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from benchmarks.gpu.shapes import Shape
from dflash_backend.checkpoints.spec import DecoderSpec

PHASES = ("verify", "accept", "inject", "draft")


@dataclass(frozen=True)
class Ceilings:
    """What the device was measured to do: `copy_bandwidth` in bytes/s, read plus written; `matrix_rate` in FLOP/s."""

    copy_bandwidth: float
    matrix_rate: float


@dataclass(frozen=True)
class Work:
    """Bytes through the device's memory, and floating-point operations."""

    bytes: float = 0.0
    flops: float = 0.0

    def __add__(self, other: Work) -> Work:
        return Work(self.bytes + other.bytes, self.flops + other.flops)

    def __mul__(self, times: float) -> Work:
        return Work(self.bytes * times, self.flops * times)

    def seconds(self, ceilings: Ceilings) -> float:
        """The time below which a device with these ceilings cannot do it."""
        return max(self.bytes / ceilings.copy_bandwidth, self.flops / ceilings.matrix_rate)


@dataclass(frozen=True)
class CycleSize:
    """What runs in a cycle: `batch` rows, each with `context` positions behind it (the mean), and k drafts (0: plain
    decoding). `itemsize` is the bytes of a weight, and of a number in the KV; of the target's projections and KV where
    they have others: `weight_itemsize` and `kv_itemsize`, with their shares of scales; of its experts `expert_itemsize`
    where that is another again."""

    batch: int
    context: float
    k: int
    itemsize: int
    weight_itemsize: float | None = None
    kv_itemsize: float | None = None
    expert_itemsize: float | None = None

    @property
    def num_tokens(self) -> int:
        """Tokens that the target runs, and queries that the drafter runs."""
        return self.batch * (1 + self.k)


def cycle_work(shape: Shape, size: CycleSize) -> dict[str, Work]:
    """The work of each phase, as the device step tells them apart: the target's LM head belongs to verify, the
    drafter's to draft."""
    target, tokens = shape.target, size.num_tokens
    hidden = target.decoder.hidden_size
    verify = Work(tokens * hidden * size.itemsize) + decoder_work(target.decoder, size)
    verify += head_work(shape, tokens, size.itemsize)
    if size.k == 0:
        return {"verify": verify, "accept": Work(), "inject": Work(), "draft": Work()}
    features = Work(tokens * len(shape.draft.target_layer_ids) * hidden * size.itemsize)
    # The drafter's head runs over the masks and not the anchors.
    draft_head = head_work(shape, size.batch * size.k, size.itemsize)
    return {
        "verify": verify + features,
        "accept": Work(),
        "inject": inject_work(shape, size) + features,
        "draft": decoder_work(
            shape.draft.decoder, replace(size, weight_itemsize=None, kv_itemsize=None, expert_itemsize=None)
        )
        + draft_head,
    }


def head_work(shape: Shape, tokens: int, itemsize: int) -> Work:
    """The target's LM head over `tokens` positions; the logits are written, and read again."""
    hidden, vocab_size = shape.target.decoder.hidden_size, shape.target.vocab_size
    return matrix(hidden, vocab_size, tokens, itemsize) + Work(2 * tokens * vocab_size * itemsize)


def decoder_work(decoder: DecoderSpec, size: CycleSize) -> Work:
    """All layers of a decoder over the cycle's tokens: projections, attention over the context, MLP."""
    return _sum(
        attention_projections(decoder, size) + attention_work(decoder, size, window) + mlp_work(decoder, size, index)
        for index, window in enumerate(decoder.sliding_windows)
    )


def attention_projections(decoder: DecoderSpec, size: CycleSize) -> Work:
    """q, k, v and the output projection of one layer."""
    itemsize = size.weight_itemsize or size.itemsize
    into = matrix(decoder.hidden_size, decoder.query_size + 2 * decoder.kv_size, size.num_tokens, itemsize)
    return into + matrix(decoder.query_size, decoder.hidden_size, size.num_tokens, itemsize)


def attention_work(decoder: DecoderSpec, size: CycleSize, window: int | None = None) -> Work:
    """Attention of one layer: KV of every row's context read once, that of its new tokens written and read."""
    seen = size.context if window is None else min(size.context, window)
    kv_bytes = 2 * decoder.kv_size * (size.kv_itemsize or size.itemsize)
    read = size.batch * (seen + 1 + size.k) * kv_bytes
    written = size.num_tokens * kv_bytes
    # QK^T and PV: two operations for each multiplication.
    return Work(read + written, 4 * size.num_tokens * seen * decoder.query_size)


def mlp_work(decoder: DecoderSpec, size: CycleSize, layer: int) -> Work:
    """The MLP of one layer; with experts, as many as the tokens are expected to choose when all are alike likely."""
    moe, itemsize = decoder.moe, size.weight_itemsize or size.itemsize
    if moe is None or not moe.sparse_layers[layer]:
        return matrix(decoder.hidden_size, 3 * decoder.intermediate_size, size.num_tokens, itemsize)
    one = matrix(decoder.hidden_size, 3 * moe.intermediate_size, 1, size.expert_itemsize or itemsize)
    experts = expected_experts(moe.num_experts, moe.experts_per_token, size.num_tokens)
    router = matrix(decoder.hidden_size, moe.num_experts, size.num_tokens, size.itemsize)
    return router + Work(experts * one.bytes, size.num_tokens * moe.experts_per_token * one.flops)


def inject_work(shape: Shape, size: CycleSize) -> Work:
    """Context KV of all drafter layers: `fc` over the features, one product for k and v of all layers, the write."""
    decoder, tokens = shape.draft.decoder, size.num_tokens
    widths = len(shape.draft.target_layer_ids) * shape.draft.target_hidden_size
    kv = decoder.num_layers * 2 * decoder.kv_size
    written = Work(tokens * kv * size.itemsize)
    return (
        matrix(widths, decoder.hidden_size, tokens, size.itemsize)
        + matrix(decoder.hidden_size, kv, tokens, size.itemsize)
        + written
    )


def matrix(inputs: int, outputs: int, tokens: int, itemsize: float) -> Work:
    """A weight matrix, read once, times `tokens` vectors."""
    return Work(inputs * outputs * itemsize, 2 * inputs * outputs * tokens)


def expected_experts(num_experts: int, per_token: int, tokens: int) -> float:
    """Distinct experts that `tokens` tokens choose between them when every set of `per_token` is alike likely."""
    return num_experts * (1 - (1 - per_token / num_experts) ** tokens)


def floor_seconds(work: Mapping[str, Work], ceilings: Ceilings) -> dict[str, float]:
    """The floor of each phase."""
    return {phase: part.seconds(ceilings) for phase, part in work.items()}


def kv_bytes_per_token(shape: Shape, itemsize: int) -> int:
    """KV of one position over all layers of both models."""
    specs = (shape.target.decoder, shape.draft.decoder)
    return sum(spec.num_layers * 2 * spec.kv_size for spec in specs) * itemsize


def _sum(parts: Iterable[Work]) -> Work:
    return sum(parts, Work())
