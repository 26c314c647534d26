"""Engines whose ranks do as those on GPUs: what is broadcast, captured and replayed gives the text of one process."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from dflash_backend.attention.torch_backend import TorchBackend
from dflash_backend.config import ConfigError, EngineConfig
from dflash_backend.engine.build import BuiltEngine, build_engine
from dflash_backend.models.peers import RankLostError
from dflash_backend.parallel.gpu import Replay
from dflash_backend.parallel.target import ForwardPass
from dflash_backend.worker.kv_cache import PagedKVCache
from dflash_backend.worker.transfers import Download
from tests.parallel.test_ranks import SETTINGS, end, group, texts
from tests.parallel.thread_ranks import GIB, Memory, as_on_gpus, thread_links, with_graphs
from tests.support.tiny_models import make_pair
from tests.worker.engines import Outputs, engine

MIB = 1 << 20
pytestmark = pytest.mark.usefixtures("single_thread")
SAMPLINGS: tuple[dict[str, Any], ...] = ({"temperature": 0.0}, {"temperature": 1.0, "seed": 3, "top_p": 0.9})
SETUP: dict[str, Any] = SETTINGS | {"kv_write_guard": False}


@pytest.fixture(autouse=True)
def threads(monkeypatch: pytest.MonkeyPatch) -> None:
    as_on_gpus(monkeypatch)


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return make_pair(tmp_path_factory.mktemp("models"), {"tie_word_embeddings": False})


@pytest.mark.parametrize("split", [False, True])
def test_replayed_graphs_of_two_ranks_give_the_text_of_one(
    pair: dict[str, str], monkeypatch: pytest.MonkeyPatch, split: bool
) -> None:
    if split:
        monkeypatch.setattr("dflash_backend.parallel.group.MIN_SPLIT_BYTES", 0)
    keeping: list[str] = []
    monkeypatch.setattr(
        "dflash_backend.parallel.rank.keep_step_buffers", lambda: keeping.append(threading.current_thread().name)
    )
    check(pair, 2)
    assert len(keeping) == 1, "the other rank keeps the memory of its steps"


def test_replayed_graphs_of_recurrent_layers_commit_their_states(tmp_path: Path) -> None:
    check(make_pair(tmp_path, {"architecture": "Qwen3NextForCausalLM"}), 2)


def check(models: dict[str, str], size: int) -> None:
    alone = engine(**models, **SETUP)
    shared = with_graphs(engine(**models, **SETUP, tensor_parallel_size=size))
    sent = messages(shared)
    for sampling in SAMPLINGS:
        assert few_texts(shared, **sampling) == few_texts(alone, **sampling)
    assert shared.core.stats().prefix_cache_hits > 0
    # Prompts are sent as passes, and decode steps as replays.
    assert sent.count(ForwardPass) > 3
    assert sent.count(Replay) > 6
    check_order(shared)
    end(shared)


def test_a_rank_claims_the_memory_of_its_kv_before_it_is_ready(
    pair: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Which a cache on a GPU has anyway: `PagedKVCache.claim` looks to those in host memory."""
    claimed: list[PagedKVCache] = []
    monkeypatch.setattr(PagedKVCache, "claim", lambda self: claimed.append(self))
    built = engine(**pair, **SETUP, tensor_parallel_size=2)
    assert [len(kv.target) for kv in claimed[:1]] == [len(built.runner.model.kv.target)]
    end(built)


def few_texts(built: BuiltEngine, **sampling: Any) -> list[list[int]]:
    """Of two prompts, the second of which begins as the first, so that there are chunks, hits and rows side by side."""
    outputs = Outputs(built)
    for index, prompt in enumerate(([3] * 17, [3] * 17 + [8, 4])):
        outputs.add(str(index), prompt, max_tokens=12, ignore_eos=True, **sampling)
        outputs.step()
    return list(outputs.finish().values())


def messages(built: BuiltEngine) -> list[type]:
    """The kinds of messages that are sent from now on."""
    ranks, sent = group(built), []
    send = ranks.send

    def kept(step: Any) -> None:
        sent.append(type(step))
        send(step)

    ranks.send = kept  # type: ignore[method-assign]
    return sent


