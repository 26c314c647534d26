"""A head beside the embedding is tied where the two are equal, and else used, as in `transformers` 5, whatever the
config says."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from dflash_backend.checkpoints import CheckpointError, read_target, target_facts
from dflash_backend.drafters.base import LoadOptions
from dflash_backend.drafters.registry import drafter_class, read_draft
from dflash_backend.engine.inspection import inspect_target
from dflash_backend.models import load_target
from dflash_backend.models.interface import TargetModel
from dflash_backend.models.linear import table_of
from dflash_backend.models.ops import LayerOps
from tests.support.quantised import FP8_BLOCK, fp8_block, write_by_name
from tests.support.scale import others_by_night
from tests.support.tiny_models import FAMILIES, HIDDEN, VOCAB_SIZE, make_draft, make_target

pytestmark = pytest.mark.usefixtures("single_thread", "inference_mode")
CPU = torch.device("cpu")
EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
ROW = 41


def add_head(
    directory: Path, change: Callable[[torch.Tensor], torch.Tensor], dtype: torch.dtype = torch.float32
) -> torch.Tensor:
    """Write the embedding, changed, as the head of a tied checkpoint, and return it."""
    tensors = load_file(directory / "model.safetensors")
    tensors[HEAD] = change(tensors[EMBEDDING].clone()).to(dtype).contiguous()
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    return tensors[HEAD]


def negated(embedding: torch.Tensor) -> torch.Tensor:
    embedding[ROW] *= -1
    return embedding


def load(directory: Path) -> TargetModel:
    return load_target(read_target(directory), 64, torch.float32, CPU)


@pytest.mark.parametrize("architecture", others_by_night(FAMILIES, ["Qwen3ForCausalLM", "Gemma4ForCausalLM"]))
def test_a_head_of_other_numbers_is_used_as_in_transformers_and_said(architecture: str, tmp_path: Path) -> None:
    make_target(tmp_path, architecture=architecture)
    head = add_head(tmp_path, negated)
    spec, model = read_target(tmp_path), load(tmp_path)
    assert not spec.tie_word_embeddings
    assert torch.equal(model.lm_head.weight, head)
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    assert torch.equal(theirs.lm_head.weight, head)
    assert not torch.equal(theirs.lm_head.weight, theirs.model.embed_tokens.weight)
    facts = dict(target_facts(spec))
    assert facts["vocabulary"] == "97 tokens, embedding and LM head apart"
    assert facts["warning"].startswith(
        "tie_word_embeddings is true, and lm_head.weight lies in the files whose numbers"
    )
    inspect_target(spec)


def test_the_last_number_of_a_large_head_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Which is compared in parts."""
    monkeypatch.setattr("dflash_backend.checkpoints.files.COMPARED_NUMBERS", 5 * HIDDEN)
    make_target(tmp_path)
    add_head(tmp_path, lambda head: head)
    assert read_target(tmp_path).tie_word_embeddings

    def last(head: torch.Tensor) -> torch.Tensor:
        head[-1, -1] += 1e-3
        return head

    add_head(tmp_path, last)
    assert not read_target(tmp_path).tie_word_embeddings


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_equal_head_is_tied_without_a_word(dtype: torch.dtype, tmp_path: Path) -> None:
    """In whatever float type it is."""
    make_target(tmp_path, dtype=torch.bfloat16)
    add_head(tmp_path, lambda head: head, dtype)
    spec, model = read_target(tmp_path), load(tmp_path)
    assert (spec.tie_word_embeddings, [note for note in spec.notes if "tie" in note]) == (True, [])
    assert table_of(model.lm_head) is model.embedding  # type: ignore[attr-defined]
    assert "tied" in dict(target_facts(spec))["vocabulary"]


def test_shards_are_compared_too(tmp_path: Path) -> None:
    make_target(tmp_path)
    head = add_head(tmp_path, negated)
    tensors = load_file(tmp_path / "model.safetensors")
    (tmp_path / "model.safetensors").unlink()
    where = {name: "b.safetensors" if name == HEAD else "a.safetensors" for name in tensors}
    for file in ("a.safetensors", "b.safetensors"):
        save_file({name: tensors[name] for name in where if where[name] == file}, tmp_path / file)
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": where}))
    assert torch.equal(load(tmp_path).lm_head.weight, head)


def test_a_quantised_head_is_used(tmp_path: Path) -> None:
    make_target(tmp_path / "source")
    add_head(tmp_path / "source", negated)
    packer = fp8_block(16, 16)
    config = FP8_BLOCK | {"weight_block_size": [16, 16], "modules_to_not_convert": []}
    copies = write_by_name(tmp_path / "source", tmp_path, lambda name: packer if name == HEAD else None, config)
    spec = read_target(copies.quantised)
    assert not spec.tie_word_embeddings
    assert "whose numbers are not the embedding's: that head is used" in spec.notes[0]
    expected = load_file(copies.plain / "model.safetensors")[HEAD]
    assert torch.equal(load(copies.quantised).lm_head.weight, expected)


def test_a_head_of_another_shape_is_no_tied_one(tmp_path: Path) -> None:
    make_target(tmp_path)
    add_head(tmp_path, lambda head: head[:-1])
    with pytest.raises(
        CheckpointError, match=r"'lm_head.weight' has shape \[96, 32\]; config.json asks for \[97, 32\]"
    ):
        inspect_target(read_target(tmp_path))


def test_a_tied_target_that_was_saved_with_its_head_alone_has_it_for_its_embedding(tmp_path: Path) -> None:
    make_target(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    tensors[HEAD] = tensors.pop(EMBEDDING)
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    model = load(tmp_path)
    assert torch.equal(model.embed(torch.arange(VOCAB_SIZE)), tensors[HEAD])
    assert torch.equal(model.lm_head.weight, tensors[HEAD])
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    assert torch.equal(theirs.model.embed_tokens.weight, tensors[HEAD])


def test_a_drafter_has_what_its_files_have_whatever_its_config_says_of_ties(tmp_path: Path) -> None:
    make_target(tmp_path / "t")
    for tied in (True, False):
        tensors = make_draft(tmp_path / "d", tie_word_embeddings=tied)
        tensors["embed_tokens.weight"] = torch.randn(VOCAB_SIZE, HIDDEN)
        tensors["lm_head.weight"] = torch.randn(VOCAB_SIZE, HIDDEN)
        save_file(tensors, tmp_path / "d" / "model.safetensors")
        spec = read_draft(tmp_path / "d")
        options = LoadOptions(64, torch.float32, CPU, lambda name, share: None, LayerOps())
        made: Any = drafter_class(spec).load(spec, options)(load(tmp_path / "t"), [], None)  # type: ignore[arg-type]
        assert torch.equal(made.lm_head.weight, tensors["lm_head.weight"])
        assert torch.equal(made._embed(torch.tensor([3])), tensors["embed_tokens.weight"][3:4])
