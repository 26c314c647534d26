"""An EAGLE-3 drafter's config, in the format of speculators and in that of its authors, which vLLM and SGLang read."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from dflash_backend.checkpoints.decoder_fields import (
    MAX_LAYERS,
    check_stack,
    read_decoder,
    refuse_unsupported,
)
from dflash_backend.checkpoints.describe import Facts
from dflash_backend.checkpoints.families import LLAMA, QWEN3
from dflash_backend.checkpoints.files import TensorHeader
from dflash_backend.checkpoints.json_reader import JsonReader
from dflash_backend.checkpoints.quantization import refuse_nested
from dflash_backend.checkpoints.spec import CheckpointError, DecoderSpec, TargetSpec
from dflash_backend.drafters.dflash.config import read_windows
from dflash_backend.drafters.fields import (
    LM_HEAD,
    check_own_head,
    missing_fields,
    read_scale,
    shared_fields,
    tensor_headers,
    unknown_fields,
)
from dflash_backend.drafters.layer_ids import BOUNDARY, LAYER, SPECULATORS_FIELDS, NamedLayers, named_layers
from dflash_backend.drafters.spec import DraftModelSpec
from dflash_backend.drafters.speculators import layer_config, verifier_name

EAGLE3 = "eagle3"
# DeepSpec's: a layer of Qwen3, none of the norms that others have, and the target's layers by layer ids.
DEEPSPEC = "Qwen3Eagle3Model"
DEEPSPEC_FIELDS = (("", "target_layer_ids", LAYER),)
# By which checkpoints in the authors' format are known: their own, and names that vLLM gives to the same model.
ARCHITECTURES = (
    "LlamaForCausalLMEagle3",
    "Eagle3LlamaForCausalLM",
    "Eagle3LlamaModel",
    "Eagle3Qwen2_5vlForCausalLM",
    "Eagle3Qwen3vlForCausalLM",
    DEEPSPEC,
)
# k where neither the checkpoint nor a setting says it, as the speculators library's converter writes it; and the most,
# each of which takes a pass.
DEFAULT_DRAFTS, MAX_DRAFTS = 3, 32
# Layers whose features are read where a checkpoint does not say which, and so not how many.
DEFAULT_FEATURES = 3
LAYERS = {"llama": LLAMA, "qwen3": QWEN3}
MIDLAYER = "midlayer."

# Where configs in the authors' format name the target's layers. vLLM reads the first, as boundary ids; SGLang, and the
# programs that train for it, the second, as layer ids. Their defaults are the same layers.
EAGLE_FIELDS = (
    ("", "eagle_aux_hidden_state_layer_ids", BOUNDARY),
    ("eagle_config", "eagle_aux_hidden_state_layer_ids", LAYER),
    ("eagle_config", "layer_ids", BOUNDARY),
    ("", "aux_hidden_state_layer_ids", BOUNDARY),
)
# Fields that no tensor tells, and how they are read where they are missing.
UNTOLD: Mapping[str, bool] = {"norm_before_residual": False, "norm_output": False}
NORMS = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")

# Fields of other arithmetic: what they must be where they are given, and why.
FIXED: Mapping[str, tuple[object, str]] = {
    "use_aux_hidden_state": (True, "a drafter that reads the target's last hidden state alone is not supported"),
    "use_input_layernorm_in_first_layer": (True, "a first layer without its input norm is not supported"),
    "use_last_layernorm": (True, "a drafter without a final norm is not supported"),
    "use_mtp_layernorm": (False, "the norms of MTP are not part of EAGLE-3"),
    "next_layer_regular": (True, "a second layer that reads the embeddings as well is not supported"),
    "is_causal": (True, "a drafter that drafts token by token is causal"),
    "causal": (True, "a drafter that drafts token by token is causal"),
    "parallel_drafting": (False, "drafting all tokens in one pass, as P-EAGLE does, is not supported"),
    "parallel_draft_step": (1, "drafting several tokens in one pass, as P-EAGLE does, is not supported"),
    "parallel_draft_heads_num_layers": (0, "heads that draft in parallel are not supported"),
    "sample_from_anchor": (False, "it is not part of EAGLE-3"),
}
# Read here, or of training alone.
READ = """
eagle_config logit_scale has_lm_head embed_requires_grad has_no_defaults_at_init target_model_type
"""
READ_OF_DEEPSPEC = """
target_layer_ids num_target_layers ttt_length step_loss_decay draft_num_hidden_layers target_model_name_or_path
"""
KNOWN = frozenset([*READ.split(), *FIXED, *NORMS, *(field for _, field, _ in EAGLE_FIELDS)])


@dataclass(frozen=True, kw_only=True)
class Eagle3Spec(DraftModelSpec):
    """An EAGLE-3 drafter.

    target_layer_ids: empty where the checkpoint names none, until `for_target`. layer_prefix: what the names of its
    layer's tensors begin with. norm_before_residual: what attention is added to is the normed hidden state, else the
    hidden state itself. norm_before_fc: one norm of all features before `fc`; fc_norm: one for each layer's.
    norm_output: the hidden state that the next pass reads is the final-normed one. logit_scale: what the logits are
    multiplied by.
    """

    method = EAGLE3

    layer_prefix: str
    norm_before_residual: bool = False
    norm_before_fc: bool = False
    fc_norm: bool = False
    norm_output: bool = False
    logit_scale: float = 1.0

    @property
    def num_features(self) -> int:
        return super().num_features or DEFAULT_FEATURES

    @property
    def kind(self) -> str:
        return "EAGLE-3"

    @property
    def max_speculative_tokens(self) -> int:
        return MAX_DRAFTS

    @property
    def limit_in_words(self) -> str:
        return f"drafts at most {MAX_DRAFTS} tokens, each in a pass of its own"

    def facts(self) -> Facts:
        norms = [name for name in NORMS if getattr(self, name)]
        facts = [
            ("drafting", "a token in each pass, from the output of the pass before"),
            ("variant", ", ".join(norms) or "none of " + ", ".join(NORMS)),
        ]
        return facts + ([("logits", f"times {self.logit_scale:g}")] if self.logit_scale != 1 else [])

    def for_target(self, target: TargetSpec) -> Eagle3Spec:
        """The drafter with the layers that it reads of this target where the checkpoint names none: the boundary ids 2,
        N / 2 and N - 3, as in vLLM, SGLang and speculators."""
        if self.target_layer_ids:
            return self
        num_layers = target.decoder.num_layers
        ids = (1, num_layers // 2 - 1, num_layers - 4)
        if list(ids) != sorted(set(ids)):
            return self
        note = (
            f"no field names the target's layers, so the layer ids {list(ids)} are the method's default for a target "
            f"of {num_layers} layers; acceptance is low if the drafter was trained on others"
        )
        return dataclasses.replace(self, target_layer_ids=ids, notes=(*self.notes, note))

    def mismatch(self, target: TargetSpec) -> str | None:
        if self.target_layer_ids:
            return None
        return (
            "its config names no target layers, and there is no default for a target of "
            f"{target.decoder.num_layers} layers; name them in eagle_aux_hidden_state_layer_ids"
        )


def read_eagle3(directory: Path, config: JsonReader, causal: bool | None = None) -> Eagle3Spec:
    """Read a drafter in the authors' format: a Llama config at the top level, and often an `eagle_config` object.
    `causal` is the server's setting, None for auto. Raises `CheckpointError`.

    The features are outputs of the layers themselves, that of the last layer too.
    """
    if DEEPSPEC in config.strings("architectures"):
        return _read_deepspec(directory, config, causal)
    eagle = config.object("eagle_config")
    refuse_nested(eagle)
    for reader in (config, eagle):
        refuse_unsupported(reader)
        _check_fixed(reader)
    notes = unknown_fields(KNOWN, ("", config), ("eagle_config.", eagle))
    own = {name: config.boolean(name, default=eagle.boolean(name, default=False)) for name in NORMS}
    notes += missing_fields(UNTOLD, config, eagle)
    spec = _read(directory, config, config, causal, _layers(config, EAGLE_FIELDS), own)
    return dataclasses.replace(
        spec, format="eagle3", logit_scale=read_scale("logit_scale", config), notes=spec.notes + notes
    )


def _read_deepspec(directory: Path, config: JsonReader, causal: bool | None) -> Eagle3Spec:
    """A drafter as DeepSpec saves it: a Qwen3 config with the fields of its training. It was trained on outputs of the
    layers themselves."""
    refuse_unsupported(config)
    _check_fixed(config)
    for name in (*NORMS, "logit_scale"):
        if config.data.get(name):
            raise config.fail(name, f"no such field: it is not part of {DEEPSPEC}")
    named = _layers(config, DEEPSPEC_FIELDS)
    if named is None:
        raise config.fail("target_layer_ids", "the layer ids of the target's layers that the drafter reads")
    num_target_layers = config.integer("num_target_layers", high=MAX_LAYERS)
    if max(named.ids) >= num_target_layers:
        raise named.fail(f"{named.convention} below num_target_layers ({num_target_layers})")
    spec = _read(directory, config, config, causal, named, dict.fromkeys(NORMS, False))
    return dataclasses.replace(
        spec,
        format="deepspec",
        num_speculative_tokens=config.integer("ttt_length", default=DEFAULT_DRAFTS, high=MAX_DRAFTS),
        num_target_layers=num_target_layers,
        target_name=config.string("target_model_name_or_path", default="") or None,
        notes=spec.notes + unknown_fields(KNOWN.union(READ_OF_DEEPSPEC.split()), ("", config)),
    )


def read_speculators(directory: Path, config: JsonReader, causal: bool | None = None) -> Eagle3Spec:
    """Read a speculators drafter. `causal` is the server's setting, None for auto. Raises `CheckpointError`."""
    refuse_unsupported(config)
    layer = layer_config(config)
    for reader in (config, layer):
        _check_fixed(reader)
        if reader.given("logit_scale"):
            raise reader.fail("logit_scale", "no such field: it is not part of the library's EAGLE-3")
    notes = unknown_fields(KNOWN, ("", config), ("transformer_layer_config.", layer))
    notes += missing_fields(UNTOLD, config, why="vLLM reads a missing norm_before_residual as true")
    own = {name: config.boolean(name, default=False) for name in NORMS}
    spec = _read(directory, config, layer, causal, _layers(config, SPECULATORS_FIELDS), own)
    methods = config.object("speculators_config").objects("proposal_methods")
    k = methods[0].integer("speculative_tokens", default=DEFAULT_DRAFTS, high=MAX_DRAFTS) if methods else DEFAULT_DRAFTS
    return dataclasses.replace(
        spec, num_speculative_tokens=k, target_name=verifier_name(config), notes=spec.notes + notes
    )


