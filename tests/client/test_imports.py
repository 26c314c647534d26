"""The client is light: who only calls a server needs neither torch nor the engine."""

import subprocess
import sys

import pytest

HEAVY = ("torch", "transformers")
ENGINE = (*HEAVY, "msgspec", "zmq", "dflash_backend")


@pytest.mark.parametrize(
    ("module", "unneeded"),
    [("dflash_client", ENGINE), ("dflash_cli.main", ENGINE), ("dflash_cli.launcher.server", HEAVY)],
)
def test_importing_the_client_imports_nothing_of_the_engine(module: str, unneeded: tuple[str, ...]) -> None:
    code = f"import sys, {module}; print([name for name in {unneeded!r} if name in sys.modules])"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert result.stdout.strip() == "[]"
