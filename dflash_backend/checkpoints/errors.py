"""The error of everything that can be wrong with a checkpoint."""

from __future__ import annotations


class CheckpointError(ValueError):
    """A checkpoint cannot be used. The message names the file, the field or tensor, and what is expected."""
