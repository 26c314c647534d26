"""Defects of the operations in C++, and of how they are built and called."""

from __future__ import annotations

from tests.mutations.mutant import mutants_of

KERNELS = "kernels/dflash_kernels"
TESTS = ("tests/kernels/test_cpu_ops.py",)
ATTENTION = ("tests/attention/test_cpu_backend.py",)

CPU_OPS_MUTANTS = (
    *mutants_of(
        f"{KERNELS}/cpu_ops.cpp",
        TESTS,
        ("the lower rows of a tile are those of the upper ones", "a + 16 * step + k", "a + k"),
        ("the lowest id is not chosen among equals", "where[i] < place", "where[i] > place"),
    ),
    *mutants_of(
        f"{KERNELS}/cpu_ops.cpp",
        ATTENTION,
        (
            "a query sees the key after its own",
            "std::min(count, position + 1 - base)",
            "std::min(count, position + 2 - base)",
        ),
        (
            "keys a query's window away are seen",
            "position - p.window + 1 - base);\n        if",
            "position - p.window - base);\n        if",
        ),
        ("a row's blocks are its neighbour's", "p.tables + row * p.table_step", "p.tables"),
    ),
    *mutants_of(
        f"{KERNELS}/cpu_library.py",
        TESTS,
        (
            "a library is kept that has failed its trial",
            "if _compiled(compiler, made) else None",
            "if _compiled(compiler, made) or made.exists() else None",
        ),
        ("a library of another source is taken", "text = SOURCE.read_bytes() + ", "text = "),
    ),
    *mutants_of(
        f"{KERNELS}/cpu_ops.py",
        TESTS,
        (
            "rows that lie apart are read as neighbours",
            "x.data_ptr(), x.stride(0), self.address",
            "x.data_ptr(), k, self.address",
        ),
    ),
)
