"""Tiny models run on one thread: for tensors of a few dozen numbers a second one costs more than it saves."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from dflash_backend.worker.row_parallel import one_thread


@pytest.fixture(autouse=True, scope="package")
def single_thread() -> Iterator[None]:
    with one_thread():
        yield
