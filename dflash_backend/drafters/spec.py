"""What the rest of the project knows of a drafter, whatever its method, and of a checkpoint whatever its format."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from dflash_backend.checkpoints.describe import Facts
from dflash_backend.checkpoints.spec import DecoderSpec, TargetSpec


@dataclass(frozen=True, kw_only=True)
class DraftSpec(ABC):
    """A drafter. Each method has a subclass.

    method: its name in `registry.METHODS`. num_speculative_tokens: k where no setting says it.
    """

    method: ClassVar[str]

    num_speculative_tokens: int

    @abstractmethod
    def summary(self, k: int) -> str:
        """What it is in a few words, drafting k tokens."""

    def facts(self) -> Facts:
        """Label and text of what is particular to the method."""
        return []


@dataclass(frozen=True, kw_only=True)
class DraftModelSpec(DraftSpec):
    """A drafter that is a model, with a checkpoint, weights and KV of its own.

    path: its directory, or the file of its config, read alone. format: of its files.
    num_speculative_tokens: k that the checkpoint asks for.
    target_layer_ids: in the layer-id convention: i is the output of target decoder layer i, 0-based. Empty where the
    checkpoint leaves it to the target (`for_target`).
    causal: per drafter layer, whether a query sees only positions up to its own.
    vocab_size: the target's, as the drafter's config has it. draft_vocab_size: tokens that the drafter can propose;
    fewer than vocab_size are mapped to the target's ids by the checkpoint's `d2t`.
    target_hidden_size: width of one feature. num_target_layers, target_name: of the target that it was made for; None
    where the checkpoint does not say.
    has_embedding, has_lm_head: the checkpoint ships its own; else the target's serve.
    scales_embedding: the target's embedding, where it serves, is as the target's first layer reads it (of Gemma 4 times
    the root of the hidden size), else as it is stored.
    normed_last_layer: the feature of the target's last layer is taken after the final norm, else before it.
    notes: sentences on what the checkpoint leaves open or says twice, and how it was read; for the log.
    """

    path: Path
    format: str
    decoder: DecoderSpec
    target_layer_ids: tuple[int, ...]
    causal: tuple[bool, ...]
    vocab_size: int
    draft_vocab_size: int
    target_hidden_size: int
    num_target_layers: int | None = None
    target_name: str | None = None
    has_embedding: bool
    has_lm_head: bool
    dtype: str
    scales_embedding: bool = False
    normed_last_layer: bool = False
    notes: tuple[str, ...] = ()

    @property
    @abstractmethod
    def kind(self) -> str:
        """The method in the field's words."""

    @property
    def config_alone(self) -> bool:
        """Whether `path` is the file of a config, read without weights: what they say is not known, then."""
        return self.path.is_file()

    @property
    @abstractmethod
    def max_speculative_tokens(self) -> int:
        """The largest k."""

    @property
    @abstractmethod
    def limit_in_words(self) -> str:
        """Why k is at most `max_speculative_tokens`, to follow the drafter's name."""

    def summary(self, k: int) -> str:
        return (
            f"drafter {self.path.name} ({self.format}, {self.decoder.num_layers} layers, k = {k}, target layers "
            f"{list(self.target_layer_ids)})"
        )

    @property
    def num_features(self) -> int:
        """Target layers whose features are read."""
        return len(self.target_layer_ids)

    @property
    def maps_vocabulary(self) -> bool:
        """Whether draft token ids differ from the target's."""
        return self.draft_vocab_size < self.vocab_size

    def for_target(self, target: TargetSpec) -> DraftModelSpec:
        """The drafter beside a target, with what its own checkpoint leaves open as far as the target decides it."""
        return self

    def mismatch(self, target: TargetSpec) -> str | None:
        """What of the method does not fit the target; None where all does."""
        return None
