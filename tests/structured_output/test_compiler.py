"""Which grammars compile, what is said of the others, and that neither costs much."""

from __future__ import annotations

import json
import time
from concurrent.futures import Future

import pytest

from dflash_backend.messages import StructuredOutputs
from dflash_backend.structured_output import compiler as compiler_module
from dflash_backend.structured_output.compiler import CACHE_SIZE, GrammarCompiler, GrammarError
from dflash_backend.structured_output.matcher import MatcherRules
from dflash_backend.text.tokenizer import Tokenizer, tokenizer_json
from tests.byte_tokenizer import EOS, write_byte_tokenizer


@pytest.fixture(scope="module")
def tokenizer_text(tmp_path_factory) -> str:
    directory = tmp_path_factory.mktemp("model")
    write_byte_tokenizer(directory)
    return tokenizer_json(directory)


@pytest.fixture
def compiler(tokenizer_text) -> GrammarCompiler:
    return GrammarCompiler(lambda: tokenizer_text, 300)


def nested(depth: int) -> dict:
    schema: dict = {"type": "integer"}
    for _ in range(depth):
        schema = {"type": "object", "properties": {"a": schema}, "required": ["a"]}
    return schema


def of(kind, value) -> StructuredOutputs:
    return StructuredOutputs(kind, value if isinstance(value, str) else json.dumps(value))


ENDLESS = {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}}


@pytest.mark.parametrize(
    ("grammar", "reason"),
    [
        (of("json", {"type": "foo"}), "Invalid type: foo"),
        (of("json", {"not": {"type": "string"}}), r'Unimplemented keys: \["not"\]'),
        (of("json", {"type": "array", "uniqueItems": True}), r'Unimplemented keys: \["uniqueItems"\]'),
        (of("json", {"type": "string", "format": "nope"}), "Unknown format: nope"),
        (of("json", {"$ref": "#/nowhere"}), "'/nowhere' does not exist"),
        (of("json", {"type": "integer", "minimum": 5, "maximum": 3}), "minimum .5. is greater than maximum"),
        (of("json", {"type": "string", "pattern": "(?=a)b"}), "look-around"),
        (of("json", {"enum": []}), "anyOf is empty"),
        (of("json", ENDLESS), "allows no text at all"),
        (
            of("json", {"type": "object", "properties": {f"p{i}": {"type": "string"} for i in range(20_000)}}),
            "too large",
        ),
        (of("regex", "("), "unclosed group"),
        (of("regex", "(" * 2000 + "a" + ")" * 2000), "is wrong or too large"),
        (of("grammar", "start: foo"), "unknown name"),
        (of("grammar", "hello"), "is wrong or too large"),
        (of("grammar", '# as vLLM has it\nroot ::= "yes" | "no"'), "is in EBNF .*; write it in Lark's notation"),
        (of("grammar", 'start: start "a"'), "allows no text at all"),
        (of("choice", "no list"), "is not understood"),
    ],
)
def test_a_grammar_that_cannot_be_followed_is_refused_with_the_reason(compiler, grammar, reason):
    with pytest.raises(GrammarError, match=reason) as error:
        compiler.compile(grammar, (EOS,))
    assert len(str(error.value)) < 700


@pytest.mark.parametrize(
    "grammar",
    [
        of("json", nested(40)),
        of("json", {"$ref": "#/$defs/a", "$defs": {"a": {"type": "array", "items": {"$ref": "#/$defs/a"}}}}),
        of("json", {"enum": [f"choice {i}" for i in range(10_000)]}),
        of("choice", [f"choice {i * 7919} of many" for i in range(10_000)]),
        of("regex", "(a{1,1000}){1,1000}"),
        of("regex", "(x+x+)+y"),
        of("regex", "(.*a){30}"),
        of("regex", "[a-z]{100000}"),
        of("json", {"type": "string", "maxLength": 100_000_000}),
    ],
)
def test_a_large_grammar_costs_a_fraction_of_a_second(compiler, grammar):
    compiler.compile(of("regex", "warm up"), (EOS,))
    started = time.process_time()
    assert compiler.compile(grammar, (EOS,)).matcher(MatcherRules()).error is None
    assert time.process_time() - started < 2


@pytest.mark.parametrize("text", ["a.b", 'x"y\\z', "two\nlines", "(a|b)*", "a-b & c ~ #/", "é😀", "^$", " ", "<|x|>"])
def test_a_choice_is_taken_letter_by_letter(compiler, text):
    matcher = compiler.compile(of("choice", [text]), (EOS,)).matcher(MatcherRules())
    assert matcher.legal_drafts([*text.encode(), EOS])[0] == len(text.encode()) + 1


