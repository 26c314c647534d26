"""Several engines behind one model: each request goes to one of them, and one that is lost takes nothing else along.

Each engine has a supervisor and a thread that reads it. So what takes seconds, as the end of a process that hangs or
the start of the next one, holds up no other engine. The threads keep the router up to date and pass all outputs on to
the one thread that answers.
"""

from __future__ import annotations

import dataclasses
import os
import queue
import threading
from collections import Counter
from collections.abc import Collection, Sequence

from dflash_backend.config import EngineConfig
from dflash_backend.core.block_hashes import BlockHashes
from dflash_backend.engine_client.engines import EngineOutputs, Engines, NoEngineError, Placement
from dflash_backend.engine_client.gpus import engine_environments
from dflash_backend.engine_client.supervisor import EngineLost, EngineSupervisor, Logger
from dflash_backend.messages import BlocksStored, EngineCoreOutputs, EngineReady, KVEvent, SamplingParams
from dflash_backend.routing import router as routing

# How long a thread waits for its engine before it looks whether it is to end.
READ_MS = 250
# The most outputs of one `receive` for each engine, as of a single one (`client.MESSAGES_A_TURN`).
OUTPUTS_A_TURN = 64
# Between the seeds of two engines: requests without a seed of their own must not get the same one in both.
SEED_STEP = 0x51B54A32D192ED03
_MAX_SEED = 2**63 - 1


def make_engines(
    config: EngineConfig, log: Logger, command: Sequence[str] | None = None, server_pid: int = 0
) -> Engines:
    """The engines that `data_parallel_size` asks for. Raises `ConfigError` when there are too few GPUs."""
    kind = Engines if config.data_parallel_size == 1 else Replicas
    return kind(config, log, command, server_pid)


