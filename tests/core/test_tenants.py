"""Tenants share steps, rows, blocks and the queue by weight; alone, one has all of it. On the toy core.

That every invariant and output holds with tenants and priorities is shown by `test_core_machine.py` and
`test_core_random.py`; here each rule has a name.
"""

from __future__ import annotations

import contextlib
from collections import Counter

import pytest

from dflash_backend.core.engine import RequestError
from dflash_backend.core.request import Request
from dflash_backend.core.scheduler import PlanBuilder
from dflash_backend.core.tenants import CACHED_TOKEN_COST, MAX_ABSENT, FairQueue, Tenant
from dflash_backend.messages import TENANTS_IN_QUEUE, GenerationRequest
from tests.core.toy_engine import Engine, make_config, make_request
from tests.core.toy_model import greedy_continuation


def _request(name: str, tenant: str, length: int = 20, **sampling: object) -> GenerationRequest:
    """A prompt that no other one begins like."""
    prompt = [ord(character) % 50 for character in f"{name} "] + [7] * length
    return make_request(name, prompt[:length], tenant=tenant, **sampling)


def _flood(engine: Engine, tenant: str, count: int, **sampling: object) -> None:
    engine.add(*[_request(f"{tenant}{i}", tenant, **({"max_tokens": 1} | sampling)) for i in range(count)])


def _tokens_by_tenant(engine: Engine, first: int = 0) -> Counter[str]:
    """Tokens that were run from the step `first` on, by the tenant that the names begin with."""
    counts: Counter[str] = Counter()
    for plan in engine.worker.plans[first:]:
        for row in plan.rows:
            counts[row.request_id.rstrip("0123456789")] += row.num_new + row.num_draft
    return counts


def _starts(engine: Engine, first: int = 0) -> list[str]:
    return [new.request_id for plan in engine.worker.plans[first:] for new in plan.new_requests]


@pytest.mark.parametrize("lag", [None, 1])
@pytest.mark.parametrize("weights", [{}, {"a": 3.0}, {"a": 1.0, "b": 2.0}])
def test_competing_tenants_get_steps_by_weight(weights: dict[str, float], lag: int | None) -> None:
    config = make_config(max_num_batched_tokens=40, max_queue_size=500, tenant_weights=weights)
    engine = Engine(config, lag)
    _flood(engine, "a", 200)
    _flood(engine, "b", 200)
    engine.steps(60)
    counts = _tokens_by_tenant(engine)
    wanted = weights.get("a", 1.0) / weights.get("b", 1.0)
    assert counts["a"] / counts["b"] == pytest.approx(wanted, rel=0.1)
    assert counts["a"] + counts["b"] >= 58 * (40 if lag is None else 24), "and nothing is left unused"


def test_decode_tokens_count() -> None:
    # Both send the same prompts; the answers of one are ten times as long, so fewer of its requests are served.
    engine = Engine(make_config(max_queue_size=500, num_blocks=400, max_num_seqs=6, num_speculative_tokens=0))
    _flood(engine, "long", 100, max_tokens=20)
    _flood(engine, "short", 300, max_tokens=2)
    engine.steps(150)
    counts = _tokens_by_tenant(engine)
    assert counts["long"] / counts["short"] == pytest.approx(1.0, rel=0.25)
    started = Counter(name.rstrip("0123456789") for name in _starts(engine))
    assert started["short"] > 1.3 * started["long"]


def test_cached_tokens_are_cheap() -> None:
    # A step holds one prompt. The prompts of "hit" are cached but for a token or two, so a number of them equal one.
    engine = Engine(make_config(max_num_batched_tokens=42, max_queue_size=500, num_blocks=400, max_num_seqs=4))
    prefix = list(range(1, 41))
    engine.run(make_request("warm", [*prefix, 1], max_tokens=1, tenant="hit"))
    first = len(engine.worker.plans)
    engine.add(*[make_request(f"hit{i}", [*prefix, i % 50], max_tokens=1, tenant="hit") for i in range(300)])
    _flood(engine, "miss", 100, length=41)
    engine.steps(60)
    started = Counter(request_id.rstrip("0123456789") for request_id in _starts(engine, first))
    assert started["hit"] > 4 * started["miss"]
    tenants = engine.scheduler.queue.tenants
    assert tenants["hit"].service == pytest.approx(tenants["miss"].service, abs=80)
    assert 0 < CACHED_TOKEN_COST < 0.1


