"""A tokenizer that gets more ids keeps those that it has, and a model that continues keeps what it knew of them."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from demo import tokenizer
from demo.checkpoint import load_extended_target, save_target
from demo.model import TargetModel
from demo.train import SMOKE_CONFIG

FEW, MORE = 360, 400


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A tokenizer of `FEW` ids that was extended to `MORE`; `before.json` is what it was."""
    monkeypatch.setattr(tokenizer, "VOCAB_SIZE", FEW)
    tokenizer.train_tokenizer(tmp_path, documents=100)
    (tmp_path / "before.json").write_bytes((tmp_path / "tokenizer.json").read_bytes())
    monkeypatch.setattr(tokenizer, "VOCAB_SIZE", MORE)
    tokenizer.extend_tokenizer(tmp_path, documents=200)
    return tmp_path


def test_more_ids_come_after_those_that_were_there(folder: Path) -> None:
    before, after = (json.loads((folder / name).read_text())["model"] for name in ("before.json", "tokenizer.json"))
    assert (len(before["vocab"]), len(after["vocab"])) == (FEW, MORE)
    assert before["vocab"].items() <= after["vocab"].items()
    assert after["merges"][: len(before["merges"])] == before["merges"]


def test_an_extended_tokenizer_needs_fewer_tokens_and_loses_nothing(folder: Path) -> None:
    text = 'Fill this JSON schema with data from the text.\nSchema: {"type": "object", "properties": {}}'
    extended = tokenizer.load_tokenizer(folder)
    tokens = extended.encode(text)
    assert extended.decode(tokens) == text
    (folder / "tokenizer.json").write_bytes((folder / "before.json").read_bytes())
    assert len(tokens) < len(tokenizer.load_tokenizer(folder).encode(text))


def test_a_new_token_begins_as_the_mean_of_its_parts(folder: Path, tmp_path: Path) -> None:
    few, more = (replace(SMOKE_CONFIG, shape=replace(SMOKE_CONFIG.shape, vocab_size=size)) for size in (FEW, MORE))
    save_target(TargetModel(few), tmp_path / "target")
    parts = tokenizer.merged_ids(folder)
    rows = load_extended_target(tmp_path / "target", more, parts).model.embed_tokens.weight
    saved = load_file(tmp_path / "target" / "model.safetensors")["model.embed_tokens.weight"].float()
    torch.testing.assert_close(rows[:FEW], saved)
    for token in range(FEW, MORE):
        first, second = parts[token]
        torch.testing.assert_close(rows[token], (rows[first] + rows[second]) / 2)
