"""Whatever a checkpoint's files hold, the engine loads it or says in one sentence what is wrong, soon and in little
memory. Hundreds of damaged checkpoints, from fixed seeds, each through the real `build_engine`."""

from __future__ import annotations

import copy
import json
import random
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from dflash_backend.config import EngineConfig
from dflash_backend.drafters.dflash.config import KNOWN as DFLASH_FIELDS
from dflash_backend.drafters.fields import KNOWN
from dflash_backend.engine.build import LOAD_ERRORS, build_engine
from tests.drafters.drafts import make_dflash2, make_dspark, make_eagle3, make_speculators
from tests.support.mxfp4_checkpoint import make_mxfp4_target
from tests.support.scale import SCALE, scaled
from tests.support.tiny_models import make_draft, make_target

MAX_SECONDS = 5.0
MAX_BYTES = 1024**3
CASES = scaled(250 if SCALE >= 4 else 75, at_least=50)  # of each of the five kinds
BATCHES = 5

INTEGERS = [0, -1, 1, 2, 3, 7, 2**24, 2**31, 2**31 - 1, 2**63, 10**9, 10**400]
NUMBERS = [0.5, -0.0, 1e-320, 1e308, float("nan"), float("inf"), float("-inf")]
TEXTS = ["", "8", "full_attention", "\0", "x" * 5000]
LISTS: list[Any] = [[], [0], [-1], [None], [1, 3], [2**40], *(["sliding_attention"] * n for n in (1, 2, 5)), [[[]]]]
OBJECTS: list[Any] = [
    {},
    {"a": {"b": [1, {"c": None}]}},
    {"rope_type": "default"},
    {"sliding_attention": {"rope_theta": 7.0}, "full_attention": {}},
]
VALUES: list[Any] = [None, True, False, *INTEGERS, *NUMBERS, *TEXTS, *LISTS, *OBJECTS]
ROPE = {
    "rope_type": ["default", "linear", "dynamic", "yarn", "llama3", "longrope", "mrope"],
    "factor": [1, 2.0, 8, 1e6, -1, 0.5],
    "original_max_position_embeddings": [1, 64, 2**31, 0],
    "low_freq_factor": [1, 4, 1e-300],
    "high_freq_factor": [4, 1, 1e300],
    "attention_factor": [0.1, 1, 1e300],
    "beta_fast": [32, 1e-300, 1e300],
    "beta_slow": [1, 64, 1e300],
    "mscale": [1, 0, 1e300],
    "mscale_all_dim": [1, 0.5],
    "rope_theta": [1, 1.0000001, 1e4, 1e300],
    "truncate": [True, False],
}
TARGETS = ("target", "moe", "mxfp4")
OF_TARGETS = (
    "decoder_sparse_step",
    "generation_config",
    "mlp_only_layers",
    "num_experts",
    "partial_rotary_factor",
    "quantization_config",
    "swiglu_alpha",
    "swiglu_limit",
)
EXTRA_FIELDS = sorted(KNOWN.union(DFLASH_FIELDS, OF_TARGETS))


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The sound checkpoints that are damaged: three targets, a drafter of each format and of each method."""
    root = tmp_path_factory.mktemp("sound")
    make_target(root / "target")
    make_target(root / "moe", architecture="Qwen3MoeForCausalLM")
    make_mxfp4_target(root / "mxfp4", hidden_size=32, intermediate_size=32)
    make_draft(root / "zlab")
    make_speculators(root / "speculators")
    make_dflash2(root / "dflash2")
    make_dspark(root / "dspark", kind="rnn")
    make_eagle3(root / "eagle3", fc_norm=True, eagle_config={"use_aux_hidden_state": True})
    return root


def entries(value: Any) -> Iterator[tuple[Any, Any]]:
    """Every (container, key) inside a JSON value."""
    if isinstance(value, dict | list):
        for key in list(value) if isinstance(value, dict) else range(len(value)):
            yield value, key
            yield from entries(value[key])


def mutate(config: dict[str, Any], rng: random.Random) -> dict[str, Any]:
    """A config with one to three changes."""
    config = copy.deepcopy(config)
    for _ in range(rng.randint(1, 3)):
        container, key = rng.choice(list(entries(config)) or [(config, "x")])
        kind = rng.random()
        if kind < 0.2:
            container.pop(key, None) if isinstance(container, dict) else container.pop(key)
        elif kind < 0.7:
            container[key] = copy.deepcopy(rng.choice(VALUES))
        elif kind < 0.85:
            holder = rng.choice([config, *(c[k] for c, k in entries(config) if isinstance(c[k], dict))])
            holder[rng.choice(EXTRA_FIELDS)] = copy.deepcopy(rng.choice(VALUES))
        else:
            holder = rng.choice([config, config.get("transformer_layer_config")])
            rope = {name: rng.choice(values) for name, values in ROPE.items() if rng.random() < 0.7}
            if isinstance(holder, dict):
                holder[rng.choice(["rope_scaling", "rope_parameters"])] = rope
    return config


def mutate_file(data: bytes, rng: random.Random) -> bytes:
    """A safetensors file that is cut, flipped, or has another header."""
    size = int.from_bytes(data[:8], "little")
    kind = rng.randrange(5)
    if kind == 0:
        return data[: rng.randrange(len(data))]
    if kind == 1:
        damaged = bytearray(data)
        for _ in range(rng.randint(1, 4)):
            damaged[rng.randrange(8 + size)] ^= 1 << rng.randrange(8)
        return bytes(damaged)
    if kind == 2:
        return rng.choice([0, 1, size - 1, size + 1, 2**31, 2**63, 2**64 - 1]).to_bytes(8, "little") + data[8:]
    header = json.loads(data[8 : 8 + size])
    if kind == 3:
        name = rng.choice([name for name in header if name != "__metadata__"])
        field = rng.choice(["dtype", "shape", "data_offsets", "name", "gone"])
        entry = header.pop(name)
        if field == "dtype":
            entry["dtype"] = rng.choice(["F16", "F64", "I64", "BOOL", "F4", "", None, 3])
        elif field == "shape":
            entry["shape"] = rng.choice([[], [0], [-1], [2**40, 2**40], [1, *entry["shape"]], entry["shape"][::-1]])
        elif field == "data_offsets":
            entry["data_offsets"] = rng.choice([[0, 0], [0, 2**60], [9, 3], [-4, 4], [], "0", [0.5, 1], [1e300, 1]])
        if field != "gone":
            header[name + "x" if field == "name" else name] = entry
    else:
        header = mutate(header, rng)
    text = json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + data[8 + size :]


def load(target: Path, draft: Path) -> Exception | None:
    """Build the engine; what was refused. A small KV cache, since its size is the operator's and not the model's."""
    settings = {
        "target_model": str(target),
        "draft_model": str(draft),
        "kv_cache_gb": 0.02,
        "max_num_seqs": 4,
        "device": "cpu",
    }
    try:
        build_engine(EngineConfig.from_values(settings))
    except LOAD_ERRORS as error:
        return error
    return None


def peak_bytes() -> int:
    """The most memory that this process has had since `reset_peak`."""
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM"))
    return int(line.split()[1]) * 1024


def reset_peak() -> None:
    Path("/proc/self/clear_refs").write_text("5")


def run_cases(attempt: Callable[[int], Exception | None], batch: int) -> list[Exception | None]:
    """One batch of seeds, each within the bounds of time and memory."""
    results = []
    for seed in range(batch * CASES // BATCHES, (batch + 1) * CASES // BATCHES):
        reset_peak()
        before, start = peak_bytes(), time.monotonic()
        error = attempt(seed)
        assert time.monotonic() - start < MAX_SECONDS, f"seed {seed} took too long"
        assert peak_bytes() - before < MAX_BYTES, f"seed {seed} took too much memory"
        if error is not None:
            message = str(error)
            assert len(message) < 2000, f"seed {seed}: {message[:300]}..."
            assert "\n" not in message, f"seed {seed}: {message}"
        results.append(error)
    assert any(results), "damage must be noticed"
    return results


@pytest.mark.parametrize("batch", range(BATCHES))
@pytest.mark.parametrize("name", ["target", "zlab", "speculators", "dflash2", "dspark", "eagle3"])
def test_a_mutated_config_loads_or_is_refused(models: Path, tmp_path: Path, name: str, batch: int) -> None:
    def attempt(seed: int) -> Exception | None:
        rng = random.Random(f"{name} {seed}")
        source = models / (TARGETS[seed % 3] if name == "target" else name)
        config = json.loads((source / "config.json").read_text())
        (damaged / "config.json").write_text(json.dumps(mutate(config, rng)))
        if name == "target":
            shutil.copy(source / "model.safetensors", damaged)
            return load(damaged, models / "zlab")
        return load(models / "target", damaged)

    damaged = tmp_path / "damaged"
    shutil.copytree(models / name, damaged)
    run_cases(attempt, batch)


@pytest.mark.parametrize("batch", range(BATCHES))
def test_a_mutated_weight_file_loads_or_is_refused(models: Path, tmp_path: Path, batch: int) -> None:
    names = ("target", "zlab", "speculators", "mxfp4")
    data = {name: (models / name / "model.safetensors").read_bytes() for name in names}
    for name in names:
        shutil.copytree(models / name, tmp_path / name)

    def attempt(seed: int) -> Exception | None:
        name = names[seed % len(names)]
        file = tmp_path / name / "model.safetensors"
        file.write_bytes(mutate_file(data[name], random.Random(seed)))
        if name in TARGETS:
            return load(tmp_path / name, models / "zlab")
        return load(models / "target", tmp_path / name)

    run_cases(attempt, batch)


def test_the_checkpoints_that_are_damaged_are_sound(models: Path) -> None:
    """Else every refusal would be for the same reason."""
    assert load(models / "target", models / "zlab") is None
    assert load(models / "target", models / "speculators") is None
    assert load(models / "target", models / "dflash2") is None
    assert load(models / "target", models / "dspark") is None
    assert load(models / "target", models / "eagle3") is None
    assert load(models / "moe", models / "zlab") is None
    assert load(models / "mxfp4", models / "zlab") is None
