"""How long steps take on this device, measured before the first request: what the core's estimate begins with."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from dflash_backend.core.plan import MeasuredStep
from dflash_backend.worker.graphs import PaddedStep, replay
from dflash_backend.worker.layout_buffer import LayoutBuffer
from dflash_backend.worker.step import ModelStep

REPEATS = 3


@torch.inference_mode()
def measured_steps(step: ModelStep, layouts: LayoutBuffer, padded: Sequence[PaddedStep]) -> list[MeasuredStep]:
    """The times of padded steps, the shortest of a few runs each. Their rows are padding, so their contexts are empty:
    what is left of a step's time is mostly reading weights and multiplying."""
    found = []
    for each in padded:
        inputs = each.inputs
        times = []
        for _ in range(REPEATS):
            layouts.send_nothing(inputs.num_rows, inputs.num_tokens)
            times.append(step.unpacked(replay(each).cpu().numpy(), inputs.num_rows).times)
        target_ns = min(marks[-2] - marks[0] for marks in times)
        draft_ns = min(marks[-1] - marks[-2] for marks in times)
        width = inputs.draft_width or 0
        found.append(MeasuredStep(inputs.num_rows, inputs.num_tokens, width, target_ns / 1e9, draft_ns / 1e9))
    return found
