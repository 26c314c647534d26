"""Defects of reading KV that rows share once for all of them."""

from __future__ import annotations

from tests.mutations.mutant import mutants_of

CORE = ("tests/core/test_shared_prefixes.py",)
KERNEL = ("tests/kernels/test_shared_prefix.py",)
ENGINE = ("tests/worker/test_shared_prefixes.py",)

SHARED_PREFIX_MUTANTS = (
    *mutants_of(
        "dflash_backend/core/kv/manager.py",
        CORE,
        (
            "positions that are not computed are shared",
            "most = min(request.num_computed // block_size for request in requests)",
            "most = min(len(request.block_ids) for request in requests)",
        ),
        (
            "the prefix of two rows is taken for that of all",
            "for request in requests[1:]:",
            "for request in requests[1:2]:",
        ),
        (
            "one block in common is taken for all before it",
            "if first[:most] != blocks[:most]:",
            "if first[most - 1 : most] != blocks[most - 1 : most]:",
        ),
        (
            "rows that share are no neighbours",
            "return ordered + [row for row in rows if row.request_id not in names], prefixes",
            "return rows, prefixes",
        ),
        (
            "what is saved need not pay",
            "return saved > 2 * num_queries * config.positions_per_shared_query",
            "return saved > 0",
        ),
    ),
    *mutants_of(
        "dflash_backend/core/scheduler.py",
        CORE,
        (
            "rows share beside chunks of prompts",
            "if self._config.min_shared_positions and not builder.num_prefill_tokens:",
            "if self._config.min_shared_positions:",
        ),
    ),
    *mutants_of(
        "kernels/dflash_kernels/shared_prefix.py",
        KERNEL,
        (
            "a row's own part begins at the prefix",
            "(skipped // block_size).long()[:, None]",
            "(0 * skipped).long()[:, None]",
        ),
        (
            "a group has the queries of its first row",
            "last = (shared.leader + shared.num_rows - 1).clamp(min=0)",
            "last = shared.leader",
        ),
        (
            "places for groups that are not there count",
            "lens = (end - start) * (shared.num_rows > 0)",
            "lens = end - start",
        ),
        (
            "both parts weigh the same",
            "out = own * (own_weight / total)[:, None] + prefix * (prefix_weight / total)[:, None]",
            "out = own * 0.5 + prefix * 0.5",
        ),
        (
            "the sink is left out of the merge",
            "        total += tl.exp2(sink - finite_top)\n",
            "        total += 0.0\n",
        ),
    ),
    *mutants_of(
        "kernels/dflash_kernels/attention_merge.py",
        KERNEL,
        (
            "a merged tile leaves no logarithm",
            "    store_lse(top, total, token, head, is_query, out_lse_ptr, KV_HEADS * GROUP)\n",
            "",
        ),
    ),
    *mutants_of(
        "dflash_backend/attention/triton_backend.py",
        ENGINE,
        (
            "layers with a window share",
            "layout.shared is not None and pattern.causal and pattern.sliding_window is None",
            "layout.shared is not None and pattern.causal",
        ),
    ),
    *mutants_of(
        "dflash_backend/engine/build.py",
        ENGINE,
        ("rows share with batch_invariant", " and not config.batch_invariant", ""),
        ("the setting share_prefix_attention does nothing", "config.share_prefix_attention and ", ""),
    ),
)
