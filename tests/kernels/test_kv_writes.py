"""The kernels that normalise, rotate and write KV equal their references: those of a layer's projection, and those of
the drafter's context, into all layers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import pytest
import torch

from dflash_kernels.context_write import context_write, context_write_reference
from dflash_kernels.qk_norm_rope_write import qk_norm_rope_write, qk_norm_rope_write_reference
from tests.kernels.inputs import A_ROUNDING_APART, DEVICE, HALF_DTYPES, random, rotary_tables

EPS = 1e-6
NUM_SLOTS = 24
MAX_POSITIONS = 40
HEAD_DIMS = [16, 64, 80, 96, 128, 256]


@dataclass(frozen=True)
class Case:
    """Arguments of a kernel: scattered positions and slots, every third token a padding one. The caches are `memory`,
    which is full of noise, from its second entry on: a write to slot -1 hits the first."""

    projected: torch.Tensor
    norm: torch.Tensor | None
    cos: torch.Tensor
    sin: torch.Tensor
    positions: torch.Tensor
    slots: torch.Tensor
    memory: torch.Tensor

    @classmethod
    def make(cls, projected: torch.Tensor, norm: torch.Tensor | None, memory: torch.Tensor) -> Case:
        num_tokens, head_dim = len(projected), memory.shape[-1]
        generator = torch.Generator().manual_seed(num_tokens)
        cos, sin = (table.to(DEVICE) for table in rotary_tables(MAX_POSITIONS, head_dim))
        slots = torch.randperm(NUM_SLOTS, generator=generator)[:num_tokens]
        slots[2::3] = -1
        positions = torch.randint(MAX_POSITIONS, (num_tokens,), generator=generator)
        return cls(projected, norm, cos, sin, positions.to(DEVICE), slots.to(DEVICE), memory)

    def to(self, dtype: torch.dtype) -> Case:
        tensors = {name: value for name, value in vars(self).items() if value is not None}
        return replace(self, **{name: value.to(dtype) for name, value in tensors.items() if value.is_floating_point()})

    def run(self) -> list[torch.Tensor]:
        """What the kernel returns, and the memory afterwards."""
        raise NotImplementedError

    def run_reference(self) -> list[torch.Tensor]:
        """The same of the reference, which takes a row of the tables for each token."""
        raise NotImplementedError

    @property
    def rows_of_tables(self) -> tuple[torch.Tensor, torch.Tensor]:
        return self.cos[self.positions].unsqueeze(1), self.sin[self.positions].unsqueeze(1)

    def assert_equal_to_float64(self) -> None:
        for actual, expected in zip(self.run(), self.to(torch.float64).run_reference(), strict=True):
            torch.testing.assert_close(actual.double(), expected, atol=1e-5, rtol=1e-5)


class LayerCase(Case):
    def run(self) -> list[torch.Tensor]:
        memory = self.memory.clone()
        tables = (self.cos, self.sin, self.positions)
        query = qk_norm_rope_write(self.projected, self.norm, EPS, *tables, self.slots, memory[1:])
        return [query, memory]

    def run_reference(self) -> list[torch.Tensor]:
        memory = self.memory.clone()
        arguments = (self.projected, self.norm, EPS, *self.rows_of_tables, self.slots, memory[1:])
        return [qk_norm_rope_write_reference(*arguments, padded=True), memory]


class ContextCase(Case):
    def run(self) -> list[torch.Tensor]:
        memory = self.memory.clone()
        context_write(self.projected, self.norm, EPS, self.cos, self.sin, self.positions, self.slots, memory[1:])
        return [memory]

    def run_reference(self) -> list[torch.Tensor]:
        memory = self.memory.clone()
        context_write_reference(
            self.projected, self.norm, EPS, *self.rows_of_tables, self.slots, memory[1:], padded=True
        )
        return [memory]


def layer(num_tokens: int, head_dim: int, heads: tuple[int, int] = (4, 2), norm: bool = True) -> Case:
    """`heads`: query heads and KV heads."""
    num_heads, num_kv_heads = heads
    projected = random(num_tokens, (num_heads + 2 * num_kv_heads) * head_dim)
    weights = random(num_heads + num_kv_heads, head_dim, seed=1) if norm else None
    return LayerCase.make(projected, weights, random(1 + NUM_SLOTS, 2, num_kv_heads, head_dim, seed=2))


def context(num_tokens: int, head_dim: int, num_layers: int = 3, num_kv_heads: int = 2, norm: bool = True) -> Case:
    projected = random(num_tokens, num_layers * 2 * num_kv_heads * head_dim)
    memory = random(1 + num_layers, NUM_SLOTS, 2, num_kv_heads, head_dim, seed=2)
    weights = random(num_layers, num_kv_heads, head_dim, seed=1) if norm else None
    return ContextCase.make(projected, weights, memory)


Make = Callable[[int, int], Case]
FORMS: list[Make] = [layer, partial(layer, norm=False), context, partial(context, norm=False)]
SIZES: list[Make] = [
    # Heads that are alike, grouped, one for all, and numbers that no tile is a multiple of.
    *(partial(layer, heads=heads) for heads in [(1, 1), (4, 4), (8, 2), (16, 1), (7, 3)]),
    *(
        partial(context, num_layers=layers, num_kv_heads=heads)
        for layers, heads in [(1, 1), (5, 8), (3, 5), (2, 1), (2, 2)]
    ),
]


@pytest.mark.parametrize("make", FORMS, ids=["layer", "layer without norm", "context", "context without norm"])
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_every_head_size_equals_float64(head_dim: int, make: Make) -> None:
    make(5, head_dim).assert_equal_to_float64()


@pytest.mark.parametrize("num_tokens", [0, 1, 13])
@pytest.mark.parametrize("make", SIZES)
def test_any_number_of_layers_heads_and_tokens_equals_float64(make: Make, num_tokens: int) -> None:
    make(num_tokens, 80).assert_equal_to_float64()


@pytest.mark.parametrize("make", FORMS, ids=["layer", "layer without norm", "context", "context without norm"])
@pytest.mark.parametrize("dtype", HALF_DTYPES)
def test_half_precision_is_rounded_where_the_reference_rounds(dtype: torch.dtype, make: Make) -> None:
    case = make(7, 128).to(dtype)
    for actual, expected in zip(case.run(), case.run_reference(), strict=True):
        assert (actual == expected).float().mean() > 0.99
        torch.testing.assert_close(actual, expected, **A_ROUNDING_APART)


def test_padding_tokens_write_nothing_and_values_are_copied() -> None:
    case = layer(7, 64)
    _, memory = case.run()
    written = 1 + case.slots[case.slots >= 0]
    assert len(written) == 5
    untouched = sorted(set(range(1 + NUM_SLOTS)) - set(written.tolist()))
    assert torch.equal(memory[untouched], case.memory[untouched])
    values = case.projected.view(7, 8, 64)[case.slots >= 0, 6:]
    assert torch.equal(memory[written, 1], values)


def test_padding_tokens_write_nothing_to_any_layer_and_values_are_copied() -> None:
    case = context(7, 64)
    (memory,) = case.run()
    written = case.slots[case.slots >= 0]
    assert len(written) == 5
    untouched = sorted(set(range(NUM_SLOTS)) - set(written.tolist()))
    assert torch.equal(memory[:, untouched], case.memory[:, untouched])
    assert torch.equal(memory[0], case.memory[0])
    values = case.projected.view(7, 3, 2, 2, 64)[case.slots >= 0, :, 1].transpose(0, 1)
    assert torch.equal(memory[1:, written, 1], values)


def test_rows_of_the_projection_and_slots_of_the_cache_may_lie_apart() -> None:
    case = layer(5, 64)
    expected_query, expected_memory = case.run()
    wide = torch.cat([case.projected, case.projected], dim=1)[:, : case.projected.shape[1]]
    layers = torch.stack([case.memory, torch.zeros_like(case.memory)], dim=1)
    cache = layers[1:, 0]
    query = qk_norm_rope_write(wide, case.norm, EPS, case.cos, case.sin, case.positions, case.slots, cache)
    assert torch.equal(query, expected_query)
    assert torch.equal(layers[:, 0], expected_memory)
    assert not layers[:, 1].any()
