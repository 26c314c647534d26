"""The matrix product of a decoder, with the weights that it multiplies by."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
import torch.nn.functional as F

from dflash_backend.checkpoints.weights import WeightSource
from dflash_backend.models.cpu_product import CpuWeight

Product = Callable[[torch.Tensor, torch.Tensor, "torch.Tensor | None"], torch.Tensor]
"""`x @ weight.T + bias` of x `[..., in_features]`, as `torch.nn.functional.linear`."""
ProductOf = Callable[[torch.Tensor], Product]
"""The product for a weight."""


class Linear:
    """`x @ weight.T + bias`. weight: `[out_features, in_features]`; bias: `[out_features]`, or None. product: what
    multiplies; in float32 on a CPU `F.linear` gives way to oneDNN where that is faster."""

    __slots__ = ("_cpu", "bias", "product", "weight")

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None = None, product: Product = F.linear) -> None:
        self.weight = weight
        self.bias = bias
        self.product = product
        self._cpu = CpuWeight(weight) if product is F.linear and CpuWeight.fits(weight) else None

    @classmethod
    def read(
        cls, source: WeightSource, prefix: str, out_features: Mapping[str, int], in_features: int, bias: bool = False
    ) -> Linear:
        """The projections of one input as one product: their rows lie below one another, in the order of
        `out_features`, which has the size of each by its name. `prefix` comes before the names."""
        total, sizes = sum(out_features.values()), list(out_features.values())
        linear = cls(source.empty(total, in_features), source.empty(total) if bias else None)
        for kind, parameter in (("weight", linear.weight), ("bias", linear.bias)):
            if parameter is not None:
                read = source.read_projection if kind == "weight" else source.read
                for name, part in zip(out_features, parameter.split(sizes), strict=True):
                    read(f"{prefix}{name}.{kind}", part)
        return linear

    @classmethod
    def stacked(cls, parts: Sequence[Linear]) -> Linear:
        """The outputs of all parts side by side, in memory of its own. Either all parts have a bias or none has."""
        biases = [part.bias for part in parts if part.bias is not None]
        return cls(torch.cat([part.weight for part in parts]), torch.cat(biases) if biases else None)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """`[..., in_features]` -> `[..., out_features]`."""
        if self._cpu is not None and self._cpu.pays(x.numel() // x.shape[-1]):
            return self._cpu.product(x, self.bias)
        return self.product(x, self.weight, self.bias)

    def with_product(self, product_of: ProductOf) -> Linear:
        """The same weights, multiplied by what `product_of` chooses for them."""
        product = product_of(self.weight)
        return self if product is self.product else Linear(self.weight, self.bias, product)

    def rows(self, index: torch.Tensor | slice) -> Linear:
        """The product that gives the outputs `index` alone: a view for a slice, a copy for int64 indices."""
        return Linear(self.weight[index], None if self.bias is None else self.bias[index], self.product)

    @property
    def in_features(self) -> int:
        """Size of the input."""
        return self.weight.shape[1]

    @property
    def out_features(self) -> int:
        """Size of the output."""
        return self.weight.shape[0]


def embedded(token_ids: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
    """Rows of `table`, `[vocab_size, hidden_size]`: int64 `[n]` -> `[n, hidden_size]`. Zeros from an empty table, which
    ranks have that get the rows from another one."""
    return F.embedding(token_ids, table) if len(table) else table.new_zeros(len(token_ids), table.shape[1])
