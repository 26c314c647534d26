"""The defects that the tests must notice, each a replacement of text: those of the core here, the rest in
`planted` and `drafters`.

Called by `run.py`, which applies them, and by `test_mutants.py`, which keeps their texts in step with the source.
"""

from __future__ import annotations

from tests.mutations import drafters, planted
from tests.mutations.mutant import Mutant

INVARIANTS = "tests/core/test_invariants.py"
SCHEDULING = "tests/core/test_scheduling.py"
POOL = "tests/core/test_block_pool.py"
PREFIX = "tests/core/test_prefix_cache.py"
ENGINE = "tests/core/test_engine_core.py"
OVERLAP = "tests/core/test_overlap.py"
PROGRESS = "tests/core/test_progress.py"
FAIR = "tests/core/test_tenants.py"
STEP_TIME = "tests/core/test_step_time.py"
MODEL_BASED = "tests/core/test_core_random.py"
CONTEXT_KV = "tests/worker/test_context_kv.py"
DRAFTS = "tests/worker/test_draft_alignment.py"
QK_NORM_ROPE_WRITE = "tests/kernels/test_qk_norm_rope_write.py"


def _core(name: str, module: str, before: str, after: str, *tests: str) -> Mutant:
    return Mutant(name, f"dflash_backend/core/{module}.py", before, after, tests or (MODEL_BASED,))


_INVARIANTS = (
    _core(
        "RESERVE: lookahead of k instead of k + 1",
        "scheduler_config",
        "return k + self.lookahead_base if k > 0 else 0",
        "return k",
        INVARIANTS,
    ),
    _core(
        "RESERVE: no lookahead on a prefill",
        "rows",
        "    num_positions = end + config.lookahead(k)\n    return ScheduledRequest(\n",
        "    num_positions = end\n    return ScheduledRequest(\n",
        INVARIANTS,
    ),
    _core(
        "RESERVE: no lookahead behind verified drafts",
        "rows",
        "    num_positions = end + config.lookahead(k)\n    return ScheduledRequest(request.request_id, start, 1,",
        "    num_positions = end\n    return ScheduledRequest(request.request_id, start, 1,",
        INVARIANTS,
    ),
    _core(
        "WINDOW: maximum length without the anchor's slot",
        "scheduler_config",
        "return num_tokens + k <= self.max_drafting_len",
        "return num_tokens + k - 1 <= self.max_drafting_len",
        INVARIANTS,
    ),
    _core(
        "WINDOW: drafting past max_model_len",
        "scheduler_config",
        "min(self.drafter_max_len, self.max_model_len)",
        "self.drafter_max_len",
        SCHEDULING,
    ),
    _core(
        "LOSSLESS: rejected positions count as computed",
        "engine",
        "request.num_computed += row.num_new + result.num_accepted",
        "request.num_computed += row.num_new + row.num_draft",
        INVARIANTS,
    ),
    Mutant(
        "LOSSLESS: rejected positions injected, and the drafter goes on behind them",
        "kernels/dflash_kernels/accept.py",
        "computed.numpy()[index[real]] = end[real]",
        "computed.numpy()[index[real]] = (first + lens)[real]",
        (DRAFTS,),
    ),
    Mutant(
        "TOGETHER: prefill chunks bring no drafter K/V",
        "dflash_backend/worker/step_ops.py",
        "final = slots.numpy() >= 0",
        "final = (slots.numpy() >= 0) & (batch.logits_start.numpy() >= 0)[batch.token_row.numpy()]",
        (CONTEXT_KV,),
    ),
    _core(
        "PUBLISH: a block is published before its last token was run",
        "kv_manager",
        "num_full = min(request.num_computed, request.num_tokens) // self._block_size",
        "num_full = request.num_tokens // self._block_size",
        INVARIANTS,
    ),
    _core(
        "PUBLISH: the last full block of a hit is dropped",
        "kv_manager",
        "num_blocks = (request.prefill_end - 1) // self._block_size",
        "num_blocks = max(0, (request.prefill_end - 1) // self._block_size - 1)",
        INVARIANTS,
    ),
    Mutant(
        "OWN: padding rows are written",
        "kernels/dflash_kernels/qk_norm_rope_write.py",
        "if slot >= 0:",
        "if slot >= -1:",
        (QK_NORM_ROPE_WRITE,),
    ),
)

