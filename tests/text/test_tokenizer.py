"""The tokenizer of a model directory."""

import json
from pathlib import Path

import pytest

from dflash_backend.checkpoints import CheckpointError
from dflash_backend.text.tokenizer import PromptError, Tokenizer
from tests.byte_tokenizer import EOS, START, write_byte_tokenizer


def test_text_survives_encode_and_decode(tokenizer):
    text = "naïve 漢字 🙂\n\ttab"
    assert tokenizer.encode(text) == list(text.encode())
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_eos_ids_come_from_both_configs_and_the_tokenizer_once_each(tokenizer):
    assert tokenizer.eos_token_ids == (7, EOS, 9)


def test_the_chat_template_ends_where_the_answer_begins(tokenizer):
    ids = tokenizer.apply_chat_template([{"role": "u", "content": "hi"}])
    assert ids == [START, *b"u:hi", START, *b"a:"]


def test_special_tokens_are_left_out_unless_wanted(tokenizer):
    ids = [*b"a", EOS, *b"b"]
    assert tokenizer.decode(ids) == "ab"
    assert tokenizer.decode(ids, skip_special_tokens=False) == "a</s>b"


def test_messages_without_a_template_are_the_clients_mistake(tmp_path):
    write_byte_tokenizer(tmp_path, chat=False)
    with pytest.raises(PromptError, match="no chat template; send text_input"):
        Tokenizer.load(tmp_path).apply_chat_template([{"role": "user", "content": "hi"}])


def test_a_template_that_raises_refuses_the_messages(with_template):
    refusing = with_template("{{ raise_exception('system messages are not allowed') }}")
    with pytest.raises(PromptError, match="system messages are not allowed"):
        refusing.render_chat([{"role": "system", "content": "x"}])


def test_a_directory_without_a_tokenizer_says_what_is_missing(tmp_path: Path):
    (tmp_path / "config.json").write_text('{"model_type": "qwen3"}')
    with pytest.raises(CheckpointError, match=r"there is no tokenizer in it; it needs tokenizer\.json"):
        Tokenizer.load(tmp_path)


def test_a_tokenizer_that_needs_code_is_refused_and_the_code_not_run(tmp_path: Path):
    auto_map = {"auto_map": {"AutoTokenizer": ["tokenization.T", None]}, "tokenizer_class": "T"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(auto_map))
    (tmp_path / "tokenizer.model").write_bytes(b"")
    (tmp_path / "tokenization.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')")
    with pytest.raises(CheckpointError, match="code of a checkpoint is not run"):
        Tokenizer.load(tmp_path)
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json"])
@pytest.mark.parametrize("content", ["{", "[]", '{"model": {"type": "Nope"}, "tokenizer_class": 3}', "\udcff"])
def test_a_broken_tokenizer_is_a_sentence(tmp_path: Path, name: str, content: str):
    write_byte_tokenizer(tmp_path)
    (tmp_path / name).write_text(content, errors="surrogateescape")
    with pytest.raises(CheckpointError, match="no tokenizer can be read from it"):
        Tokenizer.load(tmp_path)
