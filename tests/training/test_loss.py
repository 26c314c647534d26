"""What blocks cost, against references of their own in float64: cross-entropy of some rows at a time, the loss of
each kind, its gradients, and the blocks that are drawn."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from dflash_backend.training import loss as losses
from dflash_backend.training.formats import KINDS
from dflash_backend.training.loss import Distillation, TargetStates, draft_loss, draw_blocks, weighted_mean
from dflash_backend.training.network import DFLASH, DFLASH2, DSPARK, EAGLE3
from tests.training.drafters import Blocks, blocks_of

VOCAB, SIZE, COUNT = 53, 6, 11


def products(dtype: torch.dtype) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    shapes = [(COUNT, SIZE), (VOCAB, SIZE), (COUNT, 3), (VOCAB, 3)]
    return [torch.randn(shape, generator=generator, dtype=dtype).requires_grad_() for shape in shapes]


@pytest.mark.parametrize("rows", [1, 3, 10, 11, 100])
def test_cross_entropy_of_some_rows_at_a_time_is_that_of_all(rows: int) -> None:
    x, w, y, v = products(torch.float64)
    right = torch.randint(VOCAB, (COUNT,), generator=torch.Generator().manual_seed(2))
    weights = torch.linspace(0, 1, COUNT, dtype=torch.float64)
    found, likeliest = draft_loss(right, (x, w), (y, v), count=4, rows=rows)
    own = torch.autograd.grad((found * weights).sum(), [x, w, y, v])
    logits = x @ w.T + y @ v.T
    expected = F.cross_entropy(logits, right, reduction="none")
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
    assert torch.equal(likeliest, logits.topk(4).indices)
    for mine, theirs in zip(own, torch.autograd.grad((expected * weights).sum(), [x, w, y, v]), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-10, atol=1e-12)


def states_of(shape: tuple[int, ...], vocab: int, **how: float) -> TargetStates:
    """Random states of a target with a soft cap."""
    generator = torch.Generator().manual_seed(4)
    hidden, head = (torch.randn(n, SIZE, generator=generator, dtype=torch.float64) for n in (math.prod(shape), vocab))
    return TargetStates(hidden.view(*shape, SIZE), head, Distillation(**how), softcap=1.5)


@pytest.mark.parametrize("rows", [3, 11])
@pytest.mark.parametrize("share", [0.3, 1.0])
def test_a_soft_label_costs_its_share_of_the_targets_distribution(rows: int, share: float) -> None:
    x, w, y, v = products(torch.float64)
    right = torch.randint(VOCAB, (COUNT,), generator=torch.Generator().manual_seed(2))
    states = states_of((COUNT,), VOCAB, soft_labels=share, temperature=0.7)
    weights = torch.linspace(0, 1, COUNT, dtype=torch.float64)
    found = draft_loss(right, (x, w), (y, v), target=states, rows=rows)[0]
    own = torch.autograd.grad((found * weights).sum(), [x, w, y, v])
    aims = share * torch.softmax(1.5 * torch.tanh(states.hidden @ states.head.T / 1.5) / 0.7, dim=-1)
    aims[torch.arange(COUNT), right] += 1 - share
    expected = -(aims * F.log_softmax(x @ w.T + y @ v.T, dim=-1)).sum(1)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
    for mine, theirs in zip(own, torch.autograd.grad((expected * weights).sum(), [x, w, y, v]), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-10, atol=1e-12)


def test_the_distance_from_the_targets_state_is_a_share_of_its_square() -> None:
    x, w, y, v = products(torch.float64)
    right = torch.zeros(COUNT, dtype=torch.int64)
    states = states_of((COUNT,), VOCAB, hidden=2.5)
    found = draft_loss(right, (x, w), (y, v), target=states)[0]
    plain = draft_loss(right, (x, w), (y, v))[0]
    aim = states.hidden
    expected = plain + 2.5 * ((x - aim) ** 2).sum(1) / (aim**2).sum(1)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
    mine, theirs = (torch.autograd.grad(each.sum(), [x, w])[0] for each in (found, expected))
    torch.testing.assert_close(mine, theirs, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_learns_from_the_targets_states(kind: str) -> None:
    """Half of a label by the target's distribution costs the mean of none and all; what a kind adds for its own sake,
    and the distance of hidden states, are beside that."""
    blocks = blocks_of(kind)
    head = blocks.tables.head
    hidden = torch.randn(1, 2, 3, head.shape[1], generator=torch.Generator().manual_seed(1), dtype=torch.float64)

    def cost(share: float, weight: float = 0.0) -> Tensor:
        return blocks.losses(target=TargetStates(hidden, head, Distillation(share, 1.0, weight)))

    with torch.no_grad():
        none, half, whole, far = cost(0), cost(0.5), cost(1), cost(0, 2.0)
        assert torch.equal(none, blocks.losses())
    torch.testing.assert_close(half, (none + whole) / 2)
    assert (none - whole).abs().min() > 1e-3
    assert (far - none).min() > 1e-2


def test_no_more_logits_exist_at_a_time_than_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[torch.Size] = []
    whole = losses._logits

    def noted(*arguments: object) -> Tensor:
        found = whole(*arguments)  # type: ignore[arg-type]
        seen.append(found.shape)
        return found

    monkeypatch.setattr(losses, "_logits", noted)
    monkeypatch.setattr(losses, "MAX_LOGITS", {"cpu": 300_000})
    x, w = torch.randn(1000, 4, requires_grad=True), torch.randn(5000, 4)
    draft_loss(torch.zeros(1000, dtype=torch.int64), (x, w))[0].sum().backward()
    assert max(shape.numel() for shape in seen) == 300_000
    assert sum(shape[0] for shape in seen) == 1000  # each row once


def log_softmax(logits: np.ndarray) -> np.ndarray:
    shifted = logits - logits.max(-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))


def reference(blocks: Blocks) -> np.ndarray:
    """The loss of each draft as the papers write it, over all logits at once: `[blocks, drafts]`.

    DFlash: cross-entropy of the true tokens by the mask queries' outputs. DFlash2 adds that of the true token among its
    candidates, with edges; DSpark a bias by the token before, and the binary cross-entropy of its confidence that the
    best token is the true one; EAGLE-3 has a pass for each draft.
    """
    draft, tables, labels = blocks.draft, blocks.tables, blocks.labels[0].numpy()
    config, head = draft.config, tables.head.numpy()
    right = labels[:, 1:] if tables.draft_ids is None else tables.draft_ids.numpy()[labels[:, 1:]]
    with torch.no_grad():
        if config.drafter == EAGLE3:
            from dflash_backend.training.eagle3 import Passes

            following = F.pad(blocks.tokens[:, 1:], (0, 1))
            passes = Passes(draft, tables, blocks.features, following, blocks.anchors)  # type: ignore[arg-type]
            outputs = torch.stack([passes.run(blocks.labels[..., i]) for i in range(3)], dim=2)[0].numpy()
        else:
            queries = 3 if config.drafter == DSPARK else 4
            given = torch.full((1, 2, queries), config.mask_token_id)
            given[..., 0] = blocks.labels[..., 0]
            outputs = draft(blocks.features, tables.embedding[given], blocks.anchors)[0].numpy()
            outputs = outputs if config.drafter == DSPARK else outputs[:, 1:]
    logits = outputs @ head.T
    state = {name: tensor.numpy() for name, tensor in draft.state_dict().items()}
    if config.drafter == DSPARK:
        before = state["markov_head.markov_w1.weight"][labels[:, :-1]]
        logits = logits + before @ state["markov_head.markov_w2.weight"].T
    cost = -np.take_along_axis(log_softmax(logits), right[..., None], -1)[..., 0]
    if config.drafter == DSPARK:
        sure = np.concatenate([outputs, before], -1) @ state["confidence_head.proj.weight"][0]
        chance = 1 / (1 + np.exp(-(sure + state["confidence_head.proj.bias"][0])))
        hit = logits.argmax(-1) == right
        cost -= np.where(hit, np.log(chance), np.log(1 - chance))
    if config.drafter == DFLASH2:
        selector = "candidate_selector."
        for block in range(2):
            for place in range(3):
                candidates = np.argsort(-logits[block, place])[: config.selector_top_k].tolist()
                if right[block, place] not in candidates:
                    candidates[-1] = int(right[block, place])
                latent = state[selector + "hidden_projection.weight"] @ outputs[block, place]
                latent = latent * state[selector + "predecessor_codebook"][labels[block, place]]
                edges = state[selector + "successor_codebook"][candidates] @ latent
                scores = log_softmax(logits[block, place, candidates] + edges)
                cost[block, place] -= scores[candidates.index(int(right[block, place]))]
    return cost


@pytest.mark.parametrize(("kind", "vocabulary"), [*((kind, None) for kind in KINDS), (DFLASH, 20), (EAGLE3, 20)])
def test_the_loss_of_each_kind_is_that_of_its_formula(kind: str, vocabulary: int | None) -> None:
    blocks = blocks_of(kind, vocabulary)
    with torch.no_grad():
        found = blocks.losses()[0]
    np.testing.assert_allclose(found.numpy(), reference(blocks), rtol=1e-5, atol=1e-9)


HEAD = "confidence_head"


@pytest.mark.parametrize(("kind", "own"), [*((kind, "") for kind in KINDS), (DSPARK, HEAD)])
def test_gradients_are_the_slopes_of_the_loss(kind: str, own: str) -> None:
    """In float64 against differences, along a random direction of all parameters; in float32 against float64. DSpark's
    confidence head changes no other parameter: its own, and the others where it says the same of all."""
    blocks = blocks_of(kind)
    weights = torch.tensor([1.0, 0.6, 0.3], dtype=torch.float64).expand(1, 2, 3)
    parameters = dict(blocks.draft.named_parameters())
    moves = {name for name in parameters if (HEAD in name) == bool(own)}
    direction = {name: torch.randn_like(each) * (name in moves) for name, each in parameters.items()}
    if kind == DSPARK and not own:
        with torch.no_grad():
            blocks.draft.confidence_head.proj.weight.zero_()  # type: ignore[union-attr, operator]
    weighted_mean(blocks.losses(), weights).backward()
    slope = sum(float((parameters[name].grad * each).sum()) for name, each in direction.items())  # type: ignore[operator]
    exact = {name: each.grad.clone() for name, each in parameters.items() if each.grad is not None}
    found, step = [], 1e-6
    with torch.no_grad():
        for sign in (1, -2):
            for name, each in parameters.items():
                each.add_(sign * step * direction[name])
            found.append(float(weighted_mean(blocks.losses(), weights)))
        for name, each in parameters.items():
            each.add_(step * direction[name])
    assert slope == pytest.approx((found[0] - found[1]) / (2 * step), rel=2e-5)
    blocks.draft.zero_grad()
    weighted_mean(blocks.losses(torch.float32), weights.float()).backward()
    for name, each in blocks.draft.named_parameters():
        assert each.grad is not None
        torch.testing.assert_close(each.grad.double(), exact[name], rtol=1e-3, atol=2e-5)


def test_later_drafts_weigh_less_and_none_behind_a_token_that_cannot_be_drafted() -> None:
    tokens = torch.arange(12)[None]
    is_answer = torch.ones(1, 12, dtype=torch.bool)
    can_draft = torch.ones(12, dtype=torch.bool)
    can_draft[7] = False
    batch = draw_blocks(tokens, is_answer, 40, 4, torch.Generator().manual_seed(0), 2.0, can_draft)
    falling = [1.0, np.exp(-0.5), np.exp(-1.0)]
    for place, weights in zip(batch.anchors[0].tolist(), batch.weights[0].tolist(), strict=True):
        reached = 12 if place >= 7 else 7
        expected = [fall if place + i < reached else 0.0 for i, fall in enumerate(falling, 1)]
        assert weights == pytest.approx(expected)
    assert {6, 7} <= set(batch.anchors.flatten().tolist())
