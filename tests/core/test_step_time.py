"""A step with prompts takes no longer than it may, on a device whose time the test says."""

from __future__ import annotations

import pytest

from dflash_backend.core import step_time
from dflash_backend.core.engine import EngineCore
from dflash_backend.core.plan import ModelRunnerOutput, SchedulerOutput
from dflash_backend.core.request import Request
from dflash_backend.core.scheduler_config import SchedulerConfig
from dflash_backend.core.step_time import (
    AUTO_LIGHT_STEPS,
    AUTO_LONG_STEP_S,
    AUTO_STEP_S,
    DITHER,
    EVERY,
    FEW,
    LIGHT_STEPS_PER_TENANT,
    LIGHT_STEPS_PER_WAITING,
    MIN_TOKENS,
    ONE_TENANT_FACTOR,
    PrefillBound,
    StepTime,
)
from dflash_backend.core.tenants import FairQueue
from tests.core.slow_toy import flood, slow_engine
from tests.core.toy_engine import Clock, make_config, make_request
from tests.core.toy_model import NONE_ACCEPTED, expected_output
from tests.core.toy_worker import OverlappingToy


@pytest.mark.parametrize("max_step_s", [None, 0.1])
def test_steps_beside_another_tenant_are_short(max_step_s: float | None) -> None:
    fixed_s, prompt_s = (0.001, 0.0003) if max_step_s is None else (0.01, 0.001)
    engine, worker = slow_engine(fixed_s, prompt_s, max_step_s=max_step_s)
    flood(engine, tenant="a")
    engine.add(make_request("other", [3], tenant="b", max_tokens=400))
    engine.steps(100)
    bound = max_step_s or AUTO_STEP_S
    assert max(worker.took[10:]) < 1.51 * bound
    assert sum(worker.took[10:]) / len(worker.took[10:]) > 0.7 * bound, "and no shorter than they need be"


@pytest.mark.parametrize(("max_step_s", "bound"), [(None, AUTO_LONG_STEP_S), (0.01, 0.01 * ONE_TENANT_FACTOR)])
def test_steps_for_one_tenant_are_longer_and_bounded_too(max_step_s: float | None, bound: float) -> None:
    engine, worker = slow_engine(fixed_s=0.001, max_step_s=max_step_s)
    flood(engine)
    engine.steps(60)
    mean = sum(worker.took[10:]) / len(worker.took[10:])
    assert 0.7 * bound < mean < 1.3 * bound


def test_a_prompt_that_keeps_no_request_waiting_takes_the_whole_step() -> None:
    engine, worker = slow_engine()
    engine.run(make_request("long", [2] * 1500, max_tokens=1))
    assert worker.took[-1] > 1.4


def test_a_slow_device_gets_no_bound_that_leaves_nothing_for_prompts() -> None:
    engine, worker = slow_engine(fixed_s=0.4, prompt_s=0.01)
    flood(engine, tenant="a")
    engine.add(make_request("other", [3], tenant="b", max_tokens=900, seed=0))
    engine.steps(80)
    late = worker.took[40:]
    assert max(late) < 1.0, "no seconds"
    mean = sum(late) / len(late)
    assert 0.5 < mean < 0.7, "the prompts have about half as much of a step as the rest"


def test_outputs_do_not_depend_on_it() -> None:
    for max_step_s in (0.011, 0.05, 10.0):
        engine, _ = slow_engine(max_step_s=max_step_s)
        requests = [
            make_request(f"r{i}", [i, *range(40)], max_tokens=20, temperature=i % 2, seed=i, tenant="ab"[i % 2])
            for i in range(8)
        ]
        outputs = engine.run(*requests)
        assert [out.token_ids for out in outputs] == [expected_output(r, engine.core.config)[0] for r in requests]


def test_nothing_is_bounded_before_anything_was_measured() -> None:
    step_time = StepTime()
    assert step_time.max_prefill_tokens(0, 1) is None
    step_time.observe(100, 0, 0.0)
    assert step_time.max_prefill_tokens(0, 1) is None, "a clock that does not move tells nothing"


