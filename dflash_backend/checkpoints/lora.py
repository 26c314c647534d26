"""LoRA adapters of a target (Hu et al., arXiv 2106.09685), in PEFT's format: a folder with `adapter_config.json` and
`adapter_model.safetensors`.

An adapter adds `up @ down @ x` to projections of the decoder's layers. What would make it anything else, as DoRA or
weights of its own in place of the target's, is refused by name: it must not be served in part.
"""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from dflash_backend.checkpoints.files import FLOATS, PICKLED, TensorHeader, broken_file, check_files, read_header
from dflash_backend.checkpoints.json_reader import JsonReader
from dflash_backend.checkpoints.spec import CheckpointError
from dflash_backend.error_text import shown

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
"""What adapters may add to."""

# Before the layers of a text decoder, in the names of the classes that adapters are trained with.
_BEFORE_LAYERS = ("", "model.", "language_model.", "language_model.model.", "model.language_model.")
_TENSOR = re.compile(r"(?:base_model\.model\.)?(?P<module>.+)\.lora_(?P<side>[AB])(?:\.[\w-]+)?\.weight")
_MODULE = re.compile(r"(?P<before>.*?)(?P<module>layers\.\d+\..+)")
# Fields that change nothing of what an adapter adds.
_KNOWN = (
    *("alpha_pattern", "arrow_config", "auto_mapping", "base_model_name_or_path", "corda_config", "eva_config"),
    *("ensure_weight_tying", "exclude_modules", "inference_mode", "init_lora_weights", "layers_pattern"),
    *("layers_to_transform", "loftq_config", "lora_alpha", "lora_dropout", "lora_ga_config", "megatron_config"),
    *("megatron_core", "parent_library", "peft_type", "peft_version", "qalora_group_size", "r", "rank_pattern"),
    *("revision", "runtime_config", "target_modules", "task_type", "use_rslora"),
)
_REFUSED = {
    "use_dora": "DoRA scales the target's own weights",
    "use_qalora": "QALoRA adds to groups of a quantised weight",
    "lora_bias": "its products have biases",
    "modules_to_save": "it has weights of its own in place of the target's",
    "trainable_token_indices": "it has embeddings of its own in place of the target's",
    "target_parameters": "it adds to parameters that are no projection",
    "layer_replication": "it repeats layers of the target",
    "alora_invocation_tokens": "it begins in the middle of a prompt",
    "fan_in_fan_out": "its weights are transposed",
}
# Starts that change the target's weights too, so that an adapter that was not converted belongs to another target.
_STARTS_OF_ITS_OWN = ("pissa", "olora", "corda", "loftq", "lora_ga")


@dataclass(frozen=True)
class LoraPart:
    """What one adapter adds to a projection, in float32 on the CPU.

    adapter: its number, from 1 on. down: `[rank, in_features]`. up: `[out_features, rank]`, times the adapter's scale.
    """

    adapter: int
    down: torch.Tensor
    up: torch.Tensor


@dataclass(frozen=True)
class _Pair:
    """The two tensors of a projection, and what their product is multiplied by."""

    down: TensorHeader
    up: TensorHeader
    scale: float


class LoraAdapters:
    """Adapters by name, numbered from 1 on in the order of their names; 0 is the target alone.

    A model takes the parts of each of its projections (`parts`); what it took of none is an error (`check_taken`).
    """

    def __init__(self, directories: Mapping[str, Path]) -> None:
        """Reads configs and headers. Raises `CheckpointError`, which names adapter, file and field."""
        self.names = tuple(directories)
        self.directories = dict(directories)
        self._pairs = [_read_adapter(name, directory) for name, directory in directories.items()]
        self._taken: set[tuple[int, str]] = set()

    def parts(self, projection: str, out_features: int, in_features: int) -> list[LoraPart]:
        """What the adapters add to a projection, named as in `model.layers.0.self_attn.q_proj`. Raises
        `CheckpointError` for a tensor of another shape, or with numbers that are none."""
        found = _MODULE.fullmatch(projection)
        if found is None:
            return []
        module, parts = found["module"], []
        for index, pairs in enumerate(self._pairs):
            if (pair := pairs.get(module)) is not None:
                self._taken.add((index, module))
                _check_shapes(pair, out_features, in_features)
                down, up = _numbers(pair.down), _numbers(pair.up)
                parts.append(LoraPart(index + 1, down, up * pair.scale))
        return parts

    def check_taken(self) -> None:
        """Raises `CheckpointError` where an adapter has tensors for what the target does not have."""
        for index, (name, pairs) in enumerate(zip(self.names, self._pairs, strict=True)):
            left = [pair.down for module, pair in pairs.items() if (index, module) not in self._taken]
            if left:
                more = f" and {len(left) - 1} more" if len(left) > 1 else ""
                raise CheckpointError(
                    f"{left[0].file}: tensor '{left[0].name}'{more} of the LoRA adapter '{name}' is for no projection "
                    "of this target that an adapter can add to; is it an adapter of another model?"
                )

    @property
    def num_bytes(self) -> int:
        """Bytes of all tensors, as they are stored."""
        return sum(pair.down.num_bytes + pair.up.num_bytes for pairs in self._pairs for pair in pairs.values())


def adapter_digest(directory: Path) -> bytes:
    """32 bytes that differ wherever an adapter does."""
    digest = hashlib.sha256((directory / CONFIG).read_bytes())
    with (directory / WEIGHTS).open("rb") as file:
        return digest.digest()[:16] + hashlib.file_digest(file, "sha256").digest()[:16]


