"""Masks along drafts are those of the tokens before each position, and a matcher advances by accepted tokens only."""

from __future__ import annotations

import itertools
import json
import random
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer as FastTokenizer

from checks.byte_tokenizer import EOS, write_byte_tokenizer
from dflash_backend.messages import StructuredOutputs
from dflash_backend.structured_output import matcher as matcher_module
from dflash_backend.structured_output.compiler import GrammarCompiler
from dflash_backend.structured_output.matcher import (
    ANSWER_BYTES,
    SLOW_LIMIT_S,
    USUAL_S,
    BitmaskFiller,
    GrammarMatcher,
    MatcherRules,
)
from dflash_backend.text.tokenizer import tokenizer_json

DEMO_TARGET = Path(__file__).parents[2] / "demo" / "pair" / "target"
VOCAB = 300  # a target's vocabulary may be larger than its tokenizer's
OTHER_EOS = 257
OBJECT = '{"type":"object","properties":{"a":{"type":"integer"},"b":{"enum":["x","yz"]}},"required":["a"]}'
GRAMMARS = [
    StructuredOutputs("json", OBJECT),
    StructuredOutputs("regex", "[a-c]{1,3}(foo|bar)?"),
    StructuredOutputs("choice", '["yes","no","no way"]'),
    StructuredOutputs("grammar", 'start: "a" start "b" | "c"'),
]
END = list(b"</t>")


@pytest.fixture(scope="module")
def compiler(tmp_path_factory) -> GrammarCompiler:
    directory = tmp_path_factory.mktemp("model")
    write_byte_tokenizer(directory)
    return GrammarCompiler(lambda: tokenizer_json(directory), VOCAB)


@pytest.fixture(scope="module")
def filler() -> BitmaskFiller:
    return BitmaskFiller(VOCAB, num_threads=2)


def matcher_of(compiler: GrammarCompiler, grammar: StructuredOutputs, text: bytes = b"", **rules) -> GrammarMatcher:
    matcher = compiler.compile(grammar, (EOS, OTHER_EOS)).matcher(MatcherRules(**rules))
    matcher.advance(list(text))
    return matcher


