"""Tokens of a GGUF file: how a text is split and merged, what begins and ends a sequence, and the chat template."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import gguf
import pytest

from dflash_backend.checkpoints import CheckpointError, find_model
from dflash_backend.checkpoints.gguf import reader
from dflash_backend.checkpoints.gguf.tokenizer import SPLITS, GgufTokenizer, read_tokenizer
from dflash_backend.text.tokenizer import Tokenizer
from tests.checkpoints.test_gguf import cache, make_gguf
from tests.support.tiny_models import VOCAB_SIZE

__all__ = ["cache"]  # a fixture


def test_byte_level_tokens(tmp_path: Path) -> None:
    make_gguf(tmp_path / "m.gguf")
    folder = find_model(str(tmp_path / "m.gguf"), "target_model")
    tokenizer = Tokenizer.load(folder)
    end = VOCAB_SIZE - 1
    added = json.loads((folder / "tokenizer.json").read_text())["added_tokens"]
    assert {each["content"]: each["special"] for each in added}["<|im_end|>"] is True
    assert tokenizer.encode("abba<|im_end|>") == [end - 1, 1, 0, end]
    assert tokenizer.eos_token_ids == (end,)
    assert tokenizer.special_token_ids == {"<|im_end|>": end}
    assert tokenizer.render_chat([{"role": "user", "content": "cab"}]).text == "cab"


def tokens_of(tokens: Sequence[str], rows: int = 0, **more: Any) -> GgufTokenizer:
    """The tokenizer of a file with these tokens and fields; without `model` it is byte-level. rows: of the
    embedding, where there are not as many as tokens."""
    fields = {"model": "gpt2", "pre": "gpt-2", "merges": [], "tokens": [*tokens], "token_type": [1] * len(tokens)}
    templates = {name: more.pop(name) for name in [*more] if name.startswith("tokenizer.")}
    metadata = {f"tokenizer.ggml.{name}": value for name, value in (fields | more).items()} | templates
    return read_tokenizer(reader.GgufModel(Path("m.gguf"), metadata, {}), rows or len(tokens))


TEXT = "It'LL be 12345 theABC's a//b\n\n  e\u0301x!!\n"
# How names of `tokenizer.ggml.pre` split it. A mark that follows a letter is no letter to those of Llama 3 and Qwen2.
PIECES = {
    "gpt-2": "It|'|LL| be| 12345| theABC|'s| a|//|b|\n\n | e|\u0301|x|!!|\n",
    "smollm": "It|'|LL| be| |1|2|3|4|5| theABC|'s| a|//|b|\n\n | e|\u0301|x|!!|\n",
    "llama-bpe": "It|'LL| be| |123|45| theABC|'s| a|//|b|\n\n| | e|\u0301x|!!\n",
    "qwen2": "It|'LL| be| |1|2|3|4|5| theABC|'s| a|//|b|\n\n| | e|\u0301x|!!\n",
    "qwen35": "It|'LL| be| |1|2|3|4|5| theABC|'s| a|//|b|\n\n| | e\u0301x|!!\n",
    "tekken": "It|'LL| be| |1|2|3|4|5| the|ABC|'s| a|//|b|\n\n| | e\u0301x|!!\n",
    "gpt-4o": "It'LL| be| |123|45| the|ABC's| a|//|b|\n\n| | e\u0301x|!!\n",
}
OTHER_NAMES = {"llama3": "llama-bpe", "llama-v3": "llama-bpe", "deepseek-r1-qwen": "qwen2"}


@pytest.mark.parametrize("name", SPLITS)
def test_texts_are_split_as_the_file_names_it(name: str) -> None:
    made = tokens_of(["a"], pre=name).tokenizer
    found = [TEXT[start:end] for _, (start, end) in made.pre_tokenizer.pre_tokenize_str(TEXT)]
    assert "|".join(found) == PIECES[OTHER_NAMES.get(name, name)]
    composes = made.normalizer is not None and made.normalizer.normalize_str("e\u0301") == "\u00e9"
    assert composes == (name in ("qwen2", "deepseek-r1-qwen", "qwen35"))


@pytest.mark.parametrize(
    ("pre", "expected"),
    [
        ("llama-bpe", [4, 3]),
        ("gpt-4o", [3]),
        ("tekken", [4, 3]),
        ("qwen2", [5, 2]),
        ("gpt-2", [5, 2]),
        ("smollm", [5, 2]),
    ],
)
def test_a_text_that_is_a_token_is_not_merged_where_the_file_names_such_a_split(pre: str, expected: list[int]) -> None:
    """And a prompt begins with a token for it where that is the rule."""
    made = tokens_of(["a", "b", "c", "abc", "<s>", "ab"], pre=pre, merges=["a b"], bos_token_id=4).tokenizer
    assert made.encode("abc").ids == expected


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"pre": "llama-bpe"}, [1, 0]),
        ({"pre": "llama-bpe", "add_bos_token": False}, [0]),
        ({"pre": "qwen2", "add_bos_token": True}, [1, 0]),
        ({"pre": "qwen2", "add_eos_token": True}, [0, 2]),
        ({"pre": "llama-bpe", "add_eos_token": True}, [1, 0, 2]),
    ],
)
def test_what_is_before_and_after_a_prompt(fields: dict[str, Any], expected: list[int]) -> None:
    made = tokens_of(["a", "<s>", "</s>"], bos_token_id=1, eos_token_id=2, **fields).tokenizer
    assert made.encode("a").ids == expected


def test_tokens_of_users_are_whole_and_no_special_ones_and_unused_ones_are_none() -> None:
    tokens = ["a", "b", "ab", "<x>", "<c>", "<", "x", ">"]
    found = tokens_of(tokens, token_type=[1, 1, 5, 4, 3, 1, 1, 1], pre="llama-bpe")
    assert found.tokenizer.encode("ab<x><c>").ids == [0, 1, 3, 4]
    added = json.loads(found.tokenizer.to_str())["added_tokens"]
    assert {each["content"]: each["special"] for each in added} == {"<x>": False, "<c>": True}


def test_answers_end_at_the_tokens_that_the_file_names_and_at_those_of_control_that_end_a_turn() -> None:
    tokens = ["a", "<|im_end|>", "<|endoftext|>", "x", "y", "z"]
    types = [1, 3, 1, 3, 3, 3]
    assert tokens_of(tokens, token_type=types, eos_token_id=5, eot_token_id=3, eom_token_id=4).ends == (5, 3, 4, 1)
    assert tokens_of(tokens, token_type=types).ends == (1,)


@pytest.mark.parametrize("other", ["<|call|>", "<|im_end|>"])
def test_gpt_oss_goes_on_after_the_end_of_a_channel(other: str) -> None:
    found = tokens_of(["a", "<|end|>", "<|return|>", other], token_type=[1, 3, 3, 3], eos_token_id=2)
    assert found.ends == ((2, 3) if other == "<|call|>" else (2, 1, 3))


def test_chat_templates_are_one_or_several_by_name() -> None:
    one, two = {"tokenizer.chat_template": "A"}, {"tokenizer.chat_template.tool_use": "B"}
    assert tokens_of(["a"], **one).config["chat_template"] == "A"
    named = [{"name": "default", "template": "A"}, {"name": "tool_use", "template": "B"}]
    assert tokens_of(["a"], **one, **two).config["chat_template"] == named
    assert "chat_template" not in tokens_of(["a"]).config


@pytest.mark.parametrize(
    ("fields", "match"),
    [
        ({"tokens": ["a", "b" * 513], "rows": 2}, "a token has 513 characters; expected 512 at most"),
        ({"tokenizer.chat_template": 3}, "tokenizer.chat_template is 3; expected a string"),
        ({"token_type": [1]}, "there are 2 tokens, 2 of them different, and 1 types"),
        ({"rows": 1}, "at most the 1 rows of the embedding"),
        ({"bos_token_id": 2}, "'bos_token_id' is 2; expected an integer from 0 to 1"),
        ({"model": "llama", "scores": [1.0, float("nan")]}, "'scores' has not one finite number for each"),
    ],
)
def test_tokens_that_would_be_misread_are_refused(fields: dict[str, Any], match: str) -> None:
    with pytest.raises(CheckpointError, match=match):
        tokens_of(**({"tokens": ["a", "b"]} | fields))


def sentencepiece(add_space_prefix: bool) -> Callable[[gguf.GGUFWriter], None]:
    """Bytes, then pieces of which the one with the higher score is merged first."""
    pieces = [("▁", -1.0), ("a", -2.0), ("b", -3.0), ("c", -4.0), ("ab", -9.0), ("bc", -5.0), ("▁a", -8.0)]
    pieces += [("<", -10.0), ("s>", -11.0), ("s", -12.0), (">", -13.0)]
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{i:02X}>" for i in range(256)), *(piece for piece, _ in pieces)]

    def add(writer: gguf.GGUFWriter) -> None:
        for name in list(writer.kv_data[0]):
            if name.startswith("tokenizer."):
                del writer.kv_data[0][name]
        writer.add_tokenizer_model("llama")
        writer.add_token_list(tokens)
        writer.add_token_scores([0.0] * 259 + [score for _, score in pieces])
        writer.add_token_types([2, 3, 3, *[6] * 256, *[1] * len(pieces)])
        writer.add_bos_token_id(1)
        writer.add_eos_token_id(2)
        writer.add_unk_token_id(0)
        writer.add_add_space_prefix(add_space_prefix)

    return add


@pytest.mark.parametrize("prefix", [True, False])
def test_sentencepiece_tokens(tmp_path: Path, prefix: bool) -> None:
    changes = {"vocab_size": 300}
    make_gguf(tmp_path / "m.gguf", changes=changes, fields=sentencepiece(prefix))
    directory = find_model(str(tmp_path / "m.gguf"), "target_model")
    tokenizer = Tokenizer.load(directory)
    space, a, bc, space_a = 259, 260, 264, 265
    assert tokenizer.encode("abc é") == [1, *([space_a] if prefix else [a]), bc, space, 3 + 0xC3, 3 + 0xA9]
    assert tokenizer.encode("<s>a")[:2] == [1, 1]
    model = json.loads((directory / "tokenizer.json").read_text())["model"]
    assert ["<", "s>"] not in model["merges"]  # no text becomes a token of control
    assert ["s", ">"] in model["merges"]
    assert tokenizer.eos_token_ids == (2,)


def test_gemma_4s_tokens_have_their_merges_in_the_file(tmp_path: Path) -> None:
    def add(writer: gguf.GGUFWriter) -> None:
        sentencepiece(False)(writer)
        writer.kv_data[0].pop("tokenizer.ggml.model")
        writer.kv_data[0].pop("tokenizer.ggml.add_space_prefix")
        writer.add_tokenizer_model("gemma4")
        writer.add_token_merges(["▁ a", "a b", "b c"])

    make_gguf(tmp_path / "m.gguf", changes={"vocab_size": 300}, fields=add)
    tokenizer = Tokenizer.load(find_model(str(tmp_path / "m.gguf"), "target_model"))
    space, ab, c, space_a = 259, 263, 262, 265
    # By the order of merges, where the scores would have "bc" first; no space before a text.
    assert tokenizer.encode("abc a é") == [1, ab, c, space_a, space, 3 + 0xC3, 3 + 0xA9]
