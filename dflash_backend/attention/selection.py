"""Which attention backend runs: the one asked for if it can do what the models need, else the first that can."""

from __future__ import annotations

from collections.abc import Callable

from dflash_backend.attention.interface import AttentionBackend, Capabilities, Requirements
from dflash_backend.attention.torch_backend import TorchBackend

# In the order of preference of `auto`. A factory takes the KV block size.
BACKENDS: dict[str, tuple[Capabilities, Callable[[int], AttentionBackend]]] = {
    TorchBackend.name: (TorchBackend.capabilities, TorchBackend),
}


class BackendError(ValueError):
    """No backend, or not the one asked for, can run these models."""


def lacking(capabilities: Capabilities, needs: Requirements) -> list[str]:
    """What `needs` asks for that `capabilities` does not have, in words; empty when everything is there."""
    missing = []
    if any(pattern.causal for pattern in needs.patterns) and not capabilities.causal:
        missing.append("causal attention")
    if not all(pattern.causal for pattern in needs.patterns) and not capabilities.non_causal:
        missing.append("non-causal attention")
    if any(pattern.sliding_window for pattern in needs.patterns) and not capabilities.sliding_window:
        missing.append("sliding-window attention")
    if capabilities.head_dims is not None:
        missing += [f"head size {size}" for size in sorted(needs.head_dims - capabilities.head_dims)]
    if needs.dtype not in capabilities.dtypes:
        missing.append(str(needs.dtype).removeprefix("torch."))
    if needs.device not in capabilities.devices:
        missing.append(f"device {needs.device}")
    return missing


def select_backend(
    wanted: str | None,
    needs: Requirements,
    block_size: int,
    backends: dict[str, tuple[Capabilities, Callable[[int], AttentionBackend]]] = BACKENDS,
) -> AttentionBackend:
    """The backend named `wanted`, or with None the first that can. Raises `BackendError` with those that would do."""
    able = [name for name, (capabilities, _) in backends.items() if not lacking(capabilities, needs)]
    do = "these would do: " + ", ".join(able) if able else "none here would do"
    if wanted is None:
        if not able:
            reasons = "; ".join(f"{name} lacks {', '.join(lacking(c, needs))}" for name, (c, _) in backends.items())
            raise BackendError(f"no attention backend can run these models: {reasons}")
        return backends[able[0]][1](block_size)
    if wanted not in backends:
        raise BackendError(f"attention_backend '{wanted}' is not available in this installation; {do}")
    missing = lacking(backends[wanted][0], needs)
    if missing:
        raise BackendError(f"attention_backend '{wanted}' lacks {', '.join(missing)}, which these models need; {do}")
    return backends[wanted][1](block_size)