_CACHE = (
    _core(
        "a block that is not full is published",
        "kv_manager",
        "num_full = min(request.num_computed, request.num_tokens) // self._block_size",
        "num_full = -(-min(request.num_computed, request.num_tokens) // self._block_size)",
    ),
    _core(
        "the last full block is not published",
        "kv_manager",
        "num_full = min(request.num_computed, request.num_tokens) // self._block_size",
        "num_full = (min(request.num_computed, request.num_tokens) - 1) // self._block_size",
        SCHEDULING,
    ),
    _core(
        "accepted tokens past a stop are published",
        "kv_manager",
        "num_full = min(request.num_computed, request.num_tokens) // self._block_size",
        "num_full = request.num_computed // self._block_size",
        SCHEDULING,
    ),
    _core(
        "a hit leaves nothing to compute",
        "kv_manager",
        "num_blocks = (request.prefill_end - 1) // self._block_size",
        "num_blocks = request.prefill_end // self._block_size",
        SCHEDULING,
    ),
    _core(
        "the salt is not hashed", "prefix_cache", '_ROOT_TAG + cache_salt.encode("utf-8", "surrogatepass")', "_ROOT_TAG"
    ),
    _core(
        "a block hash is not chained to its parent",
        "prefix_cache",
        "hashlib.sha256(parent + packed)",
        "hashlib.sha256(packed)",
    ),
    _core(
        "the chain does not move on",
        "prefix_cache",
        "self._last = hash_block(self._last, packed[start : start + size])\n",
        "self._last = hash_block(self._hashes[0] if self._hashes else self._last, packed[start : start + size])\n",
        PREFIX,
    ),
    _core(
        "no reference is taken on a hit",
        "block_pool",
        "self._ref_counts[block_id] += 1",
        "self._ref_counts[block_id] += 0",
    ),
    _core(
        "a block that is held stays in the eviction list",
        "block_pool",
        "if self._ref_counts[block_id] == 0:\n                self._unlink(block_id)",
        "if self._ref_counts[block_id] < 0:\n                self._unlink(block_id)",
    ),
    _core(
        "a freed block that is cached counts as unused",
        "block_pool",
        "if self._hashes[block_id] is None:\n                    self._unused.append(block_id)",
        "if block_id >= 0:\n                    self._unused.append(block_id)",
    ),
    _core(
        "a block is found by its place and not by its hash",
        "block_pool",
        "hint if hint >= 0 and hash_of[hint] == block_hash else cached.get(block_hash)",
        "hint if hint >= 0 else cached.get(block_hash)",
    ),
    _core("an evicted block can still be found", "block_pool", "        del self._cached[block_hash]\n", ""),
    _core(
        "a second block takes over a hash",
        "block_pool",
        "        if block_hash in self._cached:\n            return False\n",
        "",
    ),
    _core("a chain's head is evicted before its tail", "block_pool", "in reversed(block_ids)", "in block_ids", POOL),
    _core("the newest cold block is evicted", "block_lists", "return self._next[", "return self._prev[", POOL),
    _core(
        "a hit does not make a block protected",
        "block_pool",
        "self._reused[block_id] = 1",
        "self._reused[block_id] = 0",
        POOL,
    ),
    _core(
        "protected blocks never grow old",
        "block_pool",
        "age > PROTECTED_LIFE_IN_POOLS * self.num_blocks",
        "age < 0",
        POOL,
    ),
    _core(
        "protected blocks may fill the pool",
        "block_pool",
        "if self._num_protected > self._max_protected:",
        "if self._num_protected < 0:",
        POOL,
    ),
    _core(
        "preempted requests make their own blocks hot",
        "kv_manager",
        "reused=request.num_preemptions == 0",
        "reused=True",
        SCHEDULING,
    ),
)