def bound_of(step_time: StepTime, *args: int | None) -> float:
    """The mean of those of two steps, of which one may have more and one fewer tokens."""
    bounds = []
    for _ in range(2):
        bounds.append(step_time.max_prefill_tokens(*args))
        step_time.observe(100, 10, 0.03)
    return sum(bounds) / 2


@pytest.fixture
def known() -> StepTime:
    """A step with 10 decode tokens takes 10 ms, and 0.2 ms more for each prompt token."""
    step_time = StepTime()
    for _ in range(40):
        step_time.observe(1, 10, 0.0102)
        step_time.observe(100, 10, 0.03)
    return step_time


@pytest.mark.parametrize("seconds", [60.0, 1e-6])
def test_a_measurement_that_is_far_off_does_not_decide(known: StepTime, seconds: float) -> None:
    before = bound_of(known, 10, None)
    known.observe(100, 10, seconds)
    assert 0.8 * before < bound_of(known, 10, None) < 1.3 * before


@pytest.mark.parametrize(
    ("num_prompting", "least_waiting", "light_steps"),
    [(0, 0, 1.5), (1, 0, 1.5), (2, 0, 1.5), (5, 0, 3.0), (1000, 0, 4.8), (2, 1, 1.5), (2, 2, 2.0), (2, 90, 4.8)],
)
def test_a_step_is_the_longer_the_more_tenants_have_prompts_and_all_wait(
    known: StepTime, num_prompting: int, least_waiting: int, light_steps: float
) -> None:
    assert (AUTO_LIGHT_STEPS, LIGHT_STEPS_PER_TENANT, LIGHT_STEPS_PER_WAITING) == (1.5, 0.5, 0.5)
    assert AUTO_LONG_STEP_S == 0.048, "and no longer than this, where that is more than 1.5 times"
    assert bound_of(known, 10, num_prompting, least_waiting) == pytest.approx((light_steps - 1) * 50, rel=0.1)


def test_where_steps_are_long_anyway_they_are_half_as_long_again_for_any_number_of_tenants() -> None:
    step_time = StepTime()
    for _ in range(40):
        step_time.observe(1, 10, 0.0402)
        step_time.observe(100, 10, 0.06)
    assert 80 < step_time.max_prefill_tokens(10, 50) < 130


def test_a_time_that_was_set_holds_for_any_number_of_tenants(known: StepTime) -> None:
    known.max_step_s = 0.03
    assert bound_of(known, 10, 1) == pytest.approx(100, rel=0.1)
    assert bound_of(known, 10, 50) == pytest.approx(100, rel=0.1)


def test_tokens_vary_about_those_that_take_the_time(known: StepTime) -> None:
    """Else it would not show what they take."""
    tokens = []
    for _ in range(8):
        tokens.append(known.max_prefill_tokens(10, 1000))
        known.observe(tokens[-1], 10, 0.01 + 0.0002 * tokens[-1])
    assert max(tokens) == pytest.approx(190 * (1 + DITHER), rel=0.1)
    assert min(tokens) == pytest.approx(190 * (1 - DITHER), rel=0.1)


def test_of_steps_without_prompts_few_are_taken_in_also_with_prompts_between_them() -> None:
    time, taken = StepTime(), []
    time.observe(100, 1, 1.0)
    assert time._fit is not None
    for number in range(200):
        before = list(time._fit.coefficients)
        if number % 5 == 0:
            time.observe(50, 1, 0.6)
            assert before != time._fit.coefficients, "each with prompts is"
            before = list(time._fit.coefficients)
        time.observe(0, 4 + number % 8, 0.1 + 0.01 * (number % 7))
        taken.append(before != time._fit.coefficients)
    assert all(taken[:FEW])
    assert sum(taken[FEW:]) <= 200 // EVERY
    before = list(time._fit.coefficients)
    time.observe(0, 64, 1.0)
    assert before != time._fit.coefficients, "the first with many more tokens"


