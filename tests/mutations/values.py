"""Defects of a value where something is there all the same: a count, a time, a label, a ratio, who decides of two."""

from __future__ import annotations

from tests.mutations.mutant import Mutant, mutants_of

CORE = "dflash_backend/core"
WORKER = "dflash_backend/worker"
FRONTEND = "frontend/dflash_openai"
QUEUE = ("tests/core/test_grammar_queue.py",)
RUNNER = ("tests/worker/test_runner.py",)
TRANSFERS = ("tests/worker/test_transfers.py",)
STEP_TIME = ("tests/core/test_step_time.py::test_the_times_of_steps_add_up_to_the_time_that_passed",)
EXIT_STATUS = ("tests/checks/test_exit_status.py",)
OF_BENCHMARKS = ("tests/benchmarks/test_exit_status.py",)
DOCKER = "tests/docker/test_docker.py"
COPY = "    host.copy_(tensor, non_blocking=True)\n"
HITS, QUERIES = "rate(dflash:prefix_cache_hits_total", "rate(dflash:prefix_cache_queries_total"
BETWEEN = '{model=~\\"$model\\"}[$__rate_interval])) / sum by (model) ('

VALUE_MUTANTS = (
    Mutant(
        "the page of metrics is said to be at the port for HTTP",
        "cli/dflash_cli/commands/serve.py",
        "  metrics  http://{server.metrics_url}/metrics",
        "  metrics  http://{server.http_url}/metrics",
        ("tests/cli/test_server_options.py::test_the_lines_at_the_end_of_a_start_have_each_address_by_its_name",),
    ),
    Mutant(
        "a signal during a stop of the server waits for requests",
        "cli/dflash_cli/launcher/restarts.py",
        "        self.server.hurry()\n",
        "",
        ("tests/cli/test_restarts.py::test_a_signal_during_a_replacement_ends_the_server_for_good",),
    ),
    Mutant(
        "requests that wait for their grammars are none of the waiting",
        f"{CORE}/engine.py",
        "num_requests_waiting=self.num_waiting",
        "num_requests_waiting=len(scheduler.waiting)",
        QUEUE,
    ),
    Mutant(
        "the grammar of a request that has left is compiled",
        f"{CORE}/grammar_queue.py",
        "        entry[1].cancel()\n",
        "",
        QUEUE,
    ),
    *mutants_of(
        f"{CORE}/engine.py",
        STEP_TIME,
        (
            "a step's time has the wait for the step before it",
            "seconds = finished - max(times.planned, self._last_finished)",
            "seconds = finished - times.planned",
        ),
        (
            "without overlap a step's time is that of drafting alone",
            "seconds = times.executed - times.planned + finished - begun",
            "seconds = finished - begun",
        ),
    ),
    *mutants_of(
        f"{WORKER}/transfers.py",
        TRANSFERS,
        (
            "the event of a download is recorded before its copy",
            f"{COPY}    event = torch.cuda.Event()\n    event.record()\n",
            f"    event = torch.cuda.Event()\n    event.record()\n{COPY}",
        ),
        (
            "the event of a step's results is recorded before their copy",
            "        host.copy_(numbers, non_blocking=True)\n        event.record()\n",
            "        event.record()\n        host.copy_(numbers, non_blocking=True)\n",
        ),
        ("a buffer is written while its last copy may run", "        turn.wait()\n", ""),
    ),
    *mutants_of(
        f"{WORKER}/step.py",
        RUNNER,
        (
            "accepting and injecting have each other's time",
            '("verify", "accept", "inject", "draft")',
            '("verify", "inject", "accept", "draft")',
        ),
        (
            "the time between accepting and injecting is injecting's",
            "seconds = [(times[end] - times[end - 1]) / 1e9 for end in (1, 2, 4, 5)]",
            "seconds = [(times[end] - times[max(0, start)]) / 1e9 for start, end in ((0, 1), (1, 2), (2, 4), (4, 5))]",
        ),
    ),
    Mutant(
        "a budget that is shared evenly is rounded up for each row",
        f"{WORKER}/runner.py",
        "most = budget.num_drafts // max(1, sum(row.num_draft > 0 for row in rows))",
        "most = -(-budget.num_drafts // max(1, sum(row.num_draft > 0 for row in rows)))",
        RUNNER,
    ),
    Mutant(
        "after a failed step grammars of ended requests stay",
        f"{WORKER}/runner.py",
        "            self.model.pending.clear()\n        self.grammars.answers.clear()\n",
        "            self.model.pending.clear()\n",
        ("tests/worker/test_grammar_checks.py",),
    ),
    Mutant(
        "of equal logits in two tiles the later one may win",
        "kernels/dflash_kernels/argmax.py",
        "_, tile = tl.max(values, axis=0, return_indices=True, return_indices_tie_break_left=True)",
        "_, tile = tl.max(values, axis=0, return_indices=True, return_indices_tie_break_left=False)",
        ("tests/kernels/test_launcher.py",),
    ),
    Mutant(
        "the sum over experts is rounded after each",
        "kernels/dflash_kernels/moe.py",
        "total += part.to(tl.float32)",
        "total = (total + part.to(tl.float32)).to(out_ptr.dtype.element_ty).to(tl.float32)",
        ("tests/kernels/test_moe.py::test_the_sum_over_experts_is_rounded_once",),
    ),
    Mutant(
        "the shortest completion has the time of a token",
        "dflash_backend/triton/request_metrics.py",
        "longest = max(completion",
        "longest = min(completion",
        ("tests/triton/test_latencies.py",),
    ),
    Mutant(
        "the engine with the most room bounds requests",
        "dflash_backend/engine_client/replicas.py",
        "return min((one.ready for one",
        "return max((one.ready for one",
        ("tests/triton/test_replicas.py::test_the_engine_with_the_least_room_bounds_requests",),
    ),
    Mutant(
        "cached tokens of several answers add up",
        f"{FRONTEND}/usage.py",
        '{"cached_tokens": num_cached}',
        '{"cached_tokens": sum(each[0] for each in self._cached)}',
        ("tests/frontend/test_chat.py",),
    ),
    Mutant(
        "the access log has seconds for milliseconds",
        f"{FRONTEND}/middleware/access_log.py",
        "ms={(time.monotonic() - self._began) * 1000:.1f}",
        "ms={time.monotonic() - self._began:.1f}",
        ("tests/frontend/middleware/test_access_log.py",),
    ),
    Mutant(
        "each attempt has a time-out of its own",
        "client/dflash_client/stream.py",
        "        if self._deadline is None:\n            self._deadline = ",
        "        if True:\n            self._deadline = ",
        ("tests/client/test_request.py",),
    ),
    *mutants_of(
        "cli/dflash_cli/commands/serve.py",
        ("tests/cli/test_serve_options.py",),
        (
            "the drafter has the target's revision",
            '("--draft-revision", arguments.draft_revision)',
            '("--draft-revision", arguments.revision)',
        ),
        ("an option holds over --set without a word", "if value is not None and name in settings:", "if False:"),
        (
            "what has a load's time has a stop's",
            "ready_timeout_s=arguments.load_timeout",
            "ready_timeout_s=arguments.exit_timeout",
        ),
        ("the front end is not told of the watchdog", "security.tls, arguments.hang_timeout)", "security.tls, 30.0)"),
    ),
    *mutants_of(
        "cli/dflash_cli/commands/security_options.py",
        ("tests/cli/test_serve_options.py",),
        (
            "a body may take as long as an answer",
            "body_timeout_s=arguments.body_timeout",
            "body_timeout_s=arguments.write_timeout",
        ),
        (
            "idle connections are kept as long as clients that do not read",
            "keep_alive_timeout_s=arguments.keep_alive_timeout",
            "keep_alive_timeout_s=arguments.write_timeout",
        ),
        (
            "pings are not handed on",
            'if name == "api_key_file":',
            'if name == "ping_interval":\n            continue\n        if name == "api_key_file":',
        ),
    ),
    Mutant(
        "an option holds over --set-param",
        "cli/dflash_cli/commands/client_options.py",
        "sampling[name] = _value(name, text)",
        "sampling.setdefault(name, _value(name, text))",
        ("tests/cli/test_sampling_options.py",),
    ),
    Mutant(
        "the hit rate is queries of hits",
        "deploy/grafana/write_dashboard.py",
        "{rate('prefix_cache_hits_total')} / {rate('prefix_cache_queries_total')}",
        "{rate('prefix_cache_queries_total')} / {rate('prefix_cache_hits_total')}",
        (f"{DOCKER}::test_a_panel_of_a_ratio_shows_what_its_title_says",),
        (
            (
                "deploy/grafana/dashboards/dflash.json",
                f"{HITS}{BETWEEN}{QUERIES}",
                f"{QUERIES}{BETWEEN}{HITS}",
            ),
        ),
    ),
    Mutant(
        "an alert fires where acceptance is high",
        "deploy/prometheus/alerts.yml",
        "> 0.1) < 1.5",
        "> 0.1) > 1.5",
        (f"{DOCKER}::test_what_an_alert_compares_and_for_how_long_is_as_it_was_chosen",),
    ),
    Mutant(
        "a miss's acceptance length over a hit's",
        "benchmarks/report.py",
        "prefix.hit_acceptance_length / prefix.miss_acceptance_length",
        "prefix.miss_acceptance_length / prefix.hit_acceptance_length",
        ("tests/benchmarks/test_report.py",),
    ),
    *(
        Mutant(f"only the last {what} decides", f"checks/{name}.py", before, after, EXIT_STATUS)
        for name, what, before, after in (
            ("sampling", "fit", "failed = failed or result", "failed = result"),
            ("chaos", "kill", "kept = kept and result.kept", "kept = result.kept"),
            ("abusive_clients", "kind of client", "kept = kept and outcome.kept", "kept = outcome.kept"),
            ("key_fairness", "limit", "kept = kept and not found", "kept = not found"),
            ("silent_stream", "stream", "kept = kept and whole", "kept = whole"),
            ("event_loop", "request", "missed = missed or not kept", "missed = not kept"),
            ("parse_cost", "attack", "missed = missed or bool(found)", "missed = bool(found)"),
            ("structured", "way", "failed = failed or bool(bad) or parted > 0", "failed = bool(bad) or parted > 0"),
            ("sampled_text", "way of sampling", "num_wrong += sum(", "num_wrong = sum("),
            ("lossless", "case", "different += result", "different = result"),
            ("hybrid", "part", "num_missed += pair.prefix", "num_missed = pair.prefix"),
            ("acceptance", "drafter", "words += misses_shifted", "words = misses_shifted"),
        )
    ),
    *(
        Mutant(f"only the last {what} decides", f"benchmarks/{name}.py", before, after, OF_BENCHMARKS)
        for name, what, before, after in (
            ("cpu_products", "product", "missed |= pays and", "missed = pays and"),
            (
                "invariance",
                "dtype",
                "rows += more\n            num_differing += differing",
                "rows += more\n            num_differing = differing",
            ),
            ("compare_trees", "bound", "return int(bool(different or slow))", "return int(bool(slow))"),
            (
                "ngram",
                "answer",
                "differ = sum(len(each) > 1 for each in answers.values())",
                "differ = sum(len(each) > 1 for each in list(answers.values())[-1:])",
            ),
        )
    ),
    *mutants_of(
        f"{FRONTEND}/metrics.py",
        ("tests/frontend/middleware/test_metrics.py",),
        ("a comment is an event", "elif waits_for_event and not message", "elif waits_for_event or not message"),
        (
            "a time at a bucket's bound is above it",
            "self._counts[bisect_left(BUCKETS_S, seconds)] += 1",
            "self._counts[bisect_left(BUCKETS_S, seconds + 1e-9)] += 1",
        ),
    ),
    *mutants_of(
        f"{CORE}/engine.py",
        ("tests/core/test_engine_core.py",),
        (
            "the KV cache's usage is what is free",
            "kv_cache_usage=scheduler.kv.usage",
            "kv_cache_usage=1 - scheduler.kv.usage",
        ),
        (
            "a step counts once for each of its rows",
            "            self._num_steps += 1\n",
            "            self._num_steps += len(plan.rows)\n",
        ),
    ),
    *mutants_of(
        "dflash_backend/triton/metric_specs.py",
        ("tests/triton/test_metrics.py",),
        (
            "the first token has vLLM's name of the last",
            '"dflash:time_to_first_token_seconds": "vllm:time_to_first_token_seconds"',
            '"dflash:time_to_first_token_seconds": "vllm:e2e_request_latency_seconds"',
        ),
    ),
    *mutants_of(
        "dflash_backend/triton/activity_log.py",
        ("tests/triton/test_activity_log.py",),
        ("prompts of one engine are those of all", "prompt = sum(", "prompt = max("),
        ("hits of one engine are those of all", "hits = sum(", "hits = max("),
    ),
    *mutants_of(
        "dflash_backend/engine_client/engines.py",
        ("tests/triton/test_replicas.py::test_the_engine_with_the_least_room_bounds_requests",),
        ("restarts are those of one engine", "return sum(one.num_restarts", "return max(one.num_restarts"),
        (
            "the blocks of one engine are all",
            "return sum(one.ready.num_kv_blocks",
            "return max(one.ready.num_kv_blocks",
        ),
    ),
    Mutant(
        "speed is that of the longest completion",
        "cli/dflash_cli/commands/timing.py",
        "return sum(completion.num_output_tokens",
        "return max(completion.num_output_tokens",
        ("tests/cli/test_sampling_options.py",),
    ),
    *mutants_of(
        f"{FRONTEND}/static/answer.js",
        ("tests/frontend/playground/test_chat.py",),
        (
            "drafts of a step are k of all steps",
            "server.num_draft_tokens / server.num_spec_steps",
            "server.num_spec_tokens / server.num_spec_steps",
        ),
    ),
    *mutants_of(
        f"{FRONTEND}/static/live.js",
        ("tests/frontend/playground/test_chat.py",),
        (
            "an answer takes no room of the context",
            "const used = usage.prompt_tokens + usage.completion_tokens;",
            "const used = usage.prompt_tokens;",
        ),
    ),
    *mutants_of(
        "dflash_backend/text/truncation.py",
        ("tests/frontend/test_completions.py",),
        ("a prompt that is cut keeps its other end", "if self.keeps_end else", "if not self.keeps_end else"),
    ),
    *mutants_of(
        f"{FRONTEND}/logprobs.py",
        ("tests/frontend/test_completions.py",),
        (
            "the chosen token comes after the likeliest",
            "for token_id, logprob in (chosen, *(each for each in self._likeliest(entry) if each[0] != chosen[0])):",
            "for token_id, logprob in (*(each for each in self._likeliest(entry) if each[0] != chosen[0]), chosen):",
        ),
    ),
    *mutants_of(
        f"{FRONTEND}/budget.py",
        ("tests/frontend/test_budget.py",),
        (
            "tokens that a request names cost nothing",
            'return len(sampling.get("logprob_token_ids") or ()) or of_likeliest',
            "return of_likeliest",
        ),
    ),
    *mutants_of(
        "dflash_backend/worker/logits.py",
        ("tests/worker/test_logits.py",),
        (
            "a token among the likeliest ones has the rank of the last of its equals",
            "entry.ranks[0] = ids.index(token) + 1",
            "pass",
        ),
        (
            "the tokens that one row names are those of another",
            "of_rows[begins : begins + length, : len(own)] = own",
            "of_rows[:length, : len(own)] = own",
        ),
        (
            "a named token has the rank of the one before it",
            "*zip(named, of_ids[1:], of_ranks[1:], strict=False)]",
            "*zip(named, of_ids[1:], of_ranks, strict=False)]",
        ),
    ),
    *mutants_of(
        "dflash_backend/text/request.py",
        ("tests/text/test_request.py",),
        (
            "a prompt of text is not cut",
            "return kept.of(token_ids), None",
            "return token_ids, None",
        ),
        (
            "a prompt of token ids is measured before it is cut",
            "check_num_tokens(ids.size, ready.max_model_len)",
            "check_num_tokens(array.size, ready.max_model_len)",
        ),
        (
            "a prompt that is cut has its whole text before the answer",
            "return kept.of(token_ids), None",
            "return kept.of(token_ids), text",
        ),
    ),
    *mutants_of(
        "dflash_backend/text/truncation.py",
        ("tests/text/test_request.py",),
        (
            "the side that is kept and the one that is cut change places",
            'return cls(count, side != "right")',
            'return cls(count, side == "right")',
        ),
        (
            "a cut to what fits leaves no place for the answer",
            "max_model_len - max(1, max_tokens or 1)",
            "max_model_len - 1",
        ),
    ),
    *mutants_of(
        "dflash_backend/text/json_schema.py",
        ("tests/text/test_json_schema.py",),
        (
            "what means nothing without a keyword that is left out stays",
            "for name in (keyword, *_BESIDE.get(keyword, ())):",
            "for name in (keyword,):",
        ),
        (
            "keywords of schemas within others are refused where others are left out",
            "return _normalised(value, where, left_out, sizes)",
            "return _normalised(value, where, None, sizes)",
        ),
    ),
    *mutants_of(
        "cli/dflash_cli/commands/openai.py",
        ("tests/cli/test_serve_options.py",),
        (
            "openai's time for a request is that for a stop",
            "request_timeout_s=arguments.request_timeout",
            "request_timeout_s=arguments.drain_timeout",
        ),
        (
            "openai's key for its servers is its certificate",
            "arguments.triton_client_cert, arguments.triton_client_key)",
            "arguments.triton_client_key, arguments.triton_client_cert)",
        ),
        (
            "metrics of one Triton are all",
            "triton_metrics_urls=tuple(arguments.triton_metrics)",
            "triton_metrics_urls=tuple(arguments.triton_metrics[:1])",
        ),
    ),
    Mutant(
        "a setting of the environment wins over the command line's",
        "cli/dflash_cli/launcher/server_options.py",
        "result[environment_name(name)] = value",
        "result.setdefault(environment_name(name), value)",
        ("tests/cli/test_serve_options.py",),
    ),
    Mutant(
        "a front end that never starts is tried every second",
        "cli/dflash_cli/launcher/frontend.py",
        "self._delay_s = min(2 * self._delay_s, LONGEST_DELAY_S)",
        "self._delay_s = min(self._delay_s, LONGEST_DELAY_S)",
        ("tests/cli/test_frontend_process.py::test_starts_that_fail_wait_ever_longer_until_one_has_served",),
    ),
    Mutant(
        "a chat has the drafts of its last answer",
        "cli/dflash_cli/commands/chat.py",
        'drafts = sum(each.get("num_drafts", 0) for each in stats)',
        'drafts = stats[-1].get("num_drafts", 0)',
        ("tests/cli/test_chat.py::test_the_figures_of_a_chat_are_those_of_all_its_answers",),
    ),
    Mutant(
        "lines that were dropped while others were told are forgotten",
        "cli/dflash_cli/commands/log_lines.py",
        "self._num_dropped += 1 + dropped",
        "self._num_dropped += 1",
        ("tests/cli/test_serve_log.py",),
    ),
    Mutant(
        "a span has the shortest wait of its completions",
        f"{FRONTEND}/generation_record.py",
        'max(self.queue_time_s or 0.0, stats["queue_time_s"])',
        'min(self.queue_time_s or 9.9, stats["queue_time_s"])',
        ("tests/frontend/test_telemetry.py",),
    ),
    *mutants_of(
        f"{FRONTEND}/middleware/access_log.py",
        ("tests/frontend/middleware/test_access_log.py",),
        (
            "the bytes of an answer are those of its last part",
            "self._num_bytes += len",
            "self._num_bytes = len",
        ),
        (
            "each probe that finds no server has a line",
            "return status != before",
            "return status != before or status == 503",
        ),
        (
            "probes that are refused have no line",
            "if path in _PROBES and status in (200, 503):",
            "if path in _PROBES:",
        ),
    ),
    Mutant(
        "the panel of blocks in use shows those that are free",
        "deploy/grafana/dashboards/dflash.json",
        '"expr": "dflash:kv_cache_usage_perc{',
        '"expr": "1 - dflash:kv_cache_usage_perc{',
        (f"{DOCKER}::test_a_panel_of_one_metric_shows_what_its_title_says",),
    ),
    Mutant(
        "the most replicas are the fewest",
        "deploy/helm/dflash-triton/templates/hpa.yaml",
        "maxReplicas: {{ .maxReplicas }}",
        "maxReplicas: {{ .minReplicas }}",
        ("tests/deploy/test_chart.py",),
    ),
    *mutants_of(
        f"{FRONTEND}/chat.py",
        ("tests/frontend/test_parameters.py",),
        (
            "chat_template_kwargs hold over enable_thinking",
            'options["enable_thinking"] = body.enable_thinking',
            'options.setdefault("enable_thinking", body.enable_thinking)',
        ),
        (
            "reasoning_effort holds over enable_thinking",
            'options.setdefault("enable_thinking", body.reasoning_effort != "none")',
            'options["enable_thinking"] = body.reasoning_effort != "none"',
        ),
    ),
    *mutants_of(
        f"{FRONTEND}/anthropic_request.py",
        ("tests/frontend/test_parameters.py",),
        ("a budget of thinking holds over enable_thinking", "and body.enable_thinking is None:", "and True:"),
        ("stop holds over stop_sequences", "body.stop_sequences or body.stop", "body.stop or body.stop_sequences"),
        (
            "the beta's format holds over today's",
            'body.output_format if config.get("format") is None else config["format"]',
            'config.get("format") if body.output_format is None else body.output_format',
        ),
    ),
    Mutant(
        "what fits goes by max_tokens beside max_completion_tokens",
        f"{FRONTEND}/sampling.py",
        "asked = request.max_tokens if asked is None else asked\n    return",
        "asked = request.max_tokens or asked\n    return",
        ("tests/frontend/test_parameters.py",),
    ),
    Mutant(
        "reasoning by one name takes the place of that by another",
        "dflash_backend/text/chat.py",
        "return {**dict.fromkeys(REASONING_NAMES, found), **given}",
        "return {**given, **dict.fromkeys(REASONING_NAMES, found)}",
        ("tests/frontend/test_parameters.py",),
    ),
    Mutant(
        "a variable says where spans go, whatever the option does",
        "cli/dflash_cli/commands/openai.py",
        "found = endpoint or endpoint_of(os.environ)",
        "found = endpoint_of(os.environ) or endpoint",
        ("tests/frontend/test_telemetry.py",),
    ),
    Mutant(
        "each engine is as silent as the first",
        "dflash_backend/triton/reporter.py",
        'self.metrics.set("dflash:engine_silence_seconds", engine.silence_s, index)',
        'self.metrics.set("dflash:engine_silence_seconds", self.engines.supervisors[0].silence_s, index)',
        ("tests/triton/test_reporter.py",),
    ),
    Mutant(
        "an address of IPv6 is told to Triton's HTTP server as it is",
        "cli/dflash_cli/launcher/server_options.py",
        "--http-address={'ipv6:' if ':' in numeric else ''}{numeric}",
        "--http-address={numeric}",
        ("tests/cli/test_server_options.py::test_triton_is_told_an_address_as_each_of_its_servers_reads_it",),
    ),
    Mutant(
        "a name is told to Triton as it is",
        "cli/dflash_cli/launcher/ports.py",
        "return str(_found(host, 0)[4][0])",
        "return host",
        ("tests/cli/test_server_options.py::test_triton_is_told_an_address_as_each_of_its_servers_reads_it",),
    ),
    Mutant(
        "an unknown parser is found once the model has loaded",
        "cli/dflash_cli/commands/serve.py",
        "check_answer_options(arguments.tool_call_parser, arguments.reasoning_parser, arguments.chat_template)",
        "check_answer_options('auto', 'auto', arguments.chat_template)",
        ("tests/cli/test_serve_options.py::test_what_the_front_end_would_end_of_is_refused_before_the_model_loads",),
    ),
)
