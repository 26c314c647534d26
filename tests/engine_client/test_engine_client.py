"""What an engine process is started with."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from dflash_backend.config import EngineConfig
from dflash_backend.engine_client.client import EngineClient, EngineError

TELL = "import json, os, sys; json.dump(dict(os.environ), open(sys.argv[1], 'w'))"


def environment(file: Path) -> dict[str, str]:
    """The variables that an engine process finds."""
    client = EngineClient(EngineConfig.from_values({}), [sys.executable, "-c", TELL, str(file)])
    with pytest.raises(EngineError, match="exit status 0"):
        client.wait_until_ready(lambda message, fraction: None, timeout_s=30)
    found: dict[str, str] = json.loads(file.read_text())
    return found


def test_an_engine_waits_without_spinning(tmp_path: Path) -> None:
    assert environment(tmp_path / "environment")["OMP_WAIT_POLICY"] == "PASSIVE"


@pytest.mark.parametrize(("given", "expected"), [({}, "PASSIVE"), ({"OMP_WAIT_POLICY": "ACTIVE"}, "ACTIVE")])
def test_so_does_an_engine_in_a_process_that_imports_it(given: dict[str, str], expected: str) -> None:
    """torch reads it once, when it is loaded."""
    program = "import sys, os, dflash_backend; print('torch' in sys.modules, os.environ['OMP_WAIT_POLICY'])"
    inherited = {name: value for name, value in os.environ.items() if name != "OMP_WAIT_POLICY"}
    said = subprocess.run([sys.executable, "-c", program], env=inherited | given, capture_output=True, check=True)
    assert said.stdout.decode().split() == ["False", expected]


def test_what_the_operator_says_of_threads_and_allocator_goes_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OMP_WAIT_POLICY", "ACTIVE")
    monkeypatch.setenv("MALLOC_TRIM_THRESHOLD_", "131072")
    monkeypatch.setenv("MALLOC_ARENA_MAX", "2")
    found = environment(tmp_path / "environment")
    assert (found["OMP_WAIT_POLICY"], found["MALLOC_TRIM_THRESHOLD_"]) == ("ACTIVE", "131072")
    assert "MALLOC_ARENA_MAX" not in found  # Triton's
