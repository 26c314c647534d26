"""Embedding and LM head of a target whose ranks have a slice of the vocabulary each.

Rank 0 says what is to be done (`Lookup`, `HeadPass`), all ranks do their part of it, and rank 0 alone uses the outcome.
Where a token is chosen by the argmax, or with a temperature, each rank gives the best of its slice and rank 0 the best
of these: the largest score, and of equal ones the lowest id, as one process would. With filters each gives its largest
logits besides (`filtered_choice.py`), which decide most rows. All else gathers the logits.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
import torch.nn.functional as F

from dflash_backend.models.filtered_choice import filtered_tokens, largest_logits
from dflash_backend.models.interface import Choice, Filters, PendingLogits, TargetModel
from dflash_backend.models.linear import Linear, embedded
from dflash_kernels.log_odds import log_odds_of_surprisal
from dflash_kernels.logits_filter import lowest_kept_reference
from dflash_kernels.sample import sample_reference, scored_sample_reference

GATHERS_THEN = 15
"""So many choices with filters gather at once after one that a few logits did not decide: flat rows follow others."""


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
    else by the head alone, as a drafter uses it. form: what the drafter does to each logit. choice: how tokens are
    chosen; None gathers the logits."""

    num_rows: int
    of_target: bool
    form: Callable[[torch.Tensor], torch.Tensor] | None = None
    choice: Choice | None = None


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
            return self._sums(embedded(task.token_ids, self._target.lm_head.weight, self._slice.start))
        return self._sums(self._target.embed(task.token_ids, task.scaled))

    def run(self, task: HeadPass, hidden: torch.Tensor | None = None) -> list[torch.Tensor]:
        """On rank 0 what each rank found, `[n, width of the largest slice]`, or `[n, columns]` of `_candidates`.
        hidden: what the head is run over, on rank 0."""
        head = self._target.lm_head
        if hidden is None:
            hidden = torch.zeros(task.num_rows, head.in_features, dtype=head.dtype, device=self._device)
        x = self._sums(hidden.clone())
        logits = self._target.logits(x) if task.of_target else head(x)
        if task.form is not None:
            logits = task.form(logits)
        if task.choice is None:
            return self._sums.gather(F.pad(logits, (0, max(map(len, self.slices)) - logits.shape[1])))
        return self._sums.gather(self._candidates(logits, task.choice))

    def _candidates(self, logits: torch.Tensor, choice: Choice) -> torch.Tensor:
        """The best token of each row in this slice, float64 `[n, 2]`: its score and its id; where log-odds are asked
        for its logit and the logarithm of the sum of exponents; where there are filters what `largest_logits` gives."""
        token_ids = torch.arange(self._slice.start, self._slice.stop)
        scores, columns = scored_sample_reference(logits, choice.temperature, choice.seeds, choice.positions, token_ids)
        found = [scores, token_ids[columns]]
        if choice.wants_log_odds:
            values = logits.float()
            found += [values.gather(1, columns[:, None])[:, 0], values.logsumexp(dim=-1)]
        stacked = torch.stack([each.double() for each in found], dim=1)
        if choice.filters is None or choice.temperature is None:
            return stacked
        return torch.cat([stacked, largest_logits(logits, token_ids, choice.temperature)], dim=1)


class Ranks(Protocol):
    """All ranks, as rank 0 has them. num_gathers: how many of the next choices with filters gather at once."""

    slices: Sequence[range]
    num_gathers: int

    def look_up(self, task: Lookup) -> torch.Tensor:
        """As `VocabularyPart.rows`. Raises `RankLostError`."""

    def run_head(self, task: HeadPass, hidden: torch.Tensor) -> list[torch.Tensor]:
        """As `VocabularyPart.run`. Raises `RankLostError`."""


