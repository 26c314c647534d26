"""Acceptance that a function decides, for benchmarks over random weights."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from benchmarks.gpu.forced_ops import force_acceptance
from dflash_backend.worker.batch import ForwardBatch
from dflash_backend.worker.batch_parallel import op_threads
from tests.support.tiny_models import make_pair
from tests.worker.engines import PaddedStepOps, engine, on_device_runner, outputs_of

PROMPT = [1, 2, 3, 4, 5, 6]


@pytest.mark.parametrize("count", [0, 2, 7])
def test_each_row_accepts_as_many_drafts_as_the_function_says(tmp_path: Path, count: int) -> None:
    """All rows of a step, next to others that draft fewer because they are about to end."""

    def acceptance(step: ForwardBatch) -> torch.Tensor:
        return step.batch.num_draft.clamp(max=count)

    built = engine(**make_pair(tmp_path), max_model_len=64, max_num_seqs=4)
    built = on_device_runner(built, ops=force_acceptance(PaddedStepOps(), acceptance))
    sampling = [{"max_tokens": length, "temperature": 0.0} for length in (19, 22, 28)]
    with op_threads(1):
        outputs = outputs_of(built, [[*PROMPT, i] for i in range(3)], sampling)
    assert [len(tokens) for tokens in outputs.tokens.values()] == [19, 22, 28]
    per_position = built.core.stats().spec_decoding.num_accepted_tokens_per_pos
    assert min(per_position[:count], default=1) > 0
    assert not any(per_position[count:])
