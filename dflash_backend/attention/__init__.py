"""Paged attention: one interface, several backends, a declared capability for each."""

from dflash_backend.attention.interface import (
    FP8,
    AttentionBackend,
    AttentionBatch,
    AttentionMetadata,
    AttentionPattern,
    Capabilities,
    DeviceLengths,
    KVLayer,
    Requirements,
    SharedPrefixes,
)
from dflash_backend.attention.selection import BackendError, check_installed, select_backend

__all__ = [
    "FP8",
    "AttentionBackend",
    "AttentionBatch",
    "AttentionMetadata",
    "AttentionPattern",
    "BackendError",
    "Capabilities",
    "DeviceLengths",
    "KVLayer",
    "Requirements",
    "SharedPrefixes",
    "check_installed",
    "select_backend",
]
