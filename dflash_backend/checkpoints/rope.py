"""Rotary position embedding as `config.json` describes it, in any of the spellings that are in use.

`rope_theta` and `rope_scaling` are the older ones, `rope_parameters` holds both in one object. What is missing is
filled as `transformers` 5 fills it, so that a checkpoint gives the same frequencies here and there.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from dflash_backend.checkpoints.json_reader import JsonReader
from dflash_backend.checkpoints.spec import SLIDING, CheckpointError, RopeSpec
from dflash_backend.error_text import shown

KINDS = ("default", "linear", "dynamic", "yarn", "llama3")
PROPORTIONAL = "proportional"
DEFAULT_ROPE = RopeSpec(theta=10000.0)
ORIGINAL = "original_max_position_embeddings"
# What says nothing of the scaling, and what each kind reads of its object beside that.
PLAIN_FIELDS = ("rope_theta", "partial_rotary_factor", "mrope_section", "mrope_interleaved")
KIND_FIELDS: dict[str, tuple[str, ...]] = {
    "default": (),
    "linear": ("factor",),
    "dynamic": ("factor",),
    "yarn": (
        *("factor", ORIGINAL, "attention_factor", "attn_factor", "mscale", "mscale_all_dim"),
        *("beta_fast", "beta_slow", "truncate"),
    ),
    "llama3": ("factor", ORIGINAL, "low_freq_factor", "high_freq_factor"),
    PROPORTIONAL: ("factor",),
}
# Beyond these a float32 frequency would be 0 or infinite.
MAX_THETA = 1e12
MAX_FACTOR = 1e6
MIN_BETA, MAX_BETA = 1e-6, 1e6


def read_rope(
    config: JsonReader,
    head_dim: int,
    max_positions: int,
    drafter: bool,
    default: RopeSpec = DEFAULT_ROPE,
    partial: bool = False,
) -> RopeSpec:
    """Read the rotary embedding of a decoder. `max_positions` is its `max_position_embeddings`; `default` is the
    embedding where no field is about it, its theta where none gives it. partial: a part of the head may be rotated,
    whose size `head_dim` is. Of such a target, and of a drafter, sections of a multimodal embedding are read past: each
    section takes the same position of a text.

    An object nested by layer type is one embedding for each type: a drafter takes the `sliding_attention` entry, as the
    speculators library does; a target is refused unless all entries are the same. Raises `CheckpointError` on a kind
    that is not known here rather than ignore it: a wrong rotation still runs, with worse output.
    """
    if not partial:
        _check_whole_head(config)
    scaling, parameters = (
        [
            _read_entry(entry, config, head_dim, max_positions, default.theta, text_alone=partial or drafter)
            for entry in _entries(config.object(field), drafter, partial)
        ]
        for field in ("rope_scaling", "rope_parameters")
    )
    if scaling:
        # A scaling that was added to a config with plain parameters is what counts.
        plain = RopeSpec(theta=scaling[0].theta)
        parameters = [rope for rope in parameters if rope != plain]
    found = scaling + parameters or [replace(default, theta=_theta(config, default.theta))]
    if any(other != found[0] for other in found[1:]):
        raise CheckpointError(
            f"{config.where}: the entries of rope_scaling and rope_parameters say different things "
            f"({' and '.join(rope_in_words(rope) for rope in dict.fromkeys(found))}); expected one rotary embedding "
            "for all layers"
        )
    return found[0]


def read_layer_rope(
    config: JsonReader, layer_type: str, head_dim: int, max_positions: int, default: RopeSpec
) -> RopeSpec:
    """The rotary embedding of the layers of one type, by `rope_parameters`, an object for each type; `default` where it
    says nothing of this one. Raises `CheckpointError`."""
    parameters = config.object("rope_parameters")
    if not parameters.given(layer_type):
        if parameters.data and not any(isinstance(value, dict) for value in parameters.data.values()):
            raise config.fail("rope_parameters", f"an object for each layer type, of which one is '{layer_type}'")
        return default
    entry = parameters.object(layer_type)
    if entry.data.get("rope_type") != PROPORTIONAL:
        return _read_entry(entry, config, head_dim, max_positions, default.theta, text_alone=False)
    share = entry.number("partial_rotary_factor", default=1.0, high=1.0)
    if int(share * head_dim // 2) < 1:
        raise entry.fail("partial_rotary_factor", f"a share of head_dim ({head_dim}) that is one pair at least")
    return RopeSpec(
        theta=_theta(entry, default.theta),
        kind=PROPORTIONAL,
        factor=entry.number("factor", default=1.0, low=1.0, high=MAX_FACTOR),
        share=share,
    )


def with_scaling(config: JsonReader, scaling: Mapping[str, Any]) -> JsonReader:
    """`config` with the fields of the setting `rope_scaling` in place of its own rotary scaling; what says nothing of
    scaling, as `rope_theta`, stays unless they have it. Raises `CheckpointError` on a field that would not be read."""
    given = JsonReader(scaling, "setting 'rope_scaling'")
    kind = _kind(given, text_alone=True)
    if not (given.given("rope_type") or given.given("type")):
        raise given.fail("rope_type", "one of " + ", ".join(KINDS))
    known = ("rope_type", "type", *KIND_FIELDS[kind], *PLAIN_FIELDS)
    if unknown := sorted(scaling.keys() - set(known)):
        raise given.fail(unknown[0], f"no such field: {kind} has {', '.join(known)}")
    outer = [config.object(name).data for name in ("rope_scaling", "rope_parameters")]
    plain = {name: value for fields in outer for name, value in fields.items() if name in PLAIN_FIELDS}
    # The length of the setting wins over one beside the file's own scaling.
    changes = {"rope_scaling": None, "rope_parameters": plain | dict(scaling)}
    changes |= {ORIGINAL: None} if given.given(ORIGINAL) else {}
    return JsonReader({**config.data, **changes}, f"{config.where} with the setting rope_scaling")


def unread_rope_fields(config: JsonReader) -> tuple[str, ...]:
    """A sentence for the log that names what lies in `rope_scaling` and `rope_parameters` and is not read, if there is
    something. Fields that are null or false say nothing."""
    found = []
    for field in ("rope_scaling", "rope_parameters"):
        outer = config.object(field)
        nested = [outer.object(name) for name, value in outer.data.items() if isinstance(value, dict)]
        for entry in nested or [outer]:
            kind = entry.data.get("rope_type") or entry.data.get("type") or "default"
            known = {"rope_type", "type", *PLAIN_FIELDS, *KIND_FIELDS.get(str(kind), ())}
            where = entry.where.removeprefix(f"{config.where}: ").replace(": ", ".")
            found += [
                f"{where}.{name} = {shown(value)}"
                for name, value in entry.data.items()
                if name not in known and value is not None and value is not False
            ]
    if not found:
        return ()
    return (f"not known here and not read: {', '.join(found)}; texts are worse if one changes the rotation",)


def rope_in_words(rope: RopeSpec) -> str:
    """A rotary embedding as it was read, for people."""
    text = f"theta {rope.theta:g}"
    if rope.kind == "default":
        return text
    if rope.kind == PROPORTIONAL:
        return f"{text}, of {rope.share:g} of a head's pairs" + (f", scaled by {rope.factor:g}" * (rope.factor != 1))
    text += f", {rope.kind} scaling by {rope.factor:g}"
    if rope.kind in ("yarn", "llama3"):
        text += f" from {rope.original_max_positions} positions"
    if rope.kind == "yarn":
        text += f", attention factor {rope.attention_factor:g}"
    return text


def addressable_positions(rope: RopeSpec, max_positions: int) -> int:
    """How many positions a model can address whose `max_position_embeddings` is `max_positions`.

    default and llama3: that number (published Llama 3 configs give the scaled length). linear and dynamic: times the
    factor. yarn: `original_max_positions * factor` when that is more, since configs give either length.
    """
    if rope.kind in ("linear", "dynamic", PROPORTIONAL):
        return int(max_positions * rope.factor)
    if rope.kind == "yarn":
        return max(max_positions, int(rope.original_max_positions * rope.factor))
    return max_positions


def _check_whole_head(config: JsonReader) -> None:
    """Every dimension of a head must be rotated."""
    nested = [config.object(name) for name in ("rope_scaling", "rope_parameters")]
    for reader in (config, *nested):
        factor = reader.data.get("partial_rotary_factor")
        if factor is not None and factor != 1:
            raise reader.fail("partial_rotary_factor", "1: rotary embedding of a part of the head is not supported")


def _entries(parameters: JsonReader, drafter: bool, partial: bool) -> list[JsonReader]:
    """The embeddings in an object: none when it is empty, itself when it is flat, else those of its layer types."""
    if not parameters.data:
        return []
    nested = [name for name, value in parameters.data.items() if isinstance(value, dict)]
    if not nested:
        return [parameters]
    if drafter and SLIDING in nested:
        nested = [SLIDING]
    readers = [parameters.object(name) for name in nested]
    if not partial:
        for reader in readers:
            _check_whole_head(reader)
    return readers


def _kind(entry: JsonReader, text_alone: bool) -> str:
    names = {field: entry.string(field) for field in ("rope_type", "type") if entry.given(field)}
    for field, name in names.items():
        if name not in KINDS:
            raise entry.fail(field, "one of " + ", ".join(KINDS) + "; other rotary scaling is not supported")
    if len(set(names.values())) > 1:
        raise entry.fail("rope_type", f"the same as 'type' ({names['type']})")
    if entry.given("mrope_section") and not text_alone:
        raise entry.fail("mrope_section", "no such field: multimodal rotary embedding (mrope) is not supported")
    return next(iter(names.values()), "default")


def _read_entry(
    entry: JsonReader, config: JsonReader, head_dim: int, max_positions: int, theta: float, text_alone: bool
) -> RopeSpec:
    theta = _theta(entry, _theta(config, theta))
    kind = _kind(entry, text_alone)
    if kind == "default":
        return RopeSpec(theta=theta)
    if kind in ("linear", "dynamic"):
        if kind == "dynamic" and head_dim <= 2:
            raise config.fail("head_dim", "more than 2, as dynamic rotary scaling needs")
        length = max_positions if kind == "dynamic" else 0
        factor = entry.number("factor", low=1.0, high=MAX_FACTOR)
        return RopeSpec(theta, kind, factor, original_max_positions=length, length=length)
    # A field beside the scaling wins over one inside it (Phi writes it so).
    original = config.integer(ORIGINAL, default=entry.integer(ORIGINAL, default=max_positions))
    if kind == "yarn":
        return _read_yarn(entry, theta, original, max_positions)
    low, high = (entry.number(field, low=MIN_BETA, high=MAX_BETA) for field in ("low_freq_factor", "high_freq_factor"))
    if high <= low:
        raise entry.fail("high_freq_factor", f"more than low_freq_factor ({low:g})")
    return RopeSpec(
        theta=theta,
        kind=kind,
        factor=entry.number("factor", low=1.0, high=MAX_FACTOR),
        original_max_positions=original,
        low_freq_factor=low,
        high_freq_factor=high,
    )


def _theta(reader: JsonReader, default: float) -> float:
    return reader.number("rope_theta", default=default, low=1.0, high=MAX_THETA)


def _read_yarn(entry: JsonReader, theta: float, original: int, max_positions: int) -> RopeSpec:
    """yarn, with the attention factor of DeepSeek's `mscale` and `mscale_all_dim` where a checkpoint has both.

    `attn_factor` multiplies the factor that no `attention_factor` gives, as in vLLM and llama.cpp; `transformers` does
    not read it. DeepSeek-R1-0528-Qwen3-8B undoes the default with it, and was trained so.
    """
    if theta <= 1:
        raise entry.fail("rope_theta", "a number above 1, as yarn needs")
    factor = entry.number("factor", default=max(1.0, max_positions / original), low=1.0, high=MAX_FACTOR)
    attention_factor = attention_factor_of(factor)
    if entry.data.get("mscale") and entry.data.get("mscale_all_dim"):
        mscale, all_dim = (entry.number(field, high=MAX_FACTOR) for field in ("mscale", "mscale_all_dim"))
        attention_factor = attention_factor_of(factor, mscale) / attention_factor_of(factor, all_dim)
    attention_factor *= entry.number("attn_factor", default=1.0, high=MAX_FACTOR)
    return RopeSpec(
        theta=theta,
        kind="yarn",
        factor=factor,
        original_max_positions=original,
        attention_factor=entry.number("attention_factor", default=attention_factor, high=MAX_FACTOR),
        beta_fast=entry.number("beta_fast", default=32.0, low=MIN_BETA, high=MAX_BETA),
        beta_slow=entry.number("beta_slow", default=1.0, low=MIN_BETA, high=MAX_BETA),
        truncate=entry.boolean("truncate", default=True),
    )


def attention_factor_of(factor: float, scale: float = 1.0) -> float:
    """How much longer contexts sharpen attention (arXiv 2309.00071, section 3.4)."""
    return 1.0 if factor <= 1 else 0.1 * scale * math.log(factor) + 1.0
