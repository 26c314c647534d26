"""A DFlash drafter's config, in either format, and the spec that it makes.

z-lab's is a Qwen3 config, most often with a `dflash_config` object (`DFlashDraftModel`); that of the speculators
library has `speculators_model_type: "dflash"`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from dflash_backend.checkpoints.decoder_fields import MAX_LAYERS, read_decoder, refuse_unsupported
from dflash_backend.checkpoints.describe import Facts
from dflash_backend.checkpoints.families import LLAMA, QWEN3, Family, qwen_windows
from dflash_backend.checkpoints.files import MASK_EMBEDDING
from dflash_backend.checkpoints.json_reader import JsonReader
from dflash_backend.checkpoints.quantization import refuse_nested
from dflash_backend.checkpoints.spec import FULL, SLIDING, CheckpointError, DecoderSpec, TargetSpec
from dflash_backend.drafters.fields import (
    check_own_head,
    missing_fields,
    read_scale,
    read_tensors,
    shared_fields,
    unknown_fields,
)
from dflash_backend.drafters.layer_ids import BOUNDARY, LAYER, SPECULATORS_FIELDS, NamedLayers, named_layers
from dflash_backend.drafters.spec import DraftModelSpec
from dflash_backend.drafters.speculators import layer_config, verifier_name

DFLASH = "dflash"
ZLAB = "z-lab"
MAX_BLOCK_SIZE = 256

# The layer is Qwen3's either way; the two config classes differ in what they give to missing fields.
LAYERS = {"qwen3": QWEN3, "llama": dataclasses.replace(LLAMA, qk_norm=True, reads_mlp_bias=False)}

# Where z-lab configs name the target's layers, for `layer_ids.named_layers`. The order and the conventions are those of
# vLLM's `get_eagle3_aux_layers_from_config`; the authors' own code reads the second and the third. The last is the name
# that speculators uses.
ZLAB_FIELDS = (
    ("", "eagle_aux_hidden_state_layer_ids", BOUNDARY),
    ("dflash_config", "target_layer_ids", LAYER),
    ("", "target_layer_ids", LAYER),
    ("dflash_config", "layer_ids", BOUNDARY),
    ("eagle_config", "layer_ids", BOUNDARY),
    ("", "aux_hidden_state_layer_ids", BOUNDARY),
)

# Fields of related methods whose arithmetic is not DFlash's.
OTHER_METHODS = {
    "markov_rank": "the Markov head of DSpark",
    "markov_head_type": "the Markov head of DSpark",
    "enable_confidence_head": "the confidence head of DSpark",
    "use_confidence_head": "the confidence head of DSpark",
    "conv_kernel_size": "the convolutions of DFlash2",
    "selector_rank": "the candidate selector of DFlash2",
    "dspark_target_layer_ids": "the target layers of DSpark",
    "dspark_draft_topk": "the few candidates of vLLM's DSpark",
    "dspark_backbone_conv_enabled": "a DSpark with convolutions",
    "shift_label": "drafts shifted by one position",
    "fc_norm": "a norm at the fc projection, as EAGLE-3 has it,",
    "norm_before_fc": "a norm before the fc projection, as EAGLE-3 has it,",
    "norm_output": "a norm of the output, as EAGLE-3 has it,",
}

# Read wherever a drafter's format has them.
READ = """
block_size dflash_config eagle_config mask_token_id mask_token is_causal causal use_swa swa_window_size
sample_from_anchor projector_type use_aux_hidden_state input_embedding_scale output_multiplier final_logit_softcapping
logit_scale sliding_window_non_causal
"""
KNOWN = frozenset([*READ.split(), *OTHER_METHODS, *(field for _, field, _ in ZLAB_FIELDS)])


@dataclass(frozen=True)
class LogitsSpec:
    """What becomes of a drafter's logits after its head: times `multiplier`, then `softcap * tanh(logits / softcap)`
    where there is one, then times `scale`.

    multiplier, softcap: `output_multiplier` and `final_logit_softcapping` of the DFlash authors' code. scale:
    `logit_scale`, as vLLM's drafter applies it.
    """

    multiplier: float = 1.0
    softcap: float | None = None
    scale: float = 1.0


@dataclass(frozen=True, kw_only=True)
class DFlashSpec(DraftModelSpec):
    """A DFlash drafter.

    block_size: 1 + the largest k, since the anchor takes one place. mask_token_id: the token of the queries behind the
    anchor. has_mask_embedding: a file `mask_embedding.pt` lies beside the weights. input_embedding_scale: what the
    embeddings of a block are multiplied by. logits: what becomes of its logits.
    """

    method = DFLASH

    block_size: int
    mask_token_id: int
    has_mask_embedding: bool
    input_embedding_scale: float = 1.0
    logits: LogitsSpec = LogitsSpec()

    @property
    def kind(self) -> str:
        return "DFlash"

    @property
    def max_speculative_tokens(self) -> int:
        return self.block_size - 1

    @property
    def limit_in_words(self) -> str:
        return (
            f"was trained for blocks of {self.block_size}, so at most {self.max_speculative_tokens} are possible: the "
            "anchor takes one place"
        )

    def facts(self) -> Facts:
        mask = str(self.mask_token_id)
        if self.has_mask_embedding:
            mask += f", with an embedding of its own ({MASK_EMBEDDING})"
        facts = [
            ("block", f"{self.block_size} places: the anchor and up to {self.max_speculative_tokens} drafts"),
            ("mask token", mask),
        ]
        if self.input_embedding_scale != 1:
            facts.append(("input embedding scale", f"{self.input_embedding_scale:g}"))
        form = self.logits
        steps = [f"times {form.multiplier:g}"] if form.multiplier != 1 else []
        steps += [f"soft-capped at {form.softcap:g}"] if form.softcap is not None else []
        steps += [f"times {form.scale:g}"] if form.scale != 1 else []
        return facts + ([("logits", ", then ".join(steps))] if steps else [])

    def for_target(self, target: TargetSpec) -> DFlashSpec:
        """The drafter with the target's soft cap of logits where it multiplies by the target's head and has no cap of
        its own, as in vLLM. A cap changes no greedy draft, and changes how noise chooses. z-lab's drafters take the
        feature of the target's last layer after the norm, also those whose file does not say how many it has."""
        found = self
        if self.format == ZLAB and self.num_target_layers is None:
            found = dataclasses.replace(self, normed_last_layer=target.decoder.num_layers - 1 in self.target_layer_ids)
        gemma4 = target.decoder.gemma4
        if gemma4 is None or gemma4.softcap is None or self.has_lm_head or self.logits.softcap is not None:
            return found
        return dataclasses.replace(found, logits=dataclasses.replace(self.logits, softcap=gemma4.softcap))

    def mismatch(self, target: TargetSpec) -> str | None:
        if self.mask_token_id < target.vocab_size:
            return None
        return f"mask_token_id is {self.mask_token_id}, the target's vocabulary has {target.vocab_size} tokens"