def check_order(built: BuiltEngine) -> None:
    """Every rank has taken part in the same exchanges, in the same order and of the same sizes."""
    first, *others = thread_links(built).exchange.log
    assert len(first) > 50
    assert all(other == first for other in others)


def measured(
    pair: dict[str, str], patch: pytest.MonkeyPatch, own: Memory, other: Memory, **settings: Any
) -> BuiltEngine:
    """An engine whose KV is what the memory of both ranks has space for."""
    as_on_gpus(patch, lambda: other)
    values = {**pair, **SETTINGS, "device": "cpu", "tensor_parallel_size": 2, **settings}
    return build_engine(EngineConfig.from_values(values), probe=own)


def test_all_ranks_have_as_many_blocks_as_the_one_with_the_least_memory_holds(
    pair: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rank 0 alone has KV of the drafter too."""
    free, tight = Memory(total=4 * MIB), Memory(weights=2 * MIB, step=MIB, total=4 * MIB)
    found = {}
    for name, own, other in (("rank 0", tight, free), ("rank 1", free, tight)):
        built = measured(pair, monkeypatch, own, other, gpu_memory_utilization=0.875)
        found[name] = built.core.config.num_blocks
        texts(built, temperature=0.0)
        end(built)
    kv = built.runner.model.kv
    of_target, whole = (sum(layer.data[0].nbytes for layer in layers) for layers in (kv.target, kv.target + kv.draft))
    assert found == {"rank 0": MIB // 2 // whole, "rank 1": MIB // 2 // of_target}


def test_a_named_size_is_the_whole_caches_and_must_fit_on_each_rank(
    pair: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    size = {"kv_cache_gb": MIB / GIB}
    built = measured(pair, monkeypatch, Memory(total=4 * MIB), Memory(total=4 * MIB), **size)
    alone = engine(**pair, **SETTINGS, **size)
    assert built.core.config.num_blocks == alone.core.config.num_blocks
    end(built)
    with pytest.raises(ConfigError, match=r"each of 2 ranks holds a part, .* more than there is on rank 1 of 2: "):
        measured(pair, monkeypatch, Memory(total=4 * MIB), Memory(4 * MIB - 1000, total=4 * MIB), **size)


def test_a_step_of_a_lost_rank_gives_no_tokens(pair: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    """It ends once NCCL is told to, with any numbers."""
    built = with_graphs(engine(**pair, **SETUP, tensor_parallel_size=2))
    outputs = Outputs(built)
    outputs.add("0", [5, 6, 7], max_tokens=40, ignore_eos=True, temperature=0.0)
    for _ in range(3):
        outputs.step()
    before = list(outputs.tokens["0"])
    wait = Download.wait

    def lost_meanwhile(download: Download) -> Any:
        thread_links(built).lost = "rank 1 has ended"
        return wait(download)

    monkeypatch.setattr(Download, "wait", lost_meanwhile)
    with pytest.raises(RankLostError, match="rank 1 has ended"):
        outputs.step()
    assert outputs.tokens["0"] == before
    end(built)


def test_least_free_memory_of_all_ranks_decides_on_a_graph(
    pair: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    as_on_gpus(monkeypatch, lambda: Memory(weights=6, total=10))
    built = engine(**pair, **SETUP, tensor_parallel_size=2)
    peers = built.runner.model.target.peers
    assert peers.least_free(9) == 4
    assert peers.least_free(3) == 3
    end(built)


def test_all_kernels_are_compiled_on_all_ranks(pair: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    entered: list[str] = []

    @contextmanager
    def every_variant(self: TorchBackend, max_tokens: int = 0) -> Iterator[None]:
        entered.append(threading.current_thread().name)
        yield
        entered.append("left")

    monkeypatch.setattr(TorchBackend, "every_variant", every_variant)
    built = engine(**pair, **SETUP, tensor_parallel_size=2)
    peers = built.runner.model.target.peers
    with peers.every_variant():
        peers.least_free(1)  # the other rank has come as far
        assert len(entered) == 1
    peers.least_free(1)
    assert entered[1:] == ["left"]
    end(built)
