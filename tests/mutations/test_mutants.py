"""The table of mutants fits the source, and the first few of them are killed; `make mutants` tries them all."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.mutations.forked_pytest import run_pytest
from tests.mutations.mutant import Mutant, occurrences
from tests.mutations.mutants import MUTANTS, SMOKE
from tests.mutations.run import (
    COPIED,
    ROOT,
    TIMEOUT_S,
    MutantError,
    allowed_s,
    check_compiles,
    make_copy,
    mutate,
    run,
    try_mutant,
    word_of,
)

# Compiling takes most of the time of applying: one in so many here, and each that the runner tries.
COMPILED = 10
BY_NAME = {mutant.name: mutant for mutant in MUTANTS}


def test_every_mutant_applies_to_the_source_and_names_tests_that_exist() -> None:
    wrong: list[str] = []
    for number, mutant in enumerate(MUTANTS):
        try:
            texts = mutate(mutant, ROOT)
            assert all(text != (ROOT / file).read_text() for file, text in texts.items())
            if number % COMPILED == 0:
                check_compiles(mutant, texts)
        except MutantError as error:
            wrong.append(str(error))
        for test in mutant.tests:
            file, _, function = test.partition("::")
            if not (ROOT / file).is_file() or (function and f"def {function}(" not in (ROOT / file).read_text()):
                wrong.append(f"mutant '{mutant.name}': there is no test {test}")
    assert wrong == []


def test_names_tell_mutants_apart() -> None:
    assert len(BY_NAME) == len(MUTANTS) >= 115
    assert len(SMOKE) == len(set(SMOKE)) >= 15


def test_the_mutants_are_of_every_package() -> None:
    packages = {"core", "worker", "drafters", "models", "attention", "text", "triton", "engine"}
    files = [file for mutant in MUTANTS for file, _, _ in mutant.edits]
    assert packages <= {file.split("/")[1] for file in files if file.startswith("dflash_backend/")}
    folders = {
        "dflash_backend",
        "kernels",
        "client",
        "cli",
        "frontend",
        "benchmarks",
        "checks",
        "load_tests",
        "tools",
        "docker",
        "deploy",
        "Makefile",
    }
    assert folders == {file.split("/")[0] for file in files}


def test_every_mutated_file_is_in_the_copy() -> None:
    """Else the defect would be put into the project's own file, or into none."""
    files = {file for mutant in MUTANTS for file, _, _ in mutant.edits}
    assert {file for file in files if file.split("/")[0] not in COPIED} == set()


def test_a_text_is_found_in_another_line_break_but_not_in_other_words() -> None:
    assert occurrences("x = f(a,\n      b)\n", "f(a, b)") == [(4, 17)]
    assert occurrences("f(a, b); f(a, b)", "f(a, b)") == [(0, 7), (9, 16)]
    assert occurrences("f(a, c)", "f(a, b)") == []
    assert occurrences("    a\n        b\n", "    a\n    b\n") == []


def test_a_mutant_that_is_no_python_is_an_error_and_not_killed() -> None:
    broken = Mutant("broken", "dflash_backend/core/plan.py", "from __future__ import annotations", "from (", ())
    with pytest.raises(MutantError, match="'broken' does not compile: invalid syntax"):
        run([broken], jobs=1)


def test_a_text_that_is_gone_is_an_error_that_says_where() -> None:
    gone = Mutant("gone", "dflash_backend/core/plan.py", "no such text", "", ())
    with pytest.raises(MutantError, match=r"'gone': its text occurs 0 times in dflash_backend/core/plan.py"):
        mutate(gone, ROOT)


def test_a_mutant_may_take_some_times_as_long_as_its_tests_do_without_it() -> None:
    mutant = Mutant("slow", "a.py", "a", "b", ("tests/test_a.py::test_it", "tests/test_b.py"))
    assert allowed_s(mutant, {"tests/test_a.py": 2.0, "tests/test_b.py": 1.0}) == 30 + 5 * 3
    assert allowed_s(mutant, {"tests/test_a.py::test_it": 0.5, "tests/test_b.py": 1.0}) == 30 + 5 * 1.5
    assert allowed_s(mutant, {"tests/test_a.py": 2.0, "tests/test_b.py": 1000.0}) == TIMEOUT_S


@pytest.fixture(scope="module")
def source_copy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("source")
    make_copy(folder)
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("name", SMOKE)
def test_the_tests_notice(name: str, source_copy: Path) -> None:
    assert try_mutant(BY_NAME[name], TIMEOUT_S, source_copy).killed


@pytest.mark.slow
@pytest.mark.parametrize(
    ("body", "status", "printed"),
    [
        ("assert 1 + 1 == 2", 0, "1 passed"),
        ("assert 1 + 1 == 3", 1, "1 failed"),
        ("import os; os.kill(os.getpid(), 11)", -11, ""),
        ("import time; time.sleep(60)", None, ""),
        ("from multiprocessing.util import Finalize as F; F(None, __import__('os').abort, exitpriority=1)", 0, ""),
    ],
)
def test_how_tests_ended_is_told(body: str, status: int | None, printed: str, tmp_path: Path) -> None:
    (tmp_path / "test_it.py").write_text(f"def test_it():\n    {body}\n")
    found, output = run_pytest(tmp_path, ["-q", "-p", "no:cacheprovider", "test_it.py"], 4)
    assert found == status
    assert printed in output


@pytest.mark.slow
def test_a_change_that_does_no_harm_survives(source_copy: Path) -> None:
    harmless = Mutant(
        "harmless",
        "dflash_backend/core/kv/block_pool.py",
        "self._num_blocks = num_blocks",
        "self._num_blocks = num_blocks  # as before",
        ("tests/core/test_prefix_cache.py",),
    )
    assert try_mutant(harmless, TIMEOUT_S, source_copy).word == "SURVIVED"


@pytest.mark.parametrize(
    ("status", "output", "word"),
    [
        (0, "3 passed, 2 skipped in 1.20s", "SURVIVED"),
        (0, "16 skipped in 0.53s", "skipped"),
        (1, "1 failed, 3 passed in 1.20s", "killed"),
        (-11, "", "crashed"),
        (None, "", "timed out"),
    ],
)
def test_a_mutant_whose_tests_are_all_skipped_is_not_said_to_survive(
    status: int | None, output: str, word: str
) -> None:
    assert word_of(status, output) == word
