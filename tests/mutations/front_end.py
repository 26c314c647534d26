"""Defects of the OpenAI front end: its clients would get wrong answers, counts, or errors."""

from __future__ import annotations

from tests.mutations.mutant import mutants_of

FRONTEND = "frontend/dflash_openai"
TESTS = "tests/frontend"

FRONT_END_MUTANTS = (
    *mutants_of(
        f"{FRONTEND}/connections.py",
        (f"{TESTS}/test_connections.py",),
        ("connections are taken until no descriptor is left", "num_files > self._high", "False"),
        ("a gate that was closed stays so", "num_files < self._low", "False"),
        ("nothing is kept back for a full queue", "self._most - self._kept_back", "self._most"),
    ),
    *mutants_of(
        f"{FRONTEND}/budget.py",
        (f"{TESTS}/test_budget.py",),
        ("answers to all prompts may hold as much as each", "num_tokens = n * sum(max_tokens)", "num_tokens = 0"),
        ("log-probabilities of prompts cost nothing", "num_bytes = sum(size for size, _ in terms)", "num_bytes = 0"),
        (
            "what answers hold is not counted as they come",
            "if self.num_bytes > self._max_mb * 1e6:",
            "if False:",
        ),
        ("completions of one answer do not add up", 'max_tokens * sampling.get("n", 1))', "max_tokens)"),
    ),
    *mutants_of(
        f"{FRONTEND}/state.py",
        (f"{TESTS}/test_budget.py",),
        ("the collector looks at large answers", "if is_due and all(", "if is_due or all("),
        (
            "large work has as many threads as Python likes",
            "ThreadPoolExecutor(NUM_THREADS, ",
            "ThreadPoolExecutor(None, ",
        ),
    ),
    *mutants_of(
        f"{FRONTEND}/generation.py",
        (f"{TESTS}/test_budget.py",),
        (
            "large answers come in one piece",
            "stream or comes_in_pieces(len(token_ids), limit, sampling)",
            "stream",
        ),
    ),
    *mutants_of(
        f"{FRONTEND}/bodies.py",
        (f"{TESTS}/test_budget.py",),
        (
            "a large answer is sent without a pause",
            '"more_body": bool(self._pieces)})\n                await asyncio.sleep(0)',
            '"more_body": bool(self._pieces)})',
        ),
        ("a large answer is one piece", "if num_bytes >= BYTES_A_CALL:", "if False:"),
        (
            "large bodies are read on the event loop",
            "return await asyncio.to_thread(work) if num_bytes > LARGE_BYTES else work()",
            "return work()",
        ),
        ("what is in strings counts as keys and values", "parts[in_string::2]", "parts"),
        ("a body that is cut in a string is misread", "in_string ^= (len(parts) - 1) % 2", "in_string = 0"),
    ),
    *mutants_of(
        f"{FRONTEND}/sse.py",
        (f"{TESTS}/test_keep_alive.py",),
        ("a silent stream sends no comments", "left_s <= 0 and not self._is_sending", "False"),
        (
            "a comment is sent while a part is",
            "if left_s <= 0 and not self._is_sending and self._ping is None:",
            "if left_s <= 0:",
        ),
        ("a silent stream's headers wait for its first event", "if self._ping_first:", "if False:"),
        ("a comment that cannot be sent is forgotten", "            self.task.cancel()\n", ""),
    ),
    *mutants_of(
        f"{FRONTEND}/metrics.py",
        (f"{TESTS}/test_keep_alive.py",),
        ("a comment counts as a first event", 'and not message.get("body", b"").startswith(PINGS)', ""),
    ),
    *mutants_of(
        f"{FRONTEND}/schemas.py",
        (f"{TESTS}/test_unknown_fields.py",),
        (
            "fields that are not known are always refused",
            "for name in unknown if reject else",
            "for name in unknown if True else",
        ),
        ("nulls are refused with the others", 'if bytes(given[name]) != b"null"]', "]"),
        ("a request fills the log", "unknown[:MAX_TOLD]", "unknown"),
        ("functions are ignored without a word", "not where and name in INSTEAD", "False"),
    ),
    *mutants_of(
        f"{FRONTEND}/responses_schemas.py",
        (f"{TESTS}/test_agents.py",),
        ("a custom tool comes back as a function", 'tool.get("type") == "custom"', "False"),
        ("the model sees functions of namespaces by their names alone", "seen_name(own.name, namespace)}", "own.name}"),
        ("a tool that a server runs is a function", "elif is_of_type(tool, CLIENT_TYPES)", "elif True"),
    ),
    *mutants_of(
        f"{FRONTEND}/tools.py",
        (f"{TESTS}/test_tools.py",),
        (
            "tools that a server runs are refused",
            "in enumerate(given) if is_of_type(tool, CLIENT_TYPES)]",
            "in enumerate(given)]",
        ),
        ("a tool is refused by the position that it has without those left out", ", positions)", ")"),
    ),
    *mutants_of(
        f"{FRONTEND}/tools.py",
        (f"{TESTS}/test_agents.py",),
        (
            "a tool of any type is left out",
            "    if not isinstance(kind, str):\n        raise",
            "    if False:\n        raise",
        ),
    ),
    *mutants_of(
        f"{FRONTEND}/app.py",
        (f"{TESTS}/test_errors.py",),
        ("a path of another base URL is not found", 'f"/v1{path}", path.removeprefix("/v1")', "path"),
    ),
    *mutants_of(
        f"{FRONTEND}/bodies.py",
        (f"{TESTS}/test_errors.py",),
        ("a body of a program of Windows is no JSON", "body.removeprefix(codecs.BOM_UTF8)", "body"),
    ),
    *mutants_of(
        f"{FRONTEND}/chat.py",
        (f"{TESTS}/test_chat.py",),
        ("a refusal is no text", '"refusal": "refusal"}', '"refusal": "text"}'),
    ),
    *mutants_of(
        f"{FRONTEND}/anthropic_messages.py",
        (f"{TESTS}/test_anthropic.py",),
        ("a call ends a message like text", 'if reason == "stop" and self._reader.called:', "if False:"),
        ("cached tokens are counted twice", 'usage["prompt_tokens"] - cached', 'usage["prompt_tokens"]'),
        ("each piece of text is a block", "if joins and self._open is not None", "if False and self._open is not None"),
        (
            "a full context is a limit of requests",
            "self._fewer_fit = limit < body.max_tokens",
            "self._fewer_fit = False",
        ),
    ),
    *mutants_of(
        f"{FRONTEND}/anthropic_request.py",
        (f"{TESTS}/test_anthropic.py",),
        ("the answer begins anew after a message of the assistant", 'messages[-1]["role"] == "assistant"', "False"),
        ("each request of Claude Code has a prompt of its own", "if not t.startswith(BILLING)", ""),
        ("results of tools come after the text about them", "    messages += results\n", ""),
    ),
    *mutants_of(
        f"{FRONTEND}/anthropic_errors.py",
        (f"{TESTS}/test_anthropic.py",),
        ("errors have OpenAI's form", 'and message["status"] >= 400:', 'and message["status"] >= 600:'),
    ),
    *mutants_of(
        f"{FRONTEND}/answers.py",
        (f"{TESTS}/test_completions.py",),
        ("statistics of a choice that ended are an event", "if delta.is_statistics:", "if False:"),
    ),
    *mutants_of(
        f"{FRONTEND}/answers.py",
        (f"{TESTS}/test_chat.py",),
        ("the event of the role has tokens", "before if begins else self.usage.usage()", "self.usage.usage()"),
        ("continuous usage comes where none is wanted", "options.include_usage is not False and", ""),
    ),
    *mutants_of(
        f"{FRONTEND}/logprobs.py",
        (f"{TESTS}/test_completions.py",),
        (
            "a token that the tokenizer adds moves the offsets",
            "0 if is_added and not echoed.startswith(text, self._offset) else len(text)",
            "len(text)",
        ),
    ),
    *mutants_of(
        f"{FRONTEND}/chat.py",
        (f"{TESTS}/test_chat_template.py",),
        (
            "requests bring programs without leave",
            "if body.chat_template is not None and not config.trust_request_chat_template:",
            "if False:",
        ),
    ),
    *mutants_of(
        f"{FRONTEND}/state.py",
        (f"{TESTS}/test_chat_template.py",),
        ("the operator's template is not used", "if config.chat_template is not None:", "if False:"),
    ),
    *mutants_of(
        f"{FRONTEND}/reasoning_tokens.py",
        (f"{TESTS}/test_tools.py", f"{TESTS}/test_responses.py"),
        ("all tokens of an answer are reasoning", "self._count = start + length\n                return", "return"),
        ("the mark of the reasoning is no token of it", "self._count = start + length", "self._count = start"),
        ("a mark in two parts is not seen", "max(0, len(self._token_ids) - length + 1)", "len(self._token_ids)"),
    ),
    *mutants_of(
        f"{FRONTEND}/prompts.py",
        (f"{TESTS}/test_chat.py",),
        ("LiteLLM does not know a prompt that is too long", "This model's maximum context length is", "The most is"),
    ),
    *mutants_of(
        f"{FRONTEND}/app.py",
        (f"{TESTS}/test_errors.py",),
        ("a defect counts as a client that left", "            Middleware(DefectsMiddleware),\n", ""),
    ),
    *mutants_of(
        f"{FRONTEND}/notices.py",
        (f"{TESTS}/test_unknown_fields.py",),
        (
            "a client silences what operators must know",
            "if about not in _logged:",
            "if about not in _logged and len(_of_clients) < MAX_NOTICES:",
        ),
        ("one request has all notices", "if len(of_request) >= MAX_OF_REQUEST:", "if False:"),
    ),
    *mutants_of(
        f"{FRONTEND}/generation.py",
        (f"{TESTS}/test_errors.py",),
        ("a defect in a stream counts as a success", "        self._note_failure(found)\n", ""),
    ),
    *mutants_of(
        f"{FRONTEND}/system_messages.py",
        (f"{TESTS}/test_chat_template.py",),
        ("a second system message is one of its own", "if num > 1 else list(messages)", "if False else list(messages)"),
        ("a system message that a template drops is lost", "if all(text in chat.text for text in wanted):", "if True:"),
        (
            "turns of the user follow one another where the template takes no two",
            'if groups and each.get("role") == groups[-1][-1].get("role") == "user":',
            "if False:",
        ),
    ),
    *mutants_of(
        "client/dflash_client/errors.py",
        ("tests/client/test_http_transport.py", f"{TESTS}/test_pool.py"),
        ("a server that stops says that the request is wrong", '("Server is stopping", "UNAVAILABLE"', '("x", ""'),
        ("the id of a request hides what failed", "if (found := _REQUEST_ID.match(message))", "if (found := None)"),
    ),
    *mutants_of(
        "client/dflash_client/responses.py",
        ("tests/client/test_client.py",),
        ("a completion ends again with the last one", "if delta.index in self._finished:", "if False:"),
    ),
    *mutants_of(
        f"{FRONTEND}/readiness.py",
        (f"{TESTS}/test_endpoints.py",),
        ("each probe asks the servers", "if self._asking is None:", "if True:"),
        (
            "a probe waits for servers that are silent",
            "await asyncio.wait([self._asking], timeout=WAIT_S)",
            "await self._asking",
        ),
    ),
    *mutants_of(
        f"{FRONTEND}/app.py",
        (f"{TESTS}/test_endpoints.py",),
        (
            "a slash at the end of a probe's path is answered with a redirect",
            "            Middleware(TrailingSlashMiddleware),\n",
            "",
        ),
    ),
    *mutants_of(
        f"{FRONTEND}/triton_pool.py",
        (f"{TESTS}/test_pool.py",),
        (
            "a server that hangs makes the others unready",
            "for answer in asyncio.as_completed(asking):",
            "for answer in asking:",
        ),
    ),
    *mutants_of(
        f"{FRONTEND}/completions.py",
        (f"{TESTS}/test_completions.py",),
        (
            "a writer is made for each of n answers before the model has agreed to n",
            "defaultdict[int, LogprobWriter](lambda: LogprobWriter(num_top, as_token_ids, self._tokenizer))",
            "[LogprobWriter(0, as_token_ids, self._tokenizer) for _ in range(len(prompts) * self.n)]",
        ),
    ),
    *mutants_of(
        f"{FRONTEND}/conversation.py",
        (f"{TESTS}/test_tools.py",),
        (
            "an error of a forced call's grammar names a parameter that nobody sent",
            '"tools" if use.forced else',
            '"structured_outputs" if use.forced else',
        ),
    ),
    *mutants_of(
        f"{FRONTEND}/responses.py",
        (f"{TESTS}/test_errors.py",),
        (
            "an error of a response's format has the name of another endpoint",
            '"response_format": "text.format", ',
            "",
        ),
    ),
    *mutants_of(
        f"{FRONTEND}/conversation.py",
        (f"{TESTS}/test_responses.py",),
        (
            "an input that is too long is the messages of another endpoint",
            "error.param = draft.names.get(",
            "draft.names.get(",
        ),
    ),
    *mutants_of(
        f"{FRONTEND}/metrics.py",
        (f"{TESTS}/test_endpoints.py",),
        (
            "metrics are read over HTTPS from a server that nobody trusts",
            "verify=secure)",
            "verify=False)",
        ),
    ),
    *mutants_of(
        f"{FRONTEND}/prompts.py",
        (f"{TESTS}/test_chat.py",),
        (
            "messages of any size are searched for special tokens",
            "        self._check_size(messages, options)\n",
            "",
        ),
        (
            "texts without characters cost nothing",
            "len(text) + 1 for text",
            "len(text) for text",
        ),
    ),
    *mutants_of(
        f"{FRONTEND}/sampling.py",
        (f"{TESTS}/test_chat.py",),
        ("an error of a chat's log-probabilities names a flag", '{"logprobs": "top_logprobs"}', "dict[str, str]()"),
    ),
    *mutants_of(
        f"{FRONTEND}/sampling.py",
        (f"{TESTS}/test_errors.py",),
        (
            "an error names vLLM's older parameters by the newer one",
            "return names if guided is None else",
            "return names if guided is not None else",
        ),
        (
            "a bias of more tokens than there are is written for the model",
            "len(value) > vocab_size",
            "len(value) > 2 * vocab_size",
        ),
    ),
    *mutants_of(
        f"{FRONTEND}/triton_pool.py",
        (f"{TESTS}/test_pool.py",),
        (
            "a request without a JSON form is a defect of the front end",
            "raise InvalidArgument(str(error)) from None",
            "raise",
        ),
    ),
    *mutants_of(
        f"{FRONTEND}/responses.py",
        (f"{TESTS}/test_responses.py",),
        (
            "the cached tokens of a response are not told",
            'cached = (usage["prompt_tokens_details"] or {}).get("cached_tokens", 0)',
            "cached = 0",
        ),
        (
            "a response that reached its limit counts as complete",
            'status = "completed" if reason == "stop" else "incomplete"',
            'status = "completed"',
        ),
        (
            "the events of a response are not numbered",
            '{**fields, "sequence_number": self._num_events}',
            '{**fields, "sequence_number": 0}',
        ),
    ),
    *mutants_of(
        f"{FRONTEND}/content_logprobs.py",
        (f"{TESTS}/test_responses.py",),
        (
            "the log-probabilities of reasoning count as the text's",
            "self._waiting[0][0] < begin and self._waiting[0][1] <= begin:",
            "False:",
        ),
        (
            "the first bytes of a character have no log-probability",
            "self._waiting[0][0] < begin and self._waiting[0][1] <= begin:",
            "self._waiting[0][1] <= begin:",
        ),
        (
            "a stop string's tokens have log-probabilities",
            "while self._waiting and self._waiting[0][0] < end:",
            "while self._waiting:",
        ),
    ),
    *mutants_of(
        f"{FRONTEND}/parsing/parser.py",
        (f"{TESTS}/test_parsing.py",),
        (
            "marks do not count in the places of content",
            "num_chars = begin + len(mark) - self._told if mark else 0",
            "num_chars = 0",
        ),
    ),
    *mutants_of(
        f"{FRONTEND}/responses_schemas.py",
        (f"{TESTS}/test_responses.py",),
        (
            "the stop strings of a response are dropped",
            "    *SharedFields.__struct_fields__,\n",
            '    *(n for n in SharedFields.__struct_fields__ if n != "stop"),\n',
        ),
        (
            "a state that a response asks for is ignored",
            "        if getattr(body, name):\n            raise",
            "        if not name:\n            raise",
        ),
    ),
    *mutants_of(
        f"{FRONTEND}/errors.py",
        (f"{TESTS}/test_errors.py",),
        (
            "a full queue does not say when to ask again",
            '"rate_limit_error", "queue_full", headers=_RETRY)',
            '"rate_limit_error", "queue_full")',
        ),
        (
            "the parameter of an error is not named",
            "        if found is None:\n            return invalid(message)\n",
            "        if True:\n            return invalid(message)\n",
        ),
    ),
    *mutants_of(
        f"{FRONTEND}/usage.py",
        (f"{TESTS}/test_chat.py",),
        (
            "the histogram of accepted drafts is one step off",
            "at_least = (self._drafts, *self._accepted, 0)",
            "at_least = (*self._accepted, 0, 0)",
        ),
    ),
    *mutants_of(
        f"{FRONTEND}/triton_pool.py",
        (f"{TESTS}/test_pool.py",),
        (
            "an answer that has begun begins again on another server",
            "if answered or is_last or self._cancelled or",
            "if is_last or self._cancelled or",
        ),
        (
            "running requests of a server are not counted down",
            "self._pool.count(client, -1)",
            "self._pool.count(client, 0)",
        ),
        (
            "a server that stops draws all requests to itself",
            "                self._pool.heard(client, error)\n",
            "",
        ),
    ),
    *mutants_of(
        f"{FRONTEND}/completions.py",
        (f"{TESTS}/test_completions.py",),
        (
            "the prompt is echoed with each event",
            "self._prompt_text(prompt) + delta.text if is_first else delta.text",
            "self._prompt_text(prompt) + delta.text",
        ),
        (
            "the completions of two prompts have one index",
            "        place = prompt * self.n + delta.index\n",
            "        place = prompt + delta.index\n",
        ),
    ),
    *mutants_of(
        f"{FRONTEND}/sampling.py",
        (f"{TESTS}/test_parameters.py", f"{TESTS}/test_completions.py", f"{TESTS}/test_chat.py"),
        (
            "an answer may be longer than fits",
            "    return min(asked, fits)\n",
            "    return asked\n",
        ),
        (
            "two grammars are taken, and one of them holds",
            "    if len(given) > 1:\n",
            "    if len(given) > 2:\n",
        ),
        ("an answer is to be kept and is not", "    if request.store:\n", "    if request.store is None:\n"),
    ),
    *mutants_of(
        f"{FRONTEND}/state.py",
        (f"{TESTS}/test_endpoints.py",),
        (
            "a front end gives its model up after an error that was not foreseen",
            "except Exception as error:",
            "except KeyError as error:",
        ),
    ),
    *mutants_of(
        "client/dflash_client/grpc_messages.py",
        ("tests/client/test_grpc_messages.py",),
        (
            "a single number is read from its other end",
            "struct.Struct(letter)",
            'struct.Struct(letter.replace("<", ">"))',
        ),
        ("a vanished machine keeps its connection", '    ("grpc.keepalive_time_ms", 360_000),\n', ""),
    ),
)
