"""Calls of the C++ operations of a CPU (`cpu_ops.cpp`), each as its torch reference says.

Rows of all arguments are contiguous. An operation uses as many threads as torch would in the calling thread.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from dflash_kernels import cpu_library
from dflash_kernels.activation import gelu_mul_reference, silu_mul_reference
from dflash_kernels.argmax import argmax_reference
from dflash_kernels.context_write import context_write_reference
from dflash_kernels.huge_pages import weight_memory
from dflash_kernels.log_odds import MAX_LOG_ODDS, log_odds_reference
from dflash_kernels.logits_filter import lowest_kept_reference
from dflash_kernels.logprobs import ranked_logprobs_reference
from dflash_kernels.penalties import PenalisedRows
from dflash_kernels.qk_norm_rope_write import qk_norm_rope_write_reference
from dflash_kernels.rms_norm import add_rms_norm_reference, rms_norm_reference
from dflash_kernels.sample import sample_reference

DTYPES = {torch.float32: 0, torch.bfloat16: 1}
"""What numbers may be in, and its number in the library."""
KV_DTYPES = {**DTYPES, torch.uint8: 2}
"""The same for KV; uint8 is FP8."""
BLOCKS = {
    "Q4_0": (32, 18, 0),
    "Q4_1": (32, 20, 0),
    "Q8_0": (32, 34, 1),
    "Q4_K": (256, 144, 2),
    "Q5_K": (256, 176, 3),
    "Q6_K": (256, 210, 3),
}
"""The types of GGUF that are kept, in the order of their numbers in the library: numbers and bytes of a block, and the
grid that holds them: codes of 4 or 8 bits by steps in float16 (0, 1), the same by steps in float32 (2, 3)."""
FIRST_GRID = {torch.bfloat16: 2, torch.float32: 6}
"""The number of grid 0 in the library, by what numbers are in."""
FLOAT_HALVES = 10
"""The number in the library of float32 whose numbers are bfloat16."""
LANES = 16
MAX_HEAD_DIM = 1024

_library: Any = cpu_library.load()
HAS_CPU_OPS = _library is not None
HAS_PAIRS = _library is not None and bool(_library.dflash_has_pairs())
"""Whether the processor multiplies bfloat16, by AMX or AVX-512."""


class PackedWeight:
    """A weight `[out_features, in_features]` in the order in which products read it, as float32 or bfloat16, or in
    fewer bits that give the very same numbers: float32 as bfloat16, where all are, or codes on grids (`cpu_grids.h`);
    of these for bfloat16 without `HAS_PAIRS` those before rounding."""

    __slots__ = ("address", "data", "described", "dtype", "shape")

    def __init__(self, weight: torch.Tensor) -> None:
        """Packs `weight`, which is not kept."""
        weight, threads = weight.contiguous(), torch.get_num_threads()
        kind, (n, k) = DTYPES[weight.dtype], weight.shape
        if (
            weight.dtype == torch.float32
            and k % 32 == 0
            and _library.dflash_are_halves(threads, weight.data_ptr(), n * k)
        ):
            kind = FLOAT_HALVES
        self._describe(kind, (n, k), weight.dtype)
        _library.dflash_pack(threads, self.address, weight.data_ptr())

    def _describe(self, kind: int, shape: tuple[int, int], dtype: torch.dtype) -> None:
        """Memory for a weight of this kind. address: of what the library knows of it."""
        self.shape, self.dtype = shape, dtype
        self.data = weight_memory(_library.dflash_packed_bytes(kind, *shape))
        self.described = np.array([kind, *shape, self.data.data_ptr(), 0, 0], np.int64)
        self.address = self.described.ctypes.data

    def precede(self, following: torch.Tensor) -> None:
        """Products by what `following` holds come after those by this weight, as a rule, so that its beginning is
        fetched meanwhile."""
        self.described[4:] = following.data_ptr(), following.nbytes

    @property
    def is_plain(self) -> bool:
        """Whether it holds numbers, not codes on grids."""
        return int(self.described[0]) in (*DTYPES.values(), FLOAT_HALVES)

    @property
    def device(self) -> torch.device:
        """Where it is."""
        return self.data.device

    @staticmethod
    def fits(weight: torch.Tensor) -> bool:
        """Whether a weight can be packed here."""
        return HAS_CPU_OPS and weight.is_cpu and weight.dtype in DTYPES and weight.dim() == 2 and 0 not in weight.shape

    @classmethod
    def of_blocks(cls, parts: Sequence[tuple[str, torch.Tensor]], dtype: torch.dtype) -> PackedWeight | None:
        """Weights of GGUF, their rows below one another, as codes whose numbers are theirs, rounded to `dtype` (float32
        or bfloat16). parts: the type of each, and its blocks, uint8 `[num_rows, num_bytes]`. None where a type is none
        of `BLOCKS`, and for numbers that are not finite."""
        kinds = {kind for kind, _ in parts}
        if not (HAS_CPU_OPS and dtype in FIRST_GRID and kinds <= set(BLOCKS)) or any(
            0 in raw.shape for _, raw in parts
        ):
            return None
        grids = {BLOCKS[kind][2] for kind in kinds}
        grid = grids.pop() if len(grids) == 1 else 2 if grids == {0, 2} else 3
        rows, (columns,) = (
            sum(len(raw) for _, raw in parts),
            {raw.shape[1] // BLOCKS[kind][1] * BLOCKS[kind][0] for kind, raw in parts},
        )
        found = cls.__new__(cls)
        found._describe(FIRST_GRID[dtype] + grid, (rows, columns), dtype)
        threads, first = torch.get_num_threads(), 0
        for kind, raw in parts:
            raw, number = raw.contiguous(), list(BLOCKS).index(kind)
            if not _library.dflash_pack_blocks(threads, found.address, number, raw.data_ptr(), first, len(raw)):
                return None
            first += len(raw)
        return found

    def rows(self, index: torch.Tensor) -> torch.Tensor:
        """The rows of the weight at `index` (int64 `[n]`), as numbers: `[n, in_features]`. Raises `IndexError`."""
        index = index.contiguous()
        count = len(index)
        out = torch.empty((count, self.shape[1]), dtype=self.dtype)
        threads = torch.get_num_threads()
        outside = _library.dflash_unpack_rows(threads, self.address, index.data_ptr(), count, out.data_ptr())
        if outside >= 0:
            raise IndexError(f"row {int(index[outside])} of a weight of {self.shape[0]} rows")
        return out

    def product(self, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """`x @ weight.T + bias`: `[..., in_features]` -> `[..., out_features]`."""
        n, k = self.shape
        if x.dim() != 2:
            return self.product(x.reshape(-1, k), bias).view(*x.shape[:-1], n)
        if x.stride(1) != 1:
            x = x.contiguous()
        rows = len(x)
        out = torch.empty((rows, n), dtype=x.dtype)
        _library.dflash_linear(
            torch.get_num_threads(), x.data_ptr(), x.stride(0), self.address, address(bias), out.data_ptr(), rows,
        )  # fmt: skip
        return out


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """As `rms_norm_reference`."""
    code = DTYPES.get(x.dtype)
    if code is None or (weight.dtype != x.dtype and weight.dtype != torch.float32):
        return rms_norm_reference(x, weight, eps)
    x = x if x.is_contiguous() else x.contiguous()
    normed = torch.empty_like(x)
    size = x.shape[-1]
    _library.dflash_norm(
        code, DTYPES[weight.dtype], torch.get_num_threads(), x.data_ptr(), None, weight.data_ptr(), normed.data_ptr(),
        None, x.numel() // size, size, eps,
    )  # fmt: skip
    return normed


def add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """As `add_rms_norm_reference`."""
    code = DTYPES.get(x.dtype)
    if code is None or residual.dtype != x.dtype or (weight.dtype != x.dtype and weight.dtype != torch.float32):
        return add_rms_norm_reference(x, residual, weight, eps)
    x, residual = (each if each.is_contiguous() else each.contiguous() for each in (x, residual))
    normed, total = torch.empty_like(x), torch.empty_like(x)
    size = x.shape[-1]
    _library.dflash_norm(
        code, DTYPES[weight.dtype], torch.get_num_threads(), x.data_ptr(), residual.data_ptr(), weight.data_ptr(),
        normed.data_ptr(), total.data_ptr(), x.numel() // size, size, eps,
    )  # fmt: skip
    return normed, total


def silu_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """As `silu_mul_reference`."""
    return silu_mul_reference(gate_up) if gate_up.dtype not in DTYPES else _gate(gate_up, is_gelu=False)


def gelu_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """As `gelu_mul_reference`."""
    return gelu_mul_reference(gate_up) if gate_up.dtype not in DTYPES else _gate(gate_up, is_gelu=True)


def _gate(gate_up: torch.Tensor, is_gelu: bool) -> torch.Tensor:
    gate_up = gate_up if gate_up.is_contiguous() else gate_up.contiguous()
    inner = gate_up.shape[-1] // 2
    out = torch.empty((*gate_up.shape[:-1], inner), dtype=gate_up.dtype)
    _library.dflash_gate(
        DTYPES[gate_up.dtype], torch.get_num_threads(), is_gelu, gate_up.data_ptr(), out.data_ptr(),
        out.numel() // inner, inner,
    )  # fmt: skip
    return out


def qk_norm_rope_write(
    qkv: torch.Tensor,
    qk_norm: torch.Tensor | None,
    eps: float,
    cos: torch.Tensor,
    sin: torch.Tensor,
    slots: torch.Tensor,
    cache: torch.Tensor,
    padded: bool = False,
    scales: torch.Tensor | None = None,
) -> torch.Tensor:
    """As `qk_norm_rope_write_reference`."""
    num_kv_heads, head_dim = cache.shape[2:]
    norm_dtype = qkv.dtype if qk_norm is None else qk_norm.dtype
    known = qkv.dtype in DTYPES and norm_dtype in (qkv.dtype, torch.float32) and cos.dtype == qkv.dtype
    if not known or cache.dtype not in KV_DTYPES or head_dim % 2 or head_dim > MAX_HEAD_DIM:
        return qk_norm_rope_write_reference(qkv, qk_norm, eps, cos, sin, slots, cache, padded, scales)
    qkv, cos, sin, slots = (each if each.is_contiguous() else each.contiguous() for each in (qkv, cos, sin, slots))
    num_tokens = len(qkv)
    num_heads = qkv.shape[1] // head_dim - 2 * num_kv_heads
    query = torch.empty((num_tokens, num_heads, head_dim), dtype=qkv.dtype)
    _library.dflash_rope_write(
        DTYPES[qkv.dtype], DTYPES[norm_dtype], KV_DTYPES[cache.dtype], torch.get_num_threads(), qkv.data_ptr(),
        address(qk_norm), eps, cos.data_ptr(), sin.data_ptr(), slots.data_ptr(), query.data_ptr(), cache.data_ptr(),
        address(scales), num_tokens, num_heads, num_kv_heads, head_dim,
    )  # fmt: skip
    return query


def context_write(
    projected: torch.Tensor,
    k_norm: torch.Tensor | None,
    eps: float,
    cos: torch.Tensor,
    sin: torch.Tensor,
    slots: torch.Tensor,
    caches: Sequence[torch.Tensor],
    padded: bool = False,
) -> None:
    """As `context_write_reference`."""
    dtype, cache_dtypes = projected.dtype, {cache.dtype for cache in caches}
    num_kv_heads, head_dim = caches[0].shape[2:]
    norm_dtype = dtype if k_norm is None else k_norm.dtype
    known = dtype in DTYPES and norm_dtype in (dtype, torch.float32) and cos.dtype == dtype and len(cache_dtypes) == 1
    if not known or not cache_dtypes <= DTYPES.keys() or head_dim % 2 or head_dim > MAX_HEAD_DIM:
        return context_write_reference(projected, k_norm, eps, cos, sin, slots, caches, padded)
    projected, cos, sin, slots = (each.contiguous() for each in (projected, cos, sin, slots))
    k_norm = None if k_norm is None else k_norm.contiguous()
    addresses = np.array([cache.data_ptr() for cache in caches], np.int64)
    _library.dflash_context_write(
        DTYPES[dtype], DTYPES[norm_dtype], DTYPES[caches[0].dtype], torch.get_num_threads(), projected.data_ptr(),
        address(k_norm), eps, cos.data_ptr(), sin.data_ptr(), slots.data_ptr(), addresses.ctypes.data, len(caches),
        len(slots), num_kv_heads, head_dim,
    )  # fmt: skip
    return None


def linear_rope_write(
    packed: PackedWeight,
    bias: torch.Tensor | None,
    x: torch.Tensor,
    qk_norm: torch.Tensor | None,
    eps: float,
    cos: torch.Tensor,
    sin: torch.Tensor,
    slots: torch.Tensor,
    cache: torch.Tensor,
    padded: bool,
    scales: torch.Tensor | None,
) -> torch.Tensor:
    """`qk_norm_rope_write` of a product, in one call."""
    num_kv_heads, head_dim = cache.shape[2:]
    num_tokens, norm = x.shape[0], x if qk_norm is None else qk_norm
    known = norm.dtype == x.dtype or norm.dtype == torch.float32
    plain = x.is_contiguous() and cos.is_contiguous() and sin.is_contiguous() and slots.is_contiguous()
    if not (known and plain) or head_dim % 2 or head_dim > MAX_HEAD_DIM:
        return qk_norm_rope_write(packed.product(x, bias), qk_norm, eps, cos, sin, slots, cache, padded, scales)
    num_heads = packed.shape[0] // head_dim - 2 * num_kv_heads
    query = x.new_empty((num_tokens, num_heads, head_dim))
    _library.dflash_linear_rope_write(
        DTYPES[norm.dtype], KV_DTYPES[cache.dtype], torch.get_num_threads(), x.data_ptr(), packed.shape[1],
        packed.address, address(bias), address(qk_norm), eps, cos.data_ptr(), sin.data_ptr(), slots.data_ptr(),
        query.data_ptr(), cache.data_ptr(), address(scales), num_tokens, num_heads, num_kv_heads, head_dim,
    )  # fmt: skip
    return query


def linear_norm(
    packed: PackedWeight,
    bias: torch.Tensor | None,
    x: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`add_rms_norm` of a product, in one call."""
    num_tokens = x.shape[0]
    known = weight.dtype == x.dtype or weight.dtype == torch.float32
    if not known or not (x.is_contiguous() and residual.is_contiguous()):
        return add_rms_norm(packed.product(x, bias), residual, weight, eps)
    n, k = packed.shape
    normed, total = residual.new_empty((num_tokens, n)), residual.new_empty((num_tokens, n))
    _library.dflash_linear_norm(
        DTYPES[weight.dtype], torch.get_num_threads(), x.data_ptr(), k, packed.address, address(bias),
        residual.data_ptr(), weight.data_ptr(), normed.data_ptr(), total.data_ptr(), num_tokens, eps,
    )  # fmt: skip
    return normed, total


