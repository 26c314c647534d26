"""Backends are chosen and refused by what they declare."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from dflash_backend.attention import AttentionPattern, BackendError, Capabilities, Requirements, select_backend
from dflash_backend.attention.selection import BACKENDS, lacking
from dflash_backend.attention.torch_backend import TorchBackend
from dflash_backend.attention.triton_backend import INTERPRETED
from dflash_backend.config import EngineConfig
from dflash_backend.engine.build import build_engine
from dflash_kernels.cpu_ops import HAS_CPU_OPS
from tests.support.tiny_models import make_draft, make_target

# What auto takes on a CPU.
OF_A_CPU = "cpu" if HAS_CPU_OPS else "torch"

NEEDS = Requirements(
    patterns=frozenset(
        {AttentionPattern(True), AttentionPattern(False), AttentionPattern(True, 8), AttentionPattern(True, sinks=True)}
    ),
    head_dims=frozenset({48, 64}),
    dtype=torch.float32,
    device="cpu",
)


def limited(**changes: object) -> Capabilities:
    return dataclasses.replace(TorchBackend.capabilities, **changes)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"non_causal": False}, "non-causal attention"),
        ({"causal": False}, "lacks causal attention"),
        ({"sliding_window": False}, "sliding-window attention"),
        ({"sinks": False}, "attention sinks"),
        ({"head_dims": frozenset({64})}, "head size 48"),
        ({"dtypes": frozenset({torch.bfloat16})}, "float32"),
        ({"devices": frozenset({"cuda"})}, "device cpu"),
    ],
)
def test_a_backend_that_lacks_something_is_refused_with_those_that_would_do(
    changes: dict[str, object], named: str
) -> None:
    backends = {"small": (limited(**changes), TorchBackend), "torch": (TorchBackend.capabilities, TorchBackend)}
    with pytest.raises(BackendError, match=f"'small'.*{named}.*would do: torch"):
        select_backend("small", NEEDS, 16, backends)
    assert select_backend(None, NEEDS, 16, backends).name == "torch"


def test_auto_says_what_each_backend_lacks_when_none_can() -> None:
    with pytest.raises(BackendError, match="small lacks causal attention"):
        select_backend(None, NEEDS, 16, {"small": (limited(causal=False), TorchBackend)})


def test_a_backend_that_is_not_installed_is_named() -> None:
    with pytest.raises(BackendError, match="'flash_attn' is not available.*, which has .*torch"):
        select_backend("flash_attn", NEEDS, 16)


Prefer = Callable[[Capabilities], None]


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("pair")
    make_target(folder / "target")
    make_target(folder / "windowed", architecture="MistralForCausalLM", sliding_window=8)
    make_target(folder / "gpt-oss", architecture="GptOssForCausalLM")
    make_draft(folder / "draft")
    return folder


@pytest.fixture
def prefer(monkeypatch: pytest.MonkeyPatch) -> Prefer:
    """Installs a backend with these capabilities, which `auto` asks before torch."""

    def install(capabilities: Capabilities) -> None:
        backend = type("Preferred", (TorchBackend,), {"name": "triton", "capabilities": capabilities})
        monkeypatch.delitem(BACKENDS, TorchBackend.name)
        monkeypatch.setitem(BACKENDS, backend.name, (capabilities, backend))
        monkeypatch.setitem(BACKENDS, TorchBackend.name, (TorchBackend.capabilities, TorchBackend))

    return install


def load(pair: Path, target: str = "target", **settings: object) -> str:
    """The name of the backend that an engine for the pair takes."""
    values = {"target_model": pair / target, "draft_model": pair / "draft", "max_model_len": 64, "device": "cpu"}
    return build_engine(EngineConfig.from_values(values | settings)).runner.model.backend.name


@pytest.mark.parametrize(
    ("lacking", "named", "needing", "doing_without"),
    [
        ({"non_causal": False}, "non-causal attention", {}, [{"causal": "true"}, {"draft_model": ""}]),
        ({"causal": False}, "causal attention", {"causal": "true"}, []),
        ({"sliding_window": False}, "sliding-window attention", {"target": "windowed"}, [{}]),
        ({"sinks": False}, "attention sinks", {"target": "gpt-oss"}, [{}, {"target": "windowed"}]),
    ],
)
def test_a_pair_that_needs_more_than_a_backend_has_is_refused_at_load(
    pair: Path,
    prefer: Prefer,
    lacking: dict[str, bool],
    named: str,
    needing: dict[str, str],
    doing_without: list[dict[str, str]],
) -> None:
    prefer(limited(**lacking))
    with pytest.raises(BackendError, match=f"'triton' lacks {named}.*these would do: .*torch"):
        load(pair, attention_backend="triton", **needing)
    assert load(pair, **needing) == OF_A_CPU
    for settings in doing_without:
        assert load(pair, **settings) == load(pair, attention_backend="triton", **settings) == "triton"


def test_the_causality_of_a_drafter_alone_decides() -> None:
    """Without a target, whose causal layers every backend must run anyway."""
    for causal, lacks in ((True, "causal attention"), (False, "non-causal attention")):
        needs = dataclasses.replace(NEEDS, patterns=frozenset({AttentionPattern(causal)}))
        assert lacking(limited(causal=False, non_causal=False), needs, 16) == [lacks]
        assert lacking(limited(**{"non_causal" if causal else "causal": False}), needs, 16) == []


def test_everything_that_is_lacking_is_named() -> None:
    capabilities = limited(non_causal=False, sliding_window=False, head_dims=frozenset({128}), devices=frozenset())
    assert lacking(capabilities, NEEDS, 16) == [
        "non-causal attention",
        "sliding-window attention",
        "head size 48",
        "head size 64",
        "device cpu",
    ]


def test_auto_is_triton_on_a_gpu_and_not_on_a_cpu() -> None:
    """On a CPU also under Triton's interpreter, where our kernels can be asked for."""
    assert select_backend(None, dataclasses.replace(NEEDS, device="cuda"), 16).name == "triton"
    assert select_backend(None, NEEDS, 16).name == OF_A_CPU


def test_our_kernels_run_on_a_cpu_under_the_interpreter_alone() -> None:
    if INTERPRETED:
        assert select_backend("triton", NEEDS, 16).name == "triton"
    else:
        with pytest.raises(BackendError, match="'triton' lacks device cpu.*would do: .*torch"):
            select_backend("triton", NEEDS, 16)


def test_an_emulating_backend_is_taken_when_no_other_can() -> None:
    emulating = limited(emulated=frozenset({"cpu"}))
    backends = {"emulating": (emulating, TorchBackend), "small": (limited(causal=False), TorchBackend)}
    assert select_backend(None, NEEDS, 16, backends).name == "torch"


def test_a_block_size_that_a_backend_does_not_take_is_named() -> None:
    backends = {"small": (limited(block_multiple=256), TorchBackend)}
    with pytest.raises(BackendError, match=r"'small' lacks kv_block_size 16 \(it takes multiples of 256\)"):
        select_backend("small", NEEDS, 16, backends)
    assert select_backend("small", NEEDS, 512, backends).name == "torch"
