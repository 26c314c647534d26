"""Ranks that are reached over the network: the text of one process, and an end when one of them is lost."""

from __future__ import annotations

import os
import pickle
import signal
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest
import torch

from dflash_backend.checkpoints import CheckpointError
from dflash_backend.config import ConfigError, EngineConfig
from dflash_backend.engine.build import BuiltEngine, build_engine
from dflash_backend.models.peers import RankLostError
from dflash_backend.parallel import rank
from dflash_backend.parallel.channel import HEARTBEAT_MS
from dflash_backend.parallel.links import NETWORK_SILENCE_S, RankSetup, RemoteRank, packed
from dflash_backend.parallel.remote import RemoteRanks
from dflash_backend.parallel.sums import NetworkSum
from dflash_backend.parallel.target import Follower
from dflash_backend.parallel.vocabulary import Sums
from tests.parallel import rank_forks
from tests.parallel.rank_forks import ForkLauncher, PausedStep
from tests.parallel.test_ranks import (
    PROMPTS,
    SAMPLINGS,
    SETTINGS,
    assert_same_texts,
    end,
    group,
    lives,
    texts,
    texts_until_lost,
)
from tests.support.scale import by_night
from tests.support.tiny_models import make_pair
from tests.support.waiting import eventually
from tests.worker.engines import Outputs, engine

pytestmark = pytest.mark.usefixtures("single_thread")
RAY = {"distributed_executor": "ray"}


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return make_pair(tmp_path_factory.mktemp("models"), {"tie_word_embeddings": False})


@pytest.fixture(autouse=True)
def network(monkeypatch: pytest.MonkeyPatch) -> None:
    rank_forks.over_the_network(monkeypatch)


def pids(built: BuiltEngine) -> list[int]:
    links = group(built).links
    assert isinstance(links, RemoteRanks)
    launcher = links._launcher
    assert isinstance(launcher, ForkLauncher)
    return [process.pid for process in launcher.processes]


@pytest.mark.parametrize("size", [2, by_night(4)])
def test_ranks_over_the_network_give_the_text_of_one_and_end_with_the_engine(pair: dict[str, str], size: int) -> None:
    alone, shared = engine(**pair, **SETTINGS), engine(**pair, **SETTINGS, **RAY, tensor_parallel_size=size)
    assert isinstance(group(shared).reduce, NetworkSum)
    assert_same_texts(shared, alone, SAMPLINGS)
    assert shared.core.stats().prefix_cache_hits > 0
    ranks = pids(shared)
    assert all(map(lives, ranks))
    end(shared)
    assert not any(map(lives, ranks))


@pytest.mark.parametrize(
    ("size", "number", "words"),
    [(4, signal.SIGKILL, "has ended"), (2, signal.SIGSTOP, "has not answered for 3.5 s")],
)
def test_the_loss_of_a_rank_ends_the_engine_and_is_named(
    pair: dict[str, str], size: int, number: signal.Signals, words: str
) -> None:
    built = engine(**pair, **SETTINGS, **RAY, tensor_parallel_size=size)
    texts(built, temperature=0.0)
    ranks = pids(built)
    lost = size // 2
    os.kill(ranks[lost - 1], number)
    since = time.monotonic()
    with pytest.raises(RankLostError, match=f"rank {lost} on machine {lost} {words}"):
        texts_until_lost(built)
    silence_s = NETWORK_SILENCE_S + HEARTBEAT_MS / 1000 if number == signal.SIGSTOP else 0
    assert time.monotonic() - since < silence_s + 1
    end(built)
    assert not any(map(lives, ranks))


def test_a_rank_that_is_only_slow_is_not_lost(pair: dict[str, str]) -> None:
    """Though it does not run a line of Python for longer than a network may be silent."""
    alone, built = engine(**pair, **SETTINGS), engine(**pair, **SETTINGS, **RAY, tensor_parallel_size=2)
    send, pauses = group(built).links.send, [NETWORK_SILENCE_S + 1]

    def sent(data: bytes) -> None:
        send(packed(PausedStep(pickle.loads(data), pauses.pop())) if pauses else data)

    group(built).links.send = sent
    assert texts(built, temperature=0.0) == texts(alone, temperature=0.0)
    assert not pauses
    assert not group(built).lost
    end(built)


def test_the_loss_of_a_rank_shows_without_a_request(pair: dict[str, str]) -> None:
    built = engine(**pair, **SETTINGS, **RAY, tensor_parallel_size=2)
    built.check()
    os.kill(pids(built)[0], signal.SIGKILL)
    eventually(lambda: group(built).lost)
    with pytest.raises(RankLostError, match="rank 1 on machine 1 has ended"):
        built.check()
    end(built)


def test_what_a_rank_fails_of_is_told(pair: dict[str, str]) -> None:
    built = engine(**pair, **SETTINGS, **RAY, tensor_parallel_size=2)
    group(built).links.send(b"no message")
    outputs = Outputs(built)
    outputs.add("a", PROMPTS[0], max_tokens=8)
    with pytest.raises(RankLostError, match="rank 1 on machine 1 failed: UnpicklingError"):
        outputs.finish()
    end(built)


def test_ranks_end_with_an_engine_that_is_killed(pair: dict[str, str]) -> None:
    """While they wait for a pass."""
    process, ranks = rank_forks.start_engine(pair, **SETTINGS, **RAY, tensor_parallel_size=2)
    assert len(ranks) == 1
    assert lives(ranks[0])
    process.kill()
    process.wait()
    try:
        eventually(lambda: not any(map(lives, ranks)))
    finally:
        for pid in filter(lives, ranks):
            os.kill(pid, signal.SIGKILL)


