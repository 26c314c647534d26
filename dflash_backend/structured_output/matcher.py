"""Where one answer stands in its grammar, and the masks of its next tokens.

A matcher advances by accepted tokens only. Drafts are tried: llguidance walks along them for the masks of their
positions and then rolls back. So the mask of a position follows from the tokens before it, whether they were drafted or
not (LOSSLESS), and nothing is kept that a preemption would have to restore: the accepted tokens say it all.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from itertools import takewhile
from typing import Literal

import numpy as np
from llguidance import LLExecutor, LLMatcher
from llguidance.numpy import fill_next_token_bitmask_par, fill_next_token_bitmask_par_with_draft_tokens

from dflash_backend.structured_output.deadline import DeadlineThread
from dflash_backend.structured_output.lexers import FULL, Lexers
from dflash_backend.structured_output.trial import bytes_in_use

BITS = 32
# Of the heavy grammars in a step, in seconds: processor time of one answer's masks, and when no other one's begin.
MASKS_LIMIT_S = 0.25
STEP_LIMIT_S = 0.5
# Seconds that an answer's masks may take in all its steps together, beyond these in each.
USUAL_S, SLOW_LIMIT_S = 0.02, 2.0
# What the masks of one answer with a heavy grammar may keep, and those of all in a step.
ANSWER_BYTES, STEP_BYTES = 128 << 20, 1 << 30
TOO_SLOW = "takes too long for one token. Make it simpler"
TOO_LARGE = "takes too much memory within its answer. Make it simpler"
# Tokens after which an answer that needed no masks gets one. llguidance gives an answer new fuel with each mask only.
TOKENS_WITHOUT_MASK = 256

FailureStatus = Literal["INVALID_ARGUMENT", "UNAVAILABLE"]


@dataclass(frozen=True)
class MatcherRules:
    """What a request asks for beside its grammar.

    end_of_reasoning: the grammar begins behind these token ids; before them everything is allowed but the end. Empty:
    it begins at once. min_tokens, stop_token_ids and ignore_eos as in `SamplingParams`: tokens that would end the
    answer are hidden, unless the grammar allows nothing else.
    """

    end_of_reasoning: tuple[int, ...] = ()
    min_tokens: int = 0
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False

    @property
    def grammar_alone(self) -> bool:
        """Whether nothing but the grammar says which tokens are allowed, at every position."""
        return not self.end_of_reasoning and self.min_tokens == 0 and not self.ignore_eos


@dataclass(frozen=True)
class _Plan:
    """How the masks of one answer's next positions are filled. free: this many positions still belong to the
    reasoning. drafts: those that the grammar is walked along behind them, all legal; None when the reasoning goes on.
    """

    free: int
    drafts: list[int] | None

    @property
    def num_rows(self) -> int:
        return self.free + (0 if self.drafts is None else len(self.drafts) + 1)


class GrammarMatcher:
    """One answer's state. `error` says why it can go on no more, and `status` whose fault that is: the client's, whose
    grammar it is, or with UNAVAILABLE others'. heavy: whether its masks may take long."""

    def __init__(
        self, lexers: Lexers, eos_token_ids: tuple[int, ...], rules: MatcherRules, heavy: bool = False
    ) -> None:
        """lexers: those of the grammar."""
        self.heavy = heavy
        # What its masks took beyond the usual.
        self.slow_seconds = 0.0
        self.num_bytes = 0
        self._in_use_at_first: int | None = None
        self._num_without_mask = 0
        self.status: FailureStatus = "INVALID_ARGUMENT"
        self._lexers, self._lexer = lexers, lexers.begin()
        self._matcher = self._lexer.start.deep_copy()
        # The tokens that the grammar has taken.
        self._taken: list[int] = []
        self._eos = frozenset(eos_token_ids)
        self._rules = rules
        self._num_tokens = 0
        # The last tokens of the reasoning, one fewer than its end has; None when the grammar has begun.
        self._tail: list[int] | None = [] if rules.end_of_reasoning else None
        self._ended = False
        # Drafts that were found legal where the answer is.
        self._legal: list[int] = []
        # Tokens that were found allowed, and the state behind them.
        self._ahead: tuple[list[int], LLMatcher] | None = None
        self.error: str | None = None

    def advance(self, token_ids: Sequence[int]) -> None:
        """Take accepted tokens. What follows a token that ends the answer is ignored."""
        self._num_tokens += len(token_ids)
        if self._ended or self.error is not None:
            return
        begin = 0
        if self._tail is not None:
            end = self._end_of_reasoning(token_ids)
            if end is None:
                kept = len(self._rules.end_of_reasoning) - 1
                tail = [*self._tail, *token_ids]
                self._tail = tail[len(tail) - kept :] if kept else []
                self._ended = any(token_id in self._eos for token_id in token_ids)
                return
            begin, self._tail = end, None
        tokens = self._before_end(token_ids[begin:])
        self._ended = len(tokens) < len(token_ids) - begin
        ahead, self._ahead, self._legal = self._ahead, None, []
        self._taken += tokens
        self._lexer.num_tokens += len(tokens)
        if ahead is not None and ahead[0] == tokens:
            self._matcher = ahead[1]
        elif tokens and not self._matcher.consume_tokens(tokens) and not self.goes_on():
            self._fail()
        self._num_without_mask += len(tokens)
        if self._num_without_mask >= TOKENS_WITHOUT_MASK and not self._ended:
            self._num_without_mask = 0
            self._matcher.compute_bitmask()
        if self._ended and self.error is None and not self._matcher.is_accepting():
            self.error = "the grammar of its structured output names a token that ends the answer, where it goes on"

    def allows(self, token_ids: Sequence[int]) -> bool:
        """Whether each of these next tokens, up to one that ends the answer, is in the mask of its position. Of an
        answer that has ended, or failed, everything is allowed: it has no masks. To be asked only where the grammar
        alone decides (`MatcherRules.grammar_alone`); `advance` by the same tokens then takes no time.

        A mask has less than what the grammar accepts: where it forces a text, only the first of its tokens, so that one
        text is not spelled in several ways.
        """
        if self._ended or self.error is not None:
            return True
        tokens = self._before_end(token_ids)
        ends = len(tokens) < len(token_ids)
        num_legal = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(tokens, self._legal, strict=False)))
        trial = self._matcher.deep_copy()
        forced_tokens, consume = trial.compute_ff_tokens, trial.consume_token
        for i, token_id in enumerate(tokens):
            # Asked first, since llguidance takes long to say what is wrong with a token that it is to consume.
            if i == num_legal and trial.validate_tokens(tokens[i:]) < len(tokens) - i:
                return False
            forced = forced_tokens()
            if forced and forced[0] != token_id:
                return False
            if not consume(token_id):
                return False
        if ends and (forced_tokens() or not trial.is_accepting()):
            return False
        self._ahead = tokens, trial
        return True

    def legal_drafts(self, drafts: Sequence[int]) -> tuple[int, list[int]]:
        """How many of the drafts the grammar allows, an end-of-sequence token that it accepts included, and the tokens
        that it forces behind those, at most as many as there are other drafts. One text may have several forms in
        tokens: these are the tokenizer's own."""
        if self._ended or self.error is not None:
            return 0, []
        if self._tail is None and drafts and self._eos.isdisjoint(drafts):
            # The usual case, in which nothing is to be found out but this.
            tokens = list(drafts)
            num_legal = self._matcher.validate_tokens(tokens)
            self._legal = tokens[:num_legal]
            return num_legal, self._forced(tokens[:num_legal], len(tokens) - num_legal)
        plan = self._plan(drafts)
        num_legal = plan.num_rows - 1
        if plan.drafts is None:
            return num_legal, []
        behind = drafts[num_legal : num_legal + 1]
        if behind and behind[0] in self._eos and self._ends_after(plan.drafts, behind[0]):
            return num_legal + 1, []
        return num_legal, self._forced(plan.drafts, len(drafts) - num_legal)

    def _forced(self, drafts: list[int], count: int) -> list[int]:
        """At most `count` tokens that the grammar forces behind `drafts`, which are legal."""
        if count <= 0:
            return []
        trial = self._matcher
        if drafts:
            trial = trial.deep_copy()
            if not trial.consume_tokens(drafts):
                return []
        return list(trial.compute_ff_tokens()[:count])

    def _ends_after(self, drafts: list[int], token_id: int) -> bool:
        """Whether the answer may end behind these legal drafts, with this token."""
        if not drafts:
            # A matcher that can only end takes no token at all.
            return self._matcher.is_accepting()
        return self._matcher.validate_tokens([*drafts, token_id]) > len(drafts)

    def _before_end(self, token_ids: Sequence[int]) -> list[int]:
        """Those before one that ends the answer, or all."""
        tokens = list(token_ids)
        if not self._eos.isdisjoint(tokens):
            del tokens[next(i for i, token_id in enumerate(tokens) if token_id in self._eos) :]
        return tokens

    def _end_of_reasoning(self, token_ids: Sequence[int]) -> int | None:
        """How many of the next tokens belong to the reasoning, its end included; None when it goes on."""
        assert self._tail is not None
        end = list(self._rules.end_of_reasoning)
        tokens = [*self._tail, *token_ids]
        for last in range(len(end), len(tokens) + 1):
            if tokens[last - len(end) : last] == end and last > len(self._tail):
                return last - len(self._tail)
        return None

    def _plan(self, drafts: Sequence[int]) -> _Plan:
        """How the masks of the positions along `drafts` are filled: as far as the drafts are legal."""
        free = 0
        if self._tail is not None:
            end = self._end_of_reasoning(drafts)
            if end is None:
                return _Plan(len(self._before_end(drafts)) + 1, None)
            free = end
            drafts = drafts[end:]
        behind = self._before_end(drafts)
        if behind:
            behind = behind[: self._matcher.validate_tokens(behind)]
        return _Plan(free, behind)

    def goes_on(self) -> bool:
        """Let an answer that has just met llguidance's bound of states go on with another lexer, where those of others
        are most of them. Whether it does; False also where nothing is wrong."""
        if self.error is not None or not self._matcher.is_error() or FULL not in self._matcher.get_error():
            return False
        if self._lexer.num_tokens < 2 * len(self._taken):
            return False
        lexer = self._lexers.successor(self._lexer)
        if lexer is None:
            self.status = "UNAVAILABLE"
            self.error = "the grammar of its structured output is being compiled again; try again later"
            return False
        self._lexer, self._matcher = lexer, lexer.start.deep_copy()
        self._ahead, self._legal = None, []
        lexer.num_tokens += len(self._taken)
        return not self._taken or self._matcher.consume_tokens(self._taken)

    def _fail(self) -> None:
        if self.error is not None:
            return
        reason = " ".join(self._matcher.get_error().split())[:300]
        self.error = f"the grammar of its structured output cannot be followed any further ({reason})"

    def took(self, seconds: float, num_bytes: int = 0, in_use: int = 0) -> None:
        """Count what its masks took in a step. Too much in all its steps together is an error. num_bytes: what the
        process had more after it, other threads' memory of a moment too, than before, when it had `in_use`: so the
        answer is held to keep no more than the process has since its first masks."""
        self.slow_seconds += max(0.0, seconds - USUAL_S)
        if self._in_use_at_first is None:
            self._in_use_at_first = in_use
        kept = in_use + num_bytes - self._in_use_at_first
        self.num_bytes = max(0, min(self.num_bytes + max(0, num_bytes), kept))
        if self.slow_seconds > SLOW_LIMIT_S:
            self.give_up(TOO_SLOW)
        elif self.num_bytes > ANSWER_BYTES:
            self.give_up(TOO_LARGE)

    def give_up(self, reason: str | None) -> None:
        """End it with an error: what its grammar does, or None where those of others take too long. Its state is not to
        be looked at any more: a thread may still be in it."""
        if reason is None:
            self.status = "UNAVAILABLE"
            self.error = "the grammars of other answers take all the time that a step has for them; try again later"
        else:
            self.error = f"the grammar of its structured output {reason}"

    def _edit(self, masks: np.ndarray, plan: _Plan) -> None:
        """What masks (int32 `[plan.num_rows, words]`) need beside llguidance's bits; notes an error."""
        if plan.drafts is not None and self._matcher.is_error():
            self._fail()
            return
        self._num_without_mask = 0
        if plan.free:
            masks[: plan.free] = -1
            _hide(masks[: plan.free], self._eos)
        if not masks.any(axis=1).all():
            self.error = "no token of the target's vocabulary goes on with the grammar of its structured output"
            return
        rules, grammar = self._rules, masks[plan.free :]
        if rules.ignore_eos:
            _hide_where_others_are(grammar, self._eos)
        if rules.min_tokens > self._num_tokens:
            stops = self._eos.union(rules.stop_token_ids)
            _hide_where_others_are(masks[: rules.min_tokens - self._num_tokens], stops)