def test_positions_count_with_what_a_step_takes_without_prompts() -> None:
    step_time = StepTime()
    bounds: dict[int, list[int]] = {0: [], 10: []}
    for step in range(80):
        kilo, num_tokens = step % 7, 20 + step % 3 * 40
        for other, found in bounds.items():
            found.append(step_time.max_prefill_tokens(0, 2, 0, 1000 * other) or 0)
        step_time.observe(num_tokens, 0, 0.01 + 0.0002 * num_tokens + 0.002 * kilo, 1000 * kilo)
    few, many = (sum(found[-8:]) / 8 for found in bounds.values())
    assert (few, many) == (pytest.approx(25, rel=0.1), pytest.approx(75, rel=0.1))


def test_a_bound_that_nothing_meets_leaves_a_few_tokens() -> None:
    step_time = StepTime(max_step_s=0.001)
    for _ in range(20):
        step_time.observe(MIN_TOKENS, 0, 0.5)
        step_time.observe(64, 0, 1.0)
    assert MIN_TOKENS <= step_time.max_prefill_tokens(0, 1) <= (1 + DITHER) * MIN_TOKENS


@pytest.mark.parametrize(("max_tokens", "least"), [(3, 4.5), (6, 5.0), (12, 6.0)])
def test_short_answers_keep_the_rows_full_where_a_step_costs_the_same_with_more_tokens(
    max_tokens: int, least: float
) -> None:
    """Answers of a few steps, each replaced by the next prompt as it ends: 8 clients."""
    prefill = {"max_prefill_tokens_per_step": None, "min_prefill_tokens_per_step": 16, "enable_prefix_caching": False}
    engine, _ = slow_engine(0.02, 0.0001, max_num_seqs=8, **prefill)
    sampling = {"max_tokens": max_tokens, "num_speculative_tokens": 0}
    asked, num_rows = 0, []
    while len(num_rows) < 300:
        running = sum(output.finish_reason is None for output in engine.outputs.values())
        for _ in range(8 - running):
            asked += 1
            engine.add(make_request(f"r{asked}", [asked % 7, *([5] * 60)], **sampling))
        engine.step()
        num_rows.append(sum(row.num_new == 1 for row in engine.last_rows))
    assert sum(num_rows[50:]) / 250 > least


@pytest.mark.parametrize(("tenants", "decode_s", "least"), [("a", 0.001, 60), ("ab", 0.0006, 48)])
def test_rows_stay_full_where_every_step_has_prompts(tenants: str, decode_s: float, least: int) -> None:
    """64 clients of short answers behind one request, whose steps were all that had no prompts: what the others' decode
    rows take must not count as their prompts'."""
    shape = {"max_num_seqs": 64, "max_num_batched_tokens": 4000, "max_queue_size": 200}
    engine, worker = slow_engine(0.002, 0.0001, **shape, min_prefill_tokens_per_step=256, enable_prefix_caching=False)
    worker.decode_s = decode_s
    engine.run(make_request("alone", [1, 2], max_tokens=40, num_speculative_tokens=0))
    asked, num_rows = 0, []
    while len(num_rows) < 300:
        running = sum(output.finish_reason is None for output in engine.outputs.values())
        for _ in range(64 - running):
            asked += 1
            prompt, sampling = [asked % 7, *([5] * 24)], {"max_tokens": 5 + asked * 5 % 7, "num_speculative_tokens": 0}
            engine.add(make_request(f"r{asked}", prompt, tenant=tenants[asked % len(tenants)], **sampling))
        engine.step()
        num_rows.append(len(engine.last_rows))
    assert sum(num_rows[50:]) / 250 > least


