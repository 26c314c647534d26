"""Weights that stay in their blocks once a GGUF file is converted: how they are read, and what contradicts itself."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import huggingface_hub.constants
import numpy as np
import pytest
import torch
from safetensors.numpy import load_file
from safetensors.torch import load_file as load_torch_file
from safetensors.torch import save_file

from dflash_backend import LLM
from dflash_backend.checkpoints import CheckpointError, describe, find_model, read_target, weights
from dflash_backend.checkpoints.describe import target_facts
from dflash_backend.checkpoints.files import GGUF_BLOCKS, have_equal_numbers, read_header
from dflash_backend.checkpoints.gguf import convert
from dflash_backend.checkpoints.gguf.blocks import BLOCKS
from dflash_backend.checkpoints.gguf.convert import converted
from dflash_backend.checkpoints.gguf.parts import in_order
from dflash_backend.checkpoints.gguf.reader import GgufTensor
from dflash_backend.checkpoints.quantization.slices import Slice
from dflash_backend.checkpoints.weights import WeightSource, load_weights
from dflash_backend.config import asset_path
from dflash_backend.drafters.dflash.drafter import DFlashDrafter
from dflash_backend.engine.inspection import inspect
from dflash_backend.models import load_target
from dflash_backend.models.decoder import DecoderTarget
from dflash_backend.models.layers import LayerWeights
from dflash_backend.models.linear import PackedLinear
from dflash_backend.models.mlp import DenseMlp
from dflash_backend.models.ops import CpuLayerOps
from dflash_backend.text.tokenizer import Tokenizer
from dflash_kernels.cpu_ops import HAS_CPU_OPS, HAS_PAIRS, PackedWeight
from load_tests.prompts import load_prompts
from tests.support.gguf_checkpoint import write_gguf
from tests.support.tiny_models import VOCAB_SIZE, make_target

CPU = torch.device("cpu")
CHANGES = {"hidden_size": 64, "intermediate_size": 96, "head_dim": 16, "tie_word_embeddings": False}


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "home" / "hub"))


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """A target whose matrices are in Q4_1, and the head in Q8_0."""
    return write(tmp_path, lambda name, raw: raw)


def write(folder: Path, change: Callable[[str, np.ndarray[Any, Any]], np.ndarray[Any, Any]]) -> Path:
    def block(name: str, tensor: np.ndarray[Any, Any]) -> tuple[np.ndarray[Any, Any], str] | None:
        if tensor.ndim == 1:
            return None
        kind = "Q8_0" if name == "output.weight" else "Q4_1"
        return change(name, gguf.quants.quantize(tensor, gguf.GGMLQuantizationType[kind])), kind

    make_target(folder / "source", architecture="LlamaForCausalLM", **CHANGES)
    write_gguf(folder / "m.gguf", folder / "source", "llama", block=block)
    return folder / "m.gguf"


def test_a_directory_is_as_large_as_its_file_and_says_so(file: Path) -> None:
    directory = find_model(str(file), "target_model")
    weights = directory / "model.safetensors"
    assert weights.stat().st_size < 1.1 * file.stat().st_size
    headers = read_header(weights)
    head = headers["lm_head.weight"]
    assert (head.dtype, head.blocks, head.shape[1]) == ("F32", "Q8_0", 64)
    assert head.num_bytes == head.shape[0] * 64 // 32 * 34
    facts = dict(target_facts(read_target(directory)))
    assert "Q8_0 (1 tensors)" in facts["blocks"]
    report = inspect(str(directory))
    (target,) = report.checkpoints
    assert target.weights is not None
    assert target.weights.dtypes["Q8_0"] == 1
    assert target.weights.num_bytes < file.stat().st_size


@pytest.mark.parametrize(("name", "mebibytes"), [("mlp", 10.0), ("mlp.experts.0", 64.0)])
def test_what_blocks_take_in_memory_counts_experts_as_numbers(tmp_path: Path, name: str, mebibytes: float) -> None:
    rows = torch.zeros(4096, 4096 // 32 * 20, dtype=torch.uint8)
    weight = f"model.layers.0.{name}.up_proj.weight"
    save_file({weight: rows}, tmp_path / "model.safetensors", metadata={GGUF_BLOCKS: json.dumps({weight: "Q4_1"})})
    ((_, said),) = describe._block_facts(tmp_path, "float32")
    assert f"about {mebibytes} MiB in its memory; elsewhere all become float32" in said


@pytest.mark.skipif(not HAS_CPU_OPS, reason="needs a C++ compiler")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize(("kind", "bits"), [("Q4_1", 5), ("Q8_0", 8.5), ("Q4_K", 6), ("Q2_K", None)])
def test_on_a_cpu_weights_stay_in_few_bits_and_answers_are_those_of_their_numbers(
    tmp_path: Path, kind: str, bits: float | None, tied: bool, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The embedding has another type than the others. A type without products becomes numbers as it is loaded."""
    rng = np.random.default_rng(3)

    def block(name: str, tensor: np.ndarray[Any, Any]) -> tuple[np.ndarray[Any, Any], str] | None:
        own = "Q8_0" if name == "token_embd.weight" else kind
        if tensor.ndim == 1:
            return None
        if own in ("Q4_1", "Q8_0"):
            return gguf.quants.quantize(tensor, gguf.GGMLQuantizationType[own]), own
        per_block, num_bytes = BLOCKS[own]
        blocks = rng.integers(0, 256, (len(tensor), tensor.shape[1] // per_block, num_bytes), np.uint8)
        for at in (0, 2) if own == "Q4_K" else (80, 82):
            steps = rng.uniform(-0.01, 0.01, blocks.shape[:2]).astype("<f2")
            blocks[..., at : at + 2] = steps[..., None].view("u1")
        return blocks.reshape(len(tensor), -1), own

    changes = {"hidden_size": 256, "intermediate_size": 256, "head_dim": 64, "tie_word_embeddings": tied}
    make_target(tmp_path / "source", architecture="LlamaForCausalLM", **changes)
    write_gguf(tmp_path / "m.gguf", tmp_path / "source", "llama", block=block)
    spec = read_target(find_model(str(tmp_path / "m.gguf"), "target_model"))
    scores = []
    for keeps in (True, False):
        monkeypatch.setattr(CpuLayerOps, "keeps_blocks", keeps)
        target = load_target(spec, 64, dtype, CPU)
        assert isinstance(target, DecoderTarget)
        weights = target.layers[0].weights
        assert isinstance(weights, LayerWeights)
        assert isinstance(weights.mlp, DenseMlp)
        for linear in (weights.qkv, weights.output, weights.mlp.gate_up, weights.mlp.down, target.lm_head):
            assert isinstance(linear, PackedLinear)
            rows, columns = linear.packed.shape
            in_few = (8.5 if tied and linear is target.lm_head else bits) if keeps else None
            # Of up to 64 outputs that lie together.
            found = linear.packed.data.nbytes * 8 / columns
            assert found in [(in_few or dtype.itemsize * 8.0) * -(-rows // unit) * unit for unit in (16, 32, 64)]
        assert isinstance(target.embedding, PackedWeight) == (keeps or tied)
        hidden = target.embed(torch.arange(VOCAB_SIZE))
        scores.append((hidden, weights.mlp.forward(hidden, target.ops), target.logits(hidden)))
    if dtype == torch.bfloat16 and not HAS_PAIRS:  # numbers of blocks are not rounded there, as test_cpu_ops.py has it
        for kept, rounded in zip(*scores, strict=True):
            assert (kept - rounded).norm() < 0.01 * rounded.norm()
    else:
        assert all(map(torch.equal, *scores))


def test_columns_that_change_places_become_numbers(tmp_path: Path) -> None:
    tensor = GgufTensor(tmp_path / "w", "w", "Q4_1", (4, 64), 0, 32, 20)
    rows = np.arange(4)
    assert convert._written_kind(in_order(tensor, rows), False) == "Q4_1"
    assert convert._written_kind(in_order(tensor, rows), True) == "F32"
    assert convert._written_kind(in_order(tensor, rows, column_order=np.arange(64)[::-1]), False) == "F32"
    assert convert._written_kind(in_order(tensor, rows, change=lambda numbers: numbers - 1), False) == "F32"


def test_blocks_count_in_the_progress_of_a_load(file: Path) -> None:
    shares: list[float] = []
    spec = read_target(find_model(str(file), "target_model"))
    load_target(spec, 64, torch.float32, CPU, lambda line, share: shares.append(share))
    assert shares[-1] == 1.0


def test_for_other_programs_all_are_numbers(file: Path) -> None:
    plain, kept = converted(file, plain=True), converted(file)
    assert plain != kept
    assert not any(header.blocks for header in read_header(plain / "model.safetensors").values())
    numbers = load_file(plain / "model.safetensors")
    assert {tensor.dtype for tensor in numbers.values()} == {np.dtype("<f4")}
    found = load_weights(
        kept, lambda source: {name: source.tensor(name, *of.shape) for name, of in numbers.items()}, torch.float32, CPU
    )
    assert all(np.array_equal(found[name].numpy(), tensor) for name, tensor in numbers.items())


def test_parts_of_a_weight_are_those_of_its_numbers(file: Path) -> None:
    """As ranks take them: rows, columns, some at a time."""
    directory, plain = find_model(str(file), "target_model"), converted(file, plain=True)
    name = "model.layers.0.mlp.down_proj.weight"
    shapes = {each: header.shape for each, header in read_header(directory / "model.safetensors").items()}
    whole = torch.from_numpy(load_file(plain / "model.safetensors")[name])
    for dim, parts, num_parts in ((0, [1], 4), (0, [0, 2, 3], 4), (1, [2], 3), (1, [0, 2], 3)):

        def read(source: WeightSource, dim: int = dim, parts: list[int] = parts, num: int = num_parts) -> torch.Tensor:
            for each, shape in shapes.items():
                if each != name:
                    source.tensor(each, *shape)
            size = [len(parts) * n // num if i == dim else n for i, n in enumerate(shapes[name])]
            source.read_projection(name, out := source.empty(*size), Slice(dim, tuple(parts), num))
            return out

        chunks = whole.chunk(num_parts, dim)
        expected = torch.cat([chunks[part] for part in parts], dim)
        assert torch.equal(load_weights(directory, read, torch.float32, CPU), expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("tensor", ["blk.1.ffn_down.weight", "token_embd.weight", "output.weight"])
def test_a_step_that_is_no_number_is_refused_by_name(tmp_path: Path, tensor: str, dtype: torch.dtype) -> None:
    def change(name: str, raw: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        raw[3, :2] = np.array([float("nan")], "<f2").view("u1") if name == tensor else raw[3, :2]
        return raw

    spec = read_target(find_model(str(write(tmp_path, change)), "target_model"))
    with pytest.raises(CheckpointError, match=r"the tensor \S+ has values that are no numbers \(NaN\)"):
        load_target(spec, 64, dtype, CPU)


@pytest.mark.parametrize(
    "kinds",
    ["[]", "{", '{"w": "Q4_9"}', '{"v": "Q4_1"}', '{"w": "Q8_0"}', '{"one": "Q4_1"}', '{"floats": "Q4_1"}', '{"w": 3}'],
)
def test_metadata_that_contradicts_the_tensors_is_refused(tmp_path: Path, kinds: str) -> None:
    tensors = {
        "w": torch.zeros(4, 40, dtype=torch.uint8),
        "one": torch.zeros(20, dtype=torch.uint8),
        "floats": torch.zeros(4, 20),
    }
    save_file(tensors, tmp_path / "m.safetensors", metadata={GGUF_BLOCKS: kinds})
    with pytest.raises(
        CheckpointError, match="its metadata 'gguf_blocks' is not that of its tensors; convert it again"
    ):
        read_header(tmp_path / "m.safetensors")


def test_heads_in_blocks_are_compared_by_their_bytes(tmp_path: Path) -> None:
    rows = torch.arange(80, dtype=torch.uint8).view(4, 20)
    other = rows.clone()
    other[3, 7] += 1
    kinds = dict.fromkeys(("a", "b", "c"), "Q4_1")
    tensors = {"a": rows, "b": rows.clone(), "c": other}
    save_file(tensors, tmp_path / "m.safetensors", metadata={GGUF_BLOCKS: json.dumps(kinds)})
    found = read_header(tmp_path / "m.safetensors")
    assert have_equal_numbers(found["a"], found["b"])
    assert not have_equal_numbers(found["a"], found["c"])


@pytest.mark.skipif(not HAS_CPU_OPS, reason="needs a C++ compiler")
def test_a_drafter_stays_in_its_blocks_and_drafts_as_its_numbers_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The demo pair's, whose drafts are accepted; the number of drafts does not follow measured times."""

    def block(name: str, tensor: np.ndarray[Any, Any]) -> tuple[np.ndarray[Any, Any], str] | None:
        fits = tensor.ndim > 1 and tensor.shape[1] % 32 == 0
        return (gguf.quants.quantize(tensor, gguf.GGMLQuantizationType.Q8_0), "Q8_0") if fits else None

    pair = asset_path("demo", "pair")
    (tmp_path / "source").mkdir()
    shutil.copy(pair / "draft" / "config.json", tmp_path / "source")
    numbers = {name: each.float() for name, each in load_torch_file(pair / "draft" / "model.safetensors").items()}
    save_file(numbers, tmp_path / "source" / "model.safetensors")
    write_gguf(tmp_path / "d.gguf", tmp_path / "source", "dflash", block=block)
    prompt = Tokenizer.load(pair / "target").encode(load_prompts(1)[0].prompt)
    runs, sizes = [], []
    for keeps in (True, False):
        monkeypatch.setattr(CpuLayerOps, "keeps_blocks", keeps)
        llm = LLM(
            target=str(pair / "target"), draft=str(tmp_path / "d.gguf"), dtype="float32", kv_cache_gb=0.02,
            adaptive_speculation=False,
        )  # fmt: skip
        drafter = llm.engine.runner.model.drafter
        assert isinstance(drafter, DFlashDrafter)
        assert isinstance(drafter.model.fc, PackedLinear)
        sizes.append(drafter.model.fc.packed.data.nbytes)
        (output,) = llm.generate([prompt], max_tokens=40, temperature=0, ignore_eos=True)
        runs.append((output.token_ids, llm.stats().spec_decoding))
    assert runs[0] == runs[1]
    assert runs[0][1].acceptance_length > 4
    outputs, inputs = drafter.model.fc.weight.shape
    # 34 bytes are 32 weights in Q8_0, of 32 or 64 outputs that lie together.
    assert sizes[0] in [-(-outputs // unit) * unit * inputs * 34 // 32 for unit in (32, 64)]
    assert sizes[1] == outputs * inputs * 4


def test_a_gpu_reads_blocks_as_they_are_asked_for(file: Path) -> None:
    """Not ahead, since what is read ahead has the shape of its numbers."""

    def read(source: WeightSource) -> None:
        for name, header in headers.items():
            source.tensor(name, *header.shape)

    directory = find_model(str(file), "target_model")
    headers = read_header(directory / "model.safetensors")
    assert set(weights._check(directory, read, lambda name: False).order) == {
        name for name, header in headers.items() if not header.blocks
    }
