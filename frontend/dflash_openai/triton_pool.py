"""The Triton servers behind a front end: which of them takes a request, and what their model is."""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import time
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from typing import Any

import msgspec

from dflash_client import AsyncDFlashClient, AsyncStream, Delta
from dflash_client.errors import (
    Cancelled,
    ClientError,
    ConnectionFailed,
    ConnectionLost,
    InvalidArgument,
    QueueFull,
    Unavailable,
)
from dflash_openai.config import FrontendConfig
from dflash_openai.notices import log_once

# Shorter prompts are computed where they are decoded: two requests cost more than they save.
MIN_PREFILL_TOKENS = 64
# A prompt that takes longer than this, and this more for each of its tokens, may hang: the decode server computes it.
MAX_PREFILL_S, MAX_TOKEN_S = 60.0, 0.01
# A server that takes no requests, as one that stops, is among the last for so long, unless it takes one before.
REFUSED_S = 10.0
# What a prefill server must know of a request beside its prompt.
OF_PROMPT = ("cache_salt", "lora_name", "tenant", "priority")
_LOG = logging.getLogger("dflash_openai")


class ModelDescription(msgspec.Struct, frozen=True):
    """What the model says of itself: lengths in tokens, and where its tokenizer is."""

    max_model_len: int
    vocab_size: int
    num_speculative_tokens: int
    max_n: int
    tokenizer: str
    target_model: str = ""
    target_revision: str = ""
    trust_messages: bool = False
    structured_outputs: bool = False
    require_cache_salt: bool = False
    # What the responses to one request may hold, in 10^6 bytes, and the tokens that may wait of one tenant.
    max_response_mb: float = 64.0
    max_queue_tokens: int = 2_000_000
    sampling_defaults: dict[str, Any] = {}
    description: str = ""
    # LoRA adapters, which clients name as the model.
    lora_names: tuple[str, ...] = ()


class TritonPool:
    """Clients of the servers of one model. Each request goes to the server with the fewest requests of this front end;
    where that one does not take it, to the next. Servers that have just refused one are behind the others: one that
    stops has the fewest. Servers that say nothing, as one that hangs or whose machine is gone, are the last: what is
    sent there waits."""

    def __init__(self, config: FrontendConfig) -> None:
        """Nothing is connected yet. In the event loop that it serves."""
        files = dataclasses.asdict(config.triton_tls)
        self._clients, self._prefill_clients = (
            [
                AsyncDFlashClient(url, "grpc", config.model_name, config.request_timeout_s, share_deltas=True, **files)
                for url in urls
            ]
            for urls in (config.triton_urls, config.prefill_urls)
        )
        self._num_running = dict.fromkeys([*self._clients, *self._prefill_clients], 0)
        self._silent: frozenset[AsyncDFlashClient] = frozenset()
        # Of servers that took no request: until when they are behind the others, in the clock of `time.monotonic()`.
        self._refused_until: dict[AsyncDFlashClient, float] = {}

    def request(
        self,
        stream: bool,
        token_ids: Sequence[int],
        sampling: Mapping[str, Any],
        headers: Mapping[str, str] | None = None,
    ) -> PooledRequest:
        """A request that is sent when its deltas are read; `headers` go with it."""
        return PooledRequest(self, stream, token_ids, sampling, headers)

    @property
    def num_servers(self) -> int:
        """How many there are."""
        return len(self._clients)

    def by_load(self) -> list[AsyncDFlashClient]:
        """The servers, the one with the fewest requests first, behind them those that refuse requests, and those that
        say nothing behind all others."""
        return sorted(self._clients, key=lambda client: (client in self._silent, *self._load(client)))

    def prefill_by_load(self) -> list[AsyncDFlashClient]:
        """The prefill servers, as `by_load`, without those that say nothing: a decode server computes a prompt, too."""
        talking = [client for client in self._prefill_clients if client not in self._silent]
        return sorted(talking, key=self._load)

    def _load(self, client: AsyncDFlashClient) -> tuple[bool, int]:
        """Whether a server has just refused a request, and how many it has."""
        return time.monotonic() < self._refused_until.get(client, 0.0), self._num_running[client]

    def heard(self, client: AsyncDFlashClient, error: ClientError | None) -> None:
        """Note that a server takes requests (None), or the error with which it took none. A full queue is not noted:
        it may be that of one tenant."""
        if error is None:
            self._refused_until.pop(client, None)
        elif isinstance(error, Unavailable) and not isinstance(error, QueueFull):
            self._refused_until[client] = time.monotonic() + REFUSED_S

    async def look(self, timeout_s: float) -> None:
        """See which servers say nothing for so long, and which take no requests. One alone gets all requests whatever
        it says."""
        clients = [*self._clients, *self._prefill_clients]
        if len(clients) < 2:
            return
        found = await asyncio.gather(*(client.probe(timeout_s) for client in clients))
        silent = frozenset(
            client for client, error in zip(clients, found, strict=True) if isinstance(error, ConnectionFailed)
        )
        for client, error in zip(clients, found, strict=True):
            self.heard(client, error)
            if (client in silent) != (client in self._silent):
                _LOG.warning(
                    "%s", f"requests go to other servers: {error}" if client in silent else f"{client.address} is back"
                )
        self._silent = silent

    def count(self, client: AsyncDFlashClient, change: int) -> None:
        """Note that a server has more or fewer requests."""
        self._num_running[client] += change

    async def probe(self, timeout_s: float) -> ClientError | None:
        """None as soon as one server says that it takes requests; else why the last that answered does not."""
        asking = [asyncio.create_task(client.probe(timeout_s)) for client in self._clients]
        error: ClientError | None = None
        try:
            for answer in asyncio.as_completed(asking):
                if (error := await answer) is None:
                    return None
            return error
        finally:
            for one in asking:
                one.cancel()

    async def describe(self, timeout_s: float) -> ModelDescription:
        """What the first server that answers says of the model. Raises `ClientError`, or `msgspec.ValidationError` for
        a server without a description."""
        for client in self._clients[:-1]:
            try:
                return msgspec.convert(await client.describe(timeout_s), ModelDescription)
            except ClientError:
                continue
        return msgspec.convert(await self._clients[-1].describe(timeout_s), ModelDescription)

    async def close(self) -> None:
        """Close the connections."""
        for client in (*self._clients, *self._prefill_clients):
            await client.close()


