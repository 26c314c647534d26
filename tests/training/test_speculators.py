"""The loss of each kind against that of the speculators library, run for real on the same blocks. Skipped where the
library is not installed: `pip install --no-deps speculators` brings all that is run here."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from importlib.util import find_spec
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from dflash_backend.training.eagle3 import Passes
from dflash_backend.training.loss import head_logits, weighted_mean
from dflash_backend.training.network import DFLASH, DFLASH2, DSPARK, EAGLE3
from tests.training.drafters import Blocks, blocks_of

# What the library imports to read data, none of which is read here.
NOT_RUN = ("datasets", "hs_connectors")
GAMMA, DRAFTS = 4.0, 3
# Of step i of EAGLE-3, as the library weighs it.
STEP_DECAY = 0.8


class Unused(ModuleType):
    """A module whose names can be imported."""

    def __getattr__(self, name: str) -> type:
        if name.startswith("__"):
            raise AttributeError(name)
        return object


@pytest.fixture(scope="module", autouse=True)
def library() -> Iterator[None]:
    if find_spec("speculators") is None:
        pytest.skip("speculators is not installed")
    with pytest.MonkeyPatch.context() as patch:
        for name in NOT_RUN:
            if find_spec(name) is None:
                patch.setitem(sys.modules, name, Unused(name))
        yield


def hidden_of(blocks: Blocks) -> Tensor:
    """The final hidden states of each draft: `[1, blocks, drafts, hidden]`."""
    draft, tables, labels = blocks.draft, blocks.tables, blocks.labels
    if draft.config.drafter == EAGLE3:
        following = F.pad(blocks.tokens[:, 1:], (0, 1))
        passes = Passes(draft, tables, blocks.features, following, blocks.anchors)  # type: ignore[arg-type]
        return torch.stack([passes.run(labels[..., i]) for i in range(DRAFTS)], dim=2)
    if draft.config.drafter == DSPARK:
        return draft.outputs(tables, blocks.features, blocks.anchors, labels[..., 0], DRAFTS - 1)
    return draft.outputs(tables, blocks.features, blocks.anchors, labels[..., 0])[:, :, 1:]


def sure_of(right: Tensor, vocabulary: int) -> Tensor:
    """A target's logits that leave no doubt of the right tokens: float32 `[..., vocabulary]`."""
    return F.one_hot(right, vocabulary).float() * 200


def with_anchor(values: Tensor) -> Tensor:
    """`[1, blocks, drafts, ...]` with a place for the anchor before each block's: `[1, blocks * (drafts + 1), ...]`."""
    return torch.cat((torch.zeros_like(values[:, :, :1]), values), dim=2).flatten(1, 2)


def their_dflash(kind: str, blocks: Blocks, config: dict[str, Any]) -> Tensor:
    from speculators.models.dflash.metrics import compute_metrics
    from speculators.models.dflash2.metrics import compute_metrics as compute_dflash2
    from speculators.models.dflash2.metrics import selector_training_candidates

    hidden, right = hidden_of(blocks), blocks.tables.labels(blocks.labels[..., 1:])
    logits = head_logits(hidden, blocks.tables.head).float()
    given = with_anchor(logits), with_anchor(sure_of(right, logits.shape[-1]))
    mask = with_anchor(torch.ones(right.shape))
    if kind == DFLASH:
        return compute_metrics(*given, mask, block_size=DRAFTS + 1, gamma=GAMMA, loss_config=config)[0]
    k = blocks.draft.config.selector_top_k
    candidates, place, contains = selector_training_candidates(logits.topk(k).indices, right)
    edges = blocks.draft.candidate_selector(hidden, blocks.labels[..., :-1], candidates)  # type: ignore[operator]
    scores = logits.gather(-1, candidates) + edges.float()
    selected = [with_anchor(each) for each in (candidates, scores, place, contains)]
    return compute_dflash2(*given, *selected, mask, DRAFTS + 1, k, loss_config=config, tv_loss_fn=tv_loss, gamma=GAMMA)[
        0
    ]


