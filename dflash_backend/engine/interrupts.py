"""Ctrl-C between steps: one that came within a step would leave the engine with half of its counts."""

from __future__ import annotations

import signal
import threading
from types import FrameType, TracebackType


class HeldInterrupt:
    """A context in which the first Ctrl-C waits for its end, where it raises `KeyboardInterrupt`. A second one is
    raised at once.

    Nothing is held back outside the main thread, which alone gets signals, nor where the program handles Ctrl-C itself.
    """

    def __init__(self) -> None:
        self._holds = self._came = False

    def __enter__(self) -> None:
        self._came = False
        self._holds = (
            threading.current_thread() is threading.main_thread()
            and signal.getsignal(signal.SIGINT) is signal.default_int_handler
        )
        if self._holds:
            signal.signal(signal.SIGINT, self._note)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if not self._holds:
            return
        signal.signal(signal.SIGINT, signal.default_int_handler)
        if self._came and error is None:
            raise KeyboardInterrupt

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self._came:
            signal.signal(signal.SIGINT, signal.default_int_handler)
            raise KeyboardInterrupt
        self._came = True
