"""What entered and left the prefix cache since it was last asked for, in order: for a router of several engines."""

from __future__ import annotations

from collections.abc import Sequence

from dflash_backend.messages import DEVICE_MEDIUM, BlocksRemoved, BlocksStored, KVEvent


class KVEventLog:
    """Gathers events between two steps' outputs. `with_tokens`: events name the tokens of blocks too."""

    def __init__(self, with_tokens: bool = False) -> None:
        self.with_tokens = with_tokens
        self._events: list[KVEvent] = []

    def stored(self, block_hash: bytes, parent: bytes | None, token_ids: Sequence[int]) -> None:
        """A block was published. parent: the hash of the block before it in its text, None for the first. token_ids:
        the block's; they are ignored unless events name them."""
        own = list(token_ids) if self.with_tokens else []
        last = self._events[-1] if self._events else None
        if isinstance(last, BlocksStored) and last.medium == DEVICE_MEDIUM and last.block_hashes[-1] == parent:
            last.block_hashes.append(block_hash)
            last.token_ids.extend(own)
        else:
            self._events.append(BlocksStored([block_hash], parent, own))

    def removed(self, block_hash: bytes) -> None:
        """A block was evicted."""
        self.moved(block_hash, DEVICE_MEDIUM, stored=False)

    def moved(self, block_hash: bytes, medium: str, stored: bool) -> None:
        """A block came to a tier, or left it; medium: what events call the tier."""
        kind = BlocksStored if stored else BlocksRemoved
        last = self._events[-1] if self._events else None
        if isinstance(last, kind) and last.medium == medium:
            last.block_hashes.append(block_hash)
        else:
            self._events.append(kind([block_hash], medium=medium))

    def take(self) -> list[KVEvent]:
        """The events since the last call."""
        events, self._events = self._events, []
        return events
