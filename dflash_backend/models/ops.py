"""The operations between a model's matrix products and its attention, in two forms: torch, and fused Triton kernels.

`select_ops` chooses when a model is built; layers, decoder and drafter call them. What an operation computes is said
beside its kernel, in `dflash_kernels`. The torch form is that of a CPU and the reference of the other.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch

from dflash_backend.attention import KVLayer
from dflash_backend.models.rope import Rotary
from dflash_kernels import context_write, qk_norm_rope_write, rms_norm, silu_mul
from dflash_kernels.form import takes_kernels


@dataclass(frozen=True)
class Rotation:
    """The rotary tables of a pass, shared by its layers: made by `LayerOps.rotation`, read by the same operations.

    With `rows` (int64 `[num_tokens]`) row `rows[i]` of cos and sin `[max_positions, head_dim]` is token i's; without,
    they have been gathered: `[num_tokens, 1, head_dim]`.
    """

    cos: torch.Tensor
    sin: torch.Tensor
    rows: torch.Tensor | None = None


class LayerOps(Protocol):
    """What a decoder layer is made of besides products and attention. Rows of all arguments are contiguous."""

    kernels: bool
    """Whether these are Triton's kernels, for parts that choose their own form by it (`moe.py`)."""

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        """RMSNorm over the last dimension: `[n, size]` and a weight `[size]` -> `[n, size]`."""
        ...

    def add_rms_norm(
        self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The norm of `x + residual`, and that sum: all `[n, size]`. Neither argument is changed."""
        ...

    def silu_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        """`silu(gate) * up`: `[n, 2 * inner]`, gate before up, -> `[n, inner]`."""
        ...

    def rotation(self, rotary: Rotary, positions: torch.Tensor) -> Rotation:
        """What tokens at `positions` (int64 `[n]`) rotate by."""
        ...

    def qk_norm_rope_write(
        self,
        qkv: torch.Tensor,
        qk_norm: torch.Tensor | None,
        eps: float,
        rotation: Rotation,
        slots: torch.Tensor,
        cache: KVLayer,
        padded: bool,
    ) -> torch.Tensor:
        """Rotated queries `[n, num_heads, head_dim]` of a layer's projection
        `[n, (num_heads + 2 * num_kv_heads) * head_dim]`; its K and V go to `slots` (int64 `[n]`; with `padded` there
        may be some below 0, whose K/V is written nowhere). qk_norm: `[num_heads + num_kv_heads, head_dim]`, or None.
        """
        ...

    def context_write(
        self,
        projected: torch.Tensor,
        k_norm: torch.Tensor,
        eps: float,
        rotation: Rotation,
        slots: torch.Tensor,
        caches: list[KVLayer],
        padded: bool,
    ) -> None:
        """The drafter's context K/V, `[n, num_layers * 2 * num_kv_heads * head_dim]` before norm and rotation, to
        `slots` of every layer's cache. k_norm: `[num_layers, num_kv_heads, head_dim]`. `slots`, `padded`: as above."""
        ...


class TorchOps:
    """The references themselves: a few torch calls each."""

    kernels = False

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        """See `LayerOps.rms_norm`."""
        return rms_norm.rms_norm_reference(x, weight, eps)

    def add_rms_norm(
        self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See `LayerOps.add_rms_norm`."""
        return rms_norm.add_rms_norm_reference(x, residual, weight, eps)

    def silu_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        """See `LayerOps.silu_mul`."""
        return silu_mul.silu_mul_reference(gate_up)

    def rotation(self, rotary: Rotary, positions: torch.Tensor) -> Rotation:
        """See `LayerOps.rotation`: gathered once for all layers."""
        return Rotation(*rotary.tables(positions))

    def qk_norm_rope_write(
        self,
        qkv: torch.Tensor,
        qk_norm: torch.Tensor | None,
        eps: float,
        rotation: Rotation,
        slots: torch.Tensor,
        cache: KVLayer,
        padded: bool,
    ) -> torch.Tensor:
        """See `LayerOps.qk_norm_rope_write`."""
        return qk_norm_rope_write.qk_norm_rope_write_reference(
            qkv, qk_norm, eps, rotation.cos, rotation.sin, slots, cache.slots, padded
        )

    def context_write(
        self,
        projected: torch.Tensor,
        k_norm: torch.Tensor,
        eps: float,
        rotation: Rotation,
        slots: torch.Tensor,
        caches: list[KVLayer],
        padded: bool,
    ) -> None:
        """See `LayerOps.context_write`."""
        layers = [cache.slots for cache in caches]
        context_write.context_write_reference(projected, k_norm, eps, rotation.cos, rotation.sin, slots, layers, padded)


class TritonOps:
    """One kernel for each operation. Needs a GPU, or Triton's interpreter."""

    kernels = True

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        """See `LayerOps.rms_norm`."""
        return rms_norm.rms_norm(x, weight, eps)

    def add_rms_norm(
        self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See `LayerOps.add_rms_norm`."""
        return rms_norm.add_rms_norm(x, residual, weight, eps)

    def silu_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        """See `LayerOps.silu_mul`."""
        return silu_mul.silu_mul(gate_up)

    def rotation(self, rotary: Rotary, positions: torch.Tensor) -> Rotation:
        """See `LayerOps.rotation`: kernels read the tables' rows themselves."""
        return Rotation(rotary.cos, rotary.sin, positions)

    def qk_norm_rope_write(
        self,
        qkv: torch.Tensor,
        qk_norm: torch.Tensor | None,
        eps: float,
        rotation: Rotation,
        slots: torch.Tensor,
        cache: KVLayer,
        padded: bool,
    ) -> torch.Tensor:
        """See `LayerOps.qk_norm_rope_write`. The kernel skips slots below 0 with or without `padded`."""
        assert rotation.rows is not None
        return qk_norm_rope_write.qk_norm_rope_write(
            qkv, qk_norm, eps, rotation.cos, rotation.sin, rotation.rows, slots, cache.slots
        )

    def context_write(
        self,
        projected: torch.Tensor,
        k_norm: torch.Tensor,
        eps: float,
        rotation: Rotation,
        slots: torch.Tensor,
        caches: list[KVLayer],
        padded: bool,
    ) -> None:
        """See `LayerOps.context_write`. Raises `ValueError` unless the caches are parts of one allocation."""
        assert rotation.rows is not None
        context_write.context_write(
            projected, k_norm, eps, rotation.cos, rotation.sin, rotation.rows, slots, stacked(caches)
        )


def stacked(caches: list[KVLayer]) -> torch.Tensor:
    """The layers' memory as one tensor `[num_layers, num_slots, 2, num_kv_heads, head_dim]`, without a copy.

    Raises `ValueError` unless they follow one another in one allocation, as those of `PagedKVCache` do.
    """
    first = caches[0].data
    size = first.numel()
    for index, cache in enumerate(caches):
        data = cache.data
        follows = data.data_ptr() == first.data_ptr() + index * size * data.element_size() and data.is_contiguous()
        if not follows or data.untyped_storage().data_ptr() != first.untyped_storage().data_ptr():
            raise ValueError(
                f"the K/V of layer {index} does not follow that of layer {index - 1} in one allocation; allocate the "
                "layers as one tensor, which the Triton operations write in one launch"
            )
    return first.as_strided((len(caches), *first.shape), (size, *first.stride())).flatten(1, 2)


def select_ops(device: torch.device, wanted: str | None = None) -> LayerOps:
    """The operations of the form that `dflash_kernels.form.takes_kernels` says, which also raises."""
    return TritonOps() if takes_kernels(device, wanted) else TorchOps()
