"""One tier of KV below the device, or another server: where the records of each group of layers are."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from dflash_backend.core.kv.record_slots import RecordSlots
from dflash_backend.core.scheduler_config import TierConfig


@dataclass
class KVTier:
    """name: as the mover knows it. groups: by their numbers in records."""

    name: str
    groups: Sequence[RecordSlots]

    @classmethod
    def of(cls, config: TierConfig) -> KVTier:
        """A tier that takes what leaves the device: host memory, or a disk."""
        return cls(config.name, [RecordSlots(num_slots) for num_slots in config.num_slots])

    @property
    def num_records(self) -> int:
        """Records that can be found."""
        return sum(map(len, self.groups))