def gated_mlp(
    gate_up: PackedWeight,
    gate_up_bias: torch.Tensor | None,
    down: PackedWeight,
    down_bias: torch.Tensor | None,
    x: torch.Tensor,
    is_gelu: bool,
) -> torch.Tensor:
    """Both products of an MLP and its gate, in one call: `[n, hidden]` -> `[n, out_features]`."""
    num_tokens = x.shape[0]
    if not x.is_contiguous():
        return down.product(_gate(gate_up.product(x, gate_up_bias), is_gelu), down_bias)
    out = x.new_empty((num_tokens, down.shape[0]))
    _library.dflash_gated_mlp(
        torch.get_num_threads(), is_gelu, x.data_ptr(), gate_up.shape[1], gate_up.address, address(gate_up_bias),
        down.address, address(down_bias), out.data_ptr(), num_tokens,
    )  # fmt: skip
    return out


def attend(
    query: torch.Tensor,
    data: torch.Tensor,
    scales: torch.Tensor | None,
    out: torch.Tensor,
    tables: np.ndarray,
    first_tokens: np.ndarray,
    query_lens: np.ndarray,
    seq_lens: np.ndarray,
    causal: bool,
    window: int | None,
    sinks: torch.Tensor | None,
) -> None:
    """Attention of rows over their blocks, in place, to `out` `[num_tokens, num_heads * head_dim]`.

    query: `[num_tokens, num_heads, head_dim]`. data, scales: as of a `KVLayer`. tables: int32 `[num_rows, most]`.
    first_tokens, query_lens, seq_lens: int64 `[num_rows]`: the token of a row's first query, its queries, and the
    position behind its last one. causal, window, sinks: as of an `AttentionPattern`.
    """
    _, block_size, _, num_kv_heads, head_dim = data.shape
    _library.dflash_attend(
        DTYPES[query.dtype], KV_DTYPES[data.dtype], torch.get_num_threads(), query.data_ptr(), data.data_ptr(),
        address(scales), out.data_ptr(), tables.ctypes.data, tables.shape[1], first_tokens.ctypes.data,
        query_lens.ctypes.data, seq_lens.ctypes.data, len(seq_lens), query.shape[1], num_kv_heads, head_dim, block_size,
        causal, window or 0, address(sinks), head_dim**-0.5,
    )  # fmt: skip


