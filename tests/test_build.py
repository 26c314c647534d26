"""How long a request may be and how many KV blocks there are follow from the models, the settings and the memory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from dflash_backend.build import BuiltEngine, build_engine
from dflash_backend.config import ConfigError, EngineConfig
from tests.tiny_models import make_draft, make_target

# 5 target layers and 2 draft layers, keys and values of 2 heads of 16 in float32.
BYTES_PER_TOKEN = (5 + 2) * 2 * 2 * 16 * 4
DYNAMIC = {"rope_parameters": {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 1e4}}
YARN = {"rope_parameters": {"rope_type": "yarn", "factor": 4.0, "rope_theta": 1e4}}


def build(root: Path, draft: dict[str, Any] | None = None, settings: Any = None, **target: Any) -> BuiltEngine:
    make_target(root / "t", **target)
    make_draft(root / "d", **(draft or {}))
    values = {"target_model": str(root / "t"), "draft_model": str(root / "d"), "device": "cpu"} | (settings or {})
    return build_engine(EngineConfig.from_values(values))


def gib_for(num_tokens: int) -> float:
    return num_tokens * BYTES_PER_TOKEN / 1024**3


def test_auto_is_what_the_target_can_address(tmp_path: Path) -> None:
    ready = build(tmp_path).ready
    assert ready.max_model_len == 512
    assert "the KV cache holds no more" not in ready.description


def test_auto_is_no_more_than_the_kv_cache_holds_and_says_so(tmp_path: Path) -> None:
    ready = build(tmp_path, settings={"kv_cache_gb": gib_for(165)}).ready
    assert (ready.max_model_len, ready.num_kv_blocks) == (160, 10)
    assert "requests of up to 160 tokens (the target could do 512; the KV cache holds no more" in ready.description


def test_a_length_that_is_set_and_does_not_fit_is_refused_with_numbers(tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError, match=r"'max_model_len' is 161.* 11 KV blocks of 16.*memory for 10, which hold 160"
    ):
        build(tmp_path, settings={"kv_cache_gb": gib_for(165), "max_model_len": 161})


def test_a_length_that_just_fits_is_served_to_its_last_token(tmp_path: Path) -> None:
    built = build(tmp_path, settings={"kv_cache_gb": gib_for(160), "max_model_len": 160})
    assert (built.ready.max_model_len, built.ready.num_kv_blocks) == (160, 10)


def test_a_kv_cache_that_the_machine_does_not_have_is_a_sentence(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="takes .* GiB, which cpu does not have; lower kv_cache_gb"):
        build(tmp_path, settings={"kv_cache_gb": 1e9})


def test_millions_of_positions_take_no_more_than_the_kv_cache(tmp_path: Path) -> None:
    ready = build(tmp_path, max_position_embeddings=2**24, settings={"kv_cache_gb": gib_for(320)}).ready
    assert ready.max_model_len == 320


def test_yarn_addresses_more_than_it_was_trained_for(tmp_path: Path) -> None:
    assert build(tmp_path, **YARN).ready.max_model_len == 2048


def test_dynamic_scaling_starts_only_where_a_longer_length_is_asked_for(tmp_path: Path) -> None:
    auto = build(tmp_path / "auto", **DYNAMIC)
    assert (auto.ready.max_model_len, auto.pair.target.decoder.rope.length) == (512, 512)
    longer = build(tmp_path / "longer", settings={"max_model_len": 1000}, **DYNAMIC)
    assert longer.pair.target.decoder.rope.length == 1000
    shorter = build(tmp_path / "shorter", settings={"max_model_len": 100}, **DYNAMIC)
    assert shorter.pair.target.decoder.rope.length == 512
    with pytest.raises(ConfigError, match="'max_model_len' is 2049.*at most 2048"):
        build(tmp_path / "over", settings={"max_model_len": 2049}, **DYNAMIC)


def test_a_dynamic_drafter_is_computed_for_the_length_that_is_served(tmp_path: Path) -> None:
    built = build(tmp_path, draft=DYNAMIC, settings={"max_model_len": 1000}, max_position_embeddings=4096)
    assert built.pair.draft is not None
    assert built.pair.draft.decoder.rope.length == 1000
    assert built.core.limits.drafter_max_len == 1008, "the longest sequence and the block after it, below 4 * 512"


def test_a_drafters_window_is_what_its_own_positions_reach(tmp_path: Path) -> None:
    built = build(tmp_path, draft={"max_position_embeddings": 128})
    assert built.core.limits.drafter_max_len == 128
