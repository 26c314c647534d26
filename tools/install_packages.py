"""Installs packages as `pip install` would, by uv where it can: `python tools/install_packages.py PYTHON ARGUMENT ...`.

PYTHON is that of the environment to install into; the arguments are pip's, of those that uv has too. uv takes a third
of pip's time, and a tenth where it has fetched the packages before. It does not read pip's settings, so it is given
them: indexes, folders of wheels, constraints, certificates. Where uv cannot be had, or cannot install what pip perhaps
can, pip does it. The exit status is that of the one that came last. Standard library alone: it runs before anything is
installed.
"""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

UV = "uv==0.13.9"
# An option of pip, the variable that says the same to uv, and what stands between several values.
VARIABLES = (
    ("index-url", "UV_DEFAULT_INDEX", " "),
    ("extra-index-url", "UV_INDEX", " "),
    ("find-links", "UV_FIND_LINKS", ","),
    ("constraint", "UV_CONSTRAINT", " "),
    ("trusted-host", "UV_INSECURE_HOST", " "),
    ("cert", "SSL_CERT_FILE", " "),
)
# As in pip: a later one overrides an earlier one.
SECTIONS = ("global", "install", ":env:")


def pip_options(listing: str) -> dict[str, str]:
    """What pip is set to, by option, from the lines of `pip config list`, such as `global.index-url='https://...'`."""
    found: dict[str, dict[str, str]] = {section: {} for section in SECTIONS}
    for line in listing.splitlines():
        name, _, value = line.partition("=")
        section, _, option = name.rpartition(".")
        if section in found:
            found[section][option] = str(ast.literal_eval(value))
    return {option: value for section in SECTIONS for option, value in found[section].items()}


def uv_environ(options: Mapping[str, str], environ: Mapping[str, str]) -> dict[str, str]:
    """`environ` with what pip's `options` say to uv; a variable of uv's own that is there stays as it is."""
    said = {variable: joint.join(options[name].split()) for name, variable, joint in VARIABLES if options.get(name)}
    if options.get("no-index", "").lower() in ("1", "true", "yes", "on"):
        said["UV_NO_INDEX"] = "1"
    return {**said, **environ}


def pip_command(python: str) -> list[str]:
    """pip in the environment of this Python."""
    return [python, "-m", "pip", "--disable-pip-version-check"]


def install_by_uv(python: str, arguments: list[str]) -> bool:
    """Whether uv has installed it. It says why not."""
    pip = pip_command(python)
    uv = Path(python).parent / "uv"
    if not uv.exists() and subprocess.run([*pip, "install", "-q", "--no-compile", UV], check=False).returncode:
        return False
    listing = subprocess.run([*pip, "config", "list"], capture_output=True, text=True, check=False).stdout
    # Of all indexes the best version, as pip takes it.
    command = [str(uv), "pip", "install", "-q", "--index-strategy", "unsafe-best-match", "--python", python, *arguments]
    return subprocess.run(command, env=uv_environ(pip_options(listing), os.environ), check=False).returncode == 0


def main(python: str, arguments: list[str]) -> int:
    """Entry point."""
    if install_by_uv(python, arguments):
        return 0
    # Python compiles what is imported, once; to compile all that is installed would take a third of the set-up.
    return subprocess.run([*pip_command(python), "install", "-q", "--no-compile", *arguments], check=False).returncode


if __name__ == "__main__":
    if len(sys.argv) < 3:
        sys.exit(__doc__)
    sys.exit(main(sys.argv[1], sys.argv[2:]))
