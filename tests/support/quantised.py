"""Writes quantised checkpoints by their published layouts, number by number, with the weights that they stand for.

Independent of the code under test, and slow: every code is put into its word by itself.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file

from tests.support.tiny_models import make_target

Tensors = dict[str, torch.Tensor]
# A weight `[out, in]` -> its tensors by what follows the projection's name, and the weight that they stand for.
Packer = Callable[[torch.Tensor], tuple[Tensors, torch.Tensor]]

# Which row of eight each four bits of a word of AWQ are for, from the lowest (AutoAWQ, gemm).
AWQ_ROWS = (0, 2, 4, 6, 1, 3, 5, 7)
E4M3_MAX = 448.0


def is_projection(name: str) -> bool:
    """Whether tools of quantisation change this tensor of a checkpoint by default."""
    return name.endswith("_proj.weight")


@dataclass(frozen=True)
class Copies:
    """A checkpoint quantised, and the same one with the weights that it stands for as plain float32."""

    quantised: Path
    plain: Path


def write(source: Path, folder: Path, packer: Packer, config: dict[str, Any]) -> Copies:
    """Quantise all projections of the checkpoint in `source`. config: its `quantization_config`."""
    return write_by_name(source, folder, lambda name: packer if is_projection(name) else None, config)


def write_by_name(
    source: Path, folder: Path, packer_of: Callable[[str], Packer | None], config: dict[str, Any]
) -> Copies:
    """As `write`; `packer_of` gives what packs a tensor by its name, or None for one that stays as it is."""
    packed, plain = {}, {}
    for name, tensor in load_file(source / "model.safetensors").items():
        packer = packer_of(name)
        if packer is None:
            packed[name] = plain[name] = tensor
            continue
        parts, weight = packer(tensor.float())
        plain[name] = weight.contiguous()
        packed |= {name.removesuffix("weight") + part: value.contiguous() for part, value in parts.items()}
    copies = Copies(folder / "quantised", folder / "plain")
    for directory, content in ((copies.quantised, packed), (copies.plain, plain)):
        shutil.copytree(source, directory)
        save_file(content, directory / "model.safetensors", metadata={"format": "pt"})
    edit_config(copies.quantised, quantization_config=config)
    return copies


def edit_config(directory: Path, **changes: Any) -> None:
    """Set fields of a checkpoint's config."""
    path = directory / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def edit_tensors(directory: Path, change: Callable[[Tensors], object]) -> None:
    """Change the tensors of a checkpoint in place."""
    tensors = load_file(directory / "model.safetensors")
    change(tensors)
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})


