"""The gated delta rule (arXiv 2412.06464) in torch: a state matrix for each head that every token decays and corrects.

With state S `[key_dim, value_dim]`, key k, value v, decay `exp(g)` and rate beta, token t gives

    u_t = beta_t (v_t - exp(g_t) S_{t-1}^T k_t)
    S_t = exp(g_t) S_{t-1} + k_t u_t^T
    output_t = S_t^T q_t

`recurrent` computes it so, token by token. `delta_block` computes some tokens at once from the state before them: the
updates u solve a triangular system, and no state between is made. `advance` gives the state after any number of those
tokens, which is how the tokens that were accepted are replayed. All numbers are float32.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

CHUNK = 64  # tokens of a prompt that are computed at once
# Up to this many unknowns are substituted one by one, which a captured graph can hold.
FEW_TOKENS = 32


class DeltaInputs(NamedTuple):
    """Tokens of B rows and H heads: queries and keys `[B, H, W, key_dim]`, values `[B, H, W, value_dim]`, and beta and
    the log of the decay (at most 0), both `[B, H, W]`. A token with beta 0 and log_decay 0 changes no state."""

    queries: torch.Tensor
    keys: torch.Tensor
    values: torch.Tensor
    beta: torch.Tensor
    log_decay: torch.Tensor


class DeltaBlock(NamedTuple):
    """What `delta_block` computed: outputs and updates `[B, H, W, value_dim]`; decayed: `[B, H, W]`, the log of the
    decay from the state before the block up to each token."""

    outputs: torch.Tensor
    updates: torch.Tensor
    decayed: torch.Tensor


def recurrent(tokens: DeltaInputs, state: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Outputs `[B, H, W, value_dim]` and the state after the last token, from `state` `[B, H, key_dim, value_dim]`."""
    outputs = torch.empty_like(tokens.values)
    for t in range(tokens.values.shape[2]):
        query, key, value = (each[:, :, t, :, None] for each in (tokens.queries, tokens.keys, tokens.values))
        state = state * tokens.log_decay[:, :, t, None, None].exp()
        update = (value - state.transpose(-1, -2) @ key) * tokens.beta[:, :, t, None, None]
        state = state + key @ update.transpose(-1, -2)
        outputs[:, :, t] = (state.transpose(-1, -2) @ query)[..., 0]
    return outputs, state


def delta_block(tokens: DeltaInputs, state: torch.Tensor) -> DeltaBlock:
    """The tokens' outputs and updates, from the `state` before them, `[B, H, key_dim, value_dim]`."""
    queries, keys, values, beta, log_decay = tokens
    decayed = log_decay.cumsum(-1)
    factor = decayed.exp()[..., None]
    if values.shape[2] == 1:
        updates = (values - factor * (keys @ state)) * beta[..., None]
        outputs = factor * (queries @ state) + (queries * keys).sum(-1, keepdim=True) * updates
        return DeltaBlock(outputs, updates, decayed)
    between = decayed[..., :, None] - decayed[..., None, :]
    # Masked before exp: above the diagonal it could be infinite.
    future = torch.ones(between.shape[-2:], dtype=torch.bool, device=between.device).triu(1)
    between = between.masked_fill(future, float("-inf")).exp()
    mixed = keys @ keys.transpose(-1, -2) * between * beta[..., None]
    updates = _solve(mixed, (values - factor * (keys @ state)) * beta[..., None])
    outputs = factor * (queries @ state) + (queries @ keys.transpose(-1, -2) * between) @ updates
    return DeltaBlock(outputs, updates, decayed)


def advance(state: torch.Tensor, keys: torch.Tensor, block: DeltaBlock, num_tokens: torch.Tensor) -> torch.Tensor:
    """The state after the first `num_tokens` (int64 `[B]`) of a block's tokens, whose keys are `keys`, from the
    `state` before it."""
    kept = torch.arange(keys.shape[2], device=keys.device) < num_tokens[:, None]
    last = (num_tokens - 1).clamp(min=0)[:, None, None].expand(-1, keys.shape[1], 1)
    total = block.decayed.gather(2, last).masked_fill((num_tokens == 0)[:, None, None], 0.0)
    weights = (total - block.decayed).masked_fill(~kept[:, None], float("-inf")).exp()
    return state * total.exp()[..., None] + (keys * weights[..., None]).transpose(-1, -2) @ block.updates


def chunked(tokens: DeltaInputs, state: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """As `recurrent`, `CHUNK` tokens at once."""
    outputs = []
    for start in range(0, tokens.values.shape[2], CHUNK):
        part = DeltaInputs(*(each[:, :, start : start + CHUNK] for each in tokens))
        block = delta_block(part, state)
        count = torch.full((len(state),), part.keys.shape[2], device=state.device)
        state = advance(state, part.keys, block, count)
        outputs.append(block.outputs)
    return torch.cat(outputs, dim=2), state


def _solve(mixed: torch.Tensor, known: torch.Tensor) -> torch.Tensor:
    """x of `(1 + lower) x = known`, lower being what `mixed` has below its diagonal."""
    width = known.shape[2]
    if width > FEW_TOKENS:
        return torch.linalg.solve_triangular(mixed, known, upper=False, unitriangular=True)
    updates = known.clone()
    for t in range(1, width):
        updates[:, :, t] -= (mixed[:, :, t, None, :t] @ updates[:, :, :t])[:, :, 0]
    return updates
