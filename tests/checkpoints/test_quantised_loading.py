"""What is said of a quantised checkpoint, drafters with quantised weights, and the memory that loading takes."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from dflash_backend.checkpoints import read_target, target_facts
from dflash_backend.checkpoints.weights import expected_tensors, load_weights
from dflash_backend.config import EngineConfig
from dflash_backend.drafters.dflash.config import DFlashSpec
from dflash_backend.drafters.dflash.drafter import DFlashWeights
from dflash_backend.drafters.registry import read_draft
from dflash_backend.drafters.resolve import ModelPair
from dflash_backend.engine.build import build_engine
from dflash_backend.engine.inspection import inspect_draft, inspect_target
from dflash_backend.engine.sizing import loaded_bytes, model_bytes
from dflash_backend.models.decoder import TargetWeights
from tests.drafters.drafts import make_speculators
from tests.support.mxfp4_checkpoint import make_mxfp4_target
from tests.support.quantised import (
    AWQ,
    FP8_BLOCK,
    GPTQ,
    Packer,
    awq,
    fp8_block,
    gptq,
    make_qwen_fp8,
    write,
    write_by_name,
)
from tests.support.quantised_logits import ours
from tests.support.tiny_models import make_draft, make_pair, make_target

CPU = torch.device("cpu")


def test_the_facts_say_scheme_bits_and_sizes(tmp_path: Path) -> None:
    spec = read_target(make_qwen_fp8(tmp_path).quantised)
    facts = dict(target_facts(spec, "float32"))
    assert facts["quantised"].startswith("fp8: FP8 (e4m3), a scale for each 128 x 128 weights (35 projections); 8.0")
    # 5 layers of q, k, v, o (64, 32, 32, 64 rows or columns) and gate, up, down (272) by 160.
    numbers = 5 * 160 * (64 + 32 + 32 + 64 + 3 * 272)
    assert f" are {4 * numbers / 1024**2:.1f} MiB of float32 in memory" in facts["dequantised"]
    assert f"at load: {numbers / 1024**2:.1f} MiB in the files" in facts["dequantised"]
    assert facts["dequantised"].endswith("activations are not quantised")
    # A float32 for each 128 x 128: 3 by 2 of gate, up and down, 1 by 2 of q, k and v, 2 by 1 of o.
    blocks = 5 * (3 * 6 + 3 * 2 + 2)
    assert facts["kept"].startswith(
        f"on a GPU, whose products read codes: 100 % of these weights in {(numbers + 4 * blocks) / 1024**2:.1f} MiB"
    )
    bfloat16 = dict(target_facts(spec, "bfloat16"))["dequantised"]
    assert f" are {2 * numbers / 1024**2:.1f} MiB of bfloat16" in bfloat16


@pytest.mark.parametrize(("packer", "config"), [(gptq(), GPTQ), (awq(), AWQ), (fp8_block(), FP8_BLOCK)])
def test_sizes_count_weights_and_not_words(tmp_path: Path, packer: Packer, config: dict[str, object]) -> None:
    make_target(tmp_path / "source")
    copies = write(tmp_path / "source", tmp_path, packer, config)
    plain, quantised = (inspect_target(read_target(directory)) for directory in (copies.plain, copies.quantised))
    assert quantised.weights.num_parameters == plain.weights.num_parameters
    assert quantised.weights.num_bytes < plain.weights.num_bytes
    pairs = [ModelPair(read_target(directory), None, 0) for directory in (copies.plain, copies.quantised)]
    sizes = [model_bytes(pair, torch.float32) for pair in pairs]
    assert sizes[0] == sizes[1] == loaded_bytes(pairs[1], torch.float32)


def test_what_a_step_reads_of_mxfp4_is_what_its_numbers_take(tmp_path: Path) -> None:
    """A CPU dequantises it, and the number of threads follows from this."""
    make_mxfp4_target(tmp_path)
    spec = read_target(tmp_path)
    own = expected_tensors(lambda source: TargetWeights.read(source, spec))
    packed = [4 * own[name].numel() for name in own if name.endswith(("_blocks", "_scales"))]
    numbers = sum(2 * own[name].numel() for name in own if name.endswith("_blocks"))
    others = sum(tensor.numel() for name, tensor in own.items() if not name.endswith(("_blocks", "_scales")))
    assert packed
    for dtype in (torch.float32, torch.bfloat16):
        assert loaded_bytes(ModelPair(spec, None, 0), dtype) == dtype.itemsize * (numbers + others)


@pytest.mark.parametrize(
    ("packer", "config", "least", "most"),
    [
        (fp8_block(), FP8_BLOCK, 1.0, 1.1),
        (gptq(group=32), GPTQ | {"group_size": 32}, 0.5, 0.7),
        # Groups that no product reads.
        (gptq(), GPTQ, 4.0, 4.0),
    ],
)
def test_sizes_know_what_stays_quantised(
    tmp_path: Path, packer: Packer, config: dict[str, object], least: float, most: float
) -> None:
    make_target(tmp_path / "source", hidden_size=160, intermediate_size=320)
    copies = write(tmp_path / "source", tmp_path, packer, config)
    pair = ModelPair(read_target(copies.quantised), None, 0)
    saved = model_bytes(pair, torch.float32) - model_bytes(pair, torch.float32, keeps_quantised=True)
    # Rows and columns of 64, 32, 32, 64 and three times 320, by 160, in five layers.
    numbers = 5 * 160 * (64 + 32 + 32 + 64 + 3 * 320)
    assert least * numbers <= 4 * numbers - saved <= most * numbers
    plain = ModelPair(read_target(copies.plain), None, 0)
    assert model_bytes(plain, torch.float32, keeps_quantised=True) == model_bytes(plain, torch.float32)
    made = model_bytes(plain, torch.float32) - model_bytes(plain, torch.float32, keeps_quantised=True, fp8=True)
    assert 4 * numbers - made == numbers + 4 * 5 * (64 + 32 + 32 + 160 + 2 * 320 + 160)


def test_the_log_says_what_dequantised_weights_take(tmp_path: Path) -> None:
    settings = make_pair(tmp_path)
    target = write(tmp_path / "t", tmp_path / "a", gptq(), GPTQ).quantised
    draft = write(tmp_path / "d", tmp_path / "b", fp8_block(), FP8_BLOCK).quantised
    said: list[str] = []
    settings |= {"target_model": str(target), "draft_model": str(draft), "kv_cache_gb": 0.01}
    build_engine(EngineConfig.from_values(settings), lambda text, done: said.append(text))
    assert any(text.startswith("target: quantised: gptq: INT4, a scale and a zero point for each 16") for text in said)
    assert any(
        text.startswith("target: dequantised: at load: ") and "MiB of float32 in memory" in text for text in said
    )
    assert any(text.startswith("drafter: quantised: fp8: FP8 (e4m3)") for text in said)


def drafters_weights(spec: DFlashSpec) -> DFlashWeights:
    return load_weights(
        spec.path,
        lambda source: DFlashWeights.read(source, spec),
        torch.float32,
        CPU,
        ignored=lambda name: name == "t2d",
    )


@pytest.mark.parametrize("kind", ["zlab", "speculators"])
def test_a_drafters_projections_and_its_own_head_may_be_quantised(tmp_path: Path, kind: str) -> None:
    if kind == "zlab":
        make_draft(tmp_path / "source")
    else:
        make_speculators(tmp_path / "source")

    def pack(name: str) -> Packer | None:
        return awq() if name.endswith(("_proj.weight", "fc.weight", "lm_head.weight")) else None

    copies = write_by_name(tmp_path / "source", tmp_path, pack, AWQ)
    plain, quantised = read_draft(copies.plain), read_draft(copies.quantised)
    assert isinstance(plain, DFlashSpec)
    assert isinstance(quantised, DFlashSpec)
    assert quantised.has_lm_head == plain.has_lm_head == (kind == "speculators")
    inspect_draft(quantised)
    found, expected = drafters_weights(quantised), drafters_weights(plain)
    pairs = [(found.fc, expected.fc), *((a.qkv, b.qkv) for a, b in zip(found.layers, expected.layers, strict=True))]
    if found.lm_head is not None and expected.lm_head is not None:
        pairs.append((found.lm_head, expected.lm_head))
    for one, other in pairs:
        torch.testing.assert_close(one.weight, other.weight, atol=1e-6, rtol=0.0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_weight_is_rounded_to_the_served_dtype_once(tmp_path: Path, dtype: torch.dtype) -> None:
    make_target(tmp_path / "source")
    directory = write(tmp_path / "source", tmp_path, gptq(), GPTQ).quantised
    rounded, exact = (ours(directory, of).layers[1].weights.qkv.weight for of in (dtype, torch.float32))
    assert rounded.dtype == dtype
    assert torch.equal(rounded, exact.to(dtype))


def test_a_weight_and_its_scale_may_lie_in_different_files(tmp_path: Path) -> None:
    directory = make_qwen_fp8(tmp_path).quantised
    whole = ours(directory)
    tensors = load_file(directory / "model.safetensors")
    scales = {name: tensor for name, tensor in tensors.items() if name.endswith("scale_inv")}
    (directory / "model.safetensors").unlink()
    save_file({name: tensor for name, tensor in tensors.items() if name not in scales}, directory / "1.safetensors")
    save_file(scales, directory / "2.safetensors")
    parts = ours(directory)
    assert torch.equal(parts.layers[3].weights.mlp.down.weight, whole.layers[3].weights.mlp.down.weight)


# Loads a checkpoint and prints the peak above the start, in MiB.
LOAD = """
import sys
from pathlib import Path
import torch
from dflash_backend.checkpoints.weights import load_weights

