"""Defects of the operations in C++, and of how they are built and called."""

from __future__ import annotations

from tests.mutations.mutant import mutants_of

KERNELS = "kernels/dflash_kernels"
TESTS = ("tests/kernels/test_cpu_ops.py",)
ATTENTION = ("tests/attention/test_cpu_backend.py",)

CPU_OPS_MUTANTS = (
    *mutants_of(
        f"{KERNELS}/cpu_products.h",
        TESTS,
        ("the lower rows of a tile are those of the upper ones", "a + 16 * step + k", "a + k"),
        ("many inputs are summed by their first part alone", "b, end - begin, begin > 0,", "b, end - begin, false,"),
    ),
    *mutants_of(
        f"{KERNELS}/cpu_grids.h",
        TESTS,
        ("a weight off its grid stays on it", "all.store(false); return;", "return;"),
        ("codes begin at 0", "first <= 15 - top; first++", "first <= 0; first++"),
        ("the least code of 8 bits is not looked for", "most > 0 ? 128 : 1", "most > 0 ? 127 : 1"),
        ("outputs take the steps of those before them", "twice(steps + half * LANES + i * 8)", "twice(steps + i * 8)"),
    ),
    *mutants_of(
        f"{KERNELS}/cpu_choice.h",
        TESTS,
        ("the lowest id is not chosen among equals", "where[i] < place", "where[i] > place"),
    ),
    *mutants_of(
        f"{KERNELS}/cpu_attention.h",
        ATTENTION,
        (
            "a query sees the key after its own",
            "std::min(count, position + 1 - base)",
            "std::min(count, position + 2 - base)",
        ),
        ("in tiles a query sees the key after its own", "position + 1 - int(base);", "position + 2 - int(base);"),
        (
            "keys a query's window away are seen",
            "position - p.window + 1 - base);\n        if",
            "position - p.window - base);\n        if",
        ),
        ("in tiles keys a query's window away are seen", "position - int(p.window) + 1", "position - int(p.window)"),
        ("a row's blocks are its neighbour's", "p.tables + row * p.table_step;", "p.tables;"),
        ("in tiles a row's blocks are its neighbour's", "p.tables + row * p.table_step, base", "p.tables, base"),
        (
            "in tiles outputs are not scaled as larger scores come",
            "load(out + c * LANES) * keep",
            "load(out + c * LANES)",
        ),
    ),
    *mutants_of(
        "dflash_backend/models/linear.py",
        ("tests/checkpoints/test_gguf.py",),
        ("weights on grids become numbers", "if weight.dtype != dtype and (packed", "if weight is None and (packed"),
    ),
    *mutants_of(
        f"{KERNELS}/cpu_library.py",
        TESTS,
        (
            "a library is kept that has failed its trial",
            "if _compiled(compiler, made) else None",
            "if _compiled(compiler, made) or made.exists() else None",
        ),
        ("a library of another source is taken", "for path in (SOURCE, *sorted(", "for path in (*(), *sorted("),
        ("a library of other headers is taken", '(SOURCE, *sorted(SOURCE.parent.glob("cpu_*.h")))', "(SOURCE,)"),
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
