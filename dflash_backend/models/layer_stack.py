"""All layers of a decoder in one call of C++, where the operations of a CPU know each of them. With few tokens four
calls of Python for each layer take a good part of a step."""

from __future__ import annotations

import itertools
import operator
from collections.abc import Sequence

import numpy as np
import torch

from dflash_backend.attention import KVLayer
from dflash_backend.attention.cpu_backend import CpuBackend, CpuMetadata
from dflash_backend.models.interface import PagedContext
from dflash_backend.models.layers import DecoderLayer
from dflash_backend.models.linear import PackedLinear
from dflash_backend.models.mlp import DenseMlp
from dflash_backend.models.ops import CpuLayerOps, LayerOps
from dflash_backend.models.rope import Rotary
from dflash_kernels import cpu_ops
from dflash_kernels.cpu_ops import PackedWeight


class LayerStack:
    """The layers, and the table that C++ reads of them. Several threads may run it at the same time."""

    def __init__(self, layers: Sequence[DecoderLayer], dtype: torch.dtype) -> None:
        """Of layers that `of` has looked at; dtype: of their numbers."""
        self._layers, self._dtype = layers, dtype
        self._patterns = list(dict.fromkeys(layer.pattern for layer in layers))
        self._bound: tuple[tuple[KVLayer, ...], np.ndarray, np.ndarray, int] | None = None
        self.order = [linear.packed for layer in layers for linear in _linears(layer)]
        """The weights in the order of their products."""
        for weight, following in itertools.pairwise(self.order):
            weight.precede(following.data)

    def end_with(self, head: PackedWeight) -> None:
        """A product by `head` follows the last layer, and the next step that."""
        self.order[-1].precede(head.data)
        head.precede(self.order[0].data)

    @classmethod
    def of(cls, layers: Sequence[object], ops: LayerOps, last_norm: torch.Tensor) -> LayerStack | None:
        """None where a layer must be run by itself. last_norm: follows the last layer."""
        if not isinstance(ops, CpuLayerOps) or not layers:
            return None
        plain = [layer for layer in layers if type(layer) is DecoderLayer and _is_packed(layer)]
        if len(plain) < len(layers):
            return None
        weights = [layer.weights for layer in plain]
        norms = {norm.dtype for w in weights for norm in (w.input_norm, w.post_norm)} | {last_norm.dtype}
        of_heads = {None if w.qk_norm is None else w.qk_norm.dtype for w in weights}
        dtypes = {w.qkv.dtype for w in weights}
        known = {*dtypes, torch.float32}
        if max(len(norms), len(of_heads), len(dtypes)) > 1 or not norms <= known or not of_heads <= {*known, None}:
            return None
        return cls(plain, dtypes.pop())

    def rows(self, context: PagedContext, dtype: torch.dtype, capture: tuple[int, ...] = ()) -> np.ndarray | None:
        """`Rows` of each pattern, for a pass in `dtype` that captures these layers; None where its layers must be run
        one by one."""
        if type(context.backend) is not CpuBackend or dtype != self._dtype:
            return None
        if len(set(capture)) < len(capture) or (capture and max(capture) >= len(self._layers)):
            return None
        rows = np.empty((len(self._patterns), 7), np.int64)
        for number, pattern in enumerate(self._patterns):
            metadata = context.metadata(pattern)
            if type(metadata) is not CpuMetadata or not len(metadata.seq_lens):
                return None
            rows[number] = _rows(context.slots_of(pattern), metadata)
        return rows

    def forward(
        self,
        rows: np.ndarray,
        hidden: torch.Tensor,
        caches: Sequence[KVLayer],
        rotary: Rotary,
        positions: torch.Tensor,
        last_norm: torch.Tensor | None = None,
        capture: tuple[int, ...] = (),
        token_ids: torch.Tensor | None = None,
        embedding: PackedWeight | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Leaves in `hidden` what the last layer gives out. Returns its norm by `last_norm`, `[num_tokens,
        hidden_size]`, and the outputs of the layers `capture` side by side, None without any. rows: as `rows` gave
        them. hidden: `[num_tokens, hidden_size]`, contiguous: the embeddings; with `token_ids`, int64 `[num_tokens]`,
        these are looked up in `embedding` instead. positions: int64 `[num_tokens]`."""
        bound = self._bound
        if bound is None or not all(map(operator.is_, caches, bound[0])):
            self._bound = bound = self._bind(tuple(caches))
        _, _, table, heads_size = bound
        num_tokens, size = hidden.shape
        captured = np.zeros(len(self._layers), np.int64)
        features = None
        if capture:
            features = hidden.new_empty((num_tokens, len(capture) * size))
            step = size * features.element_size()
            captured[list(capture)] = features.data_ptr() + step * np.arange(len(capture))
        normed = cpu_ops.layers(
            table, rows, hidden, positions.contiguous(), rotary.cos, rotary.sin, last_norm, captured, features,
            heads_size, token_ids, embedding,
        )  # fmt: skip
        return normed, features

    def _bind(self, caches: tuple[KVLayer, ...]) -> tuple[tuple[KVLayer, ...], np.ndarray, np.ndarray, int]:
        """The caches, `Layer` for each layer, `Layers`, and the numbers of all heads of a query."""
        each = np.array([self._row(layer, cache) for layer, cache in zip(self._layers, caches, strict=True)], np.int64)
        weights, data = self._layers[0].weights, caches[0].data
        _, block_size, _, num_kv_heads, head_dim = data.shape
        num_heads = weights.qkv.out_features // head_dim - 2 * num_kv_heads
        qk_norm = weights.input_norm if weights.qk_norm is None else weights.qk_norm
        codes = [cpu_ops.DTYPES[weights.input_norm.dtype], cpu_ops.DTYPES[qk_norm.dtype], cpu_ops.KV_DTYPES[data.dtype]]
        table = np.array(
            [each.ctypes.data, len(each), *codes, num_heads, num_kv_heads, head_dim, block_size, 0], np.int64
        )
        table[-1:].view(np.float64)[0] = self._layers[0].eps
        return caches, each, table, num_heads * head_dim

    def _row(self, layer: DecoderLayer, cache: KVLayer) -> list[int]:
        w, pattern, linears = layer.weights, layer.pattern, _linears(layer)
        assert isinstance(w.mlp, DenseMlp)
        tensors = [*(one.bias for one in linears), w.input_norm, w.post_norm, w.qk_norm, w.sinks, cache.data]
        return [
            *(one.packed.address for one in linears),
            *map(cpu_ops.address, tensors),
            cpu_ops.address(cache.scales),
            pattern.sliding_window or 0,
            int(pattern.causal),
            int(w.mlp.is_gelu),
            self._patterns.index(pattern),
        ]


def _linears(layer: DecoderLayer) -> list[PackedLinear]:
    """In the order of their products, of a layer that `_is_packed`."""
    w = layer.weights
    assert isinstance(w.mlp, DenseMlp)
    return [one for one in (w.qkv, w.output, w.mlp.gate_up, w.mlp.down) if isinstance(one, PackedLinear)]


def _is_packed(layer: DecoderLayer) -> bool:
    w = layer.weights
    linears = [w.qkv, w.output, *((w.mlp.gate_up, w.mlp.down) if type(w.mlp) is DenseMlp else [None])]
    if not all(type(one) is PackedLinear for one in linears):
        return False
    tensors = [w.input_norm, w.post_norm, w.qk_norm, w.sinks, *(one.bias for one in linears if one is not None)]
    return all(one is None or one.is_contiguous() for one in tensors)


def _rows(slots: torch.Tensor, metadata: CpuMetadata) -> list[int]:
    """`Rows`."""
    arrays = metadata.first_tokens, metadata.query_lens, metadata.seq_lens
    tables = metadata.tables
    assert slots.is_contiguous()
    return [
        slots.data_ptr(), tables.ctypes.data, tables.shape[1], *(each.ctypes.data for each in arrays),
        len(metadata.seq_lens),
    ]  # fmt: skip
