"""Embedding and LM head of a target whose ranks have a slice of the vocabulary each.

Rank 0 says what is to be done (`Lookup`, `HeadPass`), all ranks do their part of it, and rank 0 alone uses the outcome:
the rows of all tokens, or all logits, from which it chooses as one process does.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import torch
import torch.nn.functional as F

from dflash_backend.models.interface import TargetModel
from dflash_backend.models.linear import Linear, embedded, table_of
from dflash_backend.models.peers import RankLostError

T = TypeVar("T")


class Sums(Protocol):
    """What ranks exchange. All call the same in the same order, with tensors of the same shape."""

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """The sum of a tensor over all ranks, the same bits on each. It may take the tensor's memory."""
        ...

    def gather(self, x: torch.Tensor) -> list[torch.Tensor]:
        """On rank 0 what each rank has, in the order of ranks; nothing on the others."""
        ...


@dataclass(frozen=True)
class Lookup:
    """Rows of the embedding, or of the head's weight: of the tokens `token_ids`, int64 `[n]`. scaled: as of
    `TargetModel.embed`."""

    token_ids: torch.Tensor
    of_head: bool = False
    scaled: bool = True


@dataclass(frozen=True)
class HeadPass:
    """The head over hidden states that rank 0 has. of_target: as the target's logits follow from its layers' output;
    else by the head alone, as a drafter uses it."""

    num_rows: int
    of_target: bool


class VocabularyPart:
    """What one rank does of each task."""

    def __init__(self, target: TargetModel, slices: Sequence[range], rank: int, sums: Sums) -> None:
        """target: this rank's part. slices: the token ids of each rank."""
        self._target = target
        self.slices = slices
        self._slice = slices[rank]
        self._sums = sums
        self._device = target.lm_head.device

    def rows(self, task: Lookup) -> torch.Tensor:
        """The rows, the same on each rank: `[n, hidden]`. Each token's come from one rank, so a sum is exact."""
        if task.of_head:
            return self._sums(embedded(task.token_ids, table_of(self._target.lm_head), self._slice.start))
        return self._sums(self._target.embed(task.token_ids, task.scaled))

    def run(self, task: HeadPass, hidden: torch.Tensor | None = None) -> list[torch.Tensor]:
        """On rank 0 the logits of each rank's slice, `[n, width of the largest slice]`. hidden: what the head is run
        over, on rank 0."""
        head = self._target.lm_head
        if hidden is None:
            hidden = torch.zeros(task.num_rows, head.in_features, dtype=head.dtype, device=self._device)
        x = self._sums(hidden.clone())
        logits = self._target.logits(x) if task.of_target else head(x)
        return self._sums.gather(F.pad(logits, (0, max(map(len, self.slices)) - logits.shape[1])))


class OtherRanks(Protocol):
    """What reaches the ranks other than 0."""

    @property
    def lost(self) -> str:
        """Why one is lost, empty while none is."""

    def send(self, step: Any) -> None:
        """Give it to all of them. Raises `RuntimeError` when one is lost."""


class ParallelVocabulary:
    """Embedding and head over all ranks, as rank 0 has them. Its methods raise `RankLostError`."""

    def __init__(self, part: VocabularyPart, ranks: OtherRanks) -> None:
        """part: rank 0's."""
        self._part = part
        self._ranks = ranks
        self.size = part.slices[-1].stop

    def look_up(self, task: Lookup) -> torch.Tensor:
        """The rows: `[n, hidden]`."""
        return self._together(task, lambda: self._part.rows(task))

    def logits(self, hidden: torch.Tensor, of_target: bool) -> torch.Tensor:
        """All logits: `[n, hidden]` -> `[n, vocab_size]`. of_target: as of `HeadPass`."""
        task = HeadPass(len(hidden), of_target)
        parts = self._together(task, lambda: self._part.run(task, hidden))
        return torch.cat([part[:, : len(own)] for part, own in zip(parts, self._part.slices, strict=True)], dim=1)

    def _together(self, task: Lookup | HeadPass, own_part: Callable[[], T]) -> T:
        try:
            self._ranks.send(task)
            return own_part()
        except Exception as error:
            raise RankLostError(f"embedding or head over all ranks failed: {type(error).__name__}: {error}") from error


class LinearPart(Linear):
    """A product that ranks share. `part` is this rank's, whose weight may be quantised, and its sizes are this one's
    unless a class says otherwise."""

    __slots__ = ("_part",)

    def __init__(self, part: Linear, bias: torch.Tensor | None) -> None:
        self._part = part
        self.bias, self.product = bias, part.product
        self._describe((part.out_features, part.in_features), part.dtype, part.device)

    @property
    def weight(self) -> torch.Tensor:
        return self._part.weight


class SlicedHead(LinearPart):
    """The head over all ranks, for drafters that multiply by the target's. Its logits are gathered."""

    __slots__ = ("_vocabulary",)

    def __init__(self, part: Linear, vocabulary: ParallelVocabulary) -> None:
        """part: rank 0's."""
        super().__init__(part, None)
        self._vocabulary = vocabulary
        self.out_features = vocabulary.size

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        rows = x.reshape(-1, x.shape[-1])
        return self._vocabulary.logits(rows, of_target=False).view(*x.shape[:-1], self.out_features)

    def rows(self, index: torch.Tensor | slice) -> Linear:
        """As `Linear.rows`, always a copy, which this process has alone."""
        device = index.device if isinstance(index, torch.Tensor) else self.device
        token_ids = torch.arange(self.out_features, device=device)[index].to(self.device)
        return Linear(self._vocabulary.look_up(Lookup(token_ids, of_head=True)), None, self._part.product)

    @property
    def weight(self) -> torch.Tensor:
        """The weight, brought here from all ranks whenever it is asked for."""
        return self.rows(slice(None)).weight
