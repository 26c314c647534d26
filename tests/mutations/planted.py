"""Defects all over the project, as they were once planted to see which of them the tests notice: in the kernels, the
models, speculation, both workers, the wiring of settings, the frontend and the client. Those that nothing had noticed
come first."""

from __future__ import annotations

from tests.mutations.mutant import Mutant

BUILD = "dflash_backend/engine/build.py"
TEXT = "dflash_backend/text"
TRITON = "dflash_backend/triton"
WORKER = "dflash_backend/worker"
VERIFY = "dflash_backend/sampling/verify.py"
ACCEPT = "kernels/dflash_kernels/accept.py"

SETTINGS = ("tests/test_settings.py",)
FRONTEND_SETTINGS = ("tests/triton/test_settings.py",)
LATENCIES = ("tests/triton/test_latencies.py",)
METRICS = ("tests/triton/test_metrics.py",)
GUARD = ("tests/worker/test_write_guard.py",)
STEP_OPS = ("tests/worker/test_step_ops.py",)
REJECTION = ("tests/sampling/test_verify.py",)
DETOKENIZER = ("tests/text/test_detokenizer.py",)
BOTH_RUNNERS = ("tests/test_device_lossless.py::test_the_device_runner_yields_the_tokens_of_the_cpu_runner",)

