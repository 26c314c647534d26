"""Compiles grammars against the target's tokenizer, on threads of its own, so that no step waits for one.

Most take a millisecond. Expressions that are too large are refused before llguidance sees them (`bounds`). Grammars
that may take longer than their size says are tried in a process of their own first (`trial`), so that the limits hold,
and heavy ones keep no other one waiting. Grammars that were compiled lately are kept, and all those of requests in
progress.
"""

from __future__ import annotations

import json
import logging
import re
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING
from weakref import WeakValueDictionary

import msgspec
from llguidance import LLMatcher, LLTokenizer
from tokenizers import Tokenizer as FastTokenizer

from dflash_backend.error_text import ABOUT_NEXT_LINE, first_line
from dflash_backend.messages import JSON_WHITESPACE, StructuredOutputs
from dflash_backend.structured_output.bounds import (
    BoundError,
    check_bounds,
    compile_grammar,
    expression_grammars,
    is_heavy,
    needs_trial,
)
from dflash_backend.structured_output.fair_thread import FairThread
from dflash_backend.structured_output.lexers import Lexers
from dflash_backend.structured_output.matcher import GrammarMatcher, MatcherRules
from dflash_backend.structured_output.trial import DEAD_END, GrammarTrial, bytes_in_use
from dflash_backend.structured_output.vocabulary import SpecialTokens, named_tokens, with_ids, without_special_text

if TYPE_CHECKING:
    from llguidance._lib import JsonCompileOptions

_log = logging.getLogger(__name__)

# Processor time of one trial, in seconds.
TIME_LIMIT_S = 3.0
# Grammars that are kept for requests to come, and the bytes that they keep.
CACHE_SIZE = 256
MAX_CACHED_BYTES = 256 << 20
# What a grammar is taken to keep at least, and at most where it was compiled without a trial: other threads use memory
# while it is measured.
LEAST_BYTES, MOST_UNTRIED_BYTES = 16 << 10, 4 << 20
# How long a grammar that used its processor time or memory up is refused without another trial, in seconds.
REFUSED_FOR_S = 300.0
JSON_OPTIONS: JsonCompileOptions = {"whitespace_pattern": JSON_WHITESPACE}
_PLACE = re.compile(r"(?:at )?(\d+)\(\d+\): ")
_SHOWN_LINE = re.compile(r"\s*\d+ \| |\s+\^\s*$")
_IN_REGEX = re.compile(r"([\\.+*?()|\[\]{}^$#&\-~/])")
# An option of llguidance's, in place of which a client can do something.
_ONE_OF = (
    "Enable 'coerce_one_of' option to approximate oneOf with anyOf",
    "Use anyOf, or alternatives that exclude each other",
)
_EBNF_RULE = re.compile(r"^[ \t]*[\w-]+[ \t]*::=", re.MULTILINE)

Key = tuple[str, str, tuple[int, ...]]


class GrammarError(ValueError):
    """A grammar cannot be followed. The message is for the client and completes a sentence."""


@dataclass(frozen=True)
class _Vocabulary:
    """The target's tokenizer as llguidance reads it, what tries grammars with it by whether they are heavy, and its
    special tokens."""

    tokenizer: LLTokenizer
    trials: dict[bool, GrammarTrial]
    special: SpecialTokens


class CompiledGrammar:
    """A grammar and the state in which each answer begins."""

    def __init__(self, lexers: Lexers, eos_token_ids: tuple[int, ...], num_bytes: int, heavy: bool) -> None:
        """num_bytes: what it keeps as it is compiled. heavy: whether a single mask may take long, so that it is filled
        by itself."""
        self._lexers = lexers
        self._eos_token_ids = eos_token_ids
        self._num_bytes = num_bytes
        self._heavy = heavy

    @property
    def num_bytes(self) -> int:
        """What it keeps, with what its answers are taken to have added."""
        return self._num_bytes + self._lexers.latest.num_bytes

    def matcher(self, rules: MatcherRules) -> GrammarMatcher:
        """A matcher at the beginning of an answer."""
        return GrammarMatcher(self._lexers, self._eos_token_ids, rules, self._heavy)