def _read(
    directory: Path,
    config: JsonReader,
    layer: JsonReader,
    causal: bool | None,
    named: NamedLayers | None,
    norms: Mapping[str, bool],
) -> Eagle3Spec:
    """What both formats share. layer: where the decoder's fields are."""
    if causal is False:
        raise CheckpointError(
            f"{config.where}: an EAGLE-3 drafter drafts token by token and is causal; leave the setting causal at auto"
        )
    if norms["norm_before_fc"] and norms["fc_norm"]:
        raise config.fail("fc_norm", "false, as norm_before_fc is true: the features are normed once")
    decoder = _read_decoder(layer)
    tensors = tensor_headers(directory)
    prefix = _layer_prefix(layer, decoder, tensors)
    check_own_head(config, tensors)
    if config.boolean("has_lm_head", default=LM_HEAD in tensors) != (LM_HEAD in tensors) and tensors:
        raise config.fail("has_lm_head", "what the weights beside it have")
    shared, notes = shared_fields(directory, config, layer, decoder, tensors)
    return Eagle3Spec(
        **(shared | dict(norms)),
        format="speculators",
        num_speculative_tokens=DEFAULT_DRAFTS,
        target_layer_ids=() if named is None else named.ids,
        causal=(True,) * decoder.num_layers,
        notes=notes if named is None else named.notes + notes,
        layer_prefix=prefix,
    )


