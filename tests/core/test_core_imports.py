"""The core plans with numbers: importing it must not bring in a model or a device. It reckons with numpy, since a step
of 256 rows has 3,840 drafts whose chances count."""

from __future__ import annotations

import pkgutil
import subprocess
import sys

import dflash_backend.core


def test_no_core_module_imports_torch() -> None:
    modules = [f"dflash_backend.core.{module.name}" for module in pkgutil.iter_modules(dflash_backend.core.__path__)]
    assert "dflash_backend.core.engine" in modules
    heavy = "{'torch', 'transformers', 'tokenizers', 'safetensors', 'zmq'}"
    script = f"import sys, {', '.join(modules)}; print(sorted({heavy} & sys.modules.keys()))"
    loaded = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=60)
    assert loaded.stdout.strip() == "[]"
