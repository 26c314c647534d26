"""The config of compressed-tensors, the format of llm-compressor and vLLM: groups of projections, each with its scheme.

Names are matched as the library (0.20) matches them. How activations were to be quantised is not read: they stay in the
dtype that is served.
"""

from __future__ import annotations

from typing import Any

from dflash_backend.checkpoints.json_reader import JsonReader
from dflash_backend.checkpoints.quantization.names import LINEAR, PATTERN, make_names, read_names
from dflash_backend.checkpoints.quantization.scheme import Layout, Quantization, Scheme
from dflash_backend.checkpoints.spec import CheckpointError

METHOD = "compressed-tensors"
FLOAT, INT, PACKED, NAIVE, MIXED = (
    "float-quantized",
    "int-quantized",
    "pack-quantized",
    "naive-quantized",
    "mixed-precision",
)
FORMATS = (FLOAT, INT, PACKED, NAIVE)
STRATEGIES = ("tensor", "channel", "group", "block")
PACKED_BITS = (4, 8)
MAX_SIZE = 2**20
# Weights change under these; null and empty say that there is none.
OTHER_PARTS = {
    "kv_cache_scheme": "scales of a KV cache in the files are not supported; without them the same weights are, and "
    "kv_cache_dtype=fp8 makes scales of its own",
    "transform_config": "transforms of the weights (Hadamard, SpinQuant) are not supported",
}


def read(config: JsonReader) -> Quantization:
    """Raises `CheckpointError` on a format, a strategy or a part that is not built here."""
    for field, reason in OTHER_PARTS.items():
        if config.data.get(field) not in (None, {}, []):
            raise config.fail(field, f"no such field: {reason}")
    sparsity = config.object("sparsity_config")
    if sparsity.string("format", default="dense") != "dense":
        raise sparsity.fail("format", "'dense'; sparse weights are not supported")
    overall = config.string("format")
    groups = config.object("config_groups", required=True)
    schemes: dict[str, Scheme | None] = {}
    for name in groups.data:
        if isinstance(groups.data[name], list):
            raise groups.fail(name, "an object with targets and weights; schemes by their preset names are not read")
        group = groups.object(name, required=True)
        scheme = _read_group(group, overall)
        for target in group.strings("targets"):
            if target == "Embedding":
                raise group.fail("targets", f"'{LINEAR}' or names of projections; embeddings stay as they are")
            schemes[target] = scheme
    # The most exact first: a projection's own name, then patterns, then the class that all projections are of.
    ordered = sorted(schemes, key=lambda target: (target == LINEAR, target.startswith(PATTERN), target))
    rules = tuple((make_names(config, "config_groups", [target]), schemes[target]) for target in ordered)
    return Quantization(METHOD, config.where, rules, read_names(config, "ignore"), lists_all=True)


def _read_group(group: JsonReader, overall: str) -> Scheme | None:
    if group.data.get("weights") is None:
        return None
    name = group.string("format", default=overall)
    if name not in FORMATS:
        known = " or ".join(FORMATS)
        raise CheckpointError(
            f"{group.where}: the weights' format is '{name[:40]}'; expected {known}: other formats are not supported. "
            "Take a checkpoint of the same model in one of these, or in bfloat16"
        )
    weights = group.object("weights")
    bits, kind = weights.integer("num_bits", default=8, high=8), weights.string("type", default="int").lower()
    if kind not in ("int", "float") or (kind == "float" and bits != 8):
        raise weights.fail("type", "'int', or 'float' with 8 bits (e4m3)")
    if (name == FLOAT and kind != "float") or (name in (INT, PACKED) and kind != "int"):
        raise weights.fail("type", f"what the format {name} holds")
    if name == PACKED and bits not in PACKED_BITS:
        raise weights.fail("num_bits", " or ".join(map(str, PACKED_BITS)) + f" in the format {name}")
    block = _block(weights)
    layout = Layout.FLOAT8 if kind == "float" else Layout.PACKED if name == PACKED else Layout.INT8
    symmetric = weights.boolean("symmetric", default=True)
    if not symmetric and (kind == "float" or (layout is Layout.PACKED and block[0] != 1)):
        raise weights.fail("symmetric", "true, or zero points for integers in groups or rows")
    return Scheme(layout, bits, block, ("weight_scale",), symmetric, ordered=_is_ordered(weights))


def _block(weights: JsonReader) -> tuple[int | None, int | None]:
    """Rows and columns of a block that shares a scale."""
    size: Any = weights.data.get("group_size")
    grouped = isinstance(size, int) and size > 0
    default = "group" if grouped else "channel" if size == -1 else "tensor"
    strategy = weights.string("strategy", default=default).lower()
    if strategy not in STRATEGIES:
        raise weights.fail("strategy", "one of " + ", ".join(STRATEGIES))
    if strategy == "tensor":
        return None, None
    if strategy == "channel":
        return 1, None
    if strategy == "group":
        return 1, weights.integer("group_size", high=MAX_SIZE)
    text = weights.data.get("block_structure")
    if isinstance(text, str):  # the library's older form
        sizes = text.split("x")
        block = tuple(int(size) for size in sizes if size.isdecimal() and len(size) < 8)
    else:
        block = weights.integers("block_structure", low=1) or ()
    if len(block) != 2 or not all(0 < size <= MAX_SIZE for size in block):
        raise weights.fail("block_structure", "two sizes, rows and columns")
    return block[0], block[1]


def _is_ordered(weights: JsonReader) -> bool:
    """Whether a tensor says the group of each column; `weight` orders columns only while a model is quantised."""
    order = weights.data.get("actorder")
    if order in (None, False, "weight", "static"):
        return False
    if order in (True, "group", "dynamic"):
        return True
    raise weights.fail("actorder", "null, 'weight' or 'group'")
