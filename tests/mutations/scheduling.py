"""Defects of scheduling: which requests a step runs, and the shares of tenants."""

from __future__ import annotations

from tests.mutations.mutant import core_mutant

SCHEDULING = "tests/core/test_scheduling.py"
ENGINE = "tests/core/test_engine_core.py"
PROGRESS = "tests/core/test_progress.py"
FAIR = "tests/core/test_tenants.py"
STEP_TIME = "tests/core/test_step_time.py"
MODEL_BASED = "tests/core/test_core_random.py"

SCHEDULER_MUTANTS = (
    core_mutant(
        "the oldest request is preempted",
        "tenants",
        "return max(rest, key=",
        "return min(rest, key=",
        PROGRESS,
    ),
    core_mutant(
        "a preempted request goes to the end of the queue",
        "tenants",
        "heapq.heappush(tenant.queue, (request.rank, request))",
        "heapq.heappush(tenant.queue, ((request.num_preemptions, request.arrival), request))",
        PROGRESS,
    ),
    core_mutant(
        "a preempted request forgets its drafts",
        "scheduler",
        "request.num_preemptions += 1",
        "request.num_preemptions += 1\n        request.pending_draft = 0",
        SCHEDULING,
    ),
    core_mutant(
        "a resumed request runs its anchor again",
        "request",
        "return self.num_tokens - 1 if self.pending_draft else self.num_tokens",
        "return self.num_tokens",
        SCHEDULING,
    ),
    core_mutant("a finished request keeps its blocks", "scheduler", "        self.kv.release(request)\n", "", ENGINE),
    core_mutant(
        "the worker is not told who is gone",
        "scheduler",
        "        self._finished_req_ids.append(request.request_id)\n",
        "",
        ENGINE,
    ),
    core_mutant(
        "more requests run than can decode together",
        "scheduler",
        "if self._num_running_tokens + request.max_decode_tokens > config.max_num_batched_tokens:",
        "if self._num_running_tokens < 0:",
        SCHEDULING,
    ),
    core_mutant(
        "tokens of those who left are not given back",
        "scheduler",
        "self._num_running_tokens -= request.max_decode_tokens",
        "self._num_running_tokens -= 0",
        SCHEDULING,
    ),
    core_mutant(
        "those alongside a long prompt take the whole step",
        "plan_builder",
        "available -= available // 2",
        "pass",
        SCHEDULING,
    ),
    core_mutant(
        "a long prompt takes the whole step beside streams",
        "plan_builder",
        "return min(budget, share - self.num_prefill_tokens)",
        "return budget",
        SCHEDULING,
    ),
    core_mutant(
        "free blocks of a hit are counted twice at admission",
        "kv_manager",
        "<= self.pool.num_free - hit_from_free",
        "<= self.pool.num_free",
    ),
    core_mutant(
        "a request is admitted that cannot decode",
        "rows",
        "min(whole.num_positions + 1 + whole.num_next_draft,",
        "min(whole.num_positions,",
        SCHEDULING,
    ),
    core_mutant(
        "max_num_seqs is exceeded by one", "scheduler", "< config.max_num_seqs", "<= config.max_num_seqs", SCHEDULING
    ),
    core_mutant("deadlines are ignored", "deadlines", "self._heap[0][0] <= now", "self._heap[0][0] < 0", ENGINE),
    core_mutant(
        "the queue's bound is off by one",
        "admission",
        ">= min(config.max_queue_size, left):",
        "> min(config.max_queue_size, left):",
        ENGINE,
    ),
    core_mutant(
        "a stop token is not sent", "request", 'token_ids[:count], "stop"', 'token_ids[: count - 1], "stop"', ENGINE
    ),
    core_mutant(
        "tokens behind a stop token are sent", "request", 'token_ids[:count], "stop"', 'token_ids, "stop"', ENGINE
    ),
    core_mutant(
        "a stop token counts before min_tokens",
        "request",
        "token_id in self.stop_ids and self.num_output_tokens >= self.sampling.min_tokens",
        "token_id in self.stop_ids",
        ENGINE,
    ),
    core_mutant(
        "the pool a request needs is underestimated",
        "rows",
        "reach = k + config.lookahead(k)",
        "reach = config.lookahead(k)",
        ENGINE,
    ),
)

