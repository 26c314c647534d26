"""What to install where a package is missing. The project is on no package index: it is installed from a checkout."""

from __future__ import annotations

# What a command needs beside the client, as the extras of the package are called.
EXTRAS = {"openai": "openai"}
OURS = ("dflash_backend", "dflash_cli", "dflash_client", "dflash_kernels", "dflash_openai")


def is_missing_package(error: ModuleNotFoundError) -> bool:
    """Whether it is a package of others that is not installed."""
    return (error.name or "").partition(".")[0] not in ("", *OURS)


def package_missing(error: ImportError, command: str) -> str:
    """The message for a command that needs more than is installed."""
    what = "the OpenAI front end's packages" if command in EXTRAS else "the engine's packages"
    return (
        f"this needs {what} ({error}); in a checkout of dflash-triton run pip install "
        f"'.[{EXTRAS.get(command, 'server')}]', or use make setup and its .venv/bin/dflash-triton"
    )


def engine_missing(error: ImportError) -> str:
    """The message for a command that needs the engine where only the client is installed."""
    return package_missing(error, "")
