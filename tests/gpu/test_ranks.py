"""A target that two GPUs share gives the tokens of one, and a rank that is lost ends the engine."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch

msgspec = pytest.importorskip("msgspec", reason="the engine's messages need the package msgspec")
transformers = pytest.importorskip("transformers", reason="tiny models are made with the package transformers")

from dflash_backend.models.peers import RankLostError  # noqa: E402
from dflash_backend.parallel.links import HANG_S  # noqa: E402
from tests.parallel.test_ranks import SETTINGS, end, group, lives, rank_pids, texts, texts_until_lost  # noqa: E402
from tests.support.tiny_models import make_pair  # noqa: E402
from tests.support.waiting import eventually  # noqa: E402
from tests.worker.engines import engine  # noqa: E402

pytestmark = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two NVIDIA GPUs")
ON_GPUS: dict[str, Any] = SETTINGS | {
    "device": "cuda",
    "dtype": "float32",
    "kv_write_guard": False,
    "kv_block_size": 16,
    "gpu_memory_utilization": 0.3,
}
SAMPLINGS: tuple[dict[str, Any], ...] = ({"temperature": 0.0}, {"temperature": 1.0, "seed": 3, "top_p": 0.9})
WAYS = [
    {"enable_cuda_graphs": graphs, "enable_overlap": overlap} for graphs in (True, False) for overlap in (True, False)
]
# The first answer to a lost rank comes with the next step, and NCCL is told to end before.
NOTICED_S = 5.0


@pytest.mark.parametrize("way", WAYS, ids=lambda way: ", ".join(f"{name[7:]} {on}" for name, on in way.items()))
@pytest.mark.parametrize("split", [False, True])
def test_two_gpus_give_the_text_of_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, way: dict[str, bool], split: bool
) -> None:
    if split:
        monkeypatch.setattr("dflash_backend.parallel.group.MIN_SPLIT_BYTES", 0)
    pair = make_pair(tmp_path, {"tie_word_embeddings": False})
    alone, shared = engine(**pair, **ON_GPUS, **way), engine(**pair, **ON_GPUS, **way, tensor_parallel_size=2)
    assert group(shared).device == torch.device("cuda", 0)
    for sampling in SAMPLINGS:
        assert texts(shared, **sampling) == texts(alone, **sampling)
    end(shared)


@pytest.mark.parametrize(
    "architecture", ["GptOssForCausalLM", "Qwen3MoeForCausalLM", "Gemma4ForCausalLM", "Qwen3NextForCausalLM"]
)
def test_other_families_on_two_gpus_give_the_text_of_one(tmp_path: Path, architecture: str) -> None:
    pair = make_pair(tmp_path, {"architecture": architecture})
    alone, shared = engine(**pair, **ON_GPUS), engine(**pair, **ON_GPUS, tensor_parallel_size=2)
    for sampling in SAMPLINGS:
        assert texts(shared, **sampling) == texts(alone, **sampling)
    end(shared)


@pytest.mark.skipif(torch.cuda.device_count() < 4, reason="needs four NVIDIA GPUs")
def test_four_gpus_give_the_text_of_one_and_the_same_in_any_batch(tmp_path: Path) -> None:
    pair = make_pair(tmp_path, {"tie_word_embeddings": False})
    for settings in ({}, {"batch_invariant": True}):
        alone, shared = (engine(**pair, **ON_GPUS, **settings, tensor_parallel_size=size) for size in (1, 4))
        assert texts(shared, temperature=0.0) == texts(alone, temperature=0.0)
        end(shared)


@pytest.mark.parametrize(
    ("number", "words", "noticed_s"),
    [(signal.SIGKILL, "has ended", NOTICED_S), (signal.SIGSTOP, "has not answered", HANG_S + NOTICED_S)],
)
@pytest.mark.parametrize("graphs", [True, False])
def test_a_rank_that_is_lost_ends_the_engine(
    tmp_path: Path, number: signal.Signals, words: str, noticed_s: float, graphs: bool
) -> None:
    """In the midst of steps, whose sums wait for it on the GPU."""
    built = engine(**make_pair(tmp_path), **ON_GPUS, enable_cuda_graphs=graphs, tensor_parallel_size=2)
    texts(built, temperature=0.0)
    (pid,) = rank_pids(built)
    os.kill(pid, number)
    since = time.monotonic()
    with pytest.raises(RankLostError, match=words):
        texts_until_lost(built)
    assert time.monotonic() - since < noticed_s
    eventually(lambda: not lives(pid))
    end(built)
