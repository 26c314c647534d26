"""The tests that a card runs, and whose kernels are compiled for it before (`pack`)."""

from __future__ import annotations

GPU_TESTS = (
    "tests/gpu/test_serving_attention.py", "tests/worker/test_step_ops.py", "tests/worker/test_transfers.py",
    "tests/gpu/test_quantised_linear.py", "tests/gpu/test_dequantise.py", "tests/attention/test_device_lengths.py",
    "tests/models/test_ops.py", "tests/kernels",
)  # fmt: skip
# A file that lacks a package is recorded as failed and leaves the others. Compiling for no GPU has no place on one.
TEST_OPTIONS = (
    "--continue-on-collection-errors", "-m", "not sanitizer", "--deselect", "tests/kernels/test_compiles.py",
)  # fmt: skip
# Those that a rehearsal runs, which measures nothing: that outcomes come is what it shows.
REHEARSED_TESTS = ("tests/gpu/test_quantised_linear.py", "tests/worker/test_transfers.py")
