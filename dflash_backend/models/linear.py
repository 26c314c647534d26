"""The matrix product of a decoder, with the weights that it multiplies by: as numbers, or quantised, and with what LoRA
adapters add to it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate
from typing import Any, Self

import torch
import torch.nn.functional as F

from dflash_backend.checkpoints.lora import LoraPart
from dflash_backend.checkpoints.quantization.kept import KeptWeight
from dflash_backend.checkpoints.weights import WeightSource
from dflash_backend.models.cpu_product import CpuWeight
from dflash_kernels import quantised_linear as quantised
from dflash_kernels.cpu_ops import PackedWeight
from dflash_kernels.quantised_weight import QuantisedWeight
from dflash_kernels.triton_import import HAS_TRITON

Product = Callable[[torch.Tensor, Any, "torch.Tensor | None"], torch.Tensor]
"""`x @ weight.T + bias` of x `[..., in_features]`, as `torch.nn.functional.linear`, for one kind of weight."""
ProductOf = Callable[[torch.Tensor | QuantisedWeight], "Product | PackedWeight"]
"""The product for a weight, or the weight in an order of its own."""


class Linear:
    """`x @ weight.T + bias`. weight: `[out_features, in_features]`; bias: `[out_features]`, or None. product: what
    multiplies; in float32 on a CPU `F.linear` gives way to oneDNN where that is faster."""

    __slots__ = ("_cpu", "_weight", "bias", "device", "dtype", "in_features", "out_features", "product")

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None = None, product: Product = F.linear) -> None:
        self._weight = weight
        self.bias = bias
        self.product = product
        self._cpu = CpuWeight(weight) if product is F.linear and CpuWeight.fits(weight) else None
        self._describe(weight.shape, weight.dtype, weight.device)

    def _describe(self, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> None:
        """Sizes of output and input, the dtype of the weight's numbers, and where it is."""
        self.out_features, self.in_features = shape
        self.dtype, self.device = dtype, device

    @classmethod
    def read(
        cls, source: WeightSource, prefix: str, out_features: Mapping[str, int], in_features: int, bias: bool = False
    ) -> Linear:
        """The projections of one input as one product: their rows lie below one another, in the order of
        `out_features`, which has the size of each by its name. `prefix` comes before the names. With what the source's
        adapters add to them."""
        plain = cls._read_plain(source, prefix, out_features, in_features, bias)
        if source.adapters is None:
            return plain
        found = {
            name: source.adapters.parts(f"{prefix}{name}", size, in_features) for name, size in out_features.items()
        }
        return LoraLinear.of(plain, found, out_features) if any(found.values()) else plain

    @classmethod
    def _read_plain(
        cls, source: WeightSource, prefix: str, out_features: Mapping[str, int], in_features: int, bias: bool
    ) -> Linear:
        total, sizes = sum(out_features.values()), list(out_features.values())
        names = {f"{prefix}{name}.weight": size for name, size in out_features.items()}
        kept = read_kept(source, names, in_features) if source.keeps(names, in_features) else None
        packed = source.of_blocks(names, partial(PackedWeight.of_blocks, dtype=source.dtype)) if kept is None else None
        weight, offset = (
            source.empty(total, in_features) if kept is None and packed is None else None,
            source.empty(total) if bias else None,
        )
        for kind, parameter in (("weight", weight), ("bias", offset)):
            if parameter is not None:
                read = source.read_projection if kind == "weight" else source.read
                for name, part in zip(out_features, parameter.split(sizes), strict=True):
                    read(f"{prefix}{name}.{kind}", part)
        if kept is not None:
            return QuantisedLinear(kept[0], offset, source.dtype, order=kept[1])
        if packed is not None:
            return PackedLinear(packed, offset)
        assert weight is not None
        return cls(weight, offset)

    @classmethod
    def stacked(cls, parts: Sequence[Linear]) -> Linear:
        """The outputs of all parts side by side, in memory of its own. Either all parts have a bias or none has."""
        if isinstance(first := parts[0], LoraLinear):
            return first.beside(parts[1:])
        biases = [part.bias for part in parts if part.bias is not None]
        bias = torch.cat(biases) if biases else None
        kept = [part.quantised for part in parts if isinstance(part, QuantisedLinear) and part.order is None]
        if len(kept) == len(parts) and QuantisedWeight.alike(kept):
            return QuantisedLinear(QuantisedWeight.stacked(kept), bias, parts[0].dtype)
        return cls(torch.cat([part.weight for part in parts]), bias)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """`[..., in_features]` -> `[..., out_features]`."""
        if self._cpu is not None and self._cpu.pays(x.numel() // x.shape[-1]):
            return self._cpu.product(x, self.bias)
        return self.product(x, self._weight, self.bias)

    def with_product(self, product_of: ProductOf) -> Linear:
        """The same weights, multiplied by what `product_of` chooses for them."""
        product = product_of(self._weight)
        if isinstance(product, PackedWeight):
            return PackedLinear(product, self.bias)
        return self if product is self.product else Linear(self._weight, self.bias, product)

    def without_adapters(self) -> Linear:
        """The product alone."""
        return self

    def rows(self, index: torch.Tensor | slice) -> Linear:
        """The product that gives the outputs `index` alone: a view for a slice, a copy for int64 indices."""
        return Linear(self._weight[index], None if self.bias is None else self.bias[index], self.product)

    @property
    def weight(self) -> torch.Tensor:
        """The weight, as numbers."""
        return self._weight


class PackedLinear(Linear):
    """A product by a weight that is kept in the order in which a CPU reads it, and in no other."""

    __slots__ = ("packed",)

    def __init__(self, weight: PackedWeight, bias: torch.Tensor | None = None) -> None:
        self.packed = weight
        self.bias = bias
        self.product = F.linear
        self._describe(weight.shape, weight.dtype, weight.device)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self.packed.product(x, self.bias)

    def with_product(self, product_of: ProductOf) -> Linear:
        return self

    def rows(self, index: torch.Tensor | slice) -> Linear:
        """As `Linear.rows`; always a copy."""
        bias = None if self.bias is None else self.bias[index]
        return PackedLinear(PackedWeight(self.packed.rows(torch.arange(self.out_features)[index])), bias)

    @property
    def weight(self) -> torch.Tensor:
        """The weight as numbers, made anew whenever it is asked for."""
        return self.packed.rows(torch.arange(self.out_features))


class QuantisedLinear(Linear):
    """A product by a weight that stays quantised. dtype: what its numbers are taken for where they are asked for.
    order: int64 `[in_features]`, which number of the input each column of `quantised` is multiplied by (`desc_act` of
    GPTQ); None where they are in order."""

    __slots__ = ("order", "quantised")

    def __init__(
        self,
        weight: QuantisedWeight,
        bias: torch.Tensor | None,
        dtype: torch.dtype,
        product: Product | None = None,
        order: torch.Tensor | None = None,
    ) -> None:
        self.quantised = weight
        self.order = order
        self.bias = bias
        self.product = QUANTISED_PRODUCT if product is None else product
        self._describe(weight.shape, dtype, weight.codes.device)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self.product(x if self.order is None else x.index_select(-1, self.order), self.quantised, self.bias)

    def with_product(self, product_of: ProductOf) -> Linear:
        product = product_of(self.quantised)
        if product is self.product:
            return self
        if isinstance(product, PackedWeight):
            return PackedLinear(product, self.bias)
        return QuantisedLinear(self.quantised, self.bias, self.dtype, product, self.order)

    def rows(self, index: torch.Tensor | slice) -> Linear:
        """As `Linear.rows`; always a copy."""
        bias = None if self.bias is None else self.bias[index]
        return QuantisedLinear(self.quantised.taken(index), bias, self.dtype, self.product, self.order)

    @property
    def weight(self) -> torch.Tensor:
        """The weight as numbers, made anew whenever it is asked for."""
        numbers = self.quantised.dequantised(self.dtype)
        return numbers if self.order is None else numbers[:, self.order.argsort()]


class _AdapterIds(threading.local):
    """Each token's adapter in the pass that this thread runs: int64 `[num_tokens]`, None where all are of the target
    alone."""

    value: torch.Tensor | None = None


_adapter_ids = _AdapterIds()


@contextmanager
def using_adapters(ids: torch.Tensor | None) -> Iterator[None]:
    """A block in which products add what each token's adapter says. ids: int64 `[num_tokens]`, 0 for none; the inputs
    of products have a row for each token. Of this thread alone: parts of a step run side by side."""
    before, _adapter_ids.value = _adapter_ids.value, ids
    try:
        yield
    finally:
        _adapter_ids.value = before


class LoraLinear(Linear):
    """A product, and what adapters add to it: `base(x) + up(down(x))`, where of `down(x)` only the numbers of each
    token's adapter count.

    All adapters are one product, so that the tokens of a step may each have another one, and a captured graph holds for
    any: it costs what their ranks together cost. down: in_features -> ranks of all adapters and projections; up: those
    -> out_features. owner: int64 `[ranks]`, the adapter that each of these numbers belongs to.
    """

    __slots__ = ("base", "down", "owner", "up")

    def __init__(self, base: Linear, down: Linear, up: Linear, owner: torch.Tensor) -> None:
        self.base, self.down, self.up, self.owner = base, down, up, owner
        self.bias, self.product = base.bias, base.product
        self._describe((base.out_features, base.in_features), base.dtype, base.device)

    @classmethod
    def of(cls, base: Linear, found: Mapping[str, Sequence[LoraPart]], sizes: Mapping[str, int]) -> LoraLinear:
        """found: by projection, what each adapter adds to its rows of `base`, of which it has `sizes`. A row's sum has
        zeros for the numbers of other projections and adapters."""
        ends = dict(zip(sizes, accumulate(sizes.values()), strict=True))
        parts = [(ends[name] - sizes[name], ends[name], part) for name, each in found.items() for part in each]
        down = torch.cat([part.down for _, _, part in parts])
        up = torch.zeros(base.out_features, len(down))
        owner = torch.tensor([part.adapter for _, _, part in parts for _ in part.down])
        done = 0
        for first, end, part in parts:
            rank = len(part.down)
            up[first:end, done : done + rank] = part.up
            done += rank
        products = [Linear(each.to(base.device, base.dtype)) for each in (down, up)]
        return cls(base, products[0], products[1], owner.to(base.device))

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        if (ids := _adapter_ids.value) is None:
            return self.base(x)
        lowered = self.down(x)
        return self.base(x).add_(self.up(torch.where(ids[:, None] == self.owner, lowered, 0.0)))

    def with_product(self, product_of: ProductOf) -> Linear:
        base, down, up = (each.with_product(product_of) for each in (self.base, self.down, self.up))
        return LoraLinear(base, down, up, self.owner)

    def without_adapters(self) -> Linear:
        return self.base

    def rows(self, index: torch.Tensor | slice) -> Linear:
        return LoraLinear(self.base.rows(index), self.down, self.up.rows(index), self.owner)

    def beside(self, others: Sequence[Linear]) -> LoraLinear:
        """As `stacked` of this and others, which are rows of the same product."""
        parts = [self, *(other for other in others if isinstance(other, LoraLinear) and other.down is self.down)]
        if len(parts) <= len(others):
            raise NotImplementedError("products with adapters of their own cannot be stacked")
        base = Linear.stacked([part.base for part in parts])
        return LoraLinear(base, self.down, Linear.stacked([part.up for part in parts]), self.owner)

    @property
    def weight(self) -> torch.Tensor:
        """That of the product alone, as numbers."""
        return self.base.weight


@dataclass(frozen=True)
class Parts:
    """Parameters of a part of a model, some of which are products or have such."""

    def with_product(self, product_of: ProductOf) -> Self:
        """The same weights, multiplied by what `product_of` chooses for each."""
        found = {
            name: part.with_product(product_of) for name, part in vars(self).items() if hasattr(part, "with_product")
        }
        return replace(self, **found)

    def without_adapters(self) -> Self:
        """The same weights, without what adapters add."""
        found = {
            name: part.without_adapters() for name, part in vars(self).items() if hasattr(part, "without_adapters")
        }
        return replace(self, **found)


QUANTISED_PRODUCT: Product = quantised.quantised_linear if HAS_TRITON else quantised.quantised_linear_reference
"""What multiplies by a quantised weight unless operations choose otherwise."""


def read_kept(
    source: WeightSource, names: Mapping[str, int], in_features: int
) -> tuple[QuantisedWeight, torch.Tensor | None]:
    """The weights of these projections and numbers of rows as one, in the layout of the products; and the order of
    their columns, as of a `QuantisedLinear`."""
    read = [source.read_kept(name, size, in_features) for name, size in names.items()]
    parts = [in_products(each) for each in read]
    return parts[0] if len(parts) == 1 else QuantisedWeight.stacked(parts), read[0].order


def in_products(kept: KeptWeight) -> QuantisedWeight:
    """The same weight in the layout of the products."""
    return QuantisedWeight.of_codes(kept.kind, kept.codes, kept.scales, kept.zeros, kept.rows, kept.columns)


Table = torch.Tensor | PackedWeight
"""What rows are looked up in: `[num_rows, size]`."""


def table_of(head: Linear) -> Table:
    """A head's weight, to look up rows in it."""
    return head.packed if isinstance(head, PackedLinear) else head.weight


def embedded(token_ids: torch.Tensor, table: Table, first_id: int | None = None) -> torch.Tensor:
    """Rows of `table`, `[vocab_size, hidden_size]`: int64 `[n]` -> `[n, hidden_size]`. first_id: the token of the first
    row, where the table is a rank's slice of the vocabulary; then tokens that it lacks have zeros."""
    look_up = table.rows if isinstance(table, PackedWeight) else partial(F.embedding, weight=table)
    if first_id is None:
        return look_up(token_ids)
    num_rows, size = table.shape
    if not num_rows:
        return torch.zeros(len(token_ids), size, dtype=table.dtype, device=token_ids.device)
    row = token_ids - first_id
    missing = (row < 0) | (row >= num_rows)
    return look_up(row.clamp(0, num_rows - 1)).masked_fill_(missing[:, None], 0.0)