def read_drafter_decoder(config: JsonReader, dflash: JsonReader, family: Family) -> DecoderSpec:
    """The shape of a drafter's stack, with the windows that drafters have. Raises `CheckpointError`."""
    refuse_other_methods(config, dflash)
    refuse_unsupported(dflash)
    refuse_nested(dflash)
    return read_decoder(config, dataclasses.replace(family, windows=partial(read_windows, dflash=dflash)), drafter=True)


def read_windows(config: JsonReader, num_layers: int, dflash: JsonReader) -> tuple[int | None, ...]:
    """Sliding window of each layer.

    The sliding layers take `dflash_config.swa_window_size`, else `sliding_window`. `dflash_config.use_swa` makes all
    layers sliding where none is by itself.
    """
    sliding = sliding_layers(config, num_layers)
    given = config.given("layer_types")
    if not any(sliding):
        if not dflash.boolean("use_swa", default=False):
            return (None,) * num_layers
        sliding = (True,) * num_layers
    elif given and "use_sliding_window" in config and not config.boolean("use_sliding_window", default=True):
        raise config.fail("use_sliding_window", f"true where layer_types has '{SLIDING}'")
    for reader, field in ((dflash, "swa_window_size"), (config, "sliding_window")):
        if reader.given(field):
            window = reader.integer(field)
            return tuple(window if is_sliding else None for is_sliding in sliding)
    if not given and config.boolean("use_sliding_window", default=False):
        return qwen_windows(config, num_layers)  # the config class has a window of its own
    raise config.fail("sliding_window", "a number of positions, as the drafter has sliding-window layers")


