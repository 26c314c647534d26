"""What steps take on a CPU, measured before the first request by running some of made-up tokens.

With it the first decision of how many tokens are drafted needs no steps that draft too many. A GPU's captured steps are
measured by `worker.graphs.measured_padded_steps`.
"""

from __future__ import annotations

import dataclasses
import random
import time
from collections.abc import Collection, Iterator

from dflash_backend.core.admission import RequestError
from dflash_backend.core.engine import EngineCore
from dflash_backend.core.plan import DraftOutput, MeasuredStep, ModelRunnerOutput, SchedulerOutput, Worker
from dflash_backend.core.scheduler_config import SchedulerConfig
from dflash_backend.messages import GenerationRequest, SamplingParams

# Rows of the steps: the most of each size that `core.speculation.costs` tells apart. More rows would take memory that a
# server with few requests never needs.
NUM_ROWS = (1, 4, 16)
# Drafts of each row, as parts of k.
SHARES = (0.0, 1.0, 0.25)
# Steps of a kind, after that of the prompts. The shortest counts.
NUM_STEPS = 3
PROMPT_TOKENS = 2
# All of them take no longer than this, in seconds: where steps are slow, only those of few rows are measured.
MOST_S = 0.5


class TimedWorker:
    """A `core.plan.Worker` that runs steps on `worker` and keeps the shortest time of each kind. Steps with prompts are
    none, nor those whose rows differ in their drafts."""

    def __init__(self, worker: Worker) -> None:
        self._worker = worker
        self._begun = 0.0
        self._plan: SchedulerOutput | None = None
        self.last_s = 0.0
        """Seconds of the latest step."""
        self.shortest: dict[tuple[int, int, int], tuple[float, float]] = {}
        """By rows, tokens and drafts that each row proposes: seconds without drafting, and of drafting."""

    @property
    def overlaps(self) -> bool:
        return self._worker.overlaps

    def submit(self, plan: SchedulerOutput) -> None:
        self._begun, self._plan = time.perf_counter(), plan
        self._worker.submit(plan)

    def reset(self) -> None:
        self._worker.reset()

    def collect_results(self) -> ModelRunnerOutput:
        return self._worker.collect_results()

    def collect_drafts(self, ended: Collection[str]) -> DraftOutput:
        drafts = self._worker.collect_drafts(ended)
        self.last_s = time.perf_counter() - self._begun
        rows = [] if self._plan is None else self._plan.rows
        kinds = {(row.num_draft, row.num_next_draft) for row in rows}
        if len(kinds) == 1 and all(row.num_new == 1 for row in rows):
            num_draft, num_next_draft = kinds.pop()
            kind = len(rows), len(rows) * (1 + num_draft), num_next_draft
            draft_s = drafts.phase_seconds.get("draft", 0.0) if num_next_draft else 0.0
            times = self.last_s - draft_s, draft_s
            self.shortest[kind] = min(times, self.shortest.get(kind, times), key=sum)
        return drafts


def measured_steps(config: SchedulerConfig, worker: Worker, vocab_size: int) -> tuple[MeasuredStep, ...]:
    """The times of steps of 1 to 16 rows, without drafts and with. It takes `MOST_S` at most, and one step more. The
    worker has no requests before and after it, and of its KV only blocks that no request has are written."""
    alone = dataclasses.replace(
        config, adaptive_speculation=False, enable_prefix_caching=False, kv_events="off", tiers=(), transfer=None
    )
    timed = TimedWorker(worker)
    ends = time.perf_counter() + MOST_S
    for _ in _steps(alone, timed, vocab_size):
        if time.perf_counter() + timed.last_s > ends:
            break
    worker.reset()
    return tuple(
        MeasuredStep(num_rows, num_tokens, width, target_s, draft_s)
        for (num_rows, num_tokens, width), (target_s, draft_s) in timed.shortest.items()
    )


def _steps(config: SchedulerConfig, timed: TimedWorker, vocab_size: int) -> Iterator[None]:
    """Runs them, those of few rows first, and stops after each."""
    rng = random.Random(0)
    core = EngineCore(config, timed)
    lengths = sorted({round(share * config.num_speculative_tokens) for share in SHARES})
    for num_rows in sorted({min(number, config.max_num_seqs) for number in NUM_ROWS}):
        for length in lengths:
            sampling = SamplingParams(
                max_tokens=min((1 + NUM_STEPS) * (1 + length), config.max_model_len - PROMPT_TOKENS),
                temperature=0.0,
                num_speculative_tokens=length,
            )
            names = [str(number) for number in range(num_rows)]
            try:
                for name in names:
                    prompt = [rng.randrange(vocab_size) for _ in range(PROMPT_TOKENS)]
                    core.add_request(GenerationRequest(name, prompt, sampling))
            except RequestError:
                return  # too short a model, or a pool with too few blocks
            for _ in range(1 + NUM_STEPS):
                if core.has_unfinished():
                    core.step()
                    core.collect_drafts()
                    yield
            core.abort(names)
            while core.has_unfinished():
                core.step()
