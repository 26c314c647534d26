"""Apply each mutant to a copy of the source, run the tests that should notice, and list who was killed.

`python -m tests.mutations.run` (or `make mutants`) runs all, `--only WORDS [WORDS ...]` those whose name has one of
these in it. Exits 1 when a mutant survives, when its text is not in the source exactly once, or when the tests fail
without any mutant. Where a machine lacks what all tests of a mutant need, such as a browser, it says that none of them
ran: the mutant is not tried.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from typing import TypeVar

from tests.mutations.forked_pytest import run_pytest
from tests.mutations.mutant import Mutant, occurrences
from tests.mutations.mutants import MUTANTS

ROOT = Path(__file__).resolve().parents[2]
COPIED = (
    "dflash_backend",
    "kernels",
    "client",
    "cli",
    "frontend",
    "tests",
    "benchmarks",
    "checks",
    "load_tests",
    "tools",
    "docker",
    "deploy",
    "Makefile",
    "pyproject.toml",
    ".dockerignore",
    "README.md",
    "LICENSE",
    "constraints-cpu.txt",
)
LINKED = ("demo", "model_repository", "backends", "docs")  # large, and no mutant touches them
TIMEOUT_S = 240
BASELINE_TIMEOUT_S = 1200  # all tests of a file, none of which stops the run
PYTEST_FAILED = 1  # pytest's exit status when tests ran and some failed; below 0 when a signal ended it


T = TypeVar("T")


class MutantError(Exception):
    """A mutant cannot be applied, or the tests do not pass without it. The message says what to do."""


@dataclass(frozen=True)
class Verdict:
    """What became of a mutant. `word` is killed, crashed or timed out, which the tests noticed, SURVIVED, or skipped:
    each of its tests was."""

    mutant: Mutant
    word: str
    seconds: float

    @property
    def killed(self) -> bool:
        """Whether the tests noticed."""
        return self.word not in ("SURVIVED", "skipped")


def mutate(mutant: Mutant, root: Path) -> dict[str, str]:
    """The text of each file of the mutant, under `root`, with the defect in it. Raises MutantError when it does not
    apply."""
    texts: dict[str, str] = {}
    for file, before, after in mutant.edits:
        text = texts.get(file) or (root / file).read_text()
        found = occurrences(text, before)
        if len(found) != 1:
            raise MutantError(
                f"mutant '{mutant.name}': its text occurs {len(found)} times in {file} and must occur once; bring "
                f"tests/mutations in step with the source: {before!r}"
            )
        ((start, end),) = found
        texts[file] = text[:start] + after + text[end:]
    return texts


def check_compiles(mutant: Mutant, texts: Mapping[str, str]) -> None:
    """Raises MutantError where a file of the mutant is no Python any more: any test would notice that."""
    for file, text in texts.items():
        try:
            if file.endswith(".py"):
                compile(text, file, "exec")
        except SyntaxError as error:
            raise MutantError(f"mutant '{mutant.name}' does not compile: {error}") from error


def make_copy(folder: Path) -> None:
    """Copy what the tests need into `folder`: with its bytecode, which fits a file until a mutant changes its time."""
    ignore = shutil.ignore_patterns(".hypothesis", "_assets")
    for name in COPIED:
        source = ROOT / name
        if source.is_dir():
            shutil.copytree(source, folder / name, ignore=ignore)
        else:
            shutil.copy(source, folder / name)
    for name in LINKED:
        (folder / name).symlink_to(ROOT / name)


def run_tests(folder: Path, tests: Sequence[str], timeout_s: float) -> tuple[int | None, str]:
    """pytest's exit status for `tests` in the copy, None when they took too long, and the end of what it printed. It
    stops at the first failure."""
    status, output = run_pytest(folder, ["-x", "-q", "-p", "no:cacheprovider", *tests], timeout_s)
    if status is None:
        return None, f"not done after {timeout_s:g} s"
    if status > PYTEST_FAILED:
        raise MutantError(f"pytest {' '.join(tests)} could not run, status {status}:\n{output[-3000:]}")
    return status, output[-3000:]


def try_mutant(mutant: Mutant, timeout_s: float, folder: Path) -> Verdict:
    """Put the defect into the copy, run its tests, and put the file back."""
    mutated = mutate(mutant, folder)
    originals = {file: (folder / file).read_text() for file in mutated}
    started = time.monotonic()
    try:
        for file, text in mutated.items():
            (folder / file).write_text(text)
        status, output = run_tests(folder, mutant.tests, timeout_s)
    finally:
        for file, text in originals.items():
            (folder / file).write_text(text)
    return Verdict(mutant, word_of(status, output), time.monotonic() - started)


def word_of(status: int | None, output: str) -> str:
    """`Verdict.word`, by pytest's exit status, None where it took too long, and what it printed."""
    if status is None:
        return "timed out"
    if status == 0:
        return "SURVIVED" if re.search(r"\d passed", output) else "skipped"
    return "killed" if status == PYTEST_FAILED else "crashed"