def _dumps(value: Any) -> str:
    """JSON, in a fraction of the time of Python's own writer."""
    return msgspec.json.encode(value).decode()


class PooledRequest:
    """One request to whichever server takes it, with a prompt that a prefill server has computed where there is one."""

    def __init__(
        self,
        pool: TritonPool,
        stream: bool,
        token_ids: Sequence[int],
        sampling: Mapping[str, Any],
        headers: Mapping[str, str] | None = None,
    ) -> None:
        self._pool, self._is_stream = pool, stream
        self._token_ids, self._sampling, self._headers = token_ids, sampling, headers
        self._stream: AsyncStream | None = None
        self._cancelled = False

    def cancel(self) -> None:
        """End the request. What waits for a delta gets `Cancelled`."""
        self._cancelled = True
        if self._stream is not None:
            self._stream.cancel()

    async def deltas(self) -> AsyncGenerator[Delta, None]:
        """The deltas of all its completions. A server that refuses the request before it has begun is passed over.
        Raises `ClientError`."""
        sampling = self._sampling
        if (kept := await self._prefilled()) is not None:
            sampling = {**sampling, "kv_transfer_params": kept}
        async with aclosing(self._of(self._pool.by_load(), self._is_stream, sampling)) as deltas:
            async for delta in deltas:
                yield delta

    async def _prefilled(self) -> dict[str, Any] | None:
        """Where a prefill server keeps the prompt's KV; None where it keeps none or is not asked. Raises
        `Cancelled`."""
        token_ids, sampling = self._token_ids, self._sampling
        servers = self._pool.prefill_by_load()
        # Log-probabilities of the prompt come of computing it.
        is_own = "kv_transfer_params" in sampling or sampling.get("prompt_logprobs") is not None
        if not servers or is_own or len(token_ids) < MIN_PREFILL_TOKENS:
            return None
        own = {name: sampling[name] for name in OF_PROMPT if name in sampling}
        own |= {"max_tokens": 1, "temperature": 0, "kv_transfer_params": {"do_remote_decode": True}}
        own["record_traffic"] = False  # the decode server has the whole answer, and the client's word
        seconds = MAX_PREFILL_S + MAX_TOKEN_S * len(token_ids)
        try:
            async with asyncio.timeout(seconds), aclosing(self._of(servers, False, own)) as deltas:
                kept = [delta.kv_transfer_params async for delta in deltas]
        except Cancelled:
            raise
        except (ClientError, TimeoutError) as error:
            why = f"{error}" or f"there was no answer in {seconds:.0f} s"
            text = f"a prefill server did not compute a prompt, which a decode server does: {why}"
            log_once(f"prefill {type(error).__name__}", lambda: text)
            return None
        return next(filter(None, kept), None)

    async def _of(
        self, servers: Sequence[AsyncDFlashClient], is_stream: bool, sampling: Mapping[str, Any]
    ) -> AsyncGenerator[Delta, None]:
        """The deltas of the first of these servers that takes the request."""
        for position, client in enumerate(servers):
            answered = False
            try:
                self._stream = client.request(is_stream, self._token_ids, None, sampling, self._headers, _dumps)
            except ValueError as error:
                raise InvalidArgument(str(error)) from None
            if self._cancelled:
                self._stream.cancel()
            self._pool.count(client, 1)
            try:
                async with self._stream as stream:
                    async for delta in stream:
                        if not answered:
                            answered = True
                            self._pool.heard(client, None)
                        yield delta
                return
            except (Unavailable, ConnectionFailed) as error:
                self._pool.heard(client, error)
                is_last = position == len(servers) - 1
                if answered or is_last or self._cancelled or isinstance(error, ConnectionLost):
                    raise
            finally:
                self._pool.count(client, -1)
