"""Compiles grammars against the target's tokenizer, on threads of its own, so that no step waits for one.

Most take a millisecond. Those that may take much longer are tried in a process of their own first (`trial`), so that
the time limit holds. Grammars that were compiled lately are kept, and all those of requests in progress.
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
from typing import TYPE_CHECKING
from weakref import WeakValueDictionary

from llguidance import LLMatcher, LLTokenizer
from tokenizers import Tokenizer as FastTokenizer

from dflash_backend.error_text import first_line
from dflash_backend.messages import StructuredOutputs
from dflash_backend.structured_output.fair_thread import FairThread
from dflash_backend.structured_output.matcher import GrammarMatcher, MatcherRules
from dflash_backend.structured_output.trial import GrammarTrial, compile_grammar, needs_trial

if TYPE_CHECKING:
    from llguidance._lib import JsonCompileOptions

_log = logging.getLogger(__name__)

# Of one compilation, first mask included, in seconds.
TIME_LIMIT_S = 10.0
# Grammars that are kept for requests to come, and the characters of their text, by which their memory grows (about 90
# bytes for each, with a vocabulary of 151,000 tokens).
CACHE_SIZE = 256
MAX_CACHED_TEXT = 1_000_000
# Between two of its tokens JSON may have nothing, a space, or a new line with its indentation. Where any white space is
# allowed, some models never stop writing it.
JSON_OPTIONS: JsonCompileOptions = {"whitespace_pattern": r"( |\r?\n[ \t]{0,40})?"}
# How llguidance's errors begin where nothing can follow.
DEAD_END = "NoExtension"
_IN_REGEX = re.compile(r"([\\.+*?()|\[\]{}^$#&\-~/])")
_EBNF_RULE = re.compile(r"^[ \t]*[\w-]+[ \t]*::=", re.MULTILINE)

Key = tuple[str, str, tuple[int, ...]]


class GrammarError(ValueError):
    """A grammar cannot be followed. The message is for the client and completes a sentence."""


class CompiledGrammar:
    """A grammar and the state in which each answer begins."""

    def __init__(self, matcher: LLMatcher, eos_token_ids: tuple[int, ...]) -> None:
        self._matcher = matcher
        self._eos_token_ids = eos_token_ids

    def matcher(self, rules: MatcherRules) -> GrammarMatcher:
        """A matcher at the beginning of an answer."""
        return GrammarMatcher(self._matcher.deep_copy(), self._eos_token_ids, rules)


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
        self._tokenizers: dict[tuple[int, ...], tuple[LLTokenizer, GrammarTrial]] = {}
        self._compiled: WeakValueDictionary[Key, CompiledGrammar] = WeakValueDictionary()
        self._recent: OrderedDict[Key, CompiledGrammar] = OrderedDict()
        self._num_cached_chars = 0
        # Grammars that took too much, and what was said of them.
        self._refused: OrderedDict[Key, str] = OrderedDict()
        # By whether the grammars need a trial, for which those that need none do not wait.
        self._threads = {tried: FairThread("dflash-grammars") for tried in (False, True)}
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
        thread = self._threads[needs_trial(grammar)]
        return thread.submit(tenant, lambda: self.compile(grammar, eos_token_ids))

    def compile(self, grammar: StructuredOutputs, eos_token_ids: tuple[int, ...]) -> CompiledGrammar:
        """The compiled grammar, kept or new; waits for it. Raises `GrammarError`."""
        key = grammar.kind, grammar.text, eos_token_ids
        compiled = self._find(key)
        if compiled is not None:
            return compiled
        tokenizer, trial = self._tokenizer(eos_token_ids)
        started = time.monotonic()
        text = llguidance_grammar(grammar)
        if needs_trial(grammar):
            self._try(key, text, trial)
        matcher = _matcher(tokenizer, text)
        with self._lock:
            self.num_compiled += 1
            self.compile_seconds += time.monotonic() - started
            compiled = self._compiled.setdefault(key, CompiledGrammar(matcher, eos_token_ids))
            self._keep(key, compiled)
        return compiled

    def _try(self, key: Key, text: str, trial: GrammarTrial) -> None:
        """Raise `GrammarError` for a grammar that takes too much. The same one is not tried again."""
        reason = self._refused.get(key) or trial.run(text)
        if reason is not None:
            self._refused[key] = reason
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
        if key not in self._recent:
            self._num_cached_chars += len(key[1])
        self._recent[key] = compiled
        self._recent.move_to_end(key)
        while len(self._recent) > CACHE_SIZE or self._num_cached_chars > MAX_CACHED_TEXT:
            (_, text, _), _ = self._recent.popitem(last=False)
            self._num_cached_chars -= len(text)

    def _tokenizer(self, eos_token_ids: tuple[int, ...]) -> tuple[LLTokenizer, GrammarTrial]:
        """The target's vocabulary as llguidance reads it, and what tries grammars with it. Raises `GrammarError`."""
        with self._tokenizer_lock:
            tokenizer = self._tokenizers.get(eos_token_ids)
            if tokenizer is None:
                tokenizer = self._tokenizers[eos_token_ids] = self._read_tokenizer(eos_token_ids)
            return tokenizer

    def _read_tokenizer(self, eos_token_ids: tuple[int, ...]) -> tuple[LLTokenizer, GrammarTrial]:
        started = time.monotonic()
        try:
            text = self._load_tokenizer()
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
        return tokenizer, GrammarTrial(text, self._vocab_size, within, TIME_LIMIT_S)


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
    if matcher.is_error() and not matcher.get_error().startswith(DEAD_END):
        raise GrammarError(f"is wrong or too large: {' '.join(matcher.get_error().split())[:500]}")
    if matcher.is_error():
        raise GrammarError("allows no text at all, or none that the target's vocabulary can spell")
    return matcher
