"""What the setting `quantization` asks of a target, and where it cannot be had."""

from __future__ import annotations

from collections.abc import Callable

from dflash_backend.checkpoints.quantization import load_quantization
from dflash_backend.checkpoints.spec import TargetSpec
from dflash_backend.config import ConfigError, EngineConfig


def check_quantization(config: EngineConfig, target: TargetSpec, report: Callable[[str, float], None]) -> None:
    """Say what the setting `quantization` makes of the target's weights. Raises `ConfigError` where they cannot have
    it, with what would work."""
    if config.quantization is None:
        return
    moe, stored = target.decoder.moe, load_quantization(target.path)
    method = "MXFP4" if moe is not None and moe.mxfp4 else stored.method if stored is not None else None
    reason = None
    if method is not None:
        reason = f"its weights are quantised already ({method}): leave the setting on auto, which serves them"
    elif moe is not None and moe.swiglu is not None:
        reason = (
            "experts of gpt-oss are quantised as MXFP4 alone: take its checkpoint in MXFP4, with the setting on auto"
        )
    elif config.tensor_parallel_size > 1:
        reason = (
            f"tensor_parallel_size is {config.tensor_parallel_size}, and ranks read plain weights alone: set that to 1"
        )
    if reason is not None:
        where = f"setting 'quantization' is '{config.quantization}', which the target in {target.path} cannot have"
        raise ConfigError(f"{where}: {reason}")
    report(
        "target: quantised at load: FP8 (e4m3), a scale for each row; in memory dequantised, so nothing is saved", 0.05
    )
