"""The Python files of the repository, by folder."""

from __future__ import annotations

from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SOURCE_FOLDERS = (
    "backends",
    "benchmarks",
    "checks",
    "cli",
    "client",
    "demo",
    "dflash_backend",
    "docker",
    "docs",
    "frontend",
    "kernels",
    "load_tests",
    "model_repository",
    "tools",
)


def python_files(*folders: str) -> list[str]:
    """The paths of all Python files under `folders`, relative to the root."""
    return sorted(str(path.relative_to(ROOT)) for folder in folders for path in (ROOT / folder).rglob("*.py"))
