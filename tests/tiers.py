"""What each test file costs, and which files `make test-fast` runs: the table `tests/tiers.csv`.

A row has a file's processor seconds and wall seconds in `make test`, and its processor seconds in `make test-fast`
where it is in that tier; `?` stands for what was not measured yet. `python -m tests.tiers FILE...` measures files and
writes their rows; `--fast` puts them into the fast tier, `--slow` takes them out of it. Both targets leave what they
measured in `.venv/times-TIER.csv`, which `--from TIER` writes into the rows of all files. `tests/test_tiers.py` holds
the sums to `BUDGETS`, which is what keeps both tiers short when tests are added.
"""

from __future__ import annotations

import argparse
import csv
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from statistics import median
from typing import Literal, get_args

# These count what is left over in /dev/shm, or leave something there for a while.
ONE_AT_A_TIME = ("tests/server/test_supervision.py", "tests/demo/test_training.py")
# The server tests of `make test-fast`.
SMOKE = ("tests/server/test_generate.py", "tests/server/test_metrics.py")
# These share what takes seconds to start, so one worker runs them: the server of tests/server/conftest.py, a browser,
# a process that has imported torch and that ranks are forks of.
ONE_SERVER = (
    *SMOKE,
    "tests/server/test_bad_requests.py",
    "tests/server/test_cancellation.py",
    "tests/server/test_contract.py",
    "tests/server/test_eval.py",
    "tests/server/test_openai.py",
    "tests/server/test_playground.py",
    "tests/server/test_processes.py",
    "tests/server/test_robustness.py",
    "tests/server/test_tenants.py",
    "tests/server/test_tool_calls.py",
    "tests/server/test_vllm_compatibility.py",
)
ONE_BROWSER = tuple(f"tests/frontend/playground/test_{name}.py" for name in ("access", "chat", "errors", "settings"))
ONE_FORK_SERVER = tuple(f"tests/parallel/test_{name}.py" for name in ("ranks", "remote_ranks", "vocabulary_ranks"))
TOGETHER = (ONE_AT_A_TIME, ONE_SERVER, ONE_BROWSER, ONE_FORK_SERVER)

Tier = Literal["fast", "full"]
ROOT = Path(__file__).parents[1]
TABLE = ROOT / "tests" / "tiers.csv"
COLUMNS = ("file", "seconds", "wall", "fast_seconds")
# Processor seconds of all files of a tier. Two cores give 360 in 3 minutes and 1200 in 10; collecting takes 13 in each
# of four workers, setting up, mypy and the first bytecode about 90, and cores wait now and then. Rows are those of
# quiet cores; when both are busy the same work takes 1.3 times as long.
BUDGETS: dict[Tier, float] = {"fast": 200.0, "full": 620.0}
# No file may have more, since one worker runs it from its first test to its last.
LARGEST_S = 60.0
# A run is far above the table at this, times how much slower than the table's its machine is. The same work takes up to
# twice the processor time where others fill the caches and the second thread of a core, and a file of milliseconds may
# be the one that imports a large module first.
TIMES, MORE_S = 3.0, 10.0
# Files of a second or more that tell how fast a machine is.
ENOUGH_FILES = 20
# What a file is taken to have of which nothing is known.
UNMEASURED_S = 5.0
# `make test-fast` does this share of what is random.
FAST_SCALE = "0.1"


@dataclass(frozen=True)
class Row:
    """Seconds that a file was measured to take, None where it was not."""

    seconds: float | None
    wall: float | None
    is_fast: bool = False
    fast_seconds: float | None = None

    def measured(self, tier: Tier, processor: float, wall: float) -> Row:
        """The row with what a run of this tier took."""
        if tier == "full":
            return replace(self, seconds=processor, wall=wall)
        return replace(self, fast_seconds=processor)

    def of(self, tier: Tier) -> float | None:
        """Processor seconds in a tier."""
        return self.seconds if tier == "full" else self.fast_seconds


def parsed(text: str) -> float | None:
    return None if text in ("", "?") else float(text)


@cache
def read_table() -> dict[str, Row]:
    """The rows by file."""
    with TABLE.open(encoding="utf-8", newline="") as table:
        return {
            row["file"]: Row(
                parsed(row["seconds"]), parsed(row["wall"]), row["fast_seconds"] != "", parsed(row["fast_seconds"])
            )
            for row in csv.DictReader(table)
        }


def write_table(rows: Mapping[str, Row]) -> None:
    """Write the rows of files that exist, in the order of their names, in which changes of several people merge."""

    def printed(seconds: float | None) -> str:
        return "?" if seconds is None else f"{seconds:.1f}"

    with TABLE.open("w", encoding="utf-8", newline="") as table:
        out = csv.writer(table, lineterminator="\n")
        out.writerow(COLUMNS)
        for file, row in sorted(rows.items()):
            if (ROOT / file).exists():
                fast = printed(row.fast_seconds) if row.is_fast else ""
                out.writerow((file, printed(row.seconds), printed(row.wall), fast))
    read_table.cache_clear()


