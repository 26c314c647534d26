"""The tokenizer of a model directory."""

from pathlib import Path

import pytest

from dflash_backend.checkpoints.errors import CheckpointError
from dflash_backend.frontend.tokenizer import PromptError, Tokenizer
from tests.frontend.conftest import EOS, START, write_byte_tokenizer


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


def test_a_template_that_raises_refuses_the_messages(tmp_path):
    write_byte_tokenizer(tmp_path)
    refusing = Tokenizer.load(tmp_path)
    refusing._template.chat_template = "{{ raise_exception('system messages are not allowed') }}"
    with pytest.raises(PromptError, match="system messages are not allowed"):
        refusing.render_chat([{"role": "system", "content": "x"}])


def test_a_directory_without_a_tokenizer_says_what_is_missing(tmp_path: Path):
    with pytest.raises(CheckpointError, match=r"no tokenizer can be read.*tokenizer\.json"):
        Tokenizer.load(tmp_path)
