"""An engine core on the toy worker whose every invariant is checked by content after every step.

`test_core_machine.py` lets hypothesis choose what happens and shrinks what breaks, `test_core_random.py` runs many more
steps from seeds. What the toy checks while a step runs (OWN, RESERVE, WINDOW, and that every row reads its own KV) is
checked here as well, by running it; what must hold between steps is below.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence

from checks.core_state import check_core, check_pool
from dflash_backend.core.kv.groups import KVGroup, RecurrentStates
from dflash_backend.core.moves import Record
from dflash_backend.core.plan import DraftBudget, ScheduledRequest
from dflash_backend.core.request import Request
from dflash_backend.core.scheduler import Scheduler
from dflash_backend.core.scheduler_config import SchedulerConfig
from dflash_backend.messages import GenerationRequest, RequestFailed
from tests.core.toy_engine import Engine, lookup
from tests.core.toy_model import expected_output, prefix_states, root_state
from tests.core.toy_mover import ToyMover
from tests.support.budgets import choose_budgets

# Calls of `step` that may go by without progress of the oldest request when steps overlap: it had no row in the last
# step, behind one of its own, and that is collected before anything is planned; then nothing is left to collect.
MAX_CALLS_WITHOUT_PROGRESS = 2
MAX_STEPS_TO_FINISH = 10_000


def give_any_budget(scheduler: Scheduler) -> None:
    """Let most steps verify some of their drafts only, whatever pays: how many follows from the step's rows."""
    numbers = itertools.count(1)

    def budget(rows: Sequence[ScheduledRequest]) -> DraftBudget | None:
        num_there = sum(row.num_draft for row in rows)
        num_drafts = hash((19, next(numbers), num_there)) % (num_there + 1)
        if num_drafts == num_there:
            return None
        return DraftBudget(num_drafts, 0.5, [1.0] * 8, [hash((20, i)) % 3 - 1.0 for i in range(len(rows))])

    choose_budgets(scheduler, budget)


def snapshot_of(groups: Sequence[KVGroup], block_hash: bytes) -> int | None:
    """The slot of the copy that can be found behind a block."""
    for snapshots in (group.snapshots for group in groups if isinstance(group, RecurrentStates)):
        return snapshots.slot(block_hash)
    return None


