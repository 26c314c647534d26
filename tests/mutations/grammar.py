"""Defects of structured output: answers that leave their grammar, or that speculation changes."""

from __future__ import annotations

from tests.mutations.mutant import Mutant, mutants_of

MATCHER_FILE = "dflash_backend/structured_output/matcher.py"
COMPILER_FILE = "dflash_backend/structured_output/compiler.py"
WORKER_FILE = "dflash_backend/worker/grammars.py"
KERNEL_FILE = "kernels/dflash_kernels/token_bitmask.py"
MATCHER = ("tests/structured_output/test_matcher.py",)
ENGINE = ("tests/test_structured_output.py",)

GRAMMAR_MUTANTS = (
    *mutants_of(
        "dflash_backend/structured_output/fair_thread.py",
        ("tests/structured_output/test_fair_thread.py",),
        (
            "grammars of a tenant are compiled before those of one that had less time",
            "tenant = min(self._waiting, key=lambda name: self._seconds.get(name, 0.0))",
            "tenant = next(iter(self._waiting))",
        ),
    ),
    *mutants_of(
        "dflash_backend/core/grammar_queue.py",
        ("tests/core/test_grammar_queue.py",),
        (
            "a grammar whose turn did not come is called too slow",
            "yield request, _late(request, waited_only)",
            "yield request, _late(request, False)",
        ),
        (
            "the compiler is not told whose grammar it is",
            "request.eos_token_ids, request.sampling.tenant)",
            'request.eos_token_ids, "")',
        ),
    ),
    *mutants_of(
        "dflash_backend/text/sampling_params.py",
        ("tests/test_structured_output.py", "tests/text/test_structured_outputs.py"),
        ("a grammar is called by another parameter's name", "(grammar, parameter=name)", "(grammar)"),
    ),
    *mutants_of(
        COMPILER_FILE,
        ("tests/structured_output/test_compiler.py",),
        (
            "Lark that names the sign of EBNF is taken for EBNF",
            '[ \\t]*[\\w-]+[ \\t]*::=", re.MULTILINE',
            '.*::=", re.MULTILINE',
        ),
        ("EBNF behind a comment is not known", '::=", re.MULTILINE', '::="'),
    ),
    *mutants_of(
        "dflash_backend/text/structured_outputs.py",
        ("tests/text/test_structured_outputs.py",),
        (
            "a response_format begins before the reasoning",
            'StructuredOutputs(grammar.kind, grammar.text, _marker(value.get("after_reasoning")))',
            "grammar",
        ),
        ("the fields that vLLM fills in itself are refused", " and name not in _VLLMS_OWN", ""),
    ),
    *mutants_of(
        "frontend/dflash_openai/conversation.py",
        ("tests/frontend/test_tools.py",),
        (
            "a response_format knows nothing of the reasoning",
            'for name in ("response_format", "structured_outputs"):',
            'for name in ("structured_outputs",):',
        ),
    ),
    *mutants_of(
        "frontend/dflash_openai/errors.py",
        ("tests/frontend/test_errors.py",),
        ("an error of a grammar names no parameter", "(?:parameter|the grammar in)", "(?:parameter)"),
    ),
    *mutants_of(
        MATCHER_FILE,
        MATCHER,
        (
            "the masks of a block do not count the drafts before them",
            "walked.append((each._matcher, start + plan.free, plan.drafts))",
            "plain.extend((each._matcher, start + plan.free + i) for i in range(len(plan.drafts) + 1))",
        ),
        (
            "a matcher keeps the drafts that it tried",
            "behind = behind[: self._matcher.validate_tokens(behind)]",
            "behind = behind[: self._matcher.try_consume_tokens(behind)]",
        ),
        (
            "the end of an answer goes to the grammar",
            "self._ended = True\n"
            "            del tokens[next(i for i, token_id in enumerate(tokens) if token_id in self._eos) :]",
            "del tokens[next(i for i, token_id in enumerate(tokens) if token_id in self._eos) + 1 :]",
        ),
        (
            "an end of sequence among the drafts is looked at as any other",
            "if self._tail is None and drafts and self._eos.isdisjoint(drafts):",
            "if self._tail is None and drafts:",
        ),
        (
            "drafts that were legal are so behind the tokens that were accepted",
            "self._ahead, None, []\n",
            "self._ahead, None, self._legal\n",
        ),
        (
            "a token behind legal drafts is not looked at",
            "if i == num_legal and trial.validate_tokens(",
            "if not num_legal and i == 0 and trial.validate_tokens(",
        ),
        (
            "forced tokens are more than there are places for",
            "self._forced(tokens[:num_legal], len(tokens) - num_legal)",
            "self._forced(tokens[:num_legal], len(tokens))",
        ),
        (
            "a forced text may be spelled in any way",
            "if forced and forced[0] != token_id:",
            "if False:",
        ),
        (
            "tokens that were looked at are taken in place of others",
            "if ahead is not None and ahead[0] == tokens:",
            "if ahead is not None:",
        ),
        ("the reasoning may end the answer", "            _hide(masks[: plan.free], self._eos)\n", ""),
        (
            "a mask within the block knows nothing of the end of the reasoning",
            "            free = end\n            drafts = drafts[end:]\n",
            "            return _Plan(len(drafts) + 1, None)\n",
        ),
        (
            "the end of the reasoning is found again where a step ended in it",
            "if tokens[last - len(end) : last] == end and last > len(self._tail):",
            "if tokens[last - len(end) : last] == end and last >= len(end) + len(self._tail):",
        ),
        (
            "ignore_eos hides the end where nothing else is allowed",
            "    masks[left] = hidden[left]\n",
            "    masks[:] = hidden\n",
        ),
        (
            "min_tokens counts from each step's first token",
            "if rules.min_tokens > self._num_tokens:",
            "if rules.min_tokens:",
        ),
    ),
    Mutant(
        "an answer may end early",
        COMPILER_FILE,
        "return GrammarMatcher(self._matcher.deep_copy(), self._eos_token_ids, rules)",
        "return GrammarMatcher(self._matcher.deep_copy(), (), rules)",
        MATCHER,
    ),
    Mutant(
        "answers share the state of their grammar",
        COMPILER_FILE,
        "return GrammarMatcher(self._matcher.deep_copy(), self._eos_token_ids, rules)",
        "return GrammarMatcher(self._matcher, self._eos_token_ids, rules)",
        MATCHER,
    ),
    *mutants_of(
        WORKER_FILE,
        ("tests/worker/test_grammars_in_flight.py::test_a_request_that_is_resumed_goes_on_in_its_grammar",),
        (
            "a resumed request begins its grammar anew",
            "        matcher.advance(new.token_ids[new.num_prompt_tokens :])\n",
            "",
        ),
    ),
    *mutants_of(
        WORKER_FILE,
        ("tests/worker/test_grammar_checks.py",),
        (
            "a token is right that a filter chose among tokens which a mask hides",
            "checkable=unfiltered and rules.grammar_alone",
            "checkable=rules.grammar_alone",
        ),
        (
            "a token is right though it comes too early to end the answer",
            "checkable=unfiltered and rules.grammar_alone",
            "checkable=unfiltered",
        ),
        (
            "the token behind the accepted drafts is not looked at",
            "    return own[: count + 1]",
            "    return own[:count]",
        ),
        (
            "masks of rows that were looked at lie on others' logits",
            "np.array([row.first for row in masked])",
            "np.array([self._checked[i].first if self._checked else row.first for i, row in enumerate(masked)])",
        ),
    ),
    Mutant(
        "a row with a grammar takes no longer than others",
        "dflash_backend/worker/batch_parallel.py",
        " + GRAMMAR_WORK * (row.request_id in with_grammar)",
        "",
        ("tests/worker/test_batch_parallel.py",),
    ),
    Mutant(
        "the drafts that grammars look at are those of the position before",
        "dflash_backend/worker/step_ops.py",
        "np.arange(1, state.k + 1)\n        return torch.from_numpy(state.tokens",
        "np.arange(state.k)\n        return torch.from_numpy(state.tokens",
        ENGINE,
    ),
    Mutant(
        "a row verifies drafts that the grammar does not allow",
        "dflash_backend/worker/runner.py",
        "        return len(kept), confidences\n",
        "        return None, confidences\n",
        ENGINE,
    ),
    *mutants_of(
        WORKER_FILE,
        ENGINE,
        (
            "a matcher advances by drafts that were rejected",
            "self.matcher.advance(token_ids)",
            "self.matcher.advance(token_ids + drafts)",
        ),
        (
            "masks are those of the first row's logits",
            "spans(np.array([row.first for row in masked]), np.array(counts))",
            "spans(np.array([0 for row in masked]), np.array(counts))",
        ),
    ),
    Mutant(
        "a bit of a mask belongs to the token behind",
        KERNEL_FILE,
        "torch.from_numpy(bits == 0)",
        "torch.from_numpy(bits == 0).roll(1, 1)",
        ("tests/kernels/test_token_bitmask.py",),
    ),
    Mutant(
        "the kernel masks the rows in their order",
        KERNEL_FILE,
        "row = tl.load(rows_ptr + mask_row).to(tl.int64)",
        "row = mask_row.to(tl.int64)",
        ("tests/kernels/test_token_bitmask.py",),
    ),
)
