"""The drafting methods that there are: how a checkpoint of each is recognised and read, and what runs it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from dflash_backend.checkpoints.files import check_files
from dflash_backend.checkpoints.json_reader import JsonReader
from dflash_backend.checkpoints.spec import CheckpointError
from dflash_backend.config import NGRAM
from dflash_backend.drafters.dflash.config import ARCHITECTURE, DFLASH, read_speculators, read_zlab
from dflash_backend.drafters.dflash2 import config as dflash2
from dflash_backend.drafters.dspark import config as dspark
from dflash_backend.drafters.eagle3 import config as eagle3
from dflash_backend.drafters.spec import DraftModelSpec, DraftSpec
from dflash_backend.drafters.speculators import MODEL_TYPE, is_speculators
from dflash_backend.error_text import shown

if TYPE_CHECKING:
    from dflash_backend.drafters.base import Drafter

Read = Callable[[Path, JsonReader, bool | None], DraftModelSpec]
"""Reads a drafter of one format: its directory, its `config.json`, the server's `causal` (None for auto)."""


@dataclass(frozen=True)
class Formats:
    """The formats of a method's checkpoints.

    architectures: any of these names it in `architectures`, in its authors' format: z-lab's, that of DeepSpec or of
    EAGLE. read: for that format. read_speculators: for that of speculators.
    """

    architectures: tuple[str, ...]
    read: Read
    read_speculators: Read


@dataclass(frozen=True)
class Method:
    """A drafting method. drafter: gives its class, and imports torch. formats: None for one without checkpoints."""

    drafter: Callable[[], type[Drafter]]
    formats: Formats | None = None


def _dflash() -> type[Drafter]:
    from dflash_backend.drafters.dflash.drafter import DFlashDrafter

    return DFlashDrafter


def _dflash2() -> type[Drafter]:
    from dflash_backend.drafters.dflash2.drafter import DFlash2Drafter

    return DFlash2Drafter


def _dspark() -> type[Drafter]:
    from dflash_backend.drafters.dspark.drafter import DSparkDrafter

    return DSparkDrafter


def _eagle3() -> type[Drafter]:
    from dflash_backend.drafters.eagle3.drafter import Eagle3Drafter

    return Eagle3Drafter


def _ngram() -> type[Drafter]:
    from dflash_backend.drafters.ngram.drafter import NgramDrafter

    return NgramDrafter


METHODS: Mapping[str, Method] = {
    DFLASH: Method(_dflash, Formats((ARCHITECTURE,), read_zlab, read_speculators)),
    dflash2.DFLASH2: Method(_dflash2, Formats((dflash2.ARCHITECTURE,), dflash2.read_zlab, dflash2.read_speculators)),
    dspark.DSPARK: Method(_dspark, Formats((dspark.ARCHITECTURE,), dspark.read_deepspec, dspark.read_speculators)),
    eagle3.EAGLE3: Method(_eagle3, Formats(eagle3.ARCHITECTURES, eagle3.read_eagle3, eagle3.read_speculators)),
    NGRAM: Method(_ngram),
}
"""By the names that vLLM's `method` and, for those with checkpoints, `speculators_model_type` have for them."""


def _formats() -> dict[str, Formats]:
    """The formats of each method that has checkpoints."""
    return {name: method.formats for name, method in METHODS.items() if method.formats is not None}


def _names(formats: Formats, architectures: Sequence[str]) -> bool:
    """Whether a config's `architectures` names a method, in its authors' format."""
    return not set(formats.architectures).isdisjoint(architectures)


def is_drafter(directory: Path) -> bool:
    """Whether a directory holds a drafter of a known format or a model of the speculators library."""
    config = JsonReader.load(directory / "config.json")
    architectures = config.strings("architectures")
    return is_speculators(config) or any(_names(each, architectures) for each in _formats().values())


def read_draft(directory: Path, causal: bool | None = None) -> DraftModelSpec:
    """Read a drafter of any method and format. `causal` is the server's setting, None for auto. Raises
    `CheckpointError`."""
    check_files(directory)
    return _read(directory, JsonReader.load(directory / "config.json"), causal)


def read_draft_config(file: Path) -> DraftModelSpec:
    """Read a drafter's config alone, without weights: to be described, not to be run. Raises `CheckpointError`."""
    return _read(file, JsonReader.load(file), None)


def _read(path: Path, config: JsonReader, causal: bool | None) -> DraftModelSpec:
    by_method = _formats()
    names = ", ".join(f"'{name}'" for name in by_method)
    if is_speculators(config):
        formats = by_method.get(config.string(MODEL_TYPE))
        if formats is None:
            raise config.fail(MODEL_TYPE, f"{names}: drafters of other methods are not supported")
        return formats.read_speculators(path, config, causal)
    architectures = config.strings("architectures")
    for formats in by_method.values():
        if _names(formats, architectures):
            return formats.read(path, config, causal)
    known = ", ".join(f"'{formats.architectures[0]}'" for formats in by_method.values())
    code = "; the code that the checkpoint brings along (auto_map) is not run" if config.given("auto_map") else ""
    raise CheckpointError(
        f"{config.where}: architectures is {shown(list(architectures))}; a drafter in its authors' format has "
        f"{known}, one of speculators has {MODEL_TYPE} {names}{code}"
    )


def drafter_class(spec: DraftSpec) -> type[Drafter]:
    """What runs the drafter of `spec`."""
    return METHODS[spec.method].drafter()
