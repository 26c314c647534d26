"""Defects of activations in FP8. The model runs, and its text is worse, or follows from what runs beside it."""

from __future__ import annotations

from tests.mutations.mutant import mutants_of

KERNELS = "tests/kernels/test_scaled_linear.py"
CODES = (f"{KERNELS}::test_activations_have_the_codes_and_scales_of_the_reference",)
PRODUCTS = (f"{KERNELS}::test_our_kernel_and_the_reference_give_the_product_of_the_codes",)
BOTH = (f"{KERNELS}::test_torch_and_our_kernel_give_the_same_numbers",)
VIEWS = (f"{KERNELS}::test_rows_of_a_wider_tensor_and_of_a_transposed_one_are_those_of_a_copy",)
ENGINE = "tests/worker/test_fp8_activations.py"
CHOSEN = (f"{ENGINE}::test_each_weight_has_the_product_that_the_setting_asks_for",)

SCALED_PRODUCT_MUTANTS = (
    *mutants_of(
        "kernels/dflash_kernels/fp8_activations.py",
        CODES,
        ("scales of tokens lie token by token", "tl.cast(group, tl.int64) * scales_stride + token", "token"),
        ("a token is quantised by a negative number's sign", "tl.max(tl.abs(numbers), 0)", "tl.max(numbers, 0)"),
        (
            "a group's largest number is that of the next as well",
            "(own < columns) & (column < inputs)",
            "column < inputs",
        ),
        ("numbers of codes keep their scale", "decode_e4m3(codes).to(", "(decode_e4m3(codes) * scale).to("),
    ),
    *mutants_of(
        "kernels/dflash_kernels/quantised_linear.py",
        PRODUCTS,
        ("each group of a token has the first one's scale", "tl.cast(block, tl.int64) * num_rows + token", "token"),
        (
            "one scale of a token is left out",
            "result = with_scale_of_tokens(result, x_scales_ptr, 0, num_rows, token, is_token)",
            "result = result",
        ),
        (
            "scales of a token's groups are left out",
            "sums = with_scale_of_tokens(sums, x_scales_ptr, run * RUN // COLUMNS, num_rows, token, is_token)",
            "sums = sums",
        ),
        (
            "batch-invariant products leave out the scales of tokens",
            "INVARIANT_TILE, 1, x_scales=x_scales)",
            "INVARIANT_TILE, 1)",
        ),
    ),
    *mutants_of(
        "kernels/dflash_kernels/scaled_linear.py",
        PRODUCTS,
        (
            "weights in blocks have one scale for a token",
            "weight.columns if len(weight.scales) > 1 else weight.shape[1]",
            "weight.shape[1]",
        ),
    ),
    *mutants_of(
        "kernels/dflash_kernels/scaled_linear.py",
        BOTH,
        ("torch's product leaves out the bias", "bias=bias", "bias=None"),
        (
            "torch multiplies each row by the first one's scale",
            "return weight.with_scale_of_each_row().scales\n",
            "return weight.with_scale_of_each_row().scales[:, :1].repeat(1, weight.shape[0])\n",
        ),
    ),
    *mutants_of(
        "kernels/dflash_kernels/scaled_linear.py",
        (f"{KERNELS}::test_launches_of_many_tokens_are_torchs_and_others_ours",),
        ("torch multiplies decode rows", "len(rows) >= least_tokens(outputs)", "len(rows) >= 1"),
        ("torch multiplies nothing", "fits_torch(weight, dtype) and", "False and"),
    ),
    *mutants_of(
        "kernels/dflash_kernels/scaled_linear.py",
        (f"{KERNELS}::test_torch_multiplies_by_weights_of_many_rows_from_fewer_tokens_on",),
        ("weights of any size have the first one's least tokens", "if outputs >= rows)", "if outputs > 0)"),
        ("a weight of just so many rows is a smaller one", "if outputs >= rows)", "if outputs > rows or not rows)"),
        (
            "torch multiplies one token too late",
            "len(rows) >= least_tokens(outputs)",
            "len(rows) > least_tokens(outputs)",
        ),
    ),
    *mutants_of(
        "kernels/dflash_kernels/scaled_linear.py",
        (f"{KERNELS}::test_a_product_that_torch_has_not_is_ours",),
        ("a product of torch that is off is used", "if not error <= TOLERANCE", "if False"),
        ("sizes that torch refuses are torch's", "any(size % MULTIPLE", "any(size % 1"),
    ),
    *mutants_of(
        "kernels/dflash_kernels/scaled_linear.py",
        (f"{KERNELS}::test_scales_of_blocks_are_laid_out_as_torch_reads_them",),
        ("scales of blocks are not padded", "-(-beside // 4) * 4", "beside"),
    ),
    *mutants_of(
        "kernels/dflash_kernels/scaled_linear.py",
        (f"{KERNELS}::test_torchs_products_of_blocks_get_a_multiple_of_four_tokens",),
        ("torch's products of blocks get any number of tokens", "multiple=multiple", "multiple=1"),
    ),
    *mutants_of(
        "kernels/dflash_kernels/fp8_activations.py",
        (f"{KERNELS}::test_a_token_with_a_nan_has_no_other_product_and_leaves_those_of_others",),
        ("a NaN becomes a number", "tl.max((numbers != numbers).to(tl.int32), 0) > 0", "top < 0"),
    ),
    *mutants_of(
        "kernels/dflash_kernels/fp8_activations.py",
        VIEWS,
        (
            "rows of a wider tensor are read as if they lay together",
            "num_rows, x.stride(0), inputs",
            "num_rows, inputs, inputs",
        ),
    ),
    *mutants_of(
        "kernels/dflash_kernels/quantised_linear.py",
        VIEWS,
        (
            "numbers that lie apart are read as neighbours",
            "return rows if rows.stride(1) == 1 else rows.contiguous()",
            "return rows",
        ),
    ),
    *mutants_of(
        "kernels/dflash_kernels/scaled_linear.py",
        (f"{KERNELS}::test_each_gpu_has_the_products_that_torch_documents_for_it",),
        (
            "Blackwell is asked for Hopper's blocks",
            "capability[0] == BLOCKS_CAPABILITY_MAJOR",
            "capability[0] >= BLOCKS_CAPABILITY_MAJOR",
        ),
        ("Ampere is asked for e4m3", "capability >= LEAST_CAPABILITY", "capability[0] >= LEAST_CAPABILITY[0]"),
        (
            "torch's products of rows are asked for float16",
            "return has_form and dtype == torch.bfloat16",
            "return has_form",
        ),
    ),
    *mutants_of(
        "dflash_backend/engine/checks.py",
        (ENGINE,),
        (
            "ranks are said to have activations in FP8",
            "if not keeps or config.tensor_parallel_size > 1:",
            "if not keeps:",
        ),
        (
            "a checkpoint of which some weights are FP8 is refused",
            'config.quantization == "fp8" or any(',
            'config.quantization == "fp8" or all(',
        ),
    ),
    *mutants_of(
        "dflash_backend/models/ops.py",
        CHOSEN,
        (
            "batch-invariant targets keep activations in their dtype",
            "return scaled_linear.invariant_scaled_linear",
            "return quantised_linear.invariant_quantised_linear",
        ),
    ),
    *mutants_of(
        "dflash_backend/engine/checks.py",
        (f"{ENGINE}::test_where_no_product_is_of_fp8_it_is_refused_with_what_would_work",),
        ("activations of a target without FP8 weights are said to be FP8", "elif not has_fp8:", "elif False:"),
    ),
)
