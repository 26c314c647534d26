"""The tiers of the tests: what `make test-fast` leaves out `make test` runs, each tier has an end to its time, and a
skip is allowed or a failure."""

from __future__ import annotations

import itertools
import os
import re
import subprocess
import sys
from pathlib import Path
from subprocess import PIPE
from types import SimpleNamespace
from typing import Any

import pytest

from checks.nightly import COMMANDS, ENVIRON
from tests import tiers
from tests.conftest import (
    SPLIT,
    is_slow,
    nightly_entries,
    nightly_entry,
    places_of,
    pytest_ignore_collect,
    refuse_skip,
    waits_for_night,
)
from tests.support.allowed_skips import ALLOWED, is_allowed
from tests.support.file_times import OUTSIDE, files_above, processor_seconds
from tests.support.scale import NIGHTLY_SCALE, scaled
from tests.tiers import (
    BUDGETS,
    LARGEST_S,
    ONE_BROWSER,
    ROOT,
    SMOKE,
    TOGETHER,
    UNMEASURED_S,
    Row,
    Tier,
    files_of_tests,
    read_table,
    total,
)


def skipped(node_id: str, reason: str) -> pytest.TestReport:
    return pytest.TestReport(node_id, ("f.py", 1, "f"), {}, "skipped", ("f.py", 1, f"Skipped: {reason}"), "setup")


def config(strict: bool) -> Any:
    return SimpleNamespace(getoption=lambda name: strict)


def test_make_test_leaves_out_what_is_marked_for_the_night_alone() -> None:
    """Whatever is not in the fast tier, or in none, is then run by it."""
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    (command,) = re.findall(r"^PYTEST = ((?:.*\\\n)*.*)$", makefile, re.MULTILINE)
    (at_once,) = re.findall(r"^test: setup style .*\n\t@\$\(MAKE\) .* -j 2 (.*)\n", makefile, re.MULTILINE)
    assert at_once.split() == ["types", "tests"]
    assert re.findall(r"^tests: (.*)\n\t(.*)\n", makefile, re.MULTILINE) == [("$(BYTECODE)", "MAKEFLAGS= $(PYTEST)")]
    for options in (command, (ROOT / "pyproject.toml").read_text(encoding="utf-8").partition("[tool.pytest")[2]):
        assert not re.search(r" -[mk]\b|--deselect|--ignore|--tier", options)
    assert "--strict-skips" in command
    # Before its options are known pytest takes a word behind one of ours for what to run: where such a file exists, as
    # times do from the second run on, it does not find them.
    assert not re.search(r"--(?!maxprocesses|max-worker-restart)\S+ (?!--|\\\n)", command)


def test_the_night_has_every_test_that_is_left_to_it() -> None:
    command, _ = COMMANDS["marked"]
    assert command == ("pytest", "-q", "-n", "logical", "-m", "nightly", "tests")
    assert float(ENVIRON["marked"]["TEST_SCALE"]) >= NIGHTLY_SCALE


