"""`quantization=fp8`: a plain target gets the weights that a checkpoint in FP8 with a scale for each row stands for."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from dflash_backend.checkpoints import CheckpointError, read_target
from dflash_backend.checkpoints.files import check_files
from dflash_backend.checkpoints.quantization.at_load import round_to_fp8
from dflash_backend.config import ConfigError, EngineConfig
from dflash_backend.engine.build import build_engine
from dflash_backend.models import TargetModel, load_target
from tests.models.test_text_parts import stack_experts
from tests.support.mxfp4_checkpoint import make_mxfp4_target
from tests.support.quantised import GPTQ, Packer, edit_config, edit_tensors, fp8_rows, gptq, write, write_by_name
from tests.support.tiny_models import make_pair, make_target

CPU = torch.device("cpu")
FBGEMM = {"quant_method": "fbgemm_fp8"}
# Tools leave these as they are.
KEPT = (".gate.weight", ".shared_expert_gate.weight", ".in_proj_ba.weight", ".in_proj_a.weight", ".in_proj_b.weight")


def load(directory: Path, dtype: torch.dtype = torch.float32, fp8: bool = False) -> TargetModel:
    return load_target(read_target(directory), 64, dtype, CPU, fp8=fp8)


def tensors_of(owner: Any, name: str = "") -> dict[str, torch.Tensor]:
    """All parameters of a model, by where they lie in it."""
    if isinstance(owner, torch.Tensor):
        return {name: owner}
    found: dict[str, torch.Tensor] = {}
    if isinstance(owner, list | tuple):
        items = [(str(index), item) for index, item in enumerate(owner)]
    elif isinstance(owner, dict):
        items = list(owner.items())
    elif type(owner).__module__.startswith(("dflash_backend.", "dflash_kernels.")):
        slots = [slot for slot in getattr(type(owner), "__slots__", ()) if slot != "_cpu"]
        items = [(key, getattr(owner, key)) for key in slots] or list(vars(owner).items())
    else:
        items = []
    for key, item in items:
        found |= tensors_of(item, f"{name}.{key}")
    return found


def packer_of(name: str) -> Packer | None:
    is_projection = name.endswith("_proj.weight") or ".in_proj_" in name or ".out_proj." in name
    return fp8_rows if is_projection and not name.endswith(KEPT) else None


@pytest.mark.parametrize(
    "architecture",
    ["Qwen3ForCausalLM", "Qwen2ForCausalLM", "Qwen3MoeForCausalLM", "Qwen3NextForCausalLM", "Qwen3_5MoeForCausalLM"],
)
def test_weights_are_to_the_bit_those_of_a_checkpoint_in_fp8(tmp_path: Path, architecture: str) -> None:
    make_target(tmp_path / "source", architecture=architecture, tie_word_embeddings=False)
    copies = write_by_name(tmp_path / "source", tmp_path, packer_of, FBGEMM)
    found, expected = (tensors_of(model) for model in (load(tmp_path / "source", fp8=True), load(copies.plain)))
    assert found.keys() == expected.keys()
    assert len(found) > 20
    for name, tensor in expected.items():
        assert torch.equal(found[name], tensor), name
    plain = tensors_of(load(tmp_path / "source"))
    changed = {name for name in plain if not torch.equal(plain[name], found[name])}
    assert any(".mlp." in name for name in changed), "the weights are others"
    assert not any("lm_head" in name or "embedding" in name or "norm" in name for name in changed)


def test_experts_in_one_tensor_become_what_they_do_one_by_one(tmp_path: Path) -> None:
    make_target(tmp_path, architecture="Qwen3_5MoeForCausalLM")
    one_by_one = tensors_of(load(tmp_path, fp8=True))
    tensors = stack_experts(load_file(tmp_path / "model.safetensors"))
    assert any(name.endswith("experts.gate_up_proj") for name in tensors)
    save_file(tensors, tmp_path / "model.safetensors")
    found = tensors_of(load(tmp_path, fp8=True))
    assert found.keys() == one_by_one.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in one_by_one.items())


def test_a_stored_checkpoint_in_fp8_loads_as_the_same_weights_in_bfloat16_too(tmp_path: Path) -> None:
    make_target(tmp_path / "source", dtype=torch.bfloat16)
    copies = write(tmp_path / "source", tmp_path, fp8_rows, FBGEMM)
    for dtype in (torch.float32, torch.bfloat16):
        found = tensors_of(load(tmp_path / "source", dtype, fp8=True))
        for name, tensor in tensors_of(load(copies.quantised, dtype)).items():
            assert torch.equal(found[name], tensor), name


def test_each_row_has_a_scale_of_its_own_and_zeros_stay() -> None:
    weight = torch.randn(6, 40, generator=torch.Generator().manual_seed(1))
    weight *= torch.tensor([1e-4, 1.0, 1e4, 0.0, 1e-44, 1e38])[:, None] / weight.abs().amax(dim=1, keepdim=True)
    exact = weight.clone()
    round_to_fp8("p", weight)
    assert weight.isfinite().all()
    assert not weight[3].any()
    for row in (0, 1, 2, 5):
        # e4m3 has four significant bits where it is normal, and steps of 2^-9 below.
        error, largest = (weight[row] - exact[row]).abs(), exact[row].abs().max()
        assert (error <= exact[row].abs() / 16 + largest / 448 * 2**-10).all()
        assert weight[row].abs().max() == pytest.approx(float(largest), rel=1e-6)


def test_weights_that_are_not_finite_are_named(tmp_path: Path) -> None:
    make_target(tmp_path)
    name = "model.layers.1.mlp.up_proj"
    edit_tensors(tmp_path, lambda tensors: tensors[f"{name}.weight"][3, 4].fill_(torch.inf))
    with pytest.raises(CheckpointError, match=f"'{name}' has numbers that are not finite"):
        load(tmp_path, fp8=True)


def test_the_drafter_stays_as_its_checkpoint_has_it(tmp_path: Path) -> None:
    pair = dict(make_pair(tmp_path))
    models = [
        build_engine(
            # No step is measured, which would leave its numbers in the model's buffers.
            EngineConfig.from_values(pair | {"device": "cpu", "quantization": value, "adaptive_speculation": False})
        ).runner.model.drafter.model
        for value in ("auto", "fp8")
    ]
    plain, beside_fp8 = ({id(t): t for t in tensors_of(vars(model)).values()}.values() for model in models)
    assert len(plain) > 10
    assert all(map(torch.equal, plain, beside_fp8))


def refused(target: Path, **settings: Any) -> str:
    values = {"target_model": str(target), "draft_model": "", "device": "cpu", "quantization": "fp8", **settings}
    with pytest.raises(ConfigError) as caught:
        build_engine(EngineConfig.from_values(values))
    return str(caught.value)


def test_a_target_that_cannot_be_made_fp8_is_refused_with_what_would_work(tmp_path: Path) -> None:
    make_target(tmp_path / "source")
    quantised = write(tmp_path / "source", tmp_path, gptq(), GPTQ).quantised
    assert "its weights are quantised already (gptq): leave the setting on auto" in refused(quantised)
    make_mxfp4_target(tmp_path / "mxfp4")
    assert "its weights are quantised already (MXFP4)" in refused(tmp_path / "mxfp4")
    make_target(tmp_path / "gpt_oss", architecture="GptOssForCausalLM")
    assert "take its checkpoint in MXFP4" in refused(tmp_path / "gpt_oss")
    edit_config(tmp_path / "source", quantization_config={"quant_method": "nvfp4"})
    with pytest.raises(CheckpointError, match=r"'quant_method' is 'nvfp4'.*Take a checkpoint of the same model in FP8"):
        read_target(tmp_path / "source")


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ("nvfp4", "weights in NVFP4 are not supported: take a checkpoint in FP8, in INT4 or in bfloat16"),
        ("mxfp4", "MXFP4 is for gpt-oss alone"),
        ("gguf", "a file in GGUF is given as the model itself, and says its types: leave the setting on auto"),
        ("GPTQ", "a checkpoint in gptq says so itself: leave the setting on auto"),
        ("int3", "allowed: auto or fp8$"),
    ],
)
def test_other_values_are_refused_with_what_would_work(value: str, expected: str) -> None:
    with pytest.raises(ConfigError, match=expected):
        EngineConfig.from_values({"quantization": value})


def test_a_folder_of_gguf_is_refused_with_what_would_work(tmp_path: Path) -> None:
    for name in ("model-q4_k_m.gguf", "b.gguf"):
        (tmp_path / name).write_bytes(b"GGUF")
    with pytest.raises(
        CheckpointError,
        match=r"weights in GGUF alone \(b.gguf, model-q4_k_m.gguf\): give the file itself, as in .*/b.gguf",
    ):
        check_files(tmp_path)
    for name in "cdef":
        (tmp_path / f"{name}.gguf").write_bytes(b"GGUF")
    with pytest.raises(CheckpointError, match=r"\(b.gguf, c.gguf, d.gguf, e.gguf and others\)"):
        check_files(tmp_path)
