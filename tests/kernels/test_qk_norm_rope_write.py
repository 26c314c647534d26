"""The kernel that normalises, rotates and writes a layer's projection equals its reference."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch

from dflash_kernels.qk_norm_rope_write import qk_norm_rope_write, qk_norm_rope_write_reference
from tests.kernels.inputs import A_ROUNDING_APART, DEVICE, HALF_DTYPES, rotary_tables

EPS = 1e-6
NUM_SLOTS = 24
MAX_POSITIONS = 40
HEAD_DIMS = [16, 64, 80, 96, 128, 256]
# Query heads and K/V heads: alike, grouped, one for all, and numbers that no tile is a multiple of.
HEADS = [(1, 1), (4, 4), (8, 2), (16, 1), (7, 3)]


@dataclass(frozen=True)
class Case:
    """Arguments of the kernel. The cache is `memory` from its second slot on: a write to slot -1 hits the first."""

    qkv: torch.Tensor
    qk_norm: torch.Tensor | None
    cos: torch.Tensor
    sin: torch.Tensor
    positions: torch.Tensor
    slots: torch.Tensor
    memory: torch.Tensor

    @classmethod
    def make(cls, num_tokens: int, heads: tuple[int, int], head_dim: int, norm: bool = True) -> Case:
        """Scattered positions and slots, every third token a padding one; memory full of noise."""
        generator = torch.Generator().manual_seed(num_tokens)

        def random(*shape: int) -> torch.Tensor:
            return torch.randn(shape, generator=generator).to(DEVICE)

        num_heads, num_kv_heads = heads
        cos, sin = rotary_tables(MAX_POSITIONS, head_dim)
        slots = torch.randperm(NUM_SLOTS, generator=generator)[:num_tokens]
        slots[2::3] = -1
        return cls(
            qkv=random(num_tokens, (num_heads + 2 * num_kv_heads) * head_dim),
            qk_norm=random(num_heads + num_kv_heads, head_dim) if norm else None,
            cos=cos.to(DEVICE),
            sin=sin.to(DEVICE),
            positions=torch.randint(MAX_POSITIONS, (num_tokens,), generator=generator).to(DEVICE),
            slots=slots.to(DEVICE),
            memory=random(1 + NUM_SLOTS, 2, num_kv_heads, head_dim),
        )

    def to(self, dtype: torch.dtype) -> Case:
        tensors = {name: value for name, value in vars(self).items() if value is not None}
        moved = {name: value.to(dtype) if value.is_floating_point() else value for name, value in tensors.items()}
        return Case(**({"qk_norm": None} | moved))

    def run(self) -> tuple[torch.Tensor, torch.Tensor]:
        """The queries and the memory afterwards, by the kernel."""
        memory = self.memory.clone()
        query = qk_norm_rope_write(
            self.qkv, self.qk_norm, EPS, self.cos, self.sin, self.positions, self.slots, memory[1:]
        )
        return query, memory

    def run_reference(self) -> tuple[torch.Tensor, torch.Tensor]:
        memory = self.memory.clone()
        cos, sin = self.cos[self.positions].unsqueeze(1), self.sin[self.positions].unsqueeze(1)
        query = qk_norm_rope_write_reference(self.qkv, self.qk_norm, EPS, cos, sin, self.slots, memory[1:], padded=True)
        return query, memory


def assert_equal_to_float64(case: Case) -> None:
    query, memory = case.run()
    expected_query, expected_memory = case.to(torch.float64).run_reference()
    torch.testing.assert_close(query.double(), expected_query, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(memory.double(), expected_memory, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("norm", [True, False])
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_every_head_size_equals_float64(head_dim: int, norm: bool) -> None:
    assert_equal_to_float64(Case.make(5, (4, 2), head_dim, norm))


@pytest.mark.parametrize("num_tokens", [0, 1, 13])
@pytest.mark.parametrize("heads", HEADS)
def test_any_number_of_heads_and_tokens_equals_float64(heads: tuple[int, int], num_tokens: int) -> None:
    assert_equal_to_float64(Case.make(num_tokens, heads, 80))


def test_padding_tokens_write_nothing_and_values_are_copied() -> None:
    case = Case.make(7, (4, 2), 64)
    _, memory = case.run()
    written = 1 + case.slots[case.slots >= 0]
    assert len(written) == 5
    untouched = sorted(set(range(1 + NUM_SLOTS)) - set(written.tolist()))
    assert torch.equal(memory[untouched], case.memory[untouched])
    values = case.qkv.view(7, 8, 64)[case.slots >= 0, 6:]
    assert torch.equal(memory[written, 1], values)


@pytest.mark.parametrize("norm", [True, False])
@pytest.mark.parametrize("dtype", HALF_DTYPES)
def test_half_precision_is_rounded_where_the_reference_rounds(dtype: torch.dtype, norm: bool) -> None:
    case = Case.make(7, (4, 2), 128, norm).to(dtype)
    for actual, expected in zip(case.run(), case.run_reference(), strict=True):
        assert (actual == expected).float().mean() > 0.99
        torch.testing.assert_close(actual, expected, **A_ROUNDING_APART)


def test_rows_of_the_projection_and_slots_of_the_cache_may_lie_apart() -> None:
    case = Case.make(5, (4, 2), 64)
    expected_query, expected_memory = case.run()
    wide = torch.cat([case.qkv, case.qkv], dim=1)[:, : case.qkv.shape[1]]
    layers = torch.stack([case.memory, torch.zeros_like(case.memory)], dim=1)
    cache = layers[1:, 0]
    query = qk_norm_rope_write(wide, case.qk_norm, EPS, case.cos, case.sin, case.positions, case.slots, cache)
    assert torch.equal(query, expected_query)
    assert torch.equal(layers[:, 0], expected_memory)
    assert not layers[:, 1].any()