def test_a_tenant_alone_has_every_token_and_row_of_a_step() -> None:
    alone, anonymous = (Engine(make_config(max_num_batched_tokens=64, num_blocks=200)) for _ in range(2))
    shapes = []
    for engine, tenant in ((alone, "a"), (anonymous, "")):
        _flood(engine, tenant, 30)
        engine.run()
        shapes.append([[(row.num_new, row.num_draft) for row in plan.rows] for plan in engine.worker.plans])
    assert shapes[0] == shapes[1]
    assert all(plan.num_tokens == 64 for plan in alone.worker.plans[:-1])


def test_one_tenant_is_served_in_order_of_arrival() -> None:
    engine = Engine(make_config(max_num_batched_tokens=48, num_blocks=200))
    _flood(engine, "a", 20)
    _flood(engine, "b", 20)
    engine.run()
    for tenant in "ab":
        assert [name for name in _starts(engine) if name[0] == tenant] == [f"{tenant}{i}" for i in range(20)]


def test_a_short_request_runs_beside_a_flood_of_long_prompts() -> None:
    engine = Engine(make_config(max_num_batched_tokens=64, max_queue_size=500, num_blocks=400))
    _flood(engine, "flood", 300, length=120, max_tokens=4)
    engine.steps(20)
    for index in range(10):
        name = f"short{index}"
        engine.add(_request(name, "other", length=6, max_tokens=2))
        engine.step()
        assert engine.outputs[name].token_ids, "its first token comes with the step after it arrived"
        engine.step()
        assert engine.outputs[name].finish_reason == "length"
        engine.steps(3)


@pytest.mark.parametrize("lag", [None, 1])
@pytest.mark.parametrize("limit", [{"max_num_seqs": 4}, {"max_num_batched_tokens": 4 * 4}])
def test_a_tenant_that_waits_for_a_row_has_one_made_free(limit: dict[str, int], lag: int | None) -> None:
    engine = Engine(make_config(num_blocks=400, **limit), lag)
    _flood(engine, "flood", 6, max_tokens=60, seed=0)
    engine.steps(20)
    assert engine.running == [f"flood{i}" for i in range(4)]
    engine.add(_request("short", "other", max_tokens=2))
    engine.steps(1 if lag is None else 3)
    assert engine.running == ["flood0", "flood1", "flood2", "short"], "the latest of them went"
    engine.run()
    preempted = _request("flood3", "flood", max_tokens=60, seed=0)
    assert engine.outputs["flood3"].stats.num_preemptions == 1
    assert engine.outputs["flood3"].token_ids == greedy_continuation(preempted.prompt_token_ids, 60)


@pytest.mark.parametrize(
    ("weights", "num_rows"),
    [
        ({}, {"a": 4, "b": 4}),
        ({"a": 3.0}, {"a": 6, "b": 2}),
        # Of two rows, one is less than what "a" is due.
        ({"a": 3.0}, {"a": 2, "b": 0}),
    ],
)
def test_rows_come_to_shares_by_weight_and_stay_there(weights: dict[str, float], num_rows: dict[str, int]) -> None:
    engine = Engine(make_config(num_blocks=400, max_num_seqs=sum(num_rows.values()), tenant_weights=weights))
    _flood(engine, "a", 20, max_tokens=80, seed=0)
    engine.steps(4)
    _flood(engine, "b", 20, max_tokens=80, seed=0)
    engine.steps(30)
    running = Counter(name[0] for name in engine.running)
    assert {tenant: running[tenant] for tenant in "ab"} == num_rows
    preempted = engine.core.stats().num_preemptions
    engine.steps(20)
    assert engine.core.stats().num_preemptions == preempted == num_rows["b"], "no row is taken back"


