"""How a target takes its tensors: what is fused is freed at once, and what has no part in the model is left aside."""

from __future__ import annotations

import weakref
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from dflash_backend.checkpoints import CheckpointError
from dflash_backend.checkpoints.targets import read_target
from dflash_backend.models import TARGETS, load_target
from dflash_backend.models.decoder import DecoderTarget, tensor_shapes
from dflash_backend.models.layers import LayerWeights
from tests.tiny_models import make_target

CPU = torch.device("cpu")


@pytest.mark.parametrize("architecture", TARGETS)
def test_a_layer_frees_what_it_fuses_before_the_next_is_taken(tmp_path: Path, architecture: str) -> None:
    make_target(tmp_path, architecture=architecture)
    spec, family = read_target(tmp_path), TARGETS[architecture]
    tensors = {name: torch.zeros(shape) for name, shape in tensor_shapes(spec, family).items()}
    first = LayerWeights.shapes(spec.decoder, family(spec.decoder, 0), "model.layers.0.")
    fused = {name: weakref.ref(tensors[name]) for name in first if ".q_proj." in name or ".up_proj." in name}
    assert fused
    LayerWeights.take(tensors, spec.decoder, family(spec.decoder, 0), "model.layers.0.")
    assert not any(name.startswith("model.layers.0.") for name in tensors)
    assert any(name.startswith("model.layers.1.") for name in tensors)
    assert all(reference() is None for reference in fused.values())


@pytest.mark.parametrize("architecture", TARGETS)
def test_a_target_takes_every_tensor_of_its_checkpoint(tmp_path: Path, architecture: str) -> None:
    make_target(tmp_path, architecture=architecture, tie_word_embeddings=False)
    spec, family = read_target(tmp_path), TARGETS[architecture]
    tensors = load_file(tmp_path / "model.safetensors")
    assert set(tensors) == set(tensor_shapes(spec, family))
    DecoderTarget(spec, family, tensors, 16, torch.float32)
    assert not tensors


def change(directory: Path, added: dict[str, torch.Tensor]) -> None:
    file = directory / "model.safetensors"
    save_file(load_file(file) | added, file)


def test_stored_frequencies_and_the_copy_of_a_tied_head_are_left_aside(tmp_path: Path) -> None:
    make_target(tmp_path, architecture="LlamaForCausalLM")
    frequencies = {f"model.layers.{i}.self_attn.rotary_emb.inv_freq": torch.ones(8) for i in range(5)}
    change(tmp_path, frequencies | {"lm_head.weight": torch.ones(97, 32)})
    target = load_target(read_target(tmp_path), 16, torch.float32, CPU)
    assert target.lm_head is target.embedding  # type: ignore[attr-defined]


def test_a_tensor_that_the_family_has_no_place_for_is_refused_by_name(tmp_path: Path) -> None:
    make_target(tmp_path, architecture="MistralForCausalLM")
    change(tmp_path, {"model.layers.2.self_attn.q_proj.bias": torch.zeros(64)})
    with pytest.raises(CheckpointError, match="layers.2.self_attn.q_proj.bias.*not part of this model"):
        load_target(read_target(tmp_path), 16, torch.float32, CPU)


def test_a_checkpoint_runs_in_another_dtype_than_its_own(tmp_path: Path) -> None:
    make_target(tmp_path, dtype=torch.bfloat16)
    target = load_target(read_target(tmp_path), 16, torch.float32, CPU)
    assert target.lm_head.dtype == torch.float32
    assert target.logits(torch.ones(1, 32)).dtype == torch.float32
