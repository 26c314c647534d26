"""An engine over the GPU that is not there, and every rule of it; a program, since a process that has it has no other
device any more. Prints `rules kept` at its end."""

from __future__ import annotations

from collections.abc import Callable
from unittest import mock

import pytest
import torch

from benchmarks.gpu import fake_device

fake_device.install("rules")

from benchmarks.gpu.build import EngineSizes, RandomEngine  # noqa: E402
from benchmarks.gpu.engine import Cell, run_cell, worker_of  # noqa: E402
from benchmarks.gpu.floor import Ceilings  # noqa: E402
from benchmarks.gpu.results import Cycle  # noqa: E402
from benchmarks.gpu.shapes import tiny  # noqa: E402
from benchmarks.gpu.synthetic import SyntheticAcceptance  # noqa: E402
from dflash_backend.core.engine import EngineCore  # noqa: E402
from dflash_backend.worker.batch import ForwardBatch  # noqa: E402
from dflash_backend.worker.graphs import CudaGraphRunner  # noqa: E402
from dflash_backend.worker.step import SpecDecodeModel  # noqa: E402

GPU = torch.device("cuda")
K = tiny().num_speculative_tokens


def refused(match: str, work: Callable[[], object]) -> None:
    """The work breaks a rule."""
    with pytest.raises(fake_device.RuleError, match=match):
        work()


def captured(work: Callable[[], object]) -> None:
    """Capture the work."""
    with torch.cuda.graph(torch.cuda.CUDAGraph()):
        work()


def in_a_step(work: Callable[[], object]) -> None:
    """Do the work as within a step."""
    fake_device.STATE.steps += 1
    try:
        work()
    finally:
        fake_device.STATE.steps -= 1


def check_devices() -> None:
    """Tensors are where they are made, moved and computed, and are not mixed."""
    here, there = torch.arange(6.0), torch.arange(6.0, device=GPU)
    assert (there.device, there.is_cuda, here.device.type) == (torch.device("cuda", 0), True, "cpu")
    for made in (there + 1, there[2:], there.view(2, 3).sum(0), torch.zeros_like(there), here.to(GPU), 2 * there):
        assert made.device.type == "cuda"
    assert (there[1:] == torch.ones(5, device=GPU)).cpu().tolist() == [True] + [False] * 4
    view = there[2:4]
    view += 1
    assert there.cpu().tolist() == [0.0, 1.0, 3.0, 4.0, 4.0, 5.0]
    assert (~(there > 2)).cpu().tolist() == [True, True, False, False, False, False], "not the operand itself"
    assert there.cpu().device.type == "cpu"
    assert (there * torch.tensor(2.0)).device.type == "cuda", "a number of the host may meet a tensor of the device"
    refused("at least two devices", lambda: here + there)
    refused("at least two devices", lambda: torch.cat([here, there]))
    refused("at least two devices", lambda: torch.nn.functional.linear(there[None], here[None]))
    refused("indices should be either on cpu", lambda: here[torch.zeros(1, dtype=torch.int64, device=GPU)])
    refused("can't convert cuda:0", there.numpy)
    refused("cannot pin", there.pin_memory)


def check_waits() -> None:
    """Within a step and a capture the host does not wait, and a capture takes no pinned memory."""
    there, here = torch.ones(3, device=GPU), torch.ones(3)
    pinned = torch.empty(3, pin_memory=True)
    waits: tuple[Callable[[], object], ...] = (
        there.sum().item, there.tolist, lambda: bool(there.any()), there.nonzero, lambda: there[there > 0], there.cpu,
        lambda: there.to("cpu"), lambda: here.copy_(there), lambda: there.copy_(here), lambda: here.to(GPU),
        torch.cuda.synchronize, torch.cuda.current_stream().synchronize, lambda: torch.equal(there, there),
    )  # fmt: skip
    for work in waits:
        work()
        refused("within a step", lambda work=work: in_a_step(work))
        refused("when stream is capturing", lambda work=work: captured(work))
    for work in (lambda: pinned.copy_(there), lambda: there.copy_(pinned), lambda: pinned.to(GPU, non_blocking=True)):
        in_a_step(work)
    for work in (here.pin_memory, lambda: torch.empty(1, pin_memory=True), torch.cuda.Event().synchronize):
        work()
        refused("when stream is capturing", lambda work=work: captured(work))
    refused("when stream is capturing", lambda: captured(lambda: captured(there.sum)))
    refused("without a preceding successful capture", torch.cuda.CUDAGraph().replay)
    assert not torch.cuda.is_current_stream_capturing()


def cycles(core: EngineCore) -> Cycle:
    """A few decode cycles of two rows."""
    return run_cell(core, tiny(), Cell(2, 24), K, 3, torch.bfloat16, Ceilings(1e12, 1e12))


def check_engine() -> None:
    """Decode cycles with graphs; a step that waits is noticed, and so is a capture that does."""
    sizes = EngineSizes((1, 2), 200, 40)
    engine = RandomEngine(tiny(), sizes, GPU, torch.bfloat16)
    acceptance = SyntheticAcceptance.with_mean_length(K, 2.0)
    core = engine.core(K, acceptance)
    assert engine.num_graphs == 2
    with mock.patch.object(CudaGraphRunner, "verify", autospec=True, side_effect=CudaGraphRunner.verify) as replayed:
        cycle = cycles(core)
    assert cycle.num_cycles == 3
    assert replayed.call_count >= 3
    accept = SpecDecodeModel.accept

    def reading(model_step: SpecDecodeModel, step: ForwardBatch) -> None:
        accept(model_step, step)
        step.results.tolist()

    with mock.patch.object(SpecDecodeModel, "accept", reading):
        refused("when stream is capturing", lambda: engine.core(K, acceptance))
    worker = worker_of(core)
    seen = worker._worker.model.state.computed  # type: ignore[attr-defined]
    forward = CudaGraphRunner.verify

    def looking(captured: CudaGraphRunner, *args: object) -> object:
        seen.sum().item()
        return forward(captured, *args)

    with mock.patch.object(CudaGraphRunner, "verify", looking):
        refused("within a step", lambda: cycles(core))


check_devices()
check_waits()
check_engine()
print("rules kept")