_TENANTS = (
    _core(
        "of equal counters the oldest goes first",
        "tenants",
        "return self.service, -self.number",
        "return self.service, self.number",
        FAIR,
    ),
    _core("weights are nothing", "tenants", "num_tokens / self.weight", "num_tokens", FAIR),
    _core(
        "a newcomer has a claim",
        "tenants",
        "max(self._lowest, self._absent.pop(name, 0.0))",
        "self._absent.pop(name, 0.0)",
        FAIR,
    ),
    _core("a pause pays a debt", "tenants", "        self._absent[tenant.name] = tenant.service\n", "", FAIR),
    _core(
        "cached tokens cost as much as others", "tenants", "CACHED_TOKEN_COST = 1 / 32", "CACHED_TOKEN_COST = 1.0", FAIR
    ),
    _core(
        "decode tokens are free",
        "plan_builder",
        ".charge(row.num_new + row.num_draft)",
        ".charge(row.num_new if row.num_new > 1 else 0)",
        FAIR,
    ),
    _core(
        "priority is nothing",
        "request",
        "rank=(sampling.priority or DEFAULT_PRIORITY, arrival)",
        "rank=(0, arrival)",
        FAIR,
    ),
    _core(
        "a request's time-out is nothing",
        "request",
        "(request.deadline_s, sampling.timeout / 1e6)",
        "(request.deadline_s,)",
        FAIR,
    ),
    _core("nobody makes way", "preemption", "if left >= then and", "if left > 1e9 and", FAIR),
    _core(
        "a tenant's only request makes way",
        "preemption",
        "left = (len(other.running) - 1) / other.weight",
        "left = len(other.running) + 1",
        FAIR,
    ),
    _core("rows go to and fro", "preemption", "(min_lag if tenant.running else 0.0)", "0.0", FAIR),
    _core(
        "the oldest request makes way",
        "preemption",
        "(request := tenant.latest(but=oldest))",
        "(request := tenant.latest())",
        FAIR,
        MODEL_BASED,
    ),
    _core(
        "the latest goes, whoever holds the blocks",
        "preemption",
        "one[0].num_blocks / one[0].weight, one[1]",
        "0, one[1]",
        FAIR,
    ),
    _core(
        "way is made and somebody else comes",
        "scheduler",
        "tenant, first = first or queue.next_turn(), None",
        "tenant = queue.next_turn()",
        FAIR,
    ),
    _core(
        "a long prompt leaves nothing to another tenant",
        "plan_builder",
        "if (remaining > available or not is_first)",
        "if (remaining > available and is_first)",
        FAIR,
    ),
    _core(
        "one tenant may fill the queue",
        "admission",
        ">= min(config.max_queue_size, left):",
        ">= config.max_queue_size:",
        FAIR,
    ),
    _core(
        "rows that are free do not count for the queue",
        "admission",
        "num_free = max(0, config.max_num_seqs - num_running)",
        "num_free = 0",
        FAIR,
    ),
    _core(
        "waiting tokens are not bounded", "admission", "if num_tokens + request.num_tokens > most:", "if False:", FAIR
    ),
    _core(
        "what prompts have yet to take counts as free",
        "kv_manager",
        "- hit_from_free - num_promised",
        "- hit_from_free",
        FAIR,
    ),
    _core(
        "a step may take any time", "scheduler", "if len(self.running) + len(self.waiting) > 1:", "if False:", STEP_TIME
    ),
    _core(
        "one tenant's steps are as short as several's", "step_time", "if not several_tenants:", "if False:", STEP_TIME
    ),
    _core(
        "a slow device computes next to no prompt",
        "step_time",
        "max(AUTO_STEP_S, AUTO_LIGHT_STEPS * light_s)",
        "AUTO_STEP_S",
        STEP_TIME,
    ),
    _core(
        "one measurement decides",
        "step_time",
        "min(max(new, average / MAX_JUMP), average * MAX_JUMP)",
        "new * 1.0 if new > average else new / 1e3",
        STEP_TIME,
    ),
)

