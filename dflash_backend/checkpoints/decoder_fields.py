"""The fields that targets and drafters share in `config.json`: the shape of the decoder stack, dtype, end of sequence.

A field that is missing takes the value that `transformers` 5 gives it for this family, so that a checkpoint means the
same here and there.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from dflash_backend.checkpoints.families import Family
from dflash_backend.checkpoints.files import TensorHeader
from dflash_backend.checkpoints.hybrids import read_rotary_dim
from dflash_backend.checkpoints.json_reader import JsonReader
from dflash_backend.checkpoints.quantization.stored import PARTS
from dflash_backend.checkpoints.rope import ORIGINAL, addressable_positions, read_layer_rope, read_rope
from dflash_backend.checkpoints.spec import SLIDING, CheckpointError, DecoderSpec, MoeSpec
from dflash_backend.checkpoints.tensor_names import OUTER, WRAPPERS, bare_name, beginnings

DTYPES = ("float32", "bfloat16", "float16")
FLOAT_NAMES = {"BF16": "bfloat16", "F16": "float16", "F32": "float32"}  # by what safetensors calls them
# What configs call them, behind `torch.` or not.
DTYPE_NAMES = {
    **{name: name for name in DTYPES},
    "bf16": "bfloat16",
    **dict.fromkeys(("half", "fp16", "f16"), "float16"),
    **dict.fromkeys(("float", "fp32", "f32"), "float32"),
}
AUTO = "auto"
DUAL_CHUNKS = "dual_chunk_attention_config"
MAX_LAYERS = 1024
MAX_POSITIONS = 2**24  # more than any model has; tables are sized by it

# Fields that change the arithmetic in a way that is not built here. Ignoring one would only show as worse output. Null,
# false and, for a number that multiplies, 1 say that there is none.
UNSUPPORTED = {
    "attn_logit_softcapping": "soft-capping of attention scores is not supported",
    "logits_soft_cap": "soft-capping of logits is not supported",
    "attention_sink_bias": "attention sinks are not supported",
    "add_swa_attention_sink_bias": "attention sinks are not supported",
    "add_full_attention_sink_bias": "attention sinks are not supported",
    "attention_sinks": "attention sinks are not supported",
    "attention_value_scale": "a scale of the values is not supported",
}
TARGET_UNSUPPORTED = UNSUPPORTED | {"final_logit_softcapping": "soft-capping of logits is not supported"}


def read_decoder(config: JsonReader, family: Family, drafter: bool = False) -> DecoderSpec:
    """Read and check the shape of the decoder stack. Raises `CheckpointError`."""
    num_layers = config.integer("num_hidden_layers", high=MAX_LAYERS)
    moe = family.experts(config, num_layers) if family.experts else None
    refuse_unsupported(config, UNSUPPORTED if drafter or family.gemma4 else TARGET_UNSUPPORTED)
    field, *activations = family.activation
    if config.string(field, default=activations[0]) not in activations:
        raise config.fail(field, f"'{activations[0]}'; other activations are not supported")
    hidden_size = config.integer("hidden_size")
    num_heads, num_kv_heads, head_dim = _read_heads(config, family, hidden_size)
    max_positions = config.integer("max_position_embeddings", default=family.max_positions, high=MAX_POSITIONS)
    if not drafter:
        max_positions = min(max_positions, one_chunk(config) or max_positions)
    partial = family.rotary_share != 1.0
    rotary_dim = read_rotary_dim(config, head_dim, family.rotary_share) if partial else head_dim
    gemma4 = family.gemma4(config, num_layers, max_positions) if family.gemma4 else None
    if gemma4 is not None:
        rope = read_layer_rope(config, SLIDING, head_dim, max_positions, family.rope)
    else:
        rope = read_rope(config, rotary_dim, max_positions, drafter, family.rope, partial)
    attention_bias = family.reads_attention_bias and config.boolean("attention_bias", default=family.attention_bias)
    return DecoderSpec(
        num_layers=num_layers,
        hidden_size=hidden_size,
        intermediate_size=_intermediate_size(config, family, moe),
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        rms_norm_eps=config.number("rms_norm_eps", default=family.rms_norm_eps, high=1.0),
        rope=rope,
        qk_norm=family.qk_norm,
        qkv_bias=family.qkv_bias or attention_bias,
        output_bias=attention_bias,
        mlp_bias=family.reads_mlp_bias and config.boolean("mlp_bias", default=False),
        sliding_windows=family.windows(config, num_layers),
        max_len=addressable_positions(rope, max_positions),
        moe=moe,
        sinks=family.sinks,
        delta_net=family.delta_net(config, num_layers) if family.delta_net else None,
        attention_gate=family.attention_gate,
        centred_norms=family.centred_norms,
        rotary_dim=0 if rotary_dim == head_dim else rotary_dim,
        gemma4=gemma4,
    )


def one_chunk(config: JsonReader) -> int | None:
    """The positions that a target of Qwen's dual chunk attention (arXiv 2501.15383) was trained on, up to which
    attention is the usual one; None without it. Raises `CheckpointError`."""
    chunks = config.object(DUAL_CHUNKS)
    return chunks.integer(ORIGINAL, high=MAX_POSITIONS) if chunks.data else None


def refuse_unsupported(config: JsonReader, fields: Mapping[str, str] = UNSUPPORTED) -> None:
    """Raise `CheckpointError` for a field that changes the arithmetic in a way that is not built here."""
    for field, reason in fields.items():
        value = config.data.get(field)
        if value is not None and value is not False and not (field.endswith("_scale") and value == 1):
            raise config.fail(field, f"no such field: {reason}")
    if not config.boolean("is_neox_style", default=True):
        raise config.fail("is_neox_style", "true: interleaved rotary embedding is not supported")


def _intermediate_size(config: JsonReader, family: Family, moe: MoeSpec | None) -> int:
    """That of the MLP. Where all layers have experts in its place nothing reads it, and published files of Qwen3.5 do
    not have it: it is then that of an expert."""
    needed = moe is None or not all(moe.sparse_layers) or family.gemma4 is not None
    return config.integer("intermediate_size", default=None if needed or moe is None else moe.intermediate_size)


def _read_heads(config: JsonReader, family: Family, hidden_size: int) -> tuple[int, int, int]:
    """Query heads, key heads and the size of one."""
    num_heads = config.integer("num_attention_heads")
    missing = family.num_kv_heads if family.num_kv_heads and "num_key_value_heads" not in config else num_heads
    num_kv_heads = config.integer("num_key_value_heads", default=missing)
    if num_heads % num_kv_heads:
        raise config.fail("num_key_value_heads", f"a divisor of num_attention_heads ({num_heads})")
    fixed = family.head_dim if "head_dim" not in config else None
    if fixed is None and not config.given("head_dim") and hidden_size % num_heads:
        raise config.fail("hidden_size", f"a multiple of num_attention_heads ({num_heads}) where head_dim is missing")
    head_dim = config.integer("head_dim", default=fixed or hidden_size // num_heads)
    if head_dim % 2 or not head_dim:
        raise config.fail("head_dim", "an even number, as rotary embedding needs")
    return num_heads, num_kv_heads, head_dim


def read_dtype(tensors: Mapping[str, TensorHeader], *configs: JsonReader) -> tuple[str, tuple[str, ...]]:
    """The checkpoint's own dtype, and notes for the log.

    It is what the first of `configs` with a `dtype` or the older `torch_dtype` says, `dtype` before the other. Where
    that is "auto", or none says anything, it is the dtype that most bytes of the weights `tensors` have. Raises
    `CheckpointError`.
    """
    given: list[tuple[str, str]] = []
    for config in dict.fromkeys(configs):
        nested = config.where.split(": ")[1:]
        for field in ("dtype", "torch_dtype"):
            if config.given(field):
                given.append((".".join([*nested, field]), _read_dtype_name(config, field)))
    field, first = given[0] if given else ("", AUTO)
    chosen, notes = _dtype_of(tensors) if first == AUTO else (first, ())
    others = [f"{other} is {name}" for other, name in given[1:] if name not in (chosen, AUTO)]
    if others:
        what = f"{AUTO}: {chosen}, that of the weights," if first == AUTO else f"{chosen} and"
        notes += (f"{field} is {what} is used; {', '.join(others)}",)
    return chosen, notes


def _read_dtype_name(config: JsonReader, field: str) -> str:
    """The dtype that a field names, or `AUTO`."""
    name = config.string(field).lower().removeprefix("torch.")
    if name != AUTO and name not in DTYPE_NAMES:
        others = ", ".join(name for name in DTYPE_NAMES if name not in DTYPES)
        raise config.fail(field, f"one of {', '.join(DTYPES)} (or {others}), or {AUTO}")
    return DTYPE_NAMES.get(name, AUTO)


def _dtype_of(tensors: Mapping[str, TensorHeader]) -> tuple[str, tuple[str, ...]]:
    """The dtype of the weights, and notes. Scales of quantised weights do not count."""
    sizes = dict.fromkeys(FLOAT_NAMES, 0)
    for name, header in tensors.items():
        if header.dtype in sizes and name.rpartition(".")[2] not in PARTS:
            sizes[header.dtype] += header.num_bytes
    found = sorted((kind for kind, size in sizes.items() if size), key=lambda kind: -sizes[kind])
    if not found:
        return "float32", ("no field says dtype and no weights are there to tell: float32 is taken",)
    chosen = FLOAT_NAMES[found[0]]
    if len(found) == 1:
        return chosen, ()
    parts = ", ".join(f"{sizes[kind] / 1024**2:.2f} MiB of {FLOAT_NAMES[kind]}" for kind in found)
    return chosen, (f"no field says dtype, and the weights are {parts}: {chosen}, that of the most bytes, is used",)


def read_eos(directory: Path) -> tuple[int, ...]:
    """Every id that a checkpoint calls the end of a sequence, those of `generation_config.json` before those of
    `config.json` and of its text part; either file may be missing."""
    readers = [
        JsonReader.load(directory / name)
        for name in ("generation_config.json", "config.json")
        if (directory / name).is_file()
    ]
    found: list[int] = []
    for reader in (*readers, *(reader.object("text_config") for reader in readers)):
        value = reader.data.get("eos_token_id")
        if isinstance(value, list):
            found += reader.integers("eos_token_id") or ()
        elif value is not None:
            found.append(reader.integer("eos_token_id", low=0))
    return tuple(dict.fromkeys(found))


def check_stack(config: JsonReader, decoder: DecoderSpec, prefix: str, tensors: Mapping[str, TensorHeader]) -> None:
    """Check that the weights hold as many layers, and KV of the size, that the config says, before anything is sized
    by it. `prefix` begins the layers' names, up to the number. Raises `CheckpointError`."""
    found = {name.removeprefix(prefix).partition(".")[0] for name in tensors if name.startswith(prefix)}
    if not found:
        raise CheckpointError(
            f"{next(iter(tensors.values())).file.parent}: no tensor named {bare_name(prefix)}0... in its "
            f"safetensors files; the names begin with {beginnings(tensor.name for tensor in tensors.values())}. "
            f"Before {bare_name(prefix)} may come any of {', '.join(f'{word}.' for word in (*OUTER, *WRAPPERS))}"
        )
    if len(found) < decoder.num_layers:
        raise CheckpointError(
            f"{config.where}: field 'num_hidden_layers' is {decoder.num_layers}; the weights beside it hold "
            f"{len(found)} layers"
        )
    first = next(index for index in range(decoder.num_layers) if decoder.has_attention(index))
    heads = decoder.of_layer(first)
    query_rows = heads.query_size * (2 if decoder.attention_gate else 1)
    for part, rows in (("q_proj", query_rows), ("k_proj", heads.kv_size)):
        # Quantised weights have other tensors; GPTQ and AWQ have theirs transposed.
        for kind, axis in (("weight", 0), ("weight_packed", 0), ("scales", 1)):
            name = f"{prefix}{first}.self_attn.{part}.{kind}"
            tensor = tensors.get(name)
            if tensor is not None and tensor.shape[axis : axis + 1] != (rows,):
                raise CheckpointError(
                    f"{tensor.file}: tensor '{tensor.name}' has shape {list(tensor.shape)}; the heads in "
                    f"{config.where} ask for {rows} {('rows', 'columns')[axis]}"
                )
