"""Which grammars compile, what is said of the others, and that neither costs much."""

from __future__ import annotations

import json
import time
from concurrent.futures import Future

import numpy as np
import pytest

from checks.byte_tokenizer import EOS, START, write_byte_tokenizer
from dflash_backend.messages import StructuredOutputs
from dflash_backend.structured_output import compiler as compiler_module
from dflash_backend.structured_output.compiler import CACHE_SIZE, LEAST_BYTES, GrammarCompiler, GrammarError
from dflash_backend.structured_output.matcher import BitmaskFiller, MatcherRules
from dflash_backend.structured_output.vocabulary import SpecialTokens, with_ids
from dflash_backend.text.tokenizer import Tokenizer, tokenizer_json


@pytest.fixture(scope="module")
def tokenizer_text(tmp_path_factory) -> str:
    directory = tmp_path_factory.mktemp("model")
    write_byte_tokenizer(directory)
    return tokenizer_json(directory)


@pytest.fixture
def compiler(tokenizer_text) -> GrammarCompiler:
    return GrammarCompiler(lambda: tokenizer_text, 300)


@pytest.fixture(scope="module")
def shared(tokenizer_text):
    """One for tests that do not look at what it keeps: its processes that try grammars are started once."""
    compiler = GrammarCompiler(lambda: tokenizer_text, 300)
    yield compiler
    for vocabulary in compiler._vocabularies.values():
        for trial in vocabulary.trials.values():
            trial.close()


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
        (
            of("json", '{"oneOf": [{"type": "integer"}, {"type": "number"}]}'),
            "oneOf constraints are not supported. Use anyOf, or alternatives that exclude each other",
        ),
        (of("grammar", '# as vLLM has it\nroot ::= "yes" | "no"'), "is in EBNF .*; write it in Lark's notation"),
        (of("grammar", 'start: start "a"'), "allows no text at all"),
        (of("choice", "no list"), "is not understood"),
    ],
)
def test_a_grammar_that_cannot_be_followed_is_refused_with_the_reason(shared, grammar, reason):
    with pytest.raises(GrammarError, match=reason) as error:
        shared.compile(grammar, (EOS,))
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
def test_a_large_grammar_costs_a_fraction_of_a_second(shared, grammar):
    shared.compile(of("regex", "warm up"), (EOS,))
    started = time.process_time()
    assert shared.compile(grammar, (EOS,)).matcher(MatcherRules()).error is None
    assert time.process_time() - started < 2


@pytest.mark.parametrize("text", ["a.b", 'x"y\\z', "two\nlines", "(a|b)*", "a-b & c ~ #/", "é😀", "^$", " ", "<|x|>"])
def test_a_choice_is_taken_letter_by_letter(shared, text):
    matcher = shared.compile(of("choice", [text]), (EOS,)).matcher(MatcherRules())
    assert matcher.legal_drafts([*text.encode(), EOS])[0] == len(text.encode()) + 1


def test_json_may_be_on_one_line_or_indented_and_no_more(shared):
    grammar = of("json", {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]})
    for text, fits in ((b'{"a":1}', True), (b'{ "a" : 1 }', True), (b'{\n  "a": 1\n}', True), (b'{\n\n"a":1}', False)):
        matcher = shared.compile(grammar, (EOS,)).matcher(MatcherRules())
        assert (matcher.legal_drafts([*text])[0] == len(text)) == fits


def test_a_grammar_in_larks_notation_may_have_the_sign_of_ebnf_in_its_text(shared):
    text = "x ::= y"
    matcher = shared.compile(of("grammar", f'start: "{text}"'), (EOS,)).matcher(MatcherRules())
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