def test_steps_stay_short_for_a_tenant_that_may_ask_again() -> None:
    """Two tenants have many requests that wait: their steps may be long, but not within 5 seconds of another's."""
    engine, worker = slow_engine(0.004, 0.0001, max_num_seqs=4, max_queue_size=900, num_blocks=9000)
    prompts = [[i % 50, i // 50, *([7] * 600)] for i in range(500)]
    engine.add(*[make_request(f"r{i}", p, max_tokens=2, tenant="ab"[i % 2]) for i, p in enumerate(prompts)])
    engine.steps(40)
    assert max(worker.took[-20:]) > 0.04, "nobody else is there"
    engine.add(make_request("other", [1, 2], max_tokens=2, tenant="c"))
    engine.run_until_finished("other")
    left, num_before = engine.clock(), len(worker.took)
    while engine.clock() - left < 4.9:
        engine.step()
    assert max(worker.took[num_before + 8 :]) < 0.02
    while engine.clock() - left < 5.4:
        engine.step()
    assert max(worker.took[-5:]) > 0.04


def test_what_a_step_may_have_and_took_is_told_with_the_positions_of_its_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []
    told: list[int] = []

    class Recording(StepTime):
        def observe(self, prefill: int, decode: int, seconds: float, num_positions: int = 0) -> None:
            told.append(num_positions)

        def max_prefill_tokens(
            self, decode: int, prompting: int | None, waiting: int = 0, num_positions: int = 0
        ) -> int | None:
            asked.append(num_positions)
            return None

    monkeypatch.setattr(step_time, "StepTime", Recording)
    engine, _ = slow_engine()
    told.clear()
    requests = [make_request(f"r{i}", [i, *([5] * 60)], max_tokens=30, num_speculative_tokens=0) for i in range(3)]
    engine.add(*requests)
    engine.steps(20)
    engine.core.collect_drafts()
    assert asked[:20] == told[1:21]
    assert told[-1] > 3 * 61


class Device(OverlappingToy):
    """Runs a step in a second, when the host waits for it."""

    def __init__(self, config: SchedulerConfig, clock: Clock, overlaps: bool) -> None:
        super().__init__(config, 1 if overlaps else 0)
        self.clock, self.overlaps = clock, overlaps

    def collect_results(self) -> ModelRunnerOutput:
        self.clock.advance(1.0)
        return super().collect_results()


@pytest.mark.parametrize("overlap", [False, True])
def test_the_times_of_steps_add_up_to_the_time_that_passed(overlap: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a step behind another in flight, the wait for that one is not its own."""
    clock, config, seen = Clock(), make_config(), list[float]()
    core = EngineCore(config, Device(config, clock, overlap), clock, overlap=overlap)
    observe = core.scheduler.observe

    def observed(plan: SchedulerOutput, result: ModelRunnerOutput, seconds: float, draft_seconds: float) -> None:
        seen.append(seconds)
        observe(plan, result, seconds, draft_seconds)

    monkeypatch.setattr(core.scheduler, "observe", observed)
    core.add_request(make_request("a", [1, 2, 3], max_tokens=12, seed=NONE_ACCEPTED))
    while core.has_unfinished():
        core.step()
    core.collect_drafts()
    assert len(seen) == 12
    assert seen == [1.0] * 12
    assert (sum(seen), core.stats().step_seconds) == (clock.now, clock.now)


@pytest.mark.parametrize(
    ("times", "num_decoding", "has_others", "takes_all"),
    [
        (1.5, 0, False, True),
        (0.5, 0, False, True),
        (3.0, 0, False, False),
        (1.5, 4, False, False),
        (1.5, 0, True, False),
    ],
)
def test_a_step_takes_the_last_prompts_at_once_where_no_stream_and_no_tenant_waits(
    times: float, num_decoding: int, has_others: bool, takes_all: bool
) -> None:
    """The last of many short prompts, computed beside the first answers, would make their tokens late."""
    bound, queue = PrefillBound(), FairQueue({}, 1)
    for _ in range(40):
        bound.step_time.observe(100, 0, 0.03)
        bound.step_time.observe(200, num_decoding, 0.05)
    if has_others:
        for i, name in enumerate("ab"):
            queue.add(Request.from_generation_request(make_request(name, [1, 2], tenant=name), make_config(), i, 0.0))

    def most_of(num_prompt_tokens: int) -> int:
        found = bound.max_prefill_tokens(queue, [], 0.0, num_prompt_tokens, num_decoding, 0)
        assert found is not None
        return found

    usual = most_of(1 << 20)
    waiting = round(times * usual)
    assert (most_of(waiting) >= waiting) == takes_all
    assert most_of(waiting) in (usual, waiting)
