"""A launch of each kernel of a decoder layer and of the drafter's context, in the shapes of Qwen3-8B, and of each of
the mixture of experts and of the gated delta net, in those of Qwen3-30B-A3B and Qwen3-Next-80B-A3B, for
`compile_only`."""

from __future__ import annotations

import numpy as np
import torch

from dflash_kernels.activation import gelu_mul, silu_mul
from dflash_kernels.attention_schedule import PagedBatch
from dflash_kernels.context_write import context_write
from dflash_kernels.conv_heads import DeltaHeads, conv_heads
from dflash_kernels.delta_chunks import chunked, delta_block
from dflash_kernels.delta_rule import DeltaInputs
from dflash_kernels.grouped_conv import grouped_conv
from dflash_kernels.invariant_attention import invariant_attention, plan_pieces, with_tiles
from dflash_kernels.invariant_linear import invariant_linear
from dflash_kernels.markov_step import markov_step
from dflash_kernels.moe import TILES as MOE_TILES
from dflash_kernels.moe import experts_mlp
from dflash_kernels.moe_routing import FEW_ENTRIES, group, route
from dflash_kernels.paged_attention import paged_attention, prepare_launches
from dflash_kernels.paged_attention_launch import HOPPER, HeadShape, plan_launches
from dflash_kernels.qk_norm_rope_write import qk_norm_rope_write
from dflash_kernels.rms_norm import add_rms_norm, rms_norm
from dflash_kernels.selector_walk import selector_walk
from dflash_kernels.shared_prefix import merge_parts
from tests.kernels.expert_launches import launch_quantised_experts

HIDDEN, INNER, HEADS, KV_HEADS, HEAD_DIM, DRAFT_LAYERS = 4096, 12288, 32, 8, 128, 5
HEAD_SHAPE = HeadShape(HEADS, KV_HEADS, HEAD_DIM, 2)
# Of Gemma 4 31B: its layers with a window, and those that see everything.
LARGE_HEADS = (HeadShape(32, 16, 256, 2), HeadShape(32, 4, 512, 2))
NUM_SLOTS, BLOCK_SIZE, VOCAB = 64, 16, 151936
MOE_HIDDEN, MOE_INNER, NUM_EXPERTS, PER_TOKEN = 2048, 768, 128, 8


def launches() -> None:
    """A decode row of 16 tokens; attention of one row, of many draft blocks, and of a mixed step."""
    x, weight = zeros(16, HIDDEN), zeros(HIDDEN)
    rms_norm(x, weight, 1e-6)
    add_rms_norm(x, x, weight, 1e-6)
    silu_mul(zeros(16, 2 * INNER))
    gelu_mul(zeros(16, 2 * INNER))

    table, numbers = zeros(NUM_SLOTS, HEAD_DIM), torch.zeros(16, dtype=torch.int64)
    qkv, cache = zeros(16, (HEADS + 2 * KV_HEADS) * HEAD_DIM), zeros(NUM_SLOTS, 2, KV_HEADS, HEAD_DIM)
    for norm in (None, zeros(HEADS + KV_HEADS, HEAD_DIM)):
        qk_norm_rope_write(qkv, norm, 1e-6, table, table, numbers, numbers, cache)
        codes, scales = fp8(cache)
        qk_norm_rope_write(qkv, norm, 1e-6, table, table, numbers, numbers, codes, scales=scales)
    projected, caches = zeros(16, DRAFT_LAYERS * 2 * KV_HEADS * HEAD_DIM), torch.stack([cache] * DRAFT_LAYERS)
    for norm in (None, zeros(DRAFT_LAYERS, KV_HEADS, HEAD_DIM)):
        context_write(projected, norm, 1e-6, table, table, numbers, numbers, caches)

    convolve_and_walk()
    step_from_token_to_token()
    attend([16], causal=True)
    attend([16] * 128, causal=False)
    attend([2048, 16, 0], causal=True)
    attend([8192], causal=True)
    for shape in LARGE_HEADS:
        attend([2048, 16, 0], causal=True, shape=shape)
    share_a_prefix()
    route_to_experts()
    launch_quantised_experts()
    keep_a_state()
    in_any_batch([16], 32768)
    in_any_batch([300, 16, 0], 2000)


def in_any_batch(query_lens: list[int], context: int) -> None:
    """A product and one layer's attention with `batch_invariant`."""
    for outputs, bias in ((HIDDEN, None), (VOCAB, zeros(VOCAB))):
        invariant_linear(zeros(sum(query_lens), HIDDEN), zeros(outputs, HIDDEN), bias)
    num_rows = len(query_lens)
    launches, table = plan_pieces(
        np.array(query_lens), np.full(num_rows, context), HeadShape(HEADS, KV_HEADS, HEAD_DIM, 2)
    )
    numbers = (torch.zeros(num_rows, dtype=torch.int32) for _ in range(3))
    rows = PagedBatch(*numbers, torch.zeros(num_rows, 4, dtype=torch.int32))
    query, cache = zeros(sum(query_lens), HEADS, HEAD_DIM), zeros(4, BLOCK_SIZE, 2, KV_HEADS, HEAD_DIM)
    tiled = with_tiles(launches, None if table is None else torch.from_numpy(table))
    for sinks in (None, zeros(HEADS)):
        for kv, scales in ((cache, None), fp8(cache)):
            invariant_attention(query, kv, rows, tiled, causal=True, window=None, sinks=sinks, scales=scales)