class CheckedEngine(Engine):
    """`Engine` with the checks of a model: which KV lies where, and what every request must yield."""

    def __init__(
        self, config: SchedulerConfig, lag: int | Callable[[], int] | None = None, mover: ToyMover | None = None
    ) -> None:
        super().__init__(config, lag, mover=mover)
        self._patience = 0 if lag is None else MAX_CALLS_WITHOUT_PROGRESS
        self._calls_without_progress = 0
        self._failed_before = False
        self.worker.keep_plans = False
        self.requests: dict[str, GenerationRequest] = {}
        # Requests that may have published in the last step: those that run, and those that ran before it.
        self._seen: dict[str, Request] = {}
        self._states: dict[str, list[int]] = {}
        self._seeds: dict[str, int] = {}
        # What a record of each group must hold, by group and hash, of all requests so far, where there are tiers.
        self._records: dict[tuple[int, bytes], list[int]] = {}
        self._interrupted: set[str] = set()
        self._num_calls = 0
        self._oldest_progress: tuple[str, int, int] | None = None
        if config.adaptive_speculation:
            give_any_budget(self.scheduler)

    def add(self, *requests: GenerationRequest) -> None:
        super().add(*requests)
        for request in requests:
            self.requests[request.request_id] = request
            self._seeds[request.request_id] = self.scheduler.waiting[request.request_id].seed
            self._states[request.request_id] = [root_state(request.sampling.cache_salt)]

    def abort(self, request_id: str) -> None:
        self._end(request_id, {})

    def stop(self, request_id: str) -> None:
        self._end(request_id, {request_id: len(self.outputs[request_id].token_ids)})

    def _end(self, request_id: str, num_output_tokens: dict[str, int]) -> None:
        if self.outputs[request_id].finish_reason is None:
            self._interrupted.add(request_id)
        self.core.abort([request_id], num_output_tokens)
        if self._num_calls % 3:
            self._check_between_steps()

    def step(self) -> None:
        num_refused, num_failed = len(self.worker.refused), self.worker.num_failed
        self._seen = dict(self.scheduler.running)
        outputs = self.core.step()
        self.take(outputs.deltas)
        self._seen.update(self.scheduler.running)
        self._take_failed(outputs.failed)
        # Of every third step the drafts are left to the next one, so that requests end before them.
        self._num_calls += 1
        if self._num_calls % 3:
            self._check_between_steps()
        # The call after a failed step runs its requests alone, and each is computed anew from there.
        if self.worker.num_failed > num_failed or self._failed_before:
            self._oldest_progress, self._calls_without_progress = None, 0
        elif len(self.worker.refused) == num_refused:
            self._check_oldest()
        elif (oldest := self._oldest()) is not None and self._oldest_progress is not None:
            # Who is the oldest may be preempted in the same call once an older one was admitted.
            self._oldest_progress = None if oldest.request_id != self._oldest_progress[0] else self._oldest_progress
        self._failed_before = self.worker.num_failed > num_failed

    def finish(self) -> None:
        """Run until nothing is left, and check what all requests yielded."""
        for _ in range(MAX_STEPS_TO_FINISH):
            if not self.core.has_unfinished():
                break
            self.clock.now += 1.0
            self.step()
        else:
            raise AssertionError(f"not done after {MAX_STEPS_TO_FINISH} steps")
        check_pool(self.pool, [])
        assert self.pool.num_free == self.pool.num_blocks, "RETURN"
        if self.window_pool is not None:
            check_pool(self.window_pool, [])
            assert self.window_pool.num_free == self.window_pool.num_blocks, "RETURN: layers with a window"
        for request_id in self.requests:
            self._check_output(request_id)

    def _take_failed(self, failed: list[RequestFailed]) -> None:
        """Requests that were given up because a step with them alone does not fit the device's memory, or fails."""
        self.failed += failed
        for failure in failed:
            assert self.worker.max_tokens_in_memory is not None or self.worker.num_failed
            self._interrupted.add(failure.request_id)

    def _check_between_steps(self) -> None:
        self.core.collect_drafts()
        check_core(self.core)
        self._check_published()
        salt_of: dict[int, str] = {}
        for request in self.scheduler.running.values():
            for block_id in request.block_ids:
                salt = request.sampling.cache_salt
                assert salt_of.setdefault(block_id, salt) == salt, "ISOLATE"

    def _check_published(self) -> None:
        """PUBLISH, TOGETHER: under every name that a request would look for lies a block that holds, for target and
        drafter, the final KV of exactly its tokens: no query, no rejected draft, no other prefix, no other salt."""
        worker, pool = self.worker, self.pool
        block_size = self.core.config.block_size
        shift = int(self.core.config.reads_next_tokens)  # the drafter's KV is that of the token behind
        for request in self._seen.values():
            states = self._states[request.request_id]
            states += prefix_states(request.token_ids[len(states) - 1 :], states[-1])
            for index, block_hash in enumerate(request.block_hashes.first(0, ())):
                if self.mover is not None:
                    self._note_records(index, block_hash, states)
                slot = snapshot_of(self.scheduler.kv.groups, block_hash)
                if slot is not None:
                    behind = states[(index + 1) * block_size]
                    assert worker.snapshots[slot] == behind, f"the copy behind block {index} is of another prefix"
                first = index * block_size + 1
                expected = states[first : first + block_size]
                window_id = None if self.window_pool is None else lookup(self.window_pool, block_hash)
                if window_id is not None:
                    found = worker.window_kv[window_id * block_size : (window_id + 1) * block_size]
                    assert found == expected, f"PUBLISH: layers with a window, block {window_id}"
                block_id = lookup(pool, block_hash)
                if block_id is None:
                    continue
                start = block_id * block_size
                of_next = states[first + shift : first + shift + block_size]
                assert worker.target_kv[start : start + block_size] == expected, f"PUBLISH: target, block {block_id}"
                assert worker.drafter_kv[start : start + block_size] == of_next, f"PUBLISH: drafter, block {block_id}"

    def _note_records(self, index: int, block_hash: bytes, states: list[int]) -> None:
        """What the records of a block hold, in each group, as far as its tokens are known."""
        size, shift = self.core.config.block_size, int(self.core.config.reads_next_tokens)
        first = index * size + 1
        if len(states) < first + size + shift:
            return
        target = states[first : first + size]
        of_next = states[first + shift : first + shift + size]
        middle = size // 2
        full = [*target[:middle], *of_next[:middle], *target[middle:], *of_next[middle:]]
        of_groups = [full]
        if self.window_pool is not None:
            of_groups.append(target)
        of_groups.append([states[(index + 1) * size]])
        for group, expected in enumerate(of_groups):
            self._records[group, block_hash] = expected

    def check_tiers(self) -> int:
        """Every record that a tier would give holds what its hash says: no other text, no query, no torn half. Returns
        how many were looked at."""
        tiers, num_seen = self.scheduler.kv.tiers, 0
        assert tiers is not None
        assert self.mover is not None
        for tier in tiers.tiers:
            for (group, block_hash), expected in self._records.items():
                if group < len(tiers.groups) and (slot := tier.groups[group].slot(block_hash)) is not None:
                    found = self.mover.content(tier.name, Record(group, block_hash, slot, 0))
                    assert found == expected, f"{tier.name}, group {group}: {found}, not {expected}"
                    num_seen += 1
        return num_seen

    def _check_oldest(self) -> None:
        """The oldest request comes nearer to its end, whatever the others do: in every step, and with a step in flight
        in every few."""
        running, oldest = self.scheduler.running, self._oldest()
        before = self._oldest_progress
        if before is not None and before[0] in self.core._requests:
            assert before[0] in running, f"{before[0]} was the oldest that ran, and was preempted"
        if oldest is None:
            self._oldest_progress = None
            return
        now = oldest.request_id, oldest.num_tokens, oldest.num_computed
        if before is not None and before[0] == now[0] and before[2] == now[2]:
            assert before == now, "tokens came without a computed position"
            self._calls_without_progress += 1
            assert self._calls_without_progress <= self._patience, f"the oldest request {before} made no progress"
            return
        assert before is None or before[0] != now[0] or before[1:] < now[1:]
        self._oldest_progress = now
        self._calls_without_progress = 0

    def _oldest(self) -> Request | None:
        """Of the running requests the one that arrived first."""
        return min(self.scheduler.running.values(), key=lambda request: request.arrival, default=None)

    def _check_output(self, request_id: str) -> None:
        """LOSSLESS: the output is the model's own; a prefix of it where the request was cut short from outside."""
        output = self.outputs[request_id]
        tokens, reason = expected_output(self.requests[request_id], self.core.config, self._seeds[request_id])
        if request_id in self._interrupted or output.finish_reason == "abort":
            assert output.token_ids == tokens[: len(output.token_ids)]
        else:
            assert (output.token_ids, output.finish_reason) == (tokens, reason)