class GrammarCompiler:
    """Compiled grammars by what they were compiled from. Any thread may use it."""

    def __init__(self, load_tokenizer: Callable[[], str], vocab_size: int) -> None:
        """load_tokenizer: returns the target's tokenizer as the text of a tokenizer.json, and is called with the first
        grammar. Its `ValueError` is passed on to the client of every grammar. vocab_size: that of the target's logits.
        """
        self._load_tokenizer = load_tokenizer
        self._vocab_size = vocab_size
        self._lock = threading.Lock()
        self._tokenizer_lock = threading.Lock()
        self._vocabularies: dict[tuple[int, ...], _Vocabulary] = {}
        self._compiled: WeakValueDictionary[Key, CompiledGrammar] = WeakValueDictionary()
        self._recent: OrderedDict[Key, CompiledGrammar] = OrderedDict()
        # Grammars that took too much, what was said of them, and until when.
        self._refused: OrderedDict[Key, tuple[str, float]] = OrderedDict()
        # By whether the grammars need a trial, and are heavy: those that are not do not wait for the others.
        lanes = (False, False), (True, False), (True, True)
        self._threads = {lane: FairThread("dflash-grammars") for lane in lanes}
        self._again = FairThread("dflash-grammars")  # of those whose lexers are worn
        self.num_compiled = 0
        self.compile_seconds = 0.0

    def submit(
        self, grammar: StructuredOutputs, eos_token_ids: tuple[int, ...], tenant: str = ""
    ) -> Future[CompiledGrammar]:
        """Begin to compile a grammar; the future is done at once for one that is kept. Its error is a `GrammarError`.

        eos_token_ids: the tokens that may end an answer, when the grammar accepts it. tenant: whose turn it takes;
        grammars that take long keep those of the same tenant waiting.
        """
        future: Future[CompiledGrammar] = Future()
        compiled = self._find((grammar.kind, grammar.text, eos_token_ids))
        if compiled is not None:
            future.set_result(compiled)
            return future
        thread = self._threads[needs_trial(grammar), is_heavy(grammar)]
        return thread.submit(tenant, lambda: self.compile(grammar, eos_token_ids))

    def compile(self, grammar: StructuredOutputs, eos_token_ids: tuple[int, ...]) -> CompiledGrammar:
        """The compiled grammar, kept or new; waits for it. Raises `GrammarError`, and `OSError` where it could not be
        tried, for which it is not to blame."""
        key = grammar.kind, grammar.text, eos_token_ids
        compiled = self._find(key)
        if compiled is not None:
            return compiled
        vocabulary = self._vocabulary(eos_token_ids)
        started = time.monotonic()
        grammar = _checked(grammar, vocabulary.special, eos_token_ids)
        text = llguidance_grammar(grammar)
        tried, heavy = needs_trial(grammar), is_heavy(grammar)
        if tried:
            num_bytes = self._try(key, text, grammar, vocabulary.trials[heavy])
        else:
            num_bytes = -bytes_in_use()
        compile_again = partial(_matcher, vocabulary.tokenizer, text)
        began = time.monotonic()
        lexers = Lexers(compile_again(), compile_again, time.monotonic() - began, partial(self._again.submit, ""))
        if not tried:
            num_bytes = min(MOST_UNTRIED_BYTES, num_bytes + bytes_in_use())
        with self._lock:
            self.num_compiled += 1
            self.compile_seconds += time.monotonic() - started
            new = CompiledGrammar(lexers, eos_token_ids, max(LEAST_BYTES, num_bytes), heavy)
            compiled = self._compiled.setdefault(key, new)
            self._keep(key, compiled)
        return compiled

    def _try(self, key: Key, text: str, grammar: StructuredOutputs, trial: GrammarTrial) -> int:
        """The bytes that a grammar keeps. Raises `GrammarError` for one that takes too much, which for some minutes is
        not tried again, and `OSError`."""
        known, until = self._refused.get(key, ("", 0.0))
        if time.monotonic() < until:
            raise GrammarError(known)
        verdict = trial.run(text, expression_grammars(grammar))
        reason = verdict.reason if verdict.error is None else _wrong(verdict.error, text)
        if reason is None:
            return verdict.num_bytes
        with self._lock:
            self._refused[key] = reason, time.monotonic() + REFUSED_FOR_S
            self._refused.move_to_end(key)
            if len(self._refused) > CACHE_SIZE:
                self._refused.popitem(last=False)
        raise GrammarError(reason)

    def _find(self, key: Key) -> CompiledGrammar | None:
        with self._lock:
            compiled = self._compiled.get(key)
            if compiled is not None:
                self._keep(key, compiled)
            return compiled

    def _keep(self, key: Key, compiled: CompiledGrammar) -> None:
        """Keep a grammar as the latest one, and drop the oldest for it. Under the lock."""
        self._recent[key] = compiled
        self._recent.move_to_end(key)
        while len(self._recent) > CACHE_SIZE or self._num_cached_bytes > MAX_CACHED_BYTES:
            self._recent.popitem(last=False)

    @property
    def _num_cached_bytes(self) -> int:
        return sum(compiled.num_bytes for compiled in self._recent.values())

    def _vocabulary(self, eos_token_ids: tuple[int, ...]) -> _Vocabulary:
        """The target's vocabulary. Raises `GrammarError`."""
        with self._tokenizer_lock:
            vocabulary = self._vocabularies.get(eos_token_ids)
            if vocabulary is None:
                vocabulary = self._vocabularies[eos_token_ids] = self._read_tokenizer(eos_token_ids)
            return vocabulary

    def _read_tokenizer(self, eos_token_ids: tuple[int, ...]) -> _Vocabulary:
        started = time.monotonic()
        try:
            text, special = without_special_text(self._load_tokenizer())
            known = FastTokenizer.from_str(text)
            within = [token_id for token_id in eos_token_ids if known.id_to_token(token_id) is not None]
            if not within:
                raise GrammarError(
                    "cannot be followed: the target has no end-of-sequence token, so no answer could end"
                )
            tokenizer = LLTokenizer(text, n_vocab=self._vocab_size, eos_token=within)
        except GrammarError:
            raise
        except Exception as error:  # noqa: BLE001 - what the Rust tokenizers raise is a plain Exception
            raise GrammarError(
                f"cannot be followed with the target's tokenizer, which llguidance cannot read: {first_line(error)}"
            ) from None
        _log.info("read the target's tokenizer for grammars in %.2f s", time.monotonic() - started)
        trials = {heavy: GrammarTrial(text, self._vocab_size, within, TIME_LIMIT_S) for heavy in (False, True)}
        return _Vocabulary(tokenizer, trials, special)


