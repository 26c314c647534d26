"""Ranks on a Ray cluster of two nodes on this machine."""

from __future__ import annotations

import signal
import sys
from collections.abc import Iterator, Sequence
from types import SimpleNamespace

import pytest

from checks.ray_nodes import RayNodes
from checks.ray_ranks import ranks_there
from dflash_backend.config import ConfigError
from dflash_backend.models.peers import RankLostError
from dflash_backend.parallel import ray_ranks
from dflash_backend.parallel.links import RemoteRank
from tests.parallel.test_ranks import SETTINGS, end, group, texts, texts_until_lost
from tests.parallel.test_remote_ranks import RAY
from tests.support.tiny_models import make_pair
from tests.support.waiting import eventually
from tests.worker.engines import engine

pytestmark = pytest.mark.usefixtures("single_thread")


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return make_pair(tmp_path_factory.mktemp("models"), {"tie_word_embeddings": False})


@pytest.fixture(scope="module")
def nodes() -> Iterator[RayNodes]:
    with RayNodes(cpus=2, gpus=2) as nodes, pytest.MonkeyPatch.context() as patch:
        for name, value in nodes.environ.items():
            patch.setenv(name, value)
        yield nodes


@pytest.mark.slow
def test_ranks_on_two_nodes_give_the_text_of_one_and_leave_nothing(pair: dict[str, str], nodes: RayNodes) -> None:
    before = signal.getsignal(signal.SIGTERM)
    alone, shared = engine(**pair, **SETTINGS), engine(**pair, **SETTINGS, **RAY, tensor_parallel_size=2)
    assert signal.getsignal(signal.SIGTERM) is before
    assert len(ranks_there(nodes)) == 1
    for sampling in ({"temperature": 0.0}, {"temperature": 1.0, "seed": 3, "top_p": 0.9}):
        assert texts(shared, **sampling) == texts(alone, **sampling)
    end(shared)
    eventually(lambda: not ranks_there(nodes))


@pytest.mark.slow
def test_more_ranks_than_cpus_are_refused_with_what_is_missing(
    nodes: RayNodes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ray_ranks, "PLACEMENT_S", 1.0)
    words = (
        r"8 ranks need 8 free CPUs .* this node \(127.0.0.2\); it has 4 free, and nodes 127.0.0.2 with 2, "
        r"127.0.0.3 with 2. Add nodes .* --num-cpus"
    )
    with pytest.raises(ConfigError, match=words):
        ray_ranks.ray_ranks(8)


@pytest.mark.nightly
@pytest.mark.slow
def test_a_node_that_is_lost_is_named_and_an_engine_waits_for_the_next(pair: dict[str, str], nodes: RayNodes) -> None:
    built = engine(**pair, **SETTINGS, **RAY, tensor_parallel_size=2)
    texts(built, temperature=0.0)
    nodes.remove()
    with pytest.raises(RankLostError, match=r"rank 1 on node 127.0.0.3 \(Ray's node \w{12}\) has ended"):
        texts_until_lost(built)
    end(built)
    nodes.add()
    again = engine(**pair, **SETTINGS, **RAY, tensor_parallel_size=2)
    texts(again, temperature=0.0)
    end(again)


@pytest.mark.nightly
@pytest.mark.slow
def test_more_ranks_than_nodes_share_nodes_and_their_cores(
    pair: dict[str, str], nodes: RayNodes, monkeypatch: pytest.MonkeyPatch
) -> None:
    sent: list[RemoteRank] = []
    run = ray_ranks.RayLauncher.run

    def kept(self: ray_ranks.RayLauncher, setups: Sequence[RemoteRank]) -> None:
        sent.extend(setups)
        run(self, setups)

    monkeypatch.setattr(ray_ranks.RayLauncher, "run", kept)
    alone, shared = engine(**pair, **SETTINGS), engine(**pair, **SETTINGS, **RAY, tensor_parallel_size=4)
    assert len(ranks_there(nodes)) == 2
    assert [each.setup.num_sharers for each in sent] == [2, 2, 2]
    assert group(shared).links.num_beside(0) == 2
    for sampling in ({"temperature": 0.0}, {"temperature": 1.0, "seed": 3, "top_p": 0.9}):
        assert texts(shared, **sampling) == texts(alone, **sampling)
    end(shared)


@pytest.mark.nightly
@pytest.mark.slow
def test_one_node_with_cpus_enough_has_all_ranks(pair: dict[str, str], nodes: RayNodes) -> None:
    nodes.remove()
    alone, shared = engine(**pair, **SETTINGS), engine(**pair, **SETTINGS, **RAY, tensor_parallel_size=2)
    assert texts(shared, temperature=0.0) == texts(alone, temperature=0.0)
    end(shared)
    nodes.add()


def test_without_the_package_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(ConfigError, match="the package ray is not installed here: install the extra `ray`"):
        ray_ranks.ray_ranks(2)


@pytest.mark.parametrize("address", ["ray://127.0.0.1:1", "local", "127.0.0.1:1"])
def test_an_address_at_which_no_cluster_answers_is_refused_at_once(
    address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def init(**settings: object) -> None:
        raise ConnectionError("no answer in five minutes")

    # Not Ray itself: what it reads of the environment as it is imported, whether it has a token, stays so.
    stub = SimpleNamespace(is_initialized=lambda: False, init=init, exceptions=SimpleNamespace(RayError=RuntimeError))
    monkeypatch.setitem(sys.modules, "ray", stub)
    monkeypatch.setenv("RAY_ADDRESS", address)
    with pytest.raises(ConfigError, match=f"no node of a Ray cluster that answers: .*{address}"):
        ray_ranks.ray_ranks(2)


@pytest.mark.slow
def test_ray_gives_each_rank_a_gpu_of_its_own_and_holds_rank_0s(
    nodes: RayNodes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In Ray's count: nothing here runs on them."""
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    launcher = ray_ranks.RayLauncher(3, on_gpus=True)
    assert launcher.device_index(0) in (0, 1)
    assert [launcher.device_index(rank) for rank in (1, 2)] == [0, 0]
    assert len(launcher.open(2, b"k" * 40)) == 2
    monkeypatch.setattr(ray_ranks, "PLACEMENT_S", 1.0)
    # A node that a test before this one removed counts until Ray has missed it.
    eventually(lambda: sum(node["Alive"] for node in launcher._ray.nodes()) == 2)
    with pytest.raises(ConfigError, match=r"2 ranks need 2 free GPUs .* it has 1 free, .*--num-gpus"):
        ray_ranks.RayLauncher(2, on_gpus=True)
    launcher.end()
