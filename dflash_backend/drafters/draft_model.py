"""What drafters with a model share: their weights and loading, the target's embedding and head where a checkpoint ships
none, and the map from a smaller vocabulary to the target's."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, Self, TypeVar

import torch
import torch.nn.functional as F

from dflash_backend.attention import AttentionBackend, KVLayer
from dflash_backend.checkpoints.files import TensorHeader, read_headers
from dflash_backend.checkpoints.spec import CheckpointError
from dflash_backend.checkpoints.weights import Progress, WeightSource, check_weights, load_weights
from dflash_backend.drafters.base import Drafter, DrafterFactory, LoadOptions, draft_patterns
from dflash_backend.drafters.spec import DraftModelSpec
from dflash_backend.models.interface import TargetModel
from dflash_backend.models.linear import Linear
from dflash_backend.models.ops import LayerOps, select_ops
from dflash_backend.models.rope import Rotary

ModelSpec = TypeVar("ModelSpec", bound=DraftModelSpec, contravariant=True)


@dataclass(frozen=True)
class DraftWeights:
    """The parameters that all of them have. The target's stand in for what a checkpoint does not ship: None here.

    fc: the captured features -> hidden. hidden_norm: of a hidden state. embedding: `[vocab_size, hidden]`. lm_head:
    hidden -> draft_vocab_size. d2t: int64 `[draft_vocab_size]`, what to add to a draft id; None where draft ids are the
    target's.
    """

    fc: Linear
    hidden_norm: torch.Tensor
    final_norm: torch.Tensor
    embedding: torch.Tensor | None
    lm_head: Linear | None
    d2t: torch.Tensor | None

    @classmethod
    def read(cls, source: WeightSource, spec: Any) -> Self:
        """Read every tensor of a drafter."""
        return cls(**read_shared(source, spec))


def read_shared(source: WeightSource, spec: DraftModelSpec, prefix: str = "") -> dict[str, Any]:
    """The fields of `DraftWeights`. prefix: of the hidden norm's name."""
    hidden = spec.decoder.hidden_size
    return {
        "fc": Linear.read(source, "", {"fc": hidden}, spec.num_features * spec.target_hidden_size),
        "hidden_norm": source.tensor(f"{prefix}hidden_norm.weight", hidden),
        "final_norm": source.tensor("norm.weight", hidden),
        "embedding": source.tensor("embed_tokens.weight", spec.vocab_size, hidden) if spec.has_embedding else None,
        "lm_head": Linear.read(source, "", {"lm_head": spec.draft_vocab_size}, hidden) if spec.has_lm_head else None,
        "d2t": source.integers("d2t", spec.draft_vocab_size) if spec.maps_vocabulary else None,
    }


class DraftModel:
    """Parameters and arithmetic of a drafter. embedding, lm_head: as in `DraftWeights`. id_map: int64
    `[draft_vocab_size]`, the target's id of each draft id; None where they are the same."""

    weights_class: ClassVar[type[DraftWeights]]
    spec: Any

    def __init__(
        self, spec: DraftModelSpec, weights: DraftWeights, max_positions: int, ops: LayerOps | None = None
    ) -> None:
        """Able to run positions below `max_positions`. `ops`: by default those for the weights' device."""
        self.spec = spec
        self.eps = spec.decoder.rms_norm_eps
        self.fc = weights.fc
        self.hidden_norm, self.final_norm = weights.hidden_norm, weights.final_norm
        self.embedding, self.lm_head = weights.embedding, weights.lm_head
        self.id_map = None if weights.d2t is None else vocabulary_map(spec, weights.d2t)
        self.device, self.dtype = weights.final_norm.device, weights.final_norm.dtype
        self.ops = ops or select_ops(self.device)
        self.rotary = Rotary(spec.decoder, max_positions, self.device, self.dtype)
        self.patterns = draft_patterns(spec)

    @classmethod
    def load(
        cls,
        spec: DraftModelSpec,
        max_positions: int,
        dtype: torch.dtype,
        device: torch.device,
        progress: Progress | None = None,
        ops: LayerOps | None = None,
    ) -> Self:
        """Load the drafter in `spec.path`. Raises `CheckpointError`."""
        weights = load_weights(
            spec.path,
            lambda source: cls.weights_class.read(source, spec),
            dtype,
            device,
            ignored=lambda name: is_unused(spec, name),
            progress=progress,
            keep_quantised=(ops or select_ops(device)).keeps_quantised,
        )
        return cls(spec, weights, max_positions, ops)


class ModelDrafter(Drafter[ModelSpec]):
    """Runs a `DraftModel` for the worker, over `caches`, its layers of the paged KV.

    Embedding and LM head are the checkpoint's own where it ships them, else the target's; a smaller draft vocabulary
    then takes its rows of the target's head.
    """

    model_class: ClassVar[type[DraftModel]]

    def __init__(
        self, model: DraftModel, target: TargetModel, caches: list[KVLayer], backend: AttentionBackend
    ) -> None:
        self.model: Any = model
        self.target = target
        self.caches = caches
        self.backend = backend
        own_head = target.lm_head if model.id_map is None else target.lm_head.rows(model.id_map)
        self.lm_head = model.lm_head or own_head

    @classmethod
    def check_weights(cls, spec: ModelSpec) -> dict[str, TensorHeader]:
        return check_weights(
            spec.path,
            lambda source: cls.model_class.weights_class.read(source, spec),
            ignored=lambda name: is_unused(spec, name),
        )

    @classmethod
    def load(cls, spec: ModelSpec, options: LoadOptions) -> DrafterFactory:
        return partial(cls, cls.model_class.load(spec, **vars(options)))

    def _embed(self, token_ids: torch.Tensor) -> torch.Tensor:
        """int64 `[n]` -> `[n, hidden]`."""
        if self.model.embedding is None:
            return self.target.embed(token_ids, self.model.spec.scales_embedding)
        return F.embedding(token_ids, self.model.embedding)


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
