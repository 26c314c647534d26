"""What the router of replicas is worth, and what a decision costs: a simulated fleet on the router's own code.

`python -m benchmarks.router` prints a table of the router, of blind round-robin and of the fewest unfinished requests,
and exits 1 when a bound is missed. No model runs. Prompts are one of many shared prefixes, some far more frequent than
others, and an ending of their own; all prefixes together are larger than one replica's cache. A simulated replica
computes uncached prompt tokens in order of arrival, then decodes for a while, and reports its stored and evicted blocks
at the first token. Times of decisions are processor times; what the replicas report is measured apart.
"""

from __future__ import annotations

import argparse
import heapq
import random
import statistics
import sys
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from benchmarks.progress import progress
from dflash_backend.routing.router import Route, Router
from load_tests.markdown import markdown_table

ROUTER, ROUND_ROBIN, FEWEST = "router", "round-robin", "fewest requests"
POLICIES = (ROUTER, ROUND_ROBIN, FEWEST)
MAX_DECISION_S = 50e-6
# Of the router's hit rate over round-robin's, and of the busiest replica's work over the mean.
MIN_GAIN, MAX_IMBALANCE = 2.0, 1.5
BLOCK_SIZE = 16
PREFILL_TOKENS_PER_S = 20_000
DECODE_S = 1.0


@dataclass(frozen=True)
class Fleet:
    """What is simulated. Lengths are in blocks; prefixes have `prefix_blocks` at the least and at the most."""

    num_replicas: int = 64
    num_requests: int = 1_000_000
    num_prefixes: int = 4096
    prefix_blocks: tuple[int, int] = (16, 96)
    ending_blocks: int = 8
    blocks_per_replica: int = 8192
    requests_per_s: float = 1000.0
    # The n-th prefix is asked for 1 / n ** skew as often as the first.
    skew: float = 0.8
    seed: int = 0


@dataclass(frozen=True)
class Outcome:
    """What one policy gave. Seconds; the waits for the first token are simulated, the rest is processor time."""

    hit_rate: float
    imbalance: float
    wait_median_s: float
    wait_p99_s: float
    decision_mean_s: float
    decision_p99_s: float
    reports_mean_s: float


class _Replica:
    """A prefix cache that evicts the block longest unused, and a prompt at a time."""

    def __init__(self, num_blocks: int) -> None:
        self._num_blocks = num_blocks
        self._cached: OrderedDict[bytes, None] = OrderedDict()
        self._free_at = 0.0
        self.busy_s = 0.0

    def run(self, now: float, prompt: Sequence[bytes]) -> tuple[float, int, list[bytes], list[bytes]]:
        """When the first token comes, the blocks hit, and those stored and evicted."""
        cached = self._cached
        hit = next((i for i, block in enumerate(prompt) if block not in cached), len(prompt))
        # From the end: so the last block of a text is evicted first.
        for block in reversed(prompt):
            cached[block] = None
            cached.move_to_end(block)
        evicted = [cached.popitem(last=False)[0] for _ in range(len(cached) - self._num_blocks)]
        took = (len(prompt) - hit) * BLOCK_SIZE / PREFILL_TOKENS_PER_S
        self.busy_s += took
        self._free_at = max(now, self._free_at) + took
        return self._free_at, hit, list(prompt[hit:]), evicted