def _checked(grammar: StructuredOutputs, special: SpecialTokens, eos_token_ids: tuple[int, ...]) -> StructuredOutputs:
    """A grammar that is within its bounds, and names special tokens by their ids. Raises `GrammarError`."""
    try:
        check_bounds(grammar)
    except BoundError as error:
        raise GrammarError(str(error)) from None
    if grammar.kind != "grammar":
        return grammar
    if ends := named_tokens(grammar.text, special.ids, eos_token_ids):
        raise GrammarError(
            f"names {ends[0]}, a token that ends the answer. Leave it out: the answer may end wherever the grammar is "
            "complete"
        )
    return msgspec.structs.replace(grammar, text=with_ids(grammar.text, special))


def llguidance_grammar(grammar: StructuredOutputs) -> str:
    """The grammar in llguidance's own form. Raises `GrammarError` for text that is not of its kind."""
    if grammar.kind == "grammar" and _EBNF_RULE.search(grammar.text):
        raise GrammarError("is in EBNF (`root ::= ...`); write it in Lark's notation (`start: ...`)")
    try:
        if grammar.kind == "json":
            return str(LLMatcher.grammar_from_json_schema(grammar.text, overrides=JSON_OPTIONS))
        if grammar.kind == "regex":
            return str(LLMatcher.grammar_from_regex(grammar.text))
        if grammar.kind == "choice":
            choices = json.loads(grammar.text)
            return str(LLMatcher.grammar_from_regex("|".join(_IN_REGEX.sub(r"\\\1", choice) for choice in choices)))
        return str(LLMatcher.grammar_from_lark(grammar.text))
    except ValueError as error:
        raise GrammarError(f"is not understood: {first_line(error)}") from None


def _matcher(tokenizer: LLTokenizer, grammar: str) -> LLMatcher:
    """A matcher whose first mask allows something. Raises `GrammarError`."""
    matcher = compile_grammar(tokenizer, grammar)
    if matcher.is_error():
        raise GrammarError(_wrong(matcher.get_error(), grammar))
    return matcher


def _wrong(error: str, grammar: str) -> str:
    """What is wrong with a grammar, for its client."""
    if error.startswith(DEAD_END):
        return "allows no text at all, or none that the target's vocabulary can spell"
    return f"is wrong or too large: {_reason(error, grammar)}"


def _reason(error: str, grammar: str) -> str:
    """llguidance's error without the lines of the grammar that it shows, and with what the comment above the line says
    that it is about."""
    lines = [line for line in error.splitlines() if not _SHOWN_LINE.match(line)]
    reason = " ".join(" ".join(lines).replace("<non-verbose/>", "").replace(*_ONE_OF).split())[:500]
    found = _PLACE.match(reason)
    if found is None:
        return reason
    above = grammar.splitlines()[int(found[1]) - 2 : int(found[1]) - 1]
    if above and above[0].startswith(ABOUT_NEXT_LINE):
        return f"{above[0].removeprefix(ABOUT_NEXT_LINE)}: {reason[found.end() :]}"
    return f"line {found[1]}: {reason[found.end() :]}"
