"""A DSpark drafter's config: that of DFlash, and the fields of its Markov head and of its confidence head."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dflash_backend.checkpoints.describe import Facts
from dflash_backend.checkpoints.json_reader import JsonReader
from dflash_backend.drafters.dflash.config import DFlashSpec, LogitsSpec, read_shared, speculative_tokens
from dflash_backend.drafters.dflash.config import read_zlab as read_dflash_zlab
from dflash_backend.drafters.fields import missing_fields

DSPARK = "dspark"
ARCHITECTURE = "Qwen3DSparkModel"

VANILLA, GATED, RNN = "vanilla", "gated", "rnn"
HEAD_TYPES = (VANILLA, GATED, RNN)
MAX_RANK = 4096

# What the fields are where a speculators checkpoint does not have them: the library's own defaults. Those of a
# checkpoint of DeepSpec, whose code requires them, have none.
DEFAULTS: Mapping[str, Any] = {
    "markov_rank": 256,
    "markov_head_type": VANILLA,
    "enable_confidence_head": True,
    "confidence_head_with_markov": True,
}
# Read here, or of training alone.
OWN_FIELDS = (*DEFAULTS, "sample_from_anchor", "num_anchors")


@dataclass(frozen=True)
class MarkovSpec:
    """The Markov head. kind: how a draft's bias follows from the token before it, one of `HEAD_TYPES`. rank: size of a
    token's embedding."""

    kind: str
    rank: int


@dataclass(frozen=True, kw_only=True)
class DSparkSpec(DFlashSpec):
    """A DSpark drafter.

    from_anchor: whether the anchor's output gives the first draft, so that a block of n queries has n drafts. markov:
    None: no draft depends on the one before it. has_confidence_head: else its logits say how sure it is.
    confidence_reads_markov: whether that head reads the Markov embedding of the token before a draft.
    """

    method = DSPARK

    from_anchor: bool
    markov: MarkovSpec | None
    has_confidence_head: bool
    confidence_reads_markov: bool

    @property
    def kind(self) -> str:
        # DeepSpec saves its DFlash drafters in DSpark's format, without the two heads.
        return "DSpark" if self.markov is not None or self.has_confidence_head else "DFlash"

    @property
    def max_speculative_tokens(self) -> int:
        return max_drafts(self.block_size, self.from_anchor)

    @property
    def limit_in_words(self) -> str:
        if not self.from_anchor:
            return super().limit_in_words
        return f"was trained for blocks of {self.block_size}, each place of which gives a draft"

    def facts(self) -> Facts:
        facts = dict(super().facts())
        if self.from_anchor:
            facts["block"] = f"{self.block_size} places, each of which gives a draft, the anchor's the first"
        head, markov = "none", self.markov
        if self.has_confidence_head:
            head = "reads the output and the token before" if self.confidence_reads_markov else "reads the output"
        return [
            *facts.items(),
            ("Markov head", "none" if markov is None else f"{markov.kind}, of rank {markov.rank}"),
            ("confidence head", head),
        ]


def read_deepspec(directory: Path, config: JsonReader, causal: bool | None = None) -> DSparkSpec:
    """Read a drafter as the authors' DeepSpec saves it. `causal` is the server's setting, None for auto. Raises
    `CheckpointError`.

    Its fields are those of a z-lab config, at the top level. The feature of the target's last layer is taken before the
    final norm: it was trained on outputs of the layers themselves.
    """
    spec = read_dflash_zlab(directory, _without_own_fields(config), causal)
    k = max_drafts(spec.block_size, config.boolean("sample_from_anchor", default=True))
    notes = missing_fields({"sample_from_anchor": True}, config, why="as DeepSpec's own code drafts")
    own = {
        "format": "deepspec",
        "scales_embedding": False,
        "normed_last_layer": False,
        "num_speculative_tokens": k,
        "notes": spec.notes + notes,
    }
    return _with_own_fields(spec, config, {"sample_from_anchor": True}, own)


