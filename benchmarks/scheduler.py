"""What the scheduler costs: planning a step and looking a prompt up, with few and with many cached blocks.

`python -m benchmarks.scheduler` prints a table and exits 1 when a bound is missed. No model runs: a worker that accepts
a random number of drafts takes its place, so what is measured is `dflash_backend.core` alone. The pool is full of
cached blocks throughout, so that every block that a request gains has to be evicted first. Times are
processor times, so that other programs which run meanwhile do not count.
"""

from __future__ import annotations

import argparse
import gc
import hashlib
import itertools
import random
import statistics
import sys
import time
from collections.abc import Collection
from dataclasses import dataclass

from benchmarks.progress import progress
from dflash_backend.core.engine import EngineCore
from dflash_backend.core.kv import KVManager
from dflash_backend.core.plan import DraftOutput, ModelRunnerOutput, RequestResult, ScheduledRequest, SchedulerOutput
from dflash_backend.core.request import Request
from dflash_backend.core.scheduler_config import SchedulerConfig
from dflash_backend.messages import GenerationRequest, SamplingParams
from load_tests.markdown import markdown_table

NUM_RUNNING = 256
PROMPT_TOKENS = 10_000
BLOCK_SIZE = 16
K = 15
VOCAB = 150_000
NUM_STRETCHES = 5
POOLS = (10_000, 100_000, 1_000_000)

MAX_PLAN_P99_S = 1e-3
MAX_LOOKUP_S = 5e-3
MAX_GROWTH = 1.3


@dataclass(frozen=True)
class Cost:
    """What one size of the pool costs; processor times in seconds. Plans are of steps with 256 running requests."""

    num_blocks: int
    plan_median_s: float
    plan_p99_s: float
    apply_median_s: float
    lookup_s: float
    fill_s_per_block: float


class _TimedWorker:
    """Accepts 0 to 3 drafts of each row, and notes when it is called and when it returns."""

    overlaps = False

    def __init__(self) -> None:
        self._rng = random.Random(1)
        self._plan: SchedulerOutput | None = None
        self.called_s = 0.0
        self.returned_s = 0.0
        self.num_rows = 0

    def submit(self, plan: SchedulerOutput) -> None:
        """Keep the plan; note the time at which the core handed it over."""
        self.called_s = time.thread_time()
        self._plan = plan

    def reset(self) -> None:
        """Nothing to remove."""

    def collect_results(self) -> ModelRunnerOutput:
        """A random result for each row of the plan."""
        plan = self._plan
        assert plan is not None
        rng, results = self._rng, []
        for row in plan.rows:
            accepted = min(row.num_draft, rng.randrange(4))
            tokens = [rng.randrange(VOCAB) for _ in range(accepted + 1)] if row.sample else []
            results.append(RequestResult(row.request_id, tokens, accepted, num_verified=row.num_draft))
        self.num_rows = len(plan.rows)
        self.returned_s = time.thread_time()
        return ModelRunnerOutput(plan.step_id, results)

    def collect_drafts(self, ended: Collection[str]) -> DraftOutput:
        """No confidences."""
        assert self._plan is not None
        return DraftOutput(self._plan.step_id)


def _config(num_blocks: int) -> SchedulerConfig:
    return SchedulerConfig(
        num_blocks=num_blocks,
        block_size=BLOCK_SIZE,
        max_model_len=16_384,
        max_num_seqs=NUM_RUNNING,
        max_num_batched_tokens=8192,
        max_queue_size=10_000,
        enable_prefix_caching=True,
        num_speculative_tokens=K,
        drafter_max_len=16_384,
    )