TENANTS_MUTANTS = (
    core_mutant(
        "of equal counters the oldest goes first",
        "tenants",
        "return self.service, -self.number",
        "return self.service, self.number",
        FAIR,
    ),
    core_mutant("weights are nothing", "tenants", "num_tokens / self.weight", "num_tokens", FAIR),
    core_mutant(
        "a newcomer has a claim",
        "tenants",
        "max(self._lowest, self._absent.pop(name, 0.0))",
        "self._absent.pop(name, 0.0)",
        FAIR,
    ),
    core_mutant("a pause pays a debt", "tenants", "        self._absent[tenant.name] = tenant.service\n", "", FAIR),
    core_mutant(
        "cached tokens cost as much as others", "tenants", "CACHED_TOKEN_COST = 1 / 32", "CACHED_TOKEN_COST = 1.0", FAIR
    ),
    core_mutant(
        "decode tokens are free",
        "plan_builder",
        ".charge(row.num_new + row.num_draft)",
        ".charge(row.num_new if row.num_new > 1 else 0)",
        FAIR,
    ),
    core_mutant(
        "priority is nothing",
        "request",
        "rank=(sampling.priority or DEFAULT_PRIORITY, arrival)",
        "rank=(0, arrival)",
        FAIR,
    ),
    core_mutant(
        "a request's time-out is nothing",
        "request",
        "(request.deadline_s, sampling.timeout / 1e6)",
        "(request.deadline_s,)",
        FAIR,
    ),
    core_mutant("nobody makes way", "preemption", "if left >= then and", "if left > 1e9 and", FAIR),
    core_mutant(
        "a tenant's only request makes way",
        "preemption",
        "left = (len(other.running) - 1) / other.weight",
        "left = len(other.running) + 1",
        FAIR,
    ),
    core_mutant("rows go to and fro", "preemption", "(min_lag if tenant.running else 0.0)", "0.0", FAIR),
    core_mutant(
        "the oldest request makes way",
        "preemption",
        "(request := tenant.latest(but=oldest))",
        "(request := tenant.latest())",
        FAIR,
        MODEL_BASED,
    ),
    core_mutant(
        "the latest goes, whoever holds the blocks",
        "preemption",
        "one[0].num_blocks / one[0].weight, one[1]",
        "0, one[1]",
        FAIR,
    ),
    core_mutant(
        "way is made and somebody else comes",
        "scheduler",
        "tenant, first = first or queue.next_turn(), None",
        "tenant = queue.next_turn()",
        FAIR,
    ),
    core_mutant(
        "a long prompt leaves nothing to another tenant",
        "plan_builder",
        "if (remaining > available or not is_first)",
        "if (remaining > available and is_first)",
        FAIR,
    ),
    core_mutant(
        "one tenant may fill the queue",
        "admission",
        ">= min(config.max_queue_size, left):",
        ">= config.max_queue_size:",
        FAIR,
    ),
    core_mutant(
        "rows that are free do not count for the queue",
        "admission",
        "num_free = max(0, config.max_num_seqs - num_running)",
        "num_free = 0",
        FAIR,
    ),
    core_mutant(
        "waiting tokens are not bounded", "admission", "if num_tokens + request.num_tokens > most:", "if False:", FAIR
    ),
    core_mutant(
        "what prompts have yet to take counts as free",
        "kv_manager",
        "- hit_from_free - num_promised",
        "- hit_from_free",
        FAIR,
    ),
    core_mutant(
        "a step may take any time", "scheduler", "if len(self.running) + len(self.waiting) > 1:", "if False:", STEP_TIME
    ),
    core_mutant(
        "one tenant's steps are as short as several's", "step_time", "if not several_tenants:", "if False:", STEP_TIME
    ),
    core_mutant(
        "a slow device computes next to no prompt",
        "step_time",
        "max(AUTO_STEP_S, AUTO_LIGHT_STEPS * light_s)",
        "AUTO_STEP_S",
        STEP_TIME,
    ),
    core_mutant(
        "one measurement decides",
        "step_time",
        "min(max(new, average / MAX_JUMP), average * MAX_JUMP)",
        "new * 1.0 if new > average else new / 1e3",
        STEP_TIME,
    ),
)