def tv_loss(logits: Tensor, targets: Tensor) -> Tensor:
    from speculators.losses import eager

    found: Tensor = eager.tv_loss(logits, targets)
    return found


def cross_entropy(share: float = 1.0) -> dict[str, Any]:
    from speculators.losses import eager

    return {"ce": (eager.ce_loss, share)}


def weights_of(gamma: float = GAMMA) -> Tensor:
    return torch.exp(-torch.arange(DRAFTS) / gamma).expand(1, 2, DRAFTS)


def mean_over_count(blocks: Blocks, weights: Tensor) -> Tensor:
    """Our loss, divided by the number of drafts as theirs is: ours is a mean by the weights."""
    ours = weighted_mean(blocks.losses(torch.float32), weights)
    return ours * weights.sum() / weights.numel()


@pytest.mark.parametrize("kind", [DFLASH, DFLASH2])
def test_dflash_and_its_selector_cost_the_same(kind: str) -> None:
    blocks = blocks_of(kind)
    with torch.no_grad():
        theirs = their_dflash(kind, blocks, cross_entropy())
        ours = mean_over_count(blocks, weights_of())
    assert float(ours) == pytest.approx(float(theirs), rel=1e-5)


def test_dspark_costs_the_same_but_for_what_its_confidence_learns() -> None:
    """Theirs learns the overlap of both distributions, which is the chance of a sampled draft; ours whether the
    likeliest token is right, which is that of a greedy one. Where the drafter leaves no doubt both are the same."""
    from speculators.models.dspark.metrics import compute_metrics

    blocks = blocks_of(DSPARK)
    draft: Any = blocks.draft
    with torch.no_grad():
        right, before = (
            blocks.tables.labels(blocks.labels[..., 1:]),
            draft.markov_head.markov_w1(blocks.labels[..., :-1]),
        )
        hidden = hidden_of(blocks)
        logits = head_logits(hidden, blocks.tables.head) + draft.markov_head.markov_w2(before)
        confidence = draft.confidence_head.proj(torch.cat((hidden, before), -1))[..., 0]
        targets = sure_of(right, logits.shape[-1])

        def theirs(sure: Tensor | None, logits: Tensor, share: float) -> float:
            flat = [each.float().flatten(1, 2) for each in (logits, targets)]
            sure = None if sure is None else sure.float().flatten(1)
            mask = torch.ones(1, 2 * DRAFTS)
            config = cross_entropy(share)
            found = compute_metrics(*flat, sure, mask, DRAFTS, config, tv_loss, gamma=GAMMA)
            return float(found[0])

        is_right = (logits.argmax(-1) == right).double()
        own = F.binary_cross_entropy_with_logits(confidence, is_right, reduction="none")
        decided = theirs(confidence, logits * 1e3, 0.0)
        assert decided == pytest.approx(float((own * weights_of()).sum() / own.numel()), rel=1e-5)
        ours = mean_over_count(blocks, weights_of())
        assert float(ours) == pytest.approx(theirs(None, logits, 1.0) + decided, rel=1e-5)


@pytest.mark.parametrize("vocabulary", [None, 20])
def test_each_pass_of_eagle3_costs_the_same(vocabulary: int | None) -> None:
    from speculators.models.eagle3.metrics import compute_metrics

    blocks = blocks_of(EAGLE3, vocabulary)
    with torch.no_grad():
        logits = head_logits(hidden_of(blocks), blocks.tables.head).float()
        right, ours = blocks.tables.labels(blocks.labels[..., 1:]), blocks.losses(torch.float32)
        for step in range(DRAFTS):
            # The library lays passes out along a row, and shifts it by the step.
            target = F.pad(sure_of(right[:, :, step], logits.shape[-1]), (0, 0, step, 0))
            given = F.pad(logits[:, :, step], (0, 0, 0, step))
            found, _ = compute_metrics(given, target, None, None, step, STEP_DECAY, cross_entropy())
            assert float(ours[..., step].mean()) * STEP_DECAY**step == pytest.approx(float(found), rel=1e-5)
