"""Defects of products that are measured at the start."""

from __future__ import annotations

from tests.mutations.mutant import mutants_of

FOLDER = "kernels/dflash_kernels"
MEASURED = ("tests/kernels/test_measured_linear.py",)

MEASURED_PRODUCTS_MUTANTS = (
    *mutants_of(
        f"{FOLDER}/measured_linear.py",
        MEASURED,
        ("a way is taken that gains nothing", "if ours <= WORTH * torchs", "if ours <= torchs"),
        ("products are measured while requests are served", " and _State.measuring and ", " and "),
        ("a way with wrong numbers is taken", "return float(error) <= TOLERANCE", "return True"),
        ("sums are rounded to 16 bits on the way", "(CANDIDATES, IN_FLOAT32)", "(CANDIDATES)"),
        ("no sum is tried in other parts", 'if any(each.config["split"] > 1 for each', "if any(False for each"),
        ("the first look decides", "(ways[fastest], ours) if ours", "(ways[finalists[0]], ours) if ours"),
        ("measuring has no end", "if self._spent_s >= BUDGET_S:", "if False:"),
        ("a bias is forgotten", "if bias is None and 0 < rows", "if 0 < rows"),
        ("tensors may begin anywhere", " and tensor.data_ptr() % ALIGNMENT == 0", ""),
    ),
    *mutants_of(
        f"{FOLDER}/cublas_lt.py",
        MEASURED,
        (
            "rows of the input are taken for its columns",
            '"MatrixLayout", kind, inputs, rows, inputs)',
            '"MatrixLayout", kind, rows, inputs, rows)',
        ),
        ("another version's enums are taken for known", "if version // 10_000 != MAJOR_VERSION:", "if False:"),
        ("descriptors are never destroyed", "        weakref.finalize(owner,", "        (owner,"),
    ),
    *mutants_of(
        "dflash_backend/engine/build.py",
        ("tests/engine/test_settings.py::test_ranks_do_not_measure_their_products",),
        ("ranks choose products by their own clocks", " and config.tensor_parallel_size == 1", ""),
    ),
    *mutants_of(
        "dflash_backend/worker/runner.py",
        ("tests/worker/test_graphs.py",),
        ("captures do not measure", "measuring() if captures else nullcontext():", "nullcontext():"),
    ),
)
