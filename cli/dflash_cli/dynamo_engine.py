"""A running Triton server as a worker of NVIDIA Dynamo, whose frontend and KV-aware router then serve several of them.

Imported only where the package `ai-dynamo` is installed. Dynamo's frontend renders the chat template, tokenises and
turns tokens into text; the server gets token ids and gives token ids back. The events of its prefix cache go straight
to the router, from the server's `kv_events_endpoint`.
"""

from __future__ import annotations

import argparse
from collections.abc import AsyncGenerator, Mapping
from typing import Any

from dynamo.common.backend import EngineConfig, LLMEngine, LlmRegistration, WorkerConfig
from dynamo.common.backend.publisher import ZmqSource
from dynamo.common.backend.run import run
from dynamo.llm.exceptions import InvalidArgument

from dflash_cli.dynamo_requests import chunk, event_sources, sampling
from dflash_client import AsyncDFlashClient, Cancelled, ClientError
from dflash_client import InvalidArgument as Refused
from dflash_client.stream import AsyncStream


class DFlashEngine(LLMEngine):  # type: ignore[misc]  # of a package without types
    """One server."""

    def __init__(self, options: argparse.Namespace) -> None:
        self._options = options
        self._client: AsyncDFlashClient | None = None
        self._description: dict[str, Any] = {}
        self._streams: dict[str, AsyncStream] = {}

    @classmethod
    async def from_args(cls, argv: list[str] | None = None) -> tuple[DFlashEngine, WorkerConfig]:
        """Required by the base class; `serve` makes the engine, from our own command line."""
        raise NotImplementedError("start it with `dflash-triton dynamo`")

    async def connect(self) -> WorkerConfig:
        """Wait for the server, ask what it is, and say how it registers. Raises `ClientError` when it cannot be reached
        within `options.wait` seconds."""
        options = self._options
        try:
            self._client = AsyncDFlashClient(
                options.triton, model=options.model_name, timeout_s=options.request_timeout
            )
        except ValueError as error:
            raise ClientError(str(error)) from None
        await self._client.wait_ready(options.wait)
        self._description = await self._client.describe()
        return WorkerConfig(
            namespace=options.namespace,
            component=options.component,
            # A directory, from which Dynamo's frontend reads tokenizer and chat template.
            model_name=self._model,
            served_model_name=options.served_model_name,
            discovery_backend=options.discovery_backend,
            request_plane="tcp",
            event_plane="zmq",
        )

    @property
    def _model(self) -> str:
        return str(self._options.tokenizer or self._description["tokenizer"])

    async def start(self, worker_id: int) -> EngineConfig:
        """Say what the server is; `connect` comes first."""
        found = self._description
        return EngineConfig(
            model=self._model,
            served_model_name=self._options.served_model_name,
            llm=LlmRegistration(
                context_length=found["max_model_len"],
                kv_cache_block_size=found["kv_block_size"],
                total_kv_blocks=found["num_kv_blocks"],
                max_num_seqs=found["max_num_seqs"],
                max_num_batched_tokens=found["max_num_batched_tokens"],
                data_parallel_size=found["data_parallel_size"],
            ),
        )

    async def generate(self, request: Mapping[str, Any], context: Any) -> AsyncGenerator[dict[str, Any], None]:
        """The answer's tokens as they come, and no more of them after `abort`. Without a `max_tokens` it may be as long
        as fits. Raises Dynamo's `InvalidArgument` for what the server cannot do or refuses, else `ClientError`."""
        assert self._client is not None, "connect comes first"
        try:
            parameters = sampling(request)
        except ValueError as error:
            raise InvalidArgument(str(error)) from None
        num_prompt, num_output = len(request["token_ids"]), 0
        # A server's own default is 16.
        parameters.setdefault("max_tokens", max(1, self._description["max_model_len"] - num_prompt))
        stream = self._client.stream(list(request["token_ids"]), **parameters)
        self._streams[context.id()] = stream
        try:
            async with stream:
                async for delta in stream:
                    num_output += len(delta.token_ids)
                    yield chunk(delta, num_prompt, num_output)
        except Refused as error:
            raise InvalidArgument(str(error)) from None
        except Cancelled:
            if context.id() in self._streams:
                raise
        finally:
            self._streams.pop(context.id(), None)

    async def abort(self, context: Any) -> None:
        """The client is gone."""
        if (stream := self._streams.pop(context.id(), None)) is not None:
            stream.cancel()

    async def kv_event_sources(self) -> list[ZmqSource]:
        """Where each engine of the server publishes what its prefix cache holds."""
        return [ZmqSource(*source) for source in event_sources(self._description, self._options.kv_events)]

    async def cleanup(self) -> None:
        """Close the connection; the server goes on."""
        client, self._client = self._client, None
        if client is not None:
            await client.close()


def serve(options: argparse.Namespace) -> None:
    """Be a worker until SIGTERM or SIGINT. Raises `ClientError` when the server cannot be reached."""

    async def make(argv: list[str] | None) -> tuple[DFlashEngine, WorkerConfig]:
        engine = DFlashEngine(options)
        return engine, await engine.connect()

    run(DFlashEngine, None, make)
