"""What models compute between their matrix products and their attention: as torch calls, and as Triton kernels.

What an operation computes is said beside its kernel, in `dflash_kernels`; the torch form is that kernel's reference.
Rows of all arguments are contiguous.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, Self, TypeVar

import torch
import torch.nn.functional as F

from dflash_backend.attention import KVLayer
from dflash_backend.models.cpu_product import CpuWeight
from dflash_backend.models.linear import Linear, PackedLinear, Product, ProductOf
from dflash_backend.models.rope import Rotary
from dflash_kernels import (
    activation,
    context_write,
    conv_heads,
    cpu_library,
    cpu_ops,
    delta_chunks,
    delta_rule,
    grouped_conv,
    invariant_linear,
    markov_step,
    measured_linear,
    moe,
    moe_routing,
    prompt_lookup,
    qk_norm_rope_write,
    quantised_linear,
    quantised_moe,
    scaled_linear,
    selector_walk,
)
from dflash_kernels import rms_norm as norms
from dflash_kernels.cpu_ops import HAS_CPU_OPS, PackedWeight
from dflash_kernels.dispatch import use_triton
from dflash_kernels.measured_linear import use_measured_products as use_measured_products
from dflash_kernels.quantised_weight import FP8, QuantisedWeight


class HasProducts(Protocol):
    """A part of a model that multiplies."""

    def with_product(self, product_of: ProductOf) -> Self:
        """The same weights, multiplied by what `product_of` chooses for each."""


Part = TypeVar("Part", bound=HasProducts)


@dataclass(frozen=True)
class Rotation:
    """The rotary tables of a pass, shared by its layers.

    With `rows` (int64 `[num_tokens]`) row `rows[i]` of cos and sin `[max_positions, head_dim]` is token i's; without,
    they have been gathered: `[num_tokens, 1, head_dim]`.
    """

    cos: torch.Tensor
    sin: torch.Tensor
    rows: torch.Tensor | None = None

    @property
    def tables(self) -> tuple[torch.Tensor, ...]:
        """cos, sin and, where there are any, rows."""
        return (self.cos, self.sin) if self.rows is None else (self.cos, self.sin, self.rows)


class LayerOps:
    """The operations as a few torch calls each; `TritonLayerOps` replaces all of them. keeps_quantised: whether weights
    that can stay quantised should, since products by them save memory. keeps_blocks: whether
    weights stay in the blocks of GGUF that a file has, where products by them are there (`PackedWeight.of_blocks`)."""

    keeps_quantised = False
    keeps_blocks = False

    rms_norm = staticmethod(norms.rms_norm_reference)
    add_rms_norm = staticmethod(norms.add_rms_norm_reference)
    silu_mul = staticmethod(activation.silu_mul_reference)
    gelu_mul = staticmethod(activation.gelu_mul_reference)
    route = staticmethod(moe_routing.route_reference)
    experts_mlp = staticmethod(moe.experts_mlp_reference)
    quantised_experts_mlp = staticmethod(quantised_moe.quantised_experts_mlp_reference)
    prompt_lookup = staticmethod(prompt_lookup.prompt_lookup_reference)
    grouped_conv = staticmethod(grouped_conv.grouped_conv_reference)
    selector_walk = staticmethod(selector_walk.selector_walk_reference)
    markov_step = staticmethod(markov_step.markov_step_reference)
    conv_heads = staticmethod(conv_heads.conv_heads_reference)
    delta_block = staticmethod(delta_rule.delta_block)
    delta_chunked = staticmethod(delta_rule.chunked)
    _qk_norm_rope_write: Callable[..., torch.Tensor] = staticmethod(qk_norm_rope_write.qk_norm_rope_write_reference)
    _context_write: Callable[..., None] = staticmethod(context_write.context_write_reference)

    def product_of(self, weight: torch.Tensor | QuantisedWeight) -> Product | PackedWeight:
        """What a target multiplies by `weight` with."""
        return F.linear if isinstance(weight, torch.Tensor) else quantised_linear.quantised_linear_reference

    def linear_rope_write(
        self,
        linear: Linear,
        x: torch.Tensor,
        qk_norm: torch.Tensor | None,
        eps: float,
        rotation: Rotation,
        slots: torch.Tensor,
        cache: KVLayer,
        padded: bool,
    ) -> torch.Tensor:
        """`qk_norm_rope_write` of a product of x."""
        return self.qk_norm_rope_write(linear(x), qk_norm, eps, rotation, slots, cache, padded)

    def linear_norm(
        self, linear: Linear, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """`add_rms_norm` of a product of x and the residual."""
        return self.add_rms_norm(linear(x), residual, weight, eps)

    def gated_mlp(self, gate_up: Linear, down: Linear, x: torch.Tensor, is_gelu: bool) -> torch.Tensor:
        """The products of an MLP, and its gate between them."""
        return down((self.gelu_mul if is_gelu else self.silu_mul)(gate_up(x)))

    def laid_out(self, part: Part) -> Part:
        """A drafter's products, with their weights in the order that suits the device."""
        return part

    @staticmethod
    def rotation(rotary: Rotary, positions: torch.Tensor) -> Rotation:
        """The rotation of tokens at `positions` (int64 `[n]`)."""
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
        """The rotated queries of a layer's projection; K and V go to `slots`, which with `padded` may be below 0."""
        return self._qk_norm_rope_write(
            qkv, qk_norm, eps, *rotation.tables, slots, cache.slots, padded, cache.slot_scales
        )

    def context_write(
        self,
        projected: torch.Tensor,
        k_norm: torch.Tensor | None,
        eps: float,
        rotation: Rotation,
        slots: torch.Tensor,
        caches: list[KVLayer],
        padded: bool,
    ) -> None:
        """The drafter's context KV to `slots` of every layer's cache. With `padded` slots may be below 0. Raises
        `ValueError` where kernels write to caches that are no parts of one allocation."""
        layers = [cache.slots for cache in caches]
        self._context_write(projected, k_norm, eps, *rotation.tables, slots, layers, padded)


