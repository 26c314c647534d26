"""The engines behind one Triton model: one, or with `data_parallel_size` several (`replicas.py`).

Any thread may call `up`, `any_alive`, `queue_loads`, `place`, `is_lost`, `how_lost`, `finished`, `send` and `wake`; all
else is for one thread, after `start` and `wait_until_ready`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import NamedTuple

from dflash_backend.config import EngineConfig
from dflash_backend.engine_client.client import EngineClient, QueueLoad
from dflash_backend.engine_client.supervisor import EngineLost, EngineSupervisor, Logger
from dflash_backend.messages import AbortRequests, EngineCoreOutputs, EngineReady, SamplingParams, SwapDrafter
from dflash_backend.routing.router import NoEngineError as NoEngineError
from dflash_backend.routing.router import Route

RESTARTING = "the engine is being restarted after it died; try again in a few seconds"


class Placement(NamedTuple):
    """Where a request is: the engine's number, its process at the time, and how the router came to it."""

    engine: int
    client: EngineClient
    route: Route | None = None


class EngineOutputs(NamedTuple):
    """Outputs of the engine with this number."""

    engine: int
    outputs: EngineCoreOutputs


class Engines:
    """A single engine: what several have in common, without a thread or a router."""

    def __init__(
        self, config: EngineConfig, log: Logger, command: Sequence[str] | None = None, server_pid: int = 0
    ) -> None:
        """As for `EngineSupervisor`. Nothing is started yet."""
        self.supervisors: Sequence[EngineSupervisor] = [EngineSupervisor(config, log, command, server_pid=server_pid)]

    def __len__(self) -> int:
        """The number of engines, those that are down among them."""
        return len(self.supervisors)

    @property
    def ready(self) -> EngineReady:
        """The first engine's `EngineReady` of its last start; the others' are the same but for their numbers of KV
        blocks."""
        return self.supervisors[0].ready

    @property
    def num_kv_blocks(self) -> int:
        """KV blocks of all engines, as of their last starts."""
        return sum(one.ready.num_kv_blocks for one in self.supervisors)

    @property
    def up(self) -> list[int]:
        """The numbers of the engines that take requests."""
        return [index for index, one in enumerate(self.supervisors) if one.engine is not None]

    @property
    def any_alive(self) -> bool:
        """Whether an engine takes requests and its process lives, which `up` may not have noticed yet."""
        clients = (one.engine for one in self.supervisors)
        return any(client is not None and client.alive for client in clients)

    @property
    def num_restarts(self) -> int:
        """Processes that were started after the first of each engine."""
        return sum(one.num_restarts for one in self.supervisors)

    def start(self) -> None:
        """Start all processes. `wait_until_ready` comes next. Raises `EngineError`; nothing is running then."""
        self._each(EngineSupervisor.start)

    def wait_until_ready(self) -> None:
        """Wait until all have loaded the models. Raises `EngineError`; nothing is running then."""
        self._each(EngineSupervisor.wait_until_ready)

    def _each(self, do: Callable[[EngineSupervisor], None]) -> None:
        try:
            for one in self.supervisors:
                do(one)
        except BaseException:
            self.close()
            raise

    def queue_loads(self, tenant: str | None = None) -> dict[int, QueueLoad]:
        """How full the queues are of the engines that take requests, by their numbers."""
        clients = ((index, one.engine) for index, one in enumerate(self.supervisors))
        return {index: client.queue_load(tenant) for index, client in clients if client is not None}

    def place(self, prompt_token_ids: Sequence[int], sampling: SamplingParams, full: Collection[int] = ()) -> Placement:
        """Choose the engine of a request. full: engines whose queues have no place for it. Raises `NoEngineError`."""
        client = self.supervisors[0].engine
        if client is None:
            raise NoEngineError(RESTARTING)
        return Placement(0, client)

    def send(self, index: int, message: AbortRequests | SwapDrafter) -> None:
        """Queue a message for an engine; one that is gone has no requests any more."""
        self.supervisors[index].send(message)

    def is_lost(self, placement: Placement) -> bool:
        """Whether the process that the request was sent to is no longer the engine."""
        return self.supervisors[placement.engine].engine is not placement.client

    def prefilled(self, placement: Placement) -> None:
        """The request has its first token. Once for each, before `finished`."""

    def finished(self, placement: Placement, prefilled: bool) -> None:
        """The request has ended, however. prefilled: whether `prefilled` was called for it."""

    def receive(self, timeout_ms: int) -> list[EngineOutputs]:
        """The engines' outputs, waiting at most `timeout_ms` for something to happen, or until `wake`.

        Raises `EngineLost` once for each engine that took requests and has died or hangs.
        """
        return [EngineOutputs(0, outputs) for outputs in self.supervisors[0].receive(timeout_ms)]

    def how_lost(self, placement: Placement) -> EngineLost | None:
        """How the last process of the request's engine was lost; None if none was."""
        return self.supervisors[placement.engine].lost

    def wake(self) -> None:
        """Make a `receive` in another thread return."""
        self.supervisors[0].wake()

    def close(self) -> None:
        """End the processes. No call of `receive` may follow."""
        for one in self.supervisors:
            one.close()
