"""Step times that are measured before the first request, on padded steps that run operation by operation."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from dflash_backend.engine.build import _with_measured_steps
from dflash_backend.worker.graphs import capture_shapes, measured_padded_steps
from tests.worker.engines import engine, on_device_runner, outputs_of

pytestmark = pytest.mark.usefixtures("single_thread", "inference_mode")


def test_every_padded_step_is_timed_and_nothing_else_changes(settings: dict[str, Any]) -> None:
    shapes = capture_shapes(7)
    prompts, asked = [[1, 2, 3, 4, 5, 6], [9, 8, 7]], [{"max_tokens": 12, "temperature": 0.0}] * 2
    plain = outputs_of(on_device_runner(engine(**settings), shapes=shapes), prompts, asked).tokens
    built = on_device_runner(engine(**settings), shapes=shapes)
    runner = built.runner
    found = measured_padded_steps(runner.model, runner.layouts, runner.graphs.steps(sampled=False))
    inputs = [step.inputs for step in runner.graphs.steps(sampled=False)]
    assert [(each.num_rows, each.num_tokens, each.draft_width) for each in found] == [
        (each.num_rows, each.num_tokens, each.draft_width) for each in inputs
    ]
    assert all(each.target_s > 0 for each in found)
    drafting, others = ([each.draft_s for each in found if bool(each.draft_width) == does] for does in (True, False))
    assert min(drafting) > max(others)
    assert outputs_of(built, prompts, asked).tokens == plain


@pytest.mark.parametrize("device", ["cuda", "cpu"])
def test_the_scheduler_of_a_gpu_gets_the_shapes_and_their_times(settings: dict[str, Any], device: str) -> None:
    shapes = capture_shapes(7)
    built = on_device_runner(engine(**settings), shapes=shapes)
    runner = built.runner
    there: Any = SimpleNamespace(
        model=runner.model, layouts=runner.layouts, graphs=runner.graphs, device=torch.device(device)
    )
    config = _with_measured_steps(built.core.config, there, shapes)
    assert config.draft_shapes == tuple(shapes[1:])
    assert len(config.measured_steps) == (len(runner.graphs.steps(sampled=False)) if device == "cuda" else 0)
    fixed = _with_measured_steps(built.core.config, there, [])
    assert (fixed.draft_shapes, fixed.measured_steps) == ((), ())
