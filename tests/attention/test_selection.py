"""Backends are chosen and refused by what they declare."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from dflash_backend.attention import AttentionPattern, BackendError, Capabilities, Requirements, select_backend
from dflash_backend.attention.torch_backend import TorchBackend

NEEDS = Requirements(
    patterns=frozenset({AttentionPattern(True), AttentionPattern(False), AttentionPattern(True, 8)}),
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
    with pytest.raises(BackendError, match="'flash_attn' is not available.*would do: torch"):
        select_backend("flash_attn", NEEDS, 16)
