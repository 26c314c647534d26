"""The kernel that injects the drafter's context into all layers equals its reference."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
import torch

from dflash_kernels.context_write import context_write, context_write_reference
from tests.kernels.inputs import A_ROUNDING_APART, DEVICE, HALF_DTYPES, rotary_tables

EPS = 1e-6
NUM_SLOTS = 18
MAX_POSITIONS = 40


@dataclass(frozen=True)
class Case:
    """Arguments of the kernel. The caches are `memory` from its second layer on: a write to slot -1 hits the layer
    before."""

    projected: torch.Tensor
    k_norm: torch.Tensor
    cos: torch.Tensor
    sin: torch.Tensor
    positions: torch.Tensor
    slots: torch.Tensor
    memory: torch.Tensor

    @classmethod
    def make(cls, num_tokens: int, num_layers: int, num_kv_heads: int, head_dim: int) -> Case:
        """Scattered positions and slots, every third token a padding one; memory full of noise."""
        generator = torch.Generator().manual_seed(num_tokens)

        def random(*shape: int) -> torch.Tensor:
            return torch.randn(shape, generator=generator).to(DEVICE)

        cos, sin = rotary_tables(MAX_POSITIONS, head_dim)
        slots = torch.randperm(NUM_SLOTS, generator=generator)[:num_tokens]
        slots[2::3] = -1
        return cls(
            projected=random(num_tokens, num_layers * 2 * num_kv_heads * head_dim),
            k_norm=random(num_layers, num_kv_heads, head_dim),
            cos=cos.to(DEVICE),
            sin=sin.to(DEVICE),
            positions=torch.randint(MAX_POSITIONS, (num_tokens,), generator=generator).to(DEVICE),
            slots=slots.to(DEVICE),
            memory=random(1 + num_layers, NUM_SLOTS, 2, num_kv_heads, head_dim),
        )

    def to(self, dtype: torch.dtype) -> Case:
        moved = {name: value.to(dtype) for name, value in vars(self).items() if value.is_floating_point()}
        return replace(self, **moved)

    def run(self) -> torch.Tensor:
        """The memory afterwards, by the kernel."""
        memory = self.memory.clone()
        context_write(self.projected, self.k_norm, EPS, self.cos, self.sin, self.positions, self.slots, memory[1:])
        return memory

    def run_reference(self) -> torch.Tensor:
        memory = self.memory.clone()
        cos, sin = self.cos[self.positions].unsqueeze(1), self.sin[self.positions].unsqueeze(1)
        context_write_reference(self.projected, self.k_norm, EPS, cos, sin, self.slots, memory[1:], padded=True)
        return memory


def assert_equal_to_float64(case: Case) -> None:
    expected = case.to(torch.float64).run_reference()
    torch.testing.assert_close(case.run().double(), expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("head_dim", [16, 64, 80, 96, 128, 256])
def test_every_head_size_equals_float64(head_dim: int) -> None:
    assert_equal_to_float64(Case.make(4, 2, 2, head_dim))


@pytest.mark.parametrize("num_tokens", [0, 1, 11])
@pytest.mark.parametrize(("num_layers", "num_kv_heads"), [(1, 1), (5, 8), (3, 5), (2, 1)])
def test_any_number_of_layers_heads_and_tokens_equals_float64(
    num_layers: int, num_kv_heads: int, num_tokens: int
) -> None:
    assert_equal_to_float64(Case.make(num_tokens, num_layers, num_kv_heads, 80))


def test_padding_tokens_write_nothing_and_values_are_copied() -> None:
    case = Case.make(7, 3, 2, 64)
    memory = case.run()
    written = case.slots[case.slots >= 0]
    assert len(written) == 5
    untouched = sorted(set(range(NUM_SLOTS)) - set(written.tolist()))
    assert torch.equal(memory[:, untouched], case.memory[:, untouched])
    assert torch.equal(memory[0], case.memory[0])
    values = case.projected.view(7, 3, 2, 2, 64)[case.slots >= 0, :, 1].transpose(0, 1)
    assert torch.equal(memory[1:, written, 1], values)


@pytest.mark.parametrize("dtype", HALF_DTYPES)
def test_half_precision_is_rounded_where_the_reference_rounds(dtype: torch.dtype) -> None:
    case = Case.make(7, 3, 2, 128).to(dtype)
    actual, expected = case.run(), case.run_reference()
    assert (actual == expected).float().mean() > 0.99
    torch.testing.assert_close(actual, expected, **A_ROUNDING_APART)
