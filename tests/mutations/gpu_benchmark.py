"""Defects of the GPU benchmark, which would report what was not measured."""

from __future__ import annotations

from tests.mutations.mutant import mutants_of

PARTS = "tests/benchmarks/test_gpu_end_to_end.py"
TRAFFIC = (f"{PARTS}::test_traffic_measures_prompts_mixed_steps_unlike_rows_and_the_start",)
ROWS = (f"{PARTS}::test_one_row_has_more_positions_than_the_others",)
FLOOR = (f"{PARTS}::test_a_prompt_is_computed_and_its_tokens_are_all_in_the_floor",)
REPORT = ("tests/benchmarks/test_gpu_report.py",)
CARD = ("tests/benchmarks/test_card_report.py",)
FAKE = ("tests/benchmarks/test_fake_device.py",)

GPU_BENCHMARK_MUTANTS = (
    *mutants_of(
        "benchmarks/gpu/compile_table.py",
        ("tests/benchmarks/test_compile_table.py",),
        (
            "the table of KV in FP8 has bfloat16's kernels",
            "row_of(name, kind, arch, fp8_kv=True)",
            "row_of(name, kind, arch)",
        ),
    ),
    *mutants_of(
        "benchmarks/gpu/engine.py",
        ROWS,
        (
            "the row with more positions has those of the others",
            "prompt[: cell.context_of(index)]",
            "prompt[: cell.context]",
        ),
    ),
    *mutants_of(
        "benchmarks/gpu/engine.py",
        TRAFFIC,
        (
            "the host is said to work while it waits",
            "host_s=(seconds - waited) / num_done",
            "host_s=2 * seconds / num_done",
        ),
    ),
    *mutants_of(
        "benchmarks/gpu/traffic.py",
        FLOOR,
        (
            "the floor of a prompt is that of its first token",
            "size = CycleSize(1, begin + tokens / 2, tokens - 1,",
            "size = CycleSize(1, begin, 0,",
        ),
        ("a prompt's later chunks see no earlier ones", "begin + tokens / 2", "tokens / 2"),
    ),
    *mutants_of(
        "benchmarks/gpu/report.py",
        REPORT,
        ("the rate of torch is taken for FlashAttention's", "if system in PACKAGES)", ")"),
        ("the length where we are best counts", "return min(ratios, default=None)", "return max(ratios, default=None)"),
    ),
    *mutants_of(
        "benchmarks/gpu/floor.py",
        (
            "tests/benchmarks/test_gpu_floor.py::test_experts_of_gpt_oss_count_as_mxfp4_and_what_is_beside_them_as_bfloat16",
        ),
        ("experts of the floor have the bytes of projections", "size.expert_itemsize or itemsize", "itemsize"),
    ),
    *mutants_of(
        "benchmarks/gpu/card_report.py",
        CARD,
        ("a part that hangs takes the time of all", "took < self.seconds + GRACE_S", "took < 1e9"),
        (
            "a part gets its share though nothing is left",
            "min(part.seconds * times, left_s - GRACE_S - KILL_S)",
            "part.seconds * times",
        ),
    ),
    *mutants_of(
        "benchmarks/gpu/card_summary.py",
        CARD,
        ("how many times as fast is turned round", "ratio if upper else 1 / ratio", "ratio"),
        ("the fastest of the products counts", "min(speedups, default=None)", "max(speedups, default=None)"),
    ),
    *mutants_of(
        "benchmarks/gpu/card_texts.py",
        CARD,
        ("text of float32 may part", 'return "WRONG" if self.exact and', 'return "WRONG" if not self.exact and'),
    ),
    *mutants_of(
        "benchmarks/gpu/profile.py",
        CARD,
        ("kernels that overlap count twice", "max(begin, begin if reached is None else reached)", "begin"),
    ),
    *mutants_of(
        "benchmarks/gpu/fake_device.py",
        FAKE,
        ("a step may wait for the device", "    if STATE.steps:\n", "    if False:\n"),
        ("memory of the host need not be pinned", "if on_host and not _is_pinned(on_host[0]):", "if False:"),
        (
            "tensors of both devices may meet",
            "if any(tensor.dim() for tensor in others):\n        raise",
            "if False:\n        raise",
        ),
        ("a mask is no wait", "each.dtype in (torch.bool, torch.uint8)", "each.dtype == torch.uint8"),
    ),
    *mutants_of(
        "benchmarks/gpu/pack.py",
        FAKE,
        ("kernels are looked for where they were made", "        point_to(cache)\n", ""),
    ),
)
