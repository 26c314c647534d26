"""Defects of launches that are looked up without Triton, and of the watch over a server."""

from __future__ import annotations

from tests.mutations.mutant import Mutant, mutants_of

LAUNCHER_MUTANTS = (
    Mutant(
        "one of several models hangs unseen",
        "cli/dflash_cli/launcher/watch.py",
        "for stub in self._stubs)):",
        "for stub in ())):",
        ("tests/cli/test_restarts.py::test_one_model_of_several_that_hangs_is_noticed",),
    ),
    *mutants_of(
        "kernels/dflash_kernels/launcher.py",
        ("tests/benchmarks/test_kernel_variants.py::test_a_launch_runs_the_kernel_that_triton_would_run",),
        (
            "an odd pointer is taken for a round one",
            " if ({' | '.join(pointers)}) % {ALIGNMENT} else 0",
            " if False else 0",
        ),
        ("a number that is 1 takes the kernel of any other", "0 if {name} == 1 else 1 if", "1 if"),
        ("a number past 32 bits takes the kernel of one within", ") >> 31", ") >> 63"),
        ("the dtype of a pointer does not count", 'facts.append(f"{name}.dtype")', "pass"),
        ("the number of warps does not count", '[f"o.get({name!r})" for name in OPTIONS]', "[]"),
        ("an option is not known", '"num_stages", "enable_fp_fusion"', '"num_stages"'),
        (
            "constants do not count",
            '["device", "kinds", *constants, *given, *facts]',
            '["device", "kinds", *given, *facts]',
        ),
    ),
)
