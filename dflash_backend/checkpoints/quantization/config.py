"""The quantisation of a checkpoint by its `config.json`: which method; where it is not built here, what would do."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from dflash_backend.checkpoints.json_reader import JsonReader
from dflash_backend.checkpoints.quantization import compressed_tensors, published
from dflash_backend.checkpoints.quantization.scheme import Quantization
from dflash_backend.checkpoints.spec import CheckpointError

FIELDS = ("quantization_config", "compression_config")
READERS: dict[str, Callable[[JsonReader], Quantization]] = {
    "fp8": published.read_fp8,
    "fbgemm_fp8": published.read_fbgemm_fp8,
    "compressed-tensors": compressed_tensors.read,
    "gptq": published.read_gptq,
    "awq": published.read_awq,
}
# Read with the experts of that family.
MXFP4, MXFP4_FAMILY = "mxfp4", "GptOssForCausalLM"


def load_quantization(directory: Path) -> Quantization | None:
    """As `read_quantization`, of the model directory's `config.json`; None also where there is no such file."""
    path = directory / "config.json"
    return read_quantization(JsonReader.load(path)) if path.is_file() else None


def read_quantization(config: JsonReader) -> Quantization | None:
    """What a checkpoint's config says of quantised weights; None where it says nothing. Raises `CheckpointError` on
    what is not built here."""
    given = [field for field in FIELDS if config.data.get(field) not in (None, False)]
    if not given:
        return None
    fields = config.object(given[0])
    default = "compressed-tensors" if given[0] == "compression_config" else None
    method = fields.string("quant_method", default=default)
    if method == MXFP4 and MXFP4_FAMILY in config.strings("architectures"):
        return None
    if method not in READERS:
        raise fields.fail(
            "quant_method",
            f"one of {', '.join(READERS)}: other quantised weights are not supported. Take a checkpoint of the same "
            "model in FP8, in INT4 (compressed-tensors, GPTQ or AWQ) or in bfloat16",
        )
    return READERS[method](fields)


def refuse_nested(config: JsonReader) -> None:
    """Raise `CheckpointError` where an object inside a config says something of quantised weights: only the config's
    own word counts, and this one's meaning is not known."""
    for field in FIELDS:
        if config.data.get(field) not in (None, False):
            raise CheckpointError(
                f"{config.where}: field '{field}' is not read here; expected it at the top level of config.json where "
                "the weights beside it are quantised, and nowhere where they are not"
            )
