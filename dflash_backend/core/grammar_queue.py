"""Requests whose grammars are being compiled: they are queued when that is done, so no step waits for it."""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import FIRST_COMPLETED, Future, wait
from typing import Any, Protocol

from dflash_backend.core.admission import RequestError
from dflash_backend.core.request import Request
from dflash_backend.core.tenants import FairQueue
from dflash_backend.messages import GrammarStats, StructuredOutputs

# How long a step may wait for a grammar when there is nothing else to do.
IDLE_WAIT_S = 0.005
# How long a request waits for its grammar, in seconds. The first one also waits for the tokenizer to be read.
TIME_LIMIT_S = 30.0


class GrammarCompiler(Protocol):
    """What the core needs of `structured_output.compiler.GrammarCompiler`."""

    @property
    def num_compiled(self) -> int: ...
    @property
    def compile_seconds(self) -> float: ...
    def submit(self, grammar: StructuredOutputs, eos_token_ids: tuple[int, ...], tenant: str) -> Future[Any]:
        """Begin to compile at the tenant's turn; the future's error is a `ValueError` whose message completes "the
        grammar ...", or an `OSError` of such a message where the grammar is not to blame."""
        ...


class GrammarQueue:
    """Requests that wait for their grammars, by id. A request in here keeps its compiled grammar from being dropped."""

    def __init__(self, compiler: GrammarCompiler | None, queue: FairQueue) -> None:
        """queue: counts the requests here too."""
        self._compiler = compiler
        self._queue = queue
        self.waiting: dict[str, tuple[Request, Future[Any], float]] = {}
        self.num_requests = 0
        self.num_mask_steps = 0
        self.mask_seconds = 0.0

    def add(self, request: Request) -> bool:
        """Begin to compile a request's grammar; False when there is nothing to wait for. Raises `RequestError`."""
        grammar = request.sampling.structured_outputs
        if grammar is None:
            return False
        if self._compiler is None:
            raise RequestError("INVALID_ARGUMENT", f"this engine has no grammars for '{grammar.parameter}'")
        future = self._compiler.submit(grammar, request.eos_token_ids, request.sampling.tenant)
        self.num_requests += 1
        if future.done():
            if (error := future.exception()) is not None:
                raise _refusal(request, error)
            request.grammar = future.result()
            return False
        self.waiting[request.request_id] = request, future, time.monotonic() + TIME_LIMIT_S
        self._queue.set_aside(request)
        return True

    def observe_masks(self, seconds: float) -> None:
        """Count a step whose masks took the host this long; 0 for a step without."""
        self.num_mask_steps += seconds > 0
        self.mask_seconds += seconds

    def stats(self) -> GrammarStats:
        """Counts since the start."""
        compiler = self._compiler
        return GrammarStats(
            self.num_requests,
            0 if compiler is None else compiler.num_compiled,
            0.0 if compiler is None else compiler.compile_seconds,
            self.num_mask_steps,
            self.mask_seconds,
        )

    def remove(self, request: Request) -> bool:
        """Take a request out, if it is here."""
        entry = self.waiting.get(request.request_id)
        if entry is None or entry[0] is not request:
            return False
        entry[1].cancel()
        self._take_out(request)
        return True

    def _take_out(self, request: Request) -> None:
        del self.waiting[request.request_id]
        self._queue.take_back(request)

    def pop_done(self, idle: bool) -> Iterator[tuple[Request, RequestError | None]]:
        """The requests whose grammars are compiled, with an error where they cannot be followed. `idle`: nothing else
        is to be done, so it may wait a moment for the first."""
        if not self.waiting:
            return
        if idle:
            wait([future for _, future, _ in self.waiting.values()], IDLE_WAIT_S, FIRST_COMPLETED)
        for request, future, deadline in list(self.waiting.values()):
            if future.done():
                self._take_out(request)
                error = future.exception()
                if error is None:
                    request.grammar = future.result()
                yield request, None if error is None else _refusal(request, error)
            elif time.monotonic() > deadline:
                waited_only = future.cancel()
                self.remove(request)
                yield request, _late(request, waited_only)


def _late(request: Request, waited_only: bool) -> RequestError:
    """The error of a grammar that is not compiled in time, for which it is not to blame: one that takes too much is
    refused for that. `waited_only`: others were compiled, and its turn did not come."""
    reason = f"has waited for {TIME_LIMIT_S:g} s while others were compiled" if waited_only else "is not compiled yet"
    return RequestError("UNAVAILABLE", f"{_named(request)} {reason}; try again later")


def _refusal(request: Request, error: BaseException) -> RequestError:
    if isinstance(error, ValueError):
        return RequestError("INVALID_ARGUMENT", f"{_named(request)} {error}")
    if isinstance(error, OSError):
        return RequestError("UNAVAILABLE", f"{_named(request)} {error}")
    return RequestError("INTERNAL", f"{_named(request)} could not be compiled ({type(error).__name__}: {error})")


def _named(request: Request) -> str:
    """The grammar by the parameter that its client sent."""
    grammar = request.sampling.structured_outputs
    assert grammar is not None
    return f"the grammar in '{grammar.parameter}'"
