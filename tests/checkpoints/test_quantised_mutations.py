"""Hundreds of damaged quantised checkpoints, from fixed seeds: each loads or is refused in one sentence."""

from __future__ import annotations

import copy
import json
import random
import shutil
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from dflash_backend.checkpoints import CheckpointError, read_target
from dflash_backend.engine.inspection import inspect_target
from dflash_backend.models import load_target
from dflash_backend.models.ops import LayerOps, select_ops
from tests.checkpoints.test_mutations import VALUES, entries, mutate_file
from tests.oracle.compressed_tensors_library import FORMATS, config, library
from tests.support.quantised import AWQ, FP8_BLOCK, GPTQ, awq, fp8_block, gptq, write
from tests.support.scale import SCALE, scaled
from tests.support.tiny_models import make_target

pytestmark = pytest.mark.usefixtures("single_thread", "inference_mode")
CASES = scaled(1000 if SCALE >= 4 else 500, at_least=200)
MAX_SECONDS = 5.0
SMALL = {"num_hidden_layers": 2, "tie_word_embeddings": False}
WORDS: list[Any] = [
    *("fp8", "fbgemm_fp8", "gptq", "awq", "compressed-tensors", "mxfp4", "gguf", "gptq_v2", "gemv", "e5m2"),
    *("float-quantized", "int-quantized", "pack-quantized", "naive-quantized", "mixed-precision", "dense"),
    *("tensor", "channel", "group", "block", "token", "int", "float", "weight", "Linear", "Embedding", "lm_head"),
    *("re:.*", "re:(", "re:(x+)+y", "re:.*mlp.*", "4x4", [4, 4], [128, 128], [0, 1], ["re:.*q_proj"], ["Linear"]),
    *({"a": {}}, {"targets": ["Linear"], "weights": {}}, 16, 32, 4, 8, 5, -1, 64),
]


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """The checkpoints that are damaged, one of each layout."""
    root = tmp_path_factory.mktemp("sound")
    make_target(root / "source", **SMALL)
    made = {
        "fp8": (fp8_block(16, 24), FP8_BLOCK | {"weight_block_size": [16, 24]}),
        "gptq": (gptq(shuffled=True), GPTQ | {"desc_act": True}),
        "awq": (awq(), AWQ),
    }
    for name in ("fp8 of rows", "int8 of rows with zero points", "int4 of groups with zero points"):
        made[name] = (library(*FORMATS[name]), config(*FORMATS[name]))
    return [write(root / "source", root / name, *of).quantised for name, of in made.items()]


@pytest.fixture(scope="module")
def kept(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Checkpoints whose weights stay quantised where there are products of them."""
    root = tmp_path_factory.mktemp("kept")
    make_target(root / "source", hidden_size=64, intermediate_size=96, **SMALL)
    four_bits = {"num_bits": 4, "symmetric": False, "strategy": "group", "group_size": 32}
    made = {
        "fp8": (fp8_block(16, 32), FP8_BLOCK | {"weight_block_size": [16, 32]}),
        "gptq": (gptq(group=32), GPTQ | {"group_size": 32}),
        "awq": (awq(32), AWQ | {"group_size": 32}),
        "packed": (library("pack-quantized", four_bits), config("pack-quantized", four_bits)),
        "int8": (library(*FORMATS["int8 of rows with zero points"]), config(*FORMATS["int8 of rows with zero points"])),
    }
    return [write(root / "source", root / name, *of).quantised for name, of in made.items()]


def mutate_config(data: dict[str, Any], rng: random.Random) -> dict[str, Any]:
    """A config with one to three changes, most of them in what is said of quantised weights."""
    data = copy.deepcopy(data)
    for _ in range(rng.randint(1, 3)):
        inside = data.get("quantization_config")
        places = (
            list(entries(inside)) if isinstance(inside, dict | list) and rng.random() < 0.9 else list(entries(data))
        )
        container, key = rng.choice(places or [(data, "quantization_config")])
        if rng.random() < 0.2:
            container.pop(key, None) if isinstance(container, dict) else container.pop(key)
        else:
            container[key] = copy.deepcopy(rng.choice(WORDS if rng.random() < 0.6 else VALUES))
    return data


def mutate_values(data: bytes, rng: random.Random) -> bytes:
    """A safetensors file with other bytes in one of its tensors."""
    size = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + size])
    name = rng.choice([name for name in header if not name.endswith("norm.weight") and name != "__metadata__"])
    first, last = (8 + size + offset for offset in header[name]["data_offsets"])
    filler = rng.choice([b"\xff", b"\x7f", b"\x00", rng.randbytes(last - first)])
    return data[:first] + (filler * (last - first))[: last - first] + data[last:]


def damage(directory: Path, source: Path, rng: random.Random) -> None:
    shutil.copytree(source, directory, dirs_exist_ok=True)
    kind = rng.random()
    if kind < 0.6:
        path = directory / "config.json"
        path.write_text(json.dumps(mutate_config(json.loads(path.read_text()), rng)))
    else:
        path = directory / "model.safetensors"
        change = mutate_file if kind < 0.8 else mutate_values
        path.write_bytes(change(path.read_bytes(), rng))


def attempt(directory: Path, ops: LayerOps | None = None) -> str | None:
    """What is refused when the checkpoint is inspected and loaded; None where nothing is."""
    try:
        spec = read_target(directory)
        inspect_target(spec)
        load_target(spec, 16, torch.float32, torch.device("cpu"), ops=ops)
    except CheckpointError as error:
        return str(error)
    return None


@pytest.mark.parametrize("batch", range(4))
def test_a_damaged_quantised_checkpoint_loads_or_is_refused(sound: list[Path], tmp_path: Path, batch: int) -> None:
    refusals = []
    for seed in range(batch * CASES // 4, (batch + 1) * CASES // 4):
        damage(tmp_path / "damaged", sound[seed % len(sound)], random.Random(f"quantised {seed}"))
        start = time.monotonic()
        refusal = attempt(tmp_path / "damaged")
        assert time.monotonic() - start < MAX_SECONDS, f"seed {seed} took too long"
        if refusal is not None:
            assert len(refusal) < 2000, f"seed {seed}: {refusal[:300]}"
            assert "\n" not in refusal, f"seed {seed}: {refusal}"
            refusals.append(refusal)
    assert 10 < len(refusals) < CASES // 4 - 5


def test_damaged_weights_that_stay_quantised_load_or_are_refused_as_those_that_are_dequantised(
    kept: list[Path], tmp_path: Path
) -> None:
    ops, refused = select_ops(torch.device("cpu"), "triton"), 0
    for seed in range(CASES // 4):
        damage(tmp_path / "damaged", kept[seed % len(kept)], random.Random(f"kept {seed}"))
        own, other = attempt(tmp_path / "damaged", ops), attempt(tmp_path / "damaged")
        assert (own is None) == (other is None), f"seed {seed}: {own}; {other}"
        refused += own is not None
    assert CASES // 16 < refused < CASES // 4
