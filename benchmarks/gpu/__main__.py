"""Entry point of `make bench-gpu`: looks for the packages that it takes before anything that needs them is imported."""

from __future__ import annotations

import importlib.util
import sys

# What the engine imports besides torch and numpy.
ENGINE_PACKAGES = ("msgspec", "safetensors", "llguidance", "tokenizers")


def main() -> int:
    """Run the benchmark; 1 when a package is missing."""
    missing = [name for name in ENGINE_PACKAGES if importlib.util.find_spec(name) is None]
    if missing:
        print(
            f"the engine needs {' and '.join(missing)}, which {sys.executable} does not have: install what is missing, "
            "or fetch it with `make gpu-packages` where there is a package index and bring it along in .gpu-packages",
            file=sys.stderr,
        )
        return 1
    from benchmarks.gpu.run import main as run

    return run()


if __name__ == "__main__":
    sys.exit(main())