def convolve_and_walk(rank: int = 256, num_candidates: int = 16) -> None:
    """Along one block of 8 queries, of whose drafts one after the other is chosen."""
    kernels, block_index = zeros(8, 2, 2, HIDDEN // 16), torch.arange(8)
    grouped_conv(zeros(8, HIDDEN), zeros(2, HIDDEN), kernels[:, 1], block_index)
    scores, table = torch.zeros(7, num_candidates), zeros(64, rank)
    ends, temperature = torch.tensor([0, 7]), torch.ones(7)
    for divisor in (None, temperature):
        selector_walk(scores, scores.long(), zeros(7, rank), table, table, ends[:1], ends, divisor)


def step_from_token_to_token(num_rows: int = 8, rank: int = 256) -> None:
    """A step of a gated head, and one of a recurrent head."""
    previous, table = torch.zeros(num_rows, dtype=torch.int64), zeros(64, rank)
    markov_step(previous, table, zeros(num_rows, rank), zeros(rank, rank))
    state = torch.zeros(num_rows, rank)
    markov_step(previous, table, zeros(num_rows, 3 * rank), zeros(3 * rank, 2 * rank), state)


def attend(query_lens: list[int], causal: bool, shape: HeadShape = HEAD_SHAPE) -> None:
    """One layer's attention over contexts of up to 32k, without sinks and with them."""
    num_rows = len(query_lens)
    planned = plan_launches(np.array(query_lens), np.full(num_rows, 32768), shape, causal, None, HOPPER)
    tiled = [(launch, None if launch.tiles is None else torch.from_numpy(launch.tiles)) for launch in planned]
    numbers = (torch.zeros(num_rows, dtype=torch.int32) for _ in range(3))
    rows = PagedBatch(*numbers, torch.zeros(num_rows, 4, dtype=torch.int32))
    query = zeros(sum(query_lens), shape.num_heads, shape.head_dim)
    cache = zeros(4, BLOCK_SIZE, 2, shape.num_kv_heads, shape.head_dim)
    prepared = prepare_launches(tiled, rows, shape.group, BLOCK_SIZE, causal, None)
    for sinks in (None, zeros(shape.num_heads)):
        for kv, scales in ((cache, None), fp8(cache)):
            paged_attention(query, kv, rows, prepared, causal, None, sinks=sinks, scales=scales)


def share_a_prefix(num_tokens: int = 128) -> None:
    """Both parts of attention, with their logarithms and in float32, and their merge."""
    num_rows, heads = 4, HEAD_SHAPE
    numbers = (torch.zeros(num_rows, dtype=torch.int32) for _ in range(3))
    rows = PagedBatch(*numbers, torch.zeros(num_rows, 4, dtype=torch.int32))
    query = zeros(num_tokens, heads.num_heads, heads.head_dim)
    cache = zeros(4, BLOCK_SIZE, 2, heads.num_kv_heads, heads.head_dim)
    parts = []
    for queries, causal in ((16, True), (num_tokens, False)):
        bounds = np.full(num_rows, queries), np.full(num_rows, 32768)
        planned = plan_launches(*bounds, heads, causal, None, HOPPER, max_overestimate=32768)
        prepared = prepare_launches([(each, None) for each in planned], rows, heads.group, BLOCK_SIZE, causal, None)
        out = torch.zeros(num_tokens, heads.num_heads * heads.head_dim)
        lse = torch.zeros(num_tokens, heads.num_heads)
        paged_attention(query, cache, rows, prepared, causal, None, out, out_lse=lse)
        parts += [out, lse]
    for sinks in (None, zeros(heads.num_heads)):
        merge_parts(*parts, zeros(num_tokens, heads.num_heads * heads.head_dim), sinks)


def route_to_experts() -> None:
    """Every tile; routing and grouping for few tokens and for many."""
    # Nothing is read: the weights of all experts are those of one.
    gate_up = zeros(1, 2 * MOE_INNER, MOE_HIDDEN).expand(NUM_EXPERTS, -1, -1)
    down = zeros(1, MOE_HIDDEN, MOE_INNER).expand(NUM_EXPERTS, -1, -1)
    weights, experts = route(zeros(4, NUM_EXPERTS), PER_TOKEN, True)
    biases = zeros(NUM_EXPERTS, 2 * MOE_INNER), zeros(NUM_EXPERTS, MOE_HIDDEN)
    for tile in MOE_TILES:
        experts_mlp(zeros(4, MOE_HIDDEN), gate_up, down, weights, experts, tile=tile)
        experts_mlp(zeros(4, MOE_HIDDEN), gate_up, down, weights, experts, biases, (1.702, 7.0), tile)
    group(torch.zeros(FEW_ENTRIES + 1, 1, dtype=torch.int32), NUM_EXPERTS, MOE_TILES[-1].rows)


def keep_a_state() -> None:
    """A block of drafts that has few tokens, one that has more, and a chunk of a prompt."""
    heads = DeltaHeads(16, 32, 128, 128)
    channels = 2 * heads.num_key_heads * heads.key_dim + heads.num_value_heads * heads.value_dim
    for run, num_rows, width in ((delta_block, 4, 16), (delta_block, 1, 40), (chunked, 1, 256)):
        tokens = conv_heads(zeros(num_rows, 3 + width, channels), zeros(channels, 4), heads)
        rates = torch.zeros(2, num_rows, heads.num_value_heads, width)
        state = torch.zeros(num_rows, heads.num_value_heads, heads.key_dim, heads.value_dim)
        run(DeltaInputs(*tokens, *rates), state)


def fp8(cache: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """A cache of this shape in FP8, and its scales."""
    return torch.zeros(cache.shape, dtype=torch.uint8), torch.zeros(cache.shape[:-1])


def zeros(*shape: int) -> torch.Tensor:
    return torch.zeros(shape, dtype=torch.bfloat16)