def sliding_layers(config: JsonReader, num_layers: int) -> tuple[bool, ...]:
    """Which layers slide by themselves: those that `layer_types` calls sliding; without it those that Qwen3's config
    class would, from `max_window_layers` on where `use_sliding_window` is true."""
    types = config.layer_types(num_layers, FULL, SLIDING)
    if types is None:
        return tuple(window is not None for window in qwen_windows(config, num_layers))
    return tuple(name == SLIDING for name in types)


def window_notes(config: JsonReader) -> tuple[str, ...]:
    """A sentence for the log where the sources disagree about the windows."""
    slides = SLIDING in config.strings("layer_types") and config.given("sliding_window")
    if not slides or config.given("use_sliding_window"):
        return ()
    return (
        f"layer_types has '{SLIDING}' and use_sliding_window is missing: the sliding_window of "
        f"{config.integer('sliding_window')} is used, which Qwen3's config class in transformers would drop",
    )


def read_logits(*configs: JsonReader) -> LogitsSpec:
    """What becomes of the logits, each field from the first of `configs` that has it. Raises `CheckpointError`."""
    softcap = None
    for config in configs:
        if config.given("final_logit_softcapping"):
            # The authors' code reads 0 as none.
            if config.data["final_logit_softcapping"] != 0:
                softcap = config.number("final_logit_softcapping")
            break
    return LogitsSpec(read_scale("output_multiplier", *configs), softcap, read_scale("logit_scale", *configs))


def refuse_other_methods(*configs: JsonReader) -> None:
    """Raise `CheckpointError` for fields of related methods, whose drafts would be wrong here."""
    for config in configs:
        for field, meaning in OTHER_METHODS.items():
            if config.data.get(field):
                raise config.fail(field, f"no such field: {meaning} is not part of DFlash")
        if config.boolean("sample_from_anchor", default=False):
            raise config.fail("sample_from_anchor", "false: a DFlash drafter does not sample from the anchor's output")
        if config.string("projector_type", default=DFLASH) != DFLASH:
            raise config.fail("projector_type", f"'{DFLASH}'; other projectors are not supported")
        if not config.boolean("use_aux_hidden_state", default=True):
            raise config.fail(
                "use_aux_hidden_state",
                "true: a drafter that reads the target's last hidden state alone is not supported",
            )


def read_mask_token(*configs: JsonReader) -> int:
    """The mask token's id, from the first of `configs` that has it. Raises `CheckpointError`."""
    for config in configs:
        if config.given("mask_token_id"):
            return config.integer("mask_token_id", low=0)
    for config in configs:
        if config.given("mask_token"):
            raise config.fail("mask_token", "an id in mask_token_id: the token's id in the target's tokenizer")
    raise configs[0].fail("mask_token_id", "an integer from 0 to 2147483648")


def layer_causality(
    setting: bool | None, configs: Sequence[JsonReader], dflash: JsonReader, sliding: Sequence[bool], field: str = ""
) -> tuple[tuple[bool, ...], tuple[str, ...]]:
    """Causality of each drafter layer, and a sentence for the log where nothing but rule 4 makes sliding layers causal.
    The first that is present decides:

    1. `setting`, the server's `causal`, None for auto;
    2. `is_causal` of the first of `configs` that has it;
    3. `dflash_config.causal`, from `dflash`;
    4. layers that `layer_types` calls sliding (`sliding`, one entry for each layer) are causal unless the `field` of
       the format, if it has one, says otherwise;
    5. else not causal.
    """
    sliding_causal = not (field and configs[0].boolean(field, default=False))
    holders = [*((config, "is_causal") for config in configs), (dflash, "causal")]
    if setting is None:
        said = (holder.boolean(name, default=False) for holder, name in holders if holder.given(name))
        setting = next(said, None)
    if setting is not None:
        return (setting,) * len(sliding), ()
    causal = tuple(is_sliding and sliding_causal for is_sliding in sliding)
    if not any(sliding) or (field and configs[0].given(field)):
        return causal, ()
    others = "vLLM makes no layer so" if field else "the authors' code up to April 2026 did not make them so"
    return causal, (
        f"missing in config.json: {field or 'is_causal'}. The sliding layers are causal, as in training; {others}: if "
        "next to nothing is accepted, set causal=false, or the field",
    )


