"""Defects of attention for prompts: which positions are attended without masks, and in which order tiles begin."""

from __future__ import annotations

from tests.mutations.mutant import mutants_of

ATTENTION = "tests/kernels/test_paged_attention.py"
FULL = (
    f"{ATTENTION}::test_blocks_that_all_queries_see_need_no_masks",
    f"{ATTENTION}::test_loops_without_masks_for_any_heads_and_kv",
)
PACKAGES = ("tests/attention/test_long_rows.py",)
LAUNCH = ("tests/kernels/test_attention_launch.py",)

PREFILL_MUTANTS = (
    *mutants_of(
        "kernels/dflash_kernels/attention_tile.py",
        FULL,
        (
            "the first query of a tile sees the next one's position",
            "full_end = tl.minimum(full_end, first_position + 1)",
            "full_end = tl.minimum(full_end, first_position + 2)",
        ),
        (
            "the last query of a tile sees what its window has left",
            "full_begin = tl.maximum(begin, last_position - WINDOW + 1)",
            "full_begin = tl.maximum(begin, first_position - WINDOW + 1)",
        ),
        (
            "a block that ends past the keys is taken for full",
            "tl.maximum(full_end - full_begin, 0) // BLOCK_N * BLOCK_N",
            "tl.cdiv(tl.maximum(full_end - full_begin, 0), BLOCK_N) * BLOCK_N",
        ),
        (
            "values of FP8 are read by the scales of keys in full blocks",
            "place = (slot + value_stride) // HEAD_DIM + kv_head",
            "place = slot // HEAD_DIM + kv_head",
        ),
        (
            "what masked blocks gave is not shrunk",
            ("shrink = tl.exp2(top - new_top)\n    return weights"),
            ("shrink = tl.full(top.shape, 1.0, tl.float32)\n    return weights"),
        ),
        (
            "the last product of an overlapped loop is lost",
            ('    if LOOP == "overlapped":\n        v = _full_block('),
            ('    if LOOP == "lost":\n        v = _full_block('),
        ),
    ),
    *mutants_of(
        "kernels/dflash_kernels/attention_tile.py",
        (ATTENTION,),
        (
            "a row writes where the next one's tokens lie",
            "is_query = query < tl.minimum(last, query_len)",
            "is_query = query < last",
        ),
    ),
    *mutants_of(
        "kernels/dflash_kernels/paged_attention.py",
        LAUNCH,
        (
            "the shortest tiles of equal rows begin first",
            "tiles_per_row + tiles_per_row - 1 - number // num_rows",
            "tiles_per_row + number // num_rows",
        ),
    ),
    *mutants_of(
        "kernels/dflash_kernels/paged_attention_launch.py",
        LAUNCH,
        ("the shortest tiles begin first", "np.argsort(-(last +", "np.argsort((last +"),
        (
            "a table in another order has the strides of its transpose",
            "np.ascontiguousarray(table[:, order])",
            "table[:, order]",
        ),
        ("all GPUs hold two programs", "max(1, min(2, held))", "2"),
        ("products that nothing overlaps with are split up", "90 <= self.capability < 120", "True"),
    ),
    *mutants_of(
        "dflash_backend/attention/long_rows.py",
        PACKAGES,
        (
            "rows of a captured step go to a package",
            "seen = seq_lens - query_lens // 2 - np.where(known, 0, max_overestimate)",
            "seen = seq_lens - query_lens // 2",
        ),
        ("a package that gives NaN is used", "if not off <= TOLERANCE:", "if off > TOLERANCE:"),
        ("a package gets the block tables of other rows", "block_tables.index_select(0, which)", "block_tables"),
        ("FlashAttention-2 gets blocks of any size", "block_size % BLOCK_MULTIPLE == 0", "block_size"),
        ("a package reads KV in FP8", "needs.kv_dtype not in (None, needs.dtype)", "False"),
        ("a package that gathers gets rows of unknown lengths", "is_long &= known", "is_long &= True"),
        ("what lies past a row's end is gathered", ".clamp(max=last)", ".clamp(max=1 << 40)"),
        ("rows are gathered together without end", "].sum()) > longest", "].sum()) > 1 << 40"),
    ),
    *mutants_of(
        "dflash_backend/attention/triton_backend.py",
        PACKAGES,
        (
            "a package's output goes one token too far",
            "out.index_copy_(0, long.target,",
            "out.index_copy_(0, long.source,",
        ),
        (
            "a package attends layers with sinks",
            "if long is None or self.every_variant or not long.takes(self.pattern, shape.head_dim):",
            "if long is None or self.every_variant:",
        ),
        (
            "rows beside others are taken for the whole pass",
            "long.known and len(long.source) == len(query)",
            "long.known",
        ),
        ("a package that failed is asked again", "self.long_attention = None\n            return", "return"),
    ),
    *mutants_of(
        "dflash_backend/attention/cudnn_rows.py",
        ("tests/attention/test_cudnn_rows.py",),
        (
            "natural logarithms are taken for those of two",
            "return (lse.t() * LOG2_E).contiguous()",
            "return lse.t().contiguous()",
        ),
        ("merges of pieces are rounded", "torch.empty_like(out, dtype=torch.float32)", "torch.empty_like(out)"),
        ("what comes before a chunk is read from its own beginning on", "position += num_positions", "position += 0"),
        ("plans are made without end", "time.monotonic() - began > WARM_UP_S", "False"),
        ("a row is padded whatever that costs", "MOST_PAIRS * num_queries *", "1000 * num_queries *"),
    ),
    *mutants_of(
        "dflash_backend/worker/batch.py",
        ("tests/worker/test_step_ops.py::test_a_length_is_known_where_no_draft_may_be_rejected",),
        (
            "rows with drafts are taken for known",
            "exact=padded(unknown == 0, num_rows),",
            "exact=padded(unknown >= 0, num_rows),",
        ),
    ),
    *mutants_of(
        "dflash_backend/attention/selection.py",
        PACKAGES,
        ("a package is chosen with batch_invariant", "chosen if needs.batch_invariant else chosen", "chosen"),
    ),
)
