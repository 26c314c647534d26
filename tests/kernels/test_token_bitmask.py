"""The kernel that hides what a grammar does not allow equals its reference."""

from __future__ import annotations

import pytest
import torch

from dflash_kernels.token_bitmask import apply_token_bitmask, apply_token_bitmask_reference, num_words
from tests.kernels.inputs import DEVICE

TILE = 64


def random_masks(count: int, vocab: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(vocab)
    return torch.randint(-(2**31), 2**31, (count, num_words(vocab)), generator=generator).to(torch.int32)


@pytest.mark.parametrize("vocab", [31, 32, 33, 64, 500])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_kernel_equals_its_reference(vocab: int, dtype: torch.dtype) -> None:
    logits = torch.randn(6, vocab, generator=torch.Generator().manual_seed(1)).to(dtype)
    masks, rows = random_masks(3, vocab), torch.tensor([4, 0, 5], dtype=torch.int32)
    expected, found = logits.clone(), logits.to(DEVICE)
    apply_token_bitmask_reference(expected, masks, rows)
    apply_token_bitmask(found, masks.to(DEVICE), rows.to(DEVICE), TILE)
    assert torch.equal(found.cpu(), expected)
    assert torch.equal(expected[[1, 2, 3]], logits[[1, 2, 3]])


def test_a_bit_belongs_to_the_token_of_its_number() -> None:
    logits = torch.zeros(1, 70)
    masks = torch.zeros(1, 3, dtype=torch.int32)
    masks[0, 0], masks[0, 1], masks[0, 2] = 1 << 5, -(2**31), 1 << 3
    apply_token_bitmask_reference(logits, masks, torch.tensor([0], dtype=torch.int32))
    assert (logits[0] == 0).nonzero().flatten().tolist() == [5, 63, 67]


def test_rows_may_be_part_of_a_wider_tensor() -> None:
    wide = torch.zeros(2, 200, device=DEVICE)
    apply_token_bitmask(
        wide[:, :150], random_masks(1, 150).to(DEVICE), torch.tensor([1], dtype=torch.int32, device=DEVICE), TILE
    )
    assert (wide[0] == 0).all()
    assert (wide[:, 150:] == 0).all()


def test_no_masks_change_nothing() -> None:
    logits = torch.randn(2, 40).to(DEVICE)
    before = logits.clone()
    apply_token_bitmask(logits, random_masks(0, 40).to(DEVICE), torch.zeros(0, dtype=torch.int32, device=DEVICE))
    assert torch.equal(logits, before)
