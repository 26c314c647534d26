"""The lexers of one grammar's answers. llguidance's copies of a matcher share one lexer: states that any answer
explores stay in it, up to `bounds.MAX_STATES`. So a lexer that many answers have used is replaced for those to come.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

from llguidance import LLMatcher

# Tokens of answers after which a lexer is replaced, and what each is taken to add to it: llguidance does not say.
WORN_TOKENS = 8192
BYTES_PER_TOKEN = 1 << 10
# Compiling again and again takes at most this part of one processor's time.
MAX_LOAD = 1 / 20
# A grammar that takes longer to compile, in seconds, is not compiled within a step.
IN_STEP_S = 0.5
# How llguidance's error says that a lexer has no space left.
FULL = "too many states"


class Lexer:
    """Where answers begin. num_tokens: those that all answers together have taken since."""

    def __init__(self, start: LLMatcher) -> None:
        self.start = start
        self.num_tokens = 0

    @property
    def num_bytes(self) -> int:
        """What its answers are taken to have added."""
        return self.num_tokens * BYTES_PER_TOKEN


class Lexers:
    """The lexer that new answers of a grammar begin with. Any thread may use it."""

    def __init__(
        self, start: LLMatcher, compile_again: Callable[[], LLMatcher], seconds: float, submit: Callable[..., Any]
    ) -> None:
        """start: the first matcher, which took `seconds` to compile. compile_again: makes another one. submit: runs a
        call beside the steps."""
        self.latest = Lexer(start)
        self._compile_again, self._seconds, self._submit = compile_again, seconds, submit
        self._lock = threading.Lock()
        self._is_pending = False
        self._replaced_at = time.monotonic()

    def begin(self) -> Lexer:
        """That of an answer that begins now. One that is worn gets a successor for later answers."""
        lexer = self.latest
        if lexer.num_tokens >= WORN_TOKENS and time.monotonic() - self._replaced_at >= self._seconds / MAX_LOAD:
            self._replace_later(lexer)
        return lexer

    def successor(self, lexer: Lexer) -> Lexer | None:
        """The lexer after one that is full; None: it is being compiled, which takes too long for a step."""
        if self.latest is lexer:
            if self._seconds > IN_STEP_S:
                self._replace_later(lexer)
                return None
            self._replace(lexer)
        return self.latest

    def _replace_later(self, lexer: Lexer) -> None:
        with self._lock:
            if self._is_pending:
                return
            self._is_pending = True
        self._submit(lambda: self._replace(lexer))

    def _replace(self, lexer: Lexer) -> None:
        try:
            began = time.monotonic()
            start = self._compile_again()
            with self._lock:
                self._seconds = time.monotonic() - began
                if self.latest is lexer:
                    self.latest, self._replaced_at = Lexer(start), time.monotonic()
        finally:
            self._is_pending = False
