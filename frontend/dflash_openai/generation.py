"""Runs the completions of one HTTP request, and ends them when its client leaves."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.types import Receive

from dflash_client import Delta, GenerationResult
from dflash_client.errors import Cancelled, ClientError, Unavailable
from dflash_openai.bodies import in_thread
from dflash_openai.budget import BYTES_OF_TOKEN, ResponseBudget, check_sent, comes_in_pieces
from dflash_openai.errors import ApiError, ClientGone, defect, from_client_error
from dflash_openai.generation_record import GenerationRecord
from dflash_openai.middleware.key_limits import charge_prompt, tenant_of
from dflash_openai.triton_pool import PooledRequest

# A delta, and the number of the prompt that it belongs to.
Item = tuple[int, Delta]


class Generation:
    """One request to a server for each prompt. `aclose` in the end, however it ends."""

    def __init__(
        self,
        request: Request,
        prompts: Sequence[Sequence[int]],
        sampling: Mapping[str, Any],
        max_tokens: Sequence[int],
        names: Mapping[str, str],
        stream: bool,
    ) -> None:
        """`request` is one whose body was read: what comes next is its client's leaving. `max_tokens` has an entry for
        each prompt. `names` has what the client calls a parameter of the model, where it is not the same. Raises
        `ApiError` where the request's key does not allow it."""
        frontend = request.app.state.frontend
        self._names, self.stream, self.ping_s = names, stream, frontend.config.ping_interval_s
        num_prompt_tokens = sum(map(len, prompts))
        charge_prompt(request, num_prompt_tokens)
        if (tenant := tenant_of(request, sampling.get("tenant"))) is not None:
            sampling = {**sampling, "tenant": tenant}
        model = frontend.model()
        check_sent(len(prompts), len(msgspec.json.encode(sampling)) if len(prompts) > 1 else 0)
        self._budget = ResponseBudget(model.description.max_response_mb)
        self._record = GenerationRecord(model.names[0], {**sampling, "max_tokens": max(max_tokens)}, num_prompt_tokens)
        self._state = request.state
        self._state.generation = self._record
        headers: dict[str, str] | None = getattr(request.state, "trace_headers", None)
        self._requests = [
            frontend.pool.request(
                stream or comes_in_pieces(len(token_ids), limit, sampling),
                token_ids,
                {**sampling, "max_tokens": limit},
                headers,
            )
            for token_ids, limit in zip(prompts, max_tokens, strict=True)
        ]
        self._watcher = asyncio.create_task(self._watch(request.receive))
        self._deltas = self._recorded()
        self._first: asyncio.Future[Item | None] | None = None
        self._stopped = self._left = False
        self._running = frontend.running
        self._running.add(self)

    async def _watch(self, receive: Receive) -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        self._left = True
        self._cancel()

    def _cancel(self) -> None:
        for request in self._requests:
            request.cancel()

    async def _recorded(self) -> AsyncGenerator[Item, None]:
        if len(self._requests) == 1:
            async with aclosing(self._requests[0].deltas()) as deltas:
                async for delta in deltas:
                    self._record.add(delta)
                    yield 0, delta
            return
        async with aclosing(_merged(self._requests)) as items:
            async for item in items:
                self._record.add(item[1])
                yield item

    async def begin(self, wait_s: float | None = None) -> bool:
        """Wait for the first delta, for `wait_s` at most: errors that are found until then have a status of their own.
        Whether it is there. Raises as `results`."""
        self._first = asyncio.ensure_future(anext(self._deltas, None))
        done, _ = await asyncio.wait([self._first], timeout=wait_s)
        error = self._first.exception() if done else None
        if isinstance(error, ClientError):
            raise self._translated(error) from None
        if error is not None:
            raise error
        return bool(done)

    async def items(self) -> AsyncGenerator[Item, None]:
        """The deltas of a generation that has begun. Raises as `results`."""
        assert self._first is not None, "begin comes first"
        try:
            if (first := await self._first) is not None:
                yield first
            async for item in self._deltas:
                yield item
        except ClientError as error:
            translated = self._translated(error)
            if isinstance(translated, ApiError):
                self._note_failure(translated)
            raise translated from None

    def defect(self, error: Exception) -> ApiError:
        """What an error that nothing expects is to the client of a stream that has begun."""
        found = defect("a stream", error)
        self._record.error = found.code
        self._note_failure(found)
        return found

    def _note_failure(self, error: ApiError) -> None:
        """For the log and the metrics: another status was sent before."""
        self._state.ended_by = f"failed: {self._record.error}"
        self._state.failed_with = error.status

    async def results(self) -> list[GenerationResult]:
        """The finished completions of each prompt. Raises `ApiError`, or `ClientGone` when the client has left."""
        deltas: list[list[Delta]] = [[] for _ in self._requests]
        try:
            async for prompt, delta in self._deltas:
                self._budget.add(delta)
                deltas[prompt].append(delta)
        except ClientError as error:
            raise self._translated(error) from None
        return await in_thread(self.num_bytes, lambda: [GenerationResult.from_deltas(each) for each in deltas])

    @property
    def num_bytes(self) -> int:
        """About how much an answer with `results` and the prompts holds."""
        return self._budget.num_bytes + BYTES_OF_TOKEN * self._record.num_prompt_tokens

    def _translated(self, error: ClientError) -> Exception:
        if isinstance(error, Cancelled) and self._left and not self._stopped:
            self._record.error = "cancelled"
            # For the log: some servers take the end of a response also where its client is gone.
            self._state.ended_by = "client left"
            return ClientGone()
        if self._stopped:
            error = Unavailable("the server shut down while it worked on this request")
        elif isinstance(error, Cancelled):
            # Such as by a proxy before it.
            error = Unavailable(f"the server cancelled this request: {error}")
        translated = from_client_error(error, self._names)
        self._record.error = translated.code or str(translated.status)
        return translated

    def stop(self) -> None:
        """End it with an error that its client gets, unless it ends before."""
        self._stopped = True
        self._cancel()

    async def aclose(self) -> None:
        """Cancel what still runs."""
        self._running.discard(self)
        self._watcher.cancel()
        self._cancel()
        if self._first is not None and not self._first.done():
            self._first.cancel()
            await asyncio.wait([self._first])
        await self._deltas.aclose()


async def _merged(requests: Sequence[PooledRequest]) -> AsyncGenerator[Item, None]:
    """The deltas of all requests, as they come."""
    queue: asyncio.Queue[Item | Exception | None] = asyncio.Queue(maxsize=len(requests))

    async def read(number: int, request: PooledRequest) -> None:
        try:
            async with aclosing(request.deltas()) as deltas:
                async for delta in deltas:
                    await queue.put((number, delta))
        except Exception as error:  # noqa: BLE001 - what waits for the end of all would wait for ever
            await queue.put(error)
            return
        await queue.put(None)

    readers: list[asyncio.Task[None]] = []
    try:
        for number, request in enumerate(requests):
            readers.append(asyncio.create_task(read(number, request)))
            # Others get on between two of them.
            await asyncio.sleep(0)
        running = len(readers)
        while running:
            item = await queue.get()
            if isinstance(item, Exception):
                raise item
            if item is None:
                running -= 1
            else:
                yield item
    finally:
        for request, reader in zip(requests, readers, strict=False):
            request.cancel()
            reader.cancel()
        await asyncio.gather(*readers, return_exceptions=True)