def allowed(mask: np.ndarray) -> set[int]:
    return set(np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little")[:VOCAB]).tolist())


def allowed_by(filler: BitmaskFiller, matcher: GrammarMatcher, drafts: list[int]) -> list[set[int]]:
    masks, counts = filler.fill([(matcher, drafts)])
    assert counts == [len(masks)]
    return [allowed(mask) for mask in masks]


@pytest.mark.parametrize("grammar", GRAMMARS, ids=lambda grammar: grammar.kind)
def test_each_mask_is_that_of_the_tokens_before_its_position(compiler, filler, grammar):
    rng = random.Random(0)
    for _ in range(30):
        matcher, history = matcher_of(compiler, grammar), []
        for _ in range(8):
            drafts = []
            for _ in range(rng.randint(0, 5)):
                known = matcher_of(compiler, grammar, bytes(history + drafts))
                legal = sorted(allowed_by(filler, known, [])[0] - {EOS, OTHER_EOS})
                if not legal:
                    break
                drafts.append(rng.choice(legal))
            num_legal = len(drafts)
            if rng.random() < 0.5:
                drafts += [rng.randrange(256) for _ in range(2)]
            found = allowed_by(filler, matcher, drafts)
            for i, tokens in enumerate(found):
                known = matcher_of(compiler, grammar, bytes(history + drafts[:i]))
                assert tokens == allowed_by(filler, known, [])[0]
            assert len(found) > num_legal
            assert matcher.legal_drafts(drafts)[0] == len(found) - 1
            accepted = drafts[: rng.randint(0, len(found) - 1)]
            token = rng.choice(sorted(found[len(accepted)]))
            matcher.advance([*accepted, token])
            history += [*accepted, token]
            assert matcher.error is None
            if token in (EOS, OTHER_EOS):
                break


def test_the_end_is_allowed_exactly_when_the_grammar_accepts(compiler, filler):
    for text, accepts in ((b"", False), (b"n", False), (b"no", True), (b"no ", False), (b"yes", True)):
        found = allowed_by(filler, matcher_of(compiler, GRAMMARS[2], text), [])[0]
        assert ({EOS, OTHER_EOS} <= found) == accepts
        assert accepts or not found & {EOS, OTHER_EOS}
    assert allowed_by(filler, matcher_of(compiler, GRAMMARS[2], b"yes"), [])[0] == {EOS, OTHER_EOS}


def test_a_draft_of_the_end_is_legal_where_the_grammar_accepts(compiler):
    matcher = matcher_of(compiler, GRAMMARS[2])
    assert matcher.legal_drafts([*b"no", EOS, 7])[0] == 3
    assert matcher.legal_drafts([*b"n", EOS, 7])[0] == 1
    assert matcher.legal_drafts([EOS])[0] == 0
    assert matcher_of(compiler, GRAMMARS[2], b"no").legal_drafts([OTHER_EOS])[0] == 1
    # Here nothing but the end may follow.
    assert matcher_of(compiler, GRAMMARS[2], b"yes").legal_drafts([EOS, 7]) == (1, [])


def test_nothing_is_masked_behind_the_end(compiler, filler):
    matcher = matcher_of(compiler, GRAMMARS[2], b"no")
    matcher.advance([EOS, 5, 6])
    assert allowed_by(filler, matcher, [1, 2]) == []
    assert matcher.legal_drafts([1, 2])[0] == 0
    assert matcher.error is None


def test_forced_tokens_follow_legal_drafts(compiler):
    matcher = matcher_of(compiler, StructuredOutputs("regex", "[ab]foobar"))
    assert matcher.legal_drafts([]) == (0, [])
    assert matcher.legal_drafts([*b"z"]) == (0, [])
    assert matcher.legal_drafts([*b"azzzz"]) == (1, [*b"foob"])
    assert matcher.legal_drafts([*b"afozzzzzzzzz"]) == (3, [*b"obar"])
    assert matcher.legal_drafts([*b"afo", EOS, 7]) == (3, [*b"ob"])
    assert matcher.legal_drafts([*b"afo"]) == (3, [])
    assert matcher.legal_drafts([*b"afoobar", EOS, 7]) == (8, [])


def test_the_grammar_begins_behind_the_reasoning_also_within_a_block(compiler, filler):
    matcher = matcher_of(compiler, GRAMMARS[2], end_of_reasoning=tuple(END))
    assert allowed_by(filler, matcher, [*b"hm"]) == [set(range(VOCAB)) - {EOS, OTHER_EOS}] * 3
    matcher.advance(b"so </")
    found = allowed_by(filler, matcher, [*b"t>no", 7])
    assert found[:2] == [set(range(VOCAB)) - {EOS, OTHER_EOS}] * 2
    assert found[2:] == [{*b"yn"}, {*b"o"}, {*b" ", EOS, OTHER_EOS}]
    assert matcher.legal_drafts([*b"t>no", 7])[0] == 4
    assert matcher.legal_drafts([*b"t>no", EOS])[0] == 5
    assert matcher.legal_drafts([*b"hm", EOS, 5])[0] == 2
    matcher.advance(b"t>n")
    assert allowed_by(filler, matcher, []) == [{*b"o"}]


def test_the_reasoning_ends_only_at_its_whole_end(compiler, filler):
    matcher = matcher_of(compiler, GRAMMARS[2], b"</t</t", end_of_reasoning=tuple(END))
    assert len(allowed_by(filler, matcher, [])[0]) == VOCAB - 2
    matcher.advance(b">")
    assert allowed_by(filler, matcher, [])[0] == {*b"yn"}


def test_ignore_eos_hides_the_end_until_nothing_else_is_left(compiler, filler):
    assert allowed_by(filler, matcher_of(compiler, GRAMMARS[2], b"no", ignore_eos=True), [])[0] == {*b" "}
    assert allowed_by(filler, matcher_of(compiler, GRAMMARS[2], b"yes", ignore_eos=True), [])[0] == {EOS, OTHER_EOS}


def test_min_tokens_hides_what_ends_the_answer_until_nothing_else_is_left(compiler, filler):
    letters = StructuredOutputs("regex", "[ab]{1,4}")
    matcher = matcher_of(compiler, letters, b"a", min_tokens=3, stop_token_ids=(98,))
    assert allowed_by(filler, matcher, [*b"aa"]) == [{97}, {97}, {97, 98, EOS, OTHER_EOS}]
    reached = matcher_of(compiler, letters, b"aa", min_tokens=1)
    assert allowed_by(filler, reached, [*b"a"]) == [{97, 98, EOS, OTHER_EOS}] * 2
    matcher = matcher_of(compiler, letters, b"aaaa", min_tokens=9)
    assert allowed_by(filler, matcher, []) == [{EOS, OTHER_EOS}]


def test_several_answers_are_filled_together(compiler, filler):
    answers = [matcher_of(compiler, grammar) for grammar in GRAMMARS]
    drafts = [[*b'{"'], [], [*b"x"], [*b"ac"]]
    masks, counts = filler.fill(list(zip(answers, drafts, strict=True)))
    assert counts == [3, 1, 1, 3]
    assert allowed(masks[3]) == {*b"abc"}
    assert allowed(masks[4]) == {*b"yn"}
    assert filler.fill([])[0].shape == (0, 10)


def test_a_token_that_the_grammar_does_not_allow_ends_the_answer_with_a_reason(compiler, filler):
    matcher = matcher_of(compiler, GRAMMARS[2], b"maybe")
    assert "cannot be followed any further" in matcher.error
    assert allowed_by(filler, matcher, [1]) == []


CITY = {"type": "object", "properties": {"city": {"enum": ["Paris", "Parma"]}}, "required": ["city"]}
SPELLED_IN_WAYS = [
    StructuredOutputs("json", json.dumps(CITY | {"additionalProperties": False})),
    StructuredOutputs("regex", "[a-z]{3,6}(-[0-9]{2})? the end"),
    StructuredOutputs("choice", '["it depends on the day","it is about to rain"]'),
]


@pytest.mark.parametrize("grammar", SPELLED_IN_WAYS, ids=lambda grammar: grammar.kind)
def test_what_is_allowed_is_what_the_masks_have(grammar: StructuredOutputs) -> None:
    """With a vocabulary that spells a text in several ways, of which a mask has one where the text is forced."""
    vocab_size = 1536
    compiler = GrammarCompiler(lambda: tokenizer_json(DEMO_TARGET), vocab_size)
    eos, filler, rng = (2,), BitmaskFiller(vocab_size, 1), random.Random(3)
    compiled, num_narrow = compiler.compile(grammar, eos), 0
    for _ in range(3):
        matcher, history = compiled.matcher(MatcherRules()), list[int]()
        for _ in range(12):
            masks, _ = filler.fill([(matcher, [])])
            if not len(masks):
                break
            in_mask = np.flatnonzero(np.unpackbits(masks[0].view(np.uint8), bitorder="little")[:vocab_size]).tolist()
            assert [token for token in range(vocab_size) if matcher.allows([token])] == in_mask
            num_narrow += sum(matcher.legal_drafts([token])[0] for token in range(vocab_size)) > len(in_mask)
            history.append(rng.choice(in_mask))
            assert compiled.matcher(MatcherRules()).allows(history)
            matcher.advance(history[-1:])
    assert num_narrow


def test_tokens_that_were_found_allowed_are_taken_at_once(compiler, filler):
    matcher = matcher_of(compiler, GRAMMARS[1])
    assert matcher.allows(list(b"ab"))
    assert allowed_by(filler, matcher, []) == allowed_by(filler, matcher_of(compiler, GRAMMARS[1]), [])
    matcher.advance(list(b"ab"))
    assert allowed_by(filler, matcher, []) == allowed_by(filler, matcher_of(compiler, GRAMMARS[1], b"ab"), [])
    assert matcher.allows(list(b"c"))
    matcher.advance(list(b"f"))  # others than those that were looked at
    assert allowed_by(filler, matcher, []) == [{ord("o")}]


def test_tokens_are_looked_at_behind_drafts_that_were_legal_and_only_where_these_were(compiler):
    matcher = matcher_of(compiler, GRAMMARS[1])
    assert matcher.legal_drafts(list(b"abz")) == (2, [])
    assert matcher.allows(list(b"abc"))
    assert not matcher.allows(list(b"abz"))
    assert not matcher.allows(list(b"az"))
    assert not matcher.allows(list(b"zb"))
    assert matcher.legal_drafts(list(b"abc")) == (3, [])
    matcher.advance(list(b"abc"))
    assert not matcher.allows(list(b"abc"))
    assert matcher.allows(list(b"bar"))


def test_heavy_answers_have_the_masks_of_others(compiler, filler):
    """Filled one by one, each into its own place, whatever their order by time."""
    answers = [matcher_of(compiler, grammar) for grammar in GRAMMARS]
    drafts = [[*b'{"'], [], [*b"x"], [*b"ac"]]
    expected, counts = filler.fill(list(zip(answers, drafts, strict=True)))
    for answer, seconds in zip(answers, (0.5, 0.1, 0.9, 0.3), strict=True):
        answer.heavy = True
        answer.took(seconds)
    masks, heavy_counts = filler.fill(list(zip(answers, drafts, strict=True)))
    assert heavy_counts == counts
    assert (masks == expected).all()


def test_an_answer_whose_masks_take_too_long_fails_alone(compiler, filler, monkeypatch):
    answers = [matcher_of(compiler, grammar) for grammar in GRAMMARS]
    for answer in answers[1:]:
        answer.heavy = True
    endless, end, fill = answers[1], threading.Event(), matcher_module._fill

    def slow(executor, entries, masks):
        if entries[0][0] is endless:
            while not end.is_set():
                pass
        fill(executor, entries, masks)

    monkeypatch.setattr(matcher_module, "_fill", slow)
    filler = BitmaskFiller(VOCAB, 2)
    filler._of_thread.deadlines._limit_s, filler._of_thread.deadlines._total_limit_s = 0.05, 30.0
    masks, counts = filler.fill([(answer, []) for answer in answers])
    end.set()
    assert endless.error == "the grammar of its structured output takes too long for one token. Make it simpler"
    assert endless.status == "INVALID_ARGUMENT"
    assert [answer.error for answer in answers if answer is not endless] == [None] * 3
    assert (allowed(masks[2]), allowed(masks[3])) == ({*b"yn"}, {*b"ac"})
    # It takes no further part.
    endless.advance([1])
    assert endless.legal_drafts([1]) == (0, [])
    assert filler.fill([(endless, [])])[1] == [0]
    assert counts == [1] * 4


def test_threads_that_share_a_step_do_not_take_the_time_of_each_others_masks(compiler, monkeypatch):
    fill = matcher_module._fill

    def slow(*args):
        end = time.thread_time() + 0.06
        while time.thread_time() < end:
            pass
        fill(*args)

    monkeypatch.setattr(matcher_module, "_fill", slow)
    monkeypatch.setattr(matcher_module, "MASKS_LIMIT_S", 0.15)
    monkeypatch.setattr(matcher_module, "STEP_LIMIT_S", 30.0)
    filler, begin = BitmaskFiller(VOCAB, 1), threading.Barrier(2)
    parts = [[matcher_of(compiler, GRAMMARS[1]) for _ in range(5)] for _ in range(2)]

    def fill_part(answers):
        begin.wait()
        return filler.fill([(answer, []) for answer in answers])

    for answer in itertools.chain(*parts):
        answer.heavy = True
    with ThreadPoolExecutor(2) as threads:
        filled = list(threads.map(fill_part, parts))
    assert [answer.error for answer in itertools.chain(*parts)] == [None] * 10
    assert [allowed(mask) for masks, _ in filled for mask in masks] == [{*b"abc"}] * 10


def test_an_answer_whose_turn_does_not_come_is_not_at_fault(compiler, monkeypatch):
    first, second = matcher_of(compiler, GRAMMARS[1]), matcher_of(compiler, GRAMMARS[1])
    first.heavy = second.heavy = True
    second.took(0.1)  # so it comes after the other
    fill = matcher_module._fill

    def slow(*args):
        time.sleep(0.1)
        fill(*args)

    monkeypatch.setattr(matcher_module, "_fill", slow)
    filler = BitmaskFiller(VOCAB, 1)
    filler._of_thread.deadlines._total_limit_s = 0.05
    filler.fill([(second, []), (first, [])])
    assert first.error is None
    assert second.status == "UNAVAILABLE"
    assert "try again later" in (second.error or "")


def test_an_answer_that_takes_much_in_each_step_fails_in_the_end(compiler):
    matcher = matcher_of(compiler, GRAMMARS[1])
    for _ in range(1000):
        matcher.took(USUAL_S)
    for _ in range(10):
        assert matcher.error is None
        matcher.took(USUAL_S + SLOW_LIMIT_S / 9.5)
    assert matcher.error is not None
    assert matcher.status == "INVALID_ARGUMENT"


def test_an_answer_that_keeps_too_much_memory_fails(compiler, filler, monkeypatch):
    def answers(*sizes, given_back=0):
        """Answers of which each step's masks keep this many bytes, after two steps. given_back: bytes of another
        thread, which are there while masks are filled, and not between steps."""
        found = [matcher_of(compiler, GRAMMARS[1]) for _ in sizes]
        total, turns = [0], itertools.cycle([False, True])
        for each in found:
            each.heavy = True

        def bytes_in_use():
            total[0] += given_back + next(used) if next(turns) else 0
            return total[0]

        monkeypatch.setattr(matcher_module, "bytes_in_use", bytes_in_use)
        for _ in range(2):
            used = iter(sizes)
            filler.fill([(each, []) for each in found])
            total[0] -= given_back * len(sizes)
        return [(each.num_bytes, each.error, each.status) for each in found]

    wrong = "the grammar of its structured output takes too much memory within its answer. Make it simpler"
    half = ANSWER_BYTES // 2
    assert answers(half) == [(2 * half, None, "INVALID_ARGUMENT")]
    assert answers(half + 1) == [(2 * half + 2, wrong, "INVALID_ARGUMENT")]
    assert answers(10, given_back=half) == [(half + 20, None, "INVALID_ARGUMENT")]
    monkeypatch.setattr(matcher_module, "STEP_BYTES", 100)
    assert [error for _, error, _ in answers(20, 30, 10)] == [None, wrong, None]


def test_an_answer_that_needs_no_masks_gets_fuel_all_the_same():
    """llguidance gives an answer new fuel with each mask: without one this would fail after 1,800 tokens."""
    words = FastTokenizer.from_file(str(DEMO_TARGET / "tokenizer.json"))
    compiler = GrammarCompiler(lambda: tokenizer_json(DEMO_TARGET), words.get_vocab_size())
    schema = StructuredOutputs("json", '{"type":"string","maxLength":100000}')
    matcher = compiler.compile(schema, (2,)).matcher(MatcherRules())
    quote, block = ([*words.encode(text, add_special_tokens=False).ids] for text in ('"', "abcdefghijklm "))
    matcher.advance(quote)
    for _ in range(2500 // len(block)):
        assert matcher.allows(block)
        matcher.advance(block)
        assert matcher.legal_drafts(block)[0] == len(block)
    assert matcher.error is None
