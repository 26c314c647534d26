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


def root_digest(cache_salt: str) -> bytes:
    """Where the chain of a request with this salt starts; 32 bytes."""
    return hashlib.sha256(_ROOT_TAG + cache_salt.encode("utf-8", "surrogatepass")).digest()


def block_digest(parent: bytes, token_ids: Sequence[int]) -> bytes:
    """The digest of a full block that follows the one with digest `parent`; 32 bytes."""
    return hashlib.sha256(parent + array("q", token_ids).tobytes()).digest()


class DigestChain:
    """The digests of one request's full blocks, computed once each as its tokens become known."""

    __slots__ = ("_block_size", "_digests", "_root")

    def __init__(self, cache_salt: str, block_size: int) -> None:
        self._root = root_digest(cache_salt)
        self._block_size = block_size
        self._digests: list[bytes] = []

    def first(self, num_blocks: int, token_ids: Sequence[int]) -> Sequence[bytes]:
        """The digests of at least the first `num_blocks` blocks of `token_ids`, which are full.

        `token_ids` only ever grows between calls, so what was computed stays right.
        """
        for index in range(len(self._digests), num_blocks):
            start = index * self._block_size
            parent = self._digests[-1] if self._digests else self._root
            self._digests.append(block_digest(parent, token_ids[start : start + self._block_size]))
        return self._digests


def longest_cached_prefix(pool: BlockPool, chain: DigestChain, token_ids: Sequence[int], num_blocks: int) -> list[int]:
    """Ids of the cached blocks that hold the longest prefix of `token_ids`, at most its first `num_blocks` blocks.

    Nothing is dropped from the end of the hit: a cached block has the drafter's context K/V too (PUBLISH, TOGETHER), so
    DFlash can go on from its very last position. (EAGLE could not: it needs the next token at each position.)
    """
    hit: list[int] = []
    digests = chain.first(num_blocks, token_ids)
    for index in range(num_blocks):
        block_id = pool.lookup(digests[index])
        if block_id is None:
            break
        hit.append(block_id)
    return hit
