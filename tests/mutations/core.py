"""Defects of the core: its invariants, the prefix cache, failed steps and counts of speculation."""

from __future__ import annotations

from tests.mutations.mutant import Mutant, core_mutant

INVARIANTS = "tests/core/test_invariants.py"
SCHEDULING = "tests/core/test_scheduling.py"
POOL = "tests/core/test_block_pool.py"
PREFIX = "tests/core/test_prefix_cache.py"
CONTEXT_KV = "tests/worker/test_context_kv.py"
DRAFTS = "tests/worker/test_draft_alignment.py"
QK_NORM_ROPE_WRITE = "tests/kernels/test_qk_norm_rope_write.py"
FAILED_STEPS = "tests/core/test_failed_steps.py"
SPEC_COUNTS = "tests/core/test_spec_stats.py"

INVARIANTS_MUTANTS = (
    core_mutant(
        "RESERVE: lookahead of k instead of k + 1",
        "scheduler_config",
        "return k + self.lookahead_base if k > 0 else 0",
        "return k",
        INVARIANTS,
    ),
    core_mutant(
        "RESERVE: no lookahead on a prefill",
        "rows",
        "    num_positions = end + config.lookahead(k)\n    return ScheduledRequest(\n",
        "    num_positions = end\n    return ScheduledRequest(\n",
        INVARIANTS,
    ),
    core_mutant(
        "RESERVE: no lookahead behind verified drafts",
        "rows",
        "    num_positions = end + config.lookahead(k)\n    return ScheduledRequest(request.request_id, start, 1,",
        "    num_positions = end\n    return ScheduledRequest(request.request_id, start, 1,",
        INVARIANTS,
    ),
    core_mutant(
        "WINDOW: maximum length without the anchor's slot",
        "scheduler_config",
        "return num_tokens + k <= self.max_drafting_len",
        "return num_tokens + k - 1 <= self.max_drafting_len",
        INVARIANTS,
    ),
    core_mutant(
        "WINDOW: drafting past max_model_len",
        "scheduler_config",
        "min(self.drafter_max_len, self.max_model_len)",
        "self.drafter_max_len",
        SCHEDULING,
    ),
    core_mutant(
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
    core_mutant(
        "PUBLISH: a block is published before its last token was run",
        "kv_manager",
        "num_full = min(request.num_computed, request.num_tokens) // self._block_size",
        "num_full = request.num_tokens // self._block_size",
        INVARIANTS,
    ),
    core_mutant(
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

CACHE_MUTANTS = (
    core_mutant(
        "a block that is not full is published",
        "kv_manager",
        "num_full = min(request.num_computed, request.num_tokens) // self._block_size",
        "num_full = -(-min(request.num_computed, request.num_tokens) // self._block_size)",
    ),
    core_mutant(
        "the last full block is not published",
        "kv_manager",
        "num_full = min(request.num_computed, request.num_tokens) // self._block_size",
        "num_full = (min(request.num_computed, request.num_tokens) - 1) // self._block_size",
        SCHEDULING,
    ),
    core_mutant(
        "accepted tokens past a stop are published",
        "kv_manager",
        "num_full = min(request.num_computed, request.num_tokens) // self._block_size",
        "num_full = request.num_computed // self._block_size",
        SCHEDULING,
    ),
    core_mutant(
        "a hit leaves nothing to compute",
        "kv_manager",
        "num_blocks = (request.prefill_end - 1) // self._block_size",
        "num_blocks = request.prefill_end // self._block_size",
        SCHEDULING,
    ),
    core_mutant(
        "the salt is not hashed", "prefix_cache", '_ROOT_TAG + cache_salt.encode("utf-8", "surrogatepass")', "_ROOT_TAG"
    ),
    core_mutant(
        "a block hash is not chained to its parent",
        "prefix_cache",
        "hashlib.sha256(parent + packed)",
        "hashlib.sha256(packed)",
    ),
    core_mutant(
        "the chain does not move on",
        "prefix_cache",
        "self._last = hash_block(self._last, packed[start : start + size])\n",
        "self._last = hash_block(self._hashes[0] if self._hashes else self._last, packed[start : start + size])\n",
        PREFIX,
    ),
    core_mutant(
        "no reference is taken on a hit",
        "block_pool",
        "self._ref_counts[block_id] += 1",
        "self._ref_counts[block_id] += 0",
    ),
    core_mutant(
        "a block that is held stays in the eviction list",
        "block_pool",
        "if self._ref_counts[block_id] == 0:\n                self._unlink(block_id)",
        "if self._ref_counts[block_id] < 0:\n                self._unlink(block_id)",
    ),
    core_mutant(
        "a freed block that is cached counts as unused",
        "block_pool",
        "if self._hashes[block_id] is None:\n                    self._unused.append(block_id)",
        "if block_id >= 0:\n                    self._unused.append(block_id)",
    ),
    core_mutant(
        "a block is found by its place and not by its hash",
        "block_pool",
        "hint if hint >= 0 and hash_of[hint] == block_hash else cached.get(block_hash)",
        "hint if hint >= 0 else cached.get(block_hash)",
    ),
    core_mutant("an evicted block can still be found", "block_pool", "        del self._cached[block_hash]\n", ""),
    core_mutant(
        "a second block takes over a hash",
        "block_pool",
        "        if block_hash in self._cached:\n            return False\n",
        "",
    ),
    core_mutant(
        "a chain's head is evicted before its tail", "block_pool", "in reversed(block_ids)", "in block_ids", POOL
    ),
    core_mutant("the newest cold block is evicted", "block_lists", "return self._next[", "return self._prev[", POOL),
    core_mutant(
        "a hit does not make a block protected",
        "block_pool",
        "self._reused[block_id] = 1",
        "self._reused[block_id] = 0",
        POOL,
    ),
    core_mutant(
        "protected blocks never grow old",
        "block_pool",
        "age > PROTECTED_LIFE_IN_POOLS * self.num_blocks",
        "age < 0",
        POOL,
    ),
    core_mutant(
        "protected blocks may fill the pool",
        "block_pool",
        "if self._num_protected > self._max_protected:",
        "if self._num_protected < 0:",
        POOL,
    ),
    core_mutant(
        "preempted requests make their own blocks hot",
        "kv_manager",
        "reused=request.num_preemptions == 0",
        "reused=True",
        SCHEDULING,
    ),
)

SPEC_COUNTS_MUTANTS = (
    Mutant(
        "drafts past the end of an answer count as accepted",
        "dflash_backend/spec_stats.py",
        "self.num_accepted_tokens += num_delivered - 1",
        "self.num_accepted_tokens += num_draft",
        (SPEC_COUNTS,),
    ),
    core_mutant(
        "what lies past a stop string counts",
        "engine",
        "self._spec_stats.take_back(num_draft, num_delivered, kept)",
        "self._spec_stats.take_back(num_draft, num_delivered, num_delivered)",
        SPEC_COUNTS,
    ),
    core_mutant(
        "a counter of speculation falls",
        "engine",
        "self._spec_stats.maximum(self._reported_spec_stats)",
        "self._spec_stats.maximum(SpecDecodingStats.zeros(self.config.num_speculative_tokens))",
        SPEC_COUNTS,
    ),
)

FAILED_STEPS_MUTANTS = (
    core_mutant(
        "a request that fails alone is tried for ever",
        "engine",
        "            self._fail(request, _failed(str(error)), alone)\n",
        "            del error\n",
        FAILED_STEPS,
    ),
    core_mutant(
        "who fails only in a decode row is cleared by its prefill",
        "engine",
        "num_decodes += not prefills_next(request)",
        "num_decodes += 2",
        FAILED_STEPS,
    ),
    core_mutant(
        "the worker keeps its requests after a failed step",
        "engine",
        "        queued = self.scheduler.take_all()\n        self._worker.reset()\n",
        "        queued = self.scheduler.take_all()\n",
        FAILED_STEPS,
    ),
    core_mutant(
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