class _Simulation:
    """One policy serves the fleet's requests."""

    def __init__(self, fleet: Fleet, policy: str) -> None:
        self._fleet = fleet
        self._replicas = [_Replica(fleet.blocks_per_replica) for _ in range(fleet.num_replicas)]
        self._num_unfinished = [0] * fleet.num_replicas
        self._router = Router(fleet.num_replicas, BLOCK_SIZE, fleet.blocks_per_replica)
        for engine in range(fleet.num_replicas):
            self._router.set_up(engine)
        self._policy = policy
        # What is to happen: when, a number that orders equal times, and what.
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._num_events = 0
        self._waits: list[float] = []
        self._decisions_ns: list[int] = []
        self._reports_ns = 0
        self._num_blocks = self._num_hits = 0

    def run(self) -> Outcome:
        """All requests, in order of arrival."""
        fleet, now = self._fleet, 0.0
        random_source = random.Random(fleet.seed)
        prefixes, weights = _prefixes(fleet, random_source)
        said = progress("requests")
        for start in range(0, fleet.num_requests, 1000):
            num = min(1000, fleet.num_requests - start)
            for offset, prefix in enumerate(random_source.choices(prefixes, cum_weights=weights, k=num)):
                now += random_source.expovariate(fleet.requests_per_s)
                self._until(now)
                self._arrive(start + offset, now, prefix)
            said.step(start + num, fleet.num_requests)
        busy = [replica.busy_s for replica in self._replicas]
        return Outcome(
            self._num_hits / self._num_blocks,
            max(busy) / statistics.mean(busy),
            statistics.median(self._waits),
            _percentile(self._waits, 0.99),
            statistics.mean(self._decisions_ns) / 1e9,
            _percentile(self._decisions_ns, 0.99) / 1e9,
            self._reports_ns / 1e9 / fleet.num_requests,
        )

    def _arrive(self, number: int, now: float, prefix: Sequence[bytes]) -> None:
        ending = number * self._fleet.ending_blocks
        prompt = [*prefix, *(_block(b"e", ending + i) for i in range(self._fleet.ending_blocks))]
        route: Route | None = None
        started = time.process_time_ns()
        if self._policy == ROUTER:
            route = self._router.route(prompt, len(prompt) * BLOCK_SIZE)
            engine = route.engine
        elif self._policy == ROUND_ROBIN:
            engine = number % len(self._replicas)
        else:
            engine = self._num_unfinished.index(min(self._num_unfinished))
        self._decisions_ns.append(time.process_time_ns() - started)
        self._num_unfinished[engine] += 1
        first_token_at, hit, stored, evicted = self._replicas[engine].run(now, prompt)
        self._num_blocks += len(prompt)
        self._num_hits += hit
        self._waits.append(first_token_at - now)

        def first_token() -> None:
            if route is not None:
                before = time.process_time_ns()
                self._router.prefilled(route)
                self._router.stored(engine, stored)
                self._router.removed(engine, evicted)
                self._reports_ns += time.process_time_ns() - before

        def finished() -> None:
            self._num_unfinished[engine] -= 1
            if route is not None:
                self._router.finished(route)

        self._at(first_token_at, first_token)
        self._at(first_token_at + DECODE_S, finished)

    def _at(self, when: float, what: Callable[[], None]) -> None:
        self._num_events += 1
        heapq.heappush(self._events, (when, self._num_events, what))

    def _until(self, now: float) -> None:
        while self._events and self._events[0][0] <= now:
            heapq.heappop(self._events)[2]()


def simulate(fleet: Fleet, policy: str) -> Outcome:
    """What `policy`, one of `POLICIES`, gives. Only the times of decisions differ between two calls."""
    return _Simulation(fleet, policy).run()


def _block(kind: bytes, number: int) -> bytes:
    """32 bytes that stand in for a block's SHA-256."""
    return kind + number.to_bytes(31, "little")


def _prefixes(fleet: Fleet, random_source: random.Random) -> tuple[list[list[bytes]], list[float]]:
    """The shared prefixes, and the sums of their weights up to each."""
    prefixes, weights, total = [], [], 0.0
    for number in range(fleet.num_prefixes):
        length = random_source.randint(*fleet.prefix_blocks)
        prefixes.append([_block(b"p", number * fleet.prefix_blocks[1] + i) for i in range(length)])
        total += (number + 1) ** -fleet.skew
        weights.append(total)
    return prefixes, weights


def _percentile(values: Sequence[float], part: float) -> float:
    return sorted(values)[min(int(len(values) * part), len(values) - 1)]


def _table(outcomes: dict[str, Outcome]) -> str:
    header = ["policy", "hit rate", "busiest / mean", "first token, median", "p99", "decision, mean", "p99", "reports"]
    rows = [
        [
            policy,
            f"{one.hit_rate:.1%}",
            f"{one.imbalance:.2f}",
            f"{one.wait_median_s * 1e3:.1f} ms",
            f"{one.wait_p99_s * 1e3:.0f} ms",
            f"{one.decision_mean_s * 1e6:.1f} us",
            f"{one.decision_p99_s * 1e6:.1f} us",
            f"{one.reports_mean_s * 1e6:.1f} us",
        ]
        for policy, one in outcomes.items()
    ]
    return markdown_table(header, rows, "l" + "r" * (len(header) - 1))


def _missed(outcomes: dict[str, Outcome]) -> list[str]:
    routed = outcomes[ROUTER]
    missed = []
    if routed.decision_mean_s > MAX_DECISION_S:
        missed.append(f"a decision takes {routed.decision_mean_s * 1e6:.1f} us, not {MAX_DECISION_S * 1e6:.0f}")
    if routed.imbalance > MAX_IMBALANCE:
        missed.append(f"the busiest replica has {routed.imbalance:.2f} times the mean, not {MAX_IMBALANCE}")
    if ROUND_ROBIN in outcomes and routed.hit_rate < MIN_GAIN * outcomes[ROUND_ROBIN].hit_rate:
        missed.append(f"the hit rate is less than {MIN_GAIN} times round-robin's")
    return missed


def main() -> int:
    """Print the table; 1 when a bound is missed."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--replicas", type=int, default=Fleet.num_replicas)
    parser.add_argument("--requests", type=int, default=Fleet.num_requests)
    parser.add_argument("--policies", nargs="+", choices=POLICIES, default=list(POLICIES))
    arguments = parser.parse_args()
    fleet = replace(Fleet(), num_replicas=arguments.replicas, num_requests=arguments.requests)
    outcomes = {policy: simulate(fleet, policy) for policy in arguments.policies}
    print(_table(outcomes))
    missed = _missed(outcomes) if ROUTER in outcomes else []
    print(*missed, sep="\n", file=sys.stderr)
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
