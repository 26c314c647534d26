"""Defects of KV in FP8: the text stays text, and is worse, in some heads or for some tokens alone."""

from __future__ import annotations

from tests.mutations.mutant import mutants_of

KERNELS = "kernels/dflash_kernels"
TESTS = "tests/kernels/test_fp8_kv.py"
ROUNDING = (
    f"{TESTS}::test_kernels_round_as_torch_does_and_read_what_torch_reads",
    f"{TESTS}::test_what_is_kept_is_within_a_sixteenth_of_each_number_or_of_the_smallest_step",
    f"{TESTS}::test_a_tokens_kv_does_not_follow_from_its_neighbours",
)
READING = (f"{TESTS}::test_attention_over_fp8_for_any_heads_blocks_and_sinks",)
WRITING = (f"{TESTS}::test_the_kernel_writes_the_bytes_and_scales_of_its_reference",)
DTYPE = "tests/worker/test_kv_dtype.py"
SIZES = (
    f"{DTYPE}::test_fp8_is_bytes_and_scales_for_the_target_and_the_drafter_keeps_its_dtype",
    f"{DTYPE}::test_there_are_as_many_blocks_as_the_bytes_say_and_the_load_says_it",
    f"{DTYPE}::test_a_pool_in_fp8_is_claimed_whole",
)
REFUSED = (f"{DTYPE}::test_a_backend_that_cannot_read_such_kv_is_refused_with_those_that_can",)
FIRST_LAYER = (f"{DTYPE}::test_the_first_layers_kv_is_that_of_float32_rounded",)
RANKS = (f"{DTYPE}::test_ranks_keep_their_heads_in_fp8_and_give_the_text_of_one",)

FP8_KV_MUTANTS = (
    *mutants_of(
        f"{KERNELS}/fp8_kv.py",
        ROUNDING,
        ("a number is cut off and not rounded", "size + 0x7FFFF + ((size >> 20) & 1)", "size"),
        ("the middle of two numbers is rounded up", "0x7FFFF + ((size >> 20) & 1)", "0x80000"),
        ("small numbers are rounded as large ones", "tl.where(size < 0x3C800000, small, normal)", "normal"),
        ("numbers have no sign", "(((bits >> 24) & 0x80) | code)", "code"),
        (
            "a scale is that of all tokens",
            "scales = numbers.abs().amax(dim=-1) / LARGEST",
            "scales = numbers.abs().amax(dim=-1).amax(0, True).expand(numbers.shape[:-1]) / LARGEST",
        ),
        ("the reference reads a sign twice", "<< 7) & WITHOUT_SECOND_SIGN", "<< 7)"),
        ("the kernel reads a sign twice", "<< 7) & _WITHOUT_SECOND_SIGN", "<< 7)"),
    ),
    *mutants_of(
        f"{KERNELS}/attention_tile.py",
        READING,
        (
            "all heads are read by the scale of the first",
            "place = slot // HEAD_DIM + kv_head",
            "place = slot // HEAD_DIM",
        ),
        ("values are read by the scales of keys", "place += value_stride // HEAD_DIM", "place += 0"),
    ),
    *mutants_of(
        "dflash_backend/attention/triton_backend.py",
        ("tests/worker/test_shared_prefixes.py::test_kv_in_fp8_is_read_once_too",),
        ("rows that share a prefix are read without scales", "scales=layer.scales, out_lse=lse", "out_lse=lse"),
    ),
    *mutants_of(
        f"{KERNELS}/fp8_kv.py",
        WRITING,
        (
            "a scale is of half a head",
            "top = tl.maximum(tl.max(tl.abs(low), 1), tl.max(tl.abs(high), 1))",
            "top = tl.max(tl.abs(low), 1)",
        ),
    ),
    *mutants_of(
        f"{KERNELS}/qk_norm_rope_write.py",
        WRITING,
        ("the scales of a token go to the slot before", "place = slot * (2", "place = (slot - 1) * (2"),
        (
            "only scales of keys are written",
            ("head < NUM_HEADS + 2 * NUM_KV_HEADS)\n        cache_dtype"),
            ("head < NUM_HEADS + NUM_KV_HEADS)\n        cache_dtype"),
        ),
        ("the reference writes no scale", "scales.index_copy_(0, slots, kv_scales)", "pass"),
    ),
    *mutants_of(
        "dflash_backend/worker/kv_cache.py",
        SIZES,
        ("the drafter's KV is in FP8, too", "layers(draft, dtype)", "layers(draft, kv_dtype or dtype)"),
        (
            "the bytes of scales are not counted",
            "    if dtype == FP8:\n        size +=",
            "    if False:\n        size +=",
        ),
        ("scales are not claimed", "for tensor in (layer.data, layer.scales):", "for tensor in (layer.data,):"),
    ),
    *mutants_of(
        "dflash_backend/attention/selection.py",
        REFUSED,
        (
            "a backend is asked for KV that it cannot read",
            "needs.kv_dtype not in capabilities.kv_dtypes",
            "needs.kv_dtype in capabilities.kv_dtypes",
        ),
    ),
    *mutants_of(
        "dflash_backend/attention/interface.py",
        FIRST_LAYER,
        (
            "a piece is read by the scales of the first",
            ".index_select(0, pieces)\n        return",
            ".index_select(0, pieces * 0)\n        return",
        ),
    ),
    *mutants_of(
        "dflash_backend/parallel/rank.py",
        RANKS,
        ("other ranks keep KV in the model's dtype", "device, needs.kv_dtype)", "device, None)"),
    ),
    *mutants_of(
        "kernels/dflash_kernels/paged_attention_launch.py",
        ("tests/kernels/test_attention_launch.py",),
        (
            "tiles over FP8 KV are those of bfloat16, and spill",
            "if shape.fp8_kv and block_m > 16:",
            "if False:",
        ),
    ),
    *mutants_of(
        "dflash_backend/attention/triton_backend.py",
        ("tests/kernels/test_attention_launch.py::test_the_backend_takes_the_tiles_of_its_cache",),
        ("the backend does not say that KV is FP8", "is_fp8 = layer.scales is not None", "is_fp8 = False"),
    ),
)
