"""Every setting changes something of the engine that is built with it: a name that nothing reads fails here."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from dflash_backend.checkpoints.quantization.at_load import round_to_fp8
from dflash_backend.config import SETTINGS, EngineConfig
from dflash_backend.engine.build import BuiltEngine, build_engine
from dflash_backend.worker.runner import ModelRunner
from dflash_kernels.measured_linear import _State as measured_products
from dflash_kernels.measured_linear import use_measured_products
from dflash_kernels.scaled_linear import ScaledProduct
from tests.support.lora_adapter import make_adapter
from tests.support.tiny_models import make_pair, make_target


def is_fp8(weight: torch.Tensor) -> bool:
    """Whether no number changes where each row `[out, in]` is made FP8."""
    round_to_fp8("", again := weight.clone())
    return torch.allclose(again, weight, rtol=1e-6)


# Of the tiny target, in the folder `models`.
ADAPTER = Path("adapter")

# One observable of the engine for each setting, a value that is not the default, and what the observable is with it.
Observe = Callable[[BuiltEngine], Any]
TABLE: dict[str, tuple[Any, Observe, Any]] = {
    "target_model": (Path("other"), lambda built: built.pair.target.decoder.num_layers, 2),
    "draft_model": ("", lambda built: built.pair.draft is None, True),
    "num_speculative_tokens": (3, lambda built: built.core.config.num_speculative_tokens, 3),
    "prompt_lookup_max": (3, lambda built: built.runner.model.drafter.spec.max_ngram, 3),
    "prompt_lookup_min": (4, lambda built: built.runner.model.drafter.spec.min_ngram, 4),
    "causal": (True, lambda built: built.pair.draft is not None and built.pair.draft.causal, (True, True)),
    "adaptive_speculation": (False, lambda built: built.core.config.adaptive_speculation, False),
    "draft_temperature_ratio": (0.5, lambda built: built.runner.model.draft_temperature_ratio, 0.5),
    "dtype": ("bfloat16", lambda built: built.runner.model.kv.target[0].data.dtype, torch.bfloat16),
    "kv_cache_dtype": ("fp8", lambda built: built.runner.model.kv.target[0].data.dtype, torch.uint8),
    "quantization": ("fp8", lambda built: is_fp8(built.runner.model.target.layers[0].weights.qkv.weight), True),
    "activation_quantization": (
        "fp8",
        lambda built: type(built.runner.model.target.layers[0].weights.qkv.product),
        ScaledProduct,
    ),
    "batch_invariant": (True, lambda built: built.runner.model.target._head.product is not F.linear, True),
    "attention_backend": ("torch", lambda built: built.runner.model.backend.name, "torch"),
    "kv_block_size": (8, lambda built: built.core.config.block_size, 8),
    "kv_cache_gb": (0.001, lambda built: built.core.config.num_blocks, 37),
    "kv_host_gb": (0.05, lambda built: [each.name for each in built.core.config.tiers], ["host"]),
    "kv_disk_path": (Path("kv"), lambda built: [each.name for each in built.core.config.tiers], ["host", "disk"]),
    "kv_disk_gb": (0.05, lambda built: built.core.config.tiers[-1].num_slots[0] < 2000, True),
    "kv_move_mb_s": (5, lambda built: built.runner.mover._of_all.max_bytes_s, 5e6),
    "kv_role": ("prefill", lambda built: getattr(built.core.config.transfer, "sends", False), True),
    "kv_transfer_host": ("127.0.0.2", lambda built: built.runner.mover.sender.host, "127.0.0.2"),
    "kv_transfer_peers": ("a, b:7", lambda built: built.runner.mover._stores["remote"]._peers, {"a", "b:7"}),
    "kv_transfer_timeout_s": (7, lambda built: built.core.config.transfer.timeout_s, 7.0),
    "max_model_len": (100, lambda built: built.core.config.max_model_len, 100),
    "rope_scaling": (
        {"rope_type": "linear", "factor": 2.0},
        lambda built: (built.pair.target.decoder.rope.kind, built.pair.draft.decoder.rope.kind),
        ("linear", "default"),
    ),
    "lora_modules": (ADAPTER, lambda built: built.ready.lora_names, ("a",)),
    "max_num_seqs": (3, lambda built: built.core.config.max_num_seqs, 3),
    "max_num_batched_tokens": (77, lambda built: built.core.config.max_num_batched_tokens, 77),
    "max_prefill_tokens_per_step": (19, lambda built: built.core.config.max_prefill_tokens_per_step, 19),
    "max_step_time_ms": (250, lambda built: built.core.config.max_step_s, 0.25),
    "max_queue_tokens": (2000, lambda built: built.core.config.max_queue_tokens, 2000),
    "tenant_weights": ("a=2", lambda built: built.core.config.tenant_weights.get("a"), 2.0),
    "enable_prefix_caching": (False, lambda built: built.core.config.enable_prefix_caching, False),
    "max_queue_size": (5, lambda built: built.core.config.max_queue_size, 5),
    "kv_write_guard": (True, lambda built: built.core.config.kv_write_guard, True),
    "enable_cuda_graphs": (False, lambda built: PREPARED[-1], False),
    "enable_measured_products": (True, lambda built: measured_products.wanted, True),
    "enable_overlap": (False, lambda built: built.core._overlap, False),
    "data_parallel_size": (2, lambda built: built.core.config.kv_events, "hashes"),
    "seed": (11, lambda built: built.core.config.seed, 11),
    "trace_dir": (Path("traces"), lambda built: built.trace is not None, True),
    "trace_steps": (7, lambda built: built.trace is not None and built.trace._max_steps, 7),
}
# Settings that do not reach the engine, or not here, and the tests in which each is seen to work.
ELSEWHERE = {
    "admin_key_file": "tests/triton/test_drafter_swaps.py",
    "enable_coarse_head": "tests/worker/test_coarse_head.py",
    "target_revision": "tests/checkpoints/test_hub.py",
    "draft_revision": "tests/checkpoints/test_hub.py",
    "device": "tests/gpu/test_engine.py",
    "gpu_memory_utilization": "tests/engine/test_build.py",
    "tensor_parallel_size": "tests/parallel/test_ranks.py",
    "distributed_executor": "tests/parallel/test_remote_ranks.py",
    "routing": "tests/triton/test_replicas.py",
    **dict.fromkeys(("record_traffic", "record_traffic_rate", "record_traffic_gb"), "tests/triton/test_traffic.py"),
    "kv_transfer_backend": "tests/worker/test_kv_transfer.py",
    "kv_transfer_port": "tests/triton/test_replicas.py",
    **dict.fromkeys(
        ("kv_events_endpoint", "kv_events_replay_endpoint", "kv_events_topic"), "tests/triton/test_kv_events.py"
    ),
    "num_state_snapshots": "tests/worker/test_recurrent_engines.py",
    "share_prefix_attention": "tests/worker/test_shared_prefixes.py",
    "engine_hang_timeout_s": "tests/engine_client/test_supervisor.py",
    **dict.fromkeys(
        (
            "generation_config",
            "max_response_mb",
            "max_stream_responses_per_s",
            "message_special_tokens",
            "report_cached_tokens",
            "request_timeout_s",
            "require_cache_salt",
            "stream_interval",
        ),
        "tests/triton/test_settings.py",
    ),
    "max_server_memory_gb": "tests/server/test_supervision.py",
    "log_level": "tests/server/test_supervision.py",
}
# Whether graphs were asked for, of each runner that was built.
PREPARED: list[bool] = []


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], Path]:
    """The settings of a pair of tiny models, and the folder of a target with fewer layers."""
    folder = tmp_path_factory.mktemp("models")
    make_target(folder / "other", num_hidden_layers=2)
    make_adapter(folder / ADAPTER, make_target(folder / "t"))
    return dict(make_pair(folder)), folder


def build(settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> BuiltEngine:
    """What a GPU gets, as far as it can be had without one and without running a step."""
    monkeypatch.setattr(
        ModelRunner, "prepare", lambda runner, use_graphs, progress, shapes: PREPARED.append(use_graphs)
    )
    return build_engine(EngineConfig.from_values({"device": "cpu", "attention_backend": "triton", **settings}))


@pytest.mark.parametrize("name", TABLE)
def test_a_setting_changes_what_it_says(
    name: str, models: tuple[dict[str, Any], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    value, observe, expected = TABLE[name]
    settings, folder = models
    if isinstance(value, Path):
        value = str(folder / value if name in ("target_model", "lora_modules") else tmp_path / value)
    value = {"a": value} if name == "lora_modules" else value
    # A trace has steps where it has a folder; a target of two layers goes without the drafter of the other one; n-grams
    # have a drafter of their own.
    company: dict[str, Any] = {"trace_steps": {"trace_dir": str(tmp_path)}, "target_model": {"draft_model": ""}}
    company |= {"kv_disk_gb": {"kv_disk_path": str(tmp_path / "kv")}, "kv_move_mb_s": {"kv_host_gb": 0.05}}
    company |= {name: {"kv_role": "prefill"} for name in ("kv_transfer_host", "kv_transfer_timeout_s")}
    company["kv_transfer_peers"] = {"kv_role": "decode"}
    company["activation_quantization"] = {"quantization": "fp8"}
    company |= {lookup: {"draft_model": "ngram"} for lookup in ("prompt_lookup_max", "prompt_lookup_min")}
    with_it = build(settings | company.get(name, {}) | {name: value}, monkeypatch)
    assert observe(with_it) == expected
    without = build(settings | company.get(name, {}), monkeypatch)
    assert observe(without) != expected


@pytest.mark.parametrize(("ranks", "measures"), [(1, True), (2, False)])
def test_ranks_do_not_measure_their_products(ranks: int, measures: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    class Enough(Exception):
        """What comes before the models are read has been done."""

    def read(config: EngineConfig) -> None:
        raise Enough

    monkeypatch.setattr("dflash_backend.engine.build.resolve_pair", read)
    settings = {
        "device": "cpu",
        "target_model": "none",
        "tensor_parallel_size": ranks,
        "enable_measured_products": True,
    }
    with pytest.raises(Enough):
        build_engine(EngineConfig.from_values(settings))
    assert measured_products.wanted == measures
    use_measured_products(False)


def test_every_setting_is_in_the_table_or_tested_elsewhere() -> None:
    assert {setting.name for setting in SETTINGS} == TABLE.keys() | ELSEWHERE.keys()
    for name, file in ELSEWHERE.items():
        assert name in (Path(__file__).parents[2] / file).read_text(encoding="utf-8"), f"{file} never names {name}"
