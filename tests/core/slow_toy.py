"""A toy whose steps take a time that the test says."""

from __future__ import annotations

from dflash_backend.core.plan import ModelRunnerOutput, SchedulerOutput
from dflash_backend.core.scheduler_config import SchedulerConfig
from tests.core.toy_engine import Clock, Engine, make_config, make_request
from tests.core.toy_worker import ToyWorker


class SlowToy(ToyWorker):
    """Each step takes `fixed_s`, and `prompt_s` more for each prompt token, `decode_s` for each decode token."""

    clock: Clock
    fixed_s: float
    prompt_s: float
    decode_s = 0.0005

    def __init__(self, config: SchedulerConfig) -> None:
        super().__init__(config)
        self.took: list[float] = []

    def submit(self, plan: SchedulerOutput) -> None:
        super().submit(plan)
        tokens = [(row.num_new + row.num_draft, row.num_draft or row.num_computed) for row in plan.rows]
        num_prompt = sum(count for count, decodes in tokens if not decodes or count > 4)
        num_decode = sum(count for count, decodes in tokens) - num_prompt
        self.took.append(self.fixed_s + self.prompt_s * num_prompt + self.decode_s * num_decode)

    def collect_results(self) -> ModelRunnerOutput:
        self.clock.now += self.took[-1]
        return super().collect_results()


def slow_engine(fixed_s: float = 0.01, prompt_s: float = 0.001, **changes: object) -> tuple[Engine, SlowToy]:
    """An engine that has measured a step."""
    config = make_config(**({"num_blocks": 4000, "max_model_len": 2000, "max_num_batched_tokens": 2000} | changes))
    worker = SlowToy(config)
    engine = Engine(config, worker=worker)
    worker.clock, worker.fixed_s, worker.prompt_s = engine.clock, fixed_s, prompt_s
    engine.run(make_request("first", [1] * 100, max_tokens=1))
    return engine, worker


def flood(engine: Engine, count: int = 20, length: int = 900, **sampling: object) -> None:
    engine.add(*[make_request(f"long{i}", [i, *([7] * length)], max_tokens=2, **sampling) for i in range(count)])