def peak():
    line = next(l for l in Path("/proc/self/status").read_text().splitlines() if l.startswith("VmHWM"))
    return int(line.split()[1]) / 1024

def read(source):
    outs = []
    for i in range(8):
        source.read_projection(f"p{i}.weight", out := source.empty(2048, 2048))
        outs.append(out)
    return outs

torch.ones(8).to(torch.bfloat16)
Path("/proc/self/clear_refs").write_text("5")
before = peak()
weights = load_weights(Path(sys.argv[1]), read, torch.bfloat16, torch.device("cpu"))
print(peak() - before)
"""


@pytest.mark.slow
def test_loading_dequantises_one_weight_at_a_time(tmp_path: Path) -> None:
    tensors = {}
    for i in range(8):
        tensors[f"p{i}.weight"] = torch.ones(2048, 2048).to(torch.float8_e4m3fn)
        tensors[f"p{i}.weight_scale_inv"] = torch.ones(16, 16)
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(
        '{"quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]}}'
    )
    done = subprocess.run(
        [sys.executable, "-c", LOAD, str(tmp_path)], capture_output=True, text=True, check=True, timeout=120
    )
    own, file = 8 * 8, 8 * 4
    slack = 32  # float32 numbers of a part of a weight
    assert own / 2 < float(done.stdout) < own + file + slack
