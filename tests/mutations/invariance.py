"""Defects by which a request's logits follow the batch again, under `batch_invariant`."""

from __future__ import annotations

from tests.mutations.mutant import Mutant, mutants_of

PRODUCTS = "kernels/dflash_kernels/invariant_linear.py"
ATTENTION = "dflash_backend/attention/invariant_torch.py"
OF_PRODUCTS = ("tests/kernels/test_invariant_linear.py",)
OF_KERNELS = ("tests/kernels/test_invariant_kernels.py",)
PIECES = "kernels/dflash_kernels/invariant_attention.py"
OF_ATTENTION = ("tests/attention/test_invariant_torch.py",)

INVARIANCE_MUTANTS = (
    *mutants_of(
        PRODUCTS,
        OF_PRODUCTS,
        (
            "the height of a product follows the number of rows",
            "split_rows(len(rows), equal_heights(weight, bias, multiply))",
            "[len(rows)]",
        ),
        (
            "heights are taken whose rows have other bits",
            "if bool((products[height] == base).all())",
            "if products[height].isfinite().all()",
        ),
        (
            "the order of sums of 16 bits is looked for in any numbers",
            "if weight.dtype.itemsize < 4 and multiply is None:",
            "if weight.dtype.itemsize < 2:",
        ),
        (
            "a bias hides the order of sums of 16 bits",
            "None if bias is None else torch.zeros_like(bias)",
            "bias",
        ),
        ("a product begins where its rows happen to lie", "part.data_ptr() % ALIGNMENT", "part.data_ptr() < 0"),
    ),
    Mutant(
        "tiles of keys begin where a window does",
        ATTENTION,
        "pattern.sliding_window + 1, 0) // TILE_KEYS * TILE_KEYS",
        "pattern.sliding_window + 1, 0) // self.unit * self.unit",
        OF_ATTENTION,
    ),
    Mutant(
        "a tile of queries is as high as rows have queries",
        ATTENTION,
        "max(1, TILE_LINES // group))",
        "min(max(1, TILE_LINES // group), int(metadata.layout.query_lens.max())))",
        OF_ATTENTION,
        more=((ATTENTION, "(0, 0, 0, -num_lines % TILE_LINES)", "(0, 0, 0, 0)"),),
    ),
    Mutant(
        "the order of a product's sums follows the number of rows",
        PRODUCTS,
        "BLOCK_K=tile.k_bytes // x.itemsize,",
        "BLOCK_K=tile.k_bytes // x.itemsize // (1 if len(rows) > 16 else 2),",
        OF_KERNELS,
    ),
    *mutants_of(
        PIECES,
        OF_KERNELS,
        ("contexts are split by load", '"PIECE": PIECE,', '"PIECE": PIECE * launch.num_tiles,'),
        (
            "a row that is longer than its bound has more pieces",
            "tl.minimum(table_len, num_pieces * PIECE)",
            "table_len",
        ),
        ("blocks of keys begin where a window does", "    begin = begin // BLOCK_N * BLOCK_N\n", ""),
        (
            "the tiling of a launch follows its rows",
            "tiling, longest = pieces_tiling(shape, gpu), int(query_lens.max(initial=0))",
            "longest = int(query_lens.max(initial=0))\n    tiling = tiling_of(shape, longest, gpu)",
        ),
    ),
    Mutant(
        "the tile of experts follows the number of tokens",
        "kernels/dflash_kernels/moe.py",
        "partial(experts_mlp, tile=INVARIANT_TILE)",
        "experts_mlp",
        OF_KERNELS,
    ),
    Mutant(
        "SiLU computes the end of a thread's share in another way",
        "kernels/dflash_kernels/activation.py",
        "(wide / (1.0 + torch.exp(-wide)))",
        "F.silu(wide)",
        OF_PRODUCTS,
    ),
    Mutant(
        "a long prompt has more threads within operations than a short one",
        "dflash_backend/worker/batch_parallel.py",
        "(is_long and not self._batch_invariant)",
        "is_long",
        ("tests/worker/test_batch_parallel.py",),
    ),
    Mutant(
        "which of equally likely tokens are reported follows what neighbours ask for",
        "kernels/dflash_kernels/logprobs.py",
        "(ordered * 2**32 - columns).topk(count, dim=1)",
        "scores.topk(count, dim=1)",
        ("tests/kernels/test_logprobs.py",),
    ),
    Mutant(
        "the target keeps the attention of a server without the setting",
        "dflash_backend/engine/build.py",
        "backend.batch_invariant() if config.batch_invariant else backend",
        "backend",
        ("tests/invariants/test_batch_invariance.py",),
    ),
    Mutant(
        "the head multiplies by the number of rows",
        "dflash_backend/models/decoder.py",
        "self._head = weights.lm_head.with_product(self.ops.product_of)",
        "self._head = weights.lm_head",
        ("tests/invariants/test_batch_invariance.py",),
    ),
)
