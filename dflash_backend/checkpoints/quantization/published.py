"""The formats that came with a model or a tool of their own: FP8 of DeepSeek and Qwen, FBGEMM's FP8 of Meta, GPTQ, AWQ.

Their lists of modules that are not converted leave out what no tool converts (an LM head, a router), so where a list is
silent the tensors decide.
"""

from __future__ import annotations

from dataclasses import replace

from dflash_backend.checkpoints.json_reader import JsonReader
from dflash_backend.checkpoints.quantization.names import PATTERN, Names, make_names, read_names
from dflash_backend.checkpoints.quantization.scheme import GPTQ_BITS, Layout, Quantization, Scheme

EVERY = Names(all=True)
# The same thing by two names: what a weight's codes are multiplied by.
SCALE_NAMES = ("weight_scale_inv", "weight_scale")
NOT_CONVERTED = "modules_to_not_convert"
MAX_BLOCK, MAX_BITS = 2**20, 8


def read_fp8(config: JsonReader) -> Quantization:
    """`quant_method: fp8`: e4m3 with a scale for each block (DeepSeek-V3, arXiv 2412.19437, and Qwen3), or for each
    tensor where `weight_block_size` is missing."""
    if config.string("fmt", default="e4m3") not in ("e4m3", "float8_e4m3fn"):
        raise config.fail("fmt", "'e4m3'; other floats of 8 bits are not supported")
    if config.data.get("kv_cache_scheme"):
        raise config.fail("kv_cache_scheme", "no such field: scales of a KV cache in the files are not supported")
    block = config.integers("weight_block_size", low=1)
    if block is not None and (len(block) != 2 or max(block) > MAX_BLOCK):
        raise config.fail("weight_block_size", "two sizes, rows and columns, or null")
    rows, columns = block or (None, None)
    scheme = Scheme(Layout.FLOAT8, 8, (rows, columns), SCALE_NAMES)
    both = [*config.strings(NOT_CONVERTED), *config.strings("ignored_layers")]
    return _of_one(config, "fp8", scheme, make_names(config, NOT_CONVERTED, both, parts=True))


def read_fbgemm_fp8(config: JsonReader) -> Quantization:
    """`quant_method: fbgemm_fp8`: e4m3 with a scale for each row (Llama 3.1, arXiv 2407.21783)."""
    scheme = Scheme(Layout.FLOAT8, 8, (1, None), ("weight_scale",))
    return _of_one(config, "fbgemm_fp8", scheme, read_names(config, NOT_CONVERTED, parts=True))


def read_gptq(config: JsonReader) -> Quantization:
    """GPTQ (arXiv 2210.17323) as AutoGPTQ and GPTQModel save it. In their first format, which is the usual one, a
    stored zero point is 1 less than the zero point. Rules of `dynamic` give projections schemes of their own, the first
    that matches; of those that it leaves out ('-:...') the tensors tell."""
    formats = {"gptq": 1, "gptq_v2": 0}
    field = "checkpoint_format" if config.given("checkpoint_format") else "format"
    name = config.string(field, default="gptq")
    if name not in formats or config.boolean("is_marlin_format", default=False):
        raise config.fail(field, f"one of {', '.join(formats)}; repacked weights are not supported")
    _check_packing(config)
    scheme = Scheme(
        Layout.GPTQ,
        _bits(config, "bits", GPTQ_BITS),
        (1, _group(config, "group_size")),
        ("scales",),
        symmetric=False,
        ordered=config.boolean("desc_act", default=False),
        zero_offset=formats[name],
    )
    dynamic = config.object("dynamic")
    own = [
        (make_names(config, "dynamic", [PATTERN + name.removeprefix("+:")]), _own_scheme(dynamic.object(name), scheme))
        for name in dynamic.data
        if not name.startswith("-:")
    ]
    ignored = read_names(config, NOT_CONVERTED, parts=True)
    return Quantization("gptq", config.where, (*own, (EVERY, scheme)), ignored, lists_all=False)


def _own_scheme(rule: JsonReader, scheme: Scheme) -> Scheme:
    """The scheme of the projections that a rule names: what it leaves out is as in `scheme`, that of all others. Its
    bits may be of any number here: it may be for layers that are not loaded."""
    _check_packing(rule)
    return replace(
        scheme,
        bits=rule.integer("bits", default=scheme.bits, high=MAX_BITS),
        block=(1, _group(rule, "group_size")) if rule.given("group_size") else scheme.block,
        ordered=rule.boolean("desc_act", default=scheme.ordered),
    )


def _check_packing(config: JsonReader) -> None:
    if config.string("pack_dtype", default="int32") != "int32":
        raise config.fail("pack_dtype", "'int32'")


def read_awq(config: JsonReader) -> Quantization:
    """AWQ (arXiv 2306.00978) as AutoAWQ saves it for matrix-matrix products (`gemm`)."""
    for field in ("version", "checkpoint_format", "format"):
        if config.string(field, default="gemm").lower() != "gemm":
            raise config.fail(field, "'gemm'; other orders of the weights are not supported")
    if not config.boolean("zero_point", default=True):
        raise config.fail("zero_point", "true: AWQ without zero points is not supported")
    bits = _bits(config, "bits" if config.given("bits") else "w_bit", (4,))
    group = _group(config, "group_size" if config.given("group_size") else "q_group_size")
    scheme = Scheme(Layout.AWQ, bits, (1, group), ("scales",), symmetric=False)
    return _of_one(config, "awq", scheme, read_names(config, NOT_CONVERTED, parts=True))


def _of_one(config: JsonReader, method: str, scheme: Scheme, ignored: Names) -> Quantization:
    return Quantization(method, config.where, ((EVERY, scheme),), ignored, lists_all=False)


def _bits(config: JsonReader, field: str, possible: tuple[int, ...]) -> int:
    bits = config.integer(field, default=4)
    if bits not in possible:
        raise config.fail(field, " or ".join(map(str, possible)) + "; other numbers of bits are not supported")
    return bits


def _group(config: JsonReader, field: str) -> int | None:
    """Columns of a group; None for all of them."""
    return None if config.data.get(field) == -1 else config.integer(field, default=128)
