"""What holds for every test: where kernels run, which tests share a worker and come first, and which skips are allowed.

Triton reads its variable when a kernel's module is imported, and the attention backends import them, so a conftest of
`tests/kernels` alone would come too late.
"""

from __future__ import annotations

import atexit
import gc
import math
import multiprocessing
import os
import signal
from collections.abc import Generator, Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any, get_args

import pytest

# What is imported and collected stays, and makes most of the heap: looking through it for garbage, over and over, takes
# as long as collecting itself, and in the tests after it an eighth of their time. `pytest_collection` ends it.
if gc.isenabled():
    gc.disable()

if "PYTEST_XDIST_WORKER" in os.environ:
    # Once it has reported and whoever registers later has cleaned up, a worker takes nothing down: that is 3 seconds.
    atexit.register(os._exit, 0)
    # One core a worker, for the processes that the tests start as well. torch reads it when it is imported.
    os.environ["OMP_NUM_THREADS"] = "1"
    # Where a test asks for more, a thread that waits leaves its core to other workers.
    os.environ["OMP_WAIT_POLICY"] = "PASSIVE"

# A source that was changed has no library yet: built once, by whichever process comes first.
os.environ.setdefault("DFLASH_CPU_OPS", "build")

import torch
from hypothesis import settings

from tests.support.allowed_skips import is_allowed
from tests.support.scale import NIGHTLY_SCALE, SCALE
from tests.tiers import ROOT, TOGETHER, Tier, read_table

# The same examples in each run, so that a red one is about the change; `make nightly` looks at others.
settings.register_profile("same", derandomize=True)
settings.load_profile("default" if os.environ.get("TEST_RANDOM") else "same")

# A shell starts what runs in its background with Ctrl-C ignored, and processes inherit that: those of the tests, too.
signal.signal(signal.SIGINT, signal.default_int_handler)

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"
    from tests.support import fast_interpreter, shared_weights

    fast_interpreter.install()
    shared_weights.install()

# Files whose tests share no fixture: each test function may go to any worker. All other files stay whole.
SPLIT = (
    "tests/kernels/",
    "tests/core/",
    "tests/attention/",
    "tests/gpu/test_engine.py",
    "tests/invariants/test_lossless.py",
    "tests/load_tests/test_smoke.py",
)
NIGHTLY_FOUND = pytest.StashKey[set[str]]()
"""The lines of tests/nightly.txt that name a test that was collected."""


@pytest.fixture(scope="module")
def single_thread() -> Iterator[None]:
    """For tiny models: with tensors of a few dozen numbers a second thread costs more than it saves."""
    from dflash_backend.worker.batch_parallel import op_threads

    with op_threads(1):
        yield


@pytest.fixture
def inference_mode() -> Iterator[None]:
    with torch.inference_mode():
        yield


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--strict-skips", action="store_true", help="fail for skips that tests/support/allowed_skips.py lacks"
    )
    parser.addoption(
        "--strict-times", action="store_true", help="fail for files far above their row of tests/tiers.csv"
    )
    parser.addoption(
        "--stall-limit", type=float, metavar="SECONDS", help="end a run in which no test reports anything for so long"
    )
    parser.addoption("--file-times", metavar="CSV", help="write the seconds that each file takes there")
    parser.addoption("--tier", choices=get_args(Tier), default="full", help="fast: what `make test-fast` runs")


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("--strict-times") or config.getoption("--file-times"):
        from tests.support.file_times import FileTimes  # needs psutil, which a machine with a GPU may lack

        config.pluginmanager.register(FileTimes(config, config.getoption("--tier")), "file-times")
    if config.getoption("--stall-limit"):
        from tests.support import stalled_run

        stalled_run.register(config)


def pytest_itemcollected(item: pytest.Item) -> None:
    if (entry := nightly_entry(item.nodeid)) is not None:
        item.config.stash.setdefault(NIGHTLY_FOUND, set()).add(entry)
        item.add_marker(pytest.mark.nightly)


@cache
def nightly_entries() -> frozenset[str]:
    """The lines of tests/nightly.txt."""
    lines = (ROOT / "tests" / "nightly.txt").read_text(encoding="utf-8").splitlines()
    return frozenset(line for line in lines if line and not line.startswith("#"))


def nightly_entry(node_id: str) -> str | None:
    """The line of tests/nightly.txt that leaves a test to the night: its id, its function or, with *, a beginning."""
    for whole in (node_id, node_id.partition("[")[0]):
        if whole in nightly_entries():
            return whole
    beginnings = nightly_beginnings(nightly_entries()).get(node_id.partition("::")[0], ())
    return next((line for line in beginnings if node_id.startswith(line[:-1])), None)


