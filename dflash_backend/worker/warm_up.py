"""Compiles, before the first request, every kernel that a step can need: Triton compiles one when it is first launched,
which takes up to seconds, and all requests would wait.

Steps of padding rows alone run under the bounds of real ones; they read and write nothing. What a kernel is compiled
for is enumerated: tiles of attention, of experts and of quantised weights, draft widths, rows of a budget, dtypes of
logits. The counting driver of `benchmarks.gpu.kernel_variants` shows that no workload adds a kernel.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace

import numpy as np
import torch

from dflash_backend.attention import AttentionBackend
from dflash_backend.worker.batch import BatchTraits, LengthBounds, StepInputs
from dflash_backend.worker.layout_buffer import LayoutBuffer
from dflash_backend.worker.step import ModelStep
from dflash_kernels.delta_rule import CHUNK as DELTA_CHUNK
from dflash_kernels.moe import TILES
from dflash_kernels.moe_routing import FEW_ENTRIES
from dflash_kernels.penalties import NUMBERS, PenalisedRows
from dflash_kernels.quantised_linear import every_tile
from dflash_kernels.token_bitmask import num_words

# Tokens of a prefill chunk that takes the tallest tiles of attention, whatever the heads.
CHUNK = 256
# Of different lengths, so that attention maps tiles to rows as it does in a ragged step.
NUM_ROWS = 4


def warm_up(step: ModelStep, layouts: LayoutBuffer, max_tokens: int, draft_widths: Sequence[int] = ()) -> None:
    """Compile the kernels of steps of at most `max_tokens` tokens. draft_widths: the drafts that steps propose for each
    row where that is not always k."""
    longest = min(CHUNK, max_tokens)
    with _every_variant(step):
        step.run(_padding_under_bounds(step, layouts, longest, sampled=False))
        if step.shares_prefixes:
            inputs = _padding_under_bounds(step, layouts, longest, sampled=False)
            shared = layouts.padded_shared(inputs.num_rows, inputs.num_tokens, step.state.max_len)
            step.run(replace(inputs, shared=shared))
    for num_tokens in _token_counts(step, max_tokens):
        step.run(_padding_under_bounds(step, layouts, num_tokens, sampled=False))
    for width in {step.state.k, *draft_widths}:
        for sampled in (False, True):
            with _every_variant(step):
                step.run(_padding_under_bounds(step, layouts, 1, sampled, width))
    for num_rows in _powers_of_two(layouts.max_rows):
        step.ops.lay_out(_padding_under_bounds(step, layouts, 1, num_rows=num_rows), step.state)
    _choose_tokens(step, layouts)


@contextmanager
def _every_variant(step: ModelStep) -> Iterator[None]:
    """In this block the attention of both models, and products of quantised weights, run every kernel that they
    have."""
    draft_backend, peers = step.draft_backend or step.backend, step.target.peers
    with peers.every_variant(), every_kernel(step.backend, draft_backend):
        yield


@contextmanager
def every_kernel(*backends: AttentionBackend) -> Iterator[None]:
    """In this block attention of these backends, and products of quantised weights, run every kernel that they have."""
    with ExitStack() as stack:
        for backend in backends:
            stack.enter_context(backend.every_variant())
        stack.enter_context(every_tile())
        yield


def _choose_tokens(step: ModelStep, layouts: LayoutBuffer) -> None:
    """Masks and samples logits of the target's dtype, and of float32, which logits processors give."""
    inputs = _padding_under_bounds(step, layouts, 1, sampled=True)
    prepared = step.ops.prepare(inputs, step.state)
    vocab_size, device = step.target.spec.vocab_size, step.device
    bitmask = torch.full((1, num_words(vocab_size)), -1, dtype=torch.int32, device=device)
    row = torch.zeros(1, dtype=torch.int32, device=device)
    for dtype in (step.dtype, torch.float32):
        logits = torch.zeros(1, vocab_size, dtype=dtype, device=device)
        step.ops.apply_token_bitmask(logits, bitmask, row)
        step.ops.argmax(logits)
        step.ops.target_tokens(logits, inputs, prepared, step.state)
    # Logits before the first token of request 0, which has no penalties yet.
    numbers = torch.zeros(NUMBERS, 1, dtype=torch.int64, device=device)
    rows = PenalisedRows(numbers, torch.zeros(1, dtype=torch.int64, device=device), 0)
    step.ops.penalise(torch.zeros(1, vocab_size, device=device), rows, step.state)


def _token_counts(step: ModelStep, max_tokens: int) -> list[int]:
    """Numbers of tokens that together take every tile of the experts, every form of their grouping, and the form of
    the delta rule for blocks of more tokens than a row of few drafts has."""
    counts = {min(DELTA_CHUNK, max_tokens)} if step.pool is not None else set()
    moe = step.target.spec.decoder.moe
    if moe is None:
        return sorted(counts)
    entries = [tile.rows * moe.num_experts for tile in TILES] + [FEW_ENTRIES]
    last = {count // moe.experts_per_token for count in entries}
    counts |= {1, *last, *(count + 1 for count in last)}
    return sorted(count for count in counts if 1 <= count <= max_tokens)


def _powers_of_two(most: int) -> Iterator[int]:
    """Those up to the first that is not below `most`, and never more than `most`."""
    size = 1
    while size < most:
        yield size
        size *= 2
    yield most


def _padding_under_bounds(
    step: ModelStep,
    layouts: LayoutBuffer,
    num_tokens: int,
    sampled: bool = False,
    draft_width: int | None = None,
    num_rows: int = NUM_ROWS,
) -> StepInputs:
    """Padding rows, the first of which the host takes for one of up to `num_tokens` tokens of a long context."""
    device, longest = step.device, step.state.max_len
    size = num_rows * -(-num_tokens // num_rows)
    layouts.send_nothing(num_rows, size)
    batch, budget = layouts.padded(num_rows, size)
    lens, ends = np.zeros((2, num_rows), dtype=np.int64)
    lens[0], ends[0] = num_tokens, longest
    return StepInputs(
        batch=batch,
        logits_token=torch.zeros(1, dtype=torch.int32, device=device),
        logits_row=torch.full((1,), -1, dtype=torch.int32, device=device),
        bounds=LengthBounds(lens, ends, ends, max_overestimate=longest),
        traits=BatchTraits(sampled=sampled, drafts=step.drafter is not None and draft_width != 0 and step.state.k > 0),
        budget=budget,
        draft_width=draft_width,
    )