def test_json_may_be_on_one_line_or_indented_and_no_more(compiler):
    grammar = of("json", {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]})
    for text, fits in ((b'{"a":1}', True), (b'{ "a" : 1 }', True), (b'{\n  "a": 1\n}', True), (b'{\n\n"a":1}', False)):
        matcher = compiler.compile(grammar, (EOS,)).matcher(MatcherRules())
        assert (matcher.legal_drafts([*text])[0] == len(text)) == fits


def test_a_grammar_in_larks_notation_may_have_the_sign_of_ebnf_in_its_text(compiler):
    text = "x ::= y"
    matcher = compiler.compile(of("grammar", f'start: "{text}"'), (EOS,)).matcher(MatcherRules())
    assert matcher.legal_drafts([*text.encode(), EOS])[0] == len(text) + 1


def test_the_same_grammar_is_compiled_once(compiler):
    first = compiler.submit(of("regex", "a+"), (EOS,)).result(10)
    again = compiler.submit(of("regex", "a+"), (EOS,))
    assert again.done()
    assert again.result() is first
    assert compiler.num_compiled == 1
    assert compiler.compile(of("regex", "a+"), (EOS, 7)) is not first


def test_a_grammar_of_a_request_outlives_the_cache(compiler):
    kept = compiler.compile(of("regex", "kept"), (EOS,))
    for i in range(CACHE_SIZE + 1):
        compiler.compile(of("regex", f"other {i}"), (EOS,))
    assert compiler.compile(of("regex", "kept"), (EOS,)) is kept
    count = compiler.num_compiled
    compiler.compile(of("regex", "other 1"), (EOS,))
    assert compiler.num_compiled == count + 1


def test_long_grammars_are_kept_as_far_as_their_text_goes(compiler, monkeypatch):
    monkeypatch.setattr(compiler_module, "MAX_CACHED_TEXT", 100)
    for letter in "abcb":
        compiler.compile(of("regex", 40 * letter), (EOS,))
    assert compiler.num_compiled == 3
    assert [text[0] for _, text, _ in compiler._recent] == ["c", "b"]
    compiler.compile(of("regex", "d"), (EOS,))
    compiler.compile(of("regex", 59 * "a"), (EOS,))
    assert [text[0] for _, text, _ in compiler._recent] == ["b", "d", "a"]


def test_the_error_of_a_grammar_is_that_of_its_future(compiler):
    future: Future = compiler.submit(of("regex", "("), (EOS,))
    assert isinstance(future.exception(10), GrammarError)


def test_a_grammar_that_takes_too_long_is_given_up_and_not_tried_again(tokenizer_text, monkeypatch):
    monkeypatch.setattr(compiler_module, "TIME_LIMIT_S", 1.0)
    compiler = GrammarCompiler(lambda: tokenizer_text, 300)
    endless = of("grammar", "start: A\nA: " + " & ".join(f"/.*{i}.*/" for i in range(200)))
    slow = compiler.submit(endless, (EOS,))
    assert compiler.submit(of("regex", "not behind it"), (EOS,)).result(20) is not None
    for future in (slow, compiler.submit(endless, (EOS,))):
        with pytest.raises(GrammarError, match="takes longer than 1 s to compile"):
            future.result(60)
    # The next one is tried by a process of its own.
    assert compiler.compile(of("grammar", 'start: "a"'), (EOS,)) is not None
    (_, trial) = compiler._tokenizers[(EOS,)]
    trial.close()


def test_a_target_without_an_end_of_sequence_token_can_follow_no_grammar(compiler):
    with pytest.raises(GrammarError, match="no end-of-sequence token"):
        compiler.compile(of("regex", "a"), ())


def test_a_tokenizer_that_cannot_be_read_is_named():
    def load() -> str:
        raise ValueError("no such file")

    with pytest.raises(GrammarError, match="llguidance cannot read: no such file"):
        GrammarCompiler(load, 300).compile(of("regex", "a"), (EOS,))
    with pytest.raises(GrammarError, match="llguidance cannot read"):
        GrammarCompiler(lambda: "{}", 300).compile(of("regex", "a"), (EOS,))


def test_a_tokenizer_without_its_file_is_read_from_the_others(tmp_path):
    write_byte_tokenizer(tmp_path)
    whole = tokenizer_json(tmp_path)
    assert json.loads(whole)["model"]["vocab"] == json.loads(Tokenizer.load(tmp_path)._fast.to_str())["model"]["vocab"]
    (tmp_path / "tokenizer.json").unlink()
    with pytest.raises(ValueError, match="tokenizer"):
        tokenizer_json(tmp_path)