def address(tensor: torch.Tensor | None) -> int:
    """Where a tensor is, for a table that C++ reads; 0 for none."""
    return 0 if tensor is None else tensor.data_ptr()


def layers(
    table: np.ndarray,
    rows: np.ndarray,
    hidden: torch.Tensor,
    positions: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    last_norm: torch.Tensor | None,
    captured: np.ndarray,
    features: torch.Tensor | None,
    heads_size: int,
    token_ids: torch.Tensor | None = None,
    embedding: PackedWeight | None = None,
) -> torch.Tensor:
    """All layers of a decoder, in one call. Returns the norm by `last_norm` of what the last one gives out.

    table: `struct Layers` of `cpu_ops.cpp`, rows: its `Rows`, both int64. hidden: `[num_tokens, hidden_size]`, the
    embeddings, in whose place the last layer's output comes; with `token_ids`, int64 `[num_tokens]`, which are looked
    up in `embedding`, what is there does not matter. positions: int64 `[num_tokens]`, contiguous. cos, sin:
    `[num_positions, head_dim]`, contiguous. captured: int64, of each layer the address in `features` where its output
    goes, or 0. features: `[num_tokens, L * hidden_size]`, or None. Raises `IndexError`.
    """
    num_tokens, size = hidden.shape
    normed = torch.empty_like(hidden)
    work = hidden.new_empty(num_tokens * (2 * heads_size + size + 2 * cos.shape[1]))
    of_pass = (ctypes.c_int64 * 13)(
        0 if embedding is None else embedding.address, address(token_ids), positions.data_ptr(), cos.data_ptr(),
        sin.data_ptr(), len(cos), hidden.data_ptr(), normed.data_ptr(), address(last_norm), captured.ctypes.data,
        0 if features is None else features.shape[1], work.data_ptr(), num_tokens,
    )  # fmt: skip
    outside = _library.dflash_layers(torch.get_num_threads(), table.ctypes.data, rows.ctypes.data, of_pass)
    if outside >= 0:
        token_id = None if token_ids is None else int(token_ids[outside])
        raise IndexError(f"no such token or position: token {token_id} at position {int(positions[outside])}")
    return normed


