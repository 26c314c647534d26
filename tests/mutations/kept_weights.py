"""Defects of weights that stay quantised. The model runs, and its text is worse or no text at all."""

from __future__ import annotations

from tests.mutations.mutant import mutants_of

KERNELS = "tests/kernels/test_quantised_linear.py"
MODELS = "tests/models/test_kept_weights.py"
FP8 = (f"{KERNELS}::test_fp8_products_equal_the_reference_however_codes_are_read",)
INT4 = (f"{KERNELS}::test_int4_products_equal_the_reference",)
FORMATS = (f"{MODELS}::test_projections_keep_their_codes_and_give_the_logits_of_their_numbers",)
DEQUANTISED = (f"{MODELS}::test_what_no_product_is_there_for_is_dequantised",)
ORDERS = (f"{MODELS}::test_projections_of_several_orders_are_dequantised_where_they_are_one_product",)
OF_ROWS = (f"{MODELS}::test_rows_of_a_weight_with_columns_in_an_order_keep_it",)
NUMBERS = (f"{KERNELS}::test_the_numbers_of_some_rows_are_those_of_the_reference_to_the_bit",)
SLICES = (f"{KERNELS}::test_products_by_slices_of_numbers_equal_the_reference",)
THRESHOLD = (f"{KERNELS}::test_a_weight_becomes_numbers_from_its_number_of_tokens_on_and_not_with_one_less",)
TAKEN = (f"{KERNELS}::test_rows_that_are_taken_have_their_scales",)
STACKED = (f"{KERNELS}::test_parts_below_one_another_keep_their_numbers",)

