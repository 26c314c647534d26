"""What a step asks of the other processes that share its target, beside the target's own passes."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext


class RankLostError(Exception):
    """A rank has ended or hangs, or a pass failed on one of them, after which they are out of step. No step can run any
    more: the engine must start anew."""


class Peers:
    """As of a target that one process has alone: there is no other."""

    def check(self) -> None:
        """Raises `RankLostError` when a process is lost, so that nothing a step gave may be used."""

    def every_variant(self) -> AbstractContextManager[None]:
        """In this block passes run every kernel that they may ever need, as of `AttentionBackend.every_variant`."""
        return nullcontext()

    def capturing(self) -> AbstractContextManager[Callable[[], None]]:
        """In this block passes are captured in a graph, here and there. It gives what must be called before each replay
        of the graph here, so that theirs run too."""
        return nullcontext(lambda: None)

    def least_free(self, num_bytes: int) -> int:
        """The least free memory of all processes' devices; `num_bytes` are free here."""
        return num_bytes


ALONE = Peers()
