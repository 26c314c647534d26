"""The two ways to number the places where target features are taken. Converted here and nowhere else.

A layer id i (DFlash, ours everywhere else) is the output of decoder layer i, 0-based. A boundary id i (EAGLE and
speculators) is the hidden state after i layers have run. Layer id i and boundary id i + 1 are the same features.
"""

from __future__ import annotations

from collections.abc import Sequence

from dflash_backend.checkpoints.errors import CheckpointError


def to_layer_ids(boundary_ids: Sequence[int]) -> tuple[int, ...]:
    """Layer ids of boundary ids, which are at least 1: before the first layer there is no layer's output."""
    return tuple(boundary - 1 for boundary in boundary_ids)


def to_boundary_ids(layer_ids: Sequence[int]) -> tuple[int, ...]:
    """Boundary ids of layer ids."""
    return tuple(layer + 1 for layer in layer_ids)


def default_layer_ids(num_target_layers: int, num_draft_layers: int) -> tuple[int, ...]:
    """The layer ids that the method takes where a checkpoint names none: the middle layer for a one-layer drafter,
    else one for each drafter layer, evenly spaced from 1 to N - 3 (DFlash, arXiv 2602.06036)."""
    if num_draft_layers == 1:
        return (num_target_layers // 2,)
    first, last = 1, num_target_layers - 3
    if last < first:
        raise CheckpointError(
            f"target_layer_ids is missing and has no default for a target of {num_target_layers} layers; name them"
        )
    step = (last - first) / (num_draft_layers - 1)
    return tuple(round(first + i * step) for i in range(num_draft_layers))
