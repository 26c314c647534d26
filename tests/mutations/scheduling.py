"""Defects of scheduling: which requests a step runs, and the shares of tenants."""

from __future__ import annotations

from tests.mutations.mutant import Mutant, mutants_of

CORE = "dflash_backend/core"
ENGINE = ("tests/core/test_engine_core.py",)
PROGRESS = ("tests/core/test_progress.py",)
RANDOM = ("tests/core/test_core_random.py",)
SCHEDULING = ("tests/core/test_scheduling.py",)
STEP_TIME = ("tests/core/test_step_time.py",)
TENANTS = ("tests/core/test_tenants.py",)

SCHEDULING_MUTANTS = (
    *mutants_of(
        f"{CORE}/tenants.py",
        PROGRESS,
        ("the oldest request is preempted", "return max(rest, key=", "return min(rest, key="),
        (
            "a preempted request goes to the end of the queue",
            "heapq.heappush(tenant.queue, (request.rank, request))",
            "heapq.heappush(tenant.queue, ((request.num_preemptions, request.arrival), request))",
        ),
    ),
    *mutants_of(
        f"{CORE}/scheduler.py",
        SCHEDULING,
        (
            "a preempted request loses its drafts",
            "request.num_preemptions += 1",
            "request.num_preemptions += 1\n        request.num_pending_drafts = 0",
        ),
        (
            "more requests run than can decode together",
            "self._num_running_tokens + request.max_decode_tokens <= config.max_num_batched_tokens",
            "True",
        ),
        ("tokens of requests that ended are not given back", "-= request.max_decode_tokens", "-= 0"),
        ("max_num_seqs is exceeded by one", "< config.max_num_seqs", "<= config.max_num_seqs"),
    ),
    Mutant(
        "a resumed request runs its anchor again",
        f"{CORE}/request.py",
        "return self.num_tokens - 1 if self.num_pending_drafts else self.num_tokens",
        "return self.num_tokens",
        SCHEDULING,
    ),
    *mutants_of(
        f"{CORE}/scheduler.py",
        ENGINE,
        ("a finished request keeps its blocks", "        self.kv.release(request)\n", ""),
        (
            "the worker is not told which requests ended",
            "        self._finished_req_ids.append(request.request_id)\n",
            "",
        ),
    ),
    *mutants_of(
        f"{CORE}/scheduler.py",
        SCHEDULING,
        ("those alongside a long prompt take the whole step", "available -= available // 2", "pass"),
        ("a long prompt takes the whole step beside streams", "min(budget, share - self.num_prefill_tokens)", "budget"),
    ),
    Mutant(
        "free blocks of a hit are counted twice at admission",
        f"{CORE}/kv/groups.py",
        "<= self.pool.num_free - hit_from_free",
        "<= self.pool.num_free",
        RANDOM,
    ),
    Mutant(
        "a request is admitted that cannot decode",
        f"{CORE}/request.py",
        "min(whole.num_positions + 1 + whole.num_next_draft,",
        "min(whole.num_positions,",
        SCHEDULING,
    ),
    Mutant("deadlines are ignored", f"{CORE}/engine.py", "self.heap[0][0] <= now", "self.heap[0][0] < 0", ENGINE),
    Mutant(
        "the queue's bound is off by one",
        f"{CORE}/admission.py",
        ">= min(config.max_queue_size, left)",
        "> min(config.max_queue_size, left)",
        ENGINE,
    ),
    *mutants_of(
        f"{CORE}/request.py",
        ENGINE,
        (
            "a stop token is not sent",
            "token_ids = token_ids[: length - num_before]",
            "token_ids = token_ids[: length - num_before - 1]",
        ),
        ("tokens behind a stop token are sent", "token_ids = token_ids[: length - num_before]", "pass"),
        (
            "a stop token counts before min_tokens",
            "token_id in self.stop_ids and length >= self.min_tokens",
            "token_id in self.stop_ids",
        ),
    ),
    Mutant(
        "the pool that the last verification needs is not counted",
        f"{CORE}/request.py",
        "max(target, verifying, min(by_tokens, by_window))",
        "max(target, min(by_tokens, by_window))",
        ENGINE,
    ),
    Mutant(
        "the pool a request needs is underestimated",
        f"{CORE}/request.py",
        "reach = k + config.lookahead[k]",
        "reach = config.lookahead[k]",
        ENGINE,
    ),
    *mutants_of(
        f"{CORE}/tenants.py",
        TENANTS,
        ("of equal counters the oldest goes first", "-self.number", "self.number"),
        ("weights are nothing", "num_tokens / self.weight", "num_tokens"),
        ("who comes starts from what was the lowest counter long ago", "            self._find_lowest()\n", ""),
        ("a tenant that leaves does not count as one that was there", "leaving=tenant", "None"),
        ("a newcomer has a claim", "max(self._lowest, self._absent.pop(name, 0.0))", "self._absent.pop(name, 0.0)"),
        ("a pause pays a debt", "        self._absent[tenant.name] = tenant.service\n", ""),
        ("cached tokens cost as much as others", "CACHED_TOKEN_COST = 1 / 32", "CACHED_TOKEN_COST = 1.0"),
    ),
    *mutants_of(
        f"{CORE}/scheduler.py",
        TENANTS,
        ("decode tokens are free", "(row.num_new + row.num_draft)", "(row.num_new if row.num_new > 1 else 0)"),
    ),
    *mutants_of(
        f"{CORE}/request.py",
        TENANTS,
        ("priority is nothing", "rank=(sampling.priority or DEFAULT_PRIORITY, arrival)", "rank=(0, arrival)"),
        ("a request's time-out is nothing", "(request.deadline_s, sampling.timeout / 1e6)", "(request.deadline_s,)"),
    ),
    Mutant(
        "no request is preempted for a tenant that waits for tokens of a step",
        f"{CORE}/scheduler.py",
        "if self._num_running_tokens + request.max_decode_tokens > config.max_num_batched_tokens:",
        "if self._num_running_tokens < 0:",
        TENANTS,
    ),
    *mutants_of(
        f"{CORE}/tenants.py",
        TENANTS,
        ("no request is preempted for a tenant without a row", "if left >= then and", "if left > 1e9 and"),
        ("a tenant's only request is preempted", "(len(other.running) - 1) / other.weight", "len(other.running) + 1"),
        (
            "rows are preempted without regard to weight",
            "(len(other.running) - 1) / other.weight",
            "len(other.running) - 1",
        ),
        ("two tenants preempt each other in turn", "(min_lag if tenant.running else 0.0)", "0.0"),
        (
            "the latest request is preempted, whichever tenant holds the blocks",
            "one[0].num_blocks / one[0].weight",
            "0",
        ),
    ),
    Mutant(
        "the oldest request is preempted for another tenant",
        f"{CORE}/tenants.py",
        "(request := tenant.latest(but=oldest))",
        "(request := tenant.latest())",
        TENANTS + RANDOM,
    ),
    Mutant(
        "a row is freed and another tenant takes it",
        f"{CORE}/scheduler.py",
        "made_way = first is not None\n            tenant = first or (queue.next_turn()",
        "made_way = False\n            tenant = (queue.next_turn()",
        TENANTS,
        ((f"{CORE}/scheduler.py", "            first = None\n", ""),),
    ),
    *mutants_of(
        f"{CORE}/admission.py",
        TENANTS,
        ("one tenant may fill the queue", ">= min(config.max_queue_size, left):", ">= config.max_queue_size:"),
        (
            "rows that are free do not count for the queue",
            "num_free = max(0, config.max_num_seqs - num_running)",
            "num_free = 0",
        ),
        ("waiting tokens are not bounded", "if num_tokens + request.num_tokens > most:", "if False:"),
    ),
    Mutant(
        "what prompts have yet to take counts as free",
        f"{CORE}/kv/groups.py",
        "- hit_from_free - num_promised",
        "- hit_from_free",
        TENANTS,
    ),
    *mutants_of(
        f"{CORE}/scheduler.py",
        ("tests/core/test_scheduling.py",),
        ("many prompt tokens get no more", "most, self.num_prompt_tokens // STEPS_OF_PROMPTS)", "most)"),
        (
            "of prompts those that wait do not count",
            "        self.num_prompt_tokens += queue.num_waiting_tokens\n",
            "",
        ),
        (
            "what a prompt has done counts as left",
            "sum(request.prefill_end - next_start(request) for request in in_prefill)",
            "sum(request.prefill_end for request in in_prefill)",
        ),
    ),
    Mutant(
        "a step may take any time",
        f"{CORE}/scheduler.py",
        "if len(self.running) + len(waiting) > 1:",
        "if False:",
        STEP_TIME,
    ),
    Mutant(
        "a step is planned as if its rows had no positions",
        f"{CORE}/scheduler.py",
        "self.num_positions += request.num_computed",
        "self.num_positions += 0",
        STEP_TIME,
    ),
    Mutant(
        "a step is observed as if its rows had no positions",
        f"{CORE}/scheduler.py",
        "num_positions = sum(row.num_computed for row in plan.rows)",
        "num_positions = 0",
        STEP_TIME,
    ),
    Mutant(
        "a tenant that left is forgotten at once",
        f"{CORE}/step_time.py",
        "queue.num_left, now + SEVERAL_TENANTS_S",
        "queue.num_left, now",
        STEP_TIME,
    ),
    *mutants_of(
        f"{CORE}/step_time.py",
        STEP_TIME,
        ("prompts between steps have each of these taken in", "if size == self._plain_size else 1", "if False else 1"),
        ("steps of many more tokens are left out", "if size == self._plain_size else 1", "if True else 1"),
        ("the last prompts wait though nothing decodes", "LAST_PROMPTS = 2", "LAST_PROMPTS = 1"),
        (
            "the last prompts keep streams waiting",
            "num_prompting is not None or num_decode_tokens or",
            "num_prompting is not None or",
        ),
        (
            "the last prompts keep other tenants waiting",
            "most is None or num_prompting is not None or",
            "most is None or",
        ),
    ),
    *mutants_of(
        f"{CORE}/step_time.py",
        STEP_TIME,
        (
            "one tenant's steps are as short as several's",
            "max(AUTO_LONG_STEP_S, ONE",
            "max(AUTO_STEP_S, ONE",
        ),
        (
            "one tenant's steps are as short as several's where that is set",
            "(ONE_TENANT_FACTOR if num_prompting is None else 1)",
            "1",
        ),
        (
            "a slow device computes next to no prompt",
            "max(AUTO_STEP_S, AUTO_LIGHT_STEPS * light_s, longer_s)",
            "AUTO_STEP_S",
        ),
        (
            "many tenants' steps may take any time",
            "min(light_steps * light_s, AUTO_LONG_STEP_S)",
            "light_steps * light_s",
        ),
        (
            "steps stay short though all tenants have requests that wait",
            "LIGHT_STEPS_PER_WAITING * max(least_waiting - 1, 0)",
            "0",
        ),
        ("tokens do not vary", "(1 + self._dither) *", "1 *"),
        ("positions count as nothing", "_KILO * num_positions, num_prefill_tokens]", "0.0, num_prefill_tokens]"),
    ),
)
