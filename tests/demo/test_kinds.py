"""The kinds of drafter that the demo can train: what each learns from, and that serving computes the same."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from demo.checkpoint import (
    load_draft,
    load_extended_target,
    load_target,
    make_target,
    read_draft_config,
    save_draft,
    save_target,
)
from demo.evaluate import ReferencePair
from demo.model import PairConfig
from demo.propose import propose
from demo.train import SMOKE, SMOKE_CONFIG, Run, train_pair
from demo.train_drafter import DraftLoss
from dflash_backend import LLM
from dflash_backend.checkpoints import read_target
from dflash_backend.config import asset_path
from dflash_backend.drafters.registry import read_draft
from dflash_backend.models import load_target as serving_target
from dflash_backend.training.formats import KINDS, make_drafter
from dflash_backend.training.loss import DraftBatch
from dflash_backend.training.network import DFLASH, DFLASH2, DSPARK, EAGLE3, DraftModel, Tables
from tests.oracle import cases
from tests.oracle.cases import Step
from tests.oracle.ours import drafts
from tests.support.paged import block_tables, caches, context, noisy_pool

ANCHORS = [10, 25]
LENGTH = 40


def random_drafter(config: PairConfig, noise: float = 0.3) -> DraftModel:
    """A drafter whose heads and convolutions do something."""
    torch.manual_seed(3)
    model = make_drafter(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if any(part in name for part in ("conv", "selector", "markov", "confidence", "_norm")):
                parameter += noise * torch.randn_like(parameter)
    return model


def smoke(kind: str) -> PairConfig:
    return replace(SMOKE_CONFIG, drafter=kind)


def inputs(config: PairConfig) -> tuple[Tensor, Tensor, DraftBatch]:
    """Embedding, features and two blocks of a row."""
    generator = torch.Generator().manual_seed(0)
    size, vocab = config.shape.hidden_size, config.shape.vocab_size
    embedding = torch.randn(vocab, size, generator=generator)
    features = torch.randn(1, LENGTH, len(config.target_layer_ids) * size, generator=generator)
    tokens = torch.randint(vocab, (1, LENGTH + config.block_size), generator=generator)
    anchors = torch.tensor([ANCHORS])
    labels = tokens[0][anchors[..., None] + torch.arange(config.num_drafts + 1)]
    weights = torch.ones(1, len(ANCHORS), config.num_drafts)
    return embedding, features, DraftBatch(tokens[:, :LENGTH], anchors, labels, weights)


@pytest.mark.parametrize("kind", KINDS)
def test_every_parameter_has_a_gradient(kind: str) -> None:
    draft = random_drafter(smoke(kind))
    embedding, features, batch = inputs(draft.config)
    DraftLoss(draft)(embedding, features, batch).backward()
    assert [name for name, parameter in draft.named_parameters() if parameter.grad is None] == []


@pytest.mark.parametrize("kind", KINDS)
def test_a_block_learns_from_nothing_behind_its_anchor_nor_from_other_blocks(kind: str) -> None:
    """Else the drafter would be trained on what it will not have."""
    draft = random_drafter(smoke(kind))
    embedding, features, batch = inputs(draft.config)
    tables, one = Tables(embedding, embedding), replace(batch, anchors=batch.anchors[:, :1], labels=batch.labels[:, :1])
    whole, first = draft.losses(tables, features, batch), draft.losses(tables, features, one)
    torch.testing.assert_close(whole[:, :1], first)
    # Before its anchor lie the features that it reads; its own token is the last that it may know.
    cut = features.clone(), replace(one, tokens=batch.tokens.clone())
    cut[0][:, ANCHORS[0] :] = 7.0
    cut[1].tokens[:, ANCHORS[0] + 1 :] = 5
    torch.testing.assert_close(draft.losses(tables, *cut), first)
    cut[0][:, ANCHORS[0] - 1] = 7.0
    assert not torch.allclose(draft.losses(tables, *cut), first)


@pytest.mark.parametrize("kind", KINDS)
def test_a_draft_is_trained_behind_the_right_ones_before_it_alone(kind: str) -> None:
    """The loss of a draft knows no later label; what it reads of earlier ones is of its kind."""
    draft = random_drafter(smoke(kind))
    embedding, features, batch = inputs(draft.config)
    batch.tokens[:, ANCHORS[0] + 1 :] = 5
    batch = replace(batch, anchors=batch.anchors[:, :1], labels=batch.labels[:, :1])
    tables, changed = Tables(embedding, embedding), batch.labels.clone()
    before = draft.losses(tables, features, batch)
    changed[..., 4] = (changed[..., 4] + 1) % draft.config.shape.vocab_size
    after = draft.losses(tables, features, replace(batch, labels=changed))
    assert torch.equal(before[..., :3], after[..., :3])
    assert not torch.equal(before[..., 3], after[..., 3])
    later = (before[..., 4:] != after[..., 4:]).any(dim=(0, 1)).tolist()
    # DFlash2's selector and DSpark's bias read the token before; EAGLE-3's passes all of them.
    reads_one, none = [True] + [False] * (len(later) - 1), [False] * len(later)
    assert later == {DFLASH: none, DFLASH2: reads_one, DSPARK: reads_one, EAGLE3: [True] * len(later)}[kind]


@pytest.mark.parametrize("kind", KINDS)
@torch.inference_mode()
def test_serving_drafts_what_the_module_drafts(kind: str, tmp_path: Path) -> None:
    """A random drafter for the demo target, over random features, rejected drafts between."""
    config = replace(PairConfig(), drafter=kind)
    save_draft(random_drafter(config), tmp_path)
    assert (read_draft_config(tmp_path), read_draft(tmp_path).notes) == (config, ())
    target_folder = asset_path("demo", "pair", "target")
    target, draft = load_target(target_folder, config), load_draft(tmp_path, config)
    embedding, tokens, k = target.model.embed_tokens.weight, cases.token_ids(60), config.num_drafts
    steps = [Step(5, int(tokens[5]), k), Step(16, int(tokens[21]), k - 4), Step(30, int(tokens[51]), k)]
    features = torch.randn(51, len(config.target_layer_ids) * config.shape.hidden_size)
    length = 0
    for step, (_, found) in zip(steps, drafts(target_folder, tmp_path, features, steps), strict=True):
        length += step.num_new
        draft.config = replace(config, block_size=step.k + 1, eagle_drafts=step.k)
        known = tokens[: length + 1].tolist()
        assert found == propose(draft, Tables(embedding, embedding), features[None, :length], known)


def test_each_kind_has_its_number_of_drafts_as_serving_reads_it(tmp_path: Path) -> None:
    found = {}
    for kind in KINDS:
        save_draft(random_drafter(replace(PairConfig(), drafter=kind)), tmp_path / kind)
        spec = read_draft(tmp_path / kind)
        found[kind] = spec.method, spec.num_speculative_tokens
    assert found == {DFLASH: (DFLASH, 15), DFLASH2: (DFLASH2, 15), DSPARK: (DSPARK, 15), EAGLE3: (EAGLE3, 7)}


@pytest.fixture(scope="module")
def first(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A pair that others are trained from."""
    folder = tmp_path_factory.mktemp("first") / "pair"
    train_pair(Run(folder, **SMOKE))
    return folder