class CpuLayerOps(LayerOps):
    """The operations in C++, where they have been built; what they do not know goes to torch."""

    keeps_blocks = True

    rms_norm = staticmethod(cpu_ops.rms_norm)
    add_rms_norm = staticmethod(cpu_ops.add_rms_norm)
    silu_mul = staticmethod(cpu_ops.silu_mul)
    gelu_mul = staticmethod(cpu_ops.gelu_mul)
    _qk_norm_rope_write = staticmethod(cpu_ops.qk_norm_rope_write)
    _context_write = staticmethod(cpu_ops.context_write)

    def product_of(self, weight: torch.Tensor | QuantisedWeight) -> Product | PackedWeight:
        if isinstance(weight, torch.Tensor) and PackedWeight.fits(weight):
            return PackedWeight(weight)
        return super().product_of(weight)

    def laid_out(self, part: Part) -> Part:
        return part.with_product(self.product_of)

    def linear_rope_write(
        self,
        linear: Linear,
        x: torch.Tensor,
        qk_norm: torch.Tensor | None,
        eps: float,
        rotation: Rotation,
        slots: torch.Tensor,
        cache: KVLayer,
        padded: bool,
    ) -> torch.Tensor:
        if type(linear) is not PackedLinear or cache.data.dtype not in cpu_ops.KV_DTYPES:
            return super().linear_rope_write(linear, x, qk_norm, eps, rotation, slots, cache, padded)
        weight, bias, cos, sin = linear.packed, linear.bias, rotation.cos, rotation.sin
        return cpu_ops.linear_rope_write(
            weight, bias, x, qk_norm, eps, cos, sin, slots, cache.data.flatten(0, 1), padded, cache.slot_scales
        )

    def linear_norm(
        self, linear: Linear, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if type(linear) is not PackedLinear:
            return super().linear_norm(linear, x, residual, weight, eps)
        return cpu_ops.linear_norm(linear.packed, linear.bias, x, residual, weight, eps)

    def gated_mlp(self, gate_up: Linear, down: Linear, x: torch.Tensor, is_gelu: bool) -> torch.Tensor:
        if type(gate_up) is not PackedLinear or type(down) is not PackedLinear or x.dim() != 2:
            return super().gated_mlp(gate_up, down, x, is_gelu)
        return cpu_ops.gated_mlp(gate_up.packed, gate_up.bias, down.packed, down.bias, x, is_gelu)


class InvariantLayerOps(LayerOps):
    """The torch operations of a target with `batch_invariant`, on a CPU: a token's results have the same bits whatever
    other tokens are there. What is not replaced computes each row, or each number, by itself."""

    silu_mul = staticmethod(activation.invariant_silu_mul_reference)
    gelu_mul = staticmethod(activation.invariant_gelu_mul_reference)
    experts_mlp = staticmethod(moe.invariant_experts_mlp_reference)

    def product_of(self, weight: torch.Tensor | QuantisedWeight) -> Product | PackedWeight:
        """By oneDNN in float32, for any number of rows, so that one library does all."""
        assert isinstance(weight, torch.Tensor), "weights are dequantised for operations of torch"
        if not CpuWeight.fits(weight):
            return invariant_linear.invariant_linear_reference
        packed = CpuWeight(weight)

        def product(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
            return invariant_linear.invariant_linear_reference(x, weight, bias, packed.multiply)

        return product


class TritonLayerOps(LayerOps):
    """The operations as kernels. They need a GPU, or Triton's interpreter, and skip slots below 0 in any case."""

    keeps_quantised = True

    rms_norm = staticmethod(norms.rms_norm)
    add_rms_norm = staticmethod(norms.add_rms_norm)
    silu_mul = staticmethod(activation.silu_mul)
    gelu_mul = staticmethod(activation.gelu_mul)
    route = staticmethod(moe_routing.route)
    experts_mlp = staticmethod(moe.experts_mlp)
    quantised_experts_mlp = staticmethod(quantised_moe.quantised_experts_mlp)
    prompt_lookup = staticmethod(prompt_lookup.prompt_lookup)
    grouped_conv = staticmethod(grouped_conv.grouped_conv)
    selector_walk = staticmethod(selector_walk.selector_walk)
    markov_step = staticmethod(markov_step.markov_step)
    conv_heads = staticmethod(conv_heads.conv_heads)
    delta_block = staticmethod(delta_chunks.delta_block)
    delta_chunked = staticmethod(delta_chunks.chunked)
    _qk_norm_rope_write = staticmethod(qk_norm_rope_write.qk_norm_rope_write)
    _context_write = staticmethod(context_write.context_write)

    def product_of(self, weight: torch.Tensor | QuantisedWeight) -> Product | PackedWeight:
        if isinstance(weight, torch.Tensor):
            return measured_linear.product_of(weight)
        return quantised_linear.quantised_linear

    @staticmethod
    def rotation(rotary: Rotary, positions: torch.Tensor) -> Rotation:
        # The kernels read the tables' rows themselves.
        return Rotation(rotary.cos, rotary.sin, positions)


class InvariantTritonLayerOps(TritonLayerOps):
    """As `InvariantLayerOps`, as kernels."""

    experts_mlp = staticmethod(moe.invariant_experts_mlp)
    quantised_experts_mlp = staticmethod(quantised_moe.invariant_quantised_experts_mlp)

    def product_of(self, weight: torch.Tensor | QuantisedWeight) -> Product | PackedWeight:
        if isinstance(weight, torch.Tensor):
            return invariant_linear.invariant_linear
        return quantised_linear.invariant_quantised_linear


class Fp8ActivationsLayerOps(TritonLayerOps):
    """As `TritonLayerOps`, but activations are quantised before products by FP8 weights. Experts are an operation
    of their own, whose activations are not."""

    def __init__(self, dtype: torch.dtype) -> None:
        """dtype: of activations."""
        self._dtype = dtype

    def product_of(self, weight: torch.Tensor | QuantisedWeight) -> Product | PackedWeight:
        if isinstance(weight, QuantisedWeight) and weight.kind == FP8:
            return scaled_linear.product_for(weight, self._dtype)
        return super().product_of(weight)


class InvariantFp8ActivationsLayerOps(InvariantTritonLayerOps):
    """As `Fp8ActivationsLayerOps` and `InvariantTritonLayerOps`."""

    def product_of(self, weight: torch.Tensor | QuantisedWeight) -> Product | PackedWeight:
        if isinstance(weight, QuantisedWeight) and weight.kind == FP8:
            return scaled_linear.invariant_scaled_linear
        return super().product_of(weight)


def select_ops(
    device: torch.device,
    wanted: str | None = None,
    batch_invariant: bool = False,
    fp8_activations: torch.dtype | None = None,
) -> LayerOps:
    """The operations that `use_triton` chooses, which raises `ValueError` for those that are not there.
    fp8_activations: the dtype of activations that become FP8 before products by FP8 weights, of kernels alone."""
    if use_triton(device, wanted):
        if fp8_activations is not None:
            return InvariantFp8ActivationsLayerOps() if batch_invariant else Fp8ActivationsLayerOps(fp8_activations)
        return InvariantTritonLayerOps() if batch_invariant else TritonLayerOps()
    if batch_invariant:
        return InvariantLayerOps()
    if device.type != "cpu" or wanted is not None:
        return LayerOps()
    if not HAS_CPU_OPS:
        cpu_library.build_for_next_start()
    return CpuLayerOps() if HAS_CPU_OPS else LayerOps()
