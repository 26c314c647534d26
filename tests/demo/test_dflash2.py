"""The demo's DFlash2 drafter: what it is before training, and what its selector learns."""

from dataclasses import replace

import torch

from demo.train import SMOKE_CONFIG
from dflash_backend.training.dflash2 import DFlash2DraftModel, selector_loss
from dflash_backend.training.network import DFLASH2, DraftModel
from tests.demo.test_training import draft_inputs

CONFIG = replace(SMOKE_CONFIG, drafter=DFLASH2)


def test_before_training_it_is_a_dflash_drafter():
    torch.manual_seed(0)
    plain, model = DraftModel(SMOKE_CONFIG), DFlash2DraftModel(CONFIG)
    model.load_state_dict(plain.state_dict(), strict=False)
    inputs = draft_inputs(40, [10, 25])
    torch.testing.assert_close(model(*inputs), plain(*inputs))


def test_the_selector_learns_the_right_token_even_where_it_is_no_candidate():
    logits = torch.tensor([[5.0, 4.0, 0.0, 0.0], [0.0, 0.0, 5.0, 4.0]])
    labels, best = torch.tensor([1, 3, 2]), logits.topk(2).indices
    edges = lambda _, __, candidates: (candidates == 3).float()  # noqa: E731
    losses = selector_loss(edges, logits.T, torch.eye(2), labels, best)
    # The first draft's candidates are 0 and, in place of 1, the right token 3; the second's are 2 and 3.
    expected = [-torch.tensor([5.0, 1.0]).log_softmax(0)[1], -torch.tensor([5.0, 5.0]).log_softmax(0)[0]]
    torch.testing.assert_close(losses, torch.stack(expected))
