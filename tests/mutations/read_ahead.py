"""Defects of reading checkpoints ahead."""

from __future__ import annotations

from tests.mutations.mutant import mutants_of

TESTS = ("tests/checkpoints/test_read_ahead.py",)

READ_AHEAD_MUTANTS = (
    *mutants_of(
        "dflash_backend/checkpoints/read_ahead.py",
        TESTS,
        ("tensors are read without a bound", "if self._held and self._held + size > self._limit:", "if False:"),
        ("nothing is read before it is asked for", "self._held + size > self._limit:", "True:"),
        ("a tensor begins at the header", "8 + length + entry", "length + entry"),
        ("pieces of a tensor overlap", "start + at)", "start)"),
        ("a tensor is given before it has been read", "piece.result()", "pass"),
        (
            "a file that ends early is read for ever, or not to its end",
            "        if not count:\n            raise OSError",
            "        if not count:\n            return\n            raise OSError",
        ),
        ("threads outlive a load", "self._threads.shutdown(cancel_futures=True)", "pass"),
        ("files stay open", "os.close(file)", "pass"),
    ),
    *mutants_of(
        "dflash_backend/checkpoints/weights.py",
        TESTS,
        ("memory of tensors that were taken is held", "self._ahead.release(name)", "pass"),
        ("large files say nothing before their end", "(ended or now - self._reported > REPORT_S)", "ended"),
    ),
)
