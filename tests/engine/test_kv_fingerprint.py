"""The fingerprint of KV that outlives a process or goes to another server: all that KV depends on, and nothing else."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from dflash_backend.config import EngineConfig
from dflash_backend.drafters.resolve import resolve_pair
from dflash_backend.engine import kv_tiers
from dflash_backend.engine.sizing import at_length
from dflash_backend.models.kv_code import COMPUTES_KV, code_digest, source_files
from tests.core.toy_engine import make_config
from tests.support.lora_adapter import make_adapter
from tests.support.tiny_models import make_draft, make_target

LENGTH = 128


@pytest.fixture
def models(tmp_path: Path) -> Path:
    make_target(tmp_path / "target")
    make_draft(tmp_path / "draft")
    return tmp_path


def fingerprint(models: Path, max_model_len: int = LENGTH, with_times: bool = False, **settings: Any) -> bytes:
    """That of an engine of these two models, which is not built."""
    paths = {"target_model": str(models / "target"), "draft_model": str(models / "draft")}
    config = EngineConfig.from_values({"device": "cpu", "max_model_len": max_model_len, **paths, **settings})
    pair = at_length(resolve_pair(config), max_model_len)
    return kv_tiers.fingerprint(config, pair, make_config(max_model_len=max_model_len), "cpu torch", with_times)


def change_config(folder: Path, **fields: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))


def change_weight(folder: Path) -> None:
    path = next(folder.glob("*.safetensors"))
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


UNIMPORTANT: dict[str, Callable[[Path], object]] = {
    "a page about it": lambda models: (models / "target" / "README.md").write_text("a model"),
    "a hidden file": lambda models: (models / "draft" / ".gitattributes").write_text("*.safetensors"),
    "how its text ends": lambda models: (models / "target" / "generation_config.json").write_text("{}"),
    "the file that it was converted from": lambda models: change_config(
        models / "target", gguf={"file": f"{models}/a.gguf", "notes": []}
    ),
    "the folder that it lies in": lambda models: (
        shutil.move(models / "target", models / "moved") and (models / "target").symlink_to(models / "moved")
    ),
}
IMPORTANT: dict[str, Callable[[Path], object]] = {
    "a weight of the target": lambda models: change_weight(models / "target"),
    "a weight of the drafter": lambda models: change_weight(models / "draft"),
    "a field of the target": lambda models: change_config(models / "target", rms_norm_eps=1e-4),
    "a field of the drafter": lambda models: change_config(models / "draft", rms_norm_eps=1e-4),
}


@pytest.mark.parametrize("change", UNIMPORTANT)
def test_what_kv_does_not_depend_on_changes_nothing(change: str, models: Path) -> None:
    before = fingerprint(models)
    UNIMPORTANT[change](models)
    assert fingerprint(models) == before


@pytest.mark.parametrize("change", IMPORTANT)
def test_what_kv_depends_on_changes_the_fingerprint(change: str, models: Path) -> None:
    before = fingerprint(models)
    IMPORTANT[change](models)
    assert fingerprint(models) != before


def test_weights_that_were_written_again_count_on_a_disk_alone(models: Path) -> None:
    """Only pieces of them are read: another machine's copy has another time, and another version here has one too."""
    before, before_on_disk = fingerprint(models), fingerprint(models, with_times=True)
    os.utime(next((models / "target").glob("*.safetensors")), (1, 1))
    assert fingerprint(models) == before
    assert fingerprint(models, with_times=True) != before_on_disk


def test_the_length_of_requests_counts_where_rotary_frequencies_depend_on_it_alone(models: Path) -> None:
    assert fingerprint(models, 64) == fingerprint(models, LENGTH)
    dynamic = {"rope_scaling": {"rope_type": "dynamic", "factor": 4.0}, "rope_parameters": None, "rope_theta": 1e4}
    change_config(models / "target", max_position_embeddings=32, **dynamic)
    assert fingerprint(models, 64) != fingerprint(models, LENGTH)


def test_other_settings_that_kv_depends_on_count(models: Path) -> None:
    assert fingerprint(models, kv_cache_dtype="fp8") != fingerprint(models)
    scaled = fingerprint(models, rope_scaling='{"rope_type": "linear", "factor": 2}')
    assert scaled != fingerprint(models)
    assert scaled == fingerprint(models, rope_scaling={"factor": 2, "rope_type": "linear"}), "however it is written"


def test_other_code_makes_other_kv(models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = fingerprint(models)
    code = tmp_path / "code"
    code.mkdir()
    (code / "rope.py").write_text("theta = 1")
    digests = [code_digest((code,))]
    for name, text in (("rope.py", "theta = 2"), ("ops.cpp", "int x;"), ("ops.h", "int x;")):
        (code / name).write_text(text)
        code_digest.cache_clear()
        digests.append(code_digest((code,)))
    (code / "rope.pyc").write_text("theta = 2")
    code_digest.cache_clear()
    assert code_digest((code,)) == digests[-1]
    assert len({*digests}) == 4
    monkeypatch.setattr(kv_tiers, "code_digest", lambda: digests[0])
    assert fingerprint(models) != before


def test_the_code_that_computes_kv_is_all_there() -> None:
    assert all(part.exists() for part in COMPUTES_KV)
    names = {name for name, _ in source_files()}
    for name in (
        "attention/cpu_backend.py",
        "block_hashes.py",
        "checkpoints/gguf/convert.py",
        "dflash_kernels/cpu_ops.cpp",
        "dflash_kernels/cpu_tiles.h",
        "drafters/dflash/drafter.py",
        "models/rope.py",
        "worker/kv_cache.py",
        "worker/kv_mover.py",
    ):
        assert name in names


def test_adapters_are_part_of_it(models: Path) -> None:
    model = make_target(models / "target")
    make_adapter(models / "a", model, seed=1)
    plain, one = fingerprint(models), fingerprint(models, lora_modules={"a": str(models / "a")})
    assert plain != one
    assert fingerprint(models, lora_modules={"b": str(models / "a")}) != one
    make_adapter(models / "a", model, seed=2)
    assert fingerprint(models, lora_modules={"a": str(models / "a")}) != one
