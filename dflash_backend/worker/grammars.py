"""Structured output in a step: the matchers of the requests that the worker holds, and the masks of their logits.

Masks are filled on a thread while the target runs, and awaited only before tokens are chosen. The drafts that they are
filled along come to the host with the result of the step that proposed them. Where that step is still in flight, the
next one's masks begin when its result is there, and so does everything behind the target's forward (`runner`).

Where nothing runs beside the target, a mask is better not filled. The token that the target chooses among all is the
one that it chooses among those that the grammar allows, if it is one of them; that takes a look at the row's tokens
alone. So on a CPU with a small model the masks of a row are filled only once one of its tokens was not allowed, and the
step's tokens are chosen again.
"""

from __future__ import annotations

import time
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field

import numpy as np
import torch

from dflash_backend.core.plan import NewRequest, SchedulerOutput
from dflash_backend.cores import usable_cores
from dflash_backend.structured_output.compiler import GrammarCompiler, GrammarError
from dflash_backend.structured_output.matcher import BitmaskFiller, FailureStatus, GrammarMatcher, MatcherRules
from dflash_backend.worker.batch import HostBatch, spans
from dflash_backend.worker.transfers import Uploader, share

# Threads of llguidance's own that fill masks, at most: the work of a step is a few milliseconds of one.
MAX_FILL_THREADS = 8
# Steps in which a row's masks are filled at once, after one in which they were needed.
STEPS_WITH_MASKS = 4
# Bytes of masks that a step on a GPU usually has; more make the buffer grow.
INITIAL_BYTES = 1 << 20

Filled = tuple[np.ndarray, list[int], float]


@dataclass
class GrammarAnswer:
    """An answer with a grammar: where it is in that, how many tokens its request has, and the drafts that lie behind
    the last of them. Without a matcher it has failed, for the reason `failure`.

    checkable: whether a token that the target chooses among all is right if the grammar allows it. Not so with a filter
    such as `top_p`, which counts what a mask hides, nor where more than the grammar decides. num_eager_steps: steps in
    which masks are filled nevertheless.
    """

    matcher: GrammarMatcher | None
    num_tokens: int = 0
    drafts: list[int] = field(default_factory=list)
    failure: str | None = None
    checkable: bool = False
    num_eager_steps: int = 0

    @property
    def error(self) -> str | None:
        """Why the answer cannot go on, if so."""
        return self.failure if self.matcher is None else self.matcher.error

    @property
    def error_status(self) -> FailureStatus:
        """Whose fault the error is."""
        return "INVALID_ARGUMENT" if self.matcher is None else self.matcher.status

    def advance(self, token_ids: list[int]) -> None:
        """Take the tokens that a row yielded."""
        if self.matcher is not None:
            self.num_tokens += len(token_ids)
            self.matcher.advance(token_ids)

    def keep(self, drafts: list[int], has_next: bool) -> list[int]:
        """Take the drafts that a row proposed, after its tokens. Returns the drafts to verify: the legal ones, and
        after them, in place of the others, tokens that the grammar forces. With `has_next` the next row is in flight
        already, and verifies the drafts as they are."""
        if self.matcher is None:
            return []
        if has_next:
            self.drafts = drafts
            return drafts
        num_legal, forced = self.matcher.legal_drafts(drafts)
        self.drafts = drafts if num_legal == len(drafts) else drafts[:num_legal] + forced
        return self.drafts


@dataclass(frozen=True)
class _MaskedRow:
    """A row that samples: its answer, the matcher of that, the drafts that it verifies, and its first row of logits."""

    answer: GrammarAnswer
    matcher: GrammarMatcher
    drafts: list[int]
    first: int


class StepGrammars:
    """The rows of a step whose requests have a grammar, by their number, and the masks of those that sample.

    The answers are kept by themselves, since a request's id may be in use again when the step's result is there.
    waits: whether a row of one of them is in flight, so that its masks cannot be filled yet.
    """

    def __init__(
        self, answers: dict[int, GrammarAnswer], batch: HostBatch, states: GrammarStates, before: StepGrammars | None
    ) -> None:
        """before: those of the step in flight."""
        self.answers = answers
        self._members = {id(answer) for answer in answers.values()}
        self.waits = before is not None and not self._members.isdisjoint(before._members)
        self._states = states
        self._num_draft = batch.num_draft
        num_logits = batch.num_logits
        self._numbers = [i for i, answer in answers.items() if batch.sample[i] and answer.matcher is not None]
        self._first = (np.cumsum(num_logits) - num_logits)[self._numbers].tolist()
        self._masked: list[_MaskedRow] = []
        self._checked: list[_MaskedRow] = []
        self._filled: Future[Filled] | None = None
        self._late_seconds = 0.0

    def has(self, answer: GrammarAnswer) -> bool:
        """Whether a row of this answer is in the step."""
        return id(answer) in self._members

    def begin(self) -> None:
        """Begin to fill the masks: everything that was in flight before has come."""
        for number, first in zip(self._numbers, self._first, strict=True):
            answer = self.answers[number]
            if answer.matcher is None:
                continue
            row = _MaskedRow(answer, answer.matcher, answer.drafts[: int(self._num_draft[number])], first)
            if self._states.checks and answer.checkable and not answer.num_eager_steps:
                self._checked.append(row)
            else:
                answer.num_eager_steps = max(0, answer.num_eager_steps - 1)
                self._masked.append(row)
        if self._masked:
            self._filled = self._states.fill([(row.matcher, row.drafts) for row in self._masked])

    def masks(self) -> tuple[torch.Tensor, torch.Tensor] | None:
        """The masks, int32 `[m, words]`, and the row of logits that each is for, int32 `[m]`, on the device; waits
        until they are filled. None when there are none."""
        return None if self._filled is None else self._sent(self._masked, self._filled.result())

    def missing_masks(self, target_tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor] | None:
        """As `masks`, of the rows that had none and one of whose tokens the grammar does not allow. target_tokens:
        int64 `[D]`, as chosen without them. None where all are right."""
        if not self._checked:
            return None
        started = time.perf_counter()
        tokens = target_tokens.tolist()
        wrong = [row for row in self._checked if not row.matcher.allows(_kept(row, tokens))]
        masks = None
        if wrong:
            masks = self._sent(wrong, self._states.fill([(row.matcher, row.drafts) for row in wrong]).result())
            for row in wrong:
                row.answer.num_eager_steps = STEPS_WITH_MASKS
        self._late_seconds = time.perf_counter() - started
        return masks

    def _sent(self, masked: list[_MaskedRow], filled: Filled) -> tuple[torch.Tensor, torch.Tensor]:
        masks, counts, _ = filled
        _, rows = spans(np.array([row.first for row in masked]), np.array(counts))
        bitmask, index = self._states.send([masks, rows.astype(np.int32)])
        return bitmask.view(masks.shape), index

    @property
    def mask_seconds(self) -> float:
        """How long filling the masks, or finding that there is no need to, took."""
        return self._late_seconds + (0.0 if self._filled is None else self._filled.result()[2])


