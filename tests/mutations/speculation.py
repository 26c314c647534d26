"""Defects of the choice of how many tokens each row drafts: outputs stay, only speed is lost."""

from __future__ import annotations

from tests.mutations.mutant import mutants_of

CORE = "dflash_backend/core"
TESTS = (
    "tests/core/test_speculation.py",
    "tests/core/test_resting.py",
    "tests/core/test_step_costs.py",
    "tests/core/test_speculating_engine.py",
)
BUDGET_TESTS = ("tests/core/test_draft_budget.py",)
SHARED_ATTENTION = (
    "tests/kernels/test_paged_attention.py::test_rows_of_any_length_within_one_bound_leave_each_other_alone",
    "tests/kernels/test_attention_schedule.py::test_any_rows_and_any_number_of_workers_give_attention",
)

SPECULATION_MUTANTS = (
    *mutants_of(
        f"{CORE}/speculation/policy.py",
        (*BUDGET_TESTS, "tests/core/test_budget_cost.py"),
        (
            "drafts that were proposed when it still paid are all verified",
            "if not self.pays and max(row.num_draft for row, _ in drafting) <= PROBE_DRAFTS:",
            "if not self.pays:",
        ),
        (
            "no step with a budget says that less time is needed than thought",
            "* FASTER <= target_s:",
            "> 0:",
        ),
    ),
    *mutants_of(
        f"{CORE}/speculation/policy.py",
        TESTS,
        (
            "a budget goes to drafts that are no prefixes of their rows",
            "(chance, -i, group) for group in groups for i, chance in enumerate(",
            "(1 - chance, -i, group) for group in groups for i, chance in enumerate(",
        ),
        ("drafting is never tried again", "wait = self._probe(rows, lengths, line)", "wait = 128"),
        (
            "all of many rows draft k at first",
            "every = min(max(1, len(rows) // FIRST_ROWS), self.k)",
            "every = 1",
        ),
        (
            "all of many prompts draft k at first",
            "is_undecided = not self._lengths and not self._is_measured",
            "is_undecided = False",
        ),
        (
            "steps are run to learn costs that were measured",
            "len(FIRST_STEPS) and not self._is_measured:",
            "len(FIRST_STEPS):",
        ),
        (
            "first blocks of many that come at once are those of one",
            "        self._choose_first_length(len(running) + num_beginning, num_prompt_tokens)\n",
            "",
        ),
        (
            "requests that wait do not count before they begin",
            "self._choose_first_length(len(running) + num_beginning, ",
            "self._choose_first_length(len(running), ",
        ),
        (
            "a first block has more drafts than its request asks for",
            "length = min(row.k, self._first_length)",
            "length = self._first_length",
        ),
        (
            "what was chosen for many stays for one",
            "            self._first_length = None\n            return\n",
            "            return\n",
        ),
        (
            "first blocks of requests that wait for blocks are decided in each step",
            "if self._first_length is not None and num_rows == self._num_first_rows:",
            "if False:",
        ),
        (
            "a decision does not reach the first blocks of many that wait",
            "        self._num_first_rows = 0\n        self._probes",
            "        self._probes",
        ),
        (
            "a rest lasts though the time of steps without drafts is not known",
            "<= MAX_UNCERTAINTY\n            self._interval",
            "<= 1e9\n            self._interval",
        ),
        (
            "the time of a step without drafts is never looked at",
            "if self._wants_trial(len(rows), mean_position, num_other_tokens):",
            "if False:",
        ),
        (
            "a probe that was accepted is followed by a decision only when it is time for one",
            "            self._is_due = True\n",
            "            pass\n",
        ),
        (
            "drafting rests for ever",
            "if changed or is_due or not self.rests:",
            "if changed or not self.rests:",
        ),
        (
            "steps that rest are not counted",
            "        self.stats.num_steps_without_drafts += 1\n        return True\n",
            "        return True\n",
        ),
        (
            "a decision of rows that draft holds for some steps, however long they take",
            " or self._age >= self._interval or self._is_old:",
            " or self._age >= self._interval:",
        ),
        (
            "a rest is ended by the time that its steps take",
            "return self._age_s >= most and not self.rests",
            "return self._age_s >= most",
        ),
        (
            "few rows are decided for as often as many",
            "SECONDS_OF_FEW if self._interval == MOST_STEPS_OF_FEW else SECONDS_BETWEEN_DECISIONS",
            "SECONDS_BETWEEN_DECISIONS",
        ),
        (
            "a first block while drafting rests is followed by others",
            "self._has_first_block |= length > 0",
            "pass",
        ),
        (
            "the number of drafts that pays is not remembered",
            "num_taken = rates.index(max(rates))",
            "num_taken = len(candidates)",
        ),
        (
            "rows draft alike whatever different numbers gain",
            "if not self.uneven.pays(rate / rate_alike - 1, groups.total()):",
            "if True:",
        ),
        (
            "the rows of a group count once in the number for all",
            "tokens[1:] += count * self",
            "tokens[1:] += self",
        ),
        (
            "prompt tokens of a step are left out",
            "(len(rows), mean_position, num_other_tokens)\n        if line",
            "(len(rows), mean_position, 0)\n        if line",
        ),
        (
            "the first pass that does not pay ends the search for their number",
            "for most in range(1, self.k + 1)",
            "for most in range(1, 2)",
        ),
        ("a request drafts more than its own k", "min(row.k, self._lengths[group])", "self._lengths[group]"),
    ),
    *mutants_of(
        f"{CORE}/speculation/acceptance.py",
        TESTS,
        (
            "the estimate is fed with its own prediction",
            "accepted + self._rates - _sigmoid(slopes * usual)",
            "chances + self._rates - _sigmoid(usual)",
        ),
        (
            "drafts behind the first that was not accepted count as refused",
            "tried = (self._position <= num_accepted) & verified",
            "tried = verified",
        ),
        (
            "the requests that draft more stand for all",
            "accepted + self._rates - _sigmoid(slopes * usual)",
            "accepted",
        ),
        (
            "the level stays",
            "level = self.level + variance * surprise + covariance * weight_surprise",
            "level = self.level",
        ),
        ("a request's effect stays", "effect.value + gain * unexpected", "effect.value"),
    ),
    *mutants_of(
        f"{CORE}/speculation/acceptance.py",
        BUDGET_TESTS,
        (
            "what a confidence is worth is learned from its own prediction",
            "float((surprises * confidences).sum())",
            "0.0",
        ),
        (
            "the confidence of another draft of the block is looked at",
            "return known * (confidences - self._means)",
            "return known * (np.roll(confidences, 1, axis=1) - self._means)",
        ),
        (
            "a block is as likely as its verified drafts",
            "before[:, 1:] = _sigmoid(logits[:, :-1]).cumprod(axis=1)",
            "before[:, 1:] = (confidences[:, :-1] > 3.0).cumprod(axis=1)",
        ),
    ),
    *mutants_of(
        f"{CORE}/speculation/costs.py",
        ("tests/core/test_step_costs.py",),
        (
            "steps without drafts take what a line says",
            "if LEAST_PLAIN < shape.num_tokens == shape.num_rows",
            "if 0 > shape.num_rows",
        ),
        (
            "what a line misses of small steps it misses of all",
            "np.maximum(1 - num_drafts / max(self.num_tokens, 1), 0.0)",
            "1.0",
        ),
    ),
    *mutants_of(
        f"{CORE}/speculation/budget.py",
        BUDGET_TESTS,
        ("the likeliest drafts come last", "np.sort(chances)[::-1]", "np.sort(chances)"),
        ("drafts without confidences get a budget", "return has_confidence", "return True"),
        ("budgets that did not pay are never tried again", " or self._since_look >= self._wait", ""),
        ("looks that find nothing stay as frequent", "min(2 * self._wait, MOST_BETWEEN_LOOKS)", "self._wait"),
        ("what budgets gain is not taken in", "self._gain += GAIN_WEIGHT * (gain - self._gain)", "pass"),
    ),
    *mutants_of(
        f"{CORE}/speculation/policy.py",
        BUDGET_TESTS,
        (
            "a probe is not verified",
            "if not self.pays and max(row",
            "if False and max(row",
        ),
        (
            "nothing is verified where nothing pays",
            "max(optimal.num_drafts, -(-len(drafting) // VERIFY_SHARE))",
            "optimal.num_drafts",
        ),
        (
            "the plan takes all requests to be alike",
            "[known.effect.value for known in speculating]",
            "[0.0] * len(rows)",
        ),
    ),
    *mutants_of(
        f"{CORE}/engine.py",
        BUDGET_TESTS,
        (
            "verified drafts are reported as many as were proposed",
            "self._spec_counts.delivered.observe_draft(result.num_verified, len(token_ids))",
            "self._spec_counts.delivered.observe_draft(row.num_draft, len(token_ids))",
        ),
        (
            "a request's verified drafts are as many as were proposed",
            "request.spec_stats.observe_draft(result.num_verified, len(token_ids))",
            "request.spec_stats.observe_draft(row.num_draft, len(token_ids))",
        ),
    ),
    *mutants_of(
        "kernels/dflash_kernels/verify_budget.py",
        ("tests/kernels/test_verify_budget.py",),
        (
            "drafts are taken whatever comes before them",
            "np.add.accumulate(np.logaddexp(np.float32(0), -logits), axis=1)",
            "np.logaddexp(np.float32(0), -logits)",
        ),
        (
            "equally likely drafts exceed the budget",
            "    return np.bincount(",
            "    costs = np.where(there, costs, np.inf)\n"
            "    taken = np.flatnonzero(costs <= np.sort(costs, axis=None)[len(taken) - 1]) if len(taken) else taken\n"
            "    return np.bincount(",
        ),
    ),
    *mutants_of(
        "kernels/dflash_kernels/verify_budget.py",
        ("tests/kernels/test_verify_budget.py",),
        (
            "equally likely drafts exceed the budget on a device",
            "verified = cheaper + tl.minimum(tl.maximum(left, 0), equal)",
            "verified = cheaper + equal",
        ),
        ("a row's logits begin at its first token", "last = start + tl.load(num_new_ptr + row) - 1", "last = start"),
    ),
    *mutants_of(
        "kernels/dflash_kernels/paged_attention.py",
        SHARED_ATTENTION,
        (
            "the end of a tile is left where the beginning of another is",
            "slot = 2 * worker + (tile_begin >= worker * share).to(tl.int32)",
            "slot = 2 * worker",
        ),
        (
            "a tile is merged that one worker has written",
            "if (at == tile_begin) & (piece_end == tile_end):",
            "if False:",
        ),
    ),
    *mutants_of(
        "kernels/dflash_kernels/attention_merge.py",
        SHARED_ATTENTION,
        (
            "a row that is cut writes where the next one's tokens lie",
            "is_query = in_tile & (query < tl.minimum(last, tl.load(query_lens_ptr + row)))",
            "is_query = in_tile & (query < last)",
        ),
        (
            "a worker that has no part in a tile is merged",
            "there = (worker <= last_worker)[:, None] & in_tile[None, :]",
            "there = in_tile[None, :] & (worker >= 0)[:, None]",
        ),
    ),
    *mutants_of(
        "kernels/dflash_kernels/attention_schedule.py",
        ("tests/kernels/test_attention_schedule.py",),
        (
            "a worker has the longest row",
            "tl.cdiv(total, num_workers)",
            "longest",
        ),
        (
            "rows of one length are cut",
            "share = tl.where((whole - share) * WHOLE_TILES_COST <= share, whole, share)",
            "",
        ),
    ),
    *mutants_of(
        "kernels/dflash_kernels/paged_attention_launch.py",
        ("tests/kernels/test_attention_launch.py",),
        (
            "the lower tiles of attention are compiled in service",
            "lengths = [longest] if is_uniform else range(1, longest + 1)",
            "lengths = [longest]",
        ),
        (
            "a GPU with little shared memory gets the tiles of one with much",
            "if _needed_bytes(tiling, shape) > gpu.shared_bytes:",
            "if False:",
        ),
        (
            "prompts of one length are compiled in service",
            "for tiles in ([None] if is_uniform else [None, tile])",
            "for tiles in ([None] if is_uniform else [tile])",
        ),
    ),
    *mutants_of(
        "dflash_backend/worker/graphs.py",
        ("tests/benchmarks/test_kernel_variants.py",),
        (
            "logits of logits processors are masked by a kernel that is compiled in service",
            "for dtype in (model.dtype, torch.float32):",
            "for dtype in (model.dtype,):",
        ),
    ),
    *mutants_of(
        "dflash_backend/worker/runner.py",
        ("tests/worker/test_verify_budget.py",),
        (
            "verified drafts are said to be the proposed ones",
            "error, status, counts[1]",
            "error, status, row.num_draft",
        ),
    ),
    *mutants_of(
        "dflash_backend/worker/step.py",
        ("tests/worker/test_verify_budget.py",),
        (
            "confidences come back for other requests",
            "state.confidence.index_select(0, batch.req_idx.clamp(min=0))",
            "state.confidence.index_select(0, batch.req_idx.clamp(min=0).flip(0))",
        ),
    ),
    *mutants_of(
        "kernels/dflash_kernels/prepare_draft.py",
        ("tests/worker/test_step_ops.py::test_drafts_lie_behind_the_anchor",),
        (
            "confidences are kept one place too far",
            "confidences.numpy()[req_idx.numpy()[rows], columns] = sure",
            "confidences.numpy()[req_idx.numpy()[rows], columns - 1] = sure",
        ),
    ),
    *mutants_of(
        f"{CORE}/speculation/costs.py",
        TESTS,
        (
            "every step of a kind is taken in",
            "if number > FEW and number % EVERY and not self._takes_next:",
            "if False:",
        ),
        ("many steps of one kind leave others out", "self._num_seen.get(kind, -1) + 1", "sum(self._num_seen.values())"),
        ("a step passed over is not made up for", "self._takes_next = True", "pass"),
        (
            "what drafting takes the host counts as the target's",
            "float(self.num_queries > 0),\n",
            "0.0,\n",
        ),
        (
            "steps of other numbers of rows begin with nothing known",
            "if like is not None and (expected := like.at(shape.target)) > 0:",
            "if like is not None and (expected := like.at(shape.target)) > 1e9:",
        ),
        (
            "the longest time of a size counts",
            "min(step.target_s, shortest.get(step.num_tokens, math.inf))",
            "max(step.target_s, shortest.get(step.num_tokens, 0.0))",
        ),
        (
            "a table of step times is never corrected",
            "self._seconds[entry] *= factor ** (share / self._weights[entry])",
            "pass",
        ),
        (
            "drafting is free",
            "self.per_pass * num_passes + self.per_query * num_queries + self.per_drafting_row * num_drafting",
            "0.0",
        ),
        (
            "the passes of an autoregressive drafter count as one",
            "shape.num_passes = work.num_passes(longest) if longest else 0",
            "shape.num_passes = 1 if longest else 0",
        ),
        (
            "the time of drafting counts twice",
            "target.observe(features, target_s)",
            "target.observe(features, target_s + draft_s)",
        ),
        (
            "steps that were measured count as those of one row",
            "shape = cls(rows, step.num_tokens,",
            "shape = cls(1, step.num_tokens,",
        ),
        (
            "what is not known of many rows is taken from one",
            "fit = _nearest(self._targets, num_rows)\n",
            "fit = _nearest(self._targets, 1)\n",
        ),
        (
            "how certain a time is follows from its tokens",
            "fit = _nearest(self._targets, num_rows)\n",
            "fit = _nearest(self._targets, num_tokens)\n",
        ),
        (
            "what is not known of some rows is taken from those that came first",
            "fits[min(fits, key=lambda each: (abs(each - size), each))]",
            "fits.get(size) or next(iter(fits.values()))",
        ),
        (
            "many rows are thought to cost what one does",
            "return -(-(num_rows - 1).bit_length() // LOG2_ROWS_STEP)",
            "return 0",
        ),
    ),
    *mutants_of(
        f"{CORE}/scheduler.py",
        TESTS,
        (
            "new requests draft k tokens whatever was decided",
            "            request.draft_length = self.speculation.choose_first_block(request.speculation)\n",
            "            pass\n",
        ),
    ),
    *mutants_of(
        f"{CORE}/speculation/policy.py",
        TESTS,
        (
            "surplus drafts at the end of an answer",
            "length if alike else min(length, request.max_useful_drafts)",
            "length",
        ),
        (
            "the decision does not know of the prompts in its step",
            "num_other = len(decoding) - len(drafting) + of_prompts",
            "num_other = len(decoding) - len(drafting)",
        ),
        (
            "drafts are chosen for prompts that will have ended",
            "min(self._num_prefill_tokens, max(0, num_prompt_tokens - self._num_prefill_tokens))",
            "self._num_prefill_tokens",
        ),
        (
            "a decision outlasts the prompts that it was made beside",
            "changed |= abs(num_tokens - self._num_tokens) > MAX_CHANGE * self._num_tokens",
            "pass",
        ),
    ),
    *mutants_of(
        "dflash_backend/worker/graphs.py",
        ("tests/worker/test_graphs.py::test_a_capture_that_fails_for_another_reason_than_memory_ends_the_attempt",),
        ("a failed capture leaves its stream behind", "torch.cuda.set_stream(current)", "pass"),
        ("with ranks a failed capture is passed over", "if not alone:", "if False:"),
        ("a capture that failed is not tried again", "for again in (alone, False):", "for again in (False,):"),
    ),
    *mutants_of(
        "dflash_backend/engine/measured_steps.py",
        ("tests/engine/test_measured_steps.py",),
        ("slow steps are measured all the same", "if time.perf_counter() + timed.last_s > ends:", "if False:"),
        ("requests of a measurement stay in the worker", "    worker.reset()\n", ""),
        ("steps with prompts count as decoding ones", " and all(row.num_new == 1 for row in rows)", ""),
        ("rows that differ are one kind", "if len(kinds) == 1 and", "if kinds and"),
        (
            "drafting counts with the target's pass",
            "times = self.last_s - draft_s, draft_s",
            "times = self.last_s, draft_s",
        ),
        (
            "a measurement asks for more than the pool holds",
            "min((1 + NUM_STEPS) * (1 + length), config",
            "min(1 << 30, config",
        ),
        ("a model that is too short cannot be started", "except RequestError:", "except KeyError:"),
    ),
    *mutants_of(
        "dflash_backend/engine/build.py",
        ("tests/engine/test_measured_steps.py",),
        (
            "steps are measured where nothing is decided",
            "if not config.adaptive_speculation or not config.num_speculative_tokens:",
            "if False:",
        ),
    ),
    *mutants_of(
        "dflash_backend/worker/graphs.py",
        ("tests/worker/test_graphs.py",),
        ("the next layout comes while a step still runs", "current.wait_stream(self._stream)", "pass"),
        (
            "memory that torch keeps of other steps counts as taken",
            "        torch.cuda.empty_cache()\n        return peers",
            "        return peers",
        ),
        (
            "memory that ran out in a capture is another error",
            "with suppress(RuntimeError):",
            "with suppress(ZeroDivisionError):",
        ),
    ),
    *mutants_of(
        "dflash_backend/worker/graphs.py",
        (
            "tests/parallel/test_gpu_start.py::test_ranks_run_a_step_before_it_is_captured_and_replay_their_graph_before_rank_0",
        ),
        ("with ranks a step is captured while theirs still runs", "peers is not ALONE", "peers is None"),
    ),
    *mutants_of(
        "dflash_backend/worker/runner.py",
        ("tests/worker/test_graphs.py::test_an_engine_that_cannot_capture_serves_without_graphs_and_says_so",),
        ("some graphs are kept where capturing failed", "            self.graphs.clear()\n", ""),
        ("the collector runs between captures", "with no_collection() if captures", "with nullcontext() if captures"),
    ),
    *mutants_of(
        "dflash_backend/worker/graphs.py",
        ("tests/worker/test_graphs.py",),
        (
            "rows of more tokens than sizes are apart have no sizes",
            "(max(1, stride).bit_length() - 1)",
            "(stride.bit_length() - 1)",
        ),
        (
            "nine rows with many drafts run as sixteen",
            "if size < listed[0]), *listed]",
            "if size < listed[0])]",
        ),
        ("steps of few tokens a row have more rows of padding than eight", "between.union(sizes)", "sizes"),
        (
            "steps have a size that is as slow as a larger one",
            "(128, 144, 160, 208, 256, 288, 320, 384, 432, 512)",
            "(128, 144, 160, 192, 208, 256, 288, 320, 384, 432, 512)",
        ),
        (
            "a step that proposes fewer drafts is taken",
            "            and draft_width <= inputs.draft_width\n",
            "",
        ),
        ("a step has fewer tokens than its rows", "and num_tokens <= inputs.num_tokens <= most_tokens", ""),
        (
            "a row has more tokens than attention expects",
            "            and widest <= int(inputs.bounds.query_lens[0])\n",
            "",
        ),
    ),
    *mutants_of(
        "dflash_backend/engine/build.py",
        ("tests/engine/test_settings.py",),
        (
            "the setting adaptive_speculation does nothing",
            "adaptive_speculation=config.adaptive_speculation",
            "adaptive_speculation=True",
        ),
    ),
)
