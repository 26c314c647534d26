"""Ranks on the nodes of a Ray cluster that runs already: an actor for each, on as many nodes as there are.

The engine's process is rank 0 and Ray's driver, so this machine must be a node of the cluster. Actors and the placement
group belong to the driver's job and end with it, however it ends.
"""

from __future__ import annotations

import logging
import os
import signal
import socket
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from dflash_backend.config import ConfigError
from dflash_backend.parallel.links import START_SILENCE_S, RemoteRank
from dflash_backend.parallel.remote import RankAddress, RemoteRankProcess, RemoteRanks
from dflash_backend.parallel.shard import Shard

_log = logging.getLogger(__name__)

PLACEMENT_S = 120.0
"""How long a start waits for nodes: some may be on their way, or come back."""
SAY_S = 15.0
"""How often it says meanwhile what it waits for."""
LOOK_S = 2.0
ANSWER_S = 5.0
"""How long a cluster may take to answer."""
CURRENT_CLUSTER = Path("/tmp/ray/ray_current_cluster")
"""Where `ray start` leaves the address of this machine's cluster."""
# A rank takes its part of its node's processors as an operation needs them. Ray counts one, so that a node has as many
# ranks as it was started with CPUs, of one engine or of several.
CPUS = 1
# Of the engine's environment, what a rank's process needs from its start on.
VARIABLES = {"OMP_WAIT_POLICY": "PASSIVE"}


def ray_ranks(size: int, on_gpus: bool = False) -> RemoteRanks:
    """The other ranks of `size`, on as many nodes as there are. Raises `ConfigError` without a cluster for them."""
    return RemoteRanks(Shard(0, size), RayLauncher(size, on_gpus))


def _connected() -> tuple[Any, bool]:
    """The package ray, connected to the cluster, and whether this made the connection. Raises `ConfigError`."""
    try:
        import ray
    except ImportError as error:
        raise ConfigError(
            "setting 'distributed_executor' is 'ray', and the package ray is not installed here: install the extra "
            f"`ray` of dflash-triton on every node, or set it to mp ({error})"
        ) from None
    if ray.is_initialized():
        return ray, False
    terminate = signal.getsignal(signal.SIGTERM)
    try:
        _check_address()
        ray.init(address="auto", log_to_driver=True, logging_level=logging.WARNING)
    except (ConnectionError, RuntimeError, ValueError, OSError, SystemExit, ray.exceptions.RayError) as error:
        raise ConfigError(
            "setting 'distributed_executor' is 'ray', and this machine is no node of a Ray cluster that answers: start "
            f"one with `ray start`, name it in RAY_ADDRESS as HOST:PORT, or set it to mp ({error})"
        ) from None
    finally:
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, terminate)  # Ray has put its own in place
    return ray, True


def _check_address() -> None:
    """Raises `OSError` when nothing answers where the cluster should be, for which Ray itself takes five minutes, and
    `ValueError` for addresses that would make another cluster, or a client of one."""
    address = os.environ.get("RAY_ADDRESS", "auto")
    if address == "auto":
        if not CURRENT_CLUSTER.exists():
            return
        address = CURRENT_CLUSTER.read_text(encoding="utf-8").strip()
    host, colon, port = address.rpartition(":")
    if not colon or "/" in host or not port.isdigit():
        raise ValueError(f"RAY_ADDRESS is {address!r}")
    try:
        socket.create_connection((host.strip("[]"), int(port)), ANSWER_S).close()
    except OSError as error:
        raise OSError(f"{address}: {error}") from None


def _ranks_beside(group: Any) -> list[int]:
    """How many ranks of a placed group are on the node of each, itself among them."""
    from ray.util.placement_group import placement_group_table

    nodes: dict[int, str] = placement_group_table(group)["bundles_to_node_id"]
    return [sum(node == other for other in nodes.values()) for _, node in sorted(nodes.items())]


class _RayRank(RemoteRankProcess):
    """What runs in an actor."""

    def open_here(self, engine_key: bytes) -> RankAddress:
        """As `open`, at the address by which Ray knows this node."""
        import ray

        host, node = ray.util.get_node_ip_address(), ray.get_runtime_context().get_node_id()
        return self.open(host, f"node {host} (Ray's node {node[:12]})", engine_key)


class _HeldGpu:
    """An actor that has rank 0's GPU in Ray's count, so that Ray gives it to no other: this process is no actor."""

    def gpu(self) -> str:
        """Its number, or its name, on this node."""
        import ray

        return str(ray.get_gpu_ids()[0])


def visible_index(gpu: str, visible: str | None) -> int:
    """Which of the GPUs that this process sees Ray's `gpu` is. visible: `CUDA_VISIBLE_DEVICES`, None for all. Raises
    `ConfigError` where it is none of them."""
    if visible is None and gpu.isdigit():
        return int(gpu)
    names = [name.strip() for name in (visible or "").split(",")]
    if gpu in names:
        return names.index(gpu)
    raise ConfigError(
        f"Ray gives rank 0 the GPU {gpu} of this node, and CUDA_VISIBLE_DEVICES={visible or ''} does not show it to "
        "the server: give both the same GPUs, by the same numbers"
    )