def fp8_block(rows: int = 128, columns: int = 128, scale: str = "weight_scale_inv") -> Packer:
    """DeepSeek's and Qwen's: e4m3 and a scale for each block, the last ones smaller."""

    def pack(weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
        out, inner = weight.shape
        codes, result = torch.zeros(out, inner, dtype=torch.float8_e4m3fn), torch.zeros(out, inner)
        scales = torch.zeros(-(-out // rows), -(-inner // columns))
        for i in range(scales.shape[0]):
            for j in range(scales.shape[1]):
                where = slice(i * rows, (i + 1) * rows), slice(j * columns, (j + 1) * columns)
                scales[i, j] = weight[where].abs().max() / E4M3_MAX
                codes[where] = (weight[where] / scales[i, j]).to(torch.float8_e4m3fn)
                result[where] = codes[where].float() * scales[i, j]
        return {"weight": codes, scale: scales}, result

    return pack


def fp8_tensor(scale: str = "weight_scale", shape: tuple[int, ...] = ()) -> Packer:
    """One scale for the tensor."""

    def pack(weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
        value = weight.abs().max() / E4M3_MAX
        codes = (weight / value).to(torch.float8_e4m3fn)
        return {"weight": codes, scale: value.reshape(shape)}, codes.float() * value

    return pack


def fp8_rows(weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
    """FBGEMM's: a scale for each row."""
    scales = weight.abs().amax(dim=1, keepdim=True) / E4M3_MAX
    codes = (weight / scales).to(torch.float8_e4m3fn)
    return {"weight": codes, "weight_scale": scales}, codes.float() * scales


def _codes(weight: torch.Tensor, bits: int, groups: np.ndarray) -> tuple[np.ndarray, ...]:
    """Codes `[out, in]`, zero points and float16 scales `[out, groups]`, and the weights that they stand for."""
    values, most = weight.numpy(), 2**bits - 1
    out, count = values.shape[0], int(groups.max()) + 1
    codes, result = np.zeros(values.shape, np.int64), np.zeros(values.shape, np.float32)
    zeros, scales = np.zeros((out, count), np.int64), np.zeros((out, count), np.float16)
    for group in range(count):
        columns = groups == group
        part = values[:, columns]
        low, high = np.minimum(part.min(axis=1), 0), np.maximum(part.max(axis=1), 0)
        scales[:, group] = np.maximum((high - low) / most, 1e-4)
        scale = scales[:, group].astype(np.float32)[:, None]
        zeros[:, group] = np.clip(np.round(-low / scale[:, 0]), 0, most)
        zero = zeros[:, group][:, None]
        codes[:, columns] = np.clip(np.round(part / scale) + zero, 0, most)
        result[:, columns] = (codes[:, columns] - zero) * scale
    return codes, zeros, scales, result


def _words(array: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(array.astype(np.uint32).view(np.int32))


def gptq(bits: int = 4, group: int = 16, stored_less: int = 1, shuffled: bool = False, g_idx: bool = True) -> Packer:
    """AutoGPTQ's: `stored_less` is how much less than the zero point is stored; shuffled: columns in an order of their
    own (`desc_act`). group: -1 for one of all columns."""

    def pack(weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
        out, inner = weight.shape
        groups = np.arange(inner) // (inner if group == -1 else group)
        if shuffled:
            groups = groups[np.random.default_rng(inner).permutation(inner)]
        codes, zeros, scales, result = _codes(weight, bits, groups)
        each = 32 // bits
        qweight = np.zeros((inner // each, out), np.uint64)
        for column in range(inner):
            qweight[column // each] |= codes[:, column].astype(np.uint64) << np.uint64(bits * (column % each))
        qzeros = np.zeros((scales.shape[1], out // each), np.uint64)
        for row in range(out):
            stored = (zeros[row] - stored_less) % 2**bits
            qzeros[:, row // each] |= stored.astype(np.uint64) << np.uint64(bits * (row % each))
        tensors = {"qweight": _words(qweight), "qzeros": _words(qzeros), "scales": torch.from_numpy(scales.T.copy())}
        if g_idx:
            tensors["g_idx"] = torch.from_numpy(groups.astype(np.int32))
        return tensors, torch.from_numpy(result)

    return pack


def awq(group: int = 16) -> Packer:
    """AutoAWQ's `gemm`."""

    def pack(weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
        out, inner = weight.shape
        codes, zeros, scales, result = _codes(weight, 4, np.arange(inner) // group)
        qweight = np.zeros((inner, out // 8), np.uint64)
        qzeros = np.zeros((scales.shape[1], out // 8), np.uint64)
        for word in range(out // 8):
            for place, row in enumerate(AWQ_ROWS):
                shift = np.uint64(4 * place)
                qweight[:, word] |= codes[8 * word + row].astype(np.uint64) << shift
                qzeros[:, word] |= zeros[8 * word + row].astype(np.uint64) << shift
        tensors = {"qweight": _words(qweight), "qzeros": _words(qzeros), "scales": torch.from_numpy(scales.T.copy())}
        return tensors, torch.from_numpy(result)

    return pack


FP8_BLOCK = {
    "quant_method": "fp8",
    "activation_scheme": "dynamic",
    "fmt": "e4m3",
    "weight_block_size": [128, 128],
}
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 16, "desc_act": False, "sym": False}
AWQ = {"quant_method": "awq", "bits": 4, "group_size": 16, "zero_point": True, "version": "gemm"}


def make_qwen_fp8(folder: Path, **changes: Any) -> Copies:
    """A tiny Qwen3 in FP8, whose projections have several blocks of 128 x 128 and others smaller."""
    make_target(folder / "source", **({"hidden_size": 160, "intermediate_size": 272} | changes))
    return write(folder / "source", folder, fp8_block(), FP8_BLOCK)
