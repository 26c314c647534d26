"""Which GPUs each of several engines gets."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

from dflash_backend.config import ConfigError, EngineConfig

VISIBLE = "CUDA_VISIBLE_DEVICES"
DEVICES = Path("/dev")


def num_gpus(devices: Path = DEVICES) -> int:
    """The NVIDIA GPUs of this machine, or of this container, by their device files."""
    return sum(re.fullmatch(r"nvidia\d+", file.name) is not None for file in devices.glob("nvidia*"))


def engine_environments(
    config: EngineConfig, environ: Mapping[str, str], devices: Path = DEVICES
) -> list[dict[str, str]]:
    """For each of `data_parallel_size` engines, the variables that show it only its own GPUs, as many as it has ranks:
    the first engine the first ones. Without GPUs, with `device=cpu` and for a single engine there are none.

    Raises `ConfigError` when there are too few GPUs.
    """
    num_engines, each = config.data_parallel_size, config.tensor_parallel_size
    chosen = environ.get(VISIBLE)
    if chosen is None:
        visible = [str(number) for number in range(num_gpus(devices))]
    else:
        visible = [name.strip() for name in chosen.split(",") if name.strip() not in ("", "-1")]
    # Ray knows which GPUs are free, on this node and others, and gives each engine its own.
    if not visible or num_engines == 1 or config.device == "cpu" or config.distributed_executor == "ray":
        return [{} for _ in range(num_engines)]
    if len(visible) < num_engines * each:
        where = "this machine has" if chosen is None else f"{VISIBLE}={chosen} shows"
        raise ConfigError(
            f"setting 'data_parallel_size' is {num_engines}, which takes {num_engines * each} GPUs, and {where} "
            f"{len(visible)} (to a Triton instance of KIND_GPU one): lower it, take KIND_MODEL, or set device=cpu"
        )
    return [{VISIBLE: ",".join(visible[i * each : (i + 1) * each])} for i in range(num_engines)]
