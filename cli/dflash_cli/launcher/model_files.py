"""The model repository that a server of ours gets: a copy of the project's, with names and settings in it."""

from __future__ import annotations

import importlib.util
import json
import re
import shutil
from collections.abc import Mapping
from pathlib import Path

from dflash_cli.launcher.triton_install import LauncherError

# Packages that the model imports in Triton's stub.
MODEL_PACKAGES = ("dflash_backend", "dflash_kernels")


def copy_model(repository: Path, destination: Path) -> None:
    """Copy the one model of a repository under its new name, with links to the packages that it imports.

    The embedded stub ignores PYTHONPATH, but the folder of `model.py` is on its path; the links come last there, so
    installed packages win. Raises `LauncherError` when the repository does not hold one model.
    """
    models = [path for path in repository.iterdir() if (path / "config.pbtxt").is_file()]
    if len(models) != 1:
        raise LauncherError(f"{repository} holds {len(models)} models with a config.pbtxt; it must hold one")
    shutil.copytree(models[0], destination, ignore=shutil.ignore_patterns("__pycache__"))
    config = destination / "config.pbtxt"
    # Without a name Triton takes the folder's.
    text = re.sub(r'(?m)^\s*name\s*:\s*"[^"]*"\s*$', "", config.read_text(encoding="utf-8"), count=1)
    config.write_text(text, encoding="utf-8")
    for package in MODEL_PACKAGES:
        spec = importlib.util.find_spec(package)
        if spec is not None and spec.submodule_search_locations:
            (destination / "1" / package).symlink_to(next(iter(spec.submodule_search_locations)))


def adapt(config: Path, settings: Mapping[str, str], instances: int) -> None:
    """Write settings, which were checked, and the number of instances into a model's config.pbtxt. Raises
    `LauncherError` when it has no place for the number."""
    text = config.read_text(encoding="utf-8")
    for name, value in settings.items():
        text = re.sub(rf'(?m)^parameters\s*{{\s*key:\s*"{re.escape(name)}".*\n?', "", text)
        text += f'\nparameters {{ key: "{name}" value {{ string_value: {json.dumps(value)} }} }}'
    if instances != 1:
        text, found = re.subn(r"(instance_group\s*\[\s*{\s*count:\s*)\d+", rf"\g<1>{instances}", text, count=1)
        if not found:
            raise LauncherError(f"{config.parent.name}/config.pbtxt has no instance_group with a count to change")
    config.write_text(text, encoding="utf-8")