def test_a_tenant_that_waits_for_blocks_has_some_made_free() -> None:
    engine = Engine(make_config(num_blocks=32, max_num_seqs=8, enable_prefix_caching=False))
    _flood(engine, "flood", 12, length=30, max_tokens=60, seed=0)
    engine.steps(3)
    num_running = len(engine.scheduler.running)
    assert engine.pool.num_free < 5
    engine.add(_request("short", "other", length=16, max_tokens=2, seed=3))
    engine.steps(4)
    assert engine.outputs["short"].finish_reason == "length"
    assert engine.core.stats().num_preemptions >= 1
    assert num_running >= 2


@pytest.mark.parametrize("max_num_batched_tokens", [256, 24])
def test_a_tenants_only_request_is_not_preempted_for_another_tenant(max_num_batched_tokens: int) -> None:
    config = make_config(num_blocks=30, enable_prefix_caching=False, max_num_batched_tokens=max_num_batched_tokens)
    engine = Engine(config)
    engine.add(_request("giant", "a", length=90, max_tokens=8, seed=0))
    engine.step()
    engine.add(_request("short", "b", length=30, max_tokens=30, seed=0))
    engine.run_until_finished("giant")
    assert engine.core.stats().num_preemptions == 0


def test_a_tenants_only_row_is_not_taken_for_another_tenant() -> None:
    engine = Engine(make_config(max_num_seqs=2))
    for tenant in "abc":
        engine.add(_request(tenant, tenant, max_tokens=30, seed=0))
        engine.step()
    engine.steps(10)
    assert engine.running == ["a", "b"]
    assert engine.core.stats().num_preemptions == 0


def test_a_growing_request_takes_blocks_of_the_tenant_that_holds_most() -> None:
    # "b" holds little and arrived last; with one tenant it would be the one to go.
    engine = Engine(make_config(num_blocks=26, enable_prefix_caching=False))
    _flood(engine, "a", 3, max_tokens=40, length=16, seed=0)
    engine.step()
    engine.add(_request("b0", "b", length=4, max_tokens=12, seed=0))
    engine.run()
    assert engine.outputs["b0"].stats.num_preemptions == 0
    assert engine.core.stats().num_preemptions > 0
    assert engine.outputs["a0"].stats.num_preemptions == 0, "the first to arrive is never preempted"


def test_the_request_that_arrived_first_is_not_preempted_though_it_is_its_tenants_least_urgent() -> None:
    engine = Engine(make_config(num_blocks=26, enable_prefix_caching=False, max_num_seqs=3))
    engine.add(_request("a0", "a", max_tokens=50, length=16, seed=0, priority=200))
    engine.step()
    engine.add(*[_request(name, "a", max_tokens=50, length=16, seed=0, priority=1) for name in ("a1", "a2")])
    engine.step()
    engine.add(_request("b0", "b", length=16, max_tokens=50, seed=0))
    engine.run()
    assert engine.outputs["a0"].stats.num_preemptions == 0
    assert engine.core.stats().num_preemptions > 0


def test_priority_orders_one_tenants_requests_and_0_is_between() -> None:
    engine = Engine(make_config(max_num_seqs=1))
    for name, priority in (("running", 0), ("late", 101), ("default", 0), ("first", 1), ("equal", 100)):
        engine.add(_request(name, "", max_tokens=2, priority=priority))
        if name == "running":
            engine.step()
    engine.run()
    assert _starts(engine) == ["running", "first", "default", "equal", "late"]


def test_priority_does_not_count_between_tenants() -> None:
    engine = Engine(make_config(max_num_batched_tokens=40, max_queue_size=500))
    _flood(engine, "a", 100, priority=1)
    _flood(engine, "b", 100, priority=500)
    engine.steps(40)
    counts = _tokens_by_tenant(engine)
    assert counts["a"] / counts["b"] == pytest.approx(1.0, rel=0.1)


