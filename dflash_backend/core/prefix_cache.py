"""Names for the contents of KV blocks, so that a prompt finds the blocks of an earlier one that began alike.

The digest of a block covers every token from the start of the sequence to the block's end: SHA-256 over the digest of
the block before it and the block's token ids. The chain starts from a root that depends on the request's `cache_salt`,
so requests with different salts never share a block (invariant ISOLATE). SHA-256 because a collision would hand one
client another client's context. Only full blocks have digests. Called by `KVManager`.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Sequence

from dflash_backend.core.block_pool import BlockPool

_ROOT_TAG = b"dflash prefix cache root\0"
_TOKEN_BYTES = 8  # wide enough that no two token ids look alike


def root_digest(cache_salt: str) -> bytes:
    """Where the chain of a request with this salt starts; 32 bytes."""
    return hashlib.sha256(_ROOT_TAG + cache_salt.encode("utf-8", "surrogatepass")).digest()


def pack_tokens(token_ids: Sequence[int]) -> bytes:
    """The bytes that a digest is taken of; all blocks of a prompt are packed at once."""
    return array("q", token_ids).tobytes()


def block_digest(parent: bytes, packed: bytes) -> bytes:
    """The digest of a full block, its tokens packed, that follows the one with digest `parent`; 32 bytes."""
    return hashlib.sha256(parent + packed).digest()


class DigestChain:
    """The digests of one request's full blocks, computed once each as its tokens become known."""

    __slots__ = ("_block_size", "_digests", "_last")

    def __init__(self, cache_salt: str, block_size: int) -> None:
        self._last = root_digest(cache_salt)
        self._block_size = block_size
        self._digests: list[bytes] = []

    def first(self, num_blocks: int, token_ids: Sequence[int]) -> Sequence[bytes]:
        """The digests of at least the first `num_blocks` blocks of `token_ids`, which are full.

        `token_ids` only ever grows between calls, so what was computed stays right.
        """
        known = len(self._digests)
        if known < num_blocks:
            packed = pack_tokens(token_ids[known * self._block_size : num_blocks * self._block_size])
            size = self._block_size * _TOKEN_BYTES
            for start in range(0, len(packed), size):
                self._last = block_digest(self._last, packed[start : start + size])
                self._digests.append(self._last)
        return self._digests


def longest_cached_prefix(pool: BlockPool, chain: DigestChain, token_ids: Sequence[int], num_blocks: int) -> list[int]:
    """Ids of the cached blocks that hold the longest prefix of `token_ids`, at most its first `num_blocks` blocks.

    Nothing is dropped from the end of the hit: a cached block has the drafter's context K/V too (PUBLISH, TOGETHER), so
    DFlash can go on from its very last position. (EAGLE could not: it needs the next token at each position.)
    """
    return pool.find_chain(chain.first(num_blocks, token_ids), num_blocks)
