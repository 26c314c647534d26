"""A decode step stays as short to follow as it was made: what `tools.walk` counts, and the files of its packages."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from dflash_kernels import cpu_ops

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.skipif(not cpu_ops.HAS_CPU_OPS, reason="needs a C++ compiler")
def test_a_decode_step_enters_few_files_functions_and_classes() -> None:
    run = subprocess.run(
        [sys.executable, "-m", "tools.walk", "decode"], cwd=ROOT, capture_output=True, text=True, timeout=120
    )
    assert run.returncode == 0, run.stderr
    found = re.match(r"decode: (\d+) files, (\d+) functions, (\d+) classes", run.stdout)
    assert found, run.stdout
    files, functions, classes = map(int, found.groups())
    assert min(files, functions, classes) > 10, "a step was walked through"
    longer = f"{run.stdout}A decode step came to be longer: python -m tools.walk decode --list tells what it enters."
    assert files <= 17, longer
    assert functions <= 58, longer
    assert classes <= 23, longer


@pytest.mark.parametrize(("package", "most"), [("worker", 15), ("core", 25), ("engine", 12)])
def test_a_package_keeps_to_few_files(package: str, most: int) -> None:
    files = [file.name for file in (ROOT / "dflash_backend" / package).rglob("*.py") if file.name != "__init__.py"]
    assert files
    assert len(files) <= most, f"{package} has {len(files)} files, {most} at most: {sorted(files)}"