def test_a_timeout_ends_a_request_with_what_it_has() -> None:
    engine = Engine(make_config())
    engine.add(_request("a", "", max_tokens=100, seed=0, timeout=3_000_000))
    engine.add(_request("b", "", max_tokens=100, seed=0, timeout=60_000_000, deadline_s=3.0))
    for _ in range(5):
        engine.step()
        engine.clock.now += 1.0
    for output in engine.outputs.values():
        assert output.finish_reason == "abort"
        assert len(output.token_ids) == 3


def test_an_absent_tenant_gains_no_claim() -> None:
    engine = Engine(make_config(max_num_batched_tokens=40, max_queue_size=500))
    _flood(engine, "a", 200)
    engine.steps(30)
    first = len(engine.worker.plans)
    _flood(engine, "b", 100)
    engine.steps(30)
    counts = _tokens_by_tenant(engine, first)
    assert counts["a"] / counts["b"] == pytest.approx(1.0, rel=0.2)


def test_a_pause_pays_no_debt() -> None:
    engine = Engine(make_config(max_num_batched_tokens=40, max_queue_size=500, tenant_weights={"b": 0.1}))
    tenants = engine.scheduler.queue.tenants
    _flood(engine, "a", 50)
    engine.add(_request("b", "b", length=100, max_tokens=1))
    had = 0.0
    while "b" in tenants:
        had = tenants["b"].service
        engine.step()
    engine.add(_request("b again", "b"))
    assert tenants["b"].service >= had > 2 * tenants["a"].service


def test_who_comes_starts_from_the_lowest_counter_after_the_last_step_also_when_its_tenant_has_left() -> None:
    engine = Engine(make_config(max_num_seqs=4))
    engine.add(_request("much0", "much", 30, max_tokens=30), _request("little0", "little", 10, max_tokens=30))
    for _ in range(5):
        engine.step()
    queue = engine.scheduler.queue
    counters = [queue.tenants[name].service for name in ("little", "much")]
    assert 10 < counters[0] < counters[1]
    engine.core.abort(["little0"])
    engine.add(_request("new0", "new"))
    assert queue.tenants["new"].service == counters[0]
    engine.core.abort(["new0"])
    engine.step()
    engine.add(_request("newer0", "newer"))
    assert queue.tenants["newer"].service == queue.tenants["much"].service > counters[1]


def test_counters_of_tenants_that_left_are_bounded() -> None:
    engine = Engine(make_config(max_num_seqs=2, num_blocks=400))
    engine.add(_request("stays", "stays", max_tokens=100, seed=0))
    for index in range(2 * MAX_ABSENT):
        engine.add(make_request(f"r{index}", [1], tenant=f"t{index}"))
        engine.core.abort([f"r{index}"])
    queue = engine.scheduler.queue
    assert len(queue._absent) <= MAX_ABSENT
    assert len(queue._turns) <= 100


def test_aborted_requests_leave_the_queue() -> None:
    engine = Engine(make_config(max_num_seqs=1, max_queue_size=500))
    _flood(engine, "a", 400)
    engine.core.abort([f"a{index}" for index in range(1, 399)])
    tenant = engine.scheduler.queue.tenants["a"]
    assert len(tenant.queue) < 40
    engine.run()
    assert _starts(engine) == ["a0", "a399"]


def test_requests_that_free_rows_wait_for_do_not_count_for_the_queue() -> None:
    engine = Engine(make_config(max_num_seqs=32, max_queue_size=2))
    _flood(engine, "", 34)
    with pytest.raises(RequestError, match="34 requests wait already and max_queue_size is 2"):
        engine.add(_request("one more", ""))


def test_a_tenant_that_fills_its_queue_leaves_some_of_the_queue_to_others() -> None:
    engine = Engine(make_config(max_num_seqs=1, max_queue_size=10))
    for index in range(30):
        for tenant in "abcdef":
            with contextlib.suppress(RequestError):
                engine.add(_request(f"{tenant}{index}", tenant))
    with pytest.raises(RequestError, match=r"requests of tenant 'a' wait already \(.* of all tenants\)") as error:
        engine.add(_request("one more", "a"))
    assert error.value.status == "UNAVAILABLE"
    waiting = Counter(request.sampling.tenant for request in engine.scheduler.waiting.values())
    assert max(waiting.values()) <= 10
    assert sum(waiting.values()) < TENANTS_IN_QUEUE * 10, "the queue is not full"
    engine.add(_request("newcomer", "g"))


