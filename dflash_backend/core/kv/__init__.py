"""KV blocks: which request holds which, the prefix cache, and rows that share a prefix. Others import from here."""

from dflash_backend.core.kv.manager import KVManager, share_prefixes
from dflash_backend.core.kv.tiers import KVTiers

__all__ = ["KVManager", "KVTiers", "share_prefixes"]
