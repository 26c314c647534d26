"""Defects of the kernels, attention, models, draft sampling and the worker."""

from __future__ import annotations

from tests.mutations.mutant import Mutant, mutants_of

DFLASH = "dflash_backend/drafters/dflash"
DRAFTERS = "dflash_backend/drafters"
WORKER = "dflash_backend/worker"
ENDED_ROWS = ("tests/worker/test_ended_rows.py",)
GUARD = ("tests/worker/test_write_guard.py",)
LOGITS = ("tests/worker/test_logits.py",)

WORKER_MUTANTS = (
    *mutants_of(
        f"{WORKER}/runner.py",
        ENDED_ROWS,
        (
            "rows that have ended draft",
            "if row.request_id in ended]] = 0",
            "if row.request_id in ended]] += 0",
        ),
        ("rows that verified drafts count as ended", "row.request_id in ended]]", "row.num_draft]]"),
    ),
    Mutant(
        "the first block that a window shows is one too late",
        "dflash_backend/attention/torch_backend.py",
        "first_query - pattern.sliding_window + 1, 0)",
        "first_query - pattern.sliding_window + 2, 0)",
        ("tests/attention/test_torch_backend.py",),
    ),
    Mutant(
        "a query that pads a batch is taken for a token's",
        "dflash_backend/attention/torch_backend.py",
        "(np.arange(query_len) < query_lens[:, None])",
        "(np.arange(query_len) <= query_lens[:, None])",
        ("tests/attention/test_torch_backend.py",),
    ),
    Mutant(
        "mask queries past the eighth are rotated as the eighth",
        f"{DFLASH}/drafter.py",
        "queries.layout, queries.positions, queries.slots,",
        "queries.layout, torch.minimum(queries.positions, torch.from_numpy("
        "(queries.layout.seq_lens - queries.layout.query_lens + 8).repeat(queries.layout.query_lens))), queries.slots,",
        ("tests/drafters/test_dflash.py",),
    ),
    Mutant(
        "features of the last decoder layer are taken after the final norm",
        "dflash_backend/models/decoder.py",
        "                captured[index] = hidden\n",
        "                is_last = index + 1 == len(self.layers)\n"
        "                normed_hidden = self.ops.rms_norm(hidden, self.final_norm, self.eps)\n"
        "                captured[index] = normed_hidden if is_last else hidden\n",
        ("tests/models/test_families.py::test_captured_features_are_the_outputs_of_the_layers_named",),
    ),
    Mutant(
        "log-probabilities are those of processed logits",
        f"{WORKER}/logits.py",
        "            self._raw = logits.index_select(0, self.flat)\n",
        "            self._raw = self.processed(logits.index_select(0, self.flat), ops)\n",
        ("tests/invariants/test_logits_processing.py::test_logprobs_are_those_before_penalties_and_bias",),
    ),
    *mutants_of(
        f"{WORKER}/state.py",
        LOGITS,
        (
            "bad words do not count drafts",
            "ends = (position + torch.arange(len(logits), device=logits.device))[:, None]",
            "ends = position.expand(len(logits))[:, None]",
        ),
        (
            "a bad word may begin in the prompt",
            "hidden = matches & (ends - self.prefix_lens >= num_prompt_tokens)",
            "hidden = matches",
        ),
        (
            "only one of two bad words with the same end is looked for",
            "logits.index_add_(1, self.last, bias)",
            "logits[:, self.last] += bias",
        ),
    ),
    *mutants_of(
        f"{WORKER}/logits.py",
        ("tests/invariants/test_prompt_logprobs.py",),
        (
            "a prompt's log-probabilities are those of the token before",
            "own[int(self._start[i]) + begin + 1 :",
            "own[int(self._start[i]) + begin :",
        ),
        (
            "a prompt's last position has log-probabilities too",
            "requests.num_prompt_tokens[index] - 1 - batch.start_bound",
            "requests.num_prompt_tokens[index] - batch.start_bound",
        ),
    ),
    Mutant(
        "a prompt's log-probabilities begin behind a prefix hit",
        "dflash_backend/core/kv/manager.py",
        "if not self._caching or request.wants_prompt_logprobs:",
        "if not self._caching:",
        ("tests/invariants/test_prompt_logprobs.py",),
    ),
    Mutant(
        "a prompt's log-probabilities come again after a preemption",
        "dflash_backend/core/request.py",
        "entries[max(0, self.num_prompt_logprobs - start) :]",
        "entries",
        ("tests/core/test_prompt_logprobs.py",),
    ),
    Mutant(
        "a bias brings back a token that is not allowed",
        f"{WORKER}/logits.py",
        "        if masked[i]:\n",
        "        if masked[i] and not biased[i]:\n",
        LOGITS,
    ),
    Mutant(
        "penalties come before the bias",
        f"{WORKER}/logits.py",
        "        for i in (hides | biased | masked).nonzero()[0].tolist():\n",
        "        if penalised.any():\n"
        "            self._penalise(processed, penalised.nonzero()[0], ops)\n"
        "        for i in (hides | biased | masked).nonzero()[0].tolist():\n",
        LOGITS,
        (
            (
                f"{WORKER}/logits.py",
                "            self._penalise(processed, penalised.nonzero()[0], ops)\n        return processed",
                "            pass\n        return processed",
            ),
        ),
    ),
    Mutant(
        "a short request is taken for one whose stop tokens are hidden",
        f"{WORKER}/logits.py",
        "(min_end > 0) & (min_end > lowest)",
        "min_end > lowest",
        ("tests/worker/test_short_requests.py",),
    ),
    Mutant(
        "the logits of a chunk in which no row chooses a token are computed",
        f"{WORKER}/batch.py",
        "drafts, chooses = any(each[5] for each in numbers), any(each[6] for each in numbers)",
        "drafts, chooses = any(each[5] for each in numbers), True",
        ("tests/worker/test_runner.py",),
    ),
    Mutant(
        "an error of a step ends the engine",
        f"{WORKER}/runner.py",
        "    except (StepOutOfMemory, KVWriteError, RankLostError):",
        "    except (StepOutOfMemory, KVWriteError, Exception):",
        ("tests/worker/test_step_errors.py",),
    ),
    Mutant(
        "a lack of memory after a step has waited for a grammar ends the engine",
        f"{WORKER}/runner.py",
        "self._in_flight.remove(step)\n            return error",
        "raise",
        ("tests/worker/test_grammars_in_flight.py",),
    ),
    Mutant(
        "top_p, top_k and min_p never reach the device",
        f"{WORKER}/state.py",
        '("temperature", "top_p", "min_p", "top_k", "seeds", ',
        '("temperature", "seeds", ',
        ("tests/invariants/test_device_lossless.py::test_each_filter_of_these_requests_changes_what_is_drawn",),
    ),
    Mutant(
        "after a preemption decoded positions are one too high",
        f"{WORKER}/state.py",
        "        self.records[new.request_id] = record\n",
        "        self.records[new.request_id] = record\n"
        "        self.state.resumed = getattr(self.state, 'resumed', {})\n"
        "        self.state.resumed[index] = len(new.token_ids) > new.num_prompt_tokens\n",
        ("tests/invariants/test_same_seed.py",),
        (
            (
                f"{WORKER}/step.py",
                "        context = PagedContext(\n            step.attention, step.positions,",
                "        late = torch.tensor([self.state.resumed[i] for i in step.batch.req_idx.tolist()])\n"
                "        late = (late & (step.batch.num_new == 1))[step.batch.token_row.long()].long()\n"
                "        context = PagedContext(\n            step.attention, step.positions + late,",
            ),
        ),
    ),
    Mutant(
        "min_tokens starts anew after a preemption",
        f"{WORKER}/state.py",
        "new.num_prompt_tokens + sampling.min_tokens",
        "len(new.token_ids) + sampling.min_tokens",
        LOGITS,
    ),
    Mutant(
        "the draft phase is not guarded",
        f"{WORKER}/step.py",
        "guard.check_draft(queries, batch.num_next_draft, lookahead_base)",
        "pass",
        ("tests/worker/test_write_guard.py::test_each_phase_that_writes_is_checked",),
    ),
    *mutants_of(
        f"{WORKER}/step.py",
        GUARD,
        ("the inject phase is not guarded", 'guard.check("inject", context.token_row, context.slots)', "pass"),
        (
            "the verify phase is not guarded",
            'guard.check("verify", step.batch.token_row, step.slots, step.batch.query_lens)',
            "pass",
        ),
    ),
    Mutant(
        "context of the first rejected draft is injected",
        "kernels/dflash_kernels/cpu_step.h",
        "positions[t] < computed[requests[r]] && slots[t] >= 0;",
        "positions[t] <= computed[requests[r]] && slots[t] >= 0;",
        ("tests/worker/test_one_row.py",),
    ),
    Mutant(
        "a sampled request's drafts are compared with the argmax",
        f"{WORKER}/state.py",
        "self.num_sampled += bool(self.temperature[index])",
        "self.num_sampled += 0",
        ("tests/invariants/test_filtered_sampling.py",),
    ),
    Mutant(
        "operations never have the number of threads that is slower now",
        f"{WORKER}/batch_parallel.py",
        "(known[0] <= known[1]) != (count % TRY_OTHER_EVERY == 0)",
        "known[0] <= known[1]",
        ("tests/worker/test_batch_parallel.py",),
    ),
    *(
        Mutant(name, "kernels/dflash_kernels/cpu_step.h", old, new, ("tests/worker/test_one_row.py",))
        for name, old, new in (
            (
                "C++: a row's logits follow the wrong token",
                "int32_t(token + row.num_new - 1 + i)",
                "int32_t(token + i)",
            ),
            (
                "C++: KV past the row's blocks is written",
                "if (start + i < covered) out.set",
                "if (start + i < s.max_len) out.set",
            ),
            ("C++: rows with unverified drafts begin as planned", "row.unverified > 0 ?", "row.unverified > 9 ?"),
            ("C++: a row has the block table of another", "tables + r * table_width", "tables"),
        )
    ),
    Mutant(
        "one row: queries see a position behind their own",
        "dflash_backend/attention/torch_backend.py",
        "np.where(key > last, _HIDDEN, _SEEN)",
        "np.where(key > last + 1, _HIDDEN, _SEEN)",
        ("tests/worker/test_one_row.py",),
    ),
    *mutants_of(
        "dflash_backend/attention/torch_backend.py",
        ("tests/attention/test_torch_backend.py",),
        (
            "a piece of KV is a row longer than the memory for it",
            "max(1, GATHER_BYTES // row_bytes)",
            "-(-GATHER_BYTES // row_bytes)",
        ),
        (
            "no piece of KV fits the memory for it",
            "Scratch(GATHER_BYTES, GATHER_BYTES // 2)",
            "Scratch(GATHER_BYTES // 2, GATHER_BYTES)",
        ),
    ),
    *mutants_of(
        "kernels/dflash_kernels/huge_pages.py",
        ("tests/kernels/test_huge_pages.py",),
        ("threads gather KV into the memory of each other", "class Scratch(threading.local):", "class Scratch:"),
        (
            "memory in huge pages is shared",
            "mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS",
            "mmap.MAP_SHARED | mmap.MAP_ANONYMOUS",
        ),
        ("no huge pages are asked for", "mapped.madvise(mmap.MADV_HUGEPAGE)", "pass"),
        ("weights lie over each other", "_arena.given = start + num_bytes", "_arena.given = start"),
        (
            "a weight begins within a cache line",
            "start = -(-_arena.given // ALIGNMENT) * ALIGNMENT",
            "start = _arena.given",
        ),
        ("huge pages are asked for and begin anywhere", "start = -memory.ctypes.data % HUGE_PAGE", "start = 64"),
        (
            "scratch ends before what is asked for",
            "if not self.least_bytes <= num_bytes <= self.num_bytes:",
            "if False:",
        ),
    ),
    *mutants_of(
        "dflash_backend/worker/step_ops.py",
        ("tests/engine/test_without_compiler.py",),
        (
            "without a compiler nothing is accepted",
            "            super().accept(step, state)\n            return\n",
            "            return\n",
        ),
    ),
    *mutants_of(
        "kernels/dflash_kernels/cpu_step.h",
        ("tests/kernels/test_cpu_step.py",),
        (
            "C++: drafts behind a rejected one are accepted",
            "(first + count < s.max_len ? row[first + count] : 0) == mine[count]",
            "(first < s.max_len ? row[first] : 0) == mine[0]",
        ),
        (
            "C++: the token behind the accepted drafts is written over the last of them",
            "row[first + count] = mine[count];",
            "row[first + count - 1] = mine[count];",
        ),
        ("C++: rows that do not sample accept", "    if (samples) {\n", "    if (num_draft[r]) {\n"),
        ("C++: the anchor is a placeholder", "if (i > 0) out.ids[at] = placeholder;", "out.ids[at] = placeholder;"),
        (
            "C++: a drafter that drafts from the anchor is given a query too many",
            "drafts ? int32_t(num_next[r] + lookahead_base) : 0",
            "drafts ? int32_t(num_next[r] + 1) : 0",
        ),
        ("C++: confidences are kept one place too far", "sure[request * k + i] =", "sure[request * k + i - 1] ="),
        ("C++: drafts that lie side by side are taken for rows", "r * width : at,", "r * k : at,"),
    ),
    Mutant(
        "TOGETHER: prefill chunks bring no drafter KV",
        "kernels/dflash_kernels/cpu_step.h",
        "positions[t] < computed[requests[r]] && slots[t] >= 0;",
        "positions[t] < computed[requests[r]] && slots[t] >= 0 && layout[8 * rows + r] >= 0;",
        ("tests/worker/test_context_kv.py",),
    ),
    Mutant(
        "requests without speculation leave no drafter KV in the blocks that they publish",
        "kernels/dflash_kernels/cpu_step.h",
        "positions[t] < computed[requests[r]] && slots[t] >= 0;",
        "positions[t] < computed[requests[r]] && slots[t] >= 0 && (num_next[r] || layout[8 * rows + r] < 0);",
        ("tests/worker/test_mixed_speculation.py",),
    ),
    Mutant(
        "LOSSLESS: rejected positions injected, and the drafter goes on behind them",
        "kernels/dflash_kernels/cpu_step.h",
        "s.computed[request] = int32_t(first + count);",
        "s.computed[request] = int32_t(first + (samples ? num_draft[r] : 0));",
        ("tests/worker/test_draft_alignment.py",),
    ),
    Mutant(
        "OWN: padding rows are written",
        "kernels/dflash_kernels/qk_norm_rope_write.py",
        "if slot >= 0:",
        "if slot >= -1:",
        ("tests/kernels/test_kv_writes.py",),
    ),
)
