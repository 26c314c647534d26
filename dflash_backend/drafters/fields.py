"""What drafters of every method and format share: tensors that a checkpoint may ship, and the fields of a config that
every method knows."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from dflash_backend.checkpoints.decoder_fields import UNSUPPORTED, check_stack, read_dtype
from dflash_backend.checkpoints.files import TensorHeader, read_headers
from dflash_backend.checkpoints.json_reader import JsonReader
from dflash_backend.checkpoints.quantization import load_quantization, read_quantization
from dflash_backend.checkpoints.quantization.stored import holds_weight
from dflash_backend.checkpoints.rope import unread_rope_fields
from dflash_backend.checkpoints.spec import CheckpointError, DecoderSpec
from dflash_backend.error_text import shown

EMBEDDING = "embed_tokens.weight"
LM_HEAD = "lm_head.weight"

# The log names the fields that neither a method nor the following has: what they change would only show as lower
# acceptance. Read as part of the decoder's shape, or refused.
DECODER = """
hidden_act hidden_size intermediate_size num_attention_heads num_key_value_heads head_dim num_hidden_layers
max_position_embeddings rms_norm_eps attention_bias mlp_bias rope_theta rope_scaling rope_parameters
partial_rotary_factor layer_types sliding_window use_sliding_window max_window_layers vocab_size dtype torch_dtype
is_neox_style original_max_position_embeddings quantization_config compression_config
"""
# Read of any drafter, or of the speculators format.
DRAFTER = """
architectures model_type num_target_layers draft_vocab_size target_hidden_size has_own_lm_head
speculators_model_type speculators_config transformer_layer_config
"""
# What trains, names or saves a model, and what `transformers` gives to every config.
HARMLESS = """
auto_map transformers_version speculators_version _name_or_path name_or_path bos_token_id eos_token_id pad_token_id
sep_token_id cls_token_id decoder_start_token_id initializer_range use_cache attention_dropout pretraining_tp
output_attentions output_hidden_states return_dict chunk_size_feed_forward is_encoder_decoder is_decoder id2label
label2id problem_type torchscript tokenizer_class tie_word_embeddings _attn_implementation attn_implementation
"""
CHOOSE = "if next to nothing is accepted, the drafter was trained otherwise: write the other value into config.json"
KNOWN = frozenset([*DECODER.split(), *DRAFTER.split(), *HARMLESS.split(), *UNSUPPORTED])


def read_tensors(directory: Path, config: JsonReader, decoder: DecoderSpec) -> Mapping[str, TensorHeader]:
    """As `tensor_headers`, checked against the stack that the drafter's config describes."""
    tensors = tensor_headers(directory)
    if tensors:
        check_stack(config, decoder, "layers.", tensors)
    return tensors


def tensor_headers(directory: Path) -> dict[str, TensorHeader]:
    """The headers of a drafter's tensors; a quantised LM head is there under the name of a plain one as well. They are
    empty where `directory` is the file of a config alone, and only there. Raises `CheckpointError`, first on quantised
    weights that are not supported."""
    if directory.is_file():
        read_quantization(JsonReader.load(directory))
        return {}
    load_quantization(directory)
    tensors = read_headers(directory)
    if not tensors:
        raise CheckpointError(f"{directory} has no tensors in its .safetensors files; download or copy it again")
    head = LM_HEAD.removesuffix(".weight")
    if LM_HEAD not in tensors and holds_weight(tensors, head):
        first = next(header for name, header in tensors.items() if name.startswith(f"{head}."))
        return tensors | {LM_HEAD: first}
    return tensors


def check_own_head(config: JsonReader, tensors: Mapping[str, TensorHeader]) -> None:
    """Raise `CheckpointError` where `has_own_lm_head` says otherwise than the weights, if there are any."""
    has_lm_head = LM_HEAD in tensors
    if not tensors:
        config.boolean("has_own_lm_head", default=False)
    elif config.given("has_own_lm_head") and config.boolean("has_own_lm_head", default=False) != has_lm_head:
        found = f"a tensor '{LM_HEAD}'" if has_lm_head else f"no tensor '{LM_HEAD}'"
        raise config.fail("has_own_lm_head", f"{str(has_lm_head).lower()}, as the weights beside it have {found}")


def shared_fields(
    directory: Path,
    config: JsonReader,
    layer: JsonReader,
    decoder: DecoderSpec,
    tensors: Mapping[str, TensorHeader],
) -> tuple[dict[str, Any], tuple[str, ...]]:
    """Fields of `DraftModelSpec` that every format has in the same way, and notes for the log. layer: where the
    decoder's fields are."""
    vocab_size = layer.integer("vocab_size", low=2)
    dtype, notes = read_dtype(tensors, config, layer)
    notes += unread_rope_fields(layer)
    return {
        "path": directory,
        "decoder": decoder,
        "vocab_size": vocab_size,
        "draft_vocab_size": config.integer("draft_vocab_size", default=vocab_size, low=2),
        "target_hidden_size": config.integer("target_hidden_size", default=decoder.hidden_size),
        "has_embedding": EMBEDDING in tensors,
        "has_lm_head": LM_HEAD in tensors,
        "dtype": dtype,
    }, notes


def read_scale(field: str, *configs: JsonReader) -> float:
    """A factor above 0, from the first of `configs` that has it, else 1. Raises `CheckpointError`."""
    reader = next((config for config in configs if config.given(field)), None)
    return 1.0 if reader is None else reader.number(field)


def missing_fields(reads: Mapping[str, object], *configs: JsonReader, why: str = "") -> tuple[str, ...]:
    """A sentence for the log that names the fields which none of `configs` has and how each is read; none where all
    are there.

    Only for fields that neither a tensor's shape nor another field decides: a drafter that was trained otherwise runs,
    and next to nothing that it drafts is accepted. reads: how each field is read where it is missing. why: what else
    there is to know, in a sentence's end.
    """
    found = [name for name in reads if not any(config.given(name) for config in configs)]
    if not found:
        return ()
    values = ", ".join(f"{name} = {json.dumps(reads[name])}" for name in found)
    more = f" ({why})" if why else ""
    return (f"missing in config.json and read as {values}{more}; {CHOOSE}",)


def unknown_fields(known: Iterable[str], *configs: tuple[str, JsonReader]) -> tuple[str, ...]:
    """A sentence for the log that names the fields which nothing here knows; none where all are known.

    known: the fields that the method reads or refuses, beside those of every drafter. configs: what goes before a
    field's name in the sentence, and the object. Fields that are null or false say nothing.
    """
    all_known = KNOWN.union(known)
    found = [
        f"{prefix}{field} = {shown(value)}"
        for prefix, config in configs
        for field, value in config.data.items()
        if field not in all_known and value is not None and value is not False
    ]
    if not found:
        return ()
    return (f"not known here and not read: {', '.join(found)}; drafts are worse if one changes the arithmetic",)
