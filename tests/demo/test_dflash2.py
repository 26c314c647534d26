"""The demo's DFlash2 drafter: what it is before training, and what its selector learns."""

from dataclasses import replace

import torch

from demo.dflash2 import DFlash2DraftModel, selector_loss
from demo.model import DFLASH2, DraftModel
from demo.train import SMOKE_CONFIG
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
    hidden, labels = torch.zeros(2, 8), torch.tensor([1, 3, 2])
    losses = selector_loss(lambda _, __, candidates: (candidates == 3).float(), logits, hidden, labels, 2)
    # The first draft's candidates are 0 and, in place of 1, the right token 3; the second's are 2 and 3.
    expected = [-torch.tensor([5.0, 1.0]).log_softmax(0)[1], -torch.tensor([5.0, 5.0]).log_softmax(0)[0]]
    torch.testing.assert_close(losses, torch.stack(expected))
