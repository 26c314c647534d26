"""Entry point of `make bench-gpu`."""

from __future__ import annotations

import sys

from benchmarks.gpu.run import main

if __name__ == "__main__":
    sys.exit(main())