_UNSEEN = (
    Mutant(
        "one random number judges all drafts of a row",
        VERIFY,
        "draft_positions = positions[layout.draft_rows] + layout.draft_columns",
        "draft_positions = positions[layout.draft_rows]",
        (*REJECTION, "tests/kernels/test_accept.py"),
        (
            (
                ACCEPT,
                "numbers = uniform(seeds[index][:, None].expand_as(positions), positions, accept_stream)",
                "numbers = uniform(seeds[index][:, None].expand_as(positions), positions[:, :1].expand_as(positions), "
                "accept_stream)",
            ),
            (ACCEPT, "first + column, accept_stream)", "first + column * 0, accept_stream)"),
        ),
    ),
    Mutant(
        "min_p is judged before the temperature",
        "kernels/dflash_kernels/cut_softmax.py",
        "probs = scaled.softmax(dim=-1)",
        "probs = logits.float().softmax(dim=-1)",
        ("tests/kernels/test_sampling.py::test_the_cuts_see_the_probabilities_at_the_temperature",),
        (
            (
                "kernels/dflash_kernels/cut_softmax.py",
                "cut = tl.maximum(cut, top + temperature * tl.log(min_p))",
                "cut = tl.maximum(cut, top + tl.log(min_p))",
            ),
        ),
    ),
    Mutant(
        "top_p, top_k and min_p never reach the device",
        f"{WORKER}/device_requests.py",
        "(state.top_p, self.top_p),",
        "(state.top_p, np.ones_like(self.top_p)),",
        BOTH_RUNNERS,
        (
            (
                f"{WORKER}/device_requests.py",
                "(state.min_p, self.min_p),",
                "(state.min_p, np.zeros_like(self.min_p)),",
            ),
            (
                f"{WORKER}/device_requests.py",
                "(state.top_k, self.top_k),",
                "(state.top_k, np.zeros_like(self.top_k)),",
            ),
        ),
    ),
    Mutant(
        "the cuts are lost where parameters are repeated for each distribution",
        "dflash_backend/sampling/filtering.py",
        "            self.any_top_k_or_p,\n            self.any_min_p,",
        "            False,\n            False,",
        ("tests/sampling/test_filtered_softmax.py",),
    ),
    Mutant(
        "mask queries past the eighth are rotated as the eighth",
        "dflash_backend/drafters/dflash/drafter.py",
        "positions = block.positions[rows] + offsets",
        "positions = block.positions[rows] + np.minimum(offsets, 8)",
        ("tests/drafters/test_dflash.py",),
        (
            (
                "dflash_backend/drafters/dflash/drafter.py",
                "            blocks.positions.flatten(),",
                "            torch.minimum(blocks.positions, blocks.positions[:, :1] + 8).flatten(),",
            ),
        ),
    ),
    Mutant(
        "requests without speculation leave no drafter K/V in the blocks that they publish",
        f"{WORKER}/runner.py",
        "        positions, slots = batch.token_position, batch.token_slot\n        if not final.all():",
        "        records = [self.requests.records[i] for i in batch.request_ids]\n"
        "        wants = np.array([record.sampling.num_speculative_tokens != 0 for record in records])\n"
        "        final &= wants[batch.token_row]\n"
        "        positions, slots = batch.token_position, batch.token_slot\n        if not final.all():",
        ("tests/worker/test_mixed_speculation.py",),
    ),
    Mutant(
        "a cache salt's letters beyond ASCII are dropped",
        "dflash_backend/core/prefix_cache.py",
        'cache_salt.encode("utf-8", "surrogatepass")',
        'cache_salt.encode("ascii", "ignore")',
        ("tests/core/test_prefix_cache.py",),
    ),
    Mutant(
        "the inject phase is not guarded",
        f"{WORKER}/runner.py",
        'guard.check("inject", batch.request_ids, batch.token_row[final], slots)',
        "pass",
        GUARD,
    ),
    Mutant(
        "the verify phase is not guarded",
        f"{WORKER}/runner.py",
        'guard.check("verify", batch.request_ids, batch.token_row, batch.token_slot)',
        "pass",
        GUARD,
    ),
    Mutant(
        "the inject phase is not guarded on the device",
        f"{WORKER}/device_step.py",
        'hooks.check("inject", rows.token_row, slots, None)',
        "pass",
        ("tests/worker/test_device_runner.py::test_each_phase_that_writes_is_checked",),
    ),
    Mutant(
        "request_timeout_s is not sent to the engine",
        f"{TRITON}/service.py",
        "self._config.request_timeout_s,",
        "0.0,",
        FRONTEND_SETTINGS,
    ),
    Mutant(
        "draft_sample_method does nothing",
        BUILD,
        'greedy_drafts = config.draft_sample_method == "greedy"',
        "greedy_drafts = False",
        SETTINGS,
    ),
    Mutant("the setting seed does nothing", BUILD, "seed=config.seed,", "seed=0,", SETTINGS),
    Mutant("enable_overlap does nothing", BUILD, "trace, config.enable_overlap)", "trace, True)", SETTINGS),
    Mutant(
        "max_prefill_tokens_per_step does nothing",
        BUILD,
        "max_prefill_tokens_per_step=config.max_prefill_tokens_per_step",
        "max_prefill_tokens_per_step=None",
        SETTINGS,
    ),
    Mutant(
        "queries and hits of the prefix cache change places",
        f"{TRITON}/metrics.py",
        '"prefix_cache_queries": "dflash:prefix_cache_queries_total",',
        '"prefix_cache_queries": "dflash:prefix_cache_hits_total",',
        METRICS,
        (
            (
                f"{TRITON}/metrics.py",
                '"prefix_cache_hits": "dflash:prefix_cache_hits_total",',
                '"prefix_cache_hits": "dflash:prefix_cache_queries_total",',
            ),
        ),
    ),
    Mutant(
        "the time per output token counts the first token",
        f"{TRITON}/request_metrics.py",
        "(now - flight.first_token_at) / (longest - 1)",
        "(now - flight.first_token_at) / longest",
        LATENCIES,
    ),
    Mutant(
        "time to first token is the whole latency",
        f"{TRITON}/request_metrics.py",
        "flight.first_token_at - flight.submitted_at)",
        "now - flight.submitted_at)",
        LATENCIES,
    ),
    Mutant(
        "buckets of seconds are milliseconds",
        f"{TRITON}/metrics.py",
        "_Histogram(self._specs[name].buckets)",
        "_Histogram(tuple(1000 * bound for bound in self._specs[name].buckets))",
        METRICS,
    ),
    Mutant(
        "the queue time of several completions is the longest",
        f"{TRITON}/flight.py",
        "return min(completion.stats.queue_time_s",
        "return max(completion.stats.queue_time_s",
        LATENCIES,
    ),
    Mutant(
        "a stop string counts that ends in the last of min_tokens",
        f"{TEXT}/detokenizer.py",
        "search=self._num_unsearched < 0)",
        "search=self._num_unsearched <= 0)",
        DETOKENIZER,
    ),
)

