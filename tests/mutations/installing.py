"""Defects of the installation of packages."""

from __future__ import annotations

from tests.mutations.mutant import mutants_of

INSTALLING_MUTANTS = (
    *mutants_of(
        "Makefile",
        ("tests/tools/test_install_packages.py",),
        (
            "an environment without pip is kept",
            "$(BIN)/python -m pip --version >/dev/null 2>&1 ||",
            "test -x $(BIN)/python ||",
        ),
        ("a full disk is an index without a CPU build", "'no version of torch|Cannot install torch'", "''"),
    ),
    *mutants_of(
        "tools/install_packages.py",
        ("tests/tools/test_install_packages.py",),
        ("uv is not told of further indexes", '("extra-index-url", "UV_INDEX", " "),', ""),
        ("settings of pip override those of uv", "return {**said, **environ}", "return {**environ, **said}"),
        (
            "what pip has for all overrides the environment",
            "for section in SECTIONS for",
            "for section in SECTIONS[::-1] for",
        ),
        (
            "what uv cannot install is not installed",
            "if install_by_uv(python, arguments):",
            "if install_by_uv(python, arguments) or True:",
        ),
        (
            "that pip failed is not told",
            "check=False).returncode\n\n\nif __name__",
            "check=False).returncode * 0\n\n\nif __name__",
        ),
    ),
)
