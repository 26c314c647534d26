"""What a drafter begins as and how it is written: the target's features and layers, a drafter that there is, and
checkpoints that the engine reads as they were meant."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from demo.checkpoint import load_target as demo_target
from demo.model import PairConfig
from demo.propose import propose
from dflash_backend import LLM
from dflash_backend.checkpoints import read_target
from dflash_backend.config import asset_path
from dflash_backend.drafters.registry import read_draft
from dflash_backend.training.errors import TrainingError
from dflash_backend.training.features import Teacher
from dflash_backend.training.formats import FORMATS, KINDS, SPECULATORS, Naming, make_drafter
from dflash_backend.training.loop import BlockLoss
from dflash_backend.training.loss import Distillation, DraftBatch, TargetStates
from dflash_backend.training.network import DFLASH, DFLASH2, DSPARK, EAGLE3, DrafterConfig, Tables, layers_of
from dflash_backend.training.publish import Publication, vocabulary_tensors
from dflash_backend.training.start import (
    begin_from_target,
    default_config,
    draft_vocabulary,
    mask_token,
    read_published,
)
from tests.oracle import cases
from tests.oracle.cases import Step
from tests.oracle.ours import drafts
from tests.training.drafters import LENGTH, blocks_of

TARGET = asset_path("demo", "pair", "target")
DRAFT = asset_path("demo", "pair", "draft")
SPEC = read_target(TARGET)


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM(draft="", max_model_len=256, kv_cache_gb=0.05, max_num_seqs=4)


def random_config(kind: str) -> DrafterConfig:
    return default_config(SPEC, kind, 3, draft_layers=None if kind == EAGLE3 else 2, block_size=6, eagle_drafts=4)


def test_features_are_those_of_the_target_however_rows_are_batched(llm: LLM) -> None:
    rows = [cases.token_ids(40).tolist(), cases.token_ids(90)[50:73].tolist()]
    found = Teacher(llm).features(rows, (1, 3, 5))
    model = demo_target(TARGET, PairConfig())
    for row, own in zip(rows, found, strict=True):
        with torch.no_grad():
            expected = model(torch.tensor([row]))[1][0]
        torch.testing.assert_close(own[: len(row)], expected, atol=1e-4, rtol=1e-3)
        assert not own[len(row) :].any()


@pytest.mark.parametrize("draft_tokens", [None, torch.tensor([7, 5, *range(20, SPEC.vocab_size)])])
def test_the_final_states_are_those_that_the_target_chooses_tokens_by(
    llm: LLM, draft_tokens: torch.Tensor | None
) -> None:
    """Beside the features, at the temperature that is served, over the tokens that can be drafted, in any order."""
    row, last = cases.token_ids(40).tolist(), SPEC.decoder.num_layers
    teacher = Teacher(llm)
    found = teacher.features([row, row[:9]], (1, 3, last))
    size = SPEC.decoder.hidden_size
    assert torch.equal(found[..., :-size], teacher.features([row, row[:9]], (1, 3)))
    assert not found[1, 9:].any()
    tables = teacher.tables(torch.float32, True, draft_tokens)
    states = TargetStates(found[0, :, -size:], tables.head, Distillation(1.0, 2.0), tables.softcap)
    with torch.no_grad():
        logits = demo_target(TARGET, PairConfig())(torch.tensor([row]))[0][0]
        head = load_file(TARGET / "model.safetensors")["model.embed_tokens.weight"].float()
        logits = logits @ (head if draft_tokens is None else head[draft_tokens]).T
    torch.testing.assert_close(states.probabilities(), torch.softmax(logits / 2, dim=-1), atol=1e-4, rtol=1e-3)


def test_the_state_of_a_draft_is_that_of_the_token_before_it() -> None:
    """That of draft i behind an anchor is i - 1 places behind it; the features go to the drafter without states."""
    blocks = blocks_of(DFLASH)
    seen: list[tuple[torch.Tensor, TargetStates]] = []
    draft, size = blocks.draft, blocks.tables.head.shape[1]
    states = torch.arange(LENGTH, dtype=torch.float64)[None, :, None].expand(1, LENGTH, size)

    def losses(*arguments: object) -> torch.Tensor:
        features, target = arguments[1], arguments[-1]
        assert isinstance(features, torch.Tensor)
        assert isinstance(target, TargetStates)
        seen.append((features, target))
        return torch.zeros(1, 2, 3)

    draft.losses = losses  # type: ignore[assignment, method-assign]
    how = Distillation(0.5, 1.0, 2.0)
    anchors, weights = torch.tensor([[5, LENGTH - 2]]), torch.ones(1, 2, 3)
    given = torch.cat((blocks.features, states), dim=-1)
    own = torch.randn_like(blocks.tables.head)
    for tables in (blocks.tables, replace(blocks.tables, target_head=own)):
        BlockLoss(draft, tables, how)(given, DraftBatch(blocks.tokens, anchors, blocks.labels, weights))
    for features, target in seen:
        assert torch.equal(features, blocks.features)
        assert target.hidden[..., 0].tolist() == [[[5, 6, 7], [LENGTH - 2, LENGTH - 1, LENGTH - 1]]]
        assert target.distillation == how
    assert seen[0][1].head is blocks.tables.head
    assert seen[1][1].head is own


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("kind", KINDS)
@torch.inference_mode()
def test_what_is_written_drafts_in_the_engine_as_the_module_does(kind: str, form: str, tmp_path: Path) -> None:
    torch.manual_seed(4)
    config, tokens = random_config(kind), cases.token_ids(60)
    embedding = load_file(TARGET / "model.safetensors")["model.embed_tokens.weight"].float()
    tables, own = Tables(embedding, embedding), None
    if kind != DFLASH2:  # with a smaller vocabulary
        own = draft_vocabulary([tuple(tokens.tolist())], 300, SPEC.vocab_size)
        assert own is not None
        ids = torch.zeros(SPEC.vocab_size, dtype=torch.int64)
        ids[own] = torch.arange(len(own))
        tables, config = Tables(embedding, embedding[own], ids), replace(config, draft_vocab_size=len(own))
    draft = make_drafter(config)
    with torch.no_grad():
        for name, parameter in draft.named_parameters():
            noise = 0.3 if any(part in name for part in ("conv", "selector", "markov", "confidence", "norm")) else 0.0
            parameter.copy_((parameter + noise * torch.randn_like(parameter)).bfloat16())
    tensors = vocabulary_tensors(own, tables.head, SPEC.vocab_size, form)
    Publication(config, form, Naming(str(TARGET)), None, tensors).write(draft, tmp_path)
    spec = read_draft(tmp_path)
    assert (spec.method, spec.num_speculative_tokens, spec.notes) == (kind, config.num_drafts, ())
    assert spec.target_layer_ids == config.target_layer_ids
    if form == SPECULATORS:
        assert spec.target_name == str(TARGET)
    k = config.num_drafts
    steps = [Step(5, int(tokens[5]), k), Step(16, int(tokens[21]), k), Step(30, int(tokens[51]), k)]
    features = torch.randn(51, len(config.target_layer_ids) * config.shape.hidden_size)
    length = 0
    for step, (_, found) in zip(steps, drafts(TARGET, tmp_path, features, steps), strict=True):
        length += step.num_new
        expected = propose(draft, tables, features[None, :length], tokens[: length + 1].tolist())
        assert found == (expected if own is None else own[expected].tolist())


def test_a_new_drafter_begins_with_layers_of_its_target() -> None:
    draft = make_drafter(default_config(SPEC, DFLASH, 3))
    assert begin_from_target(draft, SPEC) == 3
    stored = load_file(TARGET / "model.safetensors")
    assert torch.equal(draft.norm.weight, stored["model.norm.weight"].float())
    for own, index in zip(layers_of(draft.layers), (4, 6, 7), strict=True):
        for name, parameter in own.named_parameters():
            assert torch.equal(parameter, stored[f"model.layers.{index}.{name}"].float()), (index, name)


def test_a_narrower_drafter_gets_the_channels_of_its_target_that_weigh_most() -> None:
    inner = SPEC.decoder.intermediate_size
    draft = make_drafter(default_config(SPEC, DFLASH, 3, intermediate_size=inner // 3))
    assert begin_from_target(draft, SPEC) == 3
    stored = load_file(TARGET / "model.safetensors")
    gate, up, down = (stored[f"model.layers.4.mlp.{name}_proj.weight"].float() for name in ("gate", "up", "down"))
    strength = gate.norm(dim=1) * up.norm(dim=1) * down.norm(dim=0)
    kept = strength.argsort(descending=True)[: inner // 3].sort().values
    own = next(iter(layers_of(draft.layers))).mlp
    assert torch.equal(own.gate_proj.weight, gate[kept])
    assert torch.equal(own.up_proj.weight, up[kept])
    assert torch.equal(own.down_proj.weight, down[:, kept])
    wider = make_drafter(default_config(SPEC, DFLASH, 3, intermediate_size=inner + 16))
    assert begin_from_target(wider, SPEC) == 0


def test_a_smaller_vocabulary_without_a_head_is_read_with_the_targets_rows(tmp_path: Path) -> None:
    tokens = torch.arange(0, 600, 2)
    config = default_config(SPEC, DFLASH, 3, draft_layers=1, draft_vocab_size=len(tokens))
    draft = make_drafter(config)
    tensors = vocabulary_tensors(tokens, None, SPEC.vocab_size, "zlab")
    Publication(config, "zlab", Naming(), None, tensors).write(draft, tmp_path)
    assert "lm_head.weight" not in load_file(tmp_path / "model.safetensors")
    outputs = LLM(str(TARGET), str(tmp_path), kv_cache_gb=0.05).generate(["Tom has 3 apples."], max_tokens=8)
    expected = LLM(str(TARGET), "", kv_cache_gb=0.05).generate(["Tom has 3 apples."], max_tokens=8)
    assert outputs[0].token_ids == expected[0].token_ids
    assert outputs[0].stats is not None
    assert outputs[0].stats.spec_decoding.num_draft_tokens > 0


def test_a_published_drafter_is_read_and_written_again_as_it_is(tmp_path: Path) -> None:
    published = read_published(DRAFT, SPEC)
    draft = make_drafter(published.config)
    published.load(draft)
    Publication(published.config, "zlab", Naming(), published.fields, published.tensors).write(draft, tmp_path)
    assert json.loads((tmp_path / "config.json").read_text()) == json.loads((DRAFT / "config.json").read_text())
    before, after = load_file(DRAFT / "model.safetensors"), load_file(tmp_path / "model.safetensors")
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)


@pytest.mark.parametrize("kind", [DFLASH2, DSPARK, EAGLE3])
def test_other_kinds_are_read_again_too(kind: str, tmp_path: Path) -> None:
    config = random_config(kind)
    draft = make_drafter(config)
    Publication(config, SPECULATORS, Naming(), None, {}).write(draft, tmp_path)
    published = read_published(tmp_path, SPEC)
    again = make_drafter(published.config)
    published.load(again)
    sizes = ("drafter", "target_layer_ids", "selector_rank", "markov_rank", "num_drafts")
    assert [getattr(published.config, name) for name in sizes] == [getattr(config, name) for name in sizes]
    own, theirs = draft.state_dict(), again.state_dict()
    assert all(torch.equal(own[name].bfloat16().float(), theirs[name]) for name in own)


def test_a_quantised_drafter_is_not_trained_further(tmp_path: Path) -> None:
    fields = json.loads((DRAFT / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**fields, "attention_bias": True}))
    (tmp_path / "model.safetensors").write_bytes((DRAFT / "model.safetensors").read_bytes())
    with pytest.raises((TrainingError, ValueError), match=r"bias"):
        read_published(tmp_path, SPEC)


def test_the_mask_token_is_one_that_no_text_has_and_that_has_an_embedding(llm: LLM) -> None:
    embedding = torch.ones(SPEC.vocab_size, 8)
    assert mask_token(llm.tokenizer, embedding) == llm.tokenizer.special_token_ids["<|mask|>"]
    embedding[llm.tokenizer.special_token_ids["<|mask|>"]] = 0
    other = mask_token(llm.tokenizer, embedding)
    assert other not in llm.tokenizer.eos_token_ids
    assert float(embedding[other].norm()) > 0


def test_a_draft_vocabulary_has_the_most_frequent_tokens() -> None:
    found = draft_vocabulary([(9, 9, 4), (9, 2)], 4, 12)
    assert found is not None
    assert found.tolist() == [0, 2, 4, 9]
    assert draft_vocabulary([(1, 2)], 12, 12) is None


def test_layers_that_a_target_does_not_have_are_refused() -> None:
    with pytest.raises(TrainingError, match=r"--layer-ids are \[1, 8\]; the target has the layers 0 to 7"):
        default_config(SPEC, DFLASH, 3, target_layer_ids=(1, 8))
    assert replace(default_config(SPEC, DFLASH, 3), block_size=16).num_drafts == 15
