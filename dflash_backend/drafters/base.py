"""What a drafter is to the engine: block drafters, autoregressive ones, and those that only read tokens.

At the end what those with a model share: weights and loading, the target's embedding and head where a checkpoint ships
none, and the map from a smaller vocabulary to the target's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, Protocol, Self, TypeVar

import numpy as np
import torch
import torch.nn.functional as F

from dflash_backend.attention import AttentionBackend, AttentionBatch, AttentionPattern, DeviceLengths, KVLayer
from dflash_backend.checkpoints.files import TensorHeader, read_headers
from dflash_backend.checkpoints.spec import CheckpointError
from dflash_backend.checkpoints.weights import Progress, WeightSource, check_weights, load_weights
from dflash_backend.drafters.spec import DraftModelSpec, DraftSpec
from dflash_backend.models.interface import TargetModel
from dflash_backend.models.linear import Linear
from dflash_backend.models.ops import LayerOps, select_ops
from dflash_backend.models.rope import Rotary


@dataclass(frozen=True)
class DraftPass:
    """One pass of an autoregressive drafter: for each of n rows a query, whose output gives the row's next draft.

    rows: int64 `[n]`, the rows as indices among those of the pass before, None for all of them. drafts: int64 `[n]`,
    the indices of their drafts among all. positions, slots: int64 `[n]`; -1 for a slot where nothing is written.
    layout: the rows as attention runs them.
    """

    rows: torch.Tensor | None
    drafts: torch.Tensor
    positions: torch.Tensor
    slots: torch.Tensor
    layout: AttentionBatch


@dataclass(frozen=True)
class DraftQueries:
    """What a drafter's model runs: for each row that drafts a query at its anchor, the last token of the request, and
    one at the position of each of its drafts; the rows behind one another, on the device.

    token_ids, positions, slots: int64 `[num_queries]`. layout: the rows as attention runs them. query_len: queries of
    each row where all have the same number. draft_index: int64 `[num_drafts]`, the queries that drafts come from; None
    where each row has `query_len` queries, of which all but the first are. padded: whether queries may be padding, with
    slots of -1. from_anchor: a row has no query at its last draft, and each draft comes from the query before it, the
    first from the anchor's; with `draft_index` of None drafts then come from all queries.
    """

    token_ids: torch.Tensor
    positions: torch.Tensor
    slots: torch.Tensor
    layout: AttentionBatch
    query_len: int
    draft_index: torch.Tensor | None = None
    padded: bool = False
    from_anchor: bool = False

    @property
    def queries_beside_drafts(self) -> int:
        """Queries of each row beside one for each draft: 0 or 1."""
        return 0 if self.from_anchor else 1

    def of_drafts(self, values: torch.Tensor) -> torch.Tensor:
        """Of `[num_queries, ...]` those of the queries that drafts come from: `[num_drafts, ...]`."""
        if self.from_anchor:
            return values
        if self.draft_index is not None:
            return values.index_select(0, self.draft_index)
        return values.unflatten(0, (-1, self.query_len))[:, 1:].flatten(0, 1)

    def draft_positions(self) -> torch.Tensor:
        """The position of each draft: int64 `[num_drafts]`."""
        return self.positions + 1 if self.from_anchor else self.of_drafts(self.positions)

    def row_starts(self) -> torch.Tensor:
        """The first query of each row, its anchor's, and the number of all queries: int64 `[R + 1]`."""
        if self.draft_index is None:
            return torch.arange(0, len(self.token_ids) + 1, self.query_len, device=self.token_ids.device)
        return torch.from_numpy(np.concatenate([[0], np.cumsum(self.layout.query_lens, dtype=np.int64)]))

    def draft_steps(self) -> Iterator[tuple[torch.Tensor | None, torch.Tensor]]:
        """The drafts of all rows from place to place: with the drafts at one place (int64 `[m]`, their indices among
        all), the rows that they are of, as indices among the rows of the place before, or None for all of these."""
        if self.draft_index is None:
            num_drafts = self.query_len - self.queries_beside_drafts
            end = len(self.token_ids) // self.query_len * num_drafts
            for place in range(num_drafts):
                yield None, torch.arange(place, end, num_drafts, device=self.token_ids.device)
            return
        lens = self.layout.query_lens.astype(np.int64) - self.queries_beside_drafts
        rows, first = np.arange(len(lens)), np.cumsum(lens) - lens
        for place in range(int(lens.max(initial=0))):
            left = (lens[rows] > place).nonzero()[0]
            rows = rows[left]
            yield torch.from_numpy(left), torch.from_numpy(first[rows] + place)

    def passes(self) -> Iterator[DraftPass]:
        """The passes in which an autoregressive drafter (`from_anchor`) drafts, one for each place of the longest row.

        The first runs at the position before the anchor, whose KV `inject` has written; each other one at the position
        of the anchor and then of the drafts, whose KV it writes.
        """
        anchors, tables = self.positions[self.row_starts()[:-1]], self.layout.block_tables
        for place, (rows, drafts) in enumerate(self.draft_steps()):
            if rows is not None:
                anchors, tables = anchors[rows], tables[rows]
            slots = self.slots[drafts - 1] if place else torch.full_like(anchors, -1)
            positions = (anchors + (place - 1)).clamp(min=0)
            yield DraftPass(rows, drafts, positions, slots, self._pass_layout(anchors, tables, place))

    def _pass_layout(self, anchors: torch.Tensor, tables: torch.Tensor, place: int) -> AttentionBatch:
        """A query for each row, `place` positions behind the one before its anchor (int64 `[n]`)."""
        ones, device = np.ones(len(anchors), dtype=np.int64), self.layout.device
        if device is None:
            return AttentionBatch(ones, anchors.numpy() + place, tables)
        ends = (anchors + place) * (device.query_lens > place)
        index = torch.arange(len(anchors), dtype=torch.int32, device=anchors.device)
        lengths = DeviceLengths(index, (ends > 0).int(), ends.int())
        # The bounds are those of the row's last query.
        return AttentionBatch(
            ones, self.layout.seq_lens, tables, lengths, self.layout.max_overestimate + self.query_len
        )

    def block_index(self) -> torch.Tensor:
        """The place of each query in its row, 0 for an anchor's: int64 `[num_queries]`."""
        every = torch.arange(len(self.token_ids), device=self.token_ids.device)
        if self.draft_index is None:
            return every % self.query_len
        return every - self.row_starts()[:-1].repeat_interleave(torch.from_numpy(self.layout.query_lens))


