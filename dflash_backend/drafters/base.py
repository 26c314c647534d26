"""What a drafter is to the engine: block drafters and autoregressive ones alike."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import torch

from dflash_backend.attention import AttentionBackend, AttentionPattern, KVLayer, RowLayout
from dflash_backend.checkpoints.files import TensorHeader
from dflash_backend.checkpoints.weights import Progress
from dflash_backend.drafters.spec import DraftSpec
from dflash_backend.models.interface import TargetModel
from dflash_backend.models.ops import LayerOps
from dflash_backend.sampling.filtering import SamplingTensors
from dflash_backend.sampling.random import Stream
from dflash_backend.sampling.vocabulary import VocabularyMap


@dataclass(frozen=True)
class DraftBatch:
    """What a step's rows draft from: for each row that drafts a query at its anchor, the last token of the request, and
    one at the position of each of its drafts; the rows behind one another, on the device.

    token_ids, positions, slots: int64 `[num_queries]`. layout: the rows as attention runs them. width: queries of each
    row where all have the same number. draft_index: int64 `[num_drafts]`, the queries at drafts; None where each row
    has `width` queries, of which all but the first are. padded: whether queries may be padding, with slots of -1.
    """

    token_ids: torch.Tensor
    positions: torch.Tensor
    slots: torch.Tensor
    layout: RowLayout
    width: int
    draft_index: torch.Tensor | None = None
    padded: bool = False

    def of_drafts(self, values: torch.Tensor) -> torch.Tensor:
        """Of `[num_queries, ...]` those of the drafts: `[num_drafts, ...]`."""
        if self.draft_index is not None:
            return values[self.draft_index]
        return values.unflatten(0, (-1, self.width))[:, 1:].flatten(0, 1)


@dataclass(frozen=True)
class ContextBatch:
    """Accepted tokens whose context KV a drafter writes.

    features: `[n, L * target_hidden]`. positions, slots: int64 `[n]`. padded: whether there may be slots below 0, for
    which nothing is written. next_token_ids: int64 `[n]`, the token behind each position, for a drafter with
    `reads_next_tokens`.
    """

    features: torch.Tensor
    positions: torch.Tensor
    slots: torch.Tensor
    padded: bool = False
    next_token_ids: torch.Tensor | None = None


@dataclass(frozen=True)
class LoadOptions:
    """How a drafter is loaded: to run positions below `max_positions`, in `dtype` on `device`, with the operations
    `ops`. progress: called with each file and the share that has been read."""

    max_positions: int
    dtype: torch.dtype
    device: torch.device
    progress: Progress
    ops: LayerOps


class DrawOps(Protocol):
    """How tokens are chosen. `worker.step_ops` has these operations."""

    def argmax(self, logits: torch.Tensor) -> torch.Tensor:
        """The most likely token of each of the `logits` `[n, vocab]`: int64 `[n]`."""
        ...

    def probabilities(self, logits: torch.Tensor, parameters: SamplingTensors) -> torch.Tensor:
        """As `sampling.filtering.probabilities`."""
        ...

    def draw(self, weights: torch.Tensor, seeds: torch.Tensor, positions: torch.Tensor, stream: Stream) -> torch.Tensor:
        """As `sampling.filtering.draw`."""
        ...


class DraftSampler:
    """Turns draft logits into draft tokens, and keeps the distributions that they were drawn from.

    parameters: those of the drafts that are drawn; None where every draft is the argmax. index: int64 `[m]`, the drafts
    that they belong to; None: all of them. sampled: bool `[num_drafts]`, which of them are really drawn; None: all.
    """

    def __init__(
        self,
        ops: DrawOps,
        parameters: SamplingTensors | None = None,
        index: torch.Tensor | None = None,
        sampled: torch.Tensor | None = None,
    ) -> None:
        self.ops = ops
        self.parameters = parameters
        self.index = index
        self.sampled = sampled
        self.probs: torch.Tensor | None = None

    def choose(
        self, logits: torch.Tensor, positions: torch.Tensor, vocabulary: VocabularyMap | None = None
    ) -> torch.Tensor:
        """Draft tokens in the target's ids, int64 `[num_drafts]`, for `logits` `[num_drafts, draft vocab]`.

        positions: int64 `[num_drafts]`, of each token. vocabulary: None where draft ids are the target's. Afterwards
        `probs` `[m, target vocab]` holds the distributions, where any draft is drawn. Temperature, top-k and the like
        act on the draft vocabulary, before the map: any distribution will do, as long as it is the one that is drawn
        from. What padding gets has no meaning.
        """
        tokens = self._chosen(logits, positions)
        if vocabulary is None:
            return tokens
        if self.probs is not None:
            self.probs = vocabulary.probabilities(self.probs)
        return vocabulary.tokens(tokens)

    def _chosen(self, logits: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        parameters, index = self.parameters, self.index
        if parameters is None:
            return self.ops.argmax(logits)
        if index is None:
            self.probs = self.ops.probabilities(logits, parameters)
            drawn = self.ops.draw(self.probs, parameters.seeds, positions, Stream.DRAFT)
            return drawn if self.sampled is None else torch.where(self.sampled, drawn, self.ops.argmax(logits))
        tokens = self.ops.argmax(logits)
        self.probs = self.ops.probabilities(logits[index], parameters)
        tokens[index] = self.ops.draw(self.probs, parameters.seeds, positions[index], Stream.DRAFT)
        return tokens


Spec = TypeVar("Spec", bound=DraftSpec, contravariant=True)

DrafterFactory = Callable[[TargetModel, list[KVLayer], AttentionBackend], "Drafter[Any]"]
"""The drafter beside a target, over its own layers of the paged KV, under the target's block ids (TOGETHER)."""


class Drafter(Protocol[Spec]):
    """Proposes tokens and keeps its own context KV in step with the target's."""

    lookahead_base: int
    """Positions reserved beyond k when drafting k tokens (RESERVE): 1 for a block drafter, whose queries are the anchor
    and all drafts; 0 for an autoregressive one, which never runs the last draft."""

    hit_trim: int
    """Positions at the end of a prefix hit whose context KV depends on tokens behind the hit, and is made again: 0
    where it depends on nothing but the position's own features."""

    reads_next_tokens: bool
    """Whether `inject` wants the token that follows each position."""

    capture: tuple[int, ...]
    """Layers of the target whose outputs `inject` wants, as `TargetModel.forward` counts them."""

    placeholder_id: int
    """The token of a `DraftBatch`'s queries behind the anchor."""

    @classmethod
    def check_weights(cls, spec: Spec) -> dict[str, TensorHeader]:
        """The tensors that the drafter takes from its checkpoint, by the headers of its files. Raises
        `CheckpointError` when they are not those that its config asks for."""
        ...

    @classmethod
    def load(cls, spec: Spec, options: LoadOptions) -> DrafterFactory:
        """Load the drafter in `spec.path`. Raises `CheckpointError`."""
        ...

    def inject(self, batch: ContextBatch) -> None:
        """Write the context KV of accepted tokens."""
        ...

    def propose(self, batch: DraftBatch, sampler: DraftSampler) -> torch.Tensor:
        """The drafts of all rows behind one another, int64 `[num_drafts]`, without a wait for the device."""
        ...


def draft_patterns(spec: DraftSpec) -> tuple[AttentionPattern, ...]:
    """What the queries of each drafter layer see."""
    layers = zip(spec.causal, spec.decoder.sliding_windows, strict=True)
    return tuple(AttentionPattern(causal, window) for causal, window in layers)