def fill(kv: KVManager, prompts: list[list[int]]) -> float:
    """Fill the pool with cached blocks: first those of strangers, then those of `prompts`, the first prompt last.

    Returns seconds per block of the strangers, for everything from allocation to release.
    """
    pool = kv.pool
    num_strangers = pool.num_free - len(prompts) * (PROMPT_TOKENS // BLOCK_SIZE)
    names = [hashlib.sha256(b"stranger %d" % index).digest() for index in range(num_strangers)]
    started = time.thread_time()
    for start in range(0, num_strangers, 128):
        block_ids = pool.allocate(min(128, num_strangers - start))
        for index, block_id in enumerate(block_ids, start):
            pool.publish(block_id, names[index])
        pool.free(block_ids)
    seconds = (time.thread_time() - started) / max(1, num_strangers)
    for prompt in reversed(prompts):
        request = _request("fill", prompt, kv)
        row = ScheduledRequest("fill", 0, len(prompt), 0, True, 0, [], num_positions=len(prompt))
        if not kv.reserve(request, row):
            raise RuntimeError("the pool has no block for a prompt, though room was left for it")
        request.num_computed = len(prompt)
        kv.publish(request)
        kv.release(request)
    return seconds


def _request(request_id: str, prompt: list[int], kv: KVManager) -> Request:
    generation = GenerationRequest(request_id, prompt, SamplingParams(temperature=0.0))
    return Request.from_generation_request(generation, _config(kv.pool.num_blocks), 0, 0.0)


def measure_lookup(num_blocks: int, rounds: int) -> tuple[float, float]:
    """Median seconds, of the quietest stretch, to look up a prompt of 10,000 tokens by a new request when all of its
    blocks are cached, hashing included; and seconds to cache one block."""
    rng = random.Random(0)
    kv = KVManager(_config(num_blocks))
    prompts = [[rng.randrange(VOCAB) for _ in range(PROMPT_TOKENS)] for _ in range(5)]
    fill_s = fill(kv, prompts)
    seconds = []
    for round_ in range(rounds):
        request = _request("lookup", prompts[round_ % len(prompts)], kv)
        started = time.thread_time()
        hit = kv.find_hit(request)
        seconds.append(time.thread_time() - started)
        if len(hit) != (PROMPT_TOKENS - 1) // BLOCK_SIZE:
            raise RuntimeError(f"{len(hit)} blocks of the prompt were found")
    return min(statistics.median(stretch) for stretch in _stretches(seconds)), fill_s


def measure_plan(num_blocks: int, steps: int) -> tuple[list[float], list[float]]:
    """Seconds of each plan with 256 running requests, and of what follows the worker's answer.

    Prompts of 64 tokens and answers of 128: four or so requests end and as many are admitted in every step.
    """
    rng = random.Random(0)
    worker = _TimedWorker()
    # Each look at the clock is 0.1 ms later: with the real one, a step during which other programs run would bound the
    # prompts of the next.
    times = itertools.count()
    core = EngineCore(_config(num_blocks), worker, clock=lambda: next(times) * 1e-4)
    fill(core.scheduler.kv, [])
    plans, applies = [], []
    for step in range(-100, steps):  # the first ones are a warm-up
        while len(core.scheduler.running) + len(core.scheduler.waiting) < NUM_RUNNING:
            prompt = [rng.randrange(VOCAB) for _ in range(64)]
            sampling = SamplingParams(temperature=0.0, max_tokens=128)
            core.add_request(GenerationRequest(f"{rng.random()}", prompt, sampling))
        started = time.thread_time()
        core.step()
        ended = time.thread_time()
        if step >= 0:
            if worker.num_rows != NUM_RUNNING:
                raise RuntimeError(f"a step ran {worker.num_rows} rows in place of {NUM_RUNNING}")
            plans.append(worker.called_s - started)
            applies.append(ended - worker.returned_s)
    return plans, applies


def measure(num_blocks: int, steps: int, lookups: int) -> Cost:
    """All costs with a pool of this size."""
    lookup_s, fill_s = measure_lookup(num_blocks, lookups)
    gc.collect()
    plans, applies = measure_plan(num_blocks, steps)
    gc.collect()
    return Cost(num_blocks, statistics.median(plans), _p99(plans), statistics.median(applies), lookup_s, fill_s)


def _stretches(seconds: list[float]) -> list[list[float]]:
    """The measurements in five stretches: other programs crowd the caches in some, and the quietest one counts."""
    size = len(seconds) // NUM_STRETCHES
    return [seconds[index * size : (index + 1) * size] for index in range(NUM_STRETCHES)]


def _p99(seconds: list[float]) -> float:
    return min(statistics.quantiles(stretch, n=100)[98] for stretch in _stretches(seconds))


def misses(costs: list[Cost]) -> list[str]:
    """What does not keep its bound, in words."""
    small, large = costs[0], costs[-1]
    found = [
        f"plan p99 with {cost.num_blocks:,} blocks is {cost.plan_p99_s * 1e3:.2f} ms; at most 1 ms"
        for cost in costs
        if cost.plan_p99_s > MAX_PLAN_P99_S
    ]
    found += [
        f"lookup with {cost.num_blocks:,} blocks takes {cost.lookup_s * 1e3:.2f} ms; at most 5 ms"
        for cost in costs
        if cost.lookup_s > MAX_LOOKUP_S
    ]
    for what, before, after in (
        ("plan p99", small.plan_p99_s, large.plan_p99_s),
        ("lookup", small.lookup_s, large.lookup_s),
    ):
        if after > MAX_GROWTH * before:
            found.append(
                f"{what} grows {after / before:.2f}x from {small.num_blocks:,} to {large.num_blocks:,} cached blocks; "
                f"at most {MAX_GROWTH}x"
            )
    return found


def table(costs: list[Cost]) -> str:
    """The costs in Markdown."""
    header = ["cached blocks", f"plan, {NUM_RUNNING} rows, median", "p99", "apply, median"]
    header += [f"lookup of {PROMPT_TOKENS:,} tokens", "allocate, publish and free a block"]
    rows = [
        (
            f"{cost.num_blocks:,}",
            *(f"{s * 1e3:.3f} ms" for s in (cost.plan_median_s, cost.plan_p99_s, cost.apply_median_s, cost.lookup_s)),
            f"{cost.fill_s_per_block * 1e6:.2f} us",
        )
        for cost in costs
    ]
    return markdown_table(header, rows, align="rrrrrr")


def main() -> None:
    """Entry point."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=2000, help="steps to measure with each pool (default 2000)")
    parser.add_argument("--lookups", type=int, default=100, help="lookups with each pool (default 100)")
    arguments = parser.parse_args()
    if arguments.steps < 100 * NUM_STRETCHES or arguments.lookups < NUM_STRETCHES:
        parser.error(f"{NUM_STRETCHES} stretches need at least {100 * NUM_STRETCHES} steps and {NUM_STRETCHES} lookups")
    costs, so_far = [], progress("pools")
    for done, num_blocks in enumerate(POOLS):
        so_far.step(done, len(POOLS))
        costs.append(measure(num_blocks, arguments.steps, arguments.lookups))
    print(table(costs))
    found = misses(costs)
    print("\n".join(found) or "every bound holds")
    sys.exit(1 if found else 0)


if __name__ == "__main__":
    main()