_SEEN = (
    Mutant(
        "the residual is that of a row's first draft, in one form",
        VERIFY,
        "index = first_draft[fell] + accepted[fell]",
        "index = first_draft[fell]",
        STEP_OPS,
    ),
    Mutant(
        "the residual is that of a row's first draft, in every form",
        VERIFY,
        "index = first_draft[fell] + accepted[fell]",
        "index = first_draft[fell]",
        REJECTION,
        (
            (ACCEPT, "draft_probs[index, count.clamp(max=k - 1)]", "draft_probs[index, torch.zeros_like(count)]"),
            (
                ACCEPT,
                "place = (table.to(tl.int64) * k + count) * vocab + offsets",
                "place = table.to(tl.int64) * k * vocab + offsets",
            ),
        ),
    ),
    Mutant(
        "drafts are judged by the numbers of the position after theirs, in one form",
        VERIFY,
        "draft_positions = positions[layout.draft_rows] + layout.draft_columns",
        "draft_positions = positions[layout.draft_rows] + layout.draft_columns + 1",
        STEP_OPS,
    ),
    Mutant(
        "after a preemption decoded positions are one too high",
        f"{WORKER}/request_table.py",
        "        record = super().learn(new)\n        self.tokens",
        "        record = super().learn(new)\n"
        "        self.resumed = getattr(self, 'resumed', {})\n"
        "        self.resumed[record.index] = len(new.token_ids) > new.num_prompt_tokens\n"
        "        self.tokens",
        ("tests/test_same_seed.py::test_a_request_gets_its_output_after_a_preemption",),
        (
            (
                f"{WORKER}/runner.py",
                "        context = PagedContext.prepare(\n            layout, positions,",
                "        late = [self.requests.resumed[i] for i in batch.table[batch.token_row].tolist()]\n"
                "        late = np.array(late) & (batch.num_new[batch.token_row] == 1)\n"
                "        context = PagedContext.prepare(\n            layout, positions + self._put(late),",
            ),
        ),
    ),
    Mutant(
        "the first block that a window shows is one too late",
        "dflash_backend/attention/torch_backend.py",
        "first_query - pattern.sliding_window + 1, 0)",
        "first_query - pattern.sliding_window + 2, 0)",
        ("tests/attention/test_torch_backend.py",),
    ),
    Mutant(
        "one character less is held back for a stop string",
        f"{TEXT}/stop_strings.py",
        "held = 0 if finished else machine.depth[state]",
        "held = 0 if finished else max(0, machine.depth[state] - 1)",
        DETOKENIZER,
    ),
    Mutant(
        "log-probabilities on the device are those of adjusted logits",
        f"{WORKER}/device_special.py",
        "        return logits.float().index_copy(0, flat, adjusted)",
        "        self._raw = adjusted\n        return logits.float().index_copy(0, flat, adjusted)",
        ("tests/test_device_lossless.py::test_adjusted_logits_and_logprobs_are_those_of_the_cpu_runner",),
    ),
    Mutant(
        "penalties do not count drafts",
        f"{WORKER}/logits.py",
        "    counts.index_put_((put(distributions), draft_tokens), counts.new_ones(()), accumulate=True)\n",
        "",
        ("tests/worker/test_logits.py",),
    ),
    Mutant(
        "penalties do not count the last token",
        f"{WORKER}/logits.py",
        "in_output = (column < put(position)[:, None]) & ~in_prompt",
        "in_output = (column < put(position)[:, None] - 1) & ~in_prompt",
        ("tests/test_logits_processing.py::test_greedy_output_is_the_best_token_of_the_changed_logits_at_every_place",),
    ),
    Mutant(
        "a request that is cancelled while it is preempted stays in the queue",
        "dflash_backend/core/scheduler.py",
        "        else:\n            self.queue.discard(request)",
        "        elif request.num_preemptions == 0:\n            self.queue.discard(request)",
        ("tests/core/test_core_random.py",),
    ),
    Mutant(
        "requests without a seed share one",
        "dflash_backend/core/request.py",
        "derive_seed(config.seed, arrival)",
        "derive_seed(config.seed, 0)",
        ("tests/core/test_engine_core.py",),
    ),
    Mutant(
        "min_tokens starts anew after a preemption",
        f"{WORKER}/request_table.py",
        "min_end = min(new.num_prompt_tokens + sampling.min_tokens, self._max_len)",
        "min_end = min(len(new.token_ids) + sampling.min_tokens, self._max_len)",
        ("tests/worker/test_logits.py",),
    ),
    Mutant(
        "draft ids of a cut vocabulary are taken for the target's",
        "dflash_backend/sampling/vocabulary.py",
        "return self.ids[draft_tokens]",
        "return draft_tokens",
        ("tests/drafters/test_draft_sampler.py",),
    ),
    Mutant(
        "a torn character at the end is lost",
        f"{TEXT}/detokenizer.py",
        "complete = text if finished else _complete(text)",
        "complete = _complete(text)",
        DETOKENIZER,
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
        "only the first end-of-sequence id ends an answer",
        f"{TEXT}/tokenizer.py",
        "tuple(dict.fromkeys((*read_eos(directory), *own)))",
        "tuple(dict.fromkeys((*read_eos(directory), *own)))[:1]",
        ("tests/text/test_tokenizer.py",),
    ),
    Mutant(
        "drafts are drawn with the target's random numbers",
        "dflash_backend/drafters/base.py",
        "parameters.seeds, where, Stream.DRAFT)",
        "parameters.seeds, where, Stream.TARGET)",
        ("tests/drafters/test_draft_sampler.py",),
    ),
    Mutant(
        "the kernel takes the residual although every draft was accepted",
        ACCEPT,
        "if count < tl.load(num_draft_ptr + row):",
        "if count <= tl.load(num_draft_ptr + row):",
        STEP_OPS,
    ),
    Mutant(
        "a client sends again past its time-out",
        "client/dflash_client/retry.py",
        "return wait_s if wait_s < remaining_s else None",
        "return wait_s",
        ("tests/client/test_request.py",),
    ),
    Mutant(
        "log-probabilities go on past a stop string",
        f"{TRITON}/flight.py",
        "            if self.stopped:\n                return index + 1\n",
        "",
        ("tests/triton/test_service.py",),
    ),
    Mutant(
        "penalties come before the bias",
        f"{WORKER}/logits.py",
        "    first = rows.first\n    for i in special.nonzero()",
        "    first = rows.first\n"
        "    which = penalised.nonzero()[0]\n"
        "    if len(which) > 0:\n"
        "        _penalise(adjusted, first[which], num_draft[which], position[which], table[which], requests)\n"
        "    for i in special.nonzero()",
        ("tests/worker/test_logits.py",),
        (
            (
                f"{WORKER}/logits.py",
                "for start in range(0, len(which), PENALISED_AT_A_TIME):",
                "for start in range(0, 0, PENALISED_AT_A_TIME):",
            ),
        ),
    ),
    Mutant(
        "every accepted draft counts at the first position",
        "dflash_backend/spec_stats.py",
        "self.num_accepted_tokens_per_pos[position] += 1",
        "self.num_accepted_tokens_per_pos[0] += 1",
        ("tests/core/test_engine_core.py",),
    ),
    Mutant(
        "the engine is not told of a cancelled request",
        f"{TRITON}/service.py",
        "self._engine.send(AbortRequests(flight.engine_ids))",
        "pass",
        ("tests/triton/test_service.py",),
    ),
    Mutant(
        "drafts are judged by the distributions of the step before",
        f"{WORKER}/runner.py",
        "self.requests.draft_probs[self._put(draft_table[flat]), self._put(columns)] = sampler.probs",
        "self.stale, now = sampler.probs, getattr(self, 'stale', sampler.probs)\n"
        "            probs = now if now.shape == sampler.probs.shape else sampler.probs\n"
        "            self.requests.draft_probs[self._put(draft_table[flat]), self._put(columns)] = probs",
        ("tests/test_logits_processing.py::test_sampled_output_has_the_distribution_of_the_changed_logits",),
    ),
)

PLANTED = _UNSEEN + _SEEN

# Cheap ones, over all packages, that every run of the tests applies.
SMOKE = (
    "one random number judges all drafts of a row",
    "a cache salt's letters beyond ASCII are dropped",
    "the inject phase is not guarded",
    "max_prefill_tokens_per_step does nothing",
    "queries and hits of the prefix cache change places",
    "the first block that a window shows is one too late",
    "draft ids of a cut vocabulary are taken for the target's",
    "a torn character at the end is lost",
    "only the first end-of-sequence id ends an answer",
    "a client sends again past its time-out",
)