class Replicas(Engines):
    """`data_parallel_size` engines, a thread for each, and the router of their requests."""

    def __init__(
        self, config: EngineConfig, log: Logger, command: Sequence[str] | None = None, server_pid: int = 0
    ) -> None:
        """As for `Engines`. Raises `ConfigError` when there are too few GPUs."""
        environments = engine_environments(config, os.environ)
        num = len(environments)
        self.supervisors = [
            EngineSupervisor(
                _of_engine(config, index),
                log,
                command,
                server_pid=server_pid,
                name=f"engine {index} of {num}",
                environ=environ,
            )
            for index, environ in enumerate(environments)
        ]
        self._blind = config.routing == "round_robin"
        self._turn = 0
        self._router: routing.Router | None = None
        # With tiers of KV, in how many of them and of the device each block of an engine is; else empty.
        has_tiers = bool(config.kv_host_gb or config.kv_disk_path)
        self._copies: list[Counter[bytes]] = [Counter() for _ in self.supervisors] if has_tiers else []
        self._lock = threading.Lock()  # of the router and the turn
        self._arrived: queue.SimpleQueue[EngineOutputs | Exception | None] = queue.SimpleQueue()
        self._held: Exception | None = None
        self._closing = False
        self._threads: list[threading.Thread] = []

    def wait_until_ready(self) -> None:
        """Wait until all have loaded the models. Raises `EngineError`; nothing is running then."""
        super().wait_until_ready()
        self._router = routing.Router(len(self), self.ready.kv_block_size, self.most_blocks)
        for index in range(len(self)):
            self._router.set_up(index)
            thread = threading.Thread(target=self._read, args=(index,), name=f"dflash-engine-{index}", daemon=True)
            self._threads.append(thread)
            thread.start()

    @property
    def most_blocks(self) -> int:
        """Blocks that the engine with the most of them holds, on its device and in its tiers."""
        return max(one.ready.num_kv_blocks + one.ready.num_tier_blocks for one in self.supervisors)

    @property
    def ready(self) -> EngineReady:
        """That of the engine with the least memory for a request, of its last start."""
        return min((one.ready for one in self.supervisors), key=lambda ready: ready.max_model_len)

    def place(self, prompt_token_ids: Sequence[int], sampling: SamplingParams, full: Collection[int] = ()) -> Placement:
        """Choose the engine of a request by what the router knows. Raises `NoEngineError`."""
        hashes = self._hashes(prompt_token_ids, sampling)
        without = set(full)
        while True:
            with self._lock:
                index, route = self._choose(hashes, len(prompt_token_ids), sampling, without)
            client = self.supervisors[index].engine
            # Its thread may not have noticed yet that it is dead.
            if client is not None and client.alive:
                return Placement(index, client, route)
            if route is not None:
                with self._lock:
                    self._of_router.finished(route, prefilled=False)
            without.add(index)

    def prefilled(self, placement: Placement) -> None:
        """The request has its first token: its prompt is no load any more."""
        if placement.route is not None:
            with self._lock:
                self._of_router.prefilled(placement.route)

    def finished(self, placement: Placement, prefilled: bool) -> None:
        """The request has ended, however."""
        if placement.route is not None:
            with self._lock:
                self._of_router.finished(placement.route, prefilled)

    def receive(self, timeout_ms: int) -> list[EngineOutputs]:
        """As `Engines.receive`. An error of a thread that reads an engine, which is a defect, is raised here."""
        held, self._held = self._held, None
        if held is not None:
            raise held
        received: list[EngineOutputs] = []
        try:
            item = self._arrived.get(timeout=timeout_ms / 1000)
            while item is not None:
                if isinstance(item, Exception):
                    if not received:
                        raise item
                    self._held = item  # the outputs before it are still good
                    break
                received.append(item)
                if len(received) == OUTPUTS_A_TURN * len(self):
                    break
                item = self._arrived.get_nowait()
        except queue.Empty:
            pass
        return received

    def wake(self) -> None:
        """Make a `receive` in another thread return."""
        self._arrived.put(None)

    def close(self) -> None:
        """End all processes at the same time. No call of `receive` may follow."""
        self._closing = True
        for one in self.supervisors:
            one.wake()
        for thread in self._threads:
            thread.join()
        super().close()

    @property
    def _of_router(self) -> routing.Router:
        assert self._router is not None, "wait_until_ready comes first"
        return self._router

    def _hashes(self, token_ids: Sequence[int], sampling: SamplingParams) -> Sequence[bytes]:
        """Of the blocks that the engine would look up; none where it looks nothing up."""
        ready = self.ready
        if self._blind or not ready.finds_blocks or sampling.prompt_logprobs is not None:
            return ()
        num_blocks = (len(token_ids) - 1) // ready.kv_block_size
        hashes = BlockHashes(sampling.cache_salt, ready.kv_block_size, ready.reads_next_tokens, sampling.lora_name)
        return hashes.first(num_blocks, token_ids)

    def _choose(
        self, hashes: Sequence[bytes], num_tokens: int, sampling: SamplingParams, without: Collection[int]
    ) -> tuple[int, routing.Route | None]:
        """The number of an engine that is up and not in `without`. Under the lock. Raises `NoEngineError`."""
        if not self._blind:
            route = self._of_router.route(hashes, num_tokens, sampling.cache_salt, sampling.n, without)
            return route.engine, route
        up = [index for index in self._of_router.engines_up if index not in without]
        if not up:
            raise NoEngineError("no engine of the model takes requests; try again in a few seconds")
        index = min(up, key=lambda index: (index - self._turn) % len(self))
        self._turn = index + 1
        return index, None

    def _read(self, index: int) -> None:
        """The thread of one engine: until `close`, or a defect."""
        supervisor = self.supervisors[index]
        is_up = True
        try:
            while not self._closing:
                try:
                    outputs = supervisor.receive(READ_MS)
                except EngineLost as lost:
                    is_up, lost.index = False, index
                    with self._lock:
                        self._of_router.set_down(index)
                        if self._copies:
                            self._copies[index].clear()
                    self._arrived.put(lost)
                    continue
                if not is_up and supervisor.engine is not None:
                    is_up = True
                    with self._lock:
                        self._of_router.set_up(index)
                        self._of_router.resize(self.most_blocks)
                    self._arrived.put(None)
                self._pass_on(index, outputs)
            supervisor.close()
        except Exception as error:  # noqa: BLE001 - a defect of this process: who answers requests must know
            self._arrived.put(error)

    def _pass_on(self, index: int, outputs: list[EngineCoreOutputs]) -> None:
        events = [event for message in outputs for event in message.kv_events]
        if events:
            with self._lock:
                for event in events:
                    self._follow(index, event)
        for message in outputs:
            self._arrived.put(EngineOutputs(index, message))

    def _follow(self, index: int, event: KVEvent) -> None:
        """Tell the router what an engine reports. Under the lock."""
        is_stored = isinstance(event, BlocksStored)
        hashes = event.block_hashes
        if self._copies:
            hashes = changed(self._copies[index], hashes, is_stored)
        if is_stored:
            self._of_router.stored(index, hashes)
        else:
            self._of_router.removed(index, hashes)


def changed(copies: Counter[bytes], hashes: Sequence[bytes], is_stored: bool) -> list[bytes]:
    """Of blocks that came to the device or a tier, or left one of these, those that were nowhere before, or are now.
    copies: where each block is, in how many; it is brought up to date."""
    found = []
    for block_hash in hashes:
        before = copies[block_hash]
        copies[block_hash] += 1 if is_stored else -1
        if copies[block_hash] <= 0:
            del copies[block_hash]
        if before == (0 if is_stored else 1):
            found.append(block_hash)
    return found


def _of_engine(config: EngineConfig, index: int) -> EngineConfig:
    """The settings of one of the engines."""
    port = config.kv_transfer_port + index if config.kv_transfer_port else 0
    seed = (config.seed + index * SEED_STEP) & _MAX_SEED
    return dataclasses.replace(config, seed=seed, kv_transfer_port=port)
