"""What can be wrong with a training run, in a sentence for who started it."""

from __future__ import annotations


class TrainingError(Exception):
    """A run cannot start or go on. The message says what to change; what was made so far is kept."""


def cannot_write(path: object, error: OSError) -> TrainingError:
    """The error for a file that takes no more."""
    return TrainingError(
        f"{path} cannot be written: {error.strerror or error}; make room and run the same command again, which goes on "
        "from what is there"
    )
