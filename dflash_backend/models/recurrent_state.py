"""The state of layers that keep one for all positions of a request, and what a pass does with it.

A request's state lies in the slot of its request index, so it is owned from admission to the request's end. A row that
starts at position 0 reads zeros in place of what is there: the slot may have had another owner, whose last step the
device runs before this one. A forward pass changes no state. `StateRows.commit` does once the accepted tokens are
known: it replays them from what the pass kept of the rows that may have drafts, so a rejected draft leaves no trace.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import torch

from dflash_backend.checkpoints.spec import DecoderSpec, DeltaNetSpec
from dflash_kernels.delta_rule import CHUNK, DeltaBlock, advance

# Tokens of a row that may have drafts, at most.
MAX_ROW_TOKENS = CHUNK


@dataclass(frozen=True)
class StateCommit:
    """States were brought behind the first `num_kept` (int32 `[R]`) tokens of their rows."""

    num_kept: torch.Tensor


@dataclass(frozen=True)
class StateCopies:
    """States were copied between slots."""

    pairs: Sequence[tuple[int, int]]


StateChange = StateCommit | StateCopies


@dataclass(frozen=True)
class StatePool:
    """States of S slots, first those of requests and behind them copies, and a last slot that padding rows write to.

    states: float32 `[layers, S + 1, value_heads, key_dim, value_dim]`. tails: `[layers, S + 1, conv_width - 1,
    channels]`, the last inputs of the convolution, in the model's dtype. lengths: int32 `[S + 1]`, how many positions a
    state covers. follow: what is told of each change, for those who have other heads of the same states.
    """

    states: torch.Tensor
    tails: torch.Tensor
    lengths: torch.Tensor
    follow: Callable[[StateChange], None] | None = None

    @classmethod
    def allocate(cls, decoder: DecoderSpec, num_slots: int, dtype: torch.dtype, device: torch.device) -> StatePool:
        """For the gated delta net layers of `decoder`, which has some."""
        net = decoder.delta_net
        assert net is not None
        layers, slots = sum(net.layers), num_slots + 1
        shape = layers, slots, net.num_value_heads, net.key_head_dim, net.value_head_dim
        return cls(
            torch.zeros(shape, dtype=torch.float32, device=device),
            torch.zeros((layers, slots, net.conv_width - 1, net.conv_size), dtype=dtype, device=device),
            torch.zeros(slots, dtype=torch.int32, device=device),
        )

    def copy(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copy states between slots: `(from, to)`, of which no slot occurs twice."""
        if pairs:
            if self.follow is not None:
                self.follow(StateCopies(pairs))
            source, target = torch.tensor(pairs, dtype=torch.int64).to(self.lengths.device).unbind(1)
            self.states.index_copy_(1, target, self.states.index_select(1, source))
            self.tails.index_copy_(1, target, self.tails.index_select(1, source))
            self.lengths.index_copy_(0, target, self.lengths.index_select(0, source))

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        """All that steps change."""
        return self.states, self.tails, self.lengths


def pool_bytes(net: DeltaNetSpec, num_slots: int, dtype: torch.dtype) -> int:
    """Bytes of a pool of that many slots."""
    return (num_slots + 1) * net.state_bytes(dtype.itemsize)


@dataclass(frozen=True)
class StateGroup:
    """Rows of a pass that run together, W tokens each at most.

    rows: int64 `[G]`, their places in the pass. slots: int64 `[G]`. fresh: bool `[G]`, rows that start at position 0.
    index, place: int64 `[G, W]`, each token's place among those of the pass, where the row has fewer any place and the
    one behind the last. valid: bool `[G, W]`.
    """

    rows: torch.Tensor
    slots: torch.Tensor
    fresh: torch.Tensor
    index: torch.Tensor
    place: torch.Tensor
    valid: torch.Tensor

    @property
    def may_draft(self) -> bool:
        """Whether some of its tokens may be rejected. Only rows of few tokens have drafts."""
        return self.index.shape[1] <= CHUNK


@dataclass(frozen=True)
class KeptBlock:
    """What a layer keeps of a group. inputs: `[G, conv_width - 1 + W, channels]`, those of the convolution, the tail
    first. Of a group that may have drafts keys `[G, H, W, key_dim]` and their block, else the state after the last
    token."""

    inputs: torch.Tensor
    keys: torch.Tensor | None = None
    block: DeltaBlock | None = None
    state: torch.Tensor | None = None


