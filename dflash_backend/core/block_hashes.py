"""Hashes of KV blocks' contents, by which a prompt finds the blocks of an earlier one with the same beginning.

A block's hash covers every token from the start of the sequence to the block's end: SHA-256 over the hash of the block
before it and the block's token ids. With a drafter whose context KV at a position depends on the token after it
(EAGLE), it covers the token after the block as well: else the KV of the block's last position could be that of another
text. The first hash also covers the request's `cache_salt` and its LoRA adapter, so requests that differ in either
never share a block (ISOLATE). SHA-256, because a collision would hand one client another client's context. Only full
blocks have hashes.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Sequence

_ROOT_TAG = b"dflash prefix cache root\0"
_ADAPTER_TAG = b"dflash prefix cache root of an adapter\0"
_TOKEN_BYTES = 8  # wide enough that no two token ids look alike


def root_hash(cache_salt: str, lora_name: str = "") -> bytes:
    """The parent of a request's first block; 32 bytes."""
    tag = _ROOT_TAG
    if lora_name:
        # Of one length, so that no name and salt look like others.
        tag = _ADAPTER_TAG + hashlib.sha256(lora_name.encode()).digest()
    return hashlib.sha256(tag + cache_salt.encode("utf-8", "surrogatepass")).digest()


def pack_tokens(token_ids: Sequence[int]) -> bytes:
    """The bytes to hash; all blocks of a prompt are packed at once."""
    return array("q", token_ids).tobytes()


def hash_block(parent: bytes, packed: bytes) -> bytes:
    """The hash of a full block, its tokens packed, after the block with hash `parent`; 32 bytes."""
    return hashlib.sha256(parent + packed).digest()


class BlockHashes:
    """The hashes of one request's full blocks, computed once each as its tokens become known."""

    __slots__ = ("_block_size", "_hashes", "_last", "_num_next")

    def __init__(self, cache_salt: str, block_size: int, reads_next_tokens: bool = False, lora_name: str = "") -> None:
        """reads_next_tokens: whether a block's hash covers the token after it."""
        self._last = root_hash(cache_salt, lora_name)
        self._block_size = block_size
        self._num_next = int(reads_next_tokens)
        self._hashes: list[bytes] = []

    def first(self, num_blocks: int, token_ids: Sequence[int]) -> Sequence[bytes]:
        """The hashes of at least the first `num_blocks` blocks of `token_ids`, which are full, with a token after the
        last of them where hashes cover it.

        `token_ids` only ever grows between calls, so computed hashes stay right.
        """
        known = len(self._hashes)
        if known < num_blocks:
            end = num_blocks * self._block_size + self._num_next
            packed = pack_tokens(token_ids[known * self._block_size : end])
            size, next_bytes = self._block_size * _TOKEN_BYTES, self._num_next * _TOKEN_BYTES
            for start in range(0, len(packed) - next_bytes, size):
                self._last = hash_block(self._last, packed[start : start + size + next_bytes])
                self._hashes.append(self._last)
        return self._hashes
