"""What a GPU's memory goes to is measured by running the largest steps, with readings that a test can give."""

from __future__ import annotations

import weakref
from collections.abc import Callable

import pytest
import torch

from dflash_backend.config import ConfigError
from dflash_backend.core.plan import SchedulerOutput, StepOutOfMemory
from dflash_backend.worker.memory import GIB, GRAPH_OVERHEAD_BYTES, MemoryUse, expected_use, measure_use
from tests.worker.test_largest_steps import limits

LIMITS = limits(max_model_len=512, max_num_seqs=4, max_num_batched_tokens=1024, k=7, drafter=512)
TOTAL, WEIGHTS, OTHERS = 100 * GIB, 30 * GIB, 2 * GIB
STATE = GIB


class Gpu:
    """Memory that is taken and given back as torch does it: what was given back stays in a cache until `release`."""

    def __init__(self, weights: int = WEIGHTS) -> None:
        self.tensors, self.cache, self._peak = weights, 0, weights

    def take(self, num_bytes: int) -> None:
        self.tensors += num_bytes
        self.cache = max(0, self.cache - num_bytes)
        self._peak = max(self._peak, self.tensors)

    def give(self, num_bytes: int) -> None:
        self.tensors -= num_bytes
        self.cache += num_bytes

    def total(self) -> int:
        return TOTAL

    def in_use(self) -> int:
        return OTHERS + self.tensors + self.cache

    def allocated(self) -> int:
        return self.tensors

    def reset_peak(self) -> None:
        self._peak = self.tensors

    def peak(self) -> int:
        return self._peak

    def release(self) -> None:
        self.cache = 0


class Runner:
    """Holds its state while it lives, and in a step so much for each token and for each token that it samples from."""

    PER_TOKEN, PER_CHOICE = 1 << 20, 8 << 20

    def __init__(self, gpu: Gpu) -> None:
        gpu.take(STATE)
        self._gpu = gpu
        weakref.finalize(self, gpu.give, STATE)

    def run(self, plan: SchedulerOutput) -> None:
        num_bytes = self.bytes_of(plan)
        self._gpu.take(num_bytes)
        self._gpu.give(num_bytes)

    @classmethod
    def bytes_of(cls, plan: SchedulerOutput) -> int:
        choices = sum(row.num_draft + 1 for row in plan.rows)
        return plan.num_tokens * cls.PER_TOKEN + choices * cls.PER_CHOICE


PREFILL_BYTES = 1024 * Runner.PER_TOKEN + 4 * Runner.PER_CHOICE
DECODE_BYTES = 4 * 8 * (Runner.PER_TOKEN + Runner.PER_CHOICE)


def measure(gpu: Gpu, captures: bool = False) -> MemoryUse:
    return measure_use(gpu, lambda: Runner(gpu).run, LIMITS, captures)


def test_weights_and_what_others_hold_are_told_apart() -> None:
    use = measure(Gpu())
    assert (use.total, use.weights, use.others) == (TOTAL, WEIGHTS, OTHERS)


def test_a_step_counts_at_its_peak_with_the_runners_own_state() -> None:
    assert PREFILL_BYTES > DECODE_BYTES
    assert measure(Gpu()).step == STATE + PREFILL_BYTES


def test_the_larger_of_prefill_and_decode_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Runner, "PER_CHOICE", GIB)
    assert measure(Gpu()).step == STATE + 4 * 8 * (Runner.PER_TOKEN + GIB)


def test_nothing_of_the_measurement_stays() -> None:
    gpu = Gpu()
    measure(gpu)
    assert (gpu.tensors, gpu.cache) == (WEIGHTS, 0)


def test_graphs_get_what_the_largest_captured_step_takes_beside_the_runners_state(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    of_prompts = 512 * Runner.PER_TOKEN + 4 * Runner.PER_CHOICE
    assert measure(Gpu(), captures=True).graphs == of_prompts + GRAPH_OVERHEAD_BYTES
    assert measure(Gpu(), captures=False).graphs == 0
    monkeypatch.setattr(Runner, "PER_CHOICE", GIB)
    assert measure(Gpu(), captures=True).graphs == 4 * 8 * (Runner.PER_TOKEN + GIB) + GRAPH_OVERHEAD_BYTES


def test_the_kv_cache_gets_what_is_left_of_the_servers_share() -> None:
    use = MemoryUse(TOTAL, WEIGHTS, OTHERS, step=3 * GIB, graphs=GIB)
    assert use.left(0.9) == (90 - 30 - 2 - 3 - 1) * GIB
    assert use.left(0.35) == -GIB


def test_caches_of_torch_are_not_other_programs() -> None:
    gpu = Gpu(weights=0)
    gpu.take(5 * GIB)
    gpu.give(5 * GIB)
    assert expected_use(gpu, WEIGHTS) == MemoryUse(TOTAL, WEIGHTS, OTHERS)


def test_the_sum_is_said_in_gib() -> None:
    use = MemoryUse(TOTAL, WEIGHTS, OTHERS, step=3 * GIB, graphs=GIB)
    assert use.describe(0.9) == (
        "100.00 GiB in all, 90.00 of it for the server and others (gpu_memory_utilization = 0.9): weights 30.00, CUDA "
        "and other programs 2.00, the largest step 3.00, CUDA graphs 1.00, left for the KV cache 54.00"
    )


@pytest.mark.parametrize(
    "error", [torch.OutOfMemoryError("CUDA out of memory. Tried 9 GiB\nmore"), StepOutOfMemory("no room for 9 GiB")]
)
def test_a_step_that_does_not_fit_names_what_to_lower(error: Exception) -> None:
    def fail(plan: SchedulerOutput) -> None:
        raise error

    make: Callable[[], Callable[[SchedulerOutput], object]] = lambda: fail  # noqa: E731
    with pytest.raises(ConfigError) as raised:
        measure_use(Gpu(), make, LIMITS, captures=True)
    message = str(raised.value)
    assert "max_num_batched_tokens = 1024 tokens and max_num_seqs = 4 requests" in message
    assert "of 100.00 GiB, of which the models' weights take 30.00" in message
    assert message.endswith(f"({str(error).splitlines()[0]})")