def files_of_tests() -> list[str]:
    """All files of tests, relative to the root."""
    return sorted(path.relative_to(ROOT).as_posix() for path in (ROOT / "tests").rglob("test_*.py"))


def is_far_above(seconds: float, recorded: float | None, slower: float = 1.0) -> bool:
    """Whether a file that took so many processor seconds on a machine `slower` times as slow as the table's is above
    its row by more than runs differ; a file of which nothing is known is taken to have what such a file is counted
    as."""
    return seconds > slower * (TIMES * (UNMEASURED_S if recorded is None else recorded) + MORE_S)


def slower_than_table(times: Mapping[str, float], tier: Tier) -> float:
    """How many times the table's processor seconds this run's files take, the middle one of those of a second or more;
    1 on a faster machine, and where too few ran to tell."""
    table = read_table()
    recorded = {file: row.of(tier) or 0.0 for file, row in table.items()}
    shares = [seconds / recorded[file] for file, seconds in times.items() if recorded.get(file, 0.0) >= 1.0]
    return max(1.0, median(shares)) if len(shares) >= ENOUGH_FILES else 1.0


def total(rows: Mapping[str, Row], tier: Tier) -> float:
    """The sum of a tier's processor seconds."""
    found = [row.of(tier) for row in rows.values() if row.is_fast or tier == "full"]
    return sum(UNMEASURED_S if seconds is None else seconds for seconds in found)


def read_times(path: Path) -> dict[str, tuple[float, float, int]]:
    """Processor and wall seconds by file, and how many of its tests were skipped, as `--file-times` writes them."""
    with path.open(encoding="utf-8", newline="") as table:
        return {
            row["file"]: (float(row["seconds"]), float(row["wall"]), int(row["skipped"]))
            for row in csv.DictReader(table)
        }


def measure(files: Iterable[str], tier: Tier) -> dict[str, tuple[float, float, int]]:
    """Run the files in this tier and return what `read_times` does. Raises `SystemExit` where one fails."""
    with tempfile.TemporaryDirectory() as directory:
        out = Path(directory, "times.csv")
        # As `make test` has it: without bytecode each process that imports torch takes a second more.
        # And as on a fresh machine: kernels that were compiled before take no time.
        environ = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "", "TRITON_CACHE_DIR": directory}
        environ |= {"TEST_SCALE": FAST_SCALE} if tier == "fast" else {}
        command = [sys.executable, "-m", "pytest", "-q", "-n", "1", "-m", "not nightly", f"--tier={tier}"]
        command += [f"--file-times={out}", *files]
        status = subprocess.run(command, cwd=ROOT, env=environ, check=False).returncode
        if status not in (0, 5):  # 5: no test of these is in the tier
            raise SystemExit(f"Nothing is written of the {tier} tier: the tests ended with status {status}.")
        return read_times(out)


def updated(rows: Mapping[str, Row], times: Mapping[str, tuple[float, float, int]], tier: Tier) -> dict[str, Row]:
    """The rows with these times; in the fast tier, of its files alone. A file that skipped tests, as where no browser
    is installed, keeps the larger row of a machine that ran them."""
    changed = dict(rows)
    for file, (processor, wall, skipped) in times.items():
        row = changed.get(file, Row(None, None))
        if skipped and processor < (row.of(tier) or 0.0):
            continue
        if file.startswith("tests/") and (tier == "full" or row.is_fast):
            changed[file] = row.measured(tier, processor, wall)
    return changed


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.tiers", description=__doc__)
    parser.add_argument("files", nargs="*", help="files of tests to measure")
    parser.add_argument("--from", dest="run", choices=get_args(Tier), help="write what the last run of a tier measured")
    choice = parser.add_mutually_exclusive_group()
    choice.add_argument("--fast", action="store_true", help="put the files into the tier of make test-fast")
    choice.add_argument("--slow", action="store_true", help="take them out of it")
    options = parser.parse_args(arguments)
    if bool(options.files) == bool(options.run):
        parser.error("name files to measure, or the tier whose last run to write: --from fast or --from full")
    if unknown := set(options.files) - set(files_of_tests()):
        parser.error(
            f"no such file of tests: {', '.join(sorted(unknown))}; name it from the root, as in tests/test_tiers.py"
        )
    rows = dict(read_table())
    if options.run:
        rows = updated(rows, read_times(ROOT / ".venv" / f"times-{options.run}.csv"), options.run)
    for file in options.files:
        row = rows.get(file, Row(None, None))
        is_fast = not options.slow and (options.fast or row.is_fast)
        rows[file] = replace(row, is_fast=is_fast, fast_seconds=row.fast_seconds if is_fast else None)
    write_table(rows)  # which says what is in the fast tier
    if options.files:
        write_table(updated(read_table(), measure(options.files, "full"), "full"))
        if fast := [file for file in options.files if rows[file].is_fast]:
            write_table(updated(read_table(), measure(fast, "fast"), "fast"))
    for tier in get_args(Tier):
        print(f"{tier}: {total(read_table(), tier):.0f} of {BUDGETS[tier]:.0f} processor seconds")


if __name__ == "__main__":
    main()
