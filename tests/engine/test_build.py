"""How long a request may be and how many KV blocks there are follow from the models, the settings and the memory."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch

from dflash_backend.config import ConfigError, EngineConfig
from dflash_backend.engine.build import BuiltEngine, build_engine
from dflash_backend.messages import GenerationRequest, SamplingParams
from tests.support.scale import by_night
from tests.support.tiny_models import make_pair

# 5 target layers and 2 draft layers, keys and values of 2 heads of 16 in float32.
BYTES_PER_TOKEN = (5 + 2) * 2 * 2 * 16 * 4
MIB = 1024**2
DYNAMIC = {"rope_parameters": {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 1e4}}
YARN = {"rope_parameters": {"rope_type": "yarn", "factor": 4.0, "rope_theta": 1e4}}


def build(
    root: Path, draft: dict[str, Any] | None = None, settings: Any = None, gpu: Gpu | None = None, **target: Any
) -> BuiltEngine:
    values = make_pair(root, target, **(draft or {})) | {"device": "cpu"} | (settings or {})
    return build_engine(EngineConfig.from_values(values), gpu and gpu.progress, gpu)


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        ("half", torch.float16),
        by_night("fp16", torch.float16),
        by_night("bf16", torch.bfloat16),
        by_night("float", torch.float32),
        by_night("fp32", torch.float32),
    ],
)
def test_the_dtype_may_have_the_name_that_others_give_it(tmp_path: Path, name: str, dtype: torch.dtype) -> None:
    built = build(tmp_path, settings={"dtype": name, "kv_cache_gb": 0.01})
    assert built.runner.model.target.lm_head.dtype == dtype


class Gpu:
    """Memory readings as a GPU's might be, for an engine that runs on the CPU: of `total` bytes, 30 MiB are other
    programs', 20 MiB the models' once they are loaded, and a step takes 5 MiB."""

    WEIGHTS, OTHERS, STEP = 20 * MIB, 30 * MIB, 5 * MIB

    def __init__(self, total: float) -> None:
        self._total = int(total)
        self._loaded = 0
        self.messages: list[str] = []

    def progress(self, message: str, fraction: float) -> None:
        self.messages.append(message)
        if message.startswith("drafter: model.safetensors"):
            self._loaded = self.WEIGHTS

    def total(self) -> int:
        return self._total

    def in_use(self) -> int:
        return self.OTHERS + self._loaded

    def allocated(self) -> int:
        return self._loaded

    def reset_peak(self) -> None:
        pass

    def peak(self) -> int:
        return self._loaded + self.STEP

    def release(self) -> None:
        pass


def gpu_with_memory_for(num_tokens: int) -> Gpu:
    """One of which 0.9, the default share, leaves so much for the KV cache."""
    return Gpu((Gpu.WEIGHTS + Gpu.OTHERS + Gpu.STEP + num_tokens * BYTES_PER_TOKEN) / 0.9 + 100)


def gib_for(num_tokens: int) -> float:
    return num_tokens * BYTES_PER_TOKEN / 1024**3


def test_auto_is_what_the_target_can_address(tmp_path: Path) -> None:
    ready = build(tmp_path).ready
    assert ready.max_model_len == 512
    assert "the KV cache holds no more" not in ready.description


@pytest.mark.parametrize(
    ("settings", "target", "gpu_tokens", "length", "num_blocks"),
    [
        # A length that just fits is served to its last token.
        ({"kv_cache_gb": gib_for(160), "max_model_len": 160}, {}, None, 160, 10),
        # Millions of positions take no more than the KV cache.
        ({"kv_cache_gb": gib_for(320)}, {"max_position_embeddings": 2**24}, None, 320, 20),
        # YaRN addresses more than it was trained for.
        ({"kv_cache_gb": gib_for(4096)}, YARN, None, 2048, 256),
        # On a GPU the cache gets no more than all requests could use, unless its size is set.
        ({"max_num_seqs": 2}, {}, 100_000, 512, 2 * (512 + 16) // 16),
        ({"kv_cache_gb": gib_for(320)}, {}, 1000, 320, 20),
    ],
)
def test_lengths_and_blocks_follow_from_settings_models_and_memory(
    tmp_path: Path, settings: Any, target: dict[str, Any], gpu_tokens: int | None, length: int, num_blocks: int
) -> None:
    gpu = gpu_tokens and gpu_with_memory_for(gpu_tokens)
    ready = build(tmp_path, settings=settings, gpu=gpu or None, **target).ready
    assert (ready.max_model_len, ready.num_kv_blocks) == (length, num_blocks)


def test_auto_is_no_more_than_the_kv_cache_holds_and_says_so(tmp_path: Path) -> None:
    ready = build(tmp_path, settings={"kv_cache_gb": gib_for(165)}).ready
    assert (ready.max_model_len, ready.num_kv_blocks) == (160, 10)
    assert "requests of up to 160 tokens (the target could do 512; the KV cache holds no more" in ready.description


def test_a_drafter_that_reaches_less_far_than_requests_is_said(tmp_path: Path) -> None:
    values = make_pair(tmp_path, max_position_embeddings=256) | {"device": "cpu"}
    for length, said in ((None, 1), (257, 1), (256, 0)):
        messages: list[str] = []
        config = EngineConfig.from_values(values | ({} if length is None else {"max_model_len": length}))
        build_engine(config, lambda message, done, messages=messages: messages.append(message))
        words = f"addresses 256 positions .* requests may have {length or 512}: from there on they are decoded without"
        assert [bool(re.search(words, message)) for message in messages if "warning:" in message] == [True] * said


def test_a_length_that_is_set_and_does_not_fit_is_refused_with_numbers(tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError, match=r"'max_model_len' is 161.* 11 KV blocks of 16.*memory for 10, which hold 160"
    ):
        build(tmp_path, settings={"kv_cache_gb": gib_for(165), "max_model_len": 161})


@pytest.mark.parametrize("kv_cache_gb", [1e6, 1e9])
def test_a_kv_cache_larger_than_the_machine_is_a_sentence(tmp_path: Path, kv_cache_gb: float) -> None:
    with pytest.raises(ConfigError, match=r"'kv_cache_gb' is 1e.*, and this machine has [0-9.]+ GiB of memory"):
        build(tmp_path, settings={"kv_cache_gb": kv_cache_gb})


def test_a_kv_cache_that_the_machine_does_not_give_is_a_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("os.sysconf", lambda name: 1 << 30)
    with pytest.raises(ConfigError, match="takes .* GiB, which cpu does not have; lower kv_cache_gb"):
        build(tmp_path, settings={"kv_cache_gb": 1e9})


def test_dynamic_scaling_starts_only_where_a_longer_length_is_asked_for(tmp_path: Path) -> None:
    auto = build(tmp_path / "auto", **DYNAMIC)
    assert (auto.ready.max_model_len, auto.pair.target.decoder.rope.length) == (512, 512)
    longer = build(tmp_path / "longer", settings={"max_model_len": 1000}, **DYNAMIC)
    assert longer.pair.target.decoder.rope.length == 1000
    shorter = build(tmp_path / "shorter", settings={"max_model_len": 100}, **DYNAMIC)
    assert shorter.pair.target.decoder.rope.length == 512
    with pytest.raises(
        ConfigError, match="'max_model_len' is 2049.*at most 2048 positions: lower it.* set rope_scaling"
    ):
        build(tmp_path / "over", settings={"max_model_len": 2049}, **DYNAMIC)


def test_a_dynamic_drafter_is_computed_for_the_length_that_is_served(tmp_path: Path) -> None:
    built = build(tmp_path, draft=DYNAMIC, settings={"max_model_len": 1000}, max_position_embeddings=4096)
    assert built.pair.draft is not None
    assert built.pair.draft.decoder.rope.length == 1000
    assert built.core.config.drafter_max_len == 1008, "the longest sequence and the block after it, below 4 * 512"


def test_a_drafters_window_is_what_its_own_positions_reach(tmp_path: Path) -> None:
    built = build(tmp_path, draft={"max_position_embeddings": 128})
    assert built.core.config.drafter_max_len == 128


def test_on_a_gpu_the_cache_gets_what_models_steps_and_others_leave(tmp_path: Path) -> None:
    gpu = gpu_with_memory_for(8 * 520)
    ready = build(tmp_path, settings={"max_num_seqs": 100}, gpu=gpu).ready
    assert (ready.max_model_len, ready.num_kv_blocks) == (512, 8 * 520 // 16)
    assert any(message.startswith("memory: 0.07 GiB in all") for message in gpu.messages)


def test_on_a_gpu_auto_gives_way_to_what_was_measured_and_the_engine_runs(tmp_path: Path) -> None:
    built = build(tmp_path, gpu=gpu_with_memory_for(165))
    assert (built.ready.max_model_len, built.ready.num_kv_blocks) == (160, 10)
    assert "the target could do 512; the KV cache holds no more, raise gpu_memory_utilization" in (
        built.ready.description
    )
    assert built.core.config.drafter_max_len == 160 + 7 + 1
    built.core.add_request(GenerationRequest("r", [1, 2, 3], SamplingParams(max_tokens=5, temperature=0.0)))
    tokens = [token for _ in range(10) for delta in built.core.step().deltas for token in delta.token_ids]
    assert len(tokens) == 5


def test_on_a_gpu_a_length_that_does_not_fit_is_refused_with_the_whole_sum(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as raised:
        build(tmp_path, settings={"max_model_len": 161}, gpu=gpu_with_memory_for(165))
    message = str(raised.value)
    assert "'max_model_len' is 161" in message
    assert "11 KV blocks of 16 tokens (0.00 GiB); there is memory for 10, which hold 160 tokens" in message
    assert "lower max_model_len or raise gpu_memory_utilization" in message
    assert "weights 0.02, CUDA and other programs 0.03, the largest step 0.00, left for the KV cache 0.00" in message


def test_weights_that_do_not_fit_are_refused_before_they_are_loaded(tmp_path: Path) -> None:
    gpu = Gpu(Gpu.OTHERS)
    with pytest.raises(ConfigError, match="no room for a single block: gpu_memory_utilization = 0.9 leaves 0.0 MiB"):
        build(tmp_path, gpu=gpu)
    assert not any("safetensors" in message for message in gpu.messages)


def test_a_kv_cache_size_that_the_gpu_does_not_have_beside_a_step_is_refused(tmp_path: Path) -> None:
    # There is memory for it beside the weights, but not for a step as well.
    total = Gpu.WEIGHTS + Gpu.OTHERS + Gpu.STEP + 4 * MIB
    with pytest.raises(ConfigError, match=r"'kv_cache_gb' is .*more than the GPU has left \(.*the largest step 0.00"):
        build(tmp_path, settings={"kv_cache_gb": 6 / 1024}, gpu=Gpu(total))


def test_an_engine_keeps_the_memory_of_its_steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[bool] = []
    monkeypatch.setattr("dflash_backend.engine.build.keep_step_buffers", lambda: asked.append(True))
    build(tmp_path)
    assert asked == [True]
