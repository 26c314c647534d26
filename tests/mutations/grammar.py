"""Defects of structured output: answers that leave their grammar, or that speculation changes."""

from __future__ import annotations

from tests.mutations.mutant import Mutant, mutants_of

MATCHER_FILE = "dflash_backend/structured_output/matcher.py"
COMPILER_FILE = "dflash_backend/structured_output/compiler.py"
WORKER_FILE = "dflash_backend/worker/grammars.py"
KERNEL_FILE = "kernels/dflash_kernels/token_bitmask.py"
MATCHER = ("tests/structured_output/test_matcher.py", "tests/structured_output/test_compiler.py")
ENGINE = ("tests/structured_output/test_structured_output.py",)

GRAMMAR_MUTANTS = (
    *mutants_of(
        "dflash_backend/structured_output/deadline.py",
        ("tests/structured_output/test_deadline.py",),
        ("what a job raises is lost", "            self.error = error", "            pass"),
    ),
    *mutants_of(
        "dflash_backend/structured_output/trial.py",
        ("tests/structured_output/test_trial.py::test_a_process_that_reads_nothing_is_ended",),
        ("a process that reads nothing is waited for", "os.set_blocking(stdin, False)", "os.set_blocking(stdin, True)"),
    ),
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
            "requests that wait for their grammars are not bounded",
            "        self._queue.set_aside(request)\n",
            "",
        ),
        (
            "a grammar whose turn did not come is called slow",
            "yield request, _late(request, waited_only)",
            "yield request, _late(request, False)",
        ),
        (
            "the compiler is not told whose grammar it is",
            "request.eos_token_ids, request.sampling.tenant)",
            'request.eos_token_ids, "")',
        ),
        (
            "a client is blamed for a grammar that could not be tried",
            "    if isinstance(error, OSError):",
            "    if False:",
        ),
    ),
    *mutants_of(
        "dflash_backend/text/sampling_params.py",
        ("tests/structured_output/test_structured_output.py", "tests/text/test_structured_outputs.py"),
        ("a grammar is called by another parameter's name", "(grammar, parameter=name)", "(grammar)"),
    ),
    *mutants_of(
        COMPILER_FILE,
        ("tests/structured_output/test_compiler.py",),
        (
            "grammars are kept by their number alone",
            "or self._num_cached_bytes > MAX_CACHED_BYTES:",
            "or self._num_cached_bytes < 0:",
        ),
        (
            "an error does not say what it is about",
            "if above and above[0].startswith(ABOUT_NEXT_LINE):",
            "if not above:",
        ),
        (
            "a grammar may name a token that ends the answer",
            "if ends := named_tokens(grammar.text, special.ids, eos_token_ids):",
            "if ends := named_tokens(grammar.text, special.ids, ()):",
        ),
        (
            "Lark that names the sign of EBNF is taken for EBNF",
            '[ \\t]*[\\w-]+[ \\t]*::=", re.MULTILINE',
            '.*::=", re.MULTILINE',
        ),
        ("EBNF behind a comment is not known", '::=", re.MULTILINE', '::="'),
    ),
    *mutants_of(
        "dflash_backend/structured_output/bounds.py",
        ("tests/structured_output/test_compiler.py",),
        ("an expression may have any number of optional parts", "if parts > MAX_EXPRESSION_PARTS:", "if False:"),
        (
            "many expressions may have any number of optional parts",
            "if sum(parts**2 for parts in sizes) > MAX_SQUARED_PARTS:",
            "if False:",
        ),
        (
            "a terminal has its own parts alone",
            "own + sum(known.get(other, 0) for other in names)",
            "own",
        ),
        ("an empty alternative is no optional part", "|(?<=[(|:])(?=[|)])", ""),
        (
            "a name in patternProperties is no expression",
            'for name in schema["patternProperties"])',
            "for name in ())",
        ),
    ),
    *mutants_of(
        "dflash_backend/structured_output/bounds.py",
        ("tests/structured_output/test_bounds.py",),
        ("a class ends where it can be matched otherwise", r"[^\]\\])*+(?:\]|\\?\Z)", r"\[:|[^\]\\])*\]"),
        ("comments of an expression hide its parts", "if _VERBOSE.search(expression):", "if False:"),
        (
            "each terminal becomes a text of its own",
            "largest = heapq.nlargest(MAX_TRIED_EXPRESSIONS, parts, key=parts.__getitem__)",
            "largest = list(parts)",
        ),
        (
            "a terminal is looked at each time that it is named",
            "if name in known:\n                continue",
            "if False:\n                continue",
        ),
    ),
    *mutants_of(
        "dflash_backend/structured_output/lark.py",
        ("tests/structured_output/test_bounds.py",),
        ("a string that does not end is tried at each quote", '"(?:\\\\.|[^"\\\\\\n])*+|/', "/"),
        ("lines are tried one after the other", "(?P<nameless>_++)", "(?P<nameless>(?!))"),
        ("values behind one that is no JSON are read", "all_read = False", "pass"),
        ("a mark before a name is a part of it", "(?P<name>_*+", "(?P<name>[?_]*+"),
        ("flags behind an expression are not read", 'if "x" in flags:', "if False:"),
    ),
    *mutants_of(
        "dflash_backend/structured_output/vocabulary.py",
        ("tests/structured_output/test_compiler.py",),
        (
            "text that spells a special token is that token",
            'token["content"] = new_names[token["content"]]',
            "pass",
        ),
        ("a visible mark is spelled letter by letter", "if quoted[1:-1] in special.visible", "if not quoted"),
    ),
    *mutants_of(
        "dflash_backend/structured_output/trial.py",
        ("tests/structured_output/test_trial.py",),
        (
            "an expression is tried at the beginning of its grammar alone",
            'for expression in job["expressions"]:',
            "for expression in ():",
        ),
        ("a grammar is blamed for a process that was lost", "if code in _OUT_OF_MEMORY:", "if True:"),
        ("a process that is lost once is not replaced", "for _ in range(2):", "for _ in range(1):"),
        (
            "the answer of another grammar is its verdict",
            'if answer["number"] == message["number"]:',
            "if True:",
        ),
        (
            "a process that starts slowly goes on",
            "        except _Ended:\n            self.close()\n",
            "        except _Ended:\n            pass\n",
        ),
    ),
    *mutants_of(
        "dflash_backend/structured_output/deadline.py",
        ("tests/structured_output/test_deadline.py",),
        (
            "a job that is late keeps the others waiting",
            "elif seconds - used > self._limit_s and batch.give_up(num_done):",
            "elif False:",
        ),
        (
            "a job that waits for the processor is late",
            'seconds = processor_seconds(f"self/task/{self._thread.native_id}")',
            "seconds = time.monotonic()",
        ),
        (
            "jobs begin after the time of all",
            "batch.stopped = batch.stopped or time.monotonic() - began > self._total_limit_s",
            "pass",
        ),
    ),
    *mutants_of(
        "dflash_backend/text/json_schema.py",
        ("tests/text/test_json_schema.py",),
        (
            "a keyword that is null is one like any other",
            "(value is None and keyword not in _ANY_VALUE) or",
            "False or",
        ),
        ("const null is left out", '_ANY_VALUE = frozenset(("const", "default"))', "_ANY_VALUE = frozenset()"),
        (
            "properties are looked at as keywords",
            '{name: _normalised(one, _place(where, f".{name}"), left_out, sizes) for name, one in value.items()}',
            "_normalised(value, where, None, sizes)",
        ),
        ("a whole float is no integer", "isinstance(value, float) and value.is_integer()", "False"),
        (
            "what cannot be held is taken",
            "        if keyword in found:\n",
            "        if False:\n",
        ),
        (
            "one of several properties must be there",
            "combinations(optional, missing)",
            "combinations(optional[:1], missing)",
        ),
        (
            "properties that may not be there are taken",
            "name: False if name in left_out else one",
            "name: one",
        ),
    ),
    *mutants_of(
        "dflash_backend/text/tools.py",
        ("tests/text/test_tools.py",),
        ("arguments that are the text null are refused", "    if arguments is None:  #", "    if False:  #"),
        (
            "a call that broke off ends the conversation",
            "    except JsonError:\n        return None\n",
            "    except JsonError as error:\n        raise ToolError(str(error)) from None\n",
        ),
        (
            "a call that broke off has no arguments",
            "read if read is not None else arguments if name is None else {name: arguments}",
            "read or {}",
        ),
    ),
    *mutants_of(
        "dflash_backend/text/tokenizer.py",
        ("tests/text/test_tools.py",),
        (
            "a template that takes objects alone refuses a call that broke off",
            "if isinstance(error, OutOfTime) or not has_unread_arguments(parsed):",
            "if True:",
        ),
    ),
    *mutants_of(
        "frontend/dflash_openai/parsing/grammar.py",
        ("tests/frontend/test_grammar.py",),
        (
            "a function without parameters takes any",
            "normalise(_NO_PARAMETERS if given is None else given, left_out=left_out)",
            'normalise({"type": "object"} if given is None else given, left_out=left_out)',
        ),
        (
            "a function's schema chooses how JSON is written",
            "json.dumps({**schema, **_JSON_STYLE}, ensure_ascii=False)",
            "json.dumps({**_JSON_STYLE, **(function.get('parameters') or {})}, ensure_ascii=False)",
        ),
        (
            "what a client's grammar calls its rules is ours too",
            "_new_name(name, taken) for name in (",
            "name for name in (",
        ),
        ("a regular expression beside tools ends at its slash", 'else r"\\/", wanted.text)', 'else "/", wanted.text)'),
        ("a call that the model chooses has no free arguments", 'each if each.get("strict") else', "each if True else"),
        (
            "JSON beside tools has white space without end",
            'schema = {**schema, "x-guidance": {"whitespace_pattern": JSON_WHITESPACE}}',
            "pass",
        ),
        (
            "JSON that begins like a call of Llama's is none",
            'if format is LLAMA3_JSON and root != "start":',
            "if False:",
        ),
        (
            "a function of which nothing is known has no parameters with tags",
            'if not properties and schema.get("additionalProperties") is not False:',
            "if False:",
        ),
        ("a parameter with a tag may be left out", "'' if is_required else '?'", "'?'"),
        ("arguments may be no object", '{**schema, "type": "object"}', "schema"),
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
            "beside a format no tool can be called",
            "elif not use.offered or given is None or",
            "elif True or",
        ),
        (
            "an error of a format beside tools names another parameter",
            '"tools" if use.forced else names.get(name, name)',
            '"tools"',
        ),
        (
            "a response_format knows nothing of the reasoning",
            "    for name in FORMATS:\n",
            '    for name in ("structured_outputs",):\n',
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
            "threads that share a step wait for one deadline",
            "class _OfThread(threading.local):",
            "class _OfThread:",
        ),
        (
            "the masks of a block do not count the drafts before them",
            "walked = [(each._matcher, start, drafts) for each, start, drafts in answers if drafts]",
            "walked = []\n"
            "    for each, start, drafts in answers:\n"
            "        plain.extend((each._matcher, start + i) for i in range(len(drafts) + 1) if drafts)",
        ),
        (
            "a matcher keeps the drafts that it tried",
            "behind = behind[: self._matcher.validate_tokens(behind)]",
            "behind = behind[: self._matcher.try_consume_tokens(behind)]",
        ),
        (
            "the end of an answer goes to the grammar",
            "tokens = self._before_end(token_ids[begin:])\n"
            "        self._ended = len(tokens) < len(token_ids) - begin\n",
            "tokens = list(token_ids[begin:])\n",
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
        (
            "an answer that goes on without masks runs out of fuel",
            "            self._matcher.compute_bitmask()\n",
            "            pass\n",
        ),
        (
            "an end that the grammar does not accept ends an answer",
            "if self._ended and self.error is None and not self._matcher.is_accepting():",
            "if False:",
        ),
        (
            "an answer may take long in every step",
            "if self.slow_seconds > SLOW_LIMIT_S:",
            "if False:",
        ),
        (
            "masks of heavy answers lie at others' places",
            "masks[start : start + len(drafts) + 1] = filled",
            "masks[: len(drafts) + 1] = filled",
        ),
        (
            "an answer whose turn does not come is blamed",
            "heavy[i][0].give_up(None)",
            "heavy[i][0].give_up(TOO_SLOW)",
        ),
        (
            "an answer may keep any memory",
            "elif self.num_bytes > ANSWER_BYTES:",
            "elif False:",
        ),
        (
            "answers together may keep any memory",
            "while sum(each.num_bytes for each in kept) > STEP_BYTES:",
            "while False:",
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
    *mutants_of(
        "dflash_backend/core/engine.py",
        ("tests/core/test_engine_core.py",),
        (
            "an answer that cannot go on is the server's fault",
            "self._fail(request, result.error, outputs, status=result.error_status)",
            "self._fail(request, result.error, outputs)",
        ),
    ),
    *mutants_of(
        "dflash_backend/worker/runner.py",
        ("tests/worker/test_grammars_in_flight.py",),
        (
            "a grammar that fails within an answer is the server's fault",
            "error, status = answer.error, answer.error_status",
            "error = answer.error",
        ),
    ),
    *mutants_of(
        MATCHER_FILE,
        ("tests/structured_output/test_lexers.py",),
        (
            "an answer fails for the states of others",
            "and not self._matcher.consume_tokens(tokens) and not self.goes_on():",
            "and not self._matcher.consume_tokens(tokens):",
        ),
        (
            "a mask fails for the states of others",
            "if [each for each, _, _ in (*light, *heavy) if each.goes_on()]:",
            "if False:",
        ),
        (
            "a grammar that needs too many states is compiled again and again",
            "if self._lexer.num_tokens < 2 * len(self._taken):",
            "if False:",
        ),
    ),
    *mutants_of(
        "dflash_backend/structured_output/lexers.py",
        ("tests/structured_output/test_lexers.py",),
        ("a lexer is never replaced", "if lexer.num_tokens >= WORN_TOKENS and", "if False and"),
        ("a step waits for a grammar that takes long", "if self._seconds > IN_STEP_S:", "if False:"),
    ),
    Mutant(
        "an answer may end early",
        COMPILER_FILE,
        "return GrammarMatcher(self._lexers, self._eos_token_ids, rules, self._heavy)",
        "return GrammarMatcher(self._lexers, (), rules, self._heavy)",
        MATCHER,
    ),
    Mutant(
        "answers share the state of their grammar",
        MATCHER_FILE,
        "self._matcher = self._lexer.start.deep_copy()",
        "self._matcher = self._lexer.start",
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
