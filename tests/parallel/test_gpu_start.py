"""How ranks on GPUs start and end: each on its own GPU before it allocates, errors by name, an end of what waits."""

from __future__ import annotations

import signal
import threading
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from dflash_backend.checkpoints import read_target
from dflash_backend.config import ConfigError, EngineConfig
from dflash_backend.parallel import group, local, rank, ray_ranks
from dflash_backend.parallel.group import GpuRanks, RankGroup, check_tensor_parallel
from dflash_backend.parallel.links import Join, RankReady, packed
from dflash_backend.parallel.local import LocalRanks
from dflash_backend.parallel.nccl import GpuSum
from dflash_backend.parallel.shard import Shard
from dflash_backend.worker import graphs
from dflash_backend.worker.batch import ForwardBatch
from dflash_backend.worker.graphs import CudaGraphRunner
from tests.support.tiny_models import make_target
from tests.support.waiting import eventually

GPU_1 = torch.device("cuda", 1)


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What is done with GPUs and NCCL, in order."""
    found: list[Any] = []
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: found.append(("set_device", device)))
    nccl = SimpleNamespace(unique_id=lambda: found.append("unique_id") or b"id")
    monkeypatch.setattr(group, "load_nccl", lambda: nccl)
    monkeypatch.setattr(rank, "load_nccl", lambda: nccl)
    return found


def test_a_rank_is_on_its_gpu_before_it_loads(calls: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    setup: Any = SimpleNamespace(device=GPU_1, weight_bytes=0, num_sharers=1)

    def load(setup: Any, sums: Any) -> Any:
        calls.append("load")
        raise RuntimeError("CUDA out of memory")

    monkeypatch.setattr(rank, "_load", load)
    monkeypatch.setattr(rank, "_beat", lambda send: None)
    said: list[Any] = []
    rank.run(setup, SimpleNamespace(send=said.append), sums=None)  # type: ignore[arg-type]
    assert calls == [("set_device", GPU_1), "load"]
    assert said == [RankReady("CUDA out of memory")]


@pytest.mark.parametrize("part", ["load", "sums", "GPU"])
def test_a_rank_that_fails_of_anything_at_its_start_says_so(part: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*given: object) -> None:
        raise ValueError("a defect")

    monkeypatch.setattr(rank, "_load", fail if part == "load" else lambda setup, sums: None)
    monkeypatch.setattr(rank, "_beat", lambda send: None)
    monkeypatch.setattr(torch.cuda, "set_device", fail)
    monkeypatch.setattr(rank, "sums_of", fail if part == "sums" else lambda setup, on_cpus: (None, None))
    device = GPU_1 if part == "GPU" else torch.device("cpu")
    setup: Any = SimpleNamespace(device=device, weight_bytes=0, num_sharers=1, files=None, kernels="")
    said: list[Any] = []
    rank.start(setup, SimpleNamespace(send=said.append), on_cpus=lambda: None)  # type: ignore[arg-type, return-value]
    assert said == [RankReady("ValueError: a defect")]


def test_a_rank_meets_the_others_once_rank_0_says_that_all_have_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    """They wait for it a minute, and one of them may read its part for several."""
    events: list[Any] = []
    messages = [packed(Join()), b"a pass"]

    def receive() -> bytes:
        if not messages:
            raise EOFError
        events.append(messages[0])
        return messages.pop(0)

    monkeypatch.setattr(rank, "_load", lambda setup, sums: events.append)
    monkeypatch.setattr(rank, "_beat", lambda send: None)
    setup: Any = SimpleNamespace(device=torch.device("cpu"), weight_bytes=0, num_sharers=1)
    rank_zero: Any = SimpleNamespace(send=events.append, receive=receive)
    with pytest.raises(EOFError):
        rank.run(setup, rank_zero, sums=None, join=lambda: events.append("join"))  # type: ignore[arg-type]
    assert events == [RankReady(), packed(Join()), "join", b"a pass", b"a pass"]


def test_each_rank_of_a_machine_has_the_gpu_of_its_number(calls: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(group, "DeviceMessages", lambda sums, device: None)
    monkeypatch.setattr(group, "vocabulary_bytes", lambda spec, dtype: 0)
    spec: Any = None
    config = EngineConfig(tensor_parallel_size=3)
    ranks = RankGroup.of(config, spec, weight_bytes=0, dtype=torch.float32, device=torch.device("cuda"))
    assert calls == [("set_device", torch.device("cuda", 0)), "unique_id"]
    assert ranks.device == torch.device("cuda", 0)
    assert [ranks._device_of(number) for number in (1, 2)] == [GPU_1, torch.device("cuda", 2)]
    assert isinstance(ranks.reduce, GpuSum)
    assert ranks.links.reduce is ranks.reduce


def test_a_rank_meets_the_others_by_rank_0s_id_and_on_its_own_gpu(
    calls: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The thread that connects has a current device of its own."""
    monkeypatch.setattr("dflash_backend.parallel.nccl.Communicator", lambda *arguments: calls.append(arguments))
    needs = SimpleNamespace(batch_invariant=False)
    setup: Any = SimpleNamespace(device=GPU_1, shard=Shard(1, 4), nccl_id=b"id", needs=needs)
    sums, join = rank.sums_of(setup, on_cpus=lambda: pytest.fail("sums of CPUs"))
    assert join is not None
    monkeypatch.setattr(sums, "_check", lambda: None)
    join()
    (_, bound), (_, unique_id, own, size) = calls
    assert (bound, unique_id, own, size) == (GPU_1, b"id", 1, 4)