@pytest.mark.nightly
@pytest.mark.slow
@pytest.mark.parametrize("kind", [DFLASH2, DSPARK, EAGLE3])
def test_smoke_training_writes_a_drafter_that_drafts(kind: str, first: Path, tmp_path: Path) -> None:
    """Of a target that is there: tests/demo/test_training.py trains one."""
    train_pair(Run(tmp_path / "pair", **{**SMOKE, "config": smoke(kind), "target_steps": 0}, resume=first))
    pair = tmp_path / "pair"
    assert ReferencePair(pair).config.drafter == kind
    llm = LLM(target=str(pair / "target"), draft=str(pair / "draft"), adaptive_speculation=False)
    output = llm.generate(["What is 2 + 3?\n"], max_tokens=8, temperature=0, ignore_eos=True)[0]
    assert output.stats is not None
    assert output.stats.spec_decoding.num_draft_tokens > 0


@pytest.mark.nightly
@pytest.mark.slow
def test_a_drafter_of_the_other_kind_is_not_resumed(first: Path, tmp_path: Path) -> None:
    again = {**SMOKE, "config": smoke(DFLASH2), "target_steps": 0}
    train_pair(Run(tmp_path / "second", **again, resume=first))
    one, other = ((pair / "target" / "model.safetensors").read_bytes() for pair in (first, tmp_path / "second"))
    assert one == other
    assert read_draft_config(tmp_path / "second" / "draft").drafter == DFLASH2


def test_a_hybrid_target_begins_with_what_it_shares_with_the_other(tmp_path: Path) -> None:
    config = replace(PairConfig(), is_hybrid=True)
    other = load_target(asset_path("demo", "pair", "target"), PairConfig())
    hybrid = load_extended_target(asset_path("demo", "pair", "target"), config, {})
    own, theirs = hybrid.state_dict(), other.state_dict()
    for name in ("model.embed_tokens.weight", "model.layers.5.mlp.down_proj.weight"):
        assert torch.equal(own[name], theirs[name])
    name = "model.layers.2.post_attention_layernorm.weight"
    torch.testing.assert_close(1 + own[name], theirs[name])


@torch.inference_mode()
def test_a_hybrid_target_is_served_as_it_was_trained(tmp_path: Path) -> None:
    """And its drafter reads the outputs that it was trained on."""
    torch.manual_seed(0)
    save_target(make_target(replace(SMOKE_CONFIG, is_hybrid=True)), tmp_path)
    model = load_target(tmp_path, replace(SMOKE_CONFIG, is_hybrid=True))
    ids = torch.randint(0, SMOKE_CONFIG.shape.vocab_size, (70,))
    hidden, features = model(ids[None])
    spec = read_target(tmp_path)
    assert spec.decoder.delta_net is not None
    served = serving_target(spec, 128, torch.float32, torch.device("cpu"))
    paged = context(block_tables(1), [0], [70], pool=noisy_pool(spec.decoder))
    output = served.forward(ids, paged, caches(spec.decoder), SMOKE_CONFIG.target_layer_ids)
    torch.testing.assert_close(served.logits(output.hidden), model.logits(hidden)[0], atol=1e-4, rtol=1e-3)
    torch.testing.assert_close(output.features, features[0], atol=1e-4, rtol=1e-3)


@pytest.mark.nightly
@pytest.mark.slow
def test_smoke_training_writes_a_hybrid_pair_that_drafts(first: Path, tmp_path: Path) -> None:
    own = {**SMOKE, "config": replace(SMOKE_CONFIG, is_hybrid=True)}
    train_pair(Run(tmp_path / "pair", **own, resume=first))
    pair = tmp_path / "pair"
    llm = LLM(target=str(pair / "target"), draft=str(pair / "draft"), adaptive_speculation=False)
    output = llm.generate(["What is 2 + 3?\n"], max_tokens=8, temperature=0, ignore_eos=True)[0]
    assert output.stats is not None
    assert output.stats.spec_decoding.num_draft_tokens > 0
