"""Random traffic on random limits: every invariant after every step, and every output equal to the one alone."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import pytest
from toy_core import EOS, VOCAB, Engine, greedy_continuation, make_limits, make_request, run_alone

from dflash_backend.core.engine import RequestError
from dflash_backend.core.plan import EngineLimits
from dflash_backend.messages import GenerationRequest

NUM_REQUESTS = 40


def _random_limits(rng: random.Random) -> EngineLimits:
    k = rng.choice([0, 1, 3, 5])
    max_model_len = rng.randint(30, 70)
    block_size = rng.choice([1, 2, 4, 8])
    return make_limits(
        block_size=block_size,
        max_model_len=max_model_len,
        num_blocks=-(-max_model_len // block_size) + rng.randint(0, 30 // block_size),
        num_speculative_tokens=k,
        lookahead_base=1,
        drafter_max_len=rng.choice([max_model_len, rng.randint(k + 3, max_model_len), 500]),
        max_num_batched_tokens=rng.choice([1 + k, rng.randint(1 + k, 30), 200]),
        max_num_seqs=rng.choice([1, 4, 8, 8]),
        max_queue_size=rng.choice([3, 100]),
        enable_prefix_caching=rng.random() < 0.75,
    )


@dataclass
class _Traffic:
    """Makes requests: prompts that begin alike, any sampling, some with deadlines."""

    rng: random.Random
    limits: EngineLimits
    made: dict[str, GenerationRequest] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._stems = [[self.rng.randrange(VOCAB) for _ in range(60)] for _ in range(2)]

    def make(self, earlier_outputs: list[list[int]]) -> GenerationRequest:
        rng, longest = self.rng, self.limits.max_model_len - 1
        stem = rng.choice(self._stems + earlier_outputs)
        prompt = stem[: rng.randint(0, len(stem))] + [rng.randrange(VOCAB) for _ in range(rng.randint(1, 6))]
        k = self.limits.num_speculative_tokens
        max_tokens = rng.randint(1, 30)
        request = make_request(
            f"r{len(self.made)}",
            prompt[: rng.randint(1, longest)],
            temperature=rng.choice([0.0, 1.0]),
            seed=rng.randrange(1000),
            max_tokens=max_tokens,
            min_tokens=rng.choice([0, rng.randint(0, max_tokens)]),
            eos_token_ids=(EOS,),
            ignore_eos=rng.random() < 0.3,
            stop_token_ids=tuple(rng.sample(range(VOCAB), rng.choice([0, 0, 2]))),
            cache_salt=rng.choice(["", "", "a"]),
            num_speculative_tokens=rng.choice([None, None, rng.randint(0, k)]),
            deadline_s=rng.choice([0.0, 0.0, 0.0, 20.0]),
        )
        self.made[request.request_id] = request
        return request


def _check_salts(engine: Engine) -> None:
    """ISOLATE: whoever shares a block has the same salt."""
    salt_of: dict[int, str] = {}
    for request in engine.core.scheduler.running.values():
        for block_id in request.block_ids:
            assert salt_of.setdefault(block_id, request.sampling.cache_salt) == request.sampling.cache_salt


def _check_output(engine: Engine, request: GenerationRequest, aborted: set[str]) -> None:
    output = engine.outputs[request.request_id]
    without_deadline = GenerationRequest("alone", request.prompt_token_ids, request.sampling, request.eos_token_ids)
    alone = run_alone(without_deadline, engine.core.limits)
    if request.sampling.greedy:
        assert alone.token_ids == greedy_continuation(request.prompt_token_ids, len(alone.token_ids))
    if request.request_id in aborted or output.finish_reason == "abort":
        assert output.token_ids == alone.token_ids[: len(output.token_ids)]
    else:
        assert (output.token_ids, output.finish_reason) == (alone.token_ids, alone.finish_reason)


def _run_traffic(seed: int) -> Engine:
    rng = random.Random(seed)
    limits = _random_limits(rng)
    engine, traffic = Engine(limits), _Traffic(rng, limits)
    aborted: set[str] = set()
    accepted: list[GenerationRequest] = []
    while len(traffic.made) < NUM_REQUESTS or engine.core.has_unfinished():
        for _ in range(rng.choice([0, 0, 1, 1, 4])):
            if len(traffic.made) < NUM_REQUESTS:
                seen = [r.prompt_token_ids + engine.outputs[r.request_id].token_ids for r in accepted[-4:]]
                request = traffic.make(seen)
                if len(engine.core.scheduler.waiting) >= limits.max_queue_size:
                    with pytest.raises(RequestError, match="max_queue_size"):
                        engine.add(request)
                else:
                    engine.add(request)
                    accepted.append(request)
        if accepted and rng.random() < 0.03:
            victim = rng.choice(accepted).request_id
            if engine.outputs[victim].finish_reason is None:
                aborted.add(victim)
            engine.core.abort([victim])
            engine.core.check_invariants()
        engine.clock.now += 1.0
        engine.step()
        _check_salts(engine)

    pool = engine.core.scheduler.kv.pool
    assert pool.num_free == pool.num_blocks, "RETURN"
    for request in accepted:
        _check_output(engine, request, aborted)
    return engine


@pytest.mark.parametrize("first_seed", range(0, 160, 40))
def test_random_traffic_keeps_every_invariant_and_every_output(first_seed: int) -> None:
    totals = [_run_traffic(seed).core.stats() for seed in range(first_seed, first_seed + 40)]
    # The traffic must have met what it is there to test.
    assert sum(stats.num_steps for stats in totals) > 5000
    assert sum(stats.num_preemptions for stats in totals) > 100
    assert sum(stats.prefix_cache_hits for stats in totals) > 1000
    assert sum(stats.num_accepted_tokens for stats in totals) > 1000