def argmax(values: torch.Tensor) -> torch.Tensor:
    """As `argmax_reference`."""
    if values.dtype not in DTYPES or values.dim() != 2 or not values.shape[1] or values.stride(1) != 1:
        return argmax_reference(values)
    return _chosen(values)


def coarse_rows_at_most(dtype: int) -> int:
    """Rows up to which `likeliest` is faster than a product, by the number of their dtype; 0 where it cannot run."""
    return 0 if _library is None else int(_library.dflash_coarse_rows_at_most(dtype))


def likeliest(
    x: torch.Tensor, packed: PackedWeight, codes: np.ndarray, ids: torch.Tensor, *sampling: torch.Tensor
) -> int:
    """What `argmax` gives for the logits of `x` `[n, in_features]`, or `sample` with `sampling`, its temperature, seeds
    and positions, and for top_k, top_p and min_p what `lowest_kept` keeps: to `ids`, int64 `[n]`. codes: `struct
    CoarseHead` of `cpu_head.h`, int64. Returns how many units of 16 to 64 columns were computed; without `ids` -1, or
    -2 where `sampling` is such that bounds never suffice."""
    held = [each.contiguous() for each in sampling]
    pointers = np.array([*(each.data_ptr() for each in held), *[0] * (6 - len(held))], np.int64)
    num_units = _library.dflash_likeliest(
        torch.get_num_threads(), x.data_ptr(), x.stride(0), packed.address, codes.ctypes.data, pointers.ctypes.data,
        len(x), ids.data_ptr(),
    )  # fmt: skip
    return int(num_units)


