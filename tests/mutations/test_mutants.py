"""The table of mutants fits the source, and the first few of them are killed; `make mutants` tries them all."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.mutations.mutants import MUTANTS, SMOKE, Mutant
from tests.mutations.run import ROOT, MutantError, make_copy, mutate, try_mutant

BY_NAME = {mutant.name: mutant for mutant in MUTANTS}


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_every_mutant_applies_to_the_source_and_names_tests_that_exist(mutant: Mutant) -> None:
    assert mutate(mutant, ROOT) != (ROOT / mutant.file).read_text()
    compile(mutate(mutant, ROOT), mutant.file, "exec")
    assert all((ROOT / test).is_file() for test in mutant.tests)


def test_names_tell_mutants_apart() -> None:
    assert len(BY_NAME) == len(MUTANTS) >= 20


def test_a_text_that_is_gone_is_an_error_that_says_where() -> None:
    gone = Mutant("gone", "dflash_backend/core/plan.py", "no such text", "", ())
    with pytest.raises(MutantError, match=r"'gone': its text occurs 0 times in dflash_backend/core/plan.py"):
        mutate(gone, ROOT)


@pytest.fixture(scope="module")
def source_copy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("source")
    make_copy(folder)
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("name", SMOKE)
def test_the_tests_notice(name: str, source_copy: Path) -> None:
    assert try_mutant(BY_NAME[name], source_copy).killed


@pytest.mark.slow
def test_a_change_that_does_no_harm_survives(source_copy: Path) -> None:
    harmless = Mutant(
        "harmless",
        "dflash_backend/core/block_lists.py",
        "self._num_blocks = num_blocks",
        "self._num_blocks = num_blocks  # as before",
        ("tests/core/test_prefix_cache.py",),
    )
    assert not try_mutant(harmless, source_copy).killed
