from collections.abc import Callable
from pathlib import Path

import pytest

from dflash_backend.config import asset_path
from dflash_backend.text.tokenizer import Tokenizer
from tests.support.byte_tokenizer import model_dir, tokenizer  # noqa: F401


@pytest.fixture(scope="session")
def demo() -> Tokenizer:
    """The tokenizer of the demo pair."""
    return Tokenizer.load(asset_path("demo", "pair", "target"))


@pytest.fixture
def with_template(model_dir: Path) -> Callable[[str], Tokenizer]:  # noqa: F811
    """Makes a byte-level tokenizer with another chat template."""

    def with_template(template: str) -> Tokenizer:
        made = Tokenizer.load(model_dir)
        made._template.chat_template = template
        return made

    return with_template