class StateLayout(NamedTuple):
    """The rows of a pass of `num_tokens` tokens. int32 `[R]` on the device: req_idx, -1 for padding; starts;
    query_start, the place of a row's first token; query_lens. widths: `[R]`, the most tokens of each."""

    req_idx: torch.Tensor
    starts: torch.Tensor
    query_start: torch.Tensor
    query_lens: torch.Tensor
    widths: np.ndarray
    num_tokens: int


@dataclass
class StateRows:
    """A pass over rows, as layers with a state see it. starts: int32 `[R]`, where rows start. kept: what each layer
    kept of each group."""

    pool: StatePool
    groups: list[StateGroup]
    starts: torch.Tensor
    slots: torch.Tensor
    layout: StateLayout
    kept: dict[tuple[int, int], KeptBlock] = field(default_factory=dict)

    @classmethod
    def of(cls, pool: StatePool, layout: StateLayout) -> StateRows:
        """The rows of `layout`, whose states are in `pool`."""
        req_idx, starts, query_start, query_lens, widths, num_tokens = layout
        index = req_idx.long()
        slots = torch.where(index < 0, pool.states.shape[1] - 1, index)
        groups = []
        for members in _by_width(widths):
            width = int(widths[members].max())
            if len(members) == len(widths):
                rows = torch.arange(len(widths), device=index.device)
            else:
                rows = torch.from_numpy(members).to(index.device)
            columns = torch.arange(width, device=index.device)
            valid = columns < query_lens[rows, None]
            token = query_start.long()[rows, None] + columns
            groups.append(
                StateGroup(
                    rows,
                    slots[rows],
                    starts[rows] == 0,
                    token.clamp(max=num_tokens - 1),
                    torch.where(valid, token, num_tokens),
                    valid,
                )
            )
        return cls(pool, groups, starts, slots, layout)

    def check(self) -> None:
        """Raise `RuntimeError` unless each state covers the positions before its row. Waits for the device."""
        covered, starts = self.pool.lengths[self.slots], self.starts
        wrong = ((starts != 0) & (covered != starts)).nonzero()
        if len(wrong):
            row = int(wrong[0])
            raise RuntimeError(
                f"the state in slot {int(self.slots[row])} covers {int(covered[row])} positions, and its row starts at "
                f"position {int(starts[row])}"
            )

    def load(self, layer: int, group: StateGroup) -> tuple[torch.Tensor, torch.Tensor]:
        """State and convolution tail of a group's rows, copies: `[G, H, key_dim, value_dim]` and
        `[G, conv_width - 1, channels]`."""
        fresh = group.fresh[:, None, None]
        state = self.pool.states[layer].index_select(0, group.slots).masked_fill_(fresh[..., None], 0.0)
        return state, self.pool.tails[layer].index_select(0, group.slots).masked_fill_(fresh, 0.0)

    def commit(self, num_kept: torch.Tensor) -> None:
        """Bring every state behind the first `num_kept` (int32 `[R]`) tokens of its row. To be called once."""
        if self.pool.follow is not None:
            self.pool.follow(StateCommit(num_kept))
        for (layer, number), kept in self.kept.items():
            group = self.groups[number]
            count = num_kept.index_select(0, group.rows).long()
            state = kept.state
            if kept.block is not None and kept.keys is not None:
                state = advance(self.load(layer, group)[0], kept.keys, kept.block, count)
            assert state is not None
            self.pool.states[layer].index_copy_(0, group.slots, state)
            tail = count[:, None] + torch.arange(self.pool.tails.shape[2], device=count.device)
            inputs = kept.inputs.gather(1, tail[..., None].expand(-1, -1, kept.inputs.shape[2]))
            self.pool.tails[layer].index_copy_(0, group.slots, inputs)
        self.pool.lengths.index_copy_(0, self.slots, (self.starts + num_kept).int())


def _by_width(widths: np.ndarray) -> Iterator[np.ndarray]:
    """The rows that run together: those of few tokens with others that have up to twice as many, each of the rest by
    itself. Rows without tokens have none."""
    few = (widths > 0) & (widths <= CHUNK)
    powers = np.ceil(np.log2(np.maximum(widths, 1))).astype(np.int64)
    for power in np.unique(powers[few]):
        yield (few & (powers == power)).nonzero()[0]
    for row in (widths > CHUNK).nonzero()[0]:
        yield np.array([row])