_SCHEDULER = (
    _core(
        "the oldest request is preempted",
        "tenants",
        "return max(rest, key=",
        "return min(rest, key=",
        PROGRESS,
    ),
    _core(
        "a preempted request goes to the end of the queue",
        "tenants",
        "heapq.heappush(tenant.queue, (request.rank, request))",
        "heapq.heappush(tenant.queue, ((request.num_preemptions, request.arrival), request))",
        PROGRESS,
    ),
    _core(
        "a preempted request forgets its drafts",
        "scheduler",
        "request.num_preemptions += 1",
        "request.num_preemptions += 1\n        request.pending_draft = 0",
        SCHEDULING,
    ),
    _core(
        "a resumed request runs its anchor again",
        "request",
        "return self.num_tokens - 1 if self.pending_draft else self.num_tokens",
        "return self.num_tokens",
        SCHEDULING,
    ),
    _core("a finished request keeps its blocks", "scheduler", "        self.kv.release(request)\n", "", ENGINE),
    _core(
        "the worker is not told who is gone",
        "scheduler",
        "        self._finished_req_ids.append(request.request_id)\n",
        "",
        ENGINE,
    ),
    _core(
        "more requests run than can decode together",
        "scheduler",
        "if self._num_running_tokens + request.max_decode_tokens > config.max_num_batched_tokens:",
        "if self._num_running_tokens < 0:",
        SCHEDULING,
    ),
    _core(
        "tokens of those who left are not given back",
        "scheduler",
        "self._num_running_tokens -= request.max_decode_tokens",
        "self._num_running_tokens -= 0",
        SCHEDULING,
    ),
    _core(
        "those alongside a long prompt take the whole step",
        "plan_builder",
        "available -= available // 2",
        "pass",
        SCHEDULING,
    ),
    _core(
        "a long prompt takes the whole step beside streams",
        "plan_builder",
        "return min(budget, share - self.num_prefill_tokens)",
        "return budget",
        SCHEDULING,
    ),
    _core(
        "free blocks of a hit are counted twice at admission",
        "kv_manager",
        "<= self.pool.num_free - hit_from_free",
        "<= self.pool.num_free",
    ),
    _core(
        "a request is admitted that cannot decode",
        "rows",
        "min(whole.num_positions + 1 + whole.num_next_draft,",
        "min(whole.num_positions,",
        SCHEDULING,
    ),
    _core(
        "max_num_seqs is exceeded by one", "scheduler", "< config.max_num_seqs", "<= config.max_num_seqs", SCHEDULING
    ),
    _core("deadlines are ignored", "deadlines", "self._heap[0][0] <= now", "self._heap[0][0] < 0", ENGINE),
    _core(
        "the queue's bound is off by one",
        "admission",
        ">= min(config.max_queue_size, left):",
        "> min(config.max_queue_size, left):",
        ENGINE,
    ),
    _core("a stop token is not sent", "request", 'token_ids[:count], "stop"', 'token_ids[: count - 1], "stop"', ENGINE),
    _core("tokens behind a stop token are sent", "request", 'token_ids[:count], "stop"', 'token_ids, "stop"', ENGINE),
    _core(
        "a stop token counts before min_tokens",
        "request",
        "token_id in self.stop_ids and self.num_output_tokens >= self.sampling.min_tokens",
        "token_id in self.stop_ids",
        ENGINE,
    ),
    _core(
        "the pool a request needs is underestimated",
        "rows",
        "reach = k + config.lookahead(k)",
        "reach = config.lookahead(k)",
        ENGINE,
    ),
)

