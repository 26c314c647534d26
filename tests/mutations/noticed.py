"""Defects of kernels, models, worker, settings, Triton's package and the client that tests noticed from the start."""

from __future__ import annotations

from tests.mutations.mutant import Mutant

TEXT = "dflash_backend/text"
TRITON = "dflash_backend/triton"
WORKER = "dflash_backend/worker"
ACCEPT = "kernels/dflash_kernels/accept.py"
STEP_OPS = ("tests/worker/test_step_ops.py",)
REJECTION = ("tests/sampling/test_verify.py",)
DETOKENIZER = ("tests/text/test_detokenizer.py",)

NOTICED = (
    Mutant(
        "the residual is that of a row's first draft, in one form",
        ACCEPT,
        "draft_probs[torch.from_numpy(self.index[rejected]), columns]",
        "draft_probs[torch.from_numpy(self.index[rejected]), columns * 0]",
        STEP_OPS,
    ),
    Mutant(
        "the residual is that of a row's first draft, in every form",
        ACCEPT,
        "draft_probs[torch.from_numpy(self.index[rejected]), columns]",
        "draft_probs[torch.from_numpy(self.index[rejected]), columns * 0]",
        REJECTION,
        (
            (
                ACCEPT,
                "place = (req_idx.to(tl.int64) * k + count) * vocab + offsets",
                "place = req_idx.to(tl.int64) * k * vocab + offsets",
            ),
        ),
    ),
    Mutant(
        "drafts are judged by the numbers of the position after theirs, in one form",
        ACCEPT,
        "positions = torch.from_numpy(self.first[:, None] + column)",
        "positions = torch.from_numpy(self.first[:, None] + column + 1)",
        STEP_OPS,
    ),
    Mutant(
        "after a preemption decoded positions are one too high",
        f"{WORKER}/state.py",
        "        self.records[new.request_id] = record\n",
        "        self.records[new.request_id] = record\n"
        "        self.state.resumed = getattr(self.state, 'resumed', {})\n"
        "        self.state.resumed[index] = len(new.token_ids) > new.num_prompt_tokens\n",
        ("tests/test_same_seed.py::test_a_request_gets_its_output_after_a_preemption",),
        (
            (
                f"{WORKER}/step.py",
                "        context = PagedContext.prepare(\n"
                "            prepared.layout,\n            prepared.positions,",
                "        late = torch.tensor([self.state.resumed[i] for i in inputs.batch.req_idx.tolist()])\n"
                "        late = (late & (inputs.batch.num_new == 1))[inputs.batch.token_row.long()].long()\n"
                "        context = PagedContext.prepare(\n            prepared.layout,\n"
                "            prepared.positions + late,",
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
        "log-probabilities are those of processed logits",
        f"{WORKER}/logits.py",
        "        return logits.float().index_copy(0, flat, processed)",
        "        self._raw = processed\n        return logits.float().index_copy(0, flat, processed)",
        ("tests/test_logits_processing.py::test_logprobs_are_those_before_penalties_and_bias",),
    ),
    Mutant(
        "penalties do not count drafts",
        f"{WORKER}/logits.py",
        "    counts.index_put_((put(logits_rows), draft_tokens), counts.new_ones(()), accumulate=True)\n",
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
        f"{WORKER}/state.py",
        "min_end = min(new.num_prompt_tokens + sampling.min_tokens, self.state.max_len)",
        "min_end = min(len(new.token_ids) + sampling.min_tokens, self.state.max_len)",
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
        "parameters.seeds, positions, Stream.DRAFT)",
        "parameters.seeds, positions, Stream.TARGET)",
        ("tests/drafters/test_draft_sampler.py",),
        (
            (
                "dflash_backend/drafters/base.py",
                "positions[index], Stream.DRAFT)",
                "positions[index], Stream.TARGET)",
            ),
        ),
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
        f"{TEXT}/output.py",
        "            if self._stopped:\n                return index + 1\n",
        "",
        ("tests/text/test_output.py",),
    ),
    Mutant(
        "penalties come before the bias",
        f"{WORKER}/logits.py",
        "    first = metadata.first\n    for i in special.nonzero()",
        "    first = metadata.first\n"
        "    which = penalised.nonzero()[0]\n"
        "    if len(which) > 0:\n"
        "        _penalise(processed, first[which], num_draft[which], position[which], req_idx[which], requests)\n"
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
        "            per_position[position] += 1",
        "            per_position[0] += 1",
        ("tests/core/test_engine_core.py",),
    ),
    Mutant(
        "the engine is not told how many tokens count before a stop string",
        f"{TRITON}/running_requests.py",
        "AbortRequests([*aborted, *stopped_at], stopped_at)",
        "AbortRequests([*aborted, *stopped_at])",
        ("tests/triton/test_answers.py",),
    ),
    Mutant(
        "the engine is not told of a cancelled request",
        f"{TRITON}/running_requests.py",
        "self._engine.send(AbortRequests(request.state.engine_ids))",
        "pass",
        ("tests/triton/test_isolation.py",),
    ),
    Mutant(
        "drafts are judged by the distributions of the step before",
        f"{WORKER}/step.py",
        "        self.ops.store_drafts(drafts, inputs.batch, self.state, sampler.probs)",
        "        self.ops.store_drafts(drafts, inputs.batch, self.state)\n"
        "        late, self.late = getattr(self, 'late', None), (inputs.batch, sampler.probs)\n"
        "        if late is not None and late[1] is not None:\n"
        "            self.ops._store_probs(\n"
        "                self.state.draft_probs, late[0].req_idx, late[0].num_next, late[0].sampled, late[1]\n"
        "            )",
        ("tests/test_logits_processing.py::test_sampled_output_has_the_distribution_of_the_changed_logits",),
    ),
)
