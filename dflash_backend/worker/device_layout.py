"""From a plan's rows to a step's layout on the device: one vector for all that the device must know of the step.

Called by the device runner. A step is either ragged, its rows' tokens behind one another, or padded: a row of a fixed
number of places for each of a fixed number of rows, which is what a captured graph runs.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from dflash_backend.core.plan import ScheduledRequest
from dflash_backend.worker.batch import spans
from dflash_backend.worker.device_requests import DeviceRequests
from dflash_backend.worker.device_state import StepRows
from dflash_backend.worker.transfers import ALIGNMENT, Uploader

# A ragged step has a multiple of this number of rows: Triton compiles a kernel anew for a number that is 1.
ROW_MULTIPLE = 4


@dataclass(frozen=True)
class RowTraits:
    """What the host knows of a step's rows together, by which it runs fewer operations.

    sampled: some row belongs to a sampled request. drafts: some row proposes drafts. any_top_k_or_p, any_min_p: some
    sampled request cuts its distribution.
    """

    sampled: bool
    drafts: bool
    any_top_k_or_p: bool = False
    any_min_p: bool = False


@dataclass(frozen=True)
class Bounds:
    """What the host knows of R rows whose exact positions only the device knows: int64 `[R]`.

    query_lens: tokens. seq_lens: the position behind the last token. draft_lens: the position behind the last query of
    the drafter. The positions are at most `max_overestimate` too high.
    """

    query_lens: np.ndarray
    seq_lens: np.ndarray
    draft_lens: np.ndarray
    max_overestimate: int


@dataclass(frozen=True)
class StepInputs:
    """A step of R rows, T tokens and D distributions.

    dist_token: int32 `[D]`, the token whose output gives each distribution; None where every token does, in order.
    dist_row: int32 `[D]`, its row; -1 for padding. Both on the device, as `rows` are.
    """

    rows: StepRows
    dist_token: torch.Tensor | None
    dist_row: torch.Tensor
    bounds: Bounds
    traits: RowTraits

    @property
    def num_rows(self) -> int:
        """R, padding rows included."""
        return len(self.rows.table)


@dataclass(frozen=True)
class HostRows:
    """A plan's rows as arrays `[n]`, int64 but for sample and sampled: the fields of `StepRows` that do not depend on
    where tokens lie.

    sample: bool, rows that yield tokens. sampled: bool, rows of sampled requests.
    """

    table: np.ndarray
    start: np.ndarray
    uncertain: np.ndarray
    num_new: np.ndarray
    num_draft: np.ndarray
    num_next: np.ndarray
    sample: np.ndarray
    sampled: np.ndarray

    @classmethod
    def of(cls, rows: list[ScheduledRequest], requests: DeviceRequests) -> HostRows:
        """The rows in the order given."""
        fields = [
            (
                requests.records[row.request_id].index,
                row.num_computed,
                row.num_unverified_drafts,
                row.num_new,
                row.num_draft,
                row.num_next_draft,
                row.sample,
            )
            for row in rows
        ]
        table, start, uncertain, num_new, num_draft, num_next, sample = np.array(fields, dtype=np.int64).T
        return cls(table, start, uncertain, num_new, num_draft, num_next, sample.astype(bool), ~requests.greedy[table])

    @property
    def query_lens(self) -> np.ndarray:
        """Tokens of each row."""
        lens: np.ndarray = self.num_new + self.num_draft
        return lens

    @property
    def decode_only(self) -> bool:
        """Whether every row is a last known token and its drafts, which fits a padded step."""
        return bool(self.sample.all() and (self.num_new == 1).all())

    def traits(self, requests: DeviceRequests) -> RowTraits:
        """See `RowTraits`."""
        sampled = self.table[self.sampled]
        return RowTraits(
            sampled=len(sampled) > 0,
            drafts=bool(self.num_next.any()),
            any_top_k_or_p=bool((requests.top_p[sampled] < 1.0).any() or (requests.top_k[sampled] > 0).any()),
            any_min_p=bool((requests.min_p[sampled] > 0.0).any()),
        )

    def bounds(self, num_rows: int) -> Bounds:
        """The bounds for these rows and the padding rows behind them, `num_rows` in all."""
        ends = self.start + self.query_lens
        # The first of the drafter's queries, the anchor, follows the last draft if all of them stand.
        drafts = np.where(self.num_next > 0, ends + 1 + self.num_next, 0)
        return Bounds(
            query_lens=padded(self.query_lens, num_rows),
            seq_lens=padded(ends, num_rows),
            draft_lens=padded(drafts, num_rows),
            max_overestimate=int((self.uncertain + self.num_draft).max()),
        )


class LayoutBuffer:
    """Where the layouts of steps lie on the device, always at the same address: a captured graph reads it there."""

    def __init__(self, max_rows: int, max_tokens: int, device: torch.device) -> None:
        """For steps of at most that many rows and tokens."""
        # Rows of any step, padding included.
        self.max_rows = _rounded(max_rows)
        numbers = StepRows.buffer_size(self.max_rows, max_tokens)
        # Besides, two numbers for each distribution, of which there are no more than tokens.
        self._uploader = Uploader(4 * (numbers + 2 * max_tokens) + 4 * ALIGNMENT, device)

    def padded_rows(self, num_rows: int, width: int) -> StepRows:
        """The layout of padded steps with `num_rows` rows of `width` places each: what the last `send_padded` of this
        shape sent, whenever the device reads it."""
        size = 4 * StepRows.buffer_size(num_rows, num_rows * width)
        return StepRows.over(self._uploader.buffer[:size].view(torch.int32), num_rows)

    def send_padded(self, rows: HostRows, num_rows: int, width: int) -> None:
        """Send the layout of decode rows (`HostRows.decode_only`), with padding up to `num_rows` rows of `width`."""
        first = np.arange(num_rows) * width
        lens = padded(rows.query_lens, num_rows)
        places = np.where(np.arange(width) < lens[:, None], np.arange(num_rows)[:, None], -1)
        self._uploader.send([_numbers(rows, num_rows, first, first, places.reshape(-1))])

    def send_nothing(self, num_rows: int, width: int) -> None:
        """Send the layout of padding rows alone, to run a padded step that changes nothing."""
        nobody = np.zeros(0, dtype=np.int64)
        rows = HostRows(*(nobody,) * 6, sample=nobody.astype(bool), sampled=nobody.astype(bool))
        self.send_padded(rows, num_rows, width)

    def send_ragged(self, rows: HostRows, traits: RowTraits) -> StepInputs:
        """Send the layout of any rows. What is returned is valid on the device until the next layout is sent."""
        lens = rows.query_lens
        first = np.cumsum(lens) - lens
        dists = np.where(rows.sample, rows.num_draft + 1, 0)
        dist_start = np.where(rows.sample, np.cumsum(dists) - dists, -1)
        dist_row, dist_token = spans(first + rows.num_new - 1, dists)
        if len(dist_row) == 0:
            # Nobody's, since a step without any is not worth a case of its own.
            dist_row, dist_token = np.array([-1]), np.array([0])
        num_rows = _rounded(len(lens))
        token_row, _ = spans(first, lens)
        numbers, tokens, of_row = self._uploader.send(
            [
                _numbers(rows, num_rows, first, dist_start, token_row),
                dist_token.astype(np.int32),
                dist_row.astype(np.int32),
            ]
        )
        return StepInputs(StepRows.over(numbers, num_rows), tokens, of_row, rows.bounds(num_rows), traits)


def _rounded(num_rows: int) -> int:
    return -(-num_rows // ROW_MULTIPLE) * ROW_MULTIPLE


def padded(values: np.ndarray, size: int) -> np.ndarray:
    """`values` and zeros behind them: `[size]`."""
    return np.concatenate([values, np.zeros(size - len(values), dtype=values.dtype)])


def _numbers(
    rows: HostRows, num_rows: int, first: np.ndarray, dist_start: np.ndarray, token_row: np.ndarray
) -> np.ndarray:
    """The vector that `StepRows.over` reads, int32, with padding rows behind `rows`.

    first: the index of each row's first token, dist_start that of its first distribution; `[n]`, or `[num_rows]` where
    padding rows have places too. token_row: `[T]`.
    """
    numbers = np.zeros(StepRows.buffer_size(num_rows, len(token_row)), dtype=np.int32)
    views = StepRows.over(torch.from_numpy(numbers), num_rows)
    views.table.fill_(-1)
    views.dist_start.fill_(-1)
    count = len(rows.table)
    for view, values in (
        (views.table, rows.table),
        (views.start, rows.start),
        (views.uncertain, rows.uncertain),
        (views.num_new, rows.num_new),
        (views.num_draft, rows.num_draft),
        (views.num_next, rows.num_next),
        (views.query_lens, rows.query_lens),
        (views.dist_start, dist_start[:count]),
        (views.sampled, rows.sampled),
    ):
        view.numpy()[:count] = values
    # Ascending, also where padding rows come last.
    query_start = views.query_start.numpy()
    query_start[:] = len(token_row)
    query_start[: len(first)] = first
    views.token_row.numpy()[:] = token_row
    return numbers
