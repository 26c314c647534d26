"""What it costs to read KV that rows share once for all of them, and what it saves: arithmetic of bytes."""

from __future__ import annotations

from dataclasses import dataclass

from dflash_kernels.paged_attention_launch import HeadShape, max_block_m

# A partial result and its logarithm are float32. There are two of each for a query and head, written and read once.
PARTIAL_ITEMSIZE, NUM_ACCESSES = 4, 4


@dataclass(frozen=True)
class CascadeCost:
    """queries_per_tile: queries of a group that one program attends, and so reads the shared KV for.
    positions_per_query: how many positions of KV are as many bytes as the partial results of a query, which are written
    and read besides."""

    queries_per_tile: int
    positions_per_query: float

    @classmethod
    def of(
        cls, num_heads: int, num_kv_heads: int, head_dim: int, itemsize: int, kv_itemsize: int | None = None
    ) -> CascadeCost:
        """For layers with these heads. itemsize, kv_itemsize: bytes of an element of queries, and of KV; None: the
        same."""
        shape = HeadShape(num_heads, num_kv_heads, head_dim, itemsize)
        partial = num_heads * head_dim * PARTIAL_ITEMSIZE * NUM_ACCESSES
        position = 2 * num_kv_heads * head_dim * (kv_itemsize or itemsize)
        return cls(max(1, max_block_m(shape) // shape.group), partial / position)