@dataclass(frozen=True)
class DraftBatch:
    """What a step's R rows draft from. Of their tokens where the worker keeps them, without a copy:

    tokens: int64 `[S, max_len]`, prompt and output of each request. computed: int32 `[S]`, the position of a request's
    anchor, its last token; what `tokens` holds after that is of the past, and for a request that has ended meanwhile
    it may be `max_len` or more. req_idx: int32 `[R]`, the request of each row, -1 for padding. num_drafts: int32 `[R]`,
    0 for a row that does not draft. k: the most of them.

    queries: None for a drafter without a model (`Drafter.placeholder_id`). features: `[R, L * target_hidden]`, of the
    position before each row's anchor, of the rows of `queries`; None unless `Drafter.reads_next_tokens`.
    """

    tokens: torch.Tensor
    computed: torch.Tensor
    req_idx: torch.Tensor
    num_drafts: torch.Tensor
    k: int
    queries: DraftQueries | None = None
    features: torch.Tensor | None = None


@dataclass(frozen=True)
class Drafts:
    """Draft tokens, int64, and how sure the drafter is of each, float32 of the same shape: a number that rises with
    its chance to be accepted, whatever the scale; None where it was not asked for, or nothing is known."""

    token_ids: torch.Tensor
    confidence: torch.Tensor | None = None


@dataclass(frozen=True)
class ContextBatch:
    """Accepted tokens whose context KV a drafter writes.

    features: `[n, L * target_hidden]`. positions, slots: int64 `[n]`. padded: whether there may be slots below 0, for
    which nothing is written. next_token_ids: int64 `[n]`, the token behind each position, for a drafter with
    `reads_next_tokens`. token_row: int32 `[n]`, the row of the step that each belongs to; no drafter reads it.
    """

    features: torch.Tensor
    positions: torch.Tensor
    slots: torch.Tensor
    padded: bool = False
    next_token_ids: torch.Tensor | None = None
    token_row: torch.Tensor | None = None


@dataclass(frozen=True)
class LoadOptions:
    """How a drafter is loaded: to run positions below `max_positions`, in `dtype` on `device`, with the operations
    `ops`. progress: called with each file and the share that has been read."""

    max_positions: int
    dtype: torch.dtype
    device: torch.device
    progress: Progress
    ops: LayerOps


