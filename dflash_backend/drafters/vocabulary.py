"""The tokens that a drafter can propose: the map from its own ids to the target's, and the tensors that none reads."""

from __future__ import annotations

from pathlib import Path

import torch

from dflash_backend.checkpoints.files import read_headers
from dflash_backend.checkpoints.spec import CheckpointError
from dflash_backend.drafters.spec import DraftModelSpec


def is_unused(spec: DraftModelSpec, name: str) -> bool:
    """Whether a tensor of the checkpoint has no part in serving: what only training needs, and maps from a vocabulary
    to itself."""
    return name == "t2d" or name.startswith("verifier_") or (name == "d2t" and not spec.maps_vocabulary)


def vocabulary_map(spec: DraftModelSpec, offsets: torch.Tensor) -> torch.Tensor:
    """The target's id of each draft id, from `d2t` (int64 `[draft_vocab_size]`, what to add to a draft id).

    Raises `CheckpointError` when an id is outside the target's vocabulary or two draft ids share one: then
    the map is damaged.
    """
    draft_ids = torch.arange(len(offsets), device=offsets.device)
    # Compared before the sum, which could overflow.
    outside = ((offsets < -draft_ids) | (offsets >= spec.vocab_size - draft_ids)).nonzero().flatten()
    if len(outside):
        draft_id = int(outside[0])
        raise CheckpointError(
            f"{_file_of_map(spec)}: tensor 'd2t' is {int(offsets[draft_id])} at draft id {draft_id}; expected a target "
            f"id (draft id + d2t) from 0 to {spec.vocab_size - 1}"
        )
    ids = draft_ids + offsets
    ordered, order = ids.sort(stable=True)
    repeats = (ordered[1:] == ordered[:-1]).nonzero().flatten()
    if len(repeats):
        first, second = order[repeats[0] : repeats[0] + 2].tolist()
        raise CheckpointError(
            f"{_file_of_map(spec)}: tensor 'd2t' maps the draft ids {first} (d2t {int(offsets[first])}) and {second} "
            f"(d2t {int(offsets[second])}) both to the target id {int(ids[first])}; expected one draft id for each"
        )
    return ids


def _file_of_map(spec: DraftModelSpec) -> Path:
    return read_headers(spec.path)["d2t"].file