ARCHITECTURE = "DFlashDraftModel"
DEFAULT_BLOCK_SIZE = 16


def read_zlab(directory: Path, config: JsonReader, causal: bool | None = None) -> DFlashSpec:
    """Read a z-lab drafter. `causal` is the server's setting, None for auto. Raises `CheckpointError`.

    A field that may lie in `dflash_config` or at the top level is taken from `dflash_config` first, as by the authors'
    code. The feature of the target's last layer is taken after the final norm, since their code reads
    `hidden_states[id + 1]` of `transformers`, the last of which has been through it. It calls the target's embedding,
    which for Gemma 4 scales its rows.
    """
    dflash, eagle = config.object("dflash_config"), config.object("eagle_config")
    decoder = read_drafter_decoder(config, dflash, QWEN3)
    # GGUF has no such field: the ids are held to the target that is served, as those of speculators are.
    unsaid = config.given("gguf") and not config.given("num_target_layers")
    num_target_layers = None if unsaid else config.integer("num_target_layers", high=MAX_LAYERS)
    layer_ids, layer_notes = _layer_ids(config, num_target_layers, decoder.num_layers)
    block_size, block_notes = _block_size(config, dflash)
    tensors = read_tensors(directory, config, decoder)
    for reader in (config, dflash):
        check_own_head(reader, tensors)
    sliding = sliding_layers(config, decoder.num_layers)
    layers_causal, causal_notes = layer_causality(causal, [config], dflash, sliding)
    shared, notes = shared_fields(directory, config, config, decoder, tensors)
    configs = (("", config), ("dflash_config.", dflash), ("eagle_config.", eagle))
    return DFlashSpec(
        **shared,
        format="z-lab",
        block_size=block_size,
        num_speculative_tokens=block_size - 1,
        target_layer_ids=layer_ids,
        mask_token_id=read_mask_token(dflash, config),
        causal=layers_causal,
        num_target_layers=num_target_layers,
        has_mask_embedding=(directory / MASK_EMBEDDING).is_file(),
        scales_embedding=True,
        normed_last_layer=num_target_layers is not None and num_target_layers - 1 in layer_ids,
        input_embedding_scale=read_scale("input_embedding_scale", dflash, config),
        logits=read_logits(dflash, config),
        notes=layer_notes
        + block_notes
        + notes
        + window_notes(config)
        + causal_notes
        + unknown_fields(KNOWN | {"gguf"}, *configs)
        + config.object("gguf").strings("notes"),
    )


def _layer_ids(
    config: JsonReader, num_target_layers: int | None, num_draft_layers: int
) -> tuple[tuple[int, ...], tuple[str, ...]]:
    """Layer ids, and notes for the log."""
    named = named_layers(config, ZLAB_FIELDS)
    if named is None:
        assert num_target_layers is not None  # GGUF names the ids
        ids = default_layer_ids(num_target_layers, num_draft_layers)
        note = (
            f"no field names the target's layers, so the layer ids {list(ids)} are the method's default for "
            f"{num_draft_layers} of {num_target_layers} layers; acceptance is low if the drafter was trained on others"
        )
        return ids, (note,)
    if num_target_layers is not None and max(named.ids) >= num_target_layers:
        limit = "below" if named.convention == LAYER else "up to"
        raise named.fail(f"{named.convention} {limit} num_target_layers ({num_target_layers})")
    return named.ids, named.notes


def _block_size(config: JsonReader, dflash: JsonReader) -> tuple[int, tuple[str, ...]]:
    """The block size, and notes for the log."""
    holders = [holder for holder in (dflash, config) if holder.given("block_size")]
    sizes = [holder.integer("block_size", low=2, high=MAX_BLOCK_SIZE) for holder in holders]
    if not sizes:
        return DEFAULT_BLOCK_SIZE, (f"no field gives block_size; {DEFAULT_BLOCK_SIZE} is the authors' default",)
    if len(set(sizes)) == 1:
        return sizes[0], ()
    return sizes[0], (f"dflash_config.block_size is {sizes[0]} and is used; block_size is {sizes[1]}",)


