"""A model's directory with a byte-level tokenizer, and the tokenizer: fixtures."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from checks.byte_tokenizer import EOS, write_byte_tokenizer
from dflash_backend.text.tokenizer import Tokenizer


@pytest.fixture(scope="session")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("model")
    write_byte_tokenizer(directory)
    (directory / "generation_config.json").write_text(json.dumps({"eos_token_id": [7, EOS]}), encoding="utf-8")
    (directory / "config.json").write_text(json.dumps({"eos_token_id": 9, "model_type": "qwen3"}), encoding="utf-8")
    return directory


@pytest.fixture(scope="session")
def tokenizer(model_dir: Path) -> Tokenizer:
    return Tokenizer.load(model_dir)
