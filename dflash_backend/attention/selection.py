"""Which attention backend runs: the one asked for if it can do what the models need, else the first that can."""

from __future__ import annotations

from collections.abc import Callable

from dflash_backend.attention.cpu_backend import CpuBackend
from dflash_backend.attention.flash_attn_backend import FlashAttnBackend, flash_attn_varlen_func
from dflash_backend.attention.interface import FP8, AttentionBackend, Capabilities, Requirements
from dflash_backend.attention.torch_backend import TorchBackend
from dflash_backend.attention.triton_backend import TritonBackend
from dflash_kernels.cpu_ops import HAS_CPU_OPS
from dflash_kernels.triton_import import HAS_TRITON

Backends = dict[str, tuple[Capabilities, Callable[[int], AttentionBackend]]]
"""What can be chosen, in the order of preference of `auto`. A factory takes the KV block size."""


def installed_backends() -> Backends:
    """The backends whose packages are here.

    Our own kernels come first: they are the only ones that run everything and split a long context over the whole GPU
    for a handful of queries. On a CPU they run under Triton's interpreter alone, and only when asked for.
    """
    kinds: list[type[TritonBackend | FlashAttnBackend | TorchBackend]] = [TorchBackend]
    if HAS_CPU_OPS:
        kinds = [CpuBackend, TorchBackend]
    if HAS_TRITON:  # both need its kernels
        kinds = [TritonBackend, *([FlashAttnBackend] if flash_attn_varlen_func is not None else []), *kinds]
    return {kind.name: (kind.capabilities, kind) for kind in kinds}


BACKENDS = installed_backends()


class BackendError(ValueError):
    """No backend, or not the one asked for, can run these models."""


def lacking(capabilities: Capabilities, needs: Requirements, block_size: int) -> list[str]:
    """What `needs` and the KV block size ask for that `capabilities` does not have, in words; empty when everything
    is there."""
    missing = []
    if any(pattern.causal for pattern in needs.patterns) and not capabilities.causal:
        missing.append("causal attention")
    if not all(pattern.causal for pattern in needs.patterns) and not capabilities.non_causal:
        missing.append("non-causal attention")
    if any(pattern.sliding_window for pattern in needs.patterns) and not capabilities.sliding_window:
        missing.append("sliding-window attention")
    if any(pattern.sinks for pattern in needs.patterns) and not capabilities.sinks:
        missing.append("attention sinks")
    if capabilities.head_dims is not None:
        missing += [f"head size {size}" for size in sorted(needs.head_dims - capabilities.head_dims)]
    if needs.dtype not in capabilities.dtypes:
        missing.append(str(needs.dtype).removeprefix("torch."))
    if needs.kv_dtype not in (None, needs.dtype) and needs.kv_dtype not in capabilities.kv_dtypes:
        missing.append(f"kv_cache_dtype {'fp8' if needs.kv_dtype == FP8 else 'bfloat16'}")
    if needs.device not in capabilities.devices:
        missing.append(f"device {needs.device}")
    if block_size % capabilities.block_multiple:
        missing.append(f"kv_block_size {block_size} (it takes multiples of {capabilities.block_multiple})")
    if needs.batch_invariant and needs.device not in capabilities.batch_invariant:
        missing.append(f"batch_invariant on {needs.device} (how it splits its work follows the batch)")
    return missing


def check_installed(wanted: str | None, backends: Backends = BACKENDS) -> None:
    """Raise `BackendError` when the backend that is asked for is not here, whatever the models need."""
    if wanted is not None and wanted not in backends:
        raise BackendError(
            f"attention_backend '{wanted}' is not available in this installation, which has {', '.join(backends)}; "
            "install its package, or use 'auto'"
        )


def select_backend(
    wanted: str | None, needs: Requirements, block_size: int, backends: Backends = BACKENDS
) -> AttentionBackend:
    """The backend named `wanted`, or with None the first that can. Raises `BackendError` with those that would do."""
    missing = {name: lacking(capabilities, needs, block_size) for name, (capabilities, _) in backends.items()}
    able = [name for name in backends if not missing[name]]
    able.sort(key=lambda name: needs.device in backends[name][0].emulated)
    do = "these would do: " + ", ".join(able) if able else "none here would do"
    if wanted is None:
        if not able:
            reasons = "; ".join(f"{name} lacks {', '.join(lacks)}" for name, lacks in missing.items())
            raise BackendError(f"no attention backend can run these models: {reasons}")
        chosen = backends[able[0]][1](block_size)
        # Which package attends a row would follow from what runs beside it.
        return chosen if needs.batch_invariant else chosen.choosing_per_launch(needs)
    check_installed(wanted, backends)
    if missing[wanted]:
        raise BackendError(
            f"attention_backend '{wanted}' lacks {', '.join(missing[wanted])}, which these models need; {do}"
        )
    return backends[wanted][1](block_size)