def default_layer_ids(num_target_layers: int, num_draft_layers: int) -> tuple[int, ...]:
    """The layer ids that the method takes where a checkpoint names none: the middle layer for a one-layer drafter,
    else one for each drafter layer, evenly spaced from 1 to N - 3 (DFlash, arXiv 2602.06036)."""
    if num_draft_layers == 1:
        return (num_target_layers // 2,)
    first, last = 1, num_target_layers - 3
    if last < first:
        raise CheckpointError(
            f"target_layer_ids is missing and has no default for a target of {num_target_layers} layers; name them"
        )
    step = (last - first) / (num_draft_layers - 1)
    return tuple(round(first + i * step) for i in range(num_draft_layers))


NON_CAUSAL = "sliding_window_non_causal"


def read_speculators(directory: Path, config: JsonReader, causal: bool | None = None) -> DFlashSpec:
    """Read a speculators drafter. `causal` is the server's setting, None for auto. Raises `CheckpointError`."""
    spec = read_shared(directory, config, causal)
    return dataclasses.replace(spec, notes=spec.notes + missing_fields({"sample_from_anchor": False}, config))


def read_shared(directory: Path, config: JsonReader, causal: bool | None = None) -> DFlashSpec:
    """As `read_speculators`, without a word on who drafts from the anchor, which other methods read by themselves.

    The feature of the target's last layer is taken before the final norm: the library trains on what vLLM captures.
    """
    refuse_unsupported(config)
    refuse_other_methods(config)
    layer = layer_config(config)
    dflash = config.object("dflash_config")
    kind = layer.string("model_type", default="qwen3")
    if kind not in LAYERS:
        raise layer.fail("model_type", "one of " + ", ".join(LAYERS))
    decoder = read_drafter_decoder(layer, dflash, LAYERS[kind])
    block_size = config.integer("block_size", low=2, high=MAX_BLOCK_SIZE)
    layers = _layers(config)
    tensors = read_tensors(directory, layer, decoder)
    check_own_head(config, tensors)
    k, k_notes = speculative_tokens(config, block_size, block_size - 1)
    sliding = sliding_layers(layer, decoder.num_layers)
    layers_causal, causal_notes = layer_causality(causal, [config, layer], dflash, sliding, NON_CAUSAL)
    shared, notes = shared_fields(directory, config, layer, decoder, tensors)
    configs = (("", config), ("transformer_layer_config.", layer), ("dflash_config.", dflash))
    return DFlashSpec(
        **shared,
        format="speculators",
        block_size=block_size,
        num_speculative_tokens=k,
        target_layer_ids=layers.ids,
        mask_token_id=read_mask_token(config, dflash),
        causal=layers_causal,
        target_name=verifier_name(config),
        has_mask_embedding=(directory / MASK_EMBEDDING).is_file(),
        input_embedding_scale=read_scale("input_embedding_scale", dflash, config, layer),
        logits=read_logits(dflash, config, layer),
        notes=layers.notes + k_notes + notes + window_notes(layer) + causal_notes + unknown_fields(KNOWN, *configs),
    )


def _layers(config: JsonReader) -> NamedLayers:
    layers = named_layers(config, SPECULATORS_FIELDS)
    if layers is None:
        expected = "the boundary ids of the target's layers that the drafter reads, each at least 1"
        raise config.fail(SPECULATORS_FIELDS[0][1], expected)
    return layers


def speculative_tokens(config: JsonReader, block_size: int, possible: int) -> tuple[int, tuple[str, ...]]:
    """k of the first proposal method, else as many as are possible, in a block of this size; and notes for the log.

    Until April 2026 the library wrote the block size itself, though the anchor of DFlash takes one place
    (vllm-project/speculators pull request 456).
    """
    methods = config.object("speculators_config").objects("proposal_methods")
    if not methods:
        return possible, ()
    k = methods[0].integer("speculative_tokens", default=possible)
    if k <= possible:
        return k, ()
    why = f"a block of {block_size} has no more places"
    if possible < block_size:
        why = f"the anchor takes one place of a block of {block_size}"
    note = f"speculative_tokens is {k}; k is {possible}, as {why}"
    return possible, (note,)
