"""The version of the installed package."""

from __future__ import annotations


def package_version() -> str:
    """As `pip` knows it."""
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version("dflash-triton")
    except PackageNotFoundError:
        return "of a checkout that is not installed"
