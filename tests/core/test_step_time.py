"""A step with prompts takes no longer than it may, on a device whose time the test says."""

from __future__ import annotations

import pytest
from toy_core import Clock, Engine, ToyWorker, make_config, make_request, run_alone

from dflash_backend.core.plan import StepPlan, StepResult
from dflash_backend.core.step_time import AUTO_STEP_S, LIGHT_TOKENS, ONE_TENANT_FACTOR, StepTime


class SlowToy(ToyWorker):
    """Each step takes `fixed_s`, and so much more for each prompt token and for each decode token."""

    clock: Clock
    fixed_s, prompt_s, decode_s = 0.01, 0.001, 0.0005

    def __init__(self, *args: object) -> None:
        super().__init__(*args)  # type: ignore[arg-type]
        self.took: list[float] = []

    def submit(self, plan: StepPlan) -> None:
        super().submit(plan)
        tokens = [(row.num_new + row.num_draft, row.num_draft or row.num_computed) for row in plan.rows]
        num_prompt = sum(count for count, decodes in tokens if not decodes or count > 4)
        num_decode = sum(count for count, decodes in tokens) - num_prompt
        self.took.append(self.fixed_s + self.prompt_s * num_prompt + self.decode_s * num_decode)

    def collect(self) -> StepResult:
        self.clock.now += self.took[-1]
        return super().collect()


def slow_engine(**changes: object) -> tuple[Engine, SlowToy]:
    config = make_config(**({"num_blocks": 4000, "max_model_len": 2000, "max_num_batched_tokens": 2000} | changes))
    engine = Engine(config)
    worker = SlowToy(config)
    worker.clock, worker.pool = engine.clock, engine.worker.pool
    engine.worker = engine.core._worker = worker
    return engine, worker


def flood(engine: Engine, count: int = 20, length: int = 900, **sampling: object) -> None:
    for index in range(count):
        engine.add(make_request(f"long{index}", [index, *([7] * length)], max_tokens=2, **sampling))


@pytest.mark.parametrize("max_step_s", [None, 0.1])
def test_steps_beside_another_tenant_are_short(max_step_s: float | None) -> None:
    engine, worker = slow_engine(max_step_s=max_step_s)
    worker.fixed_s = 0.001 if max_step_s is None else 0.01
    engine.run(make_request("first", [1] * 100, max_tokens=1))
    flood(engine, tenant="a")
    engine.add(make_request("other", [3], tenant="b", max_tokens=400))
    for _ in range(100):
        engine.step()
    bound = max_step_s or AUTO_STEP_S
    assert max(worker.took[10:]) < 1.5 * bound
    assert sum(worker.took[10:]) / len(worker.took[10:]) > 0.7 * bound, "and no shorter than they need be"


def test_steps_for_one_tenant_are_longer_and_bounded_too() -> None:
    engine, worker = slow_engine()
    worker.fixed_s = 0.001
    engine.run(make_request("first", [1] * 100, max_tokens=1))
    flood(engine)
    for _ in range(60):
        engine.step()
    mean = sum(worker.took[10:]) / len(worker.took[10:])
    assert 0.7 * ONE_TENANT_FACTOR * AUTO_STEP_S < mean < 1.3 * ONE_TENANT_FACTOR * AUTO_STEP_S


def test_a_prompt_with_nobody_to_keep_waiting_takes_the_whole_step() -> None:
    engine, worker = slow_engine()
    engine.run(make_request("first", [1] * 100, max_tokens=1))
    engine.run(make_request("long", [2] * 1500, max_tokens=1))
    assert worker.took[-1] > 1.4


def test_a_slow_device_gets_no_bound_that_leaves_nothing_for_prompts() -> None:
    engine, worker = slow_engine()
    worker.fixed_s, worker.prompt_s = 0.4, 0.04
    engine.run(make_request("first", [1] * 100, max_tokens=1))
    flood(engine, tenant="a")
    engine.add(make_request("other", [3], tenant="b", max_tokens=900, seed=0))
    for _ in range(80):
        engine.step()
    late = worker.took[40:]
    assert max(late) < 1.3, "no seconds"
    assert sum(late) / len(late) > 0.6, "and the prompts have about as much of a step as the rest"


def test_outputs_do_not_depend_on_it() -> None:
    config = make_config()
    for max_step_s in (0.011, 0.05, 10.0):
        engine, _ = slow_engine(max_step_s=max_step_s)
        requests = [
            make_request(f"r{i}", [i, *range(40)], max_tokens=20, temperature=i % 2, seed=i, tenant="ab"[i % 2])
            for i in range(8)
        ]
        outputs = engine.run(*requests)
        for request, output in zip(requests, outputs, strict=True):
            assert output.token_ids == run_alone(request, config).token_ids


def test_nothing_is_bounded_before_anything_was_measured() -> None:
    step_time = StepTime()
    assert step_time.max_prefill_tokens(0, True) is None
    step_time.observe(100, 0, 0.0)
    assert step_time.max_prefill_tokens(0, True) is None, "a clock that stands tells nothing"


def test_a_measurement_that_is_far_off_does_not_decide() -> None:
    step_time = StepTime()
    for _ in range(20):
        step_time.observe(100, 0, 0.1)
    before = step_time.max_prefill_tokens(0, True)
    step_time.observe(100, 0, 60.0)
    after = step_time.max_prefill_tokens(0, True)
    assert before is not None
    assert after is not None
    assert after > 0.7 * before
    assert after >= LIGHT_TOKENS


def test_a_bound_that_nothing_meets_leaves_a_few_tokens() -> None:
    step_time = StepTime(max_step_s=0.001)
    for _ in range(20):
        step_time.observe(LIGHT_TOKENS, 0, 0.5)
        step_time.observe(64, 0, 1.0)
    assert step_time.max_prefill_tokens(0, True) == LIGHT_TOKENS