def sample(
    logits: torch.Tensor,
    temperature: torch.Tensor,
    seeds: torch.Tensor,
    positions: torch.Tensor,
    lowest_kept: torch.Tensor | None = None,
    token_ids: torch.Tensor | None = None,
) -> torch.Tensor:
    """As `sample_reference`, up to the rounding of logarithms."""
    if logits.dtype not in DTYPES or not logits.shape[1] or logits.stride(1) != 1:
        return sample_reference(logits, temperature, seeds, positions, lowest_kept, token_ids)
    return _chosen(logits, temperature, seeds, positions, lowest_kept, token_ids)


def lowest_kept(
    logits: torch.Tensor, temperature: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor, min_p: torch.Tensor
) -> torch.Tensor | None:
    """As `lowest_kept_reference`, up to the rounding of sums: a token on the edge of a filter may be kept or not."""
    filters = (top_k > 0) | (top_p < 1.0) | (min_p > 0.0)
    if not (filters & (temperature > 0.0)).any():
        return None
    if logits.dtype not in DTYPES or not logits.shape[1] or logits.stride(1) != 1:
        return lowest_kept_reference(logits, temperature, top_k, top_p, min_p)
    held = [each.contiguous() for each in (temperature, top_k, top_p, min_p)]
    out = torch.empty(len(logits))
    _library.dflash_lowest_kept(
        DTYPES[logits.dtype], torch.get_num_threads(), logits.data_ptr(), *logits.shape, logits.stride(0),
        *(each.data_ptr() for each in held), out.data_ptr(),
    )  # fmt: skip
    return out


