"""What to install where a package is missing. The project is on no package index: it is installed from a checkout."""

from __future__ import annotations

OURS = ("dflash_backend", "dflash_cli", "dflash_client", "dflash_kernels", "dflash_openai")


def is_missing_package(error: ImportError) -> bool:
    """Whether it is a package of others that is not installed, or cannot be loaded."""
    return (error.name or "").partition(".")[0] not in OURS


def package_missing(error: ImportError, command: str) -> str:
    """The message for a command that needs more than is installed."""
    what, extra = "the engine's packages", "server"
    if command == "openai":
        what, extra = "the OpenAI front end's packages", "openai"
    return (
        f"this needs {what} ({error}); in a checkout of dflash-triton run pip install '.[{extra}]', or use make setup "
        "and its .venv/bin/dflash-triton"
    )
