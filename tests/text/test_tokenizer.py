"""The tokenizer of a model directory."""

import itertools
import json
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Regex, models, pre_tokenizers
from tokenizers import Tokenizer as FastTokenizer
from transformers import AutoConfig, AutoTokenizer, PreTrainedTokenizerFast

from checks.byte_tokenizer import EOS, START, write_byte_tokenizer
from dflash_backend.checkpoints import CheckpointError
from dflash_backend.text import time_limit as time_limits
from dflash_backend.text.prompt_size import PromptTooLong, check_fits, most_chars
from dflash_backend.text.time_limit import OutOfTime, time_limit
from dflash_backend.text.tokenizer import InputError, PromptError, Tokenizer, has_any_power
from tests.support.scale import by_night
from tests.support.sentencepiece_tokenizer import ID, write_sentencepiece_tokenizer


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


# transformers imports what a model needs where it knows the family: seconds.
FAMILIES = (
    *map(by_night, ("llama", "mistral", "qwen2", "qwen3", "gemma3_text", "gpt_oss", "deepseek_v3")),
    "unheard_of",
)
CLASSES = ("PreTrainedTokenizerFast", "TokenizersBackend", "LlamaTokenizerFast", "Qwen2Tokenizer", "GemmaTokenizer")


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("named", [*CLASSES, None])
def test_the_tokenizer_is_that_of_transformers(tmp_path: Path, family: str, named: str | None) -> None:
    write_byte_tokenizer(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": family, "eos_token_id": EOS}))
    settings = json.loads((tmp_path / "tokenizer_config.json").read_text()) | {"tokenizer_class": named}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    own = AutoTokenizer.from_pretrained(str(tmp_path), local_files_only=True)
    loaded = Tokenizer.load(tmp_path)
    assert type(loaded._template) is type(own)
    assert loaded._fast.to_str() == Tokenizer(own, ())._fast.to_str()


def test_a_tokenizer_that_names_its_class_needs_no_config_of_a_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_byte_tokenizer(tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    monkeypatch.setattr(AutoConfig, "from_pretrained", lambda *_, **__: pytest.fail("transformers makes a config"))
    Tokenizer.load(tmp_path)


@pytest.fixture(scope="module")
def failing() -> Tokenizer:
    """Its regular expression goes past the limit of tries of Rust's tokenizers, which then panics."""
    fast = FastTokenizer(models.BPE(vocab={"a": 0}, merges=[]))
    fast.pre_tokenizer = pre_tokenizers.Split(Regex("(a+)+(a+)+(a+)+$b"), "isolated", False)
    return Tokenizer(PreTrainedTokenizerFast(tokenizer_object=fast, chat_template="{{ messages[0].content }}"), ())


def test_a_tokenizer_that_panics_is_the_texts_fault(failing: Tokenizer) -> None:
    with pytest.raises(InputError, match="cannot turn this text into tokens: it failed with PanicException") as told:
        failing.encode("a" * 30)
    assert "/" not in str(told.value)
    assert told.value.__suppress_context__
    with pytest.raises(InputError, match="cannot turn these tokens into text"):
        failing.decode([2**40])


def test_an_interrupt_is_no_failure_of_the_tokenizer(failing: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    class Interrupted:
        def decode(self, *given: object, **more: object) -> str:
            raise KeyboardInterrupt

    monkeypatch.setattr(failing, "_fast", Interrupted())
    with pytest.raises(KeyboardInterrupt):
        failing.decode([0])


def test_a_prompt_may_have_some_characters_for_each_of_its_tokens(tokenizer: Tokenizer) -> None:
    tokenizer = Tokenizer(tokenizer._template, ())
    tokenizer.max_token_chars = 128
    assert most_chars(tokenizer, 100) == 100 * 128, "a short prompt may be of the longest tokens"
    assert most_chars(tokenizer, 131_072) == 65_536 + 16 * 131_072
    with pytest.raises(PromptTooLong, match=r"10000000 characters, but .* at most 2162688 characters are allowed"):
        check_fits(" " * 10_000_000, tokenizer, 131_072)


LOOP, END = "{% for i in range(99999) %}", "{% endfor %}"
ENDLESS = LOOP * 3 + END * 3


@pytest.mark.parametrize(("template", "error"), [("{{ 'x' * 10**15 }}", "MemoryError"), (ENDLESS, "OutOfTime")])
def test_a_template_that_takes_all_memory_or_time_refuses_the_messages(
    with_template, monkeypatch: pytest.MonkeyPatch, template: str, error: str
) -> None:
    monkeypatch.setattr("dflash_backend.text.tokenizer.TEMPLATE_LIMIT_S", 0.1)
    made = with_template(template)
    with pytest.raises(PromptError, match=f"the chat template refuses these messages: {error}"):
        made.render_chat([{"role": "user", "content": "hi"}])
    # Also with parts, before which the template is tried.
    with pytest.raises(PromptError, match=error):
        made.render_chat([{"role": "user", "content": [{"type": "text", "text": "hi"}]}])


@pytest.mark.parametrize(
    "template",
    [
        "{{ 9 ** (9 ** (9 ** 9)) }}",
        "{% set ns = namespace(x=7) %}{% for i in range(40) %}{% set ns.x = ns.x ** 2 %}{% endfor %}",
        "{{ 2 ** 99999999999 }}",
        "{{ 'x' ** 2 }}",
        "{% generation %}{{ messages[0].content | length ** 9 }}{% endgeneration %}",
        "{% for i in messages %}{% break %}{{ i.x(*[1], **{'a': 2 ** i.n}) }}{% endfor %}",
    ],
)
def test_a_power_that_no_time_limit_would_end_is_found(template: str) -> None:
    assert has_any_power(template)


def test_a_power_is_refused_before_it_is_computed(with_template) -> None:
    """A single one is a call of C, during which no other thread runs."""
    made = with_template("{{ (3 ** 999999) % 7 }}")
    with pytest.raises(PromptError, match="refuses these messages: it computes a power, which may take any time"):
        made.render_chat([{"role": "user", "content": "hi"}])
    assert not made._takes_parts
    made._template.chat_template = {"default": "hi", "tool_use": "{{ (3 ** 999999) % 7 }}"}
    with pytest.raises(PromptError, match="computes a power"):
        made.render_chat([{"role": "user", "content": "hi"}], chat_template="{{ 3 ** messages | length }}")


def test_powers_of_small_numbers_are_computed(with_template) -> None:
    text = "{% generation %}{{ 2 ** 10 }} {{ messages[0].content }} ** {% endgeneration %}"
    made = with_template(text + "{{ f(**{}) if 0 }}")
    assert made.render_chat([{"role": "user", "content": "hi"}]).text == "1024 hi ** "


def test_only_the_time_that_a_thread_computes_is_limited() -> None:
    with time_limit(0.05):
        threading.Event().wait(0.2)
    for _ in range(200):
        with time_limit(0.05):
            pass
    with pytest.raises(OutOfTime), time_limit(0.02):
        all(True for _ in itertools.repeat(None))


PROFILED = """
import sys
from dflash_backend.text.time_limit import time_limit
with time_limit(1.0):
    pass
calls = []
sys.setprofile(lambda frame, event, arg: calls.append(event))
(lambda: None)()
sys.setprofile(None)
print(calls.count("call"))
"""


def test_a_time_limit_leaves_the_interpreter_as_it_was() -> None:
    """An error that is taken back would have CPython 3.11 never enter a function that is profiled."""
    command, root = [sys.executable, "-c", PROFILED], Path(__file__).parents[2]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, check=False, timeout=20)
    assert (done.stdout, done.returncode) == ("1\n", 0), done.stderr


def test_an_error_that_was_sent_as_its_block_ended_arrives_there_and_no_later(monkeypatch: pytest.MonkeyPatch) -> None:
    def remove(block: Any) -> None:
        time_limits._raise_in(block.thread, OutOfTime)

    monkeypatch.setattr(time_limits._WATCH, "remove", remove)
    for _ in range(3):
        with pytest.raises(OutOfTime), time_limit(100.0):
            pass
        sum(1 for _ in range(1000))
    time_limits._WATCH._blocks.clear()


@pytest.mark.parametrize("name", ["reasoning", "reasoning_content", "thinking"])
@pytest.mark.parametrize("read", ["reasoning", "reasoning_content", "thinking"])
def test_reasoning_has_the_name_that_the_template_reads(with_template, name: str, read: str) -> None:
    made = with_template("{% for m in messages %}[{{ m." + read + " or '' }}]{{ m.content }}{% endfor %}")
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b", name: "Hm.", "x": 1}]
    assert made.render_chat(messages).text == "[]a[Hm.]b"


def test_the_bytes_of_a_token_are_its_own(tokenizer: Tokenizer, tmp_path: Path) -> None:
    assert [tokenizer.token_bytes(byte) for byte in (0, 32, 97, 0xE4, 255)] == [b"\0", b" ", b"a", b"\xe4", b"\xff"]
    assert [tokenizer.token_bytes(token_id) for token_id in (EOS, START, 9999)] == [None, None, None]
    write_sentencepiece_tokenizer(tmp_path)
    llama = Tokenizer.load(tmp_path)
    found = [llama.token_bytes(ID[piece]) for piece in ("<0xE4>", "▁Hello", "▁", "▁▁", "東", ",", "<s>")]
    assert found == [b"\xe4", b" Hello", b" ", b"  ", "東".encode(), b",", None]