_OVERLAP = (
    _core(
        "a result goes to whoever has the id now",
        "engine",
        "            if not self._is_in_progress(request):\n                continue\n            if not row_res",
        "            request = self._requests.get(row.request_id)\n"
        "            if request is None:\n                continue\n            if not row_res",
        OVERLAP,
    ),
    _core(
        "drafts of a dropped result are counted",
        "engine",
        "            if not self._is_in_progress(request):\n                continue\n            if not row_res",
        "            if not self._is_in_progress(request):\n"
        "                self._spec_stats.observe_draft(row.num_draft, row_result.num_accepted + 1)\n"
        "                continue\n            if not row_res",
        OVERLAP,
    ),
    _core(
        "the last step in flight is left there",
        "engine",
        "return bool(self._requests or self._in_flight or self._failed_step)",
        "return bool(self._requests or self._failed_step)",
        OVERLAP,
    ),
    _core(
        "a row that was applied still counts as in flight",
        "engine",
        "if request.row_in_flight is row:",
        "if request.row_in_flight is None:",
        OVERLAP,
    ),
    _core(
        "a row in flight is dropped when the one ahead of it is applied",
        "engine",
        "if request.row_in_flight is row:",
        "if row is not None:",
        OVERLAP,
    ),
    _core(
        "a step waits for the one ahead of it",
        "engine",
        "self._collect_down_to(1 if self._overlap and submitted else 0, outputs)",
        "self._collect_down_to(0, outputs)",
        OVERLAP,
    ),
    _core(
        "a row is planned on the lowest outcome",
        "rows",
        "most = min(fewest + row.num_draft, longest)",
        "most = fewest",
        OVERLAP,
    ),
    _core(
        "the bound takes in outcomes that end the request",
        "rows",
        "most = min(fewest + row.num_draft, longest)",
        "most = fewest + row.num_draft",
        OVERLAP,
    ),
    _core(
        "a row does not say that its start is an upper bound",
        "rows",
        "[], row.num_draft, num_positions)",
        "[], 0, num_positions)",
        OVERLAP,
    ),
    _core(
        "a request that is sure to end is planned",
        "rows",
        "        if fewest > longest:\n            return None\n",
        "        longest = max(longest, fewest)\n",
        OVERLAP,
    ),
    _core(
        "k is judged by the lowest outcome alone",
        "rows",
        "k = next_draft_length(request, most_drafting, num_draft, config)",
        "k = next_draft_length(request, fewest, num_draft, config)",
        OVERLAP,
    ),
    _core(
        "k is judged by the highest outcome alone",
        "rows",
        "    if k == 0 and next_draft_length(request, fewest, num_draft, config) > 0:\n        return None\n",
        "",
        OVERLAP,
    ),
    _core(
        "no lookahead behind the upper bound",
        "rows",
        "num_draft + max(most, most_drafting + config.lookahead(k))",
        "num_draft + most",
        OVERLAP,
    ),
    _core(
        "a request that needs its own output does not wait for it",
        "scheduler",
        "if request.disables_overlap:",
        "if request is None:",
        OVERLAP,
    ),
    _core(
        "a prompt is admitted behind one that a step skips",
        "scheduler",
        "builder.stop_admission.add(request.sampling.tenant)",
        "pass",
        OVERLAP,
    ),
    _core(
        "a request is preempted while a step is in flight",
        "scheduler",
        "                if in_flight:\n                    return False\n",
        "",
        OVERLAP,
    ),
    _core(
        "blocks that ran out are never made good while steps are in flight",
        "scheduler",
        "or (in_flight and self._must_settle):",
        "or (in_flight and not self.running and not self.waiting):",
        OVERLAP,
    ),
    _core(
        "a chunk is planned again while it is in flight",
        "rows",
        "return request.num_computed + (0 if row is None else row.num_new)",
        "return request.num_computed",
    ),
    _core(
        "who did not fit the memory is admitted again at once",
        "scheduler",
        "self._admits_from = plan.step_id + 1 + STEPS_TO_RECOVER",
        "self._admits_from = 0",
        OVERLAP,
    ),
    _core(
        "what is in flight is lost when a step does not fit the memory",
        "engine",
        "self._collect_down_to(0, outputs)  # no request",
        "self._collect_down_to(0, StepOutputs())  # no request",
        OVERLAP,
    ),
    _core(
        "a request that alone does not fit the memory is tried for ever",
        "engine",
        "if was_idle and len(plan.rows) == 1:",
        "if was_idle and len(plan.rows) == 0:",
        OVERLAP,
    ),
)

