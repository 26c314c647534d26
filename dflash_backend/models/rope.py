"""Rotary position embedding: frequencies of every scaling kind, and the tables that `ops.py` rotates with.

Used by the targets and by the drafter; `RopeSpec` says what a checkpoint asks for. Frequencies and angles are computed
in float32 in the order in which `transformers` does it: at long positions the last bit of a frequency is an angle that
shows.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F

from dflash_backend.checkpoints.spec import DecoderSpec, RopeSpec


class Rotary:
    """Rotary position embedding with precomputed tables (Su et al., arXiv 2104.09864; half-split pairing).

    Tables are `[max_positions, head_dim]`, computed in float32 and kept in the model's dtype, times the spec's
    `attention_factor`; the sine's first half is negated, so that a rotation is `x * cos + swap_halves(x) * sin`. Where
    a part of the head is rotated, the pairs behind that part's are turned by nothing (`hybrid_layers.py` puts them
    there).
    """

    def __init__(self, spec: DecoderSpec, max_positions: int, device: torch.device, dtype: torch.dtype) -> None:
        frequencies = inverse_frequencies(spec.rope, spec.rotary_dim or spec.head_dim)
        angles = torch.arange(max_positions, dtype=torch.float32)[:, None] * frequencies
        cos, sin = angles.cos() * spec.rope.attention_factor, angles.sin() * spec.rope.attention_factor
        unrotated = spec.head_dim // 2 - len(frequencies)
        if unrotated:
            cos, sin = F.pad(cos, (0, unrotated), value=1.0), F.pad(sin, (0, unrotated))
        self.cos = torch.cat([cos, cos], dim=1).to(device=device, dtype=dtype)
        self.sin = torch.cat([-sin, sin], dim=1).to(device=device, dtype=dtype)

    def tables(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """cos and sin for `positions` (int64 `[n]`): each `[n, 1, head_dim]`, to be shared by all layers."""
        # Not by brackets: with some fifty tokens torch would begin threads for them, which then wait in a loop beside
        # those of the layers.
        cos, sin = (table.index_select(0, positions) for table in (self.cos, self.sin))
        return cos.unsqueeze(1), sin.unsqueeze(1)


def inverse_frequencies(rope: RopeSpec, head_dim: int) -> torch.Tensor:
    """Radians per position of each pair: float32 `[head_dim / 2]`, fastest first."""
    if rope.kind == "default":
        return base_frequencies(rope.theta, head_dim)
    if rope.kind == "linear":
        return base_frequencies(rope.theta, head_dim) / rope.factor
    if rope.kind == "dynamic":
        return base_frequencies(dynamic_theta(rope, head_dim), head_dim)
    if rope.kind == "llama3":
        return llama3_frequencies(rope, head_dim)
    if rope.kind == "yarn":
        return yarn_frequencies(rope, head_dim)
    if rope.kind == "proportional":
        turned = int(rope.share * head_dim // 2)
        return F.pad(base_frequencies(rope.theta, head_dim)[:turned], (0, head_dim // 2 - turned)) / rope.factor
    raise ValueError(f"no rotary frequencies for kind '{rope.kind}'")


def base_frequencies(theta: float, head_dim: int) -> torch.Tensor:
    """`theta ** (-2i / head_dim)` for pair i: float32 `[head_dim / 2]`."""
    return 1.0 / theta ** (torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim)


def dynamic_theta(rope: RopeSpec, head_dim: int) -> float:
    """The base that NTK scaling takes for sequences of `rope.length`; unscaled up to the original length."""
    length = max(rope.length, rope.original_max_positions)
    stretch = rope.factor * length / rope.original_max_positions - (rope.factor - 1)
    return rope.theta * stretch ** (head_dim / (head_dim - 2))


def llama3_frequencies(rope: RopeSpec, head_dim: int) -> torch.Tensor:
    """Llama 3.1 (arXiv 2407.21783): wavelengths that fit `high_freq_factor` times into the original length stay, those
    that do not fit `low_freq_factor` times are stretched by `factor`, and those between are blended."""
    frequencies = base_frequencies(rope.theta, head_dim)
    wavelengths = 2 * math.pi / frequencies
    turns = rope.original_max_positions / wavelengths
    stretched = frequencies / rope.factor
    kept = (turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    blended = (1 - kept) * frequencies / rope.factor + kept * frequencies
    slow = wavelengths > rope.original_max_positions / rope.low_freq_factor
    fast = wavelengths < rope.original_max_positions / rope.high_freq_factor
    return torch.where(slow, stretched, torch.where(fast, frequencies, blended))


def yarn_frequencies(rope: RopeSpec, head_dim: int) -> torch.Tensor:
    """YaRN (arXiv 2309.00071, section 3.2): pairs that turn more than `beta_fast` times over the original length stay,
    those that turn less than `beta_slow` times are stretched by `factor`, with a linear ramp over the pairs between."""
    powers = rope.theta ** (torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim)

    def pair_of(turns: float) -> float:
        """Index of the pair that makes this many turns over the original length."""
        wavelength = rope.original_max_positions / (turns * 2 * math.pi)
        return head_dim * math.log(wavelength) / (2 * math.log(rope.theta))

    first, last = pair_of(rope.beta_fast), pair_of(rope.beta_slow)
    if rope.truncate:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, head_dim - 1)
    # An empty ramp is a step.
    width = last - first if last != first else 0.001
    stretched = ((torch.arange(head_dim // 2, dtype=torch.float32) - first) / width).clamp(0, 1)
    kept = 1 - stretched
    return 1.0 / (rope.factor * powers) * (1 - kept) + 1.0 / powers * kept
