"""The pieces of training that are easy to get wrong, and a run of two steps through all of it."""

import pytest
import torch
from safetensors.torch import load_file

from demo.evaluate import verify
from demo.train import SMOKE, SMOKE_CONFIG, Run, train_pair
from dflash_backend.training.loss import draw_blocks
from dflash_backend.training.network import DraftModel
from tests.support.scale import SCALE


def draft_inputs(length: int, anchors: list[int]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    size, layers = SMOKE_CONFIG.shape.hidden_size, len(SMOKE_CONFIG.target_layer_ids)
    features = torch.randn(1, length, layers * size, generator=generator)
    blocks = torch.randn(1, len(anchors), SMOKE_CONFIG.block_size, size, generator=generator)
    return features, blocks, torch.tensor([anchors])


def test_a_block_sees_no_feature_at_or_after_its_anchor():
    features, blocks, anchors = draft_inputs(40, [25])
    draft = DraftModel(SMOKE_CONFIG)
    whole, truncated = draft(features, blocks, anchors), draft(features[:, :25], blocks, anchors)
    torch.testing.assert_close(whole, truncated)


def test_blocks_of_one_row_do_not_see_each_other():
    features, blocks, anchors = draft_inputs(40, [10, 25])
    draft = DraftModel(SMOKE_CONFIG)
    both, second = draft(features, blocks, anchors), draft(features, blocks[:, 1:], anchors[:, 1:])
    torch.testing.assert_close(both[:, 1:], second)


def test_the_first_query_of_a_block_sees_the_last():
    features, blocks, anchors = draft_inputs(40, [25])
    draft = DraftModel(SMOKE_CONFIG)
    changed = blocks.clone()
    changed[:, :, -1] += 1
    assert not torch.allclose(draft(features, blocks, anchors)[:, :, 0], draft(features, changed, anchors)[:, :, 0])


def test_anchors_are_answer_tokens_and_weights_end_with_the_answer():
    tokens = torch.arange(20)[None]
    is_answer = torch.zeros(1, 20, dtype=torch.bool)
    is_answer[:, 5:9] = True
    batch = draw_blocks(tokens, is_answer, 50, 6, torch.Generator().manual_seed(0))
    assert set(batch.anchors.flatten().tolist()) == {5, 6, 7}
    assert torch.equal(batch.labels[..., 0], batch.anchors)
    for place, weights in zip(batch.anchors[0].tolist(), batch.weights[0], strict=True):
        assert (weights > 0).tolist() == [place + i < 9 for i in range(1, 6)]


def test_verifying_stops_at_the_first_mismatch_and_after_the_end():
    assert verify([5, 6, 7], [5, 6, 8, 9], end=2) == (2, [5, 6, 8])
    assert verify([5, 6, 7], [5, 6, 7, 9], end=2) == (3, [5, 6, 7, 9])
    assert verify([5, 2, 7], [5, 2, 7, 9], end=2) == (2, [5, 2])
    assert verify([4, 2, 7], [5, 2, 7, 9], end=2) == (0, [5])


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    """One that a single process has trained."""
    folder = tmp_path_factory.mktemp("trained") / "pair"
    train_pair(Run(folder, **SMOKE))
    return folder


@pytest.mark.slow
def test_smoke_training_writes_a_whole_pair(pair):
    written = {str(path.relative_to(pair)) for path in pair.rglob("*") if path.is_file()}
    assert written == {
        "draft/config.json",
        "draft/model.safetensors",
        "target/config.json",
        "target/generation_config.json",
        "target/model.safetensors",
        "target/tokenizer.json",
        "target/tokenizer_config.json",
    }


@pytest.mark.nightly
@pytest.mark.slow
def test_two_workers_train_a_pair_together(tmp_path, pair):
    """The drafter of a pair, which goes on from there, and in `make nightly` the target as well: each of the two starts
    processes of its own."""
    steps = SMOKE if SCALE >= 4 else SMOKE | {"target_steps": 0}
    train_pair(Run(tmp_path / "pair", workers=2, resume=pair, **steps))
    before, after = (load_file(folder / "draft" / "model.safetensors") for folder in (pair, tmp_path / "pair"))
    assert before.keys() == after.keys()
    assert any(not torch.equal(before[name], after[name]) for name in before)
