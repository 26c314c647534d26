"""What lies on the device for the operations of a step: the requests' state, a step's layout, and what steps yield.

Data and its allocation only. `worker.step_ops` computes with it; the device runner fills it from plans. See
`docs/gpu.md`, "Shapes of a step's operations".
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from dflash_backend.core.scheduler_config import max_positions
from dflash_backend.sampling.filtering import SamplingRows


@dataclass
class DeviceState:
    """A row for each of the S requests that the worker can hold.

    tokens: int64 `[S, max_len]`: prompt, output, and behind them the drafts of the step before, each at its position.
    blocks: int32 `[S, max_blocks]`, the first `num_blocks` (int32 `[S]`) of each row are its block table; the rest are
    old ids or 0, all of them ids of blocks that exist. computed: int32 `[S]`, positions whose K/V is final.
    temperature (above 0), top_p, min_p: float32 `[S]`. top_k (0: all tokens), seeds: int64 `[S]`.
    block_size: tokens in a block. k: the most drafts that a row has.
    draft_probs: float32 `[S, k, vocab]`, what sampled drafts were drawn from. None as long as there is no room
    for them: on a GPU it is made at the start, since graphs must know its address, elsewhere when the first sampled
    request comes. Drafts that are the drafter's most likely tokens have no distribution.
    """

    tokens: torch.Tensor
    blocks: torch.Tensor
    num_blocks: torch.Tensor
    computed: torch.Tensor
    temperature: torch.Tensor
    top_p: torch.Tensor
    min_p: torch.Tensor
    top_k: torch.Tensor
    seeds: torch.Tensor
    block_size: int
    k: int
    draft_probs: torch.Tensor | None = None

    @classmethod
    def allocate(cls, num_rows: int, max_model_len: int, k: int, block_size: int, device: torch.device) -> DeviceState:
        """State of `num_rows` requests of at most `max_model_len` tokens, each with k drafts and one token behind."""
        max_len = max_positions(max_model_len, k)
        max_blocks = -(-max_len // block_size) + 1

        def full(value: float, dtype: torch.dtype, *shape: int) -> torch.Tensor:
            return torch.full((num_rows, *shape), value, dtype=dtype, device=device)

        return cls(
            tokens=full(0, torch.int64, max_len),
            blocks=full(0, torch.int32, max_blocks),
            num_blocks=full(0, torch.int32),
            computed=full(0, torch.int32),
            temperature=full(1.0, torch.float32),
            top_p=full(1.0, torch.float32),
            min_p=full(0.0, torch.float32),
            top_k=full(0, torch.int64),
            seeds=full(0, torch.int64),
            block_size=block_size,
            k=k,
        )

    @property
    def max_len(self) -> int:
        """Positions that `tokens` has room for."""
        return self.tokens.shape[1]

    def keep_draft_probs(self, vocab_size: int) -> None:
        """Make room for the distributions of drawn drafts; to be called once, before the first of them."""
        shape = (len(self.tokens), self.k, vocab_size)
        self.draft_probs = torch.zeros(shape, dtype=torch.float32, device=self.tokens.device)

    def sampling_rows(self, table: torch.Tensor, any_top_k_or_p: bool, any_min_p: bool) -> SamplingRows:
        """Sampling parameters of the rows `table` (int32 or int64 `[n]`, -1 for padding, which gets somebody's).

        The flags are what the host knows: whether any of these rows cuts its distribution.
        """
        index = table.clamp(min=0).long()
        return SamplingRows(
            self.temperature[index],
            self.top_p[index],
            self.top_k[index],
            self.min_p[index],
            self.seeds[index],
            any_top_k_or_p,
            any_min_p,
        )


# Fields begin at multiples of 16 bytes: Triton compiles a kernel anew for pointers that are aligned otherwise.
_ALIGNMENT = 4
# In the order in which `StepRows.over` finds them.
_ROW_FIELDS = (
    "table",
    "start",
    "uncertain",
    "num_new",
    "num_draft",
    "num_next",
    "query_start",
    "query_lens",
    "dist_start",
    "sampled",
)


@dataclass(frozen=True)
class StepRows:
    """The layout of a step: R rows with T tokens.

    int32 `[R]`: table (row of `DeviceState`, -1 for padding), start (an upper bound where `uncertain`, the number of
    drafts in flight, is not 0: then `DeviceState.computed` has the real one), num_new (tokens that are known),
    num_draft (drafts behind them), num_next (drafts to propose), query_start (index of the row's first token),
    query_lens (`num_new + num_draft`), dist_start (index of the first of its `num_draft + 1` distributions, -1 for a
    row that does not sample), sampled (1: rejection sampling, 0: greedy). token_row: int32 `[T]`, the row of each
    token, -1 for padding tokens.

    A padding row has table and dist_start -1 and all its numbers 0.
    """

    table: torch.Tensor
    start: torch.Tensor
    uncertain: torch.Tensor
    num_new: torch.Tensor
    num_draft: torch.Tensor
    num_next: torch.Tensor
    query_start: torch.Tensor
    query_lens: torch.Tensor
    dist_start: torch.Tensor
    sampled: torch.Tensor
    token_row: torch.Tensor

    @staticmethod
    def buffer_size(num_rows: int, num_tokens: int) -> int:
        """Numbers in the buffer of `over`."""
        return len(_ROW_FIELDS) * _aligned(num_rows) + num_tokens

    @classmethod
    def over(cls, buffer: torch.Tensor, num_rows: int) -> StepRows:
        """Views of `buffer`, int32 `[buffer_size(num_rows, num_tokens)]`, so that a step's layout is one copy from the
        host, where the same views are filled. Raises `ValueError` for a buffer that is too small."""
        num_fields = cls.buffer_size(num_rows, 0)
        if buffer.dtype != torch.int32 or buffer.dim() != 1 or len(buffer) < num_fields:
            raise ValueError(
                f"the layout of {num_rows} rows needs an int32 vector of at least {num_fields} numbers, "
                f"not {buffer.dtype} of shape {list(buffer.shape)}"
            )
        fields = buffer[:num_fields].view(len(_ROW_FIELDS), -1)[:, :num_rows]
        return cls(**dict(zip(_ROW_FIELDS, fields.unbind(0), strict=True)), token_row=buffer[num_fields:])


def _aligned(num_rows: int) -> int:
    return -(-num_rows // _ALIGNMENT) * _ALIGNMENT


@dataclass(frozen=True)
class Prepared:
    """What the target runs. token_ids, positions, slots: int64 `[T]`. starts, seq_lens: int32 `[R]`, 0 for padding.

    A padding token, and one that lies past its row's blocks (the request has ended meanwhile), has slot -1, id 0 and
    position 0. `seq_lens` never goes past a row's blocks either.
    """

    token_ids: torch.Tensor
    positions: torch.Tensor
    slots: torch.Tensor
    starts: torch.Tensor
    seq_lens: torch.Tensor


@dataclass(frozen=True)
class Accepted:
    """What the accept phase decided. count: int32 `[R]`, drafts that stand. tokens: int64 `[R, k + 1]`, those drafts
    and the token that follows, then 0; all 0 for a row that does not sample."""

    count: torch.Tensor
    tokens: torch.Tensor


@dataclass(frozen=True)
class DraftQueries:
    """What the drafter runs: `[anchor, mask x num_next]` for each row, padded to 1 + k.

    token_ids, positions, slots: int64 `[R, 1 + k]`, with padding as in `Prepared`. query_start (`row * (1 + k)`),
    query_lens (`1 + num_next`, 0 for rows that do not draft), seq_lens: int32 `[R]`.
    """

    token_ids: torch.Tensor
    positions: torch.Tensor
    slots: torch.Tensor
    query_start: torch.Tensor
    query_lens: torch.Tensor
    seq_lens: torch.Tensor