def test_fewer_gpus_than_ranks_are_refused_with_what_would_work(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    make_target(tmp_path)
    spec = read_target(tmp_path)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3")
    words = r"is 2, which takes a GPU for each rank, and this process sees 1 \(CUDA_VISIBLE_DEVICES=3\): .*KIND_MODEL"
    with pytest.raises(ConfigError, match=words):
        check_tensor_parallel(EngineConfig(tensor_parallel_size=2), spec, torch.device("cuda"))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    check_tensor_parallel(EngineConfig(tensor_parallel_size=2), spec, torch.device("cuda"))


class Recorder:
    """As `Collectives`, as far as an end goes."""

    def __init__(self) -> None:
        self.aborted = threading.Event()

    def abort(self) -> None:
        self.aborted.set()


def links_of(monkeypatch: pytest.MonkeyPatch, command: list[str]) -> tuple[LocalRanks, Recorder]:
    """Ranks that are processes of another program, and what ends their exchanges."""
    links, group = LocalRanks(Shard(0, 2)), Recorder()
    sums = GpuSum(Shard(0, 2), torch.device("cpu"), lambda: group)  # type: ignore[arg-type, return-value]
    monkeypatch.setattr(sums, "_check", lambda: None)
    links.sum_by(sums)
    popen = local.subprocess.Popen
    monkeypatch.setattr(local, "subprocess", SimpleNamespace(Popen=lambda _, **options: popen(command, **options)))
    links.start([None])  # type: ignore[list-item]
    return links, group


def test_what_waits_for_a_killed_rank_on_the_gpu_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel of NCCL would wait for ever, and the engine for it."""
    links, group = links_of(monkeypatch, ["sleep", "60"])
    links.serve()
    links.processes[0].send_signal(signal.SIGKILL)
    assert group.aborted.wait(5)
    assert links.lost == "rank 1 has ended"


def test_a_silent_rank_is_noticed_on_a_gpu_as_on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local, "HANG_S", 0.2)
    monkeypatch.setattr(local, "BEAT_S", 0.05)
    links, group = links_of(monkeypatch, ["sleep", "60"])
    links.serve()
    assert group.aborted.wait(5)
    assert links.lost == "rank 1 has not answered for 0.2 s"
    assert links.processes[0].poll() is not None


def test_an_engine_that_ends_leaves_nccl_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """To end the exchanges of a group whose ranks were ended in order could wait for them."""
    monkeypatch.setattr(local, "BEAT_S", 0.05)
    links, group = links_of(monkeypatch, ["sleep", "60"])
    links.serve()
    links.end()
    eventually(lambda: not any(thread.name == "rank-watch" for thread in threading.enumerate()))
    assert not group.aborted.is_set()


class Events(list[Any]):
    """What a captured step does, in order."""

    def block(self, name: str, gives: Any = None) -> Any:
        events = self

        class Block:
            def __enter__(self) -> Any:
                events.append(f"begin {name}")
                return gives

            def __exit__(self, *error: object) -> None:
                events.append(f"end {name}")

        return Block()


def test_ranks_run_a_step_before_it_is_captured_and_replay_their_graph_before_rank_0(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What a collective allocates at its first use may not be allocated within a capture; and a message that came
    behind the launch would wait for a device that waits for it."""
    events = Events()
    parts = iter(("first", "second", "third"))

    def capturing() -> Any:
        part = next(parts)
        return events.block(f"there {part}", lambda: events.append(f"replay there {part}"))

    def graph() -> Any:
        name = f"graph {sum(isinstance(event, str) and event.startswith('new') for event in events)}"
        events.append(f"new {name}")
        return SimpleNamespace(
            capture_begin=lambda pool: events.append(f"begin {name}"),
            capture_end=lambda: events.append(f"end {name}"),
            replay=lambda: events.append(f"replay {name}"),
        )

    cuda = SimpleNamespace(CUDAGraph=graph, stream=lambda stream: nullcontext())
    monkeypatch.setattr(graphs, "torch", SimpleNamespace(cuda=cuda, Tensor=torch.Tensor))

    def verify(step: ForwardBatch) -> None:
        events.append("verify")
        step.logits, step.target_tokens = torch.zeros(2, 2).T, torch.zeros(2)

    def accept(step: ForwardBatch) -> None:
        events.append("accept")
        step.results = torch.zeros(2)

    def draft(step: ForwardBatch) -> None:
        events.append("draft")
        step.draft_report = torch.zeros(2)

    model: Any = SimpleNamespace(
        target=SimpleNamespace(peers=SimpleNamespace(capturing=capturing)),
        run=lambda inputs: events.append("run"),
        verify=verify,
        accept=accept,
        draft=draft,
    )
    stream: Any = SimpleNamespace(synchronize=lambda: events.append("synchronize"))
    inputs = ForwardBatch(*[None] * 6)  # type: ignore[arg-type]
    captured = CudaGraphRunner(model, inputs, None, stream)
    step = captured.verify(inputs)
    captured.accept(step)
    captured.draft(step)
    assert [event for event in events if not event.startswith("new")] == [
        *("run", "synchronize"),
        *("begin there first", "begin graph 0", "verify", "end graph 0", "end there first"),
        *("begin there second", "begin graph 1", "accept", "end graph 1", "end there second"),
        *("begin there third", "begin graph 2", "draft", "end graph 2", "end there third"),
        *("replay there first", "replay graph 0", "replay there second", "replay graph 1"),
        *("replay there third", "replay graph 2"),
    ]


@pytest.mark.parametrize(
    ("gpu", "visible", "index"), [("3", None, 3), ("3", "2,3", 1), ("GPU-8f", "GPU-1a, GPU-8f", 1), ("0", "0", 0)]
)
def test_rank_0_of_a_ray_cluster_has_the_gpu_that_ray_holds_for_it(gpu: str, visible: str | None, index: int) -> None:
    assert ray_ranks.visible_index(gpu, visible) == index


@pytest.mark.parametrize("visible", ["2,3", ""])
def test_a_gpu_of_ray_that_the_server_does_not_see_is_named(visible: str) -> None:
    with pytest.raises(ConfigError, match=f"gives rank 0 the GPU 1 .*CUDA_VISIBLE_DEVICES={visible} does not show it"):
        ray_ranks.visible_index("1", visible)


def test_nccl_is_asked_for_before_a_gpu_is_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing() -> None:
        raise ConfigError("ranks on GPUs take their sums by NCCL, and it cannot be used here")

    monkeypatch.setattr(group, "load_nccl", missing)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: pytest.fail("bound"))
    with pytest.raises(ConfigError, match="by NCCL, and it cannot be used here"):
        GpuRanks.of(2, ordered=False, index=0)
