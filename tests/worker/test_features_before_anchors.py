"""The first pass of an autoregressive drafter reads the target's features of the last final token of each row."""

from __future__ import annotations

import pytest
import torch

from dflash_backend.worker.step_ops import CpuStepOps, StepOps
from tests.worker.engines import PaddedStepOps
from tests.worker.random_steps import accepted_step, random_step, random_target

CPU = torch.device("cpu")


@pytest.mark.parametrize("ops", [PaddedStepOps(), CpuStepOps()], ids=["device", "host"])
@pytest.mark.parametrize(("seed", "k", "graph"), [(0, 1, False), (1, 3, False), (2, 7, False), (3, 3, True)])
def test_each_row_that_drafts_gets_those_of_the_position_before_its_anchor(
    ops: StepOps, seed: int, k: int, graph: bool
) -> None:
    """After any acceptance, whatever lies between the rows. Features here are the tokens' positions."""
    step = random_step(seed, k, zombies=False, graph=graph).to(CPU)
    rows, state = step.rows, step.state
    accepted = accepted_step(PaddedStepOps(), step, state, random_target(step, seed))
    found = ops.features_before_anchors(accepted, accepted.positions[:, None].float())
    drafting = [r for r in range(len(rows.req_idx)) if int(rows.num_next_draft[r])]
    assert len(found) == (len(drafting) if ops.on_host else len(rows.req_idx))
    expected = [int(state.computed[int(rows.req_idx[r])]) - 1 for r in drafting]
    assert (found if ops.on_host else found[drafting])[:, 0].tolist() == expected
    assert len(set(expected)) > 1
