"""The tiers of KV below the device: how many records each has, where they are, and what may be found again after a
restart."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from pathlib import Path

import torch

from dflash_backend.checkpoints.digest import checkpoint_digest
from dflash_backend.checkpoints.lora import adapter_digest
from dflash_backend.config import ConfigError, EngineConfig
from dflash_backend.core.moves import DISK, HOST, REMOTE
from dflash_backend.core.scheduler_config import SchedulerConfig, TierConfig, TransferConfig
from dflash_backend.drafters.resolve import ModelPair
from dflash_backend.engine.checks import adapter_directories
from dflash_backend.error_text import first_line
from dflash_backend.models.kv_code import code_digest
from dflash_backend.worker import ModelRunner
from dflash_backend.worker.kv_disk import OVERHEAD_BYTES, DiskError, DiskRecords
from dflash_backend.worker.kv_mover import BackgroundMover, DeviceRecords, HostRecords, RecordStore
from dflash_backend.worker.kv_transfer import Facts, NixlAgent, NixlUnavailable, RemoteRecords, TransferServer
from dflash_backend.worker.memory import GIB

# Host memory that blocks pass through on their way to a disk, where kv_host_gb is 0.
BUFFER_BYTES = 64 << 20
# Records of each group that a tier has at least: those of a move, and of the one that follows it.
MIN_SLOTS = 32
# Megabytes a second that go to tiers at most where the CPU also computes, unless kv_move_mb_s is set: several times the
# KV that its prompts give.
CPU_STORE_MB_S = 100.0
SHOWN_DIGITS = 12  # of the digest of the code


def wants_tiers(config: EngineConfig) -> bool:
    """Whether KV moves: there is a tier, or another server. Raises `ConfigError` for settings that it cannot go
    with."""
    names = [name for name in ("kv_host_gb", "kv_disk_path") if getattr(config, name)]
    names += ["kv_role"] if config.kv_role != "none" else []
    if not names:
        return False
    reason = None
    if not config.enable_prefix_caching:
        reason = "enable_prefix_caching is off, without which no prompt finds a block: turn it on"
    elif config.num_state_snapshots == 0:
        reason = "num_state_snapshots is 0, without which no prompt finds a block: raise it"
    elif config.tensor_parallel_size > 1:
        reason = (
            f"tensor_parallel_size is {config.tensor_parallel_size}: ranks keep their KV on the device alone; set it "
            "to 1"
        )
    if reason is not None:
        raise ConfigError(f"setting '{names[0]}' is {getattr(config, names[0])!r}, and {reason}, or leave this one out")
    return True


def with_tiers(
    config: EngineConfig, scheduler: SchedulerConfig, pair: ModelPair, runner: ModelRunner
) -> tuple[SchedulerConfig, BackgroundMover | None]:
    """The scheduler's settings with the tiers and the role that `config` names, and what moves KV. Raises `ConfigError`
    where they cannot be had."""
    if not wants_tiers(config) or not scheduler.enable_prefix_caching:
        return scheduler, None
    device, num_slots = _device_records(scheduler, runner)
    computed_by = f"{device.device.type} {runner.model.backend.name} {runner.model.dtype}"
    tiers, stores = _tiers(config, scheduler, pair, device, num_slots, computed_by)
    sends, receives = config.kv_role in ("prefill", "both"), config.kv_role in ("decode", "both")
    transfer = sender = None
    if sends or receives:
        transfer = TransferConfig(sends, receives, config.kv_transfer_timeout_s)
        facts = Facts(
            fingerprint(config, pair, scheduler, computed_by, with_times=False),
            scheduler.block_size,
            scheduler.max_model_len,
            pair.target.path.name,
            "" if pair.draft is None else pair.draft.summary(pair.num_speculative_tokens),
            code_digest().hex()[:SHOWN_DIGITS],
            max(_rope_lengths(pair)),
        )
        try:
            agent = NixlAgent(device) if config.kv_transfer_backend == "nixl" else None
        except NixlUnavailable as error:
            raise ConfigError(f"setting 'kv_transfer_backend' is 'nixl': {error}; or set it to tcp") from None
        if receives:
            peers = frozenset(filter(None, map(str.strip, config.kv_transfer_peers.split(","))))
            stores[REMOTE] = RemoteRecords(facts, device.sizes, agent, peers)
        if sends:
            sender = _server(config, device, facts, agent)
    stored_mb_s = CPU_STORE_MB_S if device.device.type == "cpu" and not config.kv_move_mb_s else 0.0
    runner.mover = BackgroundMover(device, stores, config.kv_move_mb_s * 1e6, stored_mb_s * 1e6)
    runner.mover.sender = sender
    return dataclasses.replace(scheduler, tiers=tuple(tiers), transfer=transfer), runner.mover


def _server(config: EngineConfig, device: DeviceRecords, facts: Facts, agent: NixlAgent | None) -> TransferServer:
    port = config.kv_transfer_port
    if config.kv_transfer_host in ("", "0.0.0.0", "::"):
        raise ConfigError(
            f"setting 'kv_transfer_host' is {config.kv_transfer_host!r}, and other servers are told to connect to it: "
            "name the address at which they reach this machine"
        )
    try:
        return TransferServer(device, facts, (config.kv_transfer_host, port), agent)
    except OSError as error:
        raise ConfigError(
            f"settings 'kv_transfer_host' and 'kv_transfer_port' are {config.kv_transfer_host!r} and {port}, where the "
            f"server cannot listen ({error.strerror or error}): name an address of this machine, and a port that is "
            "free, or 0"
        ) from None


def _tiers(
    config: EngineConfig,
    scheduler: SchedulerConfig,
    pair: ModelPair,
    device: DeviceRecords,
    num_slots: list[int],
    computed_by: str,
) -> tuple[list[TierConfig], dict[str, RecordStore]]:
    """The tiers below the device, and where their records are."""
    if not config.kv_host_gb and not config.kv_disk_path:
        return [], {}
    host_bytes = config.kv_host_gb * GIB or BUFFER_BYTES
    tiers = [TierConfig(HOST, _slots(config, "kv_host_gb", host_bytes, device.sizes, num_slots))]
    stores: dict[str, RecordStore] = {}
    try:
        stores[HOST] = HostRecords(device.sizes, tiers[0].num_slots, device.device.type == "cuda")
    except (MemoryError, RuntimeError) as error:
        raise ConfigError(
            f"setting 'kv_host_gb' is {config.kv_host_gb:g}, and the system does not give as much memory: lower it "
            f"({first_line(error)})"
        ) from None
    if config.kv_disk_path:
        sizes = [size + OVERHEAD_BYTES for size in device.sizes]
        tiers.append(TierConfig(DISK, _slots(config, "kv_disk_gb", config.kv_disk_gb * GIB, sizes, num_slots)))
        name = fingerprint(config, pair, scheduler, computed_by)
        try:
            stores[DISK] = DiskRecords(
                Path(config.kv_disk_path), name, device.sizes, config.kv_disk_gb * GIB, config.data_parallel_size
            )
        except DiskError as error:
            raise ConfigError(
                f"setting 'kv_disk_path' is {config.kv_disk_path!r}: {error}; name a folder that the server may write "
                "to, or leave it empty"
            ) from None
    return tiers, stores


def _device_records(scheduler: SchedulerConfig, runner: ModelRunner) -> tuple[DeviceRecords, list[int]]:
    """The device's records, and how many of each group there are, in the order of `core.kv.KVManager.groups`."""
    model = runner.model
    groups: list[tuple[tuple[torch.Tensor, ...], int]] = [(tensors, 0) for tensors in model.kv.records]
    num_slots = [scheduler.num_blocks, scheduler.num_window_blocks][: len(groups)]
    if model.pool is not None and scheduler.num_state_snapshots is not None:
        groups.append((model.pool.tensors, len(model.state.tokens)))
        num_slots.append(scheduler.num_state_snapshots)
    return DeviceRecords(groups), num_slots