def test_grammars_are_kept_as_far_as_their_memory_goes(compiler, monkeypatch):
    small = [compiler.compile(of("regex", letter), (EOS,)) for letter in "abc"]
    assert all(LEAST_BYTES <= each.num_bytes < 200_000 for each in small)
    large = compiler.compile(of("regex", "(.?[a-z]){60}|" * 9 + "([a-z]?x){60}"), (EOS,))
    assert large.num_bytes > small[0].num_bytes + 10_000
    assert compiler._num_cached_bytes == sum(each.num_bytes for each in (*small, large))
    monkeypatch.setattr(compiler_module, "MAX_CACHED_BYTES", large.num_bytes + small[2].num_bytes + 1)
    compiler.compile(of("regex", "c"), (EOS,))
    assert [text[0] for _, text, _ in compiler._recent] == ["(", "c"]
    assert compiler._num_cached_bytes == large.num_bytes + small[2].num_bytes


def test_special_tokens_in_the_text_of_a_grammar_are_text(shared):
    """The tokenizer has `</s>`, which ends answers, and `<s>`."""
    for text in ("x</s>y", "<s>", "</s>"):
        for grammar in (
            of("choice", [text]),
            of("regex", text.replace("/", "\\/")),
            of("grammar", f"start: {json.dumps(text)}"),
        ):
            matcher = shared.compile(grammar, (EOS,)).matcher(MatcherRules())
            assert forced(matcher) == [*text.encode(), EOS]
    schema = {"type": "object", "properties": {"</s>": {"const": "<s>"}}, "required": ["</s>"]}
    matcher = shared.compile(of("json", {**schema, "additionalProperties": False}), (EOS,)).matcher(MatcherRules())
    assert bytes(forced(matcher)[:-1]).decode() == '{"</s>":"<s>"}'


def forced(matcher) -> list[int]:
    """The tokens of an answer that takes the least of those that are allowed."""
    filler, tokens = BitmaskFiller(300, 1), []
    while EOS not in tokens:
        masks, _ = filler.fill([(matcher, [])])
        assert matcher.error is None
        bits = np.unpackbits(masks.view(np.uint8)[0], bitorder="little")
        # White space between tokens of JSON.
        tokens.append(next(int(i) for i in np.flatnonzero(bits) if i not in (10, 13, 32)))
        matcher.advance(tokens[-1:])
    return tokens


def test_lark_means_a_special_token_by_its_name_or_id(shared):
    for mark in ("<s>", f"<[{START}]>"):
        matcher = shared.compile(of("grammar", f'start: "a" {mark} "b"'), (EOS,)).matcher(MatcherRules())
        assert forced(matcher) == [97, START, 98, EOS]


@pytest.mark.parametrize("mark", ["</s>", f"<[{EOS}]>", f"<[3,{EOS - 2}-{EOS}]>"])
def test_lark_that_names_the_end_is_refused(shared, mark):
    with pytest.raises(GrammarError, match="a token that ends the answer. Leave it out"):
        shared.compile(of("grammar", f'start: "a" {mark} "b"'), (EOS,))


def test_an_end_that_the_grammar_does_not_accept_ends_no_answer(shared):
    matcher = shared.compile(of("grammar", 'start: "a" <[*]> "b"'), (EOS,)).matcher(MatcherRules())
    matcher.advance([97, EOS])
    assert matcher.error is not None
    assert "names a token that ends the answer, where it goes on" in matcher.error
    assert matcher.status == "INVALID_ARGUMENT"


def test_a_visible_mark_of_a_rule_is_its_token(tmp_path):
    """As Qwen3's `<tool_call>`, which is part of an answer's text."""
    write_byte_tokenizer(tmp_path)
    whole = json.loads(tokenizer_json(tmp_path))
    mark = {**whole["added_tokens"][0], "id": 258, "content": "<tool_call>", "special": False}
    whole["added_tokens"].append(mark)
    compiler = GrammarCompiler(lambda: json.dumps(whole), 300)
    matcher = compiler.compile(of("grammar", 'start: "<tool_call>" "x" T\nT: "<s>"'), (EOS,)).matcher(MatcherRules())
    assert forced(matcher) == [258, *b"x<s>", EOS]


