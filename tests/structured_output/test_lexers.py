"""A grammar does not wear out: states that earlier answers explored cost later ones nothing."""

from __future__ import annotations

import json
import math
import random
import time

import pytest

from checks.byte_tokenizer import EOS, write_byte_tokenizer
from dflash_backend.messages import StructuredOutputs
from dflash_backend.structured_output import bounds, lexers
from dflash_backend.structured_output.compiler import CompiledGrammar, GrammarCompiler
from dflash_backend.structured_output.matcher import BitmaskFiller, GrammarMatcher, MatcherRules
from dflash_backend.text.tokenizer import tokenizer_json

VOCAB = 300
MAX_STATES = 1500
# All together need several times as many states as one lexer may have.
NAMES = ["".join(random.Random(i).choices("abcdefghijklmnop", k=30)) for i in range(300)]


@pytest.fixture
def compiler(tmp_path, monkeypatch) -> GrammarCompiler:
    write_byte_tokenizer(tmp_path)
    monkeypatch.setattr(bounds, "MAX_STATES", MAX_STATES)
    return GrammarCompiler(lambda: tokenizer_json(tmp_path), VOCAB)


@pytest.fixture(scope="module")
def filler() -> BitmaskFiller:
    return BitmaskFiller(VOCAB, num_threads=1)


def names(compiler: GrammarCompiler) -> CompiledGrammar:
    return compiler.compile(StructuredOutputs("choice", json.dumps(NAMES)), (EOS,))


def answer(grammar: CompiledGrammar, text: str, filler: BitmaskFiller | None) -> GrammarMatcher:
    """An answer token by token, with masks or without."""
    matcher = grammar.matcher(MatcherRules())
    for token in text.encode():
        if filler is not None:
            filler.fill([(matcher, [token])])
        matcher.advance([token])
    return matcher


@pytest.mark.parametrize("with_masks", [True, False])
def test_an_answer_goes_on_where_others_have_used_the_states(compiler, filler, monkeypatch, with_masks):
    monkeypatch.setattr(lexers, "WORN_TOKENS", math.inf)
    grammar = names(compiler)
    first = grammar._lexers.latest
    for name in NAMES:
        assert answer(grammar, name, filler if with_masks else None).error is None
    assert grammar._lexers.latest is not first, "one lexer has no space for all"


def test_masks_are_whole_after_the_lexer_was_replaced(compiler, filler, monkeypatch):
    """Of all drafts, though some were not found legal any more."""
    monkeypatch.setattr(lexers, "WORN_TOKENS", math.inf)
    grammar = names(compiler)
    for name in NAMES:
        matcher = grammar.matcher(MatcherRules())
        drafts = list(name[:20].encode())
        masks, counts = filler.fill([(matcher, drafts)])
        assert matcher.error is None
        assert counts == [len(drafts) + 1] == [len(masks)]


def test_a_worn_lexer_is_replaced_beside_the_answers(compiler, filler, monkeypatch):
    monkeypatch.setattr(lexers, "WORN_TOKENS", 2 * len(NAMES[0]))
    monkeypatch.setattr(lexers, "MAX_LOAD", math.inf)
    grammar = names(compiler)
    first, own = grammar._lexers.latest, grammar.num_bytes
    for name in NAMES[:2]:
        answer(grammar, name, filler)
    assert grammar.num_bytes == own + 60 * lexers.BYTES_PER_TOKEN
    assert compiler._num_cached_bytes == grammar.num_bytes
    assert answer(grammar, NAMES[2], filler).error is None, "with the one that is there"
    deadline = time.monotonic() + 10
    while grammar._lexers.latest is first and time.monotonic() < deadline:
        time.sleep(0.01)
    assert grammar._lexers.latest is not first
    assert grammar.num_bytes == own


def test_no_step_waits_for_a_grammar_that_takes_long_to_compile(compiler, monkeypatch):
    monkeypatch.setattr(lexers, "WORN_TOKENS", math.inf)
    monkeypatch.setattr(lexers, "IN_STEP_S", 0.0)
    grammar = names(compiler)
    calls = []
    grammar._lexers._submit = calls.append
    failed = next(each for name in NAMES if (each := answer(grammar, name, None)).error is not None)
    assert failed.status == "UNAVAILABLE"
    assert "is being compiled again; try again later" in failed.error
    (call,) = calls
    call()
    assert answer(grammar, NAMES[-1], None).error is None


def test_a_grammar_that_needs_too_many_states_by_itself_fails(compiler, filler):
    grammar = compiler.compile(StructuredOutputs("regex", "(a|b)*a(a|b){12}"), (EOS,))
    text = "".join(random.Random(0).choices("ab", k=2 * MAX_STATES))
    first = grammar._lexers.latest
    matcher = answer(grammar, text, filler)
    assert "too many states" in matcher.error
    assert matcher.status == "INVALID_ARGUMENT"
    assert grammar._lexers.latest is first
