"""What to install where a package is missing. The project is on no package index: it is installed from a checkout."""

from __future__ import annotations


def engine_missing(error: ImportError) -> str:
    """The message for a command that needs the engine where only the client is installed."""
    return (
        f"this needs the engine's packages ({error}); in a checkout of dflash-triton run pip install '.[server]', or "
        "use make setup and its .venv/bin/dflash-triton"
    )