@pytest.mark.parametrize(
    ("grammar", "words"),
    [
        (of("regex", "a?" * 501), "501 optional or repeated parts in 'regex'; allowed: 500"),
        (of("regex", "a" * 4097), "of 4097 characters in 'regex'; allowed: 4096"),
        (of("json", {"items": {"pattern": "a?" * 501}}), "501 optional or repeated parts in a 'pattern'; allowed: 500"),
        (of("json", {"patternProperties": {"a{0,1}" * 501: {}}}), "501 .* in a name of 'patternProperties'"),
        (of("grammar", "start: T\nT: /" + "(a|)" * 501 + "/"), "501 .* in an expression between slashes"),
        (of("grammar", "start: T\nT: " + '"a"? ' * 501), "501 .* in the terminal T; allowed: 500"),
        (of("grammar", 'start: T9\nT0: "a"?\n' + "".join(f"T{i}: T{i - 1} T{i - 1}\n" for i in range(1, 10))), "512 "),
        (of("grammar", 'start: %json {"pattern": "' + "a*" * 501 + '"}'), "501 .* in a 'pattern'"),
        (
            of("json", {"anyOf": [{"pattern": f"{i}" + "b?" * 400} for i in range(10)]}),
            "4000 optional or repeated parts in its 10 regular expressions; allowed: 1000000 as the sum",
        ),
    ],
)
def test_an_expression_that_is_too_large_is_refused_before_it_is_compiled(shared, grammar, words):
    started = time.process_time()
    with pytest.raises(GrammarError, match=words):
        shared.compile(grammar, (EOS,))
    assert time.process_time() - started < 0.5


def test_an_error_tells_what_the_line_above_says_that_it_is_about(shared):
    lark = 'start: "x" a\n# about the parameters of f\na: %json {"uniqueItems": true}\n'
    with pytest.raises(GrammarError) as raised:
        shared.compile(of("grammar", lark), (EOS,))
    assert str(raised.value) == (
        'is wrong or too large: the parameters of f: failed to compile JSON schema: Unimplemented keys: ["uniqueItems"]'
    )


def test_the_error_of_a_grammar_is_that_of_its_future(compiler):
    future: Future = compiler.submit(of("regex", "("), (EOS,))
    assert isinstance(future.exception(10), GrammarError)


def test_a_grammar_that_takes_too_long_is_given_up_and_not_tried_again(tokenizer_text, monkeypatch):
    monkeypatch.setattr(compiler_module, "TIME_LIMIT_S", 0.1)
    compiler = GrammarCompiler(lambda: tokenizer_text, 300)
    endless = of("grammar", "start: A\nA: " + " & ".join(f"/.*{i}.*/" for i in range(200)))
    slow = compiler.submit(endless, (EOS,))
    assert compiler.submit(of("regex", "not behind it"), (EOS,)).result(20) is not None
    with pytest.raises(GrammarError, match="takes longer than 0.1 s of processor time to compile"):
        slow.result(60)
    started = time.process_time()
    with pytest.raises(GrammarError, match="takes longer than 0.1 s of processor time to compile"):
        compiler.submit(endless, (EOS,)).result(1)
    assert time.process_time() - started < 0.5
    for trial in compiler._vocabularies[(EOS,)].trials.values():
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


def test_names_of_special_tokens_get_their_ids_in_one_go() -> None:
    special = SpecialTokens({"<s>": 1}, {"<t>": 2})
    assert with_ids('start: <s> "<t>" x\nx: <s> "<s>"\n', special) == 'start: <[1]> <[2]> x\nx: <[1]> "<s>"\n'

    # For each name all the text would be copied.
    grammar, rest = "start:" + " <s>" * 1000, "\n// " + "x" * 4_000_000
    started = time.thread_time()
    assert with_ids(grammar + rest, special) == "start:" + " <[1]>" * 1000 + rest
    assert time.thread_time() - started < 0.2
