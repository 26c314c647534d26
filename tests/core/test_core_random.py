"""Random traffic on random config: every invariant after every step, every output the model's own. Half of it with a
step in flight, which runs on the device at a random time between its submission and its collection.

11,500 steps in `make test`, and 480,000 and more in `make nightly`. What fails fails again from its seed;
`test_core_machine.py` shrinks.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import pytest

from dflash_backend.core.engine import RequestError
from dflash_backend.core.moves import DISK, HOST
from dflash_backend.core.plan import SchedulerOutput
from dflash_backend.core.scheduler_config import SchedulerConfig, TierConfig
from dflash_backend.messages import GenerationRequest
from tests.core.checked_engine import CheckedEngine
from tests.core.toy_engine import fewest_window_blocks, make_config, make_request
from tests.core.toy_model import EOS, VOCAB
from tests.core.toy_mover import ToyMover
from tests.support.scale import SCALE, by_night, scaled

NUM_STEPS = scaled(12_000 if SCALE >= 4 else 4_000, at_least=4_000)  # of each of the four parts
NUM_SNAPSHOT_STEPS = scaled(5_000 if SCALE >= 4 else 4_000, at_least=4_000)  # with and without a step in flight
NUM_WINDOW_STEPS = scaled(5_000 if SCALE >= 4 else 2_500)
NUM_TIER_STEPS = scaled(50_000 if SCALE >= 4 else 1_000, at_least=1_000)  # with and without a step in flight
NUM_REQUESTS = 60


def with_windows(config: SchedulerConfig, rng: random.Random) -> SchedulerConfig:
    """The config with blocks of their own for layers with a window: as few as may be, or some more."""
    config = replace(config, sliding_window=rng.choice([1, 2, rng.randint(1, 20), 200]))
    return replace(config, num_window_blocks=fewest_window_blocks(config) + rng.choice([0, rng.randint(0, 8), 60]))


def _random_config(rng: random.Random) -> SchedulerConfig:
    k = rng.choice([0, 1, 3, 5])
    max_model_len = rng.randint(30, 70)
    block_size = rng.choice([1, 2, 4, 8])
    return make_config(
        block_size=block_size,
        max_model_len=max_model_len,
        num_blocks=-(-max_model_len // block_size) + rng.choice([0, rng.randint(0, 30 // block_size), 60]),
        num_speculative_tokens=k,
        adaptive_speculation=rng.random() < 0.5,
        lookahead_base=rng.choice([1, 1, 0, None]),
        autoregressive=rng.random() < 0.3,
        reads_next_tokens=rng.random() < 0.3,
        drafter_max_len=rng.choice([max_model_len, rng.randint(k + 3, max_model_len), 500]),
        max_num_batched_tokens=rng.choice([1 + k, rng.randint(1 + k, 30), 200]),
        max_prefill_tokens_per_step=rng.choice([None, 1, rng.randint(1, 20)]),
        min_prefill_tokens_per_step=rng.choice([1, 8, 64]),
        max_num_seqs=rng.choice([1, 4, 8, 8]),
        max_queue_size=rng.choice([3, 100]),
        enable_prefix_caching=rng.random() < 0.8,
        kv_write_guard=rng.random() < 0.5,
        max_step_s=rng.choice([None, 0.5, 2.0]),
        tenant_weights=rng.choice([{}, {"a": 3.0}, {"": 0.5, "b": 0.1}]),
        num_state_snapshots=rng.choice([None, None, None, None, 1, 3, 12]),
        min_shared_positions=(0, 1, 6)[max_model_len % 3],
    )


@dataclass
class _Traffic:
    """Makes requests: prompts that begin alike, any sampling, some with deadlines, some that fail every step."""

    rng: random.Random
    config: SchedulerConfig
    bad_share: float
    made: dict[str, GenerationRequest] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._tenants = self.rng.choice([[""], [""], ["", "a"], ["", "a", "a", "a", "b"], [*"abcdefghij"]])
        self._priorities = self.rng.choice([[0], [0], [0, 1, 100, 101]])
        self._stems = [[self.rng.randrange(VOCAB) for _ in range(60)] for _ in range(4 if self.config.tiers else 2)]

    def make(self, earlier_outputs: list[list[int]]) -> GenerationRequest:
        rng, longest = self.rng, self.config.max_model_len - 1
        stem = rng.choice(self._stems + earlier_outputs)
        least = len(stem) // 2 if self.config.tiers else 0
        prompt = stem[: rng.randint(least, len(stem))] + [rng.randrange(VOCAB) for _ in range(rng.randint(1, 6))]
        k = self.config.num_speculative_tokens
        max_tokens = rng.randint(1, 30)
        request = make_request(
            f"{'bad' if rng.random() < self.bad_share else 'r'}{len(self.made)}",
            prompt[: rng.randint(1, longest)],
            temperature=rng.choice([0.0, 1.0]),
            seed=rng.choice([None, rng.randrange(1000), rng.randrange(1000)]),
            max_tokens=max_tokens,
            min_tokens=rng.choice([0, rng.randint(0, max_tokens)]),
            eos_token_ids=(EOS,),
            ignore_eos=rng.random() < 0.3,
            stop_token_ids=tuple(rng.sample(range(VOCAB), rng.choice([0, 0, 2]))),
            cache_salt=rng.choice(["", "", "a"]),
            num_speculative_tokens=rng.choice([None, None, rng.randint(0, k)]),
            deadline_s=rng.choice([0.0, 0.0, 0.0, 20.0]),
            tenant=rng.choice(self._tenants),
            priority=rng.choice(self._priorities),
            timeout=rng.choice([0, 0, 0, 0, 30_000_000]),
        )
        self.made[request.request_id] = request
        return request


def _arrive(engine: CheckedEngine, traffic: _Traffic) -> None:
    """One request more, which is refused when the queue is full."""
    seen = [engine.requests[name] for name in list(engine.requests)[-4:]]
    request = traffic.make([r.prompt_token_ids + engine.outputs[r.request_id].token_ids for r in seen])
    if _is_taken(engine, request.sampling.tenant):
        engine.add(request)
        return
    with pytest.raises(RequestError, match="max_queue_size"):
        engine.add(request)


def _is_taken(engine: CheckedEngine, tenant: str) -> bool:
    """Whether the queue takes a request more of this tenant: there is a row for it, or the tenant keeps to its share of
    what is left of the queue."""
    scheduler, config = engine.scheduler, engine.core.config
    num_free = max(0, config.max_num_seqs - len(scheduler.running))
    own = sum(request.sampling.tenant == tenant for request in scheduler.waiting.values())
    left = 4 * config.max_queue_size - max(0, len(scheduler.waiting) - num_free)
    return len(scheduler.waiting) < num_free or max(0, own - num_free) < min(config.max_queue_size, left)


def _failures(rng: random.Random) -> Callable[[SchedulerOutput], bool]:
    """Every step of a bad request fails, and one of several requests that would not fail again."""
    failing, numbers = rng.randrange(30), itertools.count()

    def fails(plan: SchedulerOutput) -> bool:
        fails_once = len(plan.rows) > 1 and next(numbers) == failing
        return fails_once or any(row.request_id.startswith("bad") for row in plan.rows)

    return fails


def with_tiers(config: SchedulerConfig, rng: random.Random) -> SchedulerConfig:
    """The config with tiers, of one kind or two, below a device that has few blocks, and with the prefix cache on."""
    num_groups = 1 + (config.num_window_blocks > 0) + (config.num_state_snapshots is not None)
    names = rng.choice([(HOST,), (HOST, DISK)])
    sizes = [TierConfig(name, tuple(rng.choice([5, 60, 400, 400]) for _ in range(num_groups))) for name in names]
    num_blocks = -(-config.max_model_len // config.block_size) + rng.choice([0, 2, 10])
    return replace(config, tiers=tuple(sizes), enable_prefix_caching=True, num_blocks=num_blocks)


def _mover(rng: random.Random) -> ToyMover:
    """One that is slow or quick, and whose records are sometimes lost."""
    most, lost = rng.choice([2, 10, 100]), rng.choice([0.0, 0.0, 0.1])
    mover = ToyMover(lambda: rng.randrange(most + 1), lambda record: rng.random() < lost)
    mover.at_once = most == 100
    return mover


def _run_traffic(
    seed: int, overlap: bool, num_snapshots: tuple[int, ...] = (), windows: bool = False, tiers: bool = False
) -> CheckedEngine:
    """num_snapshots: slots for copies of recurrent states to choose from, with the prefix cache on; by default the
    config has any or none. windows: whether layers with a window have blocks of their own. tiers: whether there are
    some."""
    rng = random.Random(seed)
    config = _random_config(rng)
    if num_snapshots:
        config = replace(config, num_state_snapshots=rng.choice(num_snapshots), enable_prefix_caching=True)
    config = with_windows(config, rng) if windows else config
    mover = None
    if tiers:
        config, mover = with_tiers(config, rng), _mover(rng)
    engine = CheckedEngine(config, (lambda: rng.randrange(3)) if overlap else None, mover)
    token_s = rng.choice([0.0, 0.0002, 0.01])
    engine.worker.target_s = lambda plan: token_s * (10 + plan.num_tokens)
    engine.worker.draft_s = lambda plan: token_s * sum(row.num_next_draft for row in plan.rows) / 5
    trouble = rng.choice(["memory", "failures", "", "", ""])
    if trouble == "memory":
        engine.worker.max_tokens_in_memory = rng.randint(4, 40)
    elif trouble == "failures":
        engine.worker.fails = _failures(rng)
    traffic = _Traffic(rng, config, 0.1 if trouble == "failures" else 0.0)
    while len(traffic.made) < NUM_REQUESTS:
        for _ in range(rng.choice([0, 0, 0, 1, 1, 4])):
            _arrive(engine, traffic)
        if engine.requests and rng.random() < 0.04:
            end = rng.choice([engine.abort, engine.stop])
            end(rng.choice(list(engine.requests)[-8:]))
        engine.clock.now += 1.0
        engine.step()
    engine.finish()
    if trouble != "memory":
        assert all(rejected.request_id.startswith("bad") for rejected in engine.failed)
    return engine


@pytest.mark.parametrize("part", range(4))
def test_random_traffic_keeps_every_invariant_and_every_output(part: int) -> None:
    num_steps = num_refused = num_failed = num_preemptions = num_hits = num_accepted = num_evicted = 0
    seed = part * 1_000_000
    while num_steps < NUM_STEPS:
        engine = _run_traffic(seed, overlap=part >= 2)
        stats = engine.core.stats()
        assert engine.worker.num_steps == stats.num_steps
        num_steps += stats.num_steps
        num_refused += len(engine.worker.refused)
        num_failed += engine.worker.num_failed
        num_preemptions += stats.num_preemptions
        num_hits += stats.prefix_cache_hits
        num_accepted += stats.spec_decoding.num_accepted_tokens
        num_evicted += engine.pool.num_evicted
        seed += 1
    # The traffic must have met what it is there to test.
    if NUM_STEPS >= 12_000:  # steps that do not fit the memory are rare
        assert min(num_refused, num_failed) > NUM_STEPS // 4000
    assert num_preemptions > NUM_STEPS // 133
    # Few steps are few configurations, half of which draft little.
    assert min(num_hits, num_accepted, num_evicted) > NUM_STEPS // (8 if NUM_STEPS >= 12_000 else 16)


@pytest.mark.parametrize("overlap", [by_night(False), True])
def test_copies_of_states_hold_what_they_are_found_for_in_random_traffic(overlap: bool) -> None:
    """The worker checks each state that a row starts from, and after each step every copy that can be found is looked
    at."""
    num_steps = num_hits = num_copied = 0
    seed = 9_000_000 + overlap
    while num_steps < NUM_SNAPSHOT_STEPS:
        engine = _run_traffic(seed, overlap, num_snapshots=(1, 2, 5, 20))
        num_steps += engine.worker.num_steps
        num_hits += engine.core.stats().prefix_cache_hits
        num_copied += len(engine.worker.snapshots)
        seed += 2
    assert num_hits > num_steps // (30 if NUM_SNAPSHOT_STEPS >= 12_000 else 60)  # half of few engines find none
    assert num_copied >= num_steps // 200 > 0


@pytest.mark.parametrize("overlap", [by_night(False), True])
def test_blocks_of_layers_with_a_window_hold_what_queries_see_in_random_traffic(overlap: bool) -> None:
    """The worker reads every position that a window shows, and after each step every block that can be found is looked
    at."""
    num_steps = num_hits = num_preemptions = num_evicted = num_hidden = 0
    seed = 7_000_000 + overlap
    while num_steps < NUM_WINDOW_STEPS:
        engine = _run_traffic(seed, overlap, windows=True)
        assert engine.window_pool is not None
        num_steps += engine.worker.num_steps
        num_hits += engine.core.stats().prefix_cache_hits
        num_preemptions += engine.core.stats().num_preemptions
        num_evicted += engine.window_pool.num_evicted
        num_hidden += engine.worker.num_hidden_blocks
        seed += 2
    assert num_hits > num_steps // (30 if NUM_SNAPSHOT_STEPS >= 12_000 else 60)  # half of few engines find none
    assert num_preemptions > num_steps // 200
    assert num_evicted > num_steps // 30
    assert num_hidden > num_steps


@pytest.mark.parametrize("overlap", [by_night(False), True])
def test_tiers_give_back_what_they_were_given_in_random_traffic(overlap: bool) -> None:
    """Records move half by half while steps run: what a request reads, and what each tier would give, is what the hash
    says, for blocks of all layers, of windows, and copies of states."""
    num_steps = num_hits = num_seen = num_stored = num_cancelled = 0
    seed = 5_100_000 + overlap
    while num_steps < NUM_TIER_STEPS:
        kind = seed // 2 % 3
        engine = _run_traffic(
            seed, overlap, num_snapshots=(2, 5, 20) if kind == 1 else (), windows=kind == 2, tiers=True
        )
        stats = engine.core.stats()
        num_steps += engine.worker.num_steps
        num_hits += sum(tier.num_hit_tokens for tier in stats.tiers.values())
        num_stored += sum(tier.num_bytes_stored for tier in stats.tiers.values()) // 100
        num_seen += engine.check_tiers()
        assert engine.mover is not None
        num_cancelled += engine.mover.num_cancelled
        seed += 2
    assert num_hits > num_steps // 100
    assert min(num_stored, num_seen) > num_steps // 10
    if num_steps >= 5_000:  # a load that must give way is rare
        assert num_cancelled