@pytest.mark.parametrize("ends_first", [False, True], ids=["words first", "end first"])
def test_a_rank_that_cannot_load_says_why_and_where(
    ends_first: bool, pair: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    run = ForkLauncher.run

    def elsewhere(self: ForkLauncher, setups: Any) -> None:
        """As on a machine that has no such folder."""
        run(self, [replace(s, setup=replace(s.setup, spec=replace(s.setup.spec, path=Path("/gone")))) for s in setups])

    monkeypatch.setattr(ForkLauncher, "run", elsewhere)
    if ends_first:
        read, asked = RemoteRanks._receive_events, []

        def read_later(self: RemoteRanks) -> set[int]:
            asked.append(self)
            return read(self) if len(asked) > 1 else set()

        monkeypatch.setattr(RemoteRanks, "_receive_events", read_later)
        monkeypatch.setattr(ForkLauncher, "ended", lambda self, rank: "it has ended")
        monkeypatch.setattr("dflash_backend.parallel.remote.CAUSE_S", 30.0)
    config = EngineConfig.from_values({**pair, **RAY, "device": "cpu", "tensor_parallel_size": 2})
    with pytest.raises(ConfigError, match=r"rank 1 on machine 1 of 2 could not start: .*/gone"):
        build_engine(config)


@pytest.mark.parametrize(
    ("differs", "words"),
    [("code", "the code of dflash-triton here is not that"), ("checkpoint", "/t has other weights, or another config")],
)
def test_a_rank_whose_machine_has_other_files_does_not_start(
    differs: str, words: str, pair: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    run = ForkLauncher.run

    def elsewhere(self: ForkLauncher, setups: Any) -> None:
        found = [replace(s.setup.files, **{differs: b"another"}) for s in setups]
        run(self, [replace(s, setup=replace(s.setup, files=files)) for s, files in zip(setups, found, strict=True)])

    monkeypatch.setattr(ForkLauncher, "run", elsewhere)
    config = EngineConfig.from_values({**pair, **RAY, "device": "cpu", "tensor_parallel_size": 2})
    with pytest.raises(ConfigError, match=f"rank 1 on machine 1 of 2 could not start: .*{words}"):
        build_engine(config)


def test_a_rank_that_computes_otherwise_does_not_choose_experts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on another processor, where the router's numbers have other bits, and another expert may be the likeliest."""
    monkeypatch.setattr("dflash_backend.parallel.group.kernels_of", lambda device, attention: f"{device} {attention}")
    models = make_pair(tmp_path, {"architecture": "Qwen3MoeForCausalLM"})
    config = EngineConfig.from_values({**models, **RAY, "device": "cpu", "tensor_parallel_size": 2})
    with pytest.raises(ConfigError, match=r"rank 1 on machine 1 .* Rank 0 has: cpu \w+. This rank has: .*, torch "):
        build_engine(config)


def test_a_rank_that_ends_while_it_starts_is_an_error(pair: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ForkLauncher, "run", lambda self, setups: self.processes[0].kill())
    config = EngineConfig.from_values({**pair, **RAY, "device": "cpu", "tensor_parallel_size": 2})
    with pytest.raises(RuntimeError, match="rank 1 on machine 1 of 2 could not start: it"):
        build_engine(config)


def test_a_rank_that_ends_is_told_while_another_one_loads(
    pair: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """And rank 0 sleeps meanwhile: a connection that has ended wakes it once."""
    waits: list[int] = []
    receive = RemoteRanks._receive

    def counted(self: RemoteRanks) -> Any:
        waits.append(1)
        return receive(self)

    monkeypatch.setattr(RemoteRanks, "_receive", counted)
    # Rank 1 is not told what to load, so that it never says a word.
    monkeypatch.setattr(ForkLauncher, "run", lambda self, setups: self.processes[1].kill())
    config = EngineConfig.from_values({**pair, **RAY, "device": "cpu", "tensor_parallel_size": 4})
    with pytest.raises(RuntimeError, match="rank 2 on machine 2 of 4 could not start: it"):
        build_engine(config)
    assert len(waits) < 10


def test_each_rank_has_its_share_of_the_cores_of_its_own_machine(
    pair: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rank 0 shares a machine of 12 cores with one other; of the others' machines, of 3 cores, one has two ranks."""
    monkeypatch.setattr("dflash_backend.worker.batch_parallel.MAX_WEIGHT_BYTES", 0)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(12)))
    monkeypatch.setattr(ForkLauncher, "num_beside", lambda self, rank: (2, 2, 1, 1)[rank])
    sent: list[RankSetup] = []
    run = ForkLauncher.run

    def kept(self: ForkLauncher, setups: Sequence[RemoteRank]) -> None:
        sent.extend(each.setup for each in setups)
        run(self, setups)

    monkeypatch.setattr(ForkLauncher, "run", kept)
    built = engine(**pair, **SETTINGS, **RAY, tensor_parallel_size=4)
    end(built)
    assert built.runner.threads._op_threads == 6
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(3)))
    assert [threads_of_rank(each, monkeypatch) for each in sent] == [1, 3, 3]


def threads_of_rank(setup: RankSetup, monkeypatch: pytest.MonkeyPatch) -> int:
    """How many threads torch gets in a rank that finds no checkpoint."""
    threads: list[int] = []
    with monkeypatch.context() as patch:
        patch.setattr(torch, "set_num_threads", threads.append)
        patch.setattr(rank, "_beat", lambda send: None)
        patch.setattr(rank, "_load", failed)
        rank.run(setup, SilentRankZero(), cast(Sums, None))
    (number,) = threads
    return number


def failed(setup: RankSetup, sums: Sums) -> Follower:
    raise CheckpointError("no checkpoint")


class SilentRankZero:
    """As `RankZero`."""

    def send(self, message: object) -> None:
        pass

    def receive(self) -> bytes:
        raise EOFError
