"""The demo's DFlash2 drafter: what it is before training, what it learns, and that serving computes the same."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from demo.checkpoint import is_of_kind, load_draft, load_target, save_draft
from demo.data import MASK, SPECIAL_TOKEN_IDS
from demo.dflash2 import DFlash2DraftModel, selector_loss
from demo.evaluate import ReferencePair
from demo.model import DFLASH2, DraftModel, PairConfig
from demo.train import SMOKE, SMOKE_CONFIG, Run, train_pair
from demo.train_drafter import draft_loss
from dflash_backend import LLM
from dflash_backend.config import asset_path
from tests.demo.test_training import draft_inputs
from tests.oracle.cases import Step
from tests.oracle.ours import drafts

CONFIG = replace(SMOKE_CONFIG, drafter=DFLASH2)


def drafter(config: PairConfig = CONFIG, noise: float = 0.1) -> DFlash2DraftModel:
    """A random drafter whose convolutions are not the identity."""
    torch.manual_seed(3)
    model = DFlash2DraftModel(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "conv" in name or "selector" in name:
                parameter += noise * torch.randn_like(parameter)
    return model


def test_before_training_it_is_a_dflash_drafter():
    torch.manual_seed(0)
    plain, model = DraftModel(SMOKE_CONFIG), DFlash2DraftModel(CONFIG)
    model.load_state_dict(plain.state_dict(), strict=False)
    inputs = draft_inputs(40, [10, 25])
    torch.testing.assert_close(model(*inputs), plain(*inputs))


def test_blocks_of_one_row_do_not_see_each_other():
    features, blocks, anchors = draft_inputs(40, [10, 25])
    draft = drafter()
    both, second = draft(features, blocks, anchors), draft(features, blocks[:, 1:], anchors[:, 1:])
    torch.testing.assert_close(both[:, 1:], second)


def test_the_selector_learns_the_right_token_even_where_it_is_no_candidate():
    logits = torch.tensor([[5.0, 4.0, 0.0, 0.0], [0.0, 0.0, 5.0, 4.0]])
    hidden, labels = torch.zeros(2, 8), torch.tensor([1, 3, 2])
    losses = selector_loss(lambda _, __, candidates: (candidates == 3).float(), logits, hidden, labels, 2)
    # The first draft's candidates are 0 and, in place of 1, the right token 3; the second's are 2 and 3.
    expected = [-torch.tensor([5.0, 1.0]).log_softmax(0)[1], -torch.tensor([5.0, 5.0]).log_softmax(0)[0]]
    torch.testing.assert_close(losses, torch.stack(expected))


def test_every_parameter_has_a_gradient():
    draft, size = drafter(), CONFIG.shape.hidden_size
    features, _, anchors = draft_inputs(40, [10, 25])
    embedding = torch.randn(CONFIG.shape.vocab_size, size)
    labels = torch.randint(CONFIG.shape.vocab_size, (1, 2, CONFIG.block_size))
    weights = torch.ones(1, 2, CONFIG.block_size - 1)
    parameters = dict(draft.named_parameters())
    draft_loss(draft)(parameters, embedding, features, anchors, labels, weights).backward()
    assert [name for name, parameter in parameters.items() if parameter.grad is None] == []


@torch.inference_mode()
def test_serving_drafts_what_the_module_drafts(tmp_path: Path):
    """A random drafter for the demo target, over random features."""
    config = replace(PairConfig(), drafter=DFLASH2)
    save_draft(drafter(config, noise=0.3), tmp_path)
    target_folder = asset_path("demo", "pair", "target")
    target, draft = load_target(target_folder, config), load_draft(tmp_path, config)
    steps = [Step(5, 40, 15), Step(16, 700, 15), Step(30, 9, 15)]
    features = torch.randn(51, len(config.target_layer_ids) * config.shape.hidden_size)
    length = 0
    for step, (logits, tokens) in zip(steps, drafts(target_folder, tmp_path, features, steps), strict=True):
        length += step.num_new
        block = torch.tensor([[[step.anchor] + [SPECIAL_TOKEN_IDS[MASK]] * step.k]])
        blocks = target.model.embed_tokens(block)
        hidden = draft(features[None, :length], blocks, torch.tensor([[length]]))[0, 0, 1:]
        expected = target.logits(hidden)
        torch.testing.assert_close(logits, expected, atol=1e-3, rtol=1e-4)
        assert tokens == draft.choose(expected, hidden, step.anchor)
        assert tokens != expected.argmax(dim=-1).tolist()


@pytest.mark.slow
def test_smoke_training_writes_a_drafter_that_drafts(tmp_path: Path):
    train_pair(Run(tmp_path / "pair", **{**SMOKE, "config": CONFIG}))
    pair = tmp_path / "pair"
    assert ReferencePair(pair).config == CONFIG
    llm = LLM(target=str(pair / "target"), draft=str(pair / "draft"), adaptive_speculation=False)
    output = llm.generate(["What is 2 + 3?\n"], max_tokens=8, temperature=0, ignore_eos=True)[0]
    assert output.stats is not None
    assert output.stats.spec_decoding.num_draft_tokens > 0


@pytest.mark.slow
def test_a_drafter_of_the_other_kind_is_not_resumed(tmp_path: Path):
    train_pair(Run(tmp_path / "first", **SMOKE))
    again = {**SMOKE, "config": CONFIG, "target_steps": 0}
    train_pair(Run(tmp_path / "second", **again, resume=tmp_path / "first"))
    first, second = ((tmp_path / name / "target" / "model.safetensors").read_bytes() for name in ("first", "second"))
    assert first == second
    assert is_of_kind(tmp_path / "second" / "draft", DFLASH2)
