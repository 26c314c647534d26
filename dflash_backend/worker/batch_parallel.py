"""Uses a CPU's cores for rows instead of within operations.

With a model so small that its weights stay in the cores' caches, an operation on a step's rows takes some tens of
microseconds, less than it costs to wake a second thread for it and to wait for both, hundreds of times a step. So the
rows of a step are cut into as many parts as there are cores, and each part runs verify, accept, inject and draft on a
thread of its own. The parts share only what no step writes: weights and published blocks (OWN). They meet once a step,
so a core that is busy with something else costs its share and no more.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Container, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import contextmanager
from typing import TypeVar

import torch

from dflash_backend.core.plan import ScheduledRequest
from dflash_kernels.cpu_ops import HAS_CPU_OPS

Part = TypeVar("Part")
Result = TypeVar("Result")

# Weights up to this size are taken to stay in the caches of a server's cores.
MAX_WEIGHT_BYTES = 64 * 1024**2
# Smaller parts are not worth a thread each: what threads do in Python, they do one after the other. As tokens, with
# weights of `FEW_WEIGHT_BYTES` or less; with larger ones a token takes longer, and fewer will do.
MIN_PART_WORK = 80
MIN_WORK_OF_LARGE = 16
FEW_WEIGHT_BYTES = 6 * 1024**2
# So much context of a row takes as long as another token of it, where it has few tokens; with this many it takes twice
# as long.
CONTEXT_OF_A_TOKEN = 128
TOKENS_TWICE = 16
# A single part with this many tokens, as of a long prompt, is better served by threads within its operations. So are
# rows with as many that cannot be cut evenly: whose parts would leave the cores idle for more than this of the time.
INTRA_OP_TOKENS = 256
MAX_IDLE = 0.15
# What the matcher of a row with a grammar does takes as long as a token, with the weights of the demo pair.
GRAMMAR_WORK = 1
# Rows whose numbers of drafts differ by less go by their contexts.
DRAFTS_ALIKE = 8
# The first steps of a size run in turn with one thread in operations and with all; later now and then one runs as the
# others do not. What a step adds to the mean of its kind, and the most that it may take, as times of that mean.
STEPS_TO_COMPARE, TRY_OTHER_EVERY, WEIGHT_OF_STEP, MAX_TIMES = 8, 32, 0.125, 4.0


def num_batch_threads(weight_bytes: int, num_cores: int) -> int:
    """How many threads share the rows: one for each of the `num_cores` that this engine may use, for a small model;
    else 1, which leaves the cores to torch's own threads."""
    return 1 if weight_bytes > MAX_WEIGHT_BYTES else num_cores


def num_op_threads(weight_bytes: int, num_cores: int) -> int:
    """How many threads an operation has in a process that shares a target with others and has `num_cores` for itself:
    for a small model 1."""
    return 1 if weight_bytes <= MAX_WEIGHT_BYTES else max(1, num_cores)


class OpThreadChoice:
    """How many threads the operations of a short step have: one, or all.

    Threads that share an operation meet hundreds of times a step. Where another process takes one of their cores for a
    moment, such as the server in front of this engine, all of them wait; with a small model that costs more than the
    threads gain. Whether it does depends on the machine and its load, so steps of each size are timed both ways.
    """

    def __init__(self) -> None:
        self.next_has_one: dict[int, bool] = {}
        """By size of a step, `num_tokens.bit_length()`: whether the next one has one thread. The first one has."""
        # How many have run, and seconds with one thread and with all.
        self._seen: dict[int, tuple[int, list[float]]] = {}

    def observe(self, size: int, one: bool, seconds: float) -> None:
        """Take in how long a step of this size has run, and choose for the next one."""
        count, known = self._seen.get(size, (0, [0.0, 0.0]))
        before = known[not one]
        known[not one] = before + WEIGHT_OF_STEP * (min(seconds, MAX_TIMES * before) - before) if before else seconds
        self._seen[size] = count, known = count + 1, known
        if count < STEPS_TO_COMPARE:
            self.next_has_one[size] = count % 2 == 0
        else:
            self.next_has_one[size] = (known[0] <= known[1]) != (count % TRY_OTHER_EVERY == 0)


