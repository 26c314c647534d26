"""The quantised types of GGUF: how many numbers a block of each has and in how many bytes, and what they are."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from dflash_backend.checkpoints.spec import CheckpointError

INSTALL = "GGUF needs the package gguf, which is not installed: pip install gguf"
BLOCKS: Mapping[str, tuple[int, int]] = {
    "Q4_0": (32, 18),
    "Q4_1": (32, 20),
    "Q5_0": (32, 22),
    "Q5_1": (32, 24),
    "Q8_0": (32, 34),
    "Q2_K": (256, 84),
    "Q3_K": (256, 110),
    "Q4_K": (256, 144),
    "Q5_K": (256, 176),
    "Q6_K": (256, 210),
    "IQ4_NL": (32, 18),
    "IQ4_XS": (256, 136),
    "MXFP4": (32, 17),
}
"""Types whose blocks are kept as they are, with numbers and bytes of each; others become numbers as a file is read."""

BITS = {"Q4_0": 5.0, "Q4_1": 5.0, "Q8_0": 8.5, "Q4_K": 6.0, "Q5_K": 12.0, "Q6_K": 12.0}
"""Bits of a number of the types that a CPU multiplies by as codes (`cpu_ops.BLOCKS`), in its memory."""

Array = np.ndarray[Any, Any]


def numbers_of(rows: Array, kind: str) -> Array:
    """Whole blocks, uint8 `[num_rows, num_bytes]`, of the type `kind` as their numbers, float32 `[num_rows, numbers]`.
    Raises `NotImplementedError` for a type without a dequantiser, and `CheckpointError` without the package."""
    try:
        from gguf import GGMLQuantizationType
        from gguf.quants import dequantize
    except ImportError:
        raise CheckpointError(INSTALL) from None
    with np.errstate(all="ignore"):  # what is no number is found, and named, as it is loaded
        # As one row: the library takes 16 at a time, however short they are.
        flat = dequantize(rows.reshape(1, -1), GGMLQuantizationType[kind]).astype("<f4", "C", copy=False)
    numbers: Array = flat.reshape(len(rows), -1)
    return numbers