def _read_adapter(name: str, directory: Path) -> dict[str, _Pair]:
    """The pairs of an adapter, by the names of their modules from the layers on."""
    check_files(directory)
    config = JsonReader.load(directory / CONFIG)
    _check_config(config)
    file = directory / WEIGHTS
    if not file.is_file():
        pickled = [path.name for path in directory.iterdir() if path.suffix in PICKLED]
        has = f"; it has {pickled[0]}, which would run code as it is read: save it as safetensors" if pickled else ""
        raise CheckpointError(f"{file} does not exist; the LoRA adapter '{name}' needs it{has}")
    sides: dict[str, dict[str, TensorHeader]] = {}
    for tensor, header in read_header(file).items():
        module, side = _module_of(tensor, file)
        if side in sides.setdefault(module, {}):
            raise CheckpointError(f"{file}: tensor '{tensor}' is there a second time, as '{sides[module][side].name}'")
        if header.dtype not in FLOATS or len(header.shape) != 2:
            raise CheckpointError(
                f"{file}: tensor '{tensor}' is {header.dtype} {list(header.shape)}; expected a matrix of one of "
                f"{', '.join(sorted(FLOATS))}"
            )
        sides[module][side] = header
    if not sides:
        raise CheckpointError(f"{file} has no tensors; the LoRA adapter '{name}' would add nothing")
    return {module: _pair(config, module, found) for module, found in sides.items()}


def _module_of(tensor: str, file: Path) -> tuple[str, str]:
    """The module that a tensor is for, from the layers on, and which of its two it is."""
    found = _TENSOR.fullmatch(tensor)
    module = None if found is None else _MODULE.fullmatch(found["module"])
    if found is None or module is None or module["before"] not in _BEFORE_LAYERS:
        raise CheckpointError(
            f"{file}: tensor '{tensor}' is not supported; expected lora_A and lora_B of projections in the layers of "
            "the text decoder, as base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"
        )
    projection = module["module"].rpartition(".")[2]
    if projection not in PROJECTIONS:
        raise CheckpointError(
            f"{file}: tensor '{tensor}' adds to {projection}; an adapter may add to {', '.join(PROJECTIONS)}: train "
            "it without, or merge it into the weights"
        )
    return module["module"], found["side"]


def _check_config(config: JsonReader) -> None:
    kind = config.string("peft_type")
    if kind != "LORA":
        raise CheckpointError(f"{config.where}: field 'peft_type' is {shown(kind)}; expected \"LORA\"")
    for field, why in _REFUSED.items():
        if config.data.get(field):
            raise CheckpointError(
                f"{config.where}: field '{field}' is {shown(config.data[field])}, which is not supported: {why}; merge "
                "it into the weights"
            )
    bias = config.data.get("bias") or "none"
    if bias != "none":
        raise CheckpointError(f"{config.where}: field 'bias' is {shown(bias)}; expected \"none\"")
    start = config.data.get("init_lora_weights")
    if isinstance(start, str) and start.lower().startswith(_STARTS_OF_ITS_OWN):
        raise CheckpointError(
            f"{config.where}: field 'init_lora_weights' is {shown(start)}, which changes the target's weights as well; "
            "convert it to plain LoRA (PEFT's path_initial_model_for_weight_conversion), or merge it"
        )
    for field, value in config.data.items():
        if value and field not in _KNOWN and field not in _REFUSED and field != "bias":
            raise CheckpointError(f"{config.where}: field '{field}' is {shown(value)}, which is not known here")
    config.integer("r")
    config.number("lora_alpha")


def _pair(config: JsonReader, module: str, found: Mapping[str, TensorHeader]) -> _Pair:
    file = next(iter(found.values())).file
    if len(found) < 2:
        has = next(iter(found.values()))
        raise CheckpointError(f"{file}: tensor '{has.name}' is there without its other half, lora_A or lora_B")
    down, up = found["A"], found["B"]
    rank = int(_pattern(config, "rank_pattern", module, config.integer("r")))
    if down.shape[0] != rank or up.shape[1] != rank:
        raise CheckpointError(
            f"{file}: tensors '{down.name}' {list(down.shape)} and '{up.name}' {list(up.shape)} have another rank than "
            f"the {rank} that {CONFIG} says"
        )
    alpha = _pattern(config, "alpha_pattern", module, config.number("lora_alpha"))
    return _Pair(down, up, alpha / (math.sqrt(rank) if config.boolean("use_rslora", False) else rank))


def _pattern(config: JsonReader, field: str, module: str, default: float) -> float:
    """The value of the first of a field's patterns that is the end of a module's name, as PEFT reads them."""
    patterns = config.object(field)
    for pattern in patterns.data:
        try:
            fits = re.fullmatch(rf"(.*\.)?({pattern})", f"model.{module}") is not None
        except re.error as error:
            raise CheckpointError(f"{patterns.where}: '{pattern}' is no regular expression ({error})") from None
        if fits:
            return patterns.integer(pattern) if field == "rank_pattern" else patterns.number(pattern)
    return default


def _check_shapes(pair: _Pair, out_features: int, in_features: int) -> None:
    for header, axis, expected in ((pair.down, 1, in_features), (pair.up, 0, out_features)):
        if header.shape[axis] != expected:
            raise CheckpointError(
                f"{header.file}: tensor '{header.name}' has the shape {list(header.shape)}; the target's projection "
                f"has {expected} numbers there: is it an adapter of another model?"
            )


def _numbers(header: TensorHeader) -> torch.Tensor:
    try:
        with safe_open(header.file, framework="pt", device="cpu") as reader:
            numbers: torch.Tensor = reader.get_tensor(header.name).float()
    except (SafetensorError, OSError) as error:
        raise broken_file(header.file, error) from None
    if not bool(numbers.isfinite().all()):
        raise CheckpointError(f"{header.file}: tensor '{header.name}' has values that are no finite numbers")
    return numbers