class SampleOps(Protocol):
    """How tokens are chosen. `worker.step_ops` has these operations."""

    def argmax(self, logits: torch.Tensor) -> torch.Tensor:
        """The most likely token of each of the `logits` `[n, vocab]`: int64 `[n]`."""

    def sample(
        self,
        logits: torch.Tensor,
        temperature: torch.Tensor,
        seeds: torch.Tensor,
        positions: torch.Tensor,
        *,
        token_ids: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """The column with the largest `logits / temperature + noise`, int64 `[n]`; without noise where the temperature
        is 0. temperature: float32 `[n]`. The noise is that of seed and position (int64 `[n]`) and the token that a
        column stands for: `token_ids` (int64 `[vocab]`), by default its own number."""

    def noisy_scores(
        self, logits: torch.Tensor, temperature: torch.Tensor, seeds: torch.Tensor, positions: torch.Tensor
    ) -> torch.Tensor:
        """What `sample` takes the largest of, for columns that are token ids: float32 of the shape of `logits`."""

    def log_odds(self, logits: torch.Tensor, columns: torch.Tensor) -> torch.Tensor:
        """How sure the `logits` `[n, vocab]` are of a column (int64 `[n]`) of each row: float32 `[n]`, the log-odds of
        its probability at temperature 1."""


@dataclass(frozen=True)
class DraftSampler:
    """Turns draft logits into draft tokens.

    The output does not depend on the drafts, so any choice will do, without filters and penalties. By default it is the
    argmax; with a temperature the draft is chosen with the noise by which the target will choose. temperature: float32
    `[num_drafts]`, 0 for the argmax; seeds: int64 `[num_drafts]`. None where every draft is the argmax.
    wants_confidence: whether to say how sure the drafter is.
    """

    ops: SampleOps
    temperature: torch.Tensor | None = None
    seeds: torch.Tensor | None = None
    wants_confidence: bool = False

    def choose(
        self, logits: torch.Tensor, positions: torch.Tensor | None, token_ids: torch.Tensor | None = None
    ) -> Drafts:
        """Drafts in the target's ids, `[num_drafts]`, for `logits` `[num_drafts, draft vocab]`.

        positions: int64 `[num_drafts]`, of each token; None for the argmax, which reads none. token_ids: int64
        `[draft vocab]`, the target's id of each draft id; None where they are the same. What padding gets has no
        meaning.
        """
        if self.temperature is None or self.seeds is None:
            chosen = self.ops.argmax(logits)
        else:
            assert positions is not None
            chosen = self.ops.sample(logits, self.temperature, self.seeds, positions, token_ids=token_ids)
        confidence = self.ops.log_odds(logits, chosen) if self.wants_confidence else None
        return Drafts(chosen if token_ids is None else token_ids[chosen], confidence)

    def at(self, drafts: torch.Tensor) -> DraftSampler:
        """The sampler of these drafts alone: int64 `[m]`, their indices among all."""
        if self.temperature is None or self.seeds is None:
            return self
        return replace(self, temperature=self.temperature[drafts], seeds=self.seeds[drafts])

    def without_confidence(self) -> DraftSampler:
        """The sampler for a drafter that knows by other means than its logits how sure it is."""
        return replace(self, wants_confidence=False) if self.wants_confidence else self

    def top_candidates(
        self, logits: torch.Tensor, positions: torch.Tensor, count: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The `count` tokens of each draft that `choose` would choose from first, and their scores: float32 and int64
        `[num_drafts, count]`, for `logits` `[num_drafts, vocab]` of the target's tokens.

        A score is the logit, or with a temperature the logit divided by it plus the token's noise.
        """
        scores = logits
        if self.temperature is not None and self.seeds is not None:
            scores = self.ops.noisy_scores(logits, self.temperature, self.seeds, positions)
        values, token_ids = scores.topk(count, dim=-1)
        return values.float(), token_ids


Spec = TypeVar("Spec", bound=DraftSpec, contravariant=True)

DrafterFactory = Callable[[TargetModel, list[KVLayer], AttentionBackend], "Drafter[Any]"]
"""The drafter beside a target, over its own layers of the paged KV, under the target's block ids (TOGETHER). A drafter
without a model has no layers."""


class Drafter(Protocol[Spec]):
    """Proposes tokens and keeps its own context KV, if it has any, in step with the target's."""

    lookahead_base: int | None
    """Positions reserved beyond k when drafting k tokens (RESERVE), which are the queries that it is given beside k: 1
    for a block drafter, whose queries are the anchor and all drafts; 0 for one that never runs the last draft, be it
    autoregressive or a block drafter that samples from the anchor (`DraftQueries.from_anchor`). None: it runs no
    queries, and nothing is reserved."""

    autoregressive: bool
    """How the cost of drafting follows the number of drafts: a pass for each draft, of the rows that still draft; else
    one pass over all queries, so that k drafts cost little more than one."""

    reads_next_tokens: bool
    """Whether `inject` wants the token that follows each position, and `propose` the features before each anchor. A
    cached block is then found only by a text with the same token behind the block (PUBLISH)."""

    capture: tuple[int, ...]
    """Layers of the target whose outputs `inject` wants, as `TargetModel.forward` counts them. Empty: it has no context
    KV, and `inject` is never called."""

    placeholder_id: int | None
    """The token of the queries behind the anchor. None: it runs no queries, and a `DraftBatch` has none."""

    @classmethod
    def check_weights(cls, spec: Spec) -> dict[str, TensorHeader]:
        """The tensors that the drafter takes from its checkpoint, by the headers of its files. Raises
        `CheckpointError` when they are not those that its config asks for."""

    @classmethod
    def load(cls, spec: Spec, options: LoadOptions) -> DrafterFactory:
        """Load the drafter in `spec.path`. Raises `CheckpointError`."""

    def inject(self, batch: ContextBatch) -> None:
        """Write the context KV of accepted tokens."""

    def propose(self, batch: DraftBatch, sampler: DraftSampler) -> Drafts:
        """The drafts of all rows, without a wait for the device: those of the queries behind one another,
        `[num_drafts]`, or `[R, k]`, of which the first `DraftBatch.num_drafts` of each row count."""


def draft_patterns(spec: DraftModelSpec) -> tuple[AttentionPattern, ...]:
    """What the queries of each drafter layer see."""
    layers = zip(spec.causal, spec.decoder.sliding_windows, strict=True)
    return tuple(AttentionPattern(causal, window) for causal, window in layers)


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
        "d2t": source.tensor("d2t", spec.draft_vocab_size, dtype=torch.int64) if spec.maps_vocabulary else None,
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
        self.hidden_norm, self.final_norm = weights.hidden_norm, weights.final_norm
        self.id_map = None if weights.d2t is None else vocabulary_map(spec, weights.d2t)
        self.device, self.dtype = weights.final_norm.device, weights.final_norm.dtype
        self.ops = ops or select_ops(self.device)
        self.fc, self.embedding = self.ops.laid_out(weights.fc), weights.embedding
        self.lm_head = None if weights.lm_head is None else self.ops.laid_out(weights.lm_head)
        self.rotary = Rotary(spec.decoder, max_positions, self.device, self.dtype)
        self.patterns = draft_patterns(spec)

    @classmethod
    def load(cls, spec: DraftModelSpec, options: LoadOptions) -> Self:
        """Load the drafter in `spec.path`. Raises `CheckpointError`."""
        weights = load_weights(
            spec.path,
            lambda source: cls.weights_class.read(source, spec),
            options.dtype,
            options.device,
            ignored=lambda name: is_unused(spec, name),
            progress=options.progress,
            keep_quantised=options.ops.keeps_quantised,
            keep_blocks=options.ops.keeps_blocks,
        )
        return cls(spec, weights, options.max_positions, options.ops)


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
        self.lm_head = model.lm_head or _head_of(target, model.id_map)

    @classmethod
    def check_weights(cls, spec: ModelSpec) -> dict[str, TensorHeader]:
        return check_weights(
            spec.path,
            lambda source: cls.model_class.weights_class.read(source, spec),
            ignored=lambda name: is_unused(spec, name),
        )

    @classmethod
    def load(cls, spec: ModelSpec, options: LoadOptions) -> DrafterFactory:
        return partial(cls, cls.model_class.load(spec, options))

    def _embed(self, token_ids: torch.Tensor) -> torch.Tensor:
        """int64 `[n]` -> `[n, hidden]`."""
        if self.model.embedding is None:
            return self.target.embed(token_ids, self.model.spec.scales_embedding)
        return F.embedding(token_ids, self.model.embedding)


def _head_of(target: TargetModel, id_map: torch.Tensor | None) -> Linear:
    """The target's LM head, or its rows for a draft vocabulary of its own."""
    return target.lm_head if id_map is None else target.lm_head.rows(id_map)


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