class _OfThread(threading.local):
    """What each thread has of its own: on a CPU several share a step's rows, and each fills the masks of its own."""

    def __init__(self) -> None:
        self.deadlines = DeadlineThread("dflash-heavy-masks", MASKS_LIMIT_S, STEP_LIMIT_S)


class BitmaskFiller:
    """Fills the masks of several answers, side by side on threads of llguidance's own; those of heavy grammars one by
    one, on a thread whose jobs have a deadline. Several threads may use it, each for other answers."""

    def __init__(self, vocab_size: int, num_threads: int) -> None:
        self.num_words = -(-vocab_size // BITS)
        self._num_threads = num_threads
        # With more than one thread, these start with the first answer.
        self._executor = LLExecutor(1) if num_threads == 1 else None
        self._alone = LLExecutor(1)
        self._of_thread = _OfThread()

    def fill(self, answers: Sequence[tuple[GrammarMatcher, Sequence[int]]]) -> tuple[np.ndarray, list[int]]:
        """The masks of the positions that each answer's drafts reach, and of the one behind them.

        Returns masks int32 `[m, num_words]`, and how many of them are of each answer, in order: those of the drafts
        that are legal, and the first one that hides a draft. An answer that has ended has none, nor has one that fails
        here: its `error` says why.
        """
        plans = [None if each.error or each._ended else each._plan(drafts) for each, drafts in answers]
        counts = [0 if plan is None else plan.num_rows for plan in plans]
        starts = np.cumsum([0, *counts]).tolist()
        masks = np.empty((starts[-1], self.num_words), dtype=np.int32)
        light: list[tuple[GrammarMatcher, int, list[int]]] = []
        heavy: list[tuple[GrammarMatcher, int, list[int]]] = []
        for (each, _), plan, start in zip(answers, plans, starts, strict=False):
            if plan is not None and plan.drafts is not None:
                (heavy if each.heavy else light).append((each, start + plan.free, plan.drafts))
        if light:
            if self._executor is None:
                self._executor = LLExecutor(self._num_threads)
            _fill(self._executor, light, masks)
        if heavy:
            self._fill_heavy(heavy, masks)
        if [each for each, _, _ in (*light, *heavy) if each.goes_on()]:
            return self.fill(answers)
        for (each, _), plan, start in zip(answers, plans, starts, strict=False):
            if plan is not None and each.error is None:
                each._edit(masks[start : start + plan.num_rows], plan)
        return masks, counts

    def _fill_heavy(self, heavy: list[tuple[GrammarMatcher, int, list[int]]], masks: np.ndarray) -> None:
        """Fill those of heavy grammars, the ones that took little up to now first; notes errors."""
        heavy.sort(key=lambda entry: entry[0].slow_seconds)
        # A job that is given up still writes, so each has its own place.
        own = [np.full((len(drafts) + 1, self.num_words), -1, dtype=np.int32) for _, _, drafts in heavy]
        taken = [(0.0, 0, 0)] * len(heavy)

        def fill(i: int) -> None:
            each, _, drafts = heavy[i]
            before, began = bytes_in_use(), time.thread_time()
            _fill(self._alone, [(each, 0, drafts)], own[i])
            taken[i] = time.thread_time() - began, bytes_in_use() - before, before

        late, left = self._of_thread.deadlines.run([partial(fill, i) for i in range(len(heavy))])
        for (each, start, drafts), filled, took in zip(heavy, own, taken, strict=True):
            masks[start : start + len(drafts) + 1] = filled
            each.took(*took)
        for i in late:
            heavy[i][0].give_up(TOO_SLOW)
        for i in left:
            heavy[i][0].give_up(None)
        kept = sorted((each for each, _, _ in heavy if each.error is None), key=lambda each: each.num_bytes)
        while sum(each.num_bytes for each in kept) > STEP_BYTES:
            kept.pop().give_up(TOO_LARGE)


def _fill(executor: LLExecutor, answers: list[tuple[GrammarMatcher, int, list[int]]], masks: np.ndarray) -> None:
    """Fill the masks of each answer along its drafts, from its first row of `masks` on."""
    plain = [(each._matcher, start) for each, start, drafts in answers if not drafts]
    walked = [(each._matcher, start, drafts) for each, start, drafts in answers if drafts]
    if plain:
        fill_next_token_bitmask_par(executor, plain, masks)
    if walked:
        fill_next_token_bitmask_par_with_draft_tokens(executor, walked, masks)


def _hide(masks: np.ndarray, token_ids: frozenset[int]) -> None:
    """Clear the bits of these tokens in `masks`, int32 `[n, words]`."""
    for token_id in token_ids:
        word, bit = divmod(token_id, BITS)
        if 0 <= word < masks.shape[1]:
            masks[:, word] &= ~np.uint32(1 << bit).view(np.int32)


def _hide_where_others_are(masks: np.ndarray, token_ids: frozenset[int]) -> None:
    """As `_hide`, but not in a mask that would have no bit left."""
    hidden = masks.copy()
    _hide(hidden, token_ids)
    left = hidden.any(axis=1)
    masks[left] = hidden[left]