def _slots(
    config: EngineConfig, setting: str, num_bytes: float, sizes: list[int], num_slots: list[int]
) -> tuple[int, ...]:
    """How many records of each group fit, as many of each for those on the device; a few of each at least. Raises
    `ConfigError` where these do not fit."""
    whole = sum(size * slots for size, slots in zip(sizes, num_slots, strict=True))
    least = sum(size * MIN_SLOTS for size in sizes)
    if num_bytes < least and getattr(config, setting):
        raise ConfigError(
            f"setting '{setting}' is {getattr(config, setting):g}, and {MIN_SLOTS} blocks of this model, the least "
            f"that a tier has, take {least / GIB:.3g} GiB: raise it, or leave it out"
        )
    return tuple(max(MIN_SLOTS, int((num_bytes - least) / whole * slots) + MIN_SLOTS) for slots in num_slots)


def fingerprint(
    config: EngineConfig, pair: ModelPair, scheduler: SchedulerConfig, computed_by: str, with_times: bool = True
) -> bytes:
    """32 bytes that differ wherever the KV of a block might: by the models, the code and the settings that compute it,
    and by how a record is laid out. computed_by: device and attention. with_times: as of `checkpoint_digest`."""
    digest = hashlib.sha256(code_digest())
    settings = {
        "torch": torch.__version__,
        "computed": computed_by,
        "block_size": scheduler.block_size,
        "rope_lengths": _rope_lengths(pair),
        "windows": scheduler.num_window_blocks > 0,
        "rope_scaling": config.target_rope,
        "reads_next_tokens": scheduler.reads_next_tokens,
        **{
            name: getattr(config, name)
            for name in (
                "dtype", "kv_cache_dtype", "quantization", "activation_quantization", "batch_invariant", "causal",
            )
        },
    }  # fmt: skip
    for name, directory in adapter_directories(config).items():
        settings[f"adapter {name}"] = adapter_digest(directory).hex()
    digest.update(json.dumps(settings, sort_keys=True).encode())
    for path in pair.checkpoints:
        digest.update(checkpoint_digest(path, with_times))
    return digest.digest()


def _rope_lengths(pair: ModelPair) -> list[int]:
    """The lengths that the models' rotary frequencies are computed for; 0 where these depend on no length."""
    decoders = [pair.target.decoder]
    if pair.draft_model is not None:
        decoders.append(pair.draft_model.decoder)
    return [decoder.rope.length for decoder in decoders]