def _read_decoder(layer: JsonReader) -> DecoderSpec:
    """The shape of the one layer."""
    kind = layer.string("model_type", default="llama")
    if kind not in LAYERS:
        raise layer.fail("model_type", "one of " + ", ".join(LAYERS))
    family = dataclasses.replace(LAYERS[kind], windows=partial(read_windows, dflash=JsonReader({}, layer.where)))
    decoder = read_decoder(layer, family, drafter=True)
    if decoder.num_layers != 1:
        raise layer.fail(
            "num_hidden_layers", "1: the KV of further layers would depend on all of the context, and is not supported"
        )
    return decoder


def _layer_prefix(layer: JsonReader, decoder: DecoderSpec, tensors: Mapping[str, TensorHeader]) -> str:
    """What the layer's tensors are called, which are held to the config."""
    if not any(name.startswith(MIDLAYER) for name in tensors):
        if tensors:
            check_stack(layer, decoder, "layers.", tensors)
        return "layers.0."
    for part, rows in (("q_proj", decoder.query_size), ("k_proj", decoder.kv_size)):
        tensor = tensors.get(f"{MIDLAYER}self_attn.{part}.weight")
        if tensor is not None and tensor.shape[:1] != (rows,):
            raise CheckpointError(
                f"{tensor.file}: tensor '{tensor.name}' has shape {list(tensor.shape)}; the heads in {layer.where} ask "
                f"for {rows} rows"
            )
    return MIDLAYER


def _layers(config: JsonReader, fields: tuple[tuple[str, str, str], ...]) -> NamedLayers | None:
    """The target layers that a config names. An empty list names none, as null does."""
    data = {**config.data}
    for holder, field, _ in fields:
        values = config.data.get(holder) if holder else data
        if isinstance(values, Mapping) and values.get(field) == []:
            data[holder or field] = {**values, field: None} if holder else None
    named = named_layers(JsonReader(data, config.where), fields)
    if named is not None and list(named.ids) != sorted(set(named.ids)):
        raise named.fail("ascending ids: the layers' features are captured in the layers' order")
    return named


def _check_fixed(config: JsonReader) -> None:
    """Raise `CheckpointError` for fields that ask for other arithmetic."""
    for field, (value, reason) in FIXED.items():
        if config.given(field) and config.data[field] != value:
            raise config.fail(field, f"{str(value).lower()}: {reason}")
