"""A DFlash2 drafter's config: that of DFlash, and the fields of its convolutions and of its candidate selector."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from dflash_backend.checkpoints.describe import Facts
from dflash_backend.checkpoints.json_reader import JsonReader
from dflash_backend.drafters.dflash.config import DFlashSpec
from dflash_backend.drafters.dflash.config import read_speculators as read_dflash_speculators
from dflash_backend.drafters.dflash.config import read_zlab as read_dflash_zlab
from dflash_backend.drafters.fields import missing_fields, tensor_headers

DFLASH2 = "dflash2"
ARCHITECTURE = "DFlash2DraftModel"

# What the fields are where a speculators checkpoint does not have them: the library's own defaults.
DEFAULTS = {"conv_kernel_size": 2, "conv_group_size": 16, "selector_rank": 256, "selector_top_k": 16}
MAX_RANK = 4096
MAX_CANDIDATES = 64
CODEBOOK = "candidate_selector.predecessor_codebook"


@dataclass(frozen=True)
class ConvSpec:
    """The convolutions: each sees `kernel_size` queries, its own and those before it; each `group_size` channels share
    what a query adds to their kernels."""

    kernel_size: int
    group_size: int


@dataclass(frozen=True)
class SelectorSpec:
    """The candidate selector: the `top_k` best tokens of each position, joined by edges of rank `rank`.

    codebook_suffix: what follows the names of its two tables; the authors' code saves them with ".weight", and reads
    and publishes them without.
    """

    rank: int
    top_k: int
    codebook_suffix: str = ""


@dataclass(frozen=True, kw_only=True)
class DFlash2Spec(DFlashSpec):
    """A DFlash2 drafter. Its draft vocabulary is the target's."""

    method = DFLASH2

    conv: ConvSpec
    selector: SelectorSpec

    @property
    def kind(self) -> str:
        return "DFlash2"

    def facts(self) -> Facts:
        conv, selector = self.conv, self.selector
        return [
            *super().facts(),
            ("convolutions", f"{conv.kernel_size} taps, groups of {conv.group_size} channels"),
            ("candidate selector", f"the best {selector.top_k} tokens of each position, edges of rank {selector.rank}"),
        ]


def read_zlab(directory: Path, config: JsonReader, causal: bool | None = None) -> DFlash2Spec:
    """Read a z-lab drafter, `DFlash2DraftModel`, as `dflash.config.read_zlab`; its own fields, too, are taken from
    `dflash_config` first. Raises `CheckpointError`."""
    dflash = config.object("dflash_config")
    return _with_own_fields(read_dflash_zlab(directory, _without_own_fields(config), causal), (dflash, config), {})


def read_speculators(directory: Path, config: JsonReader, causal: bool | None = None) -> DFlash2Spec:
    """Read a speculators drafter, as `dflash.config.read_speculators`; its sliding layers are not causal unless
    `sliding_window_non_causal` is false. Raises `CheckpointError`."""
    dflash = config.object("dflash_config")
    base = _without_own_fields(config)
    if not config.given("sliding_window_non_causal"):
        base = JsonReader({**base.data, "sliding_window_non_causal": True}, config.where)
    spec = read_dflash_speculators(directory, base, causal)
    notes = missing_fields({"sliding_window_non_causal": True} if any(spec.decoder.sliding_windows) else {}, config)
    notes += missing_fields(DEFAULTS, dflash, config)
    return _with_own_fields(dataclasses.replace(spec, notes=spec.notes + notes), (dflash, config), DEFAULTS)


def _without_own_fields(config: JsonReader) -> JsonReader:
    """The config as DFlash has it."""
    data = {field: value for field, value in config.data.items() if field not in DEFAULTS}
    nested = data.get("dflash_config")
    if isinstance(nested, dict):
        data["dflash_config"] = {field: value for field, value in nested.items() if field not in DEFAULTS}
    return JsonReader(data, config.where)


def _with_own_fields(
    spec: DFlashSpec, configs: tuple[JsonReader, JsonReader], defaults: Mapping[str, int]
) -> DFlash2Spec:
    """The drafter with the fields of its method, each from the first of `configs` that has it."""
    dflash, config = configs
    hidden, vocab = spec.decoder.hidden_size, spec.vocab_size

    def integer(field: str, high: int) -> int:
        holder = next((each for each in configs if each.given(field)), config)
        return holder.integer(field, default=defaults.get(field), high=high)

    conv = ConvSpec(integer("conv_kernel_size", spec.block_size), integer("conv_group_size", hidden))
    if hidden % conv.group_size:
        holder = dflash if dflash.given("conv_group_size") else config
        raise holder.fail("conv_group_size", f"a number that divides hidden_size ({hidden})")
    if spec.draft_vocab_size != vocab:
        raise config.fail("draft_vocab_size", f"vocab_size ({vocab}): the selector's tables are of all tokens")
    suffix = ".weight" if f"{CODEBOOK}.weight" in tensor_headers(spec.path) else ""
    selector = SelectorSpec(
        integer("selector_rank", MAX_RANK), integer("selector_top_k", min(MAX_CANDIDATES, vocab)), suffix
    )
    return DFlash2Spec(**vars(spec), conv=conv, selector=selector)
