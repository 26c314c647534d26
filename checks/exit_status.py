"""What a check ends with."""

from __future__ import annotations

# A package or program that it needs is not installed: it has shown nothing.
SKIPPED = 77
