"""The fields of hybrids in `config.json`: which layers are gated delta nets, and the part of a head that is rotated.

A field that is missing takes the value that `transformers` 5 gives it.
"""

from __future__ import annotations

from dflash_backend.checkpoints.json_reader import JsonReader
from dflash_backend.checkpoints.spec import FULL, LINEAR, DeltaNetSpec

MAX_HEADS = 1024
MAX_HEAD_DIM = 1024
# A request keeps these inputs of the convolution, so they must be few.
MAX_CONV_WIDTH = 64


def read_delta_net(config: JsonReader, num_layers: int, grouped: bool) -> DeltaNetSpec:
    """The gated delta net layers of Qwen3-Next, or `grouped` not, of Qwen3.5. Raises `CheckpointError`."""
    types = _layer_types(config, num_layers)
    num_key_heads = config.integer("linear_num_key_heads", default=16, high=MAX_HEADS)
    num_value_heads = config.integer("linear_num_value_heads", default=32, high=MAX_HEADS)
    if num_value_heads % num_key_heads:
        raise config.fail("linear_num_value_heads", f"a multiple of linear_num_key_heads ({num_key_heads})")
    return DeltaNetSpec(
        layers=tuple(name == LINEAR for name in types),
        num_key_heads=num_key_heads,
        num_value_heads=num_value_heads,
        key_head_dim=config.integer("linear_key_head_dim", default=128, high=MAX_HEAD_DIM),
        value_head_dim=config.integer("linear_value_head_dim", default=128, high=MAX_HEAD_DIM),
        conv_width=config.integer("linear_conv_kernel_dim", default=4, low=2, high=MAX_CONV_WIDTH),
        grouped=grouped,
    )


def read_rotary_dim(config: JsonReader, head_dim: int, share: float) -> int:
    """How many numbers of a head are rotated: `partial_rotary_factor` of it, `share` where no field says it. Raises
    `CheckpointError`."""
    nested = [config.object(name) for name in ("rope_parameters", "rope_scaling")]
    readers = [reader for reader in (*nested, config) if reader.given("partial_rotary_factor")]
    found = [reader.number("partial_rotary_factor", high=1.0) for reader in readers]
    if any(other != found[0] for other in found[1:]):
        raise readers[1].fail("partial_rotary_factor", f"the same as elsewhere in this file ({found[0]:g})")
    rotary_dim = int(head_dim * (found[0] if found else share))
    if rotary_dim < 2 or rotary_dim % 2:
        reader = readers[0] if readers else config
        raise reader.fail(
            "partial_rotary_factor", f"a share of head_dim ({head_dim}) that is an even number, 2 or more"
        )
    return rotary_dim


def _layer_types(config: JsonReader, num_layers: int) -> tuple[str, ...]:
    types = config.layer_types(num_layers, FULL, LINEAR)
    if types is None:
        interval = config.integer("full_attention_interval", default=4)
        types = tuple(LINEAR if (index + 1) % interval else FULL for index in range(num_layers))
    if FULL not in types:
        raise config.fail(
            "layer_types", f"'{FULL}' for one layer at least: targets without attention are not supported"
        )
    return types