def _kept(row: _MaskedRow, target_tokens: list[int]) -> list[int]:
    """The tokens that the step yields for a row, if the target's are these: the accepted drafts and one more."""
    drafts = row.drafts
    own = target_tokens[row.first : row.first + len(drafts) + 1]
    if own[:-1] == drafts:
        return own
    count = next(i for i, pair in enumerate(zip(own, drafts, strict=False)) if pair[0] != pair[1])
    return own[: count + 1]


class GrammarStates:
    """The answers with a grammar, by request id."""

    def __init__(
        self, compiler: GrammarCompiler | None, vocab_size: int, device: torch.device, beside: bool = True
    ) -> None:
        """Without a compiler, requests with a grammar fail. `beside`: masks are filled on threads of their own; else by
        the thread that runs the rows, for a model so small that to wake another one takes longer."""
        self._compiler = compiler
        self.answers: dict[str, GrammarAnswer] = {}
        num_threads = max(1, min(MAX_FILL_THREADS, usable_cores())) if beside else 1
        self._filler = BitmaskFiller(vocab_size, num_threads)
        self._thread = ThreadPoolExecutor(1, "dflash-masks") if beside else None
        self.checks = not beside and device.type == "cpu"
        self.send = Uploader(INITIAL_BYTES, device, grows=True).send if device.type == "cuda" else share

    def update(self, plan: SchedulerOutput) -> None:
        """Apply a plan's changes: `finished_req_ids`, then `new_requests`."""
        for request_id in plan.finished_req_ids:
            self.answers.pop(request_id, None)
        for new in plan.new_requests:
            if new.sampling.structured_outputs is not None:
                self.answers[new.request_id] = self._answer(new)

    def of(self, batch: HostBatch, before: StepGrammars | None) -> StepGrammars | None:
        """Those of a step's rows, whose masks begin to be filled unless they wait for those `before`, of the step in
        flight; None when no row has a grammar."""
        answers = {i: self.answers[name] for i, name in enumerate(batch.request_ids) if name in self.answers}
        if not answers:
            return None
        grammars = StepGrammars(answers, batch, self, before)
        if not grammars.waits:
            grammars.begin()
        return grammars

    def fill(self, answers: list[tuple[GrammarMatcher, list[int]]]) -> Future[Filled]:
        """Begin to fill the masks along the drafts of these answers."""
        if self._thread is not None:
            return self._thread.submit(_fill, self._filler, answers)
        filled: Future[Filled] = Future()
        filled.set_result(_fill(self._filler, answers))
        return filled

    def _answer(self, new: NewRequest) -> GrammarAnswer:
        """That of a request, new or resumed."""
        sampling, grammar = new.sampling, new.sampling.structured_outputs
        assert grammar is not None
        try:
            if self._compiler is None:
                raise GrammarError("needs a compiler, which this worker does not have")
            compiled = self._compiler.compile(grammar, new.eos_token_ids)
        except GrammarError as error:
            return GrammarAnswer(None, failure=f"the grammar of its structured output {error}")
        rules = MatcherRules(grammar.after_reasoning, sampling.min_tokens, sampling.stop_token_ids, sampling.ignore_eos)
        matcher = compiled.matcher(rules)
        matcher.advance(new.token_ids[new.num_prompt_tokens :])
        unfiltered = sampling.greedy or (sampling.top_p >= 1 and sampling.top_k <= 0 and sampling.min_p <= 0)
        return GrammarAnswer(matcher, len(new.token_ids), checkable=unfiltered and rules.grammar_alone)


def _fill(filler: BitmaskFiller, answers: list[tuple[GrammarMatcher, list[int]]]) -> Filled:
    started = time.perf_counter()
    masks, counts = filler.fill(answers)
    return masks, counts, time.perf_counter() - started
