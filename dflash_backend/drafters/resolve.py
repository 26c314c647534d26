"""From settings to a pair of specs: where the models lie, and whether they belong together."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from dflash_backend.checkpoints.files import check_files
from dflash_backend.checkpoints.find import find_model
from dflash_backend.checkpoints.hub import Report
from dflash_backend.checkpoints.json_reader import JsonReader
from dflash_backend.checkpoints.named import NAMED
from dflash_backend.checkpoints.spec import CheckpointError, TargetSpec
from dflash_backend.checkpoints.targets import read_target
from dflash_backend.config import NGRAM, EngineConfig, asset_path
from dflash_backend.drafters.ngram.config import NgramSpec, read_lookup_beside, read_ngram, refuse_lookup
from dflash_backend.drafters.pairing import check_pair
from dflash_backend.drafters.published import published_for
from dflash_backend.drafters.registry import is_drafter, read_draft
from dflash_backend.drafters.spec import DraftModelSpec, DraftSpec
from dflash_backend.drafters.speculators import is_speculators, verifier_name


@dataclass(frozen=True)
class ModelPair:
    """A target and, when there is speculation, its drafter. lookup: what is looked up beside a drafter that is a model.
    warning: for the log."""

    target: TargetSpec
    draft: DraftSpec | None
    num_speculative_tokens: int
    warning: str | None = None
    lookup: NgramSpec | None = None

    @property
    def draft_model(self) -> DraftModelSpec | None:
        """The drafter where it is a model, which has weights, KV and attention of its own."""
        return self.draft if isinstance(self.draft, DraftModelSpec) else None

    @property
    def drafting(self) -> str:
        """What drafts, in words."""
        if self.draft is None:
            return "no speculation"
        beside = "" if self.lookup is None else f", beside prompt lookup of {self.lookup.lengths}"
        return f"{self.draft.summary(self.num_speculative_tokens)}{beside}"

    @property
    def checkpoints(self) -> tuple[Path, ...]:
        """The directories of the models."""
        return (self.target.path,) if self.draft_model is None else (self.target.path, self.draft_model.path)


@dataclass(frozen=True)
class ModelDirs:
    """Where the models of a configuration lie. `warning` is for the log."""

    target: Path
    draft: Path | None
    warning: str | None = None


def resolve_target_dir(config: EngineConfig, report: Report | None = None) -> Path:
    """The directory of the target and its tokenizer; both models are there then. `report` gets lines on a download.
    Raises `CheckpointError`."""
    return resolve_dirs(config, report).target


def resolve_pair(config: EngineConfig) -> ModelPair:
    """Read what the settings name, both checkpoints or the target's alone, and check that it fits. Raises
    `CheckpointError`, and `ConfigError` for settings that contradict each other."""
    dirs, wanted = resolve_dirs(config), config.num_speculative_tokens
    target = read_target(dirs.target, config.target_rope)
    if config.draft_model == NGRAM:
        ngram = read_ngram(config)
        k = ngram.num_speculative_tokens if wanted is None else wanted
        return ModelPair(target, ngram if k else None, k, dirs.warning)
    if dirs.draft is None:
        refuse_lookup(config)
        if wanted:
            raise CheckpointError(f"num_speculative_tokens is {wanted} but there is no drafter; set draft_model")
        return ModelPair(target, None, 0, dirs.warning)
    draft = read_draft(dirs.draft, config.causal).for_target(target)
    check_pair(target, draft)
    if wanted is not None and wanted > draft.max_speculative_tokens:
        raise CheckpointError(f"num_speculative_tokens is {wanted}; the drafter in {draft.path} {draft.limit_in_words}")
    k = draft.num_speculative_tokens if wanted is None else wanted
    return ModelPair(target, draft if k else None, k, dirs.warning, read_lookup_beside(config) if k else None)


def find_drafter(name: str, setting: str, revision: str = "", report: Report | None = None) -> Path:
    """As `find_model`; a name of `NAMED` is the drafter for that model that comes with the project."""
    if name not in NAMED or revision:
        return find_model(name, setting, revision, report)
    return asset_path(*NAMED[name].drafter)


def resolve_dirs(config: EngineConfig, report: Report | None = None) -> ModelDirs:
    """Find both models. Raises `CheckpointError`.

    A speculators drafter names its target: given as `target_model`, or as `draft_model` with `target_model` unset, it
    is enough. A target that is set by hand wins over the one that the drafter names. `report` gets lines on a download.
    """
    if config.target_model:
        directory = find_model(config.target_model, "target_model", config.target_revision, report)
        if not is_drafter(directory):
            return _with_target(config, directory, report)
        if config.draft_model in ("", NGRAM):
            return ModelDirs(verifier_dir(directory, report=report), None)
        if config.draft_model:
            raise CheckpointError(
                f"target_model is '{config.target_model}', which is a drafter, and draft_model is "
                f"'{config.draft_model}'; set target_model to the target, or leave draft_model unset"
            )
        return ModelDirs(verifier_dir(directory, report=report), directory)
    if config.draft_model and config.draft_model != NGRAM:
        directory = find_drafter(config.draft_model, "draft_model", config.draft_revision, report)
        own = JsonReader.load(directory / "config.json")
        if is_speculators(own) and verifier_name(own) is not None:
            return ModelDirs(verifier_dir(directory, config.target_revision, report), directory)
        return ModelDirs(asset_path("demo", "pair", "target"), directory)
    target = asset_path("demo", "pair", "target")
    return ModelDirs(target, asset_path("demo", "pair", "draft") if config.draft_model is None else None)


def _with_target(config: EngineConfig, target: Path, report: Report | None) -> ModelDirs:
    if config.draft_model in ("", NGRAM):
        return ModelDirs(target, None)
    if config.draft_model:
        return ModelDirs(target, find_drafter(config.draft_model, "draft_model", config.draft_revision, report))
    warning = f"no draft_model is set for {config.target_model}: it is served without speculation"
    names = [each.name for each in published_for(config.target_model, target)]
    known = f"; published for it: {', '.join(names)}" if names else ""
    return ModelDirs(target, None, f"{warning}{known} (draft_model={NGRAM} needs no drafter)")


def verifier_dir(directory: Path, revision: str = "", report: Report | None = None) -> Path:
    """The target that the drafter in `directory` was made for: an absolute directory, one relative to the drafter's
    own, or a hub id, of which `revision` is taken. Raises `CheckpointError`."""
    config = JsonReader.load(directory / "config.json")
    name = verifier_name(config) if is_speculators(config) else None
    where = f"{config.where}: speculators_config.verifier.name_or_path"
    if name is None:
        raise CheckpointError(f"{where} is missing, so the drafter does not say its target; set target_model")
    if "\0" not in name and (directory / name).is_dir():
        found = (directory / name).resolve()
        if found == directory.resolve():
            raise CheckpointError(f"{where} is '{name}', the drafter itself; set target_model to its target")
        check_files(found)
        return found
    return find_model(name, where, revision, report)
