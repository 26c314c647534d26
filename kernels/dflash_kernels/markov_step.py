"""One step of a Markov head along the blocks: from the token before each row's next draft, the latent vector whose
projection is added to that draft's logits.

With e the embedding of the token before and x the projected output at the draft, the latent is e itself for a vanilla
head (which needs none of this), `sigmoid(x + W e) * e` for a gated one, and `tanh(output)` for a recurrent one, where
`gate, candidate, output = x + W [state, e]` and the next state is `sigmoid(gate) * state + (1 - sigmoid(gate)) *
tanh(candidate)`.
"""

from __future__ import annotations

import torch

from dflash_kernels.launcher import cached_launches
from dflash_kernels.triton_import import tl, triton

# Weights that a program multiplies at a time.
TILE = 8192

Step = tuple[torch.Tensor, torch.Tensor | None]


def markov_step_reference(
    previous: torch.Tensor,
    table: torch.Tensor,
    projected: torch.Tensor,
    weight: torch.Tensor,
    state: torch.Tensor | None = None,
) -> Step:
    """The latent vectors of a gated head, `[R, rank]` in the table's dtype, and None; or with a `state` (float32
    `[R, rank]`) those of a recurrent head and its next state.

    previous: int64 `[R]`, the tokens before. table: `[vocab, rank]`, their embeddings. projected: `[R, rank]`,
    recurrent `[R, 3 * rank]`, x with its bias. weight: `[rank, rank]`, recurrent `[3 * rank, 2 * rank]`.
    """
    embedding, x = table[previous].float(), projected.float()
    if state is None:
        latent = torch.sigmoid(x + embedding @ weight.float().T) * embedding
        return latent.to(table.dtype), None
    joined = x + torch.cat([state, embedding], dim=1) @ weight.float().T
    gate, candidate, output = joined.chunk(3, dim=1)
    gate = torch.sigmoid(gate)
    return torch.tanh(output).to(table.dtype), gate * state + (1 - gate) * torch.tanh(candidate)


@triton.jit
def _tanh(x):
    return 2.0 * tl.sigmoid(2.0 * x) - 1.0


@triton.jit
def _dot(weight_ptr, out, inner, vector, inside, columns):
    """The products of the rows `out` of a matrix, from its column at `weight_ptr` on, with a vector."""
    weight = tl.load(weight_ptr + out[:, None] * columns + inner[None, :], mask=inside, other=0.0)
    return tl.sum(weight.to(tl.float32) * vector[None, :], axis=1)


@cached_launches
@triton.jit
def _markov_step_kernel(
    previous_ptr, table_ptr, projected_ptr, projected_stride, weight_ptr, state_ptr, latent_ptr, next_ptr,
    RANK: tl.constexpr, RECURRENT: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """One program makes ROWS numbers of one row's latent vector."""
    row = tl.program_id(0).to(tl.int64)
    out = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    inner = tl.arange(0, COLUMNS)
    kept = out < RANK
    inside = kept[:, None] & (inner < RANK)[None, :]
    table_ptr += tl.load(previous_ptr + row) * RANK
    projected_ptr += row * projected_stride
    embedding = tl.load(table_ptr + inner, mask=inner < RANK, other=0.0).to(tl.float32)
    if RECURRENT:
        width = 2 * RANK
        state = tl.load(state_ptr + row * RANK + inner, mask=inner < RANK, other=0.0)
        gate = tl.load(projected_ptr + out, mask=kept, other=0.0).to(tl.float32)
        candidate = tl.load(projected_ptr + RANK + out, mask=kept, other=0.0).to(tl.float32)
        output = tl.load(projected_ptr + 2 * RANK + out, mask=kept, other=0.0).to(tl.float32)
        gate += _dot(weight_ptr, out, inner, state, inside, width)
        gate += _dot(weight_ptr + RANK, out, inner, embedding, inside, width)
        candidate += _dot(weight_ptr, RANK + out, inner, state, inside, width)
        candidate += _dot(weight_ptr + RANK, RANK + out, inner, embedding, inside, width)
        output += _dot(weight_ptr, 2 * RANK + out, inner, state, inside, width)
        output += _dot(weight_ptr + RANK, 2 * RANK + out, inner, embedding, inside, width)
        gate = tl.sigmoid(gate)
        own = tl.load(state_ptr + row * RANK + out, mask=kept, other=0.0)
        tl.store(next_ptr + row * RANK + out, gate * own + (1.0 - gate) * _tanh(candidate), mask=kept)
        latent = _tanh(output)
    else:
        gate = tl.load(projected_ptr + out, mask=kept, other=0.0).to(tl.float32)
        gate += _dot(weight_ptr, out, inner, embedding, inside, RANK)
        latent = tl.sigmoid(gate) * tl.load(table_ptr + out, mask=kept, other=0.0).to(tl.float32)
    tl.store(latent_ptr + row * RANK + out, latent.to(latent_ptr.dtype.element_ty), mask=kept)


def markov_step(
    previous: torch.Tensor,
    table: torch.Tensor,
    projected: torch.Tensor,
    weight: torch.Tensor,
    state: torch.Tensor | None = None,
) -> Step:
    """As `markov_step_reference`; rows of `projected` must be contiguous, and all of the others."""
    num_rows, rank = len(previous), table.shape[1]
    latent = torch.empty(num_rows, rank, dtype=table.dtype, device=table.device)
    following = None if state is None else torch.empty_like(state)
    if num_rows > 0:
        columns = triton.next_power_of_2(rank)
        rows = min(columns, max(1, TILE // columns))
        _markov_step_kernel[(num_rows, triton.cdiv(rank, rows))](
            previous, table, projected, projected.stride(0), weight, state, latent, following,
            RANK=rank, RECURRENT=state is not None, ROWS=rows, COLUMNS=columns,
        )  # fmt: skip
    return latent, following
