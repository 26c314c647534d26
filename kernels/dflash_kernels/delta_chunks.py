"""The gated delta rule (`delta_rule.py`) as two kernels, for a few tokens and for prompts.

The first takes each chunk of tokens by itself: it inverts the chunk's triangular system and says what each token takes
from the updates of the others. The second goes from chunk to chunk with the state. So what is computed one after the
other are products of small matrices, whose number follows from the chunks and not from the tokens. Sums are as exact as
float32.
"""

from __future__ import annotations

import torch

from dflash_kernels.delta_rule import CHUNK, DeltaBlock, DeltaInputs
from dflash_kernels.launcher import cached_launches
from dflash_kernels.triton_import import tl, triton

# Tokens of a block of drafts that has few, and channels that a product takes at least.
FEW_TOKENS = 16
# Channels of values that one program of the second kernel takes, of a block and through all chunks: with more of these,
# registers do not hold what products are made of (`benchmarks.gpu.compile_table`).
BLOCK_CHANNELS, PROMPT_CHANNELS = 32, 16
# Three products of tensor cores, whose sum has the digits of float32.
PRECISION = "tf32x3"


@cached_launches
@triton.jit(do_not_specialize=["width"])
def _delta_systems_kernel(
    queries_ptr, keys_ptr, beta_ptr, log_decay_ptr, inverse_ptr, mixing_ptr, decayed_ptr, width,
    KEY_DIM: tl.constexpr, PIECE: tl.constexpr, SIZE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One program: the system of one chunk of one head."""
    chunk, head = tl.program_id(0), tl.program_id(1).to(tl.int64)
    place = tl.arange(0, SIZE)
    token = head * width + chunk * SIZE + place
    inside = chunk * SIZE + place < width
    # A token that is not there has neither rate nor decay, so it changes nothing.
    beta = tl.load(beta_ptr + token, mask=inside, other=0.0)
    decayed = tl.cumsum(tl.load(log_decay_ptr + token, mask=inside, other=0.0), 0)
    tl.store(decayed_ptr + token, decayed, mask=inside)

    mixing = tl.zeros([SIZE, SIZE], dtype=tl.float32)
    columns = tl.zeros([SIZE, SIZE], dtype=tl.float32)
    for first in range(0, KEY_DIM, PIECE):
        channel = first + tl.arange(0, PIECE)
        offsets = token[:, None] * KEY_DIM + channel
        there = inside[:, None] & (channel < KEY_DIM)
        keys = tl.load(keys_ptr + offsets, mask=there, other=0.0)
        queries = tl.load(queries_ptr + offsets, mask=there, other=0.0)
        mixing = tl.dot(queries, tl.trans(keys), mixing, input_precision=PRECISION)
        columns = tl.dot(keys, tl.trans(keys), columns, input_precision=PRECISION)
    system = head * tl.num_programs(0) + chunk
    tile = system * SIZE * SIZE + place[:, None] * SIZE + place

    # Masked before exp: above the diagonal it could be infinite.
    between = decayed[:, None] - decayed
    seen = place[:, None] >= place
    mixing *= tl.exp(tl.where(seen, between, float("-inf")))
    tl.store(mixing_ptr + tile, mixing)

    # The system's columns are its rows here: entry [j, i] is what token i takes from the update of token j < i.
    earlier = place[:, None] < place
    columns *= beta * tl.exp(tl.where(earlier, -between, float("-inf")))
    inverse = tl.where(place[:, None] == place, 1.0, 0.0)
    # Row after row. Powers of the system would be fewer steps, and lose all digits where keys repeat themselves.
    for i in range(1, tl.minimum(width - chunk * SIZE, SIZE)):
        column = tl.sum(tl.where(place == i, columns, 0.0), axis=1)
        row = tl.sum(column[:, None] * inverse, axis=0)
        inverse = tl.where(place[:, None] == i, inverse - row, inverse)
    tl.store(inverse_ptr + tile, inverse * beta)


@triton.jit
def _times_state(
    x_ptr, token, inside, state_low, state_high,
    KEY_DIM: tl.constexpr, HALF_KEY: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Queries or keys of a chunk's tokens times the state, whose rows are in two halves."""
    low = tl.arange(0, HALF_KEY)
    place, high = x_ptr + token[:, None] * KEY_DIM, HALF_KEY + low
    x = tl.load(place + low, mask=inside[:, None] & (low < KEY_DIM), other=0.0)
    product = tl.dot(x, state_low, input_precision=PRECISION)
    x = tl.load(place + high, mask=inside[:, None] & (high < KEY_DIM), other=0.0)
    return tl.dot(x, state_high, product, input_precision=PRECISION)


@triton.jit
def _with_updates(state, keys_ptr, token, inside, channel, updates, KEY_DIM: tl.constexpr, PRECISION: tl.constexpr):
    """Rows of a state, those of these channels of a key, with what a chunk's tokens add. Keys are read once more,
    the other way round: registers do not hold them until here."""
    place = keys_ptr + token * KEY_DIM + channel[:, None]
    keys = tl.load(place, mask=inside & (channel[:, None] < KEY_DIM), other=0.0)
    return tl.dot(keys, updates, state, input_precision=PRECISION)


@cached_launches
@triton.jit(do_not_specialize=["width"])
def _delta_scan_kernel(
    queries_ptr, keys_ptr, values_ptr, state_ptr, inverse_ptr, mixing_ptr, decayed_ptr,
    outputs_ptr, updates_ptr, after_ptr, width,
    KEY_DIM: tl.constexpr, VALUE_DIM: tl.constexpr, HALF_KEY: tl.constexpr, BLOCK_VALUE: tl.constexpr,
    SIZE: tl.constexpr, IS_BLOCK: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One program: some channels of one head's values, through all chunks. Of a block, which is one chunk, the
    updates are kept, else the state behind the last token."""
    head = tl.program_id(1).to(tl.int64)
    place, low = tl.arange(0, SIZE), tl.arange(0, HALF_KEY)
    high = HALF_KEY + low
    value = tl.program_id(0) * BLOCK_VALUE + tl.arange(0, BLOCK_VALUE)
    is_value = value < VALUE_DIM
    # The state's rows in two halves: what is split in parts for a product stays in registers.
    of_low = head * KEY_DIM * VALUE_DIM + low[:, None] * VALUE_DIM + value
    of_high = of_low + HALF_KEY * VALUE_DIM
    low_there, high_there = (low[:, None] < KEY_DIM) & is_value, (high[:, None] < KEY_DIM) & is_value
    state_low = tl.load(state_ptr + of_low, mask=low_there, other=0.0)
    state_high = tl.load(state_ptr + of_high, mask=high_there, other=0.0)
    num_chunks = tl.cdiv(width, SIZE)
    for chunk in range(0, num_chunks):
        index = chunk * SIZE + place
        inside = index < width
        token = head * width + index
        of_values = token[:, None] * VALUE_DIM + value
        value_there = inside[:, None] & is_value
        tile = (head * num_chunks + chunk) * SIZE * SIZE + place[:, None] * SIZE + place
        decayed = tl.load(decayed_ptr + token, mask=inside, other=0.0)
        factor = tl.exp(decayed)[:, None]

        known = tl.load(values_ptr + of_values, mask=value_there, other=0.0)
        known -= factor * _times_state(keys_ptr, token, inside, state_low, state_high, KEY_DIM, HALF_KEY, PRECISION)
        updates = tl.dot(tl.load(inverse_ptr + tile), known, input_precision=PRECISION)
        outputs = _times_state(queries_ptr, token, inside, state_low, state_high, KEY_DIM, HALF_KEY, PRECISION)
        outputs = tl.dot(tl.load(mixing_ptr + tile), updates, factor * outputs, input_precision=PRECISION)
        tl.store(outputs_ptr + of_values, outputs, mask=value_there)
        if IS_BLOCK:
            tl.store(updates_ptr + of_values, updates, mask=value_there)
        else:
            total = tl.sum(tl.where(index == tl.minimum((chunk + 1) * SIZE, width) - 1, decayed, 0.0))
            updates *= tl.exp(total - decayed)[:, None]
            state_low = _with_updates(
                state_low * tl.exp(total), keys_ptr, token, inside, low, updates, KEY_DIM, PRECISION
            )
            state_high = _with_updates(
                state_high * tl.exp(total), keys_ptr, token, inside, high, updates, KEY_DIM, PRECISION
            )
    if not IS_BLOCK:
        tl.store(after_ptr + of_low, state_low, mask=low_there)
        tl.store(after_ptr + of_high, state_high, mask=high_there)


def delta_block(tokens: DeltaInputs, state: torch.Tensor) -> DeltaBlock:
    """As `delta_rule.delta_block`, for at most `CHUNK` tokens."""
    return _run(tokens, state, is_block=True)[0]


def chunked(tokens: DeltaInputs, state: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """As `delta_rule.chunked`."""
    block, after = _run(tokens, state, is_block=False)
    return block.outputs, after


def _run(tokens: DeltaInputs, state: torch.Tensor, is_block: bool) -> tuple[DeltaBlock, torch.Tensor]:
    """Outputs, of a block the updates, and otherwise the state behind the last token."""
    queries, keys, values, beta, log_decay = (each.contiguous() for each in tokens)
    state = state.contiguous()
    num_rows, num_heads, width, value_dim = values.shape
    key_dim, heads = keys.shape[3], num_rows * num_heads
    if is_block and width > CHUNK:
        raise ValueError(f"a block of drafts has at most {CHUNK} tokens, not {width}")
    # Of two sizes alone, so that few kernels are compiled.
    size = FEW_TOKENS if is_block and width <= FEW_TOKENS else CHUNK
    num_chunks = triton.cdiv(width, size)
    half_key = max(FEW_TOKENS, triton.next_power_of_2(key_dim) // 2)
    channels = BLOCK_CHANNELS if is_block else PROMPT_CHANNELS
    block_value = max(FEW_TOKENS, min(channels, triton.next_power_of_2(value_dim)))
    inverse, mixing = values.new_empty(2, heads, num_chunks, size, size)
    decayed, outputs = torch.empty_like(beta), torch.empty_like(values)
    updates = torch.empty_like(values) if is_block else outputs
    after = state if is_block else torch.empty_like(state)
    if heads and width:
        _delta_systems_kernel[(num_chunks, heads)](
            queries, keys, beta, log_decay, inverse, mixing, decayed, width,
            KEY_DIM=key_dim, PIECE=FEW_TOKENS, SIZE=size, PRECISION=PRECISION, num_warps=4, num_stages=1,
        )  # fmt: skip
        _delta_scan_kernel[(triton.cdiv(value_dim, block_value), heads)](
            queries, keys, values, state, inverse, mixing, decayed, outputs, updates, after, width,
            KEY_DIM=key_dim, VALUE_DIM=value_dim, HALF_KEY=half_key, BLOCK_VALUE=block_value, SIZE=size,
            IS_BLOCK=is_block, PRECISION=PRECISION, num_warps=4, num_stages=1,
        )  # fmt: skip
    return DeltaBlock(outputs, updates, decayed), after