_SHORT_REQUESTS = (
    Mutant(
        "a short request is taken for one whose stop tokens are hidden",
        "dflash_backend/worker/logits.py",
        "hides = (min_end > 0) & (min_end > batch.start + batch.num_new - batch.num_unverified)",
        "hides = min_end > batch.start + batch.num_new - batch.num_unverified",
        ("tests/worker/test_short_requests.py",),
    ),
)

FAILED_STEPS = "tests/core/test_failed_steps.py"
SPEC_COUNTS = "tests/core/test_spec_stats.py"

_FAILED_STEPS = (
    _core(
        "a request that fails alone is tried for ever",
        "engine",
        "            self._fail(request, _failed(str(error)), alone)\n",
        "            del error\n",
        FAILED_STEPS,
    ),
    _core(
        "who fails only in a decode row is cleared by its prefill",
        "engine",
        "num_decodes += not prefills_next(request)",
        "num_decodes += 2",
        FAILED_STEPS,
    ),
    _core(
        "the worker keeps its requests after a failed step",
        "engine",
        "        queued = self.scheduler.take_all()\n        self._worker.reset()\n",
        "        queued = self.scheduler.take_all()\n",
        FAILED_STEPS,
    ),
    _core(
        "requests that fail together are tried for ever",
        "engine",
        "request.num_unexplained_failures += 1",
        "request.num_unexplained_failures += 0",
        FAILED_STEPS,
    ),
    Mutant(
        "an error of a step ends the engine",
        "dflash_backend/worker/runner.py",
        "    except (StepOutOfMemory, KVWriteError):",
        "    except (StepOutOfMemory, KVWriteError, Exception):",
        ("tests/worker/test_step_errors.py",),
    ),
)

_SPEC_COUNTS = (
    Mutant(
        "drafts past the end of an answer count as accepted",
        "dflash_backend/spec_stats.py",
        "self.num_accepted_tokens += num_delivered - 1",
        "self.num_accepted_tokens += num_draft",
        (SPEC_COUNTS,),
    ),
    _core(
        "what lies past a stop string counts",
        "engine",
        "self._spec_stats.take_back(num_draft, num_delivered, kept)",
        "self._spec_stats.take_back(num_draft, num_delivered, num_delivered)",
        SPEC_COUNTS,
    ),
    _core(
        "a counter of speculation falls",
        "engine",
        "self._spec_stats.maximum(self._reported_spec_stats)",
        "self._spec_stats.maximum(SpecDecodingStats.zeros(self.config.num_speculative_tokens))",
        SPEC_COUNTS,
    ),
)

_CORE = _INVARIANTS + _CACHE + _SCHEDULER + _TENANTS + _OVERLAP + _SHORT_REQUESTS + _FAILED_STEPS + _SPEC_COUNTS
MUTANTS: tuple[Mutant, ...] = _CORE + planted.PLANTED + drafters.DRAFTERS

# Every run of the tests applies these: of the invariants, the cache, the scheduler, overlap, and of `planted`.
SMOKE = (
    "RESERVE: lookahead of k instead of k + 1",
    "PUBLISH: the last full block of a hit is dropped",
    "protected blocks never grow old",
    "the oldest request is preempted",
    "a result goes to whoever has the id now",
    *planted.SMOKE,
)