def read_speculators(directory: Path, config: JsonReader, causal: bool | None = None) -> DSparkSpec:
    """Read a speculators drafter, as `dflash.config.read_speculators`. Raises `CheckpointError`.

    Where `sample_from_anchor` is missing, the number of drafts that the checkpoint proposes tells: as many as the block
    has places if the anchor drafts. Else it does not: so vLLM and llama.cpp read it, and so were those trained that are
    older than the field, though the library's class has true.
    """
    library = config.object("speculators_config").data
    base = _without_own_fields(config).data
    base = {**base, "speculators_config": {**library, "proposal_methods": None}}
    spec = read_shared(directory, JsonReader(base, config.where), causal)
    from_anchor, anchor_notes = _read_anchor(config, spec.block_size)
    most = max_drafts(spec.block_size, from_anchor)
    k, k_notes = speculative_tokens(config, spec.block_size, most)
    defaults = {name: value for name, value in DEFAULTS.items() if name != "confidence_head_with_markov"}
    if config.boolean("enable_confidence_head", default=True):
        defaults = dict(DEFAULTS)
    notes = spec.notes + anchor_notes + k_notes + missing_fields(defaults, config)
    changes = {"num_speculative_tokens": k, "notes": notes}
    return _with_own_fields(spec, config, {**DEFAULTS, "sample_from_anchor": from_anchor}, changes)


def _read_anchor(config: JsonReader, block_size: int) -> tuple[bool, tuple[str, ...]]:
    """Whether the anchor drafts, and notes for the log."""
    if config.given("sample_from_anchor"):
        return config.boolean("sample_from_anchor", default=False), ()
    methods = config.object("speculators_config").objects("proposal_methods")
    proposed = methods[0].integer("speculative_tokens", default=0, low=0) if methods else 0
    by_number = proposed in (block_size, block_size - 1)
    why = "nothing tells, and vLLM reads it so; the library's class has true"
    if by_number:
        why = f"speculative_tokens is {proposed}, and the block has {block_size} places"
    from_anchor = proposed == block_size
    slots = f"drafts come from slots {0 if from_anchor else 1} to {block_size - 1}; {why}"
    return from_anchor, missing_fields({"sample_from_anchor": from_anchor}, config, why=slots)


def max_drafts(block_size: int, from_anchor: bool) -> int:
    """The most drafts of a block: one for each place, the anchor's left out unless it drafts."""
    return block_size if from_anchor else block_size - 1


def _without_own_fields(config: JsonReader) -> JsonReader:
    """The config as DFlash has it."""
    data = {field: value for field, value in config.data.items() if field not in OWN_FIELDS}
    return JsonReader(data, config.where)


def _with_own_fields(
    spec: DFlashSpec, config: JsonReader, defaults: Mapping[str, Any], changes: dict[str, Any]
) -> DSparkSpec:
    """The drafter with the fields of its method, and with these changes."""
    _refuse_scales(spec, config)
    rank = config.integer("markov_rank", default=defaults.get("markov_rank"), low=0, high=MAX_RANK)
    markov = None
    if rank:
        kind = config.string("markov_head_type", default=defaults.get("markov_head_type"))
        if kind not in HEAD_TYPES:
            raise config.fail("markov_head_type", "one of " + ", ".join(HEAD_TYPES))
        markov = MarkovSpec(kind, rank)
    has_head = _flag(config, "enable_confidence_head", defaults)
    reads_markov = has_head and _flag(config, "confidence_head_with_markov", defaults)
    if reads_markov and markov is None:
        raise config.fail("markov_rank", "at least 1, as confidence_head_with_markov is true")
    return DSparkSpec(
        **(vars(spec) | changes),
        from_anchor=_flag(config, "sample_from_anchor", defaults),
        markov=markov,
        has_confidence_head=has_head,
        confidence_reads_markov=reads_markov,
    )


def _flag(config: JsonReader, field: str, defaults: Mapping[str, Any]) -> bool:
    """True or false, required where `defaults` does not have the field."""
    if field not in defaults and not config.given(field):
        raise config.fail(field, "true or false")
    return config.boolean(field, default=defaults.get(field, False))


def _refuse_scales(spec: DFlashSpec, config: JsonReader) -> None:
    """Raise `CheckpointError` for scales that no code for DSpark over Qwen3's layers applies; vLLM's has `logit_scale`
    alone."""
    used = {
        "input_embedding_scale": spec.input_embedding_scale != 1,
        "output_multiplier": spec.logits.multiplier != LogitsSpec().multiplier,
        "final_logit_softcapping": spec.logits.softcap is not None,
    }
    nested = (config.object(field) for field in ("dflash_config", "transformer_layer_config"))
    for holder in (*nested, config):
        for field, is_used in used.items():
            if is_used and holder.given(field):
                raise holder.fail(field, "no such field: it is not part of DSpark")