@pytest.mark.parametrize(
    ("marked", "scale", "arguments", "waits"),
    [
        (True, 1.0, ["tests"], True),
        (True, 1.0, ["tests/f.py::test_other"], True),
        (True, 0.1, [], True),
        (False, 1.0, ["tests"], False),
        (True, 4.0, ["tests"], False),
        (True, 1.0, ["tests/f.py"], False),
        (True, 1.0, ["tests/f.py::test_it"], False),
    ],
)
def test_a_marked_test_waits_for_the_night_unless_it_is_named(
    marked: bool, scale: float, arguments: list[str], waits: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tests.conftest.SCALE", scale)
    item: Any = SimpleNamespace(nodeid="tests/f.py::test_it[3]", get_closest_marker=lambda name: marked)
    assert waits_for_night(item, arguments) == waits


def test_a_line_of_the_list_leaves_a_test_its_parameters_or_all_that_begins_so_to_the_night(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    lines = frozenset({"tests/f.py::test_one", "tests/f.py::test_two[a-b]", "tests/f.py::test_six[c*", "tests/g.py*"})
    monkeypatch.setattr("tests.conftest.nightly_entries", lambda: lines)
    expected = {
        "tests/f.py::test_one": "tests/f.py::test_one",
        "tests/f.py::test_one[x]": "tests/f.py::test_one",
        "tests/f.py::test_one_more": None,
        "tests/f.py::test_two[a-b]": "tests/f.py::test_two[a-b]",
        "tests/f.py::test_two[a]": None,
        "tests/f.py::test_six[cd-1]": "tests/f.py::test_six[c*",
        "tests/f.py::test_six[d]": None,
        "tests/g.py::test_any[y]": "tests/g.py*",
    }
    assert {node_id: nightly_entry(node_id) for node_id in expected} == expected


def test_the_list_for_the_night_names_files_and_functions_that_exist() -> None:
    for line in nightly_entries():
        file, _, name = line.rstrip("*").partition("::")
        text = (ROOT / file).read_text(encoding="utf-8")
        assert f"def {name.partition('[')[0]}" in text, line


def test_a_file_is_measured_as_on_a_fresh_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Which has compiled no kernel, and writes bytecode."""
    seen: dict[str, str] = {}

    def run(command: list[str], env: dict[str, str], **_: Any) -> Any:
        seen.update(env)
        assert command[command.index("-q") :][3:5] == ["-m", "not nightly"], "make test has none of those"
        assert not list(Path(env["TRITON_CACHE_DIR"]).iterdir())
        (out,) = (word.partition("=")[2] for word in command if word.startswith("--file-times="))
        Path(out).write_text("file,seconds,wall,skipped\ntests/f.py,1.5,2.0,3\n")
        return SimpleNamespace(returncode=0)

    monkeypatch.setenv("TRITON_CACHE_DIR", "/warm")
    monkeypatch.setattr(tiers, "subprocess", SimpleNamespace(run=run))
    assert tiers.measure(["tests/f.py"], "full") == {"tests/f.py": (1.5, 2.0, 3)}
    assert seen["OMP_NUM_THREADS"] == "1"
    assert not seen["PYTHONDONTWRITEBYTECODE"]


def test_every_file_of_tests_has_a_row_and_every_row_a_file() -> None:
    new = set(files_of_tests()) - set(read_table())
    assert not new, f"measure the new files: python -m tests.tiers {' '.join(sorted(new))}"
    assert not set(read_table()) - set(files_of_tests()), "take the rows of files that are gone out of tests/tiers.csv"


@pytest.mark.parametrize("tier", ["fast", "full"])
def test_a_tier_ends_in_time_whatever_is_added(tier: Tier) -> None:
    """To add more than there is room for, make something cheaper; from the fast tier, files can be taken out."""
    found = total(read_table(), tier)
    assert found <= BUDGETS[tier], f"{found:.0f} of {BUDGETS[tier]:.0f} processor seconds in the {tier} tier"


def test_no_file_keeps_one_worker_for_long() -> None:
    large = {file: row.seconds for file, row in read_table().items() if (row.seconds or 0.0) > LARGEST_S}
    assert not large, "split them, or make them cheaper"


def test_the_fast_tier_has_tests_of_every_package_and_of_a_server() -> None:
    folders = {path.parent for path in (ROOT / "dflash_backend").glob("*/__init__.py")}
    packages = {folder.name for folder in folders} | {"kernels", "client", "cli", "frontend", "server", "lint", "docs"}
    fast = {file for file, row in read_table().items() if row.is_fast}
    covered = {Path(file).parts[1] for file in fast}
    assert packages - covered == set()
    assert set(SMOKE) <= fast


def test_what_was_not_measured_counts_too_and_a_run_is_written_into_its_tier() -> None:
    rows = {"tests/test_a.py": Row(1.0, 2.0, True, None), "tests/test_b.py": Row(None, None)}
    assert [total(rows, "full"), total(rows, "fast")] == [1.0 + UNMEASURED_S, UNMEASURED_S]
    times = {"tests/test_a.py": (3.0, 4.0, 0), "tests/test_b.py": (5.0, 6.0, 1), OUTSIDE: (99.0, 0.0, 0)}
    assert tiers.updated(rows, times, "fast") == rows | {"tests/test_a.py": Row(1.0, 2.0, True, 3.0)}
    assert tiers.updated(rows, times, "full") == {
        "tests/test_a.py": Row(3.0, 4.0, True, None),
        "tests/test_b.py": Row(5.0, 6.0),
    }


@pytest.mark.parametrize(("skipped", "processor", "kept"), [(0, 0.1, False), (4, 0.1, True), (4, 9.0, False)])
def test_a_file_that_skipped_tests_keeps_the_row_of_a_machine_that_ran_them(
    skipped: int, processor: float, kept: bool
) -> None:
    """Where no browser is installed its tests take no time; the row would then fail a machine that has one."""
    rows = {"tests/test_a.py": Row(8.0, 28.0, True, 7.0)}
    for tier, expected in (("full", Row(processor, 1.0, True, 7.0)), ("fast", Row(8.0, 28.0, True, processor))):
        found = tiers.updated(rows, {"tests/test_a.py": (processor, 1.0, skipped)}, tier)
        assert found == (rows if kept else {"tests/test_a.py": expected})


def test_a_table_that_is_written_is_read_as_it_was(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    rows = {
        "tests/engine/test_heap.py": Row(None, None, True, None),
        "tests/test_layers.py": Row(3.0, None),
        "tests/test_tiers.py": Row(1.5, 2.0, True, 0.5),
    }
    monkeypatch.setattr(tiers, "TABLE", tmp_path / "tiers.csv")
    tiers.write_table(rows | {"tests/test_gone.py": Row(1.0, 1.0)})
    found = read_table()
    read_table.cache_clear()
    assert found == rows


class FakeItem:
    """A test as its file, its path and its marks have it."""

    def __init__(self, file: str, *marks: str) -> None:
        self.path, self.marks = ROOT / file, marks

    def get_closest_marker(self, name: str) -> str | None:
        return name if name in self.marks else None


@pytest.fixture
def table(monkeypatch: pytest.MonkeyPatch) -> None:
    """A table of four files, two of them in the fast tier."""
    rows = {
        "tests/test_short.py": Row(1.0, 2.0, True, 0.5),
        "tests/test_long.py": Row(20.0, 30.0, True, 4.0),
        "tests/test_serves.py": Row(5.0, 40.0),
        "tests/test_waits.py": Row(1.0, 10.0),
    }
    for module in ("tests.tiers", "tests.conftest", "tests.support.file_times"):
        monkeypatch.setattr(f"{module}.read_table", lambda: rows)


@pytest.mark.usefixtures("table")
def test_the_fast_tier_collects_its_own_files_alone() -> None:
    def ignored(file: str, tier: str) -> bool | None:
        return pytest_ignore_collect(ROOT / file, SimpleNamespace(getoption=lambda name: tier))

    files = ("tests/test_short.py", "tests/test_serves.py", "tests/test_new.py", "tests/core", "tests/conftest.py")
    assert [ignored(file, "fast") for file in files] == [None, True, True, None, None]
    assert not any(ignored(file, "full") for file in files)


def test_the_fast_tier_is_without_slow_tests_and_with_one_server() -> None:
    marks = ((), ("slow",), ("server",), ("server", "smoke"), ("gpu",))
    assert [is_slow(FakeItem("tests/test_x.py", *of)) for of in marks] == [False, True, True, False, False]


@pytest.mark.usefixtures("table")
def test_long_files_come_first_and_those_with_servers_between_the_others() -> None:
    files = [("short",), ("serves", "server"), ("serves",), ("long",), ("waits", "server"), ("new",)]
    places = places_of([FakeItem(f"tests/test_{name}.py", *marks) for name, *marks in files])
    assert {path.stem.removeprefix("test_"): place for path, place in places.items()} == {
        "serves": 0.0,
        "new": 0.0,
        "long": 0.0,
        "waits": 40 / 50,
        "short": 30 / 32,
    }


@pytest.mark.usefixtures("table")
def test_files_that_stay_together_come_as_soon_as_one_as_long_as_all_of_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests.conftest.TOGETHER", (("tests/test_short.py", "tests/test_serves.py"),))
    places = places_of([FakeItem(f"tests/test_{name}.py") for name in ("long", "short", "waits", "serves")])
    assert {path.stem.removeprefix("test_"): place for path, place in places.items()} == {
        "serves": 0.0,
        "short": 40 / 82,
        "long": 42 / 82,
        "waits": 72 / 82,
    }


@pytest.mark.usefixtures("table")
def test_a_file_far_above_its_row_is_named_and_others_are_not() -> None:
    seconds = {
        file: (processor, 1.0) for file, processor in [("tests/test_short.py", 13.1), ("tests/test_long.py", 69)]
    }
    assert files_above(seconds, "full") == ["tests/test_short.py: 13.1 s, recorded 1.0"]
    assert [line.partition(":")[0] for line in files_above(seconds, "fast")] == list(seconds)[::-1]
    new = {"tests/test_new.py": (25.1, 1.0), OUTSIDE: (99.0, 0.0)}
    assert files_above(new, "full") == ["tests/test_new.py: 25.1 s, recorded nothing"]


def test_a_slow_machine_is_not_far_above_but_a_file_of_it_may_be(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = {f"tests/test_{index}.py": Row(2.0, 3.0) for index in range(tiers.ENOUGH_FILES)}
    for module in ("tests.tiers", "tests.support.file_times"):
        monkeypatch.setattr(f"{module}.read_table", lambda: rows)
    slow = dict.fromkeys(rows, (17.0, 20.0))
    assert files_above(slow, "full") == []
    slow["tests/test_0.py"] = (8.5 * (3 * 2.0 + 10) - 1, 90.0)
    assert files_above(slow, "full") == []
    slow["tests/test_0.py"] = (8.5 * (3 * 2.0 + 10) + 1, 90.0)
    assert files_above(slow, "full") == ["tests/test_0.py: 137.0 s, recorded 2.0"]
    few = dict(list(slow.items())[1:-1])
    assert len(files_above(few, "full")) == len(few), "too few tell nothing of the machine"
    fast = dict.fromkeys(rows, (0.1, 0.1)) | {"tests/test_0.py": (16.1, 20.0)}
    assert files_above(fast, "full") == ["tests/test_0.py: 16.1 s, recorded 2.0"]


def test_files_that_share_a_browser_are_measured_together() -> None:
    """What one of them took may be read while another one runs."""
    rows = {file: read_table()[file].of("full") or 0.0 for file in ONE_BROWSER}
    most = max(rows, key=lambda file: rows[file])
    all_at_one = {file: (sum(rows.values()) if file == most else 0.0, 1.0) for file in rows}
    assert files_above(all_at_one, "full") == []
    far = 3 * sum(rows.values()) + 11
    (line,) = files_above({**all_at_one, most: (far, 1.0)}, "full")
    assert line == f"{', '.join(ONE_BROWSER)}: {far:.1f} s, recorded {sum(rows.values())}"


def test_processor_time_counts_processes_that_tests_start() -> None:
    """One that has ended, and one that still runs."""
    work = "import time\nwhile time.process_time() < 0.5: pass\n"
    before = processor_seconds()
    subprocess.run([sys.executable, "-c", work], check=True)
    assert processor_seconds() - before > 0.4
    before = processor_seconds()
    with subprocess.Popen(
        [sys.executable, "-c", f"{work}print(flush=True)\ninput()"], stdin=PIPE, stdout=PIPE
    ) as child:
        assert child.stdout is not None
        child.stdout.readline()
        assert processor_seconds() - before > 0.4
        child.communicate(b"\n")


CONFTEST = """
from tests.support import file_times

file_times.is_far_above = lambda seconds, recorded, slower: seconds > 0.2


def pytest_addoption(parser):
    parser.addoption("--strict-times", action="store_true")
    parser.addoption("--file-times")


def pytest_configure(config):
    config.pluginmanager.register(file_times.FileTimes(config, "full"))
"""
BUSY = """
import time


def test_busy():
    end = time.process_time() + 0.4
    while time.process_time() < end:
        pass
"""


def test_a_run_with_a_file_far_above_its_row_fails_and_says_which(tmp_path: Path) -> None:
    """With workers too, whose times come to the process that reports."""
    (tmp_path / "conftest.py").write_text(CONFTEST)
    (tmp_path / "test_busy.py").write_text(BUSY)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--rootdir", str(tmp_path)]
    environ = os.environ | {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}  # most of the time would be their imports
    for options, status in (("-p xdist -n 1 --strict-times", 1), ("--strict-times", 1), ("", 0)):
        done = subprocess.run(
            [*command, *options.split(), str(tmp_path)],
            cwd=ROOT,
            env=environ,
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == status, done.stdout + done.stderr
        assert bool(re.search(r"^test_busy\.py: \d+\.\d s, recorded nothing$", done.stdout, re.MULTILINE)) == bool(
            status
        )


@pytest.mark.parametrize(
    ("node_id", "reason", "allowed"),
    [
        ("tests/server/test_contract.py::test_x", "Triton is not installed", False),
        ("tests/evaluation/test_real_weights.py::test_x", "DFLASH_REAL_WEIGHTS_TARGET is not set", True),
        ("tests/evaluation/test_real_weights.py::test_x", "too slow", False),
        ("tests/gpu/test_engine.py::test_x", "needs an NVIDIA GPU", True),
        ("tests/kernels/test_compiles.py", "this build of Triton cannot compile for NVIDIA GPUs", False),
    ],
)
def test_a_skip_that_is_not_allowed_is_a_failure(node_id: str, reason: str, allowed: bool) -> None:
    assert is_allowed(node_id, reason) == allowed
    report = skipped(node_id, reason)
    refuse_skip(config(strict=True), report)
    assert report.failed != allowed
    assert allowed or reason in report.longreprtext


def test_without_strict_skips_every_skip_is_allowed() -> None:
    report = skipped("tests/server/test_contract.py::test_x", "Triton is not installed")
    refuse_skip(config(strict=False), report)
    assert report.skipped


def test_every_path_that_is_named_exists() -> None:
    for start in (*(start for start, _, _ in ALLOWED), *SPLIT, *itertools.chain(*TOGETHER)):
        assert (ROOT / start.removesuffix("::")).exists(), start


def test_a_scaled_number_is_never_below_what_shows_something(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests.support.scale.SCALE", 0.1)
    assert [scaled(400, at_least=60), scaled(1000), scaled(3, at_least=5)] == [60, 100, 3]
    monkeypatch.setattr("tests.support.scale.SCALE", 2.0)
    assert scaled(400, at_least=60) == 800