class SlicedLogits(PendingLogits):
    """Those of a head over all ranks, who have not computed them yet: what they are needed for decides what is sent."""

    def __init__(
        self,
        ranks: Ranks,
        hidden: torch.Tensor,
        of_target: bool,
        form: Callable[[torch.Tensor], torch.Tensor] | None = None,
    ) -> None:
        """As of `HeadPass`. hidden: `[n, hidden]`."""
        self._ranks = ranks
        self._hidden = hidden
        self._task = of_target, form

    def gathered(self) -> torch.Tensor:
        """As `PendingLogits.gathered`. Raises `RankLostError`."""
        parts = self._ranks.run_head(HeadPass(len(self._hidden), *self._task), self._hidden)
        slices = self._ranks.slices
        return torch.cat([part[:, : len(own)] for part, own in zip(parts, slices, strict=True)], dim=1)

    def chosen(self, choice: Choice) -> tuple[torch.Tensor, torch.Tensor | None]:
        """As `PendingLogits.chosen`. Raises `RankLostError`."""
        if choice.filters is not None and self._ranks.num_gathers:
            self._ranks.num_gathers -= 1
            return self._filtered(choice, choice.filters), None
        parts = self._ranks.run_head(HeadPass(len(self._hidden), *self._task, choice), self._hidden)
        found = torch.stack(parts, dim=1)
        tokens, log_odds = argmax_over_ranks(found, choice.wants_log_odds)
        if (filters := choice.filters) is None:
            return tokens, log_odds
        has_filters = (filters.top_k > 0) | (filters.top_p < 1.0) | (filters.min_p > 0.0)
        filtered, decided = filtered_tokens(found[:, :, 2:], self._ranks.slices, choice, filters)
        if (decided | ~has_filters).all():
            return torch.where(has_filters, filtered, tokens), None
        self._ranks.num_gathers = GATHERS_THEN
        return self._filtered(choice, filters), None

    def _filtered(self, choice: Choice, filters: Filters) -> torch.Tensor:
        """The tokens by all logits."""
        temperature, seeds, positions = choice.temperature, choice.seeds, choice.positions
        assert temperature is not None
        assert seeds is not None
        assert positions is not None
        logits = self.gathered()
        lowest = lowest_kept_reference(logits, temperature, filters.top_k, filters.top_p, filters.min_p)
        return sample_reference(logits, temperature, seeds, positions, lowest)


def argmax_over_ranks(found: torch.Tensor, wants_log_odds: bool) -> tuple[torch.Tensor, torch.Tensor | None]:
    """As `SlicedLogits.chosen`, from what each rank found, float64 `[n, ranks, columns]`. Ranks lie in the order of
    ids, so the first of equal scores has the lowest; as in `argmax_reference` a NaN counts as the largest."""
    columns = found.numpy()
    rows, winner = np.arange(len(columns)), columns[:, :, 0].argmax(axis=1)
    token_ids = torch.from_numpy(columns[rows, winner, 1].astype(np.int64))
    if not wants_log_odds:
        return token_ids, None
    total = np.logaddexp.reduce(columns[:, :, 3], axis=1)
    return token_ids, log_odds_of_surprisal(torch.from_numpy(total - columns[rows, winner, 2]))


class SlicedHead(Linear):
    """The head over all ranks, for drafters that multiply by the target's. Its logits are gathered."""

    __slots__ = ("_part", "_ranks")

    def __init__(self, part: Linear, ranks: Ranks) -> None:
        """part: rank 0's."""
        self._part = part
        self._ranks = ranks
        self.bias = None

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        rows = x.reshape(-1, x.shape[-1])
        return self.logits(rows).gathered().view(*x.shape[:-1], self.out_features)

    def logits(self, x: torch.Tensor, form: Callable[[torch.Tensor], torch.Tensor] | None = None) -> SlicedLogits:
        """Those of `x` `[n, hidden]`, once `form` is applied to each."""
        return SlicedLogits(self._ranks, x, False, form)

    def rows(self, index: torch.Tensor | slice) -> Linear:
        """As `Linear.rows`, always a copy, which this process has alone."""
        device = index.device if isinstance(index, torch.Tensor) else self.device
        token_ids = torch.arange(self.out_features, device=device)[index].to(self.device)
        return Linear(self._ranks.look_up(Lookup(token_ids, of_head=True)), None, self._part.product)

    @property
    def weight(self) -> torch.Tensor:
        """The weight, brought here from all ranks whenever it is asked for."""
        return self.rows(slice(None)).weight

    @property
    def device(self) -> torch.device:
        return self._part.device

    @property
    def dtype(self) -> torch.dtype:
        return self._part.dtype

    @property
    def in_features(self) -> int:
        return self._part.in_features

    @property
    def out_features(self) -> int:
        return self._ranks.slices[-1].stop
