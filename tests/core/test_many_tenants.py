"""Long prompts of many tenants at once: steps stay worth their time, newcomers are let in, and prompts end in turn."""

from __future__ import annotations

import pytest

from dflash_backend.core.request import Request
from dflash_backend.core.scheduler import MAX_PARTIAL_PREFILLS, MIN_CHUNK, PlanBuilder
from dflash_backend.core.tenants import Tenant, request_to_make_way
from dflash_backend.messages import GenerationRequest
from tests.core.slow_toy import slow_engine
from tests.core.toy_engine import Engine, make_config, make_request

# As the demo pair on a CPU: a step takes 2.5 ms, and 0.2 ms for each prompt token.
FIXED_S, PROMPT_S, ROW_S = 0.0025, 0.0002, 0.0004
LENGTH = 900


def engine_of(**changes: object) -> Engine:
    config = {"max_num_seqs": 16, "max_queue_size": 600, "num_blocks": 6000} | changes
    engine, worker = slow_engine(FIXED_S, PROMPT_S, **config)
    worker.decode_s = ROW_S
    return engine


def prompts(count: int, num_tenants: int, length: int = LENGTH) -> list[GenerationRequest]:
    """Prompts of which no two begin alike."""
    return [
        make_request(f"long{i}", [i % 50, i // 50, *([7] * length)], max_tokens=2, tenant=f"t{i % num_tenants}")
        for i in range(count)
    ]


def seconds_of(engine: Engine, *requests: GenerationRequest) -> float:
    started = engine.clock()
    engine.run(*requests)
    return engine.clock() - started


def num_in_the_middle(engine: Engine) -> int:
    return sum(request.in_prefill for request in engine.scheduler.running.values())


@pytest.mark.parametrize(("num_tenants", "most"), [(4, 2.6), (12, 1.4), (40, 1.4)])
def test_prompts_of_many_tenants_take_little_longer_than_those_of_one(num_tenants: int, most: float) -> None:
    num_prompts = max(num_tenants, 12)
    of_one = seconds_of(engine_of(), *prompts(num_prompts, 1))
    assert seconds_of(engine_of(), *prompts(num_prompts, num_tenants)) < most * of_one


@pytest.mark.parametrize("num_tenants", [8, 40, 200])
def test_short_requests_do_not_wait_for_the_long_ones_of_many_others(num_tenants: int) -> None:
    """Those of a tenant that had more than others, most of which had nothing yet, and less than their prompts take."""
    engine = engine_of()
    engine.run(*[make_request(f"first{i}", [1, 2, 3], max_tokens=4, tenant="other") for i in range(3)])
    engine.add(*prompts(num_tenants, num_tenants))
    engine.steps(10)
    for number in range(6):
        started = engine.clock()
        name = f"short{number}"
        engine.add(make_request(name, [1, 2, number], max_tokens=4, tenant="other", num_speculative_tokens=0))
        engine.run_until_finished(name)
        assert engine.clock() - started < 0.4, "as long as a newcomer's"


@pytest.mark.parametrize("num_tenants", [8, 40, 200])
@pytest.mark.parametrize("num_steps", [0, 3, 60])
def test_a_short_request_of_a_newcomer_is_answered_soon(num_tenants: int, num_steps: int) -> None:
    engine = engine_of()
    engine.add(*prompts(2 * num_tenants, num_tenants))
    engine.steps(num_steps)
    started = engine.clock()
    engine.add(make_request("short", [1, 2, 3], max_tokens=4, tenant="newcomer", num_speculative_tokens=0))
    engine.run_until_finished("short")
    assert engine.clock() - started < 0.4, "alone it takes 12 ms, and one long prompt 180 ms"


def test_short_requests_are_answered_soon_again_and_again() -> None:
    engine = engine_of()
    engine.add(*prompts(120, 12))
    times = []
    for i in range(30):
        started = engine.clock()
        engine.add(make_request(f"short{i}", [1, 2, 3], max_tokens=4, tenant="other", num_speculative_tokens=0))
        engine.run_until_finished(f"short{i}")
        times.append(engine.clock() - started)
    assert sorted(times)[15] < 0.2
    assert max(times) < 0.6


def test_few_requests_are_in_the_middle_of_their_prompts() -> None:
    engine = engine_of()
    engine.add(*prompts(30, 30))
    most = 0
    while engine.core.has_unfinished():
        engine.step()
        most = max(most, num_in_the_middle(engine))
    assert most == MAX_PARTIAL_PREFILLS


def test_a_shorter_prompt_goes_ahead_of_those_in_the_middle() -> None:
    engine = engine_of()
    engine.add(*prompts(20, 20))
    engine.steps(5)
    engine.add(make_request("shorter", [1, 2, *([8] * 200)], max_tokens=1, tenant="newcomer"))
    engine.step()
    assert "shorter" in engine.scheduler.running
    assert num_in_the_middle(engine) == MAX_PARTIAL_PREFILLS + 1
    engine.run_until_finished("shorter")
    assert not [name for name, output in engine.outputs.items() if name.startswith("long") and output.finish_reason]


def test_no_row_is_too_short_to_be_worth_it() -> None:
    engine = engine_of()
    engine.add(*prompts(30, 30))
    engine.run()
    for plan in engine.worker.plans:
        new = {request.request_id for request in plan.new_requests}
        chunks = [row for row in plan.rows if row.num_computed + row.num_new < LENGTH and row.request_id not in new]
        # But for that of the tenant whose turn it is, and of the one that arrived first.
        assert sum(row.num_new < MIN_CHUNK for row in chunks) <= 2, plan


def test_prompts_that_skip_steps_have_their_turn() -> None:
    engine = engine_of()
    engine.add(*prompts(8, 8))
    while engine.core.has_unfinished():
        before = {name: r.num_computed for name, r in engine.scheduler.running.items() if r.in_prefill}
        engine.steps(200)
        for name, num_computed in before.items():
            request = engine.scheduler.running.get(name)
            assert request is None or request.num_computed > num_computed, f"{name} had no row"


def test_tenants_get_the_same_while_all_have_long_prompts() -> None:
    engine = engine_of()
    engine.add(*prompts(200, 5))
    engine.steps(500)
    tokens = {f"t{i}": 0 for i in range(5)}
    for plan in engine.worker.plans:
        for row in plan.rows:
            if row.request_id.startswith("long"):
                tokens[f"t{int(row.request_id[4:]) % 5}"] += row.num_new
    assert max(tokens.values()) - min(tokens.values()) < 2 * LENGTH


@pytest.mark.parametrize("num_tenants", [4, 20])
def test_planning_looks_at_no_request_of_tenants_that_give_no_row(
    num_tenants: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where many tenants wait, each plan asks for some of them whether another one has more rows."""
    looked_at: list[str] = []
    latest = Tenant.latest

    def counted(tenant: Tenant, but: Request | None = None) -> Request | None:
        looked_at.append(tenant.name)
        return latest(tenant, but)

    monkeypatch.setattr(Tenant, "latest", counted)
    engine = Engine(make_config(max_num_seqs=8, num_blocks=1000))
    engine.add(*(make_request(f"r{i}", [i, 1, 2], tenant=f"t{i % num_tenants}", max_tokens=60) for i in range(20)))
    for _ in range(10):
        engine.step()
    assert len(engine.scheduler.running) == 8
    newcomer, oldest = Tenant("new", 1.0, 99, 0.0), next(iter(engine.scheduler.running.values()))
    newcomer.running = {str(i): oldest for i in range(9)}
    assert request_to_make_way(newcomer, 0, engine.scheduler.queue.tenants.values(), oldest, 0.0) is None
    assert looked_at == []


def test_a_prompt_that_another_request_was_preempted_for_begins_in_any_case() -> None:
    builder = PlanBuilder(make_config())
    for number in range(MAX_PARTIAL_PREFILLS):
        builder.note_unfinished(f"t{number}", 10)
    assert not builder.may_begin("newcomer", LENGTH, made_way=False)
    assert builder.may_begin("newcomer", LENGTH, made_way=True)
    assert not builder.may_begin("t0", LENGTH, made_way=True), "but one of a tenant at a time"
