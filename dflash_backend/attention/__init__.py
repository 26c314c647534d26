"""Paged attention: one interface, several backends, a declared capability for each."""

from dflash_backend.attention.interface import (
    AttentionBackend,
    AttentionMetadata,
    AttentionPattern,
    Capabilities,
    DeviceRows,
    KVLayer,
    Requirements,
    RowLayout,
)
from dflash_backend.attention.selection import BackendError, check_installed, select_backend

__all__ = [
    "AttentionBackend",
    "AttentionMetadata",
    "AttentionPattern",
    "BackendError",
    "Capabilities",
    "DeviceRows",
    "KVLayer",
    "Requirements",
    "RowLayout",
    "check_installed",
    "select_backend",
]
