"""Attention of rows that begin with the same KV blocks, which are read once for all of them (cascade inference in
FlashInfer; Hydragen, arXiv 2402.05099).

The queries of a group of neighbouring rows lie behind one another, so to paged attention they are one row over the
shared positions, of which every query sees all. The rows' own attention begins behind these. Both leave their results
with the log of the softmax's denominator, by which they are merged. All lengths are read on the device.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from dflash_kernels.attention_merge import LOG2_E
from dflash_kernels.attention_schedule import PagedBatch
from dflash_kernels.launcher import cached_launches
from dflash_kernels.triton_import import tl, triton

# Elements of the output that a program merges, and its warps.
TILE = 1024
WARPS = 4


@dataclass(frozen=True)
class SharedRows:
    """Rows that may share the beginning of their KV, R of them, and G groups of neighbours that do; int32, on the
    device.

    leader: `[G]`, the first row of a group. num_rows: `[G]`, its rows, 0 for no group. positions: `[G]`, what they
    share, a multiple of the block size, below the position of each row's first query. of_row: `[R]`, the shared
    positions of each row, 0 for one in no group.
    """

    leader: torch.Tensor
    num_rows: torch.Tensor
    positions: torch.Tensor
    of_row: torch.Tensor


def split_rows(rows: PagedBatch, shared: SharedRows, block_size: int) -> tuple[PagedBatch, PagedBatch]:
    """Of `rows` their own part, which begins behind what they share, and the groups as rows of all queries of their
    rows over the shared positions. The shapes follow from those of the arguments alone."""
    skipped = torch.minimum(shared.of_row, rows.seq_lens - rows.query_lens).clamp(min=0)
    width = rows.block_tables.shape[1]
    columns = torch.arange(width, device=skipped.device) + (skipped // block_size).long()[:, None]
    tables = rows.block_tables.gather(1, columns.clamp(max=width - 1))
    own = PagedBatch(rows.query_start, rows.query_lens, rows.seq_lens - skipped, tables)
    last = (shared.leader + shared.num_rows - 1).clamp(min=0)
    start = rows.query_start.index_select(0, shared.leader)
    end = rows.query_start.index_select(0, last) + rows.query_lens.index_select(0, last)
    lens = (end - start) * (shared.num_rows > 0)
    return own, PagedBatch(start, lens, shared.positions, rows.block_tables.index_select(0, shared.leader))


def merge_parts_reference(
    own: torch.Tensor,
    own_lse: torch.Tensor,
    prefix: torch.Tensor,
    prefix_lse: torch.Tensor,
    out: torch.Tensor,
    sinks: torch.Tensor | None = None,
    out_lse: torch.Tensor | None = None,
) -> None:
    """Write to `out` (`[num_tokens, num_heads * head_dim]`) the attention over two parts of a context together.

    own, prefix: of any floating dtype, as `out`: the attention over each. own_lse, prefix_lse: float32 `[num_tokens,
    num_heads]`, the logarithm, of two, of each one's denominator; a part whose logarithm is -inf is not read. Where
    both are, the output is 0. sinks: `[num_heads]`, as of `paged_attention_reference`. out_lse: where to write the
    logarithm of the denominator of both together, as of each. `out` and `out_lse` may be those of a part.
    """
    num_tokens, num_heads = own_lse.shape
    lse = torch.stack([own_lse, prefix_lse])
    together = lse
    if sinks is not None:
        sink = (sinks.float() * LOG2_E).expand(1, num_tokens, num_heads)
        together = torch.cat([lse, sink])
    top = together.max(dim=0).values.nan_to_num(neginf=0.0)
    weights = (together - top).exp2()
    weights = (weights / weights.sum(dim=0).clamp(min=1e-30))[:2, :, :, None]
    parts = torch.stack([own.float(), prefix.float()]).view(2, num_tokens, num_heads, -1)
    parts = parts.masked_fill(lse[..., None] == float("-inf"), 0.0)
    out.copy_((parts * weights).sum(dim=0).view_as(out))
    if out_lse is not None:
        out_lse.copy_(together.mul(1 / LOG2_E).logsumexp(dim=0) * LOG2_E)


@cached_launches
@triton.jit(do_not_specialize=["num_lines"])
def _merge_parts_kernel(
    own_ptr, own_lse_ptr, prefix_ptr, prefix_lse_ptr, out_ptr, sinks_ptr, out_lse_ptr, num_lines,
    NUM_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_L: tl.constexpr,
    LOG2_E: tl.constexpr,
):  # fmt: skip
    """Some lines, each a token and a head."""
    line = (tl.program_id(0) * BLOCK_L + tl.arange(0, BLOCK_L)).to(tl.int64)
    d = tl.arange(0, BLOCK_D)
    inside = line < num_lines
    own_lse = tl.load(own_lse_ptr + line, mask=inside, other=float("-inf"))
    prefix_lse = tl.load(prefix_lse_ptr + line, mask=inside, other=float("-inf"))
    top = tl.maximum(own_lse, prefix_lse)
    if sinks_ptr is not None:
        sink = tl.load(sinks_ptr + line % NUM_HEADS).to(tl.float32) * LOG2_E
        top = tl.maximum(top, sink)
    finite_top = tl.where(top == float("-inf"), 0.0, top)
    own_weight = tl.exp2(own_lse - finite_top)
    prefix_weight = tl.exp2(prefix_lse - finite_top)
    total = own_weight + prefix_weight
    if sinks_ptr is not None:
        total += tl.exp2(sink - finite_top)
    seen = total > 0
    total = tl.where(seen, total, 1.0)
    if out_lse_ptr is not None:
        tl.store(out_lse_ptr + line, tl.where(seen, finite_top + tl.log2(total), float("-inf")), mask=inside)
    offsets = (line * HEAD_DIM)[:, None] + d[None, :]
    there = inside[:, None] & (d < HEAD_DIM)[None, :]
    # A part that saw nothing may never have been written.
    own = tl.load(own_ptr + offsets, mask=there & (own_lse > float("-inf"))[:, None], other=0.0).to(tl.float32)
    prefix = tl.load(prefix_ptr + offsets, mask=there & (prefix_lse > float("-inf"))[:, None], other=0.0).to(tl.float32)
    out = own * (own_weight / total)[:, None] + prefix * (prefix_weight / total)[:, None]
    tl.store(out_ptr + offsets, out.to(out_ptr.dtype.element_ty), mask=there)


def merge_parts(
    own: torch.Tensor,
    own_lse: torch.Tensor,
    prefix: torch.Tensor,
    prefix_lse: torch.Tensor,
    out: torch.Tensor,
    sinks: torch.Tensor | None = None,
    out_lse: torch.Tensor | None = None,
) -> None:
    """As `merge_parts_reference`. All tensors are contiguous."""
    num_lines, num_heads = own_lse.numel(), own_lse.shape[1]
    head_dim = out.shape[1] // num_heads
    block_d = triton.next_power_of_2(head_dim)
    lines = max(1, TILE // block_d)
    _merge_parts_kernel[(triton.cdiv(num_lines, lines),)](
        own, own_lse, prefix, prefix_lse, out, sinks, out_lse, num_lines,
        NUM_HEADS=num_heads, HEAD_DIM=head_dim, BLOCK_D=block_d, BLOCK_L=lines, LOG2_E=LOG2_E, num_warps=WARPS,
    )  # fmt: skip