class RayLauncher:
    """As `Launcher`."""

    def __init__(self, size: int, on_gpus: bool = False) -> None:
        self._ray, self._connected_here = _connected()
        self.host: str = self._ray.util.get_node_ip_address()
        self._unit = "GPU" if on_gpus else "CPU"
        self._group = self._placed(size)
        self._on_node = _ranks_beside(self._group)
        self._actors: list[Any] = []
        self._runs: list[Any] = []
        self._ended = False
        self._own_index = self._held_gpu() if on_gpus else 0

    def _held_gpu(self) -> int:
        """Which GPU rank 0 has, as `device_index`. Raises `ConfigError`."""
        self._holder = self._ray.remote(_HeldGpu).options(**self._placement(0)).remote()
        try:
            return visible_index(
                self._ray.get(self._holder.gpu.remote(), timeout=START_SILENCE_S),
                os.environ.get("CUDA_VISIBLE_DEVICES"),
            )
        except self._ray.exceptions.RayError as error:
            self.end()
            raise ConfigError(f"Ray gives rank 0 no GPU of this node: {error}") from None
        except ConfigError:
            self.end()
            raise

    def _placement(self, rank: int) -> dict[str, Any]:
        """Options of an actor in a rank's bundle."""
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        where = PlacementGroupSchedulingStrategy(self._group, placement_group_bundle_index=rank)
        gpus = {"num_gpus": 1} if self._unit == "GPU" else {}
        return {"num_cpus": CPUS, "scheduling_strategy": where, **gpus}

    def _placed(self, size: int) -> Any:
        """A placement group with a bundle for each rank, that of rank 0 on this node. Raises `ConfigError`."""
        from ray.util.placement_group import placement_group, remove_placement_group

        here = {f"node:{self.host}": 0.001}
        each = {"CPU": CPUS} | ({"GPU": 1} if self._unit == "GPU" else {})
        bundles = [each | (here if rank == 0 else {}) for rank in range(size)]
        # On CPUs a rank more on a node that has one adds no memory and no cores: only where there are fewer nodes than
        # ranks. GPUs of one node reach each other many times as fast as those of several.
        strategy = "PACK" if self._unit == "GPU" else "SPREAD"
        group = placement_group(bundles, strategy=strategy)
        started = said = time.monotonic()
        while not group.wait(LOOK_S):
            now = time.monotonic()
            if now - started > PLACEMENT_S:
                missing, option = self._missing(size), f"--num-{self._unit.lower()}s"
                remove_placement_group(group)
                self._disconnect()
                raise ConfigError(
                    f"{missing}. Add nodes with `ray start --address`, give nodes more with {option}, end what uses "
                    "them, or lower tensor_parallel_size"
                )
            if now - said >= SAY_S or said == started:
                _log.warning("waiting for %ss: %s", self._unit, self._missing(size))
                said = now
        return group

    def _missing(self, size: int) -> str:
        nodes = sorted(
            f"{node['NodeManagerAddress']} with {node['Resources'].get(self._unit, 0.0):g}"
            for node in self._ray.nodes()
            if node["Alive"]
        )
        return (
            f"{size} ranks need {size} free {self._unit}s of the Ray cluster in its count, one of them on this node "
            f"({self.host}); it has {self._ray.available_resources().get(self._unit, 0.0):g} free, and nodes "
            f"{', '.join(nodes)}"
        )

    def num_beside(self, rank: int) -> int:
        return self._on_node[rank]

    def device_index(self, rank: int) -> int:
        return 0 if rank else self._own_index  # an actor sees the GPU that Ray gave it alone

    def open(self, num_ranks: int, engine_key: bytes) -> list[RankAddress]:
        actor_class = self._ray.remote(_RayRank)
        for rank in range(1, num_ranks + 1):
            options = actor_class.options(max_restarts=0, runtime_env={"env_vars": VARIABLES}, **self._placement(rank))
            self._actors.append(options.remote())
        asked = [actor.open_here.remote(engine_key) for actor in self._actors]
        try:
            return list(self._ray.get(asked, timeout=START_SILENCE_S))
        except self._ray.exceptions.RayError as error:
            self.end()
            raise ConfigError(f"the ranks could not be started on the Ray cluster: {error}") from None

    def run(self, setups: Sequence[RemoteRank]) -> None:
        self._runs = [actor.run.remote(setup) for actor, setup in zip(self._actors, setups, strict=True)]

    def ended(self, rank: int) -> str:
        ready, _ = self._ray.wait([self._runs[rank - 1]], timeout=0)
        if not ready:
            return ""
        try:
            self._ray.get(ready[0])
        except self._ray.exceptions.RayError as error:
            return str(error)
        return "it ended; the log says why"

    def end(self) -> None:
        if self._ended or not self._ray.is_initialized():
            return
        self._ended = True
        from ray.util.placement_group import remove_placement_group

        with suppress(self._ray.exceptions.RayError, RuntimeError, ValueError):
            for actor in self._actors:
                self._ray.kill(actor)
            remove_placement_group(self._group)
        self._disconnect()

    def _disconnect(self) -> None:
        if self._connected_here:
            self._ray.shutdown()
