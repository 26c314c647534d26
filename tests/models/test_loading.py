"""How a target reads its tensors: each once, into its place, and what has no part in the model is left aside."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from dflash_backend.checkpoints import TARGET_ARCHITECTURES, CheckpointError, read_target
from dflash_backend.checkpoints.weights import expected_tensors
from dflash_backend.models import load_target
from dflash_backend.models.decoder import TargetWeights
from dflash_backend.models.linear import table_of
from tests.models.sources import TensorSource
from tests.support.tiny_models import make_target

pytestmark = pytest.mark.usefixtures("single_thread")
CPU = torch.device("cpu")


@pytest.mark.parametrize("architecture", TARGET_ARCHITECTURES)
def test_a_target_reads_every_tensor_of_its_checkpoint_once_and_without_a_second_copy(
    tmp_path: Path, architecture: str
) -> None:
    make_target(tmp_path, architecture=architecture, tie_word_embeddings=False)
    spec, tensors = read_target(tmp_path), load_file(tmp_path / "model.safetensors")
    expected = expected_tensors(lambda source: TargetWeights.read(source, spec))
    assert {name: tensor.shape for name, tensor in expected.items()} == {n: t.shape for n, t in tensors.items()}
    source = TensorSource(tensors)
    TargetWeights.read(source, spec)
    assert not source.unread
    parameters = {out.untyped_storage().data_ptr(): out.untyped_storage().nbytes() for out in source.outs.values()}
    assert sum(parameters.values()) == sum(tensor.nbytes for tensor in tensors.values())
    assert len(parameters) < len(tensors), "projections of one input are one parameter"


def test_the_decay_of_a_gated_delta_net_is_not_rounded(tmp_path: Path) -> None:
    """Published files of Qwen3.5 have it in float32 beside weights in bfloat16, as vLLM keeps it."""
    make_target(tmp_path, architecture="Qwen3_5ForCausalLM")
    stored = load_file(tmp_path / "model.safetensors")["model.layers.0.linear_attn.A_log"]
    assert not torch.equal(stored, stored.bfloat16().float())
    target: Any = load_target(read_target(tmp_path), 16, torch.bfloat16, CPU)
    assert torch.equal(target.layers[0].weights.net.decay, stored.exp())


def change(directory: Path, added: dict[str, torch.Tensor]) -> None:
    file = directory / "model.safetensors"
    save_file(load_file(file) | added, file)


def test_stored_frequencies_and_the_copy_of_a_tied_head_are_left_aside(tmp_path: Path) -> None:
    make_target(tmp_path, architecture="LlamaForCausalLM")
    frequencies = {f"model.layers.{i}.self_attn.rotary_emb.inv_freq": torch.ones(8) for i in range(5)}
    embedding = load_file(tmp_path / "model.safetensors")["model.embed_tokens.weight"]
    change(tmp_path, frequencies | {"lm_head.weight": embedding.clone()})
    target = load_target(read_target(tmp_path), 16, torch.float32, CPU)
    assert table_of(target.lm_head) is target.embedding  # type: ignore[attr-defined]
    assert torch.equal(target.embed(torch.arange(len(embedding))), embedding)


def test_a_tensor_that_the_family_has_no_place_for_is_refused_by_name(tmp_path: Path) -> None:
    make_target(tmp_path, architecture="MistralForCausalLM")
    change(tmp_path, {"model.layers.2.self_attn.q_proj.bias": torch.zeros(64)})
    with pytest.raises(CheckpointError, match="layers.2.self_attn.q_proj.bias.*not part of this model"):
        load_target(read_target(tmp_path), 16, torch.float32, CPU)


def test_a_checkpoint_runs_in_another_dtype_than_its_own(tmp_path: Path) -> None:
    make_target(tmp_path, dtype=torch.bfloat16)
    target = load_target(read_target(tmp_path), 16, torch.float32, CPU)
    assert target.lm_head.weight.dtype == torch.float32
    assert target.logits(torch.ones(1, 32)).dtype == torch.float32
