"""The fields that Qwen3-style targets and drafters share in `config.json`."""

from __future__ import annotations

from pathlib import Path

from dflash_backend.checkpoints.errors import CheckpointError
from dflash_backend.checkpoints.json_reader import JsonReader
from dflash_backend.checkpoints.spec import DecoderSpec, RopeSpec

DTYPES = ("float32", "bfloat16", "float16")


def read_decoder(config: JsonReader) -> DecoderSpec:
    """Read and check the shape of the decoder stack. Raises `CheckpointError`."""
    hidden_size = config.integer("hidden_size")
    num_heads = config.integer("num_attention_heads")
    num_kv_heads = config.integer("num_key_value_heads", default=num_heads)
    if num_heads % num_kv_heads:
        raise config.fail("num_key_value_heads", f"a divisor of num_attention_heads ({num_heads})")
    if config.data.get("head_dim") is None and hidden_size % num_heads:
        raise config.fail("hidden_size", f"a multiple of num_attention_heads ({num_heads}) where head_dim is missing")
    head_dim = config.integer("head_dim", default=hidden_size // num_heads)
    if head_dim % 2:
        raise config.fail("head_dim", "an even number, as rotary embedding needs")
    if config.string("hidden_act", default="silu") != "silu":
        raise config.fail("hidden_act", "'silu'")
    num_layers = config.integer("num_hidden_layers", high=1024)
    return DecoderSpec(
        num_layers=num_layers,
        hidden_size=hidden_size,
        intermediate_size=config.integer("intermediate_size"),
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        rms_norm_eps=config.number("rms_norm_eps", default=1e-6),
        rope=read_rope(config),
        attention_bias=config.boolean("attention_bias", default=False),
        mlp_bias=False,
        sliding_windows=(None,) * num_layers,
        max_len=config.integer("max_position_embeddings", default=32768),
    )


def read_rope(config: JsonReader) -> RopeSpec:
    """The rotary base, from `rope_parameters` where it is given, else from `rope_theta`.

    Scaled rotary embeddings are refused by name rather than ignored: they would only show as lower quality.
    """
    scaling = config.object("rope_scaling")
    parameters = config.object("rope_parameters")
    for reader in (scaling, parameters):
        for key in ("rope_type", "type"):
            kind = reader.string(key, default="default")
            if kind != "default":
                raise CheckpointError(f"{reader.where}: rotary scaling '{kind}' is not supported; expected 'default'")
    top = config.number("rope_theta", default=10000.0)
    return RopeSpec(theta=parameters.number("rope_theta", default=top))


def read_dtype(config: JsonReader) -> str:
    """The checkpoint's own dtype, from `dtype` or the older `torch_dtype`; `float32` where it says none."""
    for field in ("dtype", "torch_dtype"):
        if config.data.get(field) is not None:
            name = config.string(field).removeprefix("torch.")
            if name not in DTYPES:
                raise config.fail(field, "one of " + ", ".join(DTYPES))
            return name
    return "float32"


def read_eos(directory: Path) -> tuple[int, ...]:
    """Every id that a checkpoint calls the end of a sequence, those of `generation_config.json` before those of
    `config.json`; either file may be missing."""
    found: list[int] = []
    for name in ("generation_config.json", "config.json"):
        if not (directory / name).is_file():
            continue
        reader = JsonReader.load(directory / name)
        value = reader.data.get("eos_token_id")
        if isinstance(value, list):
            found += reader.integers("eos_token_id") or ()
        elif value is not None:
            found.append(reader.integer("eos_token_id", low=0))
    return tuple(dict.fromkeys(found))
