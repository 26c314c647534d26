"""An engine core on a toy worker, and the configs and requests that the core's tests run on it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from checks.core_state import check_core
from dflash_backend.core.engine import EngineCore
from dflash_backend.core.kv.block_pool import BlockPool
from dflash_backend.core.kv.groups import WindowBlocks
from dflash_backend.core.plan import ScheduledRequest
from dflash_backend.core.scheduler_config import SchedulerConfig, blocks_for
from dflash_backend.messages import GenerationRequest, RequestFailed, RequestStats, SamplingParams
from tests.core.toy_mover import ToyMover
from tests.core.toy_worker import OverlappingToy, ToyWorker

PROMPT = [5, 6, 7, 8, 9, 10, 11, 12, 13]


def lookup(pool: BlockPool, block_hash: bytes) -> int | None:
    """The cached block with this hash, as a request finds it."""
    found = pool.find_chain([block_hash], 1)
    return found[0] if found else None


class Clock:
    """Seconds that pass when the test says so."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now

    def advance(self, seconds: float) -> None:
        self.now += seconds


def make_config(**changes: Any) -> SchedulerConfig:
    """Limits that are never reached, but for `changes`."""
    values: dict[str, Any] = {
        "num_blocks": 64,
        "block_size": 4,
        "max_model_len": 128,
        "max_num_seqs": 8,
        "max_num_batched_tokens": 256,
        "max_queue_size": 100,
        "enable_prefix_caching": True,
        "num_speculative_tokens": 3,
        "drafter_max_len": 128,
        "kv_write_guard": True,
    }
    return SchedulerConfig(**(values | changes))


def fewest_window_blocks(config: SchedulerConfig) -> int:
    """How many blocks layers with the window of `config` must have of their own."""
    group = replace(config, num_window_blocks=1).window_group
    assert group is not None
    return min(group.most_blocks, blocks_for(config.max_model_len, config.block_size))


def make_request(request_id: str, prompt: list[int], **sampling: Any) -> GenerationRequest:
    """A greedy request of 16 tokens without a stop token, but for what `sampling` says."""
    deadline_s = sampling.pop("deadline_s", 0.0)
    eos = sampling.pop("eos_token_ids", ())
    params = SamplingParams(**({"temperature": 0.0, "seed": 3} | sampling))
    return GenerationRequest(request_id, prompt, params, eos, deadline_s)


def crowd(count: int = 5, **sampling: Any) -> list[GenerationRequest]:
    """Requests that need more than 20 blocks of four positions together, each with its number as its seed."""
    return [make_request(f"r{i}", [20 + i, *PROMPT], max_tokens=24, **({"seed": i} | sampling)) for i in range(count)]


@dataclass
class Output:
    """All deltas of one request, joined."""

    token_ids: list[int] = field(default_factory=list)
    finish_reason: str | None = None
    stats: RequestStats | None = None
    num_draft_tokens: int = 0


class Engine:
    """An engine core on a toy worker that checks all invariants after every step and joins the deltas.

    With `lag`, which is the overlapping toy's, a step is in flight between two steps. mover: of the config's tiers.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        lag: int | Callable[[], int] | None = None,
        worker: ToyWorker | None = None,
        mover: ToyMover | None = None,
    ) -> None:
        self.clock = Clock()
        self.worker = worker or (ToyWorker(config) if lag is None else OverlappingToy(config, lag))
        self.worker.on_time = self.clock.advance
        self.mover = mover
        if mover is not None:
            mover.worker = self.worker
        self.core = EngineCore(config, self.worker, self.clock, overlap=True, mover=mover)
        self.scheduler = self.core.scheduler
        self.pool = self.worker.pool = self.scheduler.kv.pool
        pools = [group.pool for group in self.scheduler.kv.groups if isinstance(group, WindowBlocks)]
        self.window_pool = self.worker.window_pool = pools[0] if pools else None
        self.outputs: dict[str, Output] = {}
        self.failed: list[RequestFailed] = []

    def add(self, *requests: GenerationRequest) -> None:
        for request in requests:
            self.core.add_request(request)
            self.outputs[request.request_id] = Output()

    def step(self) -> None:
        outputs = self.core.step()
        self.take(outputs.deltas)
        self.failed += outputs.failed
        check_core(self.core)

    def steps(self, count: int) -> None:
        """Take `count` steps."""
        for _ in range(count):
            self.step()

    def take(self, deltas: list[Any]) -> None:
        """Join deltas to the outputs."""
        assert len({delta.request_id for delta in deltas}) == len(deltas), "two deltas for one request in a step"
        for delta in deltas:
            output = self.outputs[delta.request_id]
            assert output.finish_reason is None, "a delta after the last one"
            output.token_ids += delta.token_ids
            output.finish_reason, output.stats = delta.finish_reason, delta.stats
            output.num_draft_tokens += delta.num_draft_tokens
            assert delta.finish_reason is None or delta.stats is not None
            if delta.finish_reason is not None:
                assert output.num_draft_tokens == delta.stats.spec_decoding.num_draft_tokens

    def run(self, *requests: GenerationRequest, max_steps: int = 10_000) -> list[Output]:
        """Add the requests, run until nothing is left, and return their outputs."""
        self.add(*requests)
        for _ in range(max_steps):
            if not self.core.has_unfinished():
                return [self.outputs[request.request_id] for request in requests]
            self.step()
        raise AssertionError(f"not done after {max_steps} steps")

    def run_until_finished(self, *request_ids: str) -> int:
        """Step until these requests have finished, and return the number of steps."""
        num_steps = 0
        while any(self.outputs[request_id].finish_reason is None for request_id in request_ids):
            self.step()
            num_steps += 1
        return num_steps

    @property
    def running(self) -> list[str]:
        """Ids of the running requests, in order of their admission."""
        return list(self.scheduler.running)

    @property
    def last_rows(self) -> list[ScheduledRequest]:
        """The rows of the last step that was submitted."""
        return self.worker.plans[-1].rows

    def rows_of(self, request_id: str) -> list[ScheduledRequest]:
        """The rows that the request had, step by step."""
        return [row for plan in self.worker.plans for row in plan.rows if row.request_id == request_id]