class BatchThreads:
    """The calling thread and others, each running one part of a step with torch's own threading switched off."""

    def __init__(
        self,
        num_workers: int,
        batch_invariant: bool = False,
        weight_bytes: int = 0,
        op_threads: int | None = None,
    ) -> None:
        """batch_invariant: no operation has more threads in one step than in another. weight_bytes: of the models.
        op_threads: of an operation, with one worker; None: torch's own number."""
        self._op_threads = op_threads
        self.num_workers = num_workers
        few = MIN_PART_WORK * FEW_WEIGHT_BYTES // max(weight_bytes, FEW_WEIGHT_BYTES)
        self._min_part_work = max(MIN_WORK_OF_LARGE, few)
        self._batch_invariant = batch_invariant
        self._pool: ThreadPoolExecutor | None = None
        # Of verification and of drafting.
        self._choices = OpThreadChoice(), OpThreadChoice()
        if num_workers > 1:
            self._pool = ThreadPoolExecutor(num_workers - 1, "dflash-rows", _prepare_thread)

    def split(
        self, rows: Sequence[ScheduledRequest], with_grammar: Container[str] = ()
    ) -> list[list[ScheduledRequest]]:
        """Cut rows into parts that take about equally long; alike rows stay together. They are one part where there is
        little to do, or a few long prompts cannot be cut evenly. with_grammar: the ids of requests that have one.

        Rows are ordered first, by their tokens, roughly, and contexts, so that attention can pad neighbours to one
        batch.
        """
        if len(rows) == 1:
            return [list(rows)]
        # Adaptive rows differ in their drafts by a few, which is padded at less cost than their contexts' difference.
        ordered = sorted(rows, key=lambda row: (row.num_new, -(-row.num_draft // DRAFTS_ALIKE), row.num_computed))
        work = [_work(row) + GRAMMAR_WORK * (row.request_id in with_grammar) for row in ordered]
        total = sum(work)
        num_parts = max(1, min(self.num_workers, len(ordered), total // self._min_part_work))
        parts: list[list[ScheduledRequest]] = [[] for _ in range(num_parts)]
        work_of_parts, before = [0] * num_parts, 0
        for row, size in zip(ordered, work, strict=True):
            # The part that the middle of the row lies in.
            part = min(num_parts - 1, (2 * before + size) * num_parts // (2 * total))
            parts[part].append(row)
            work_of_parts[part] += size
            before += size
        if not self._batch_invariant and sum(row.num_new + row.num_draft for row in rows) >= INTRA_OP_TOKENS:
            cores = max(1, min(self.num_workers, total // self._min_part_work))  # that there is work for
            idle = 1 - total / (cores * max(work_of_parts))
            if idle > MAX_IDLE:
                return [ordered]
        return [part for part in parts if part]

    def run(
        self, work: Callable[[Part], Result], parts: Sequence[Part], num_tokens: int, drafts: bool = False
    ) -> list[Result]:
        """`work` for each part, at the same time; the results in order. An error of any part is raised, after all have
        ended. num_tokens: of all parts; many of them in a single part are better served by threads within operations.
        drafts: whether the work is drafting.
        """
        if self._op_threads is not None:
            with op_threads(self._op_threads):
                return [work(part) for part in parts]
        is_long = len(parts) == 1 and num_tokens >= INTRA_OP_TOKENS
        if self._pool is None or (is_long and not self._batch_invariant):
            return [work(part) for part in parts]
        # Threads of the operations in C++ begin at once, so that a single part may gain by them however short it is.
        if HAS_CPU_OPS and len(parts) == 1 and not self._batch_invariant:
            choice, size, number = self._choices[drafts], num_tokens.bit_length(), torch.get_num_threads()
            one = number == 1 or choice.next_has_one.get(size, True)
            torch.set_num_threads(1 if one else number)
            began = time.perf_counter()
            try:
                return [work(parts[0])]
            finally:
                torch.set_num_threads(number)
                choice.observe(size, one, time.perf_counter() - began)
        futures = [self._pool.submit(work, part) for part in parts[1:]]
        try:
            with op_threads(1):
                first = work(parts[0])
        finally:
            wait(futures)
        return [first] + [future.result() for future in futures]


def _work(row: ScheduledRequest) -> int:
    """How long a row takes, roughly, in the time of a token with little context."""
    num_tokens = row.num_new + row.num_draft
    return num_tokens + row.num_computed * (TOKENS_TWICE + num_tokens) // (TOKENS_TWICE * CONTEXT_OF_A_TOKEN)


_of_thread = threading.local()


def _prepare_thread() -> None:
    """For a thread of the pool: no threads within operations, and inference mode, as long as it runs."""
    # A thread takes over the process's setting when it first asks; what is set before that would be lost.
    torch.get_num_threads()
    torch.set_num_threads(1)
    _of_thread.mode = torch.inference_mode()
    _of_thread.mode.__enter__()


@contextmanager
def op_threads(number: int) -> Iterator[None]:
    """This many threads within operations, for the calling thread."""
    before = torch.get_num_threads()
    torch.set_num_threads(number)
    try:
        yield
    finally:
        torch.set_num_threads(before)
