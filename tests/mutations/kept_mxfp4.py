"""Defects of experts in MXFP4 that stay in their codes. The model runs, and its text is worse or no text at all."""

from __future__ import annotations

from tests.mutations.mutant import mutants_of

LINEAR = "tests/kernels/test_quantised_linear.py"
EQUAL = (f"{LINEAR}::test_mxfp4_products_equal_the_reference",)
EVERY_CODE = (f"{LINEAR}::test_every_code_of_mxfp4_under_every_scale_is_its_number_to_the_bit",)
BIASES = ("tests/kernels/test_quantised_moe.py::test_experts_may_have_biases_and_a_clamped_gate",)
SAME = ("tests/models/test_mxfp4.py::test_codes_that_are_kept_stand_for_the_same_numbers_to_the_bit",)
REFUSED = ("tests/models/test_mxfp4.py::test_a_scale_that_is_not_a_number_is_refused",)
LOGITS = (
    "tests/models/test_kept_experts.py::test_experts_in_mxfp4_keep_their_codes_and_give_the_logits_of_their_numbers",
)

KEPT_MXFP4_MUTANTS = (
    *mutants_of(
        "kernels/dflash_kernels/mxfp4.py",
        EVERY_CODE,
        ("kept scales are one exponent too high", "exponents << 23)", "(exponents + 1) << 23)"),
        ("the lowest kept scale is 0", "1 << 22, exponents", "0, exponents"),
        ("e2m1 loses its sign", "sign = (bits << 12) & -0x8000", "sign = (bits << 12) & 0"),
        ("e2m1 of float16 has no mantissa", "((bits & 7) << 9)", "((bits & 6) << 9)"),
        ("float16's other bias is not made up for in e2m1", "2.0**14", "2.0**13"),
    ),
    *mutants_of(
        "kernels/dflash_kernels/mxfp4.py",
        EQUAL,
        ("e2m1 of bfloat16 has one exponent for all", "((bits & 7) << 6)", "((bits & 1) << 6)"),
        ("bfloat16's other bias is not made up for in e2m1", "2.0**126", "2.0**125"),
    ),
    *mutants_of(
        "kernels/dflash_kernels/quantised_linear.py",
        EQUAL,
        (
            "the halves of a byte of MXFP4 change places",
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
            "a group of MXFP4 has the scale of its neighbour",
            "sums * scales_at(scales_ptr, of_block, is_row)",
            "sums * scales_at(scales_ptr, tl.abs(of_block - scale_stride), is_row)",
        ),
        (
            "e2m1 is read as integers",
            '"INTEGERS": weight.kind in INTEGERS,',
            '"INTEGERS": weight.kind != FP8,',
        ),
    ),
    *mutants_of(
        "kernels/dflash_kernels/quantised_moe.py",
        BIASES,
        ("kept up has the bias of gate", "tl.load(bias_ptr + of_up,", "tl.load(bias_ptr + of_gate,"),
        ("kept experts have the bias of the first", "tl.load(bias_ptr + row,", "tl.load(bias_ptr + column,"),
        ("the gate of kept experts is not clamped", "if LIMIT > 0:", "if LIMIT > 1000:"),
        (
            "kept experts lose their biases out of them",
            "of_gate_up, of_down = biases or (None, None)",
            "(of_gate_up, _), of_down = biases or (None, None), None",
        ),
    ),
    *mutants_of(
        "dflash_backend/models/gpt_oss.py",
        SAME,
        (
            "kept MXFP4 has its halves in the other order",
            "[blocks & 0x0F, blocks >> 4]",
            "[blocks >> 4, blocks & 0x0F]",
        ),
    ),
    *mutants_of(
        "dflash_backend/models/gpt_oss.py",
        REFUSED,
        (
            "kept scales that are no numbers are taken",
            "    check_scales(scales)\n    codes",
            "    codes",
        ),
    ),
    *mutants_of(
        "dflash_backend/models/gpt_oss.py",
        LOGITS,
        ("kept gate and up stay in turns", "map(gate_then_up, own) if interleaved else own", "own"),
        (
            "scales of kept gate and up stay in turns",
            "stack.add(in_products(of_blocks[0], of_scales[0]))",
            "stack.add(in_products(of_blocks[0], own[1][0]))",
        ),
        ("MXFP4 is dequantised on a GPU", "_read_kept if source.keep_quantised else", ""),
    ),
    *mutants_of(
        "dflash_backend/models/experts.py",
        LOGITS,
        (
            "kept experts lose their biases",
            "weights, experts, biases, clamp, is_gelu=is_gelu)\n    assert",
            "weights, experts, None, clamp, is_gelu=is_gelu)\n    assert",
        ),
    ),
    *mutants_of(
        "dflash_backend/checkpoints/quantization/keepable.py",
        LOGITS,
        ("sizes take MXFP4 for numbers", 'MXFP4_DTYPE = "U8"', 'MXFP4_DTYPE = "I8"'),
    ),
    *mutants_of(
        "dflash_backend/engine/sizing.py",
        ("tests/checkpoints/test_quantised_loading.py::test_what_a_step_reads_of_mxfp4_is_what_its_numbers_take",),
        (
            "a CPU counts MXFP4 as on disk",
            "load_quantization(path) or holds_mxfp4(read_headers(path))",
            "load_quantization(path)",
        ),
    ),
    *mutants_of(
        "dflash_backend/checkpoints/weights.py",
        ("tests/parallel/test_shards.py::test_weights_that_a_border_cuts_are_said_once",),
        ("every weight that a border splits is said", "self._split_reported = True", "pass"),
    ),
)
