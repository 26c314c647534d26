"""The client is light: who only calls a server needs neither torch nor the engine."""

import subprocess
import sys

import pytest

HEAVY = ("torch", "transformers", "msgspec", "zmq", "dflash_backend")


@pytest.mark.parametrize("module", ["dflash_client", "dflash_cli.main"])
def test_importing_the_client_imports_nothing_of_the_engine(module: str) -> None:
    code = f"import sys, {module}; print([name for name in {HEAVY!r} if name in sys.modules])"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert result.stdout.strip() == "[]"


def test_importing_the_launcher_does_not_import_torch() -> None:
    code = "import sys, dflash_cli.launcher.server; print([n for n in ('torch', 'transformers') if n in sys.modules])"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert result.stdout.strip() == "[]"