def count_and_penalise(
    logits: torch.Tensor,
    counts: torch.Tensor,
    num_counted: torch.Tensor,
    tokens: torch.Tensor,
    penalties: torch.Tensor,
    rows: PenalisedRows,
) -> None:
    """As `count_and_penalise_reference`. All tensors are contiguous."""
    described = np.array(
        [
            *(each.data_ptr() for each in (counts, num_counted, tokens, penalties, rows.numbers, rows.positions)),
            rows.numbers.shape[1], counts.shape[1], tokens.shape[1],
        ],
        np.int64,
    )  # fmt: skip
    _library.dflash_penalise(torch.get_num_threads(), described.ctypes.data, logits.data_ptr())


def ranked_logprobs(logits: torch.Tensor, ids: torch.Tensor, num_top: int) -> torch.Tensor:
    """As `ranked_logprobs_reference`, up to the rounding of sums. Raises `IndexError` for ids that have no logits."""
    if logits.dtype not in DTYPES or not logits.shape[1] or logits.stride(1) != 1:
        return ranked_logprobs_reference(logits, ids, num_top)
    num_top, ids = min(num_top, logits.shape[1]), ids.contiguous()
    if ids.numel() and not (int(ids.min()) >= 0 and int(ids.max()) < logits.shape[1]):
        raise IndexError(f"token ids from 0 to {logits.shape[1] - 1} have logits, not {ids.min()} to {ids.max()}")
    out = torch.empty((len(logits), 2 * (ids.shape[1] + num_top)), dtype=torch.float64)
    _library.dflash_ranked_logprobs(
        DTYPES[logits.dtype], torch.get_num_threads(), logits.data_ptr(), *logits.shape, logits.stride(0),
        ids.data_ptr(), ids.shape[1], num_top, out.data_ptr(),
    )  # fmt: skip
    return out


def log_odds(logits: torch.Tensor, token_ids: torch.Tensor) -> torch.Tensor:
    """As `log_odds_reference`."""
    if logits.dtype not in DTYPES or not logits.shape[1] or logits.stride(1) != 1:
        return log_odds_reference(logits, token_ids)
    token_ids, out = token_ids.contiguous(), torch.empty(len(logits), dtype=torch.float32)
    _library.dflash_log_odds(
        DTYPES[logits.dtype], torch.get_num_threads(), logits.data_ptr(), *logits.shape, logits.stride(0),
        token_ids.data_ptr(), MAX_LOG_ODDS, out.data_ptr(),
    )  # fmt: skip
    return out


def _chosen(logits: torch.Tensor, *per_row: torch.Tensor | None) -> torch.Tensor:
    """The columns that are chosen, int64 `[n]`. per_row: the other arguments of `sample`."""
    out = torch.empty(len(logits), dtype=torch.int64)
    held = [None if each is None else each.contiguous() for each in (*per_row, *[None] * 5)[:5]]
    pointers = [address(each) for each in held]
    _library.dflash_choose(
        DTYPES[logits.dtype], torch.get_num_threads(), logits.data_ptr(), *logits.shape, logits.stride(0), *pointers,
        out.data_ptr(),
    )  # fmt: skip
    return out