def test_waiting_tokens_are_bounded() -> None:
    engine = Engine(make_config(max_num_seqs=1, max_queue_tokens=100))
    engine.add(_request("runs", "a", length=90))
    _flood(engine, "a", 1, length=10)
    with pytest.raises(RequestError, match="max_queue_tokens is 100") as error:
        engine.add(_request("c", "a", length=30))
    assert error.value.status == "UNAVAILABLE"
    engine.add(_request("other", "b", length=90))


def test_a_prompt_of_several_steps_leaves_tokens_to_a_tenant_whose_turn_it_is() -> None:
    engine = Engine(make_config(max_num_batched_tokens=24))
    engine.add(_request("long", "a", length=100, max_tokens=1))
    engine.step()
    engine.add(_request("other", "b", length=100, max_tokens=1))
    engine.steps(8)
    counts = _tokens_by_tenant(engine)
    assert counts["other"] > 70
    assert all(plan.num_tokens == 24 for plan in engine.worker.plans[:7])


def test_a_step_has_a_token_left_for_the_prompt_that_arrived_first_though_others_have_the_turn() -> None:
    """It has its token anyway, so the others must not have them all."""
    limits = make_config(max_num_batched_tokens=24, num_blocks=100, max_model_len=200)
    queue, requests = FairQueue({}), []
    for name, service, length in (("first", 9.0, 100), ("second", 1.0, 24)):
        requests.append(Request.from_generation_request(_request(name, name, length), limits, 0, 0.0))
        queue.tenants[name] = Tenant(name, 1.0, len(requests), service)
    builder = PlanBuilder(limits)
    builder.share_out(requests, queue)
    assert set(builder.chunks) == {"first", "second"}
    assert sum(builder.chunks.values()) <= 24


@pytest.mark.parametrize("weights", [{}, {"t1": 10.0}])
def test_no_tenant_starves_among_many(weights: dict[str, float]) -> None:
    engine = Engine(make_config(max_num_seqs=4, max_queue_size=400, num_blocks=40, tenant_weights=weights))
    for index in range(20):
        engine.add(*[_request(f"t{t}.{index}", f"t{t}", length=12, max_tokens=6) for t in range(20)])
    num_steps = engine.run_until_finished(*[f"t{tenant}.0" for tenant in range(20)])
    assert num_steps < 120, "the first request of each comes long before the last of any"
    engine.run()


def test_of_all_tenants_the_fewest_that_wait_are_counted_and_those_that_leave_others() -> None:
    engine = Engine(make_config(max_num_seqs=1, max_queue_size=50))
    queue = engine.scheduler.queue
    assert queue.least_waiting == 0
    _flood(engine, "a", 5)
    assert (queue.least_waiting, queue.num_left) == (5, 0)
    _flood(engine, "b", 2)
    assert queue.least_waiting == 2
    engine.run(_request("c", "c"))
    assert queue.num_left == 2, "the last one leaves nobody"


def test_shorter_requests_are_those_that_leave_their_tenant_with_less() -> None:
    engine = Engine(make_config(tenant_weights={"heavy": 4.0}, max_queue_size=50))
    for tenant, length in [("long", 40), ("short", 5), ("heavy", 8), ("longer", 45), ("had", 5)]:
        engine.add(_request(tenant, tenant, length))
    queue = engine.scheduler.queue
    queue.tenants["had"].charge(36)
    long = queue.tenants["long"]
    assert [tenant.name for tenant in queue.shorter(long, 100)] == ["heavy", "short"], "41 is more than 40"
    assert [tenant.name for tenant in queue.shorter(long, 6)] == ["short"], "the others are too long to end"
    queue.tenants["had"].service = 34.0
    assert [tenant.name for tenant in queue.shorter(long, 100)] == ["heavy", "short", "had"]
