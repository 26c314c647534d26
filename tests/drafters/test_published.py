"""Published drafters: what the table says of each, and who is told of them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from dflash_backend.checkpoints.families import FAMILIES
from dflash_backend.config import EngineConfig
from dflash_backend.drafters import published
from dflash_backend.drafters.published import DRAFTERS, NAMES, published_for, published_like
from dflash_backend.drafters.registry import METHODS
from dflash_backend.drafters.resolve import resolve_dirs
from tests.support.tiny_models import make_target

QWEN3_8B = {"z-lab/Qwen3-8B-DFlash-b16", "RedHatAI/Qwen3-8B-speculator.dflash", "deepseek-ai/dspark_qwen3_8b_block7"}


def named(*names: str) -> list[str | None]:
    return [each.unsupported for name in names for each in DRAFTERS if each.name == name]


def test_each_entry_has_a_name_of_its_own_and_a_source() -> None:
    assert len({each.name for each in DRAFTERS}) == len(DRAFTERS)
    for each in DRAFTERS:
        assert each.name.count("/") == each.target.name.count("/") == 1
        assert each.method in NAMES
        assert each.format
        assert bool(each.architecture) == (each.format != "speculators")
    assert {name for name, method in METHODS.items() if method.formats} <= set(NAMES)


def test_what_is_supported_follows_from_the_code(monkeypatch: pytest.MonkeyPatch) -> None:
    assert named("z-lab/Qwen3-8B-DFlash-b16", "RedHatAI/Qwen3-8B-speculator.eagle3") == [None, None]
    assert named("RedHatAI/Qwen3-8B-speculator.peagle") == ["P-EAGLE drafters are not supported"]
    assert named("deepseek-ai/eagle3_qwen3_4b_ttt7", "z-lab/Qwen3.8-27B-DFlash2") == [None, None]
    assert named("deepseek-ai/eagle3_gemma4_12b_ttt7") == ["its format (Gemma4Eagle3Model) is not supported"]
    assert named("z-lab/Qwen3.5-4B-DFlash", "z-lab/Qwen3-Coder-Next-DFlash") == [None, None]
    assert named("z-lab/gemma-4-26B-A4B-it-DFlash", "RedHatAI/gemma-4-31B-it-speculator.eagle3") == [None, None]
    assert named("deepseek-ai/dspark_gemma4_12b_block7") == ["its format (Gemma4DSparkModel) is not supported"]
    assert named("z-lab/Kimi-K2.6-DFlash") == ["targets of the family Kimi K2 are not supported"]
    assert named("z-lab/gpt-oss-20b-DFlash") == [None]
    assert (
        named("yuhuili/EAGLE3-LLaMA3.1-Instruct-8B", "yuhuili/EAGLE3-LLaMA3.3-Instruct-70B")
        == ["pickled weights (pytorch_model.bin) are not supported; convert them to safetensors"] * 2
    )
    monkeypatch.delitem(FAMILIES, "GptOssForCausalLM")
    assert named("z-lab/gpt-oss-20b-DFlash") == ["targets of the family gpt-oss are not supported"]
    monkeypatch.setattr(published, "METHODS", {name: each for name, each in METHODS.items() if name != "dflash"})
    assert named("z-lab/Qwen3-8B-DFlash-b16") == ["DFlash drafters are not supported"]


@pytest.mark.parametrize(
    "name", ["Qwen/Qwen3-8B", "qwen/qwen3-8b", "/cache/hub/models--Qwen--Qwen3-8B/snapshots/0123abcd", "~/qwen"]
)
def test_a_target_is_known_by_its_id_by_its_snapshot_and_by_its_config(tmp_path: Path, name: str) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"_name_or_path": "Qwen/Qwen3-8B" if name == "~/qwen" else "x"}))
    found = {each.name for each in published_for(name, tmp_path)}
    assert found > QWEN3_8B
    assert "RedHatAI/Qwen3-8B-speculator.peagle" not in found


@pytest.mark.parametrize("config", ["{", "[]", '{"_name_or_path": 3}', "{}", '{"_name_or_path": ""}'])
def test_a_target_that_nobody_knows_has_none(tmp_path: Path, config: str) -> None:
    (tmp_path / "config.json").write_text(config)
    assert published_for("org/mine", tmp_path) == ()
    assert published_for("org/mine", tmp_path / "nowhere") == ()


def test_a_drafter_that_does_not_load_is_not_named() -> None:
    names = [each.name for each in published_for("meta-llama/Llama-3.1-8B-Instruct")]
    assert names == ["z-lab/LLaMA3.1-8B-Instruct-DFlash-UltraChat", "RedHatAI/Llama-3.1-8B-Instruct-speculator.eagle3"]


def test_words_are_looked_for_in_both_ids() -> None:
    assert {each.name for each in published_like("qwen3-8b")} > QWEN3_8B
    assert [each.name for each in published_like("PEAGLE")] == ["RedHatAI/Qwen3-8B-speculator.peagle"]
    assert published_like("") == DRAFTERS


def test_a_server_without_a_drafter_names_those_of_its_target(tmp_path: Path) -> None:
    make_target(tmp_path)
    plain = resolve_dirs(EngineConfig(target_model=str(tmp_path))).warning
    assert plain is not None
    assert "published" not in plain
    path = tmp_path / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"_name_or_path": "Qwen/Qwen3-4B"}))
    told = resolve_dirs(EngineConfig(target_model=str(tmp_path))).warning
    assert told is not None
    assert "published for it: z-lab/Qwen3-4B-DFlash-b16, deepseek-ai/dflash_qwen3_4b_block7" in told
    assert "deepseek-ai/eagle3_qwen3_4b_ttt7" in told
    assert resolve_dirs(EngineConfig(target_model=str(tmp_path), draft_model="ngram")).warning is None
