"""How the prefixes that rows of a step share are sent to the device: as one vector of numbers."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from dflash_backend.core.plan import MAX_SHARED_PREFIXES, SharedPrefix
from dflash_kernels.shared_prefix import SharedRows

_NUM_GROUP_NUMBERS = 3 * MAX_SHARED_PREFIXES


def num_shared_numbers(num_rows: int) -> int:
    """Numbers of `shared_numbers`."""
    return _NUM_GROUP_NUMBERS + num_rows


def shared_numbers(shared: Sequence[SharedPrefix], num_rows: int, block_size: int) -> np.ndarray:
    """What `shared_rows` reads, int32, for a step of `num_rows` rows, padding rows at the end included."""
    numbers = np.zeros(num_shared_numbers(num_rows), dtype=np.int32)
    groups, of_row = numbers[:_NUM_GROUP_NUMBERS].reshape(3, -1), numbers[_NUM_GROUP_NUMBERS:]
    for i, prefix in enumerate(shared):
        positions = prefix.num_blocks * block_size
        groups[:, i] = prefix.first_row, prefix.num_rows, positions
        of_row[prefix.first_row : prefix.first_row + prefix.num_rows] = positions
    return numbers


def shared_rows(numbers: torch.Tensor) -> SharedRows:
    """Views of `numbers`: first row, rows and positions of each group, then of each row the positions that it
    shares."""
    leader, num_rows, positions = numbers[:_NUM_GROUP_NUMBERS].view(3, -1).unbind(0)
    return SharedRows(leader, num_rows, positions, numbers[_NUM_GROUP_NUMBERS:])
