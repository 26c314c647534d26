"""Defects of the core: its invariants, the prefix cache, failed steps and counts of speculation."""

from __future__ import annotations

from tests.mutations.mutant import Mutant, mutants_of

CORE = "dflash_backend/core"
ENGINE = ("tests/core/test_engine_core.py",)
FAILED_STEPS = ("tests/core/test_failed_steps.py",)
INVARIANTS = ("tests/core/test_invariants.py",)
POOL = ("tests/core/test_block_pool.py",)
PREFIX = ("tests/core/test_prefix_cache.py",)
RANDOM = ("tests/core/test_core_random.py",)
SCHEDULING = ("tests/core/test_scheduling.py",)
SPEC_COUNTS = ("tests/core/test_spec_stats.py",)
# Of the blocks to publish.
NUM_FULL = "min(request.num_computed, len(request.token_ids) - self._num_next) // self._block_size"

CORE_MUTANTS = (
    *mutants_of(
        f"{CORE}/engine.py",
        ("tests/core/test_failed_steps.py",),
        (
            "another request's failure explains that of a step",
            "len(outputs.failed) == failed_before",
            "not outputs.failed",
        ),
    ),
    *mutants_of(
        f"{CORE}/engine.py",
        ("tests/drafters/test_lookup_beside.py",),
        (
            "a part that drafts nothing ends the engine",
            "drafts.num_looked_up.get(row.request_id, 0)",
            "drafts.num_looked_up[row.request_id]",
        ),
    ),
    *mutants_of(
        f"{CORE}/kv/tiers.py",
        ("tests/core/test_kv_tiers.py",),
        ("records that left their tier wait on", "self._num_waiting[number][key[0]] -= 1", "pass"),
    ),
    *mutants_of(
        f"{CORE}/scheduler_config.py",
        INVARIANTS,
        ("RESERVE: lookahead of k instead of k + 1", "else drafts + base for", "else drafts for"),
    ),
    *mutants_of(
        f"{CORE}/request.py",
        INVARIANTS,
        (
            "WINDOW: the anchor's slot is not counted",
            "num_tokens + num_draft + 1 + k <= config.max_drafting_len",
            "num_tokens + num_draft + k <= config.max_drafting_len",
        ),
        (
            "RESERVE: no lookahead on a prefill",
            "    num_positions = end + config.lookahead[k]\n    return ScheduledRequest(\n",
            "    num_positions = end\n    return ScheduledRequest(\n",
        ),
        (
            "RESERVE: no lookahead behind verified drafts",
            "    num_positions = end + config.lookahead[k]\n    return ScheduledRequest(request.request_id, start, 1,",
            "    num_positions = end\n    return ScheduledRequest(request.request_id, start, 1,",
        ),
    ),
    Mutant(
        "WINDOW: drafting past max_model_len",
        f"{CORE}/scheduler_config.py",
        "min(self.drafter_max_len, self.max_model_len)",
        "self.drafter_max_len",
        SCHEDULING,
    ),
    Mutant(
        "LOSSLESS: rejected positions count as computed",
        f"{CORE}/engine.py",
        "request.num_computed += row.num_new + result.num_accepted",
        "request.num_computed += row.num_new + row.num_draft",
        INVARIANTS,
    ),
    *mutants_of(
        f"{CORE}/kv/manager.py",
        INVARIANTS,
        (
            "PUBLISH: a block is published before its last token was run",
            NUM_FULL,
            "len(request.token_ids) // self._block_size",
        ),
        (
            "PUBLISH: the last full block of a hit is dropped",
            "num_blocks = (request.prefill_end - 1) // self._block_size",
            "num_blocks = max(0, (request.prefill_end - 1) // self._block_size - 1)",
        ),
    ),
    Mutant(
        "a block that is not full is published",
        f"{CORE}/kv/manager.py",
        NUM_FULL,
        "-(-min(request.num_computed, len(request.token_ids) - self._num_next) // self._block_size)",
        RANDOM,
    ),
    *mutants_of(
        f"{CORE}/kv/manager.py",
        SCHEDULING,
        (
            "the last full block is not published",
            NUM_FULL,
            "(min(request.num_computed, len(request.token_ids) - self._num_next) - 1) // self._block_size",
        ),
        ("accepted tokens past a stop are published", NUM_FULL, "request.num_computed // self._block_size"),
        (
            "a hit leaves nothing to compute",
            "num_blocks = (request.prefill_end - 1) // self._block_size",
            "num_blocks = request.prefill_end // self._block_size",
        ),
    ),
    *mutants_of(
        f"{CORE}/engine.py",
        ("tests/core/test_failed_steps.py",),
        (
            "rows of steps that are dropped stay in flight",
            "for request in step.requests:\n                request.row_in_flight = None",
            "pass",
        ),
        (
            "a step that lacks memory after it has waited is run again as it is",
            "self.scheduler.shrink(plan)\n        elif (request",
            "pass\n        elif (request",
        ),
    ),
    Mutant(
        "a step that fails counts as preemptions",
        f"{CORE}/scheduler.py",
        "self._requeue(request)\n        taken",
        "self._preempt(request)\n        taken",
        ("tests/core/test_failed_steps.py",),
    ),
    Mutant(
        "preempted requests make their own blocks hot",
        f"{CORE}/kv/groups.py",
        "self.pool.touch(hit, reused=not request.is_resumed)",
        "self.pool.touch(hit, reused=True)",
        SCHEDULING,
    ),
    *mutants_of(
        f"{CORE}/block_hashes.py",
        RANDOM,
        ("the salt is not hashed", 'tag + cache_salt.encode("utf-8", "surrogatepass")', "tag"),
        ("a block hash is not chained to its parent", "hashlib.sha256(parent + packed)", "hashlib.sha256(packed)"),
        (
            "a block's hash leaves out the token behind it that the drafter's KV depends on",
            "packed[start : start + size + next_bytes]",
            "packed[start : start + size]",
        ),
    ),
    Mutant(
        "a block is published whose last position has no token behind it",
        f"{CORE}/kv/manager.py",
        NUM_FULL,
        "min(request.num_computed, len(request.token_ids)) // self._block_size",
        RANDOM,
    ),
    *mutants_of(
        f"{CORE}/block_hashes.py",
        PREFIX,
        (
            "the chain does not move on",
            "hash_block(self._last, ",
            "hash_block(self._hashes[0] if self._hashes else self._last, ",
        ),
        ("a cache salt's letters beyond ASCII are dropped", '("utf-8", "surrogatepass")', '("ascii", "ignore")'),
    ),
    *mutants_of(
        f"{CORE}/kv/block_pool.py",
        RANDOM,
        ("no reference is taken on a hit", "self._ref_counts[block_id] += 1", "self._ref_counts[block_id] += 0"),
        (
            "a block that is held stays in the eviction list",
            "if self._ref_counts[block_id] == 0:\n                self._unlink(block_id)\n            self._ref_counts",
            "if self._ref_counts[block_id] < 0:\n                self._unlink(block_id)\n            self._ref_counts",
        ),
        (
            "a freed block that is cached counts as unused",
            "if self._hashes[block_id] is None:\n                    self._unused.append(block_id)",
            "if block_id >= 0:\n                    self._unused.append(block_id)",
        ),
        (
            "a block is found by its position and not by its hash",
            "hint >= 0 and hash_of[hint] == block_hash",
            "hint >= 0",
        ),
        ("an evicted block can still be found", "        del self._cached[block_hash]\n", ""),
        ("a second block takes over a hash", "        if block_hash in self._cached:\n            return False\n", ""),
    ),
    *mutants_of(
        f"{CORE}/kv/block_pool.py",
        POOL,
        ("a chain's head is evicted before its tail", "in reversed(block_ids)", "in block_ids"),
        ("a hit does not make a block protected", "self._reused[block_id] = 1", "self._reused[block_id] = 0"),
        ("protected blocks never grow old", "age > PROTECTED_LIFE_IN_POOLS * self.num_blocks", "age < 0"),
        (
            "protected blocks may fill the pool",
            "self._num_evictable[PROTECTED] > self._max_protected",
            "len(self._unused) < 0",
        ),
    ),
    Mutant(
        "the newest cold block is evicted",
        f"{CORE}/kv/block_pool.py",
        "return self._next[",
        "return self._prev[",
        POOL,
    ),
    *mutants_of(
        f"{CORE}/engine.py",
        FAILED_STEPS,
        (
            "a request that fails alone is tried for ever",
            "self._fail(request, failure_message(self._failed_step[1]), alone)\n                break",
            "self._failed_step = None",
        ),
        (
            "a request that fails only in a decode row is cleared by its prefill",
            "+= submitted and decodes",
            "+= 2",
        ),
        (
            "the worker keeps its requests after a failed step",
            "        queued = self.scheduler.take_all()\n        self._worker.reset()\n",
            "        queued = self.scheduler.take_all()\n",
        ),
        (
            "requests that fail together are tried for ever",
            "request.num_unexplained_failures += 1",
            "request.num_unexplained_failures += 0",
        ),
    ),
    Mutant(
        "drafts past the end of an answer count as accepted",
        "dflash_backend/spec_stats.py",
        "+= num_delivered - 1",
        "+= num_draft",
        SPEC_COUNTS,
    ),
    *mutants_of(
        f"{CORE}/spec_counts.py",
        SPEC_COUNTS,
        (
            "what lies past a stop string counts",
            "kept = max(0, num_kept - self.num_tokens)",
            "kept = num_tokens",
        ),
        (
            "a step that a stop string takes whole stays among the drafts",
            "kept = max(0, num_kept - self.num_tokens)",
            "kept = max(1, num_kept - self.num_tokens)",
        ),
        (
            "what ended requests yielded is kept for ever",
            "while self._num_ended_steps > MAX_STEPS:",
            "while self._num_ended_steps > 10 * MAX_STEPS:",
        ),
    ),
    *mutants_of(
        f"{CORE}/engine.py",
        SPEC_COUNTS,
        (
            "what lies past a stop string counts when the request ended before the engine knew",
            "self._spec_counts.remember(request.request_id, request.yields)",
            "pass",
        ),
    ),
    Mutant(
        "a counter of speculation decreases",
        f"{CORE}/spec_counts.py",
        "reported = self.delivered.maximum(self._reported)",
        "reported = self.delivered.copy()",
        SPEC_COUNTS,
    ),
    Mutant(
        "a request that is cancelled while it is preempted stays in the queue",
        f"{CORE}/scheduler.py",
        "            self.queue.take_back(request)\n        else:\n            self.queue.discard(request)",
        "            self.queue.take_back(request)\n"
        "        elif request.num_preemptions == 0:\n            self.queue.discard(request)",
        RANDOM,
    ),
    Mutant(
        "requests without a seed share one",
        f"{CORE}/request.py",
        "derive_seed(config.seed, arrival)",
        "derive_seed(config.seed, 0)",
        ENGINE,
    ),
    Mutant(
        "every accepted draft counts at the first position",
        "dflash_backend/spec_stats.py",
        "per_position[position] += 1",
        "per_position[0] += 1",
        ENGINE,
    ),
)