@cache
def nightly_beginnings(entries: frozenset[str]) -> dict[str, list[str]]:
    """The entries that end in *, by file: every test that is collected is looked up."""
    found: dict[str, list[str]] = {}
    for line in entries:
        if line[-1] == "*":
            found.setdefault(line[:-1].partition("::")[0], []).append(line)
    return found


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Of the fast tier, its files alone: importing the others takes seconds in each worker."""
    if config.getoption("--tier") == "full" or not collection_path.match("test_*.py"):
        return None
    row = read_table().get(collection_path.relative_to(ROOT).as_posix())
    return None if row is not None and row.is_fast else True


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


def pytest_unconfigure() -> None:
    """A process that takes itself down finds all of it, or libraries complain. A worker does not, nor one of
    `multiprocessing`, such as that of a mutant: it looks once for what its last tests left, and pytest, which then
    looks five times more, finds nothing to go through."""
    if "PYTEST_XDIST_WORKER" not in os.environ and multiprocessing.parent_process() is None:
        gc.unfreeze()
    else:
        gc.collect()
        gc.freeze()


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.args == config.getini("testpaths") and config.getoption("--tier") == "full" and SCALE == 1:
        stale = set(nightly_entries()) - config.stash.get(NIGHTLY_FOUND, set())
        if stale:
            raise pytest.UsageError(f"tests/nightly.txt names tests that do not exist: {sorted(stale)}")
    fast = config.getoption("--tier") == "fast"
    left_out = {item for item in items if (fast and is_slow(item)) or waits_for_night(item, config.args)}
    config.hook.pytest_deselected(items=list(left_out))
    items[:] = [item for item in items if item not in left_out]
    if "PYTEST_XDIST_WORKER" in os.environ:
        places = places_of(items)
        items.sort(key=lambda item: places[item.path])


def is_slow(item: pytest.Item) -> bool:
    """Whether the fast tier is without this test: it is slow, or needs a server that no other test there uses."""
    if item.get_closest_marker("smoke"):
        return False
    return any(item.get_closest_marker(name) for name in ("slow", "server"))


def waits_for_night(item: pytest.Item, arguments: Sequence[str]) -> bool:
    """Whether `make nightly` alone runs this test, and no argument names it or its file, as those of the mutants do."""
    if SCALE >= NIGHTLY_SCALE or not item.get_closest_marker("nightly"):
        return False
    return not any(".py" in argument and item.nodeid.startswith(argument) for argument in arguments)


def places_of(items: Sequence[pytest.Item]) -> dict[Path, float]:
    """When each file begins, from 0 to 1. The longest come first, so that no worker is left with one of them at the
    end, a file of several that stay together as soon as all of them; files with servers, which wait, are spread among
    the others, which compute."""
    with_servers = {item.path for item in items if item.get_closest_marker("server")}
    kinds: dict[bool, dict[Path, tuple[float, float]]] = {}
    for item in items:
        file = item.path.relative_to(ROOT).as_posix()
        whole = next((files for files in TOGETHER if file in files), (file,))
        kinds.setdefault(item.path in with_servers, {})[item.path] = sum(map(wall_of, whole)), wall_of(file)
    places: dict[Path, float] = {}
    for walls in kinds.values():
        known = sum(own for _, own in walls.values() if own < math.inf) or 1.0
        before = 0.0
        for path, (_, own) in sorted(walls.items(), key=lambda entry: (-entry[1][0], entry[0])):
            places[path] = before / known
            before += own if own < math.inf else 0.0
    return places


def wall_of(file: str) -> float:
    """The seconds that a file takes. One that was not measured may be a long one."""
    row = read_table().get(file)
    return math.inf if row is None or row.wall is None else row.wall


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Hand out whole files, or functions of `SPLIT`, in the order in which they were collected."""
    from xdist.scheduler import LoadScopeScheduling

    class ByFile(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            file = nodeid.partition("::")[0]
            if nodeid.startswith(SPLIT):
                return nodeid.partition("[")[0]
            return next((files[0] for files in TOGETHER if file in files), file)

    config.option.loadscopereorder = False
    return ByFile(config, log)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    refuse_skip(item.config, report)
    return report


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(
    collector: pytest.Collector,
) -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    report = yield
    refuse_skip(collector.config, report)
    return report


def refuse_skip(config: pytest.Config, report: pytest.TestReport | pytest.CollectReport) -> None:
    """With `--strict-skips`, make a failure of a skip that is not allowed."""
    if not config.getoption("--strict-skips") or not report.skipped or hasattr(report, "wasxfail"):
        return
    reason = str(report.longrepr[2]) if isinstance(report.longrepr, tuple) else str(report.longrepr)
    if not is_allowed(report.nodeid, reason):
        report.outcome = "failed"
        report.longrepr = f"skipped, which tests/support/allowed_skips.py does not allow: {reason}"
