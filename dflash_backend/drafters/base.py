"""What a drafter is to the worker. DFlash is the first; autoregressive ones fit the same interface."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch

from dflash_backend.attention import RowLayout
from dflash_backend.sampling.filtering import SamplingRows, draw, probabilities
from dflash_backend.sampling.random import Stream
from dflash_backend.sampling.vocabulary import VocabularyMap


@dataclass(frozen=True)
class DraftBlock:
    """The rows that draft in a step.

    anchors: int64 `[num_rows]`, on the device: the last token of each request, which the target has not processed.
    positions: int64 `[num_rows]`, on the host: the anchors' positions. num_draft: int64 `[num_rows]`, on the host: k of
    each row. block_tables: int64 `[num_rows, blocks]`, on the device. slots: int64
    `[sum(num_draft + 1)]`, on the device: K/V slots of each row's positions `[position, position + num_draft]`.
    """

    anchors: torch.Tensor
    positions: np.ndarray
    num_draft: np.ndarray
    block_tables: torch.Tensor
    slots: torch.Tensor


class DraftSampler:
    """Turns draft logits into draft tokens, and keeps the distributions they were drawn from.

    `rows` has the parameters of the rows `sampled_rows` (indices into the block's rows); the other rows, and all of
    them with `rows` None (`draft_sample_method` greedy, or no sampled request), take the most likely token.
    """

    def __init__(self, rows: SamplingRows | None, sampled_rows: np.ndarray) -> None:
        self.rows = rows
        self.sampled_rows = sampled_rows
        self.probs: torch.Tensor | None = None
        self.sampled_flat: np.ndarray = np.empty(0, dtype=np.int64)

    def choose(
        self,
        logits: torch.Tensor,
        row_index: np.ndarray,
        positions: np.ndarray,
        vocabulary: VocabularyMap | None = None,
    ) -> torch.Tensor:
        """Draft tokens in the target's ids, int64 `[n]`, for `logits` `[n, draft vocab]`.

        row_index, positions: int64 `[n]`, on the host: row of the block and position of each token. vocabulary: None
        where draft ids are the target's. Afterwards `probs` `[m, target vocab]` holds the distributions of the sampled
        ones and `sampled_flat` their indices into the n. Temperature, top-k and the like act on the draft vocabulary,
        before the map: any distribution will do, as long as it is the one that is drawn from.
        """
        tokens = logits.argmax(dim=-1)
        if self.rows is not None and len(self.sampled_rows) > 0:
            tokens = self._draw(self.rows, tokens, logits, row_index, positions)
        if vocabulary is None:
            return tokens
        if self.probs is not None:
            self.probs = vocabulary.probabilities(self.probs)
        return vocabulary.tokens(tokens)

    def _draw(
        self,
        rows: SamplingRows,
        tokens: torch.Tensor,
        logits: torch.Tensor,
        row_index: np.ndarray,
        positions: np.ndarray,
    ) -> torch.Tensor:
        """`tokens` with those of the sampled rows drawn; sets `probs` and `sampled_flat`."""
        place = np.full(int(row_index.max()) + 1, -1, dtype=np.int64)
        place[self.sampled_rows] = np.arange(len(self.sampled_rows))
        self.sampled_flat = (place[row_index] >= 0).nonzero()[0]
        flat = torch.from_numpy(self.sampled_flat).to(logits.device)
        parameters = rows.select(torch.from_numpy(place[row_index[self.sampled_flat]]).to(logits.device))
        self.probs = probabilities(logits[flat], parameters)
        where = torch.from_numpy(positions[self.sampled_flat]).to(logits.device)
        tokens[flat] = draw(self.probs, parameters.seeds, where, Stream.DRAFT)
        return tokens


@dataclass(frozen=True)
class DeviceDraftBlocks:
    """The rows of a step, all on the device, each with 1 + k places for its block `[anchor, mask x num_draft]`.

    token_ids, positions, slots: int64 `[num_rows, 1 + k]`; what lies behind a row's last mask, and all of a row that
    does not draft, is padding, with slots of -1. layout: the rows as attention runs them.
    """

    token_ids: torch.Tensor
    positions: torch.Tensor
    slots: torch.Tensor
    layout: RowLayout


class DrawOps(Protocol):
    """How tokens are chosen on the device. `worker.step_ops` has these operations."""

    def best(self, logits: torch.Tensor) -> torch.Tensor:
        """The most likely token of each of the `logits` `[n, vocab]`: int64 `[n]`."""
        ...

    def probabilities(self, logits: torch.Tensor, parameters: SamplingRows) -> torch.Tensor:
        """As `sampling.filtering.probabilities`."""
        ...

    def draw(self, weights: torch.Tensor, seeds: torch.Tensor, positions: torch.Tensor, stream: Stream) -> torch.Tensor:
        """As `sampling.filtering.draw`."""
        ...


class DeviceDraftSampler:
    """As `DraftSampler`, for blocks on the device, where every row has k places: no index depends on a value.

    `rows` has the parameters of all `num_rows * k` places, and `sampled` (bool `[num_rows]`) says which rows draw;
    with `rows` None every draft is the most likely token.
    """

    def __init__(self, ops: DrawOps, rows: SamplingRows | None = None, sampled: torch.Tensor | None = None) -> None:
        self.ops = ops
        self.rows = rows
        self.sampled = sampled
        self.probs: torch.Tensor | None = None

    def choose(
        self, logits: torch.Tensor, positions: torch.Tensor, vocabulary: VocabularyMap | None = None
    ) -> torch.Tensor:
        """Draft tokens in the target's ids, int64 `[num_rows, k]`, for `logits` `[num_rows * k, draft vocab]`.

        positions: int64 `[num_rows, k]`. Afterwards `probs` `[num_rows, k, target vocab]` holds the distributions where
        any row draws. What stands in the places of padding has no meaning.
        """
        tokens = self.ops.best(logits).view_as(positions)
        if self.rows is not None and self.sampled is not None:
            probs = self.ops.probabilities(logits, self.rows)
            drawn = self.ops.draw(probs, self.rows.seeds, positions.reshape(-1), Stream.DRAFT)
            tokens = torch.where(self.sampled[:, None], drawn.view_as(positions), tokens)
            mapped = probs if vocabulary is None else vocabulary.probabilities(probs)
            self.probs = mapped.view(*positions.shape, -1)
        return tokens if vocabulary is None else vocabulary.tokens(tokens)


class Drafter(Protocol):
    """Proposes tokens and keeps its own context K/V in step with the target's."""

    lookahead_base: int
    """Positions reserved beyond k when drafting k tokens (RESERVE): DFlash 1, for the anchor; autoregressive 0."""

    max_len: int
    """Positions that the drafter can address (WINDOW)."""

    capture: tuple[int, ...]
    """Layers of the target whose outputs `inject` wants, as `TargetModel.forward` counts them."""

    mask_token_id: int
    """What `propose_on_device` has in the places of tokens to come."""

    def inject(
        self, features: torch.Tensor, positions: torch.Tensor, slots: torch.Tensor, padded: bool = False
    ) -> None:
        """Write the context K/V of accepted tokens: features `[n, L * target_hidden]`, positions and slots int64
        `[n]`. With `padded` there may be slots below 0, for which nothing is written."""
        ...

    def propose(self, block: DraftBlock, sampler: DraftSampler) -> torch.Tensor:
        """Draft tokens of all rows behind one another: int64 `[sum(num_draft)]`."""
        ...

    def propose_on_device(self, blocks: DeviceDraftBlocks, sampler: DeviceDraftSampler) -> torch.Tensor:
        """As `propose`, for every row of a step, without a wait for the device: int64 `[num_rows, k]`, of which a row's
        first `num_draft` are drafts."""
        ...