KEPT_WEIGHTS_MUTANTS = (
    *mutants_of(
        "kernels/dflash_kernels/quantised_linear.py",
        FP8,
        (
            "scales of kept blocks are transposed",
            "of_block += run * RUN // COLUMNS * scale_stride",
            "of_block += (row // ROWS) * (scale_stride - 1) + run * RUN // COLUMNS",
        ),
        ("a kept block of rows begins one late", "of_block = row // ROWS", "of_block = tl.maximum(row - 1, 0) // ROWS"),
        (
            "a kept block of columns begins one run late",
            "of_block += run * RUN // COLUMNS * scale_stride",
            "of_block += tl.maximum(run - 1, 0) * RUN // COLUMNS * scale_stride",
        ),
        ("codes of bfloat16 keep a second sign", "& -0x7810", "& -0x10"),
        ("codes of float16 keep a second sign", "& -0x4001", "& -0x1"),
        ("bfloat16's other bias is not made up for", "2.0**120", "2.0**119"),
        (
            "one scale for all columns is left out",
            ("if COLUMNS == 0:\n        result = result * scales_at"),
            ("if COLUMNS < 0:\n        result = result * scales_at"),
        ),
        (
            "columns past the last are multiplied",
            ("x_mask = is_token[None, :]\n        if not EVEN:"),
            ("x_mask = is_token[None, :]\n        if EVEN:"),
        ),
        ("each part begins with the first columns", "first = part * runs_per_part", "first = part * 0"),
        ("the sum of parts leaves out the last", "for _ in range(num_parts):", "for _ in range(num_parts - 1):"),
        (
            "each part has its bias",
            "None if splits > 1 else bias",
            "bias",
        ),
    ),
    *mutants_of(
        "kernels/dflash_kernels/quantised_linear.py",
        INT4,
        (
            "zero points of kept weights are left out",
            "number_of_int4(tl.load(zeros_ptr + offsets, mask=mask, other=0), dtype, WIDEN)",
            "number_of_int4(tl.full(offsets.shape, _MIDDLE_OF_INT4, tl.uint8), dtype, WIDEN)",
        ),
        (
            "the halves of a packed byte change places",
            (
                "numbers = numbers_of_packed(packed & 0x0F, zeros, dtype, INTEGERS, WIDEN)\n"
                "    sums = tl.dot(numbers, first"
            ),
            (
                "numbers = numbers_of_packed(packed >> 4, zeros, dtype, INTEGERS, WIDEN)\n"
                "    sums = tl.dot(numbers, first"
            ),
        ),
        (
            "packed codes are read as bytes",
            "numbers_of_packed(packed & 0x0F, zeros, dtype, INTEGERS, WIDEN)\n    sums",
            "numbers_of_packed(packed, zeros, dtype, INTEGERS, WIDEN)\n    sums",
        ),
        ("the second half of a run is the first", "tl.load(half_ptrs + RUN // 2,", "tl.load(half_ptrs,"),
        (
            "a row of packed codes is its neighbour's",
            "(tl.cast(run, tl.int64) * outputs + row)",
            "(tl.cast(run, tl.int64) * outputs + row + 1)",
        ),
    ),
    *mutants_of(
        "kernels/dflash_kernels/quantised_linear.py",
        NUMBERS,
        ("each slice has the numbers of the first rows", "first_row + place", "place"),
        (
            "the second half of a run is written over the first",
            "tl.store(out_ptrs + RUN // 2,",
            "tl.store(out_ptrs,",
        ),
        (
            "numbers past the last column are written into the next row",
            "mask = mask & (run * RUN + column < inputs)[None, :]",
            "mask = mask & (run * RUN < inputs)",
        ),
    ),
    *mutants_of(
        "kernels/dflash_kernels/quantised_linear.py",
        (f"{KERNELS}::test_weights_that_cannot_become_numbers_stay_codes_and_the_log_says_so",),
        ("weights that cannot become numbers are asked to", "_always_codes.add(weight.kind)", "pass"),
        (
            "no kind becomes numbers once one could not",
            "return is_many and weight.kind not in _always_codes",
            "return is_many and not _always_codes",
        ),
    ),
    *mutants_of(
        "kernels/dflash_kernels/quantised_linear.py",
        SLICES,
        ("a slice's product is added to the first outputs", "slice(first, first + len(numbers))", "slice(0, size)"),
    ),
    *mutants_of(
        "kernels/dflash_kernels/quantised_linear.py",
        (f"{KERNELS}::test_a_slice_has_whole_blocks_of_rows_and_no_more_bytes_than_it_may",),
        ("slices are a block larger than they may be", "(num_slices * SLICE_ROWS)) * SLICE_ROWS", "num_slices) + 128"),
    ),
    *mutants_of(
        "dflash_backend/worker/memory.py",
        ("tests/worker/test_memory.py::test_graphs_get_what_the_largest_captured_step_takes_beside_the_runners_state",),
        (
            "numbers of weights in graphs with prompts are not counted",
            "    if captures:\n        run(",
            "    if False:\n        run(",
        ),
    ),
    *mutants_of(
        "kernels/dflash_kernels/quantised_linear.py",
        THRESHOLD,
        (
            "a weight becomes numbers one token too late",
            "num_tokens >= LEAST_DEQUANTISED",
            "num_tokens > LEAST_DEQUANTISED",
        ),
        (
            "a weight becomes numbers one token too early",
            "num_tokens >= LEAST_DEQUANTISED[weight.kind]",
            "num_tokens >= LEAST_DEQUANTISED[weight.kind] - 1",
        ),
        ("float32 is multiplied by rounded numbers", "dtype.itemsize == 2 and num_tokens", "num_tokens"),
        ("scales of tokens are lost to numbers", "if x_scales is None and is_dequantised(", "if is_dequantised("),
    ),
    *mutants_of(
        "kernels/dflash_kernels/quantised_linear.py",
        (f"{KERNELS}::test_each_tile_splits_columns_for_as_many_programs_as_were_best_for_it",),
        ("all tiles split columns for the same programs", "wanted = tile.programs //", "wanted = 256 //"),
    ),
    *mutants_of(
        "kernels/dflash_kernels/quantised_linear.py",
        (f"{KERNELS}::test_a_row_has_the_same_bits_among_any_rows_where_that_is_asked_for",),
        (
            "batch-invariant products split columns by the number of rows",
            "WIDE_TILE if x.itemsize > 2 else INVARIANT_TILE, 1, x_scales",
            "INVARIANT_TILE, num_splits(len(x), weight, TILES[2]), x_scales",
        ),
    ),
    *mutants_of(
        "kernels/dflash_kernels/quantised_linear.py",
        (f"{KERNELS}::test_a_product_that_compiles_runs_every_tile_and_gives_its_own_result",),
        (
            "the start compiles products of one part alone",
            "for splits in {1, num_splits(1, weight, tile)}:",
            "for splits in {1}:",
        ),
        (
            "the start compiles no numbers",
            "if x_scales is None and x.itemsize == 2 and weight.kind",
            "if x_scales is None and x.itemsize == 1 and weight.kind",
        ),
    ),
    *mutants_of(
        "kernels/dflash_kernels/quantised_weight.py",
        FORMATS,
        ("kept nibbles are packed in the other order", "(low | (high << 4))", "(high | (low << 4))"),
        (
            "zero points are dropped where one is in the middle",
            "bool((zeros == MIDDLE[kind]).all())",
            "bool((zeros == MIDDLE[kind]).any())",
        ),
        (
            "kept scales are not transposed",
            "scales.T.contiguous(), beside",
            "scales.reshape(scales.shape[::-1]), beside",
        ),
        ("kept zero points are not transposed", "else zeros.T.contiguous()", "else zeros.reshape(zeros.shape[::-1])"),
    ),
    *mutants_of(
        "kernels/dflash_kernels/quantised_weight.py",
        TAKEN,
        ("rows within a block have the scales of whole ones", "first % self.rows == 0", "True"),
        ("rows that are taken have the first scales", "slice(first // whole.rows,", "slice(0,"),
    ),
    *mutants_of(
        "kernels/dflash_kernels/quantised_weight.py",
        STACKED,
        (
            "blocks that are cut are stacked as whole ones",
            "any(part.shape[0] % part.rows for part in parts[:-1])",
            "False",
        ),
        (
            "parts without zero points have 0",
            "torch.full_like(weight.scales, MIDDLE[weight.kind],",
            "torch.full_like(weight.scales, 0,",
        ),
    ),
    *mutants_of(
        "dflash_backend/checkpoints/quantization/keepable.py",
        DEQUANTISED,
        ("groups that no run divides are kept", "columns & -columns >= MIN_RUN", "columns & -columns > 0"),
    ),
    *mutants_of(
        "dflash_backend/checkpoints/quantization/kept.py",
        FORMATS,
        (
            "signed integers are kept as if unsigned",
            "codes, zeros = codes.int() + SIGNED,",
            "codes, zeros = codes.int(),",
        ),
    ),
    *mutants_of(
        "kernels/dflash_kernels/quantised_linear.py",
        (f"{KERNELS}::test_int8_products_equal_the_reference",),
        (
            "zero points of kept bytes are left out",
            "codes.to(tl.int16) - zeros.to(tl.int16)[:, None]",
            "codes.to(tl.int16)",
        ),
    ),
    *mutants_of(
        "dflash_backend/checkpoints/quantization/kept.py",
        FORMATS,
        (
            "columns in another order are kept as if in order",
            "order = order_of(moved[Role.ORDER]) if Role.ORDER in moved else None",
            "order = None",
        ),
        (
            "columns are put where they come from",
            "order = groups.long().argsort(stable=True)",
            "order = groups.long().argsort(stable=True).argsort()",
        ),
    ),
    *mutants_of(
        "dflash_backend/checkpoints/quantization/kept.py",
        ORDERS,
        (
            "columns of one product are all in the order of the first",
            "torch.equal(first, other) for other",
            "True for other",
        ),
        ("groups of unlike sizes are kept", "(counts == columns).all()", "(counts >= 0).all()"),
    ),
    *mutants_of(
        "dflash_backend/checkpoints/quantization/kept.py",
        ("tests/checkpoints/test_quantised_refusals.py::test_groups_of_a_damaged_file_are_not_counted",),
        ("groups of a damaged file are counted", "or int(groups.max()) >= num_groups", "or False"),
    ),
    *mutants_of(
        "dflash_backend/models/linear.py",
        FORMATS,
        (
            "activations of desc_act stay in their order",
            "x if self.order is None else x.index_select",
            "x if True else x.index_select",
        ),
        (
            "numbers of desc_act have their columns in the order of codes",
            "numbers[:, self.order.argsort()]",
            "numbers[:, self.order]",
        ),
    ),
    *mutants_of(
        "dflash_backend/models/linear.py",
        OF_ROWS,
        ("rows of desc_act lose their order", "self.dtype, self.product, self.order)", "self.dtype, self.product)"),
        (
            "stacked desc_act loses its order",
            "isinstance(part, QuantisedLinear) and part.order is None]",
            "isinstance(part, QuantisedLinear)]",
        ),
    ),
    *mutants_of(
        "dflash_backend/checkpoints/quantization/kept.py",
        (
            f"{MODELS}::test_codes_that_are_no_numbers_are_refused",
            f"{MODELS}::test_weights_that_are_not_finite_are_refused",
        ),
        ("codes that are no numbers are kept", "if has_nan or not", "if not"),
        (
            "scales that are not finite are kept",
            "(scales.float() * LARGEST).isfinite().all()",
            "(scales.float() > -1).any()",
        ),
    ),
    *mutants_of(
        "dflash_backend/models/linear.py",
        (f"{MODELS}::test_a_drafter_keeps_its_codes_and_those_of_its_context_kv",),
        ("context KV of a kept drafter is dequantised", "len(kept) == len(parts) and", "not kept and"),
    ),
    *mutants_of(
        "dflash_backend/checkpoints/quantization/at_load.py",
        ("tests/checkpoints/test_quantised_loading.py::test_sizes_know_what_stays_quantised",),
        ("embeddings count as FP8", "or projection.endswith(EMBEDDING)", ""),
    ),
    *mutants_of(
        "dflash_backend/engine/sizing.py",
        ("tests/checkpoints/test_quantised_loading.py::test_sizes_know_what_stays_quantised",),
        ("sizes take kept weights for numbers", "total += kept - numbers * dtype.itemsize", "total += 0"),
    ),
)
