"""The layout of a step: from a plan's rows to what the host and the device must know of them.

The tokens of a step's rows lie behind one another. A padded step has a fixed number of rows and of tokens, some of them
padding at the end, which is what a captured graph runs; within it rows may have any length. On a GPU the layouts of
steps lie in one buffer (`LayoutBuffer`), whose address is always the same.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch

from dflash_backend.attention import AttentionBatch, SharedPrefixes
from dflash_backend.core.plan import MAX_SHARED_PREFIXES, DraftBudget, ScheduledRequest, SharedPrefix
from dflash_backend.models.interface import WindowSlots
from dflash_backend.models.recurrent_state import StateRows
from dflash_backend.worker.state import RequestStates, StateTensors
from dflash_backend.worker.transfers import ALIGNMENT, Uploader
from dflash_kernels.shared_prefix import SharedRows

# A ragged step on a GPU has a multiple of this number of rows: Triton compiles a kernel anew for a number that is 1.
ROW_MULTIPLE = 4


@dataclass(frozen=True)
class BatchTraits:
    """What the host knows of a step's rows together, by which the step runs fewer operations.

    sampled: some row belongs to a request with a temperature. drafts: some row proposes drafts. chooses: some row
    chooses tokens; the chunks of prompts that do not end need no logits. wants_confidence: the drafter shall say how
    sure it is of its drafts, if it can. adapted: some row may belong to a request with a LoRA adapter.
    """

    sampled: bool
    drafts: bool
    chooses: bool = True
    wants_confidence: bool = True
    adapted: bool = False


@dataclass(frozen=True)
class LengthBounds:
    """What the host knows of R rows whose exact positions only the device knows: int64 `[R]`.

    query_lens: tokens. seq_lens: the position behind the last token. draft_lens: the position behind the last draft.
    The positions are at most `max_overestimate` too high. exact: bool `[R]`, the rows whose tokens and positions are
    known all the same; None for none.
    """

    query_lens: np.ndarray
    seq_lens: np.ndarray
    draft_lens: np.ndarray
    max_overestimate: int
    exact: np.ndarray | None = None


# Fields begin at multiples of 16 bytes: Triton compiles a kernel anew for pointers that are aligned otherwise.
_ALIGNMENT = 4
# In the order in which `DeviceBatch.over` finds them.
_ROW_FIELDS = (
    "req_idx",
    "start_bound",
    "num_unverified_drafts",
    "num_new",
    "num_draft",
    "num_next_draft",
    "query_start",
    "query_lens",
    "logits_start",
)


@dataclass(frozen=True)
class DeviceBatch:
    """The layout of a step as its operations read it: R rows with T tokens.

    int32 `[R]`: req_idx (index of the request's state, -1 for padding), start_bound (an upper bound of
    `StateTensors.computed`, and that itself where `num_unverified_drafts`, the drafts in flight, is 0), num_new (known
    tokens), num_draft (drafts behind them), num_next_draft (drafts to propose), query_start (index of the first token),
    query_lens (`num_new + num_draft`), logits_start (index of the first of the row's `num_draft + 1` logits, -1 for a
    row that does not sample). token_row: int32 `[T]`, the row of each token, -1 for padding tokens.

    A padding row has req_idx and logits_start -1 and all its numbers 0.
    """

    req_idx: torch.Tensor
    start_bound: torch.Tensor
    num_unverified_drafts: torch.Tensor
    num_new: torch.Tensor
    num_draft: torch.Tensor
    num_next_draft: torch.Tensor
    query_start: torch.Tensor
    query_lens: torch.Tensor
    logits_start: torch.Tensor
    token_row: torch.Tensor

    @staticmethod
    def buffer_size(num_rows: int, num_tokens: int) -> int:
        """Numbers in the buffer of `over`."""
        return len(_ROW_FIELDS) * rounded(num_rows, _ALIGNMENT) + num_tokens

    @classmethod
    def over(cls, buffer: torch.Tensor, num_rows: int) -> DeviceBatch:
        """Views of `buffer`, int32 `[buffer_size(num_rows, num_tokens)]`, so that a step's layout is one copy from the
        host."""
        num_fields = cls.buffer_size(num_rows, 0)
        fields = buffer[:num_fields].view(len(_ROW_FIELDS), -1)[:, :num_rows]
        return cls(**dict(zip(_ROW_FIELDS, fields.unbind(0), strict=True)), token_row=buffer[num_fields:])


class CpuBatch(DeviceBatch):
    """The layout that C++ has written. A field becomes a tensor when it is asked for: to make all of them takes longer
    than most of what reads them."""

    layout: np.ndarray
    size: int
    num_tokens: int

    def __init__(self, layout: np.ndarray, num_rows: int, num_tokens: int) -> None:
        """layout: as of `cpu_step.RowsLaidOut`."""
        self.__dict__.update(layout=layout, size=num_rows, num_tokens=num_tokens)

    def __getattr__(self, name: str) -> torch.Tensor:
        if name == "token_row":
            found = self.layout[11 * self.size :][: self.num_tokens]
        elif name in _ROW_FIELDS:
            found = self.layout[_ROW_FIELDS.index(name) * self.size :][: self.size]
        else:
            raise AttributeError(name)
        tensor = self.__dict__[name] = torch.from_numpy(found)
        return tensor


@dataclass
class ForwardBatch:
    """A step of R rows, T tokens and D rows of logits, on the device: its layout, and what `SpecDecodeModel` finds.

    Layout. logits_token: int32 `[D]`, the token that each row of logits follows; None where every token has one, in
    order. logits_row: int32 `[D]`, the row of the step that it belongs to; -1 for padding. bounds: None where the host
    knows the lengths. budget: float32 `[2 + k + R]`, which drafts are verified, as `dflash_kernels.verify_budget` reads
    it: `batch.num_draft` has how many there are, and where tokens and logits lie is not known yet. None: it is as
    `batch` says. draft_width: drafts that a row proposes at most. shared: rows that read a prefix together; None for
    none. chosen_later: no token is chosen by the logits alone, so `verify` chooses none (`logits.SpecialRows`).
    prepared: what the target runs is there already, so `verify` does not ask for it. needs_logits: whether they are
    looked at by others than what chooses tokens (`logits.SpecialRows`).

    `verify` fills in what the target ran: token_ids, positions, slots int64 `[T]`, starts, seq_lens int32 `[R]` (0 for
    padding), `attention` (the rows as attention runs them), `padded` (whether slots may be -1), `windows` (where the KV
    of layers with a window lies, if these have block ids of their own); and what it gave: features `[T, L * hidden]`
    (None without a drafter that reads any), logits `[D, vocab]` (None where nothing looks at them), target_tokens int64
    `[D]`, the target's own token for each row of logits, and `states`, what was kept for recurrent layers. A padding
    token, and one that lies past its row's blocks (the request has ended meanwhile), has slot -1, id 0 and position 0.
    `seq_lens` never goes past a row's blocks either.

    `accept` fills in `results`, int64 `[R, k + 3]`: of each row its accepted drafts, its verified ones, then its new
    tokens: the accepted drafts and the token that follows, then 0, all 0 for a row that does not sample.

    `draft` fills in `num_looked_up`, int32 `[R]`, how many of its next drafts each row looked up in place of the
    model's (None where nothing is looked up); and `draft_report`, int64 `[NUM_TIMESTAMPS + R + R * k]`: `timestamps`
    (ns), `num_looked_up` if it is there, then how sure the drafter is of the drafts of each row (the bits of float32).
    On a CPU the latter are left out where the step does not ask for them.
    """

    batch: DeviceBatch
    logits_token: torch.Tensor | None
    logits_row: torch.Tensor
    bounds: LengthBounds | None
    traits: BatchTraits
    draft_width: int
    budget: torch.Tensor | None = None
    shared: SharedPrefixes | None = None
    chosen_later: bool = False
    prepared: bool = False
    needs_logits: bool = True

    token_ids: torch.Tensor = field(init=False)
    positions: torch.Tensor = field(init=False)
    slots: torch.Tensor = field(init=False)
    starts: torch.Tensor = field(init=False)
    seq_lens: torch.Tensor = field(init=False)
    attention: AttentionBatch = field(init=False)
    padded: bool = field(init=False)
    windows: WindowSlots | None = field(init=False, default=None)
    timestamps: torch.Tensor | np.ndarray = field(init=False)
    features: torch.Tensor | None = field(init=False, default=None)
    logits: torch.Tensor | None = field(init=False, default=None)
    target_tokens: torch.Tensor = field(init=False)
    states: StateRows | None = field(init=False, default=None)
    results: torch.Tensor = field(init=False)
    num_looked_up: torch.Tensor | None = field(init=False, default=None)
    draft_report: torch.Tensor = field(init=False)

    @property
    def num_accepted(self) -> torch.Tensor:
        """Accepted drafts of each row: int64 `[R]`."""
        return self.results[:, 0]

    @property
    def num_rows(self) -> int:
        """R, padding rows included."""
        return len(self.batch.req_idx)

    @property
    def num_tokens(self) -> int:
        """T, padding tokens included."""
        return len(self.batch.token_row)


@dataclass
class HostBatch:
    """A plan's rows on the host.

    rows: int64 `[n, 7]`: req_idx, start_bound, num_unverified_drafts, num_new, num_draft and num_next_draft as
    `DeviceBatch` has them, and `sample`, whether a row yields tokens. budget: which of the drafts are verified, to be
    decided on the device; None: all. shared: rows that share the beginning of their KV.
    """

    request_ids: list[str]
    rows: np.ndarray
    traits: BatchTraits
    budget: DraftBudget | None = None
    shared: Sequence[SharedPrefix] = ()

    @classmethod
    def of(
        cls,
        rows: Sequence[ScheduledRequest],
        requests: RequestStates,
        budget: DraftBudget | None = None,
        wants_confidence: bool = True,
        shared: Sequence[SharedPrefix] = (),
    ) -> HostBatch:
        """The rows in the order given, which is that of the budget's effects and of the shared prefixes."""
        numbers = [
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
        sampled = requests.num_sampled > 0 and any(requests.temperature.item(each[0]) for each in numbers)
        drafts, chooses = any(each[5] for each in numbers), any(each[6] for each in numbers)
        adapted = requests.adapts_all or (
            requests.num_adapted > 0 and any(requests.adapters.item(each[0]) for each in numbers)
        )
        traits = BatchTraits(sampled, drafts, chooses, wants_confidence, adapted)
        return cls([row.request_id for row in rows], np.array(numbers, dtype=np.int64), traits, budget, shared)

    @property
    def req_idx(self) -> np.ndarray:
        """Of each row, as the following: int64 `[n]`."""
        return self.rows[:, 0]

    @property
    def start_bound(self) -> np.ndarray:
        return self.rows[:, 1]

    @property
    def num_unverified_drafts(self) -> np.ndarray:
        return self.rows[:, 2]

    @property
    def num_new(self) -> np.ndarray:
        return self.rows[:, 3]

    @property
    def num_draft(self) -> np.ndarray:
        return self.rows[:, 4]

    @property
    def num_next_draft(self) -> np.ndarray:
        return self.rows[:, 5]

    @property
    def sample(self) -> np.ndarray:
        """Whether a row yields tokens: bool `[n]`."""
        return self.rows[:, 6].astype(bool)

    @property
    def num_verified(self) -> int:
        """Drafts that are verified, of all rows together."""
        num_draft = int(self.num_draft.sum())
        return num_draft if self.budget is None else min(num_draft, self.budget.num_drafts)

    def budget_numbers(self, k: int, num_rows: int, num_drafts: int) -> np.ndarray:
        """What `ForwardBatch.budget` is, for `num_drafts` drafts."""
        numbers = np.zeros(2 + k + num_rows, dtype=np.float32)
        numbers[0] = num_drafts
        if self.budget is not None:
            numbers[1] = self.budget.weight
            numbers[2 : 2 + k] = self.budget.offsets
            numbers[2 + k : 2 + k + len(self.req_idx)] = self.budget.effects
        return numbers

    @property
    def query_lens(self) -> np.ndarray:
        """Tokens of each row."""
        lens: np.ndarray = self.num_new + self.num_draft
        return lens

    @property
    def num_logits(self) -> np.ndarray:
        """Rows of logits of each row: one for each draft and one behind them, where the row samples."""
        return np.where(self.sample, self.num_draft + 1, 0)

    @property
    def decode_only(self) -> bool:
        """Whether every row is a last known token and its drafts, which fits a padded step."""
        return bool(self.sample.all() and (self.num_new == 1).all())

    def bounds(self, num_rows: int) -> LengthBounds:
        """The bounds for these rows and the padding rows behind them, `num_rows` in all."""
        lens = self.query_lens
        ends = self.start_bound + lens
        # The anchor of the drafts follows the last draft of now if all of these are accepted.
        drafts = (ends + 1 + self.num_next_draft) * (self.num_next_draft > 0)
        unknown = self.num_unverified_drafts + self.num_draft
        return LengthBounds(
            query_lens=padded(lens, num_rows),
            seq_lens=padded(ends, num_rows),
            draft_lens=padded(drafts, num_rows),
            max_overestimate=int(unknown.max()),
            exact=padded(unknown == 0, num_rows),
        )

    def ragged(
        self,
        send: Callable[[list[np.ndarray]], list[torch.Tensor]],
        k: int,
        row_multiple: int = 1,
        block_size: int = 0,
    ) -> ForwardBatch:
        """The inputs of a ragged step with a multiple of `row_multiple` rows, brought to the device by `send`. k: the
        most drafts of a row. block_size: positions of a block, for prefixes that rows share."""
        num_verified = self.num_draft if self.budget is None else first_drafts(self.num_draft, self.num_verified)
        lens, num_logits = self.num_new + num_verified, (num_verified + 1) * self.sample
        first = lens.cumsum() - lens
        logits_start = np.where(self.sample, num_logits.cumsum() - num_logits, -1)
        logits_row, logits_token = spans(first + self.num_new - 1, num_logits)
        if len(logits_row) == 0:
            # A padding row of logits, so that a step in which no row samples is no case of its own.
            logits_row, logits_token = np.array([-1]), np.array([0])
        num_rows = rounded(len(lens), row_multiple)
        token_row = np.arange(len(lens)).repeat(lens)
        arrays = [
            self.numbers(num_rows, first, logits_start, token_row),
            logits_token.astype(np.int32),
            logits_row.astype(np.int32),
        ]
        if self.budget is not None:
            arrays.append(self.budget_numbers(k, num_rows, self.num_verified))
        if self.shared:
            arrays.append(shared_numbers(self.shared, num_rows, block_size))
        numbers, tokens, rows, *more = send(arrays)
        shared = None
        if self.shared:
            queries = [int(lens[each.first_row :][: each.num_rows].sum()) for each in self.shared]
            most = max(each.num_blocks for each in self.shared) * block_size
            # A budget may give the rows of a group other numbers of drafts than these.
            num_queries = max(queries) if self.budget is None else len(token_row)
            shared = SharedPrefixes(shared_rows(more.pop()), num_queries, most)
        every = len(logits_token) == len(token_row) and self.traits.chooses
        batch = DeviceBatch.over(numbers, num_rows)
        logits = None if every else tokens
        budget = more[0] if more else None
        return ForwardBatch(batch, logits, rows, self.bounds(num_rows), self.traits, k, budget, shared=shared)

    def numbers(self, num_rows: int, first: np.ndarray, logits_start: np.ndarray, token_row: np.ndarray) -> np.ndarray:
        """The vector that `DeviceBatch.over` reads, int32, with padding rows behind these rows.

        first: the index of each row's first token, logits_start that of its first logits: `[n]`. token_row: `[T]`.
        """
        count = len(self.req_idx)
        numbers = np.zeros(DeviceBatch.buffer_size(num_rows, len(token_row)), dtype=np.int32)
        num_fields = len(numbers) - len(token_row)
        fields = numbers[:num_fields].reshape(len(_ROW_FIELDS), -1)
        req_idx, start, unverified, num_new, num_draft, num_next_draft, query_start, lens, logits = fields
        req_idx[:] = logits[:] = -1
        # Ascending, also where padding rows come last.
        query_start[:] = len(token_row)
        query_start[:count] = first
        req_idx[:count], start[:count], unverified[:count] = self.req_idx, self.start_bound, self.num_unverified_drafts
        num_new[:count], num_draft[:count], num_next_draft[:count] = self.num_new, self.num_draft, self.num_next_draft
        lens[:count], logits[:count] = self.query_lens, logits_start
        numbers[num_fields:] = token_row
        return numbers


def first_drafts(num_draft: np.ndarray, num_drafts: int) -> np.ndarray:
    """`num_drafts` of the drafts of rows that have `num_draft`, those of the first rows: int64 `[n]`."""
    before: np.ndarray = np.cumsum(num_draft) - num_draft
    return np.clip(num_drafts - before, 0, num_draft)


def spans(starts: np.ndarray, lens: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """For rows that cover `[start, start + len)`: the row and the value of each covered number, both int64 `[n]`."""
    rows = np.arange(len(lens)).repeat(lens)
    first = lens.cumsum() - lens
    return rows, (starts - first)[rows] + np.arange(len(rows))


def padded(values: np.ndarray, size: int) -> np.ndarray:
    """`values` and zeros behind them: `[size]`."""
    if size == len(values):
        return values
    return np.concatenate([values, np.zeros(size - len(values), dtype=values.dtype)])


def rounded(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple


_NUM_GROUP_NUMBERS = 3 * MAX_SHARED_PREFIXES


def num_shared_numbers(num_rows: int) -> int:
    """Numbers of `shared_numbers`."""
    return _NUM_GROUP_NUMBERS + num_rows


def shared_numbers(shared: Sequence[SharedPrefix], num_rows: int, block_size: int) -> np.ndarray:
    """What `shared_rows` reads, int32, for a step of `num_rows` rows, padding rows at the end included."""
    numbers = np.zeros(num_shared_numbers(num_rows), dtype=np.int32)
    groups, of_row = numbers[:_NUM_GROUP_NUMBERS].reshape(3, -1), numbers[_NUM_GROUP_NUMBERS:]
    for i, prefix in enumerate(shared):
        positions = prefix.num_blocks * block_size
        groups[:, i] = prefix.first_row, prefix.num_rows, positions
        of_row[prefix.first_row : prefix.first_row + prefix.num_rows] = positions
    return numbers


def shared_rows(numbers: torch.Tensor) -> SharedRows:
    """Views of `numbers`: first row, rows and positions of each group, then of each row the positions that it
    shares."""
    leader, num_rows, positions = numbers[:_NUM_GROUP_NUMBERS].view(3, -1).unbind(0)
    return SharedRows(leader, num_rows, positions, numbers[_NUM_GROUP_NUMBERS:])


def window_slots(step: ForwardBatch, window_blocks: torch.Tensor, block_size: int) -> WindowSlots:
    """The tokens and rows of a step by the block table of these layers, `StateTensors.window_blocks`. A token whose
    slot in the other layers is below 0 has none here either. Waits for nothing, so that graphs can capture it."""
    batch, positions, slots, layout = step.batch, step.positions, step.slots, step.attention
    req_idx = batch.req_idx.clamp(min=0)
    tables = window_blocks[:, : layout.block_tables.shape[1]].index_select(0, req_idx)
    of_token = req_idx.index_select(0, batch.token_row.clamp(min=0)).long()
    blocks = window_blocks[of_token, positions // block_size].long()
    own = blocks * block_size + positions % block_size
    own_layout = replace(layout, block_tables=tables, shared=None, exact=None)
    return WindowSlots(torch.where(slots < 0, slots, own), own_layout)


def exact_layout(
    req_idx: np.ndarray, query_lens: np.ndarray, seq_lens: np.ndarray, state: StateTensors
) -> AttentionBatch:
    """The rows as attention runs them when their lengths are known."""
    width = max(1, -(-int(seq_lens.max()) // state.block_size))
    tables = torch.from_numpy(state.blocks.numpy()[req_idx, :width])
    return AttentionBatch(query_lens.astype(np.int64), seq_lens.astype(np.int64), tables)


class LayoutBuffer:
    """Where the layouts of steps lie on a GPU, always at the same address: a captured graph reads it there."""

    def __init__(self, max_rows: int, max_tokens: int, k: int, device: torch.device, block_size: int = 1) -> None:
        """For steps of at most that many rows and tokens, and blocks of at most k drafts. block_size: positions of a
        KV block."""
        self.k, self.block_size = k, block_size
        # Rows of any step, padding included.
        self.max_rows = rounded(max_rows, ROW_MULTIPLE)
        numbers = DeviceBatch.buffer_size(self.max_rows, max_tokens)
        # Besides, two numbers for each row of logits, of which there are no more than tokens, and the budget's.
        numbers += 2 * max_tokens + 2 + k + self.max_rows
        # And the prefixes that rows share.
        numbers += num_shared_numbers(self.max_rows)
        self._uploader = Uploader(4 * numbers + 5 * ALIGNMENT, device)

    def padded(self, num_rows: int, num_tokens: int) -> tuple[DeviceBatch, torch.Tensor]:
        """The layout and the budget of padded steps with that many rows and tokens: what the last `send_padded` of this
        shape sent, whenever the device reads it."""
        size = 4 * DeviceBatch.buffer_size(num_rows, num_tokens)
        first = rounded(size, ALIGNMENT)
        buffer = self._uploader.buffer
        budget = buffer[first : first + 4 * (2 + self.k + num_rows)].view(torch.float32)
        return DeviceBatch.over(buffer[:size].view(torch.int32), num_rows), budget

    def padded_shared(self, num_rows: int, num_tokens: int, max_len: int) -> SharedPrefixes:
        """The prefixes that rows of padded steps share, as `padded` has the layout. max_len: positions of a row."""
        first = rounded(4 * DeviceBatch.buffer_size(num_rows, num_tokens), ALIGNMENT)
        first += rounded(4 * (2 + self.k + num_rows), ALIGNMENT)
        numbers = self._uploader.buffer[first : first + 4 * num_shared_numbers(num_rows)].view(torch.int32)
        return SharedPrefixes(shared_rows(numbers), num_tokens, max_len)

    def send_padded(self, batch: HostBatch, num_rows: int, num_tokens: int) -> None:
        """Send the layout of rows in a padded step. Where their tokens and logits lie is decided on the device. With a
        budget as many drafts are verified as there are tokens, since these run in any case."""
        nowhere = np.zeros(len(batch.req_idx), dtype=np.int64)
        numbers = batch.numbers(num_rows, nowhere, np.where(batch.sample, 0, -1), np.full(num_tokens, -1))
        budget = batch.budget_numbers(self.k, num_rows, num_tokens - int(batch.num_new.sum()))
        self._uploader.send([numbers, budget, shared_numbers(batch.shared, num_rows, self.block_size)])

    def send_nothing(self, num_rows: int, num_tokens: int) -> None:
        """Send the layout of padding rows alone, to run a padded step that changes nothing."""
        batch = HostBatch([], np.zeros((0, 7), dtype=np.int64), BatchTraits(False, False))
        self.send_padded(batch, num_rows, num_tokens)

    def send_ragged(self, batch: HostBatch) -> ForwardBatch:
        """Send the layout of any rows. What is returned is valid on the device until the next layout is sent."""
        return batch.ragged(self._uploader.send, self.k, ROW_MULTIPLE, self.block_size)