def why_not(test: str, folder: Path) -> str:
    """What pytest printed where `test` fails in the copy as it is, else nothing. Its failure would show nothing."""
    status, output = run_tests(folder, [test], BASELINE_TIMEOUT_S)
    return "" if status == 0 else f"{test} fails without any mutant, so it can show nothing:\n{output}"


def allowed_s(mutant: Mutant, seconds: Mapping[str, float]) -> float:
    """How long the tests of a mutant may take, by how long each test, or the whole file that it is in, takes without:
    one that waits for ever is not to keep a job for minutes."""
    usual = sum(seconds.get(test) or seconds[test.partition("::")[0]] for test in mutant.tests)
    return min(TIMEOUT_S, 30 + 5 * usual)


def tests_of(mutants: Sequence[Mutant]) -> list[str]:
    """The tests of `mutants`, each once: none beside the whole file that it is in."""
    tests = {test for mutant in mutants for test in mutant.tests}
    return sorted(test for test in tests if "::" not in test or test.partition("::")[0] not in tests)


def run(mutants: Sequence[Mutant], jobs: int) -> list[Verdict]:
    """Try all mutants, `jobs` at a time, each job in a copy of its own; prints a line each."""
    for mutant in mutants:
        check_compiles(mutant, mutate(mutant, ROOT))
    with tempfile.TemporaryDirectory(prefix="dflash-mutants-") as name:
        copies: SimpleQueue[Path] = SimpleQueue()
        folders = [Path(name, str(job)) for job in range(jobs)]
        for folder in folders:
            folder.mkdir()
            make_copy(folder)
            copies.put(folder)

        def in_a_copy(work: Callable[[Path], T]) -> T:
            folder = copies.get()
            try:
                return work(folder)
            finally:
                copies.put(folder)

        def attempt(mutant: Mutant) -> Verdict:
            verdict = in_a_copy(partial(try_mutant, mutant, allowed_s(mutant, seconds)))
            print(f"{verdict.word:9} {verdict.seconds:5.1f} s  {mutant.name}", flush=True)
            return verdict

        seconds: dict[str, float] = {}

        def check(test: str) -> str:
            started = time.monotonic()
            why = in_a_copy(partial(why_not, test))
            seconds[test] = time.monotonic() - started
            return why

        with ThreadPoolExecutor(jobs) as pool:
            try:
                # A file at a time, and the next to whichever job is free.
                if failed := [why for why in pool.map(check, tests_of(mutants)) if why]:
                    raise MutantError("\n".join(failed))
                return list(pool.map(attempt, mutants))
            finally:
                pool.shutdown(cancel_futures=True)


def main() -> None:
    """Entry point."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--only", default=[""], nargs="+", metavar="WORDS", help="run the mutants whose name contains one of these"
    )
    parser.add_argument("--jobs", type=int, default=min(4, os.cpu_count() or 1), help="mutants at a time")
    arguments = parser.parse_args()
    mutants = [mutant for mutant in MUTANTS if any(words in mutant.name for words in arguments.only)]
    for words in arguments.only:
        if not any(words in mutant.name for mutant in mutants):
            parser.error(f"no mutant's name contains '{words}'")
    try:
        verdicts = run(mutants, max(1, arguments.jobs))
    except MutantError as error:
        sys.exit(str(error))
    killed, skipped = (
        sum(verdict.killed for verdict in verdicts),
        sum(verdict.word == "skipped" for verdict in verdicts),
    )
    unseen = f"; none of the tests of {skipped} ran here" if skipped else ""
    print(f"{killed} of {len(verdicts)} mutants killed{unseen}")
    sys.exit(killed + skipped < len(verdicts))


if __name__ == "__main__":
    main()
