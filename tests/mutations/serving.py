"""Defects of text, Triton's package, the client, `serve` and the wiring of settings."""

from __future__ import annotations

from tests.mutations.mutant import Mutant, mutants_of

BUILD = "dflash_backend/engine/build.py"
TEXT = "dflash_backend/text"
TRITON = "dflash_backend/triton"
DETOKENIZER = ("tests/text/test_detokenizer.py",)
LATENCIES = ("tests/triton/test_latencies.py",)
METRICS = ("tests/triton/test_metrics.py",)
SETTINGS = ("tests/engine/test_settings.py",)

COUNTED = '        self._metrics.count("dflash:request_errors_total", 1, status)\n'

SERVING_MUTANTS = (
    *mutants_of(
        "dflash_backend/triton/running_requests.py",
        ("tests/triton/test_isolation.py",),
        (
            "an error is counted once its client has it",
            COUNTED + "        if not responder.fail(status, message):",
            f"        told = responder.fail(status, message)\n{COUNTED}        if not told:",
        ),
    ),
    *mutants_of(
        "dflash_backend/triton/running_requests.py",
        ("tests/triton/test_isolation.py",),
        (
            "a large request ends the stream of another client",
            "            return\n        if not memory.is_of_responses:\n            return\n",
            "",
        ),
        ("what is sent is not counted", "        self._server_memory.note_sent(response.num_bytes)\n", ""),
    ),
    *mutants_of(
        "dflash_backend/triton/running_requests.py",
        ("tests/triton/test_settings.py",),
        ("requests that say an interval wait", "if state.parsed.may_wait and (", "if ("),
        ("a stream that is slow enough waits", "num_responses / self._responses_per_s", "1.0"),
        ("one stream alone never waits", "waiting.pop(None, 0) - self._as_vllm", "waiting.pop(None, 0) - 1"),
        ("one stream alone waits as vLLM's do not", "waiting.pop(None, 0) - self._as_vllm", "waiting.pop(None, 0)"),
        (
            "tokens that wait are lost with the engine",
            "        self._send_waiting(at_once=True)\n        for request in",
            "        for request in",
        ),
        (
            "tokens that wait are lost with their request",
            "            self._send_waiting(at_once=True)\n            self._give",
            "            self._give",
        ),
        ("tokens wait for the engine", "        if not outputs:\n            self._send_waiting()\n", ""),
    ),
    *mutants_of(
        "dflash_backend/triton/server_memory.py",
        ("tests/triton/test_server_memory.py",),
        (
            "what was sent accounts for growth that comes later",
            "self._has_looked, self._held_by_new = True, 0",
            "self._has_looked = True",
        ),
        (
            "growth that was acted on counts again",
            "        self._acted_at_bytes = self.num_bytes\n        self._sent = self._unsent = 0\n",
            "        self._acted_at_bytes = self.num_bytes\n",
        ),
        ("growth below the limit counts", "if before <= self._limit:", "if False:"),
        (
            "memory that only shrinks again is of requests",
            "max(0, self._unsent + growth - sent)",
            "self._unsent + max(0, growth) - sent",
        ),
    ),
    *mutants_of(
        "cli/dflash_cli/launcher/guardian.py",
        (
            "tests/cli/test_guardian.py::test_a_guardian_removes_the_environments_of_its_server_that_are_empty_and_no_others",
        ),
        ("a guardian leaves Triton's environments", "            os.rmdir(path)\n", "            pass\n"),
    ),
    *mutants_of(
        "cli/dflash_cli/launcher/leftovers.py",
        ("tests/cli/test_server_files.py",),
        (
            "a living server's files are taken for a dead one's",
            "        except OSError:\n            is_free = False\n",
            "        except OSError:\n            pass\n",
        ),
        (
            "what a killed server has left stays",
            "            if name is None or not is_free:\n",
            "            if True:\n",
        ),
    ),
    Mutant(
        "a server whose launcher was killed loses its files to the next one",
        "cli/dflash_cli/launcher/server.py",
        "            pass_fds=files.locks,\n",
        "",
        ("tests/cli/test_launcher.py::test_a_stopped_server_leaves_no_process_no_file_and_no_shared_memory",),
    ),
    *mutants_of(
        "cli/dflash_cli/launcher/server_files.py",
        ("tests/cli/test_server_files.py",),
        (
            "environments of a later server are taken for this one's",
            "        if self._env_folders is None:\n",
            "        if True:\n",
        ),
    ),
    *mutants_of(
        "dflash_backend/parallel/rank.py",
        ("tests/parallel/test_gpu_ranks.py",),
        ("a rank gives its steps' buffers back", "    keep_step_buffers()\n", ""),
    ),
    *mutants_of(
        "dflash_backend/engine/build.py",
        ("tests/engine/test_build.py",),
        ("an engine in this process gives its steps' buffers back", "    keep_step_buffers()\n", ""),
    ),
    *mutants_of(
        "dflash_backend/heap.py",
        ("tests/engine/test_heap.py",),
        ("modules are looked through for garbage while they are imported", "    gc.disable()\n", ""),
        ("steps give their buffers back to the system", "            mallopt(option, size)\n", "            pass\n"),
        ("what the operator says of buffers is set aside", "is not None and name not in os.environ", "is not None"),
        ("what was imported is looked through for garbage", "    finally:\n        gc.freeze()\n", "    finally:\n"),
        ("a collector that was off is turned on by an import", "        if was_on:\n", "        if True:\n"),
    ),
    Mutant(
        "a client sends again past its time-out",
        "client/dflash_client/retry.py",
        "return wait_s if wait_s < remaining_s else None",
        "return wait_s",
        ("tests/client/test_request.py",),
    ),
    Mutant(
        "serve waits for its front end while the server behind it is dead",
        "cli/dflash_cli/launcher/frontend.py",
        "            if trouble() is not None:\n                return\n",
        "",
        ("tests/cli/test_frontend_process.py",),
    ),
    Mutant(
        "the front end listens before the model has loaded",
        "cli/dflash_cli/launcher/frontend.py",
        'else ([go], ["--start-fd", str(go)])',
        "else ([go], [])",
        ("tests/cli/test_frontend_process.py",),
    ),
    Mutant(
        "clients learn that an engine is gone before the metrics say so",
        f"{TRITON}/service.py",
        "            self._reporter.reset_engine(lost.index)\n            self._requests.fail_all_lost(lost)\n",
        "            self._requests.fail_all_lost(lost)\n            self._reporter.reset_engine(lost.index)\n",
        ("tests/triton/test_service.py",),
    ),
    *mutants_of(
        BUILD,
        SETTINGS,
        (
            "draft_temperature_ratio does nothing",
            "draft_temperature_ratio=config.draft_temperature_ratio",
            "draft_temperature_ratio=0.0",
        ),
        ("the setting seed does nothing", "seed=config.seed,", "seed=0,"),
        (
            "enable_overlap does nothing",
            "overlap=config.enable_overlap,",
            "overlap=True,",
        ),
        (
            "max_prefill_tokens_per_step does nothing",
            "max_prefill_tokens_per_step=config.max_prefill_tokens_per_step",
            "max_prefill_tokens_per_step=None",
        ),
    ),
    *mutants_of(
        f"{TEXT}/detokenizer.py",
        DETOKENIZER,
        (
            "a stop string counts that ends in the last of min_tokens",
            "search=self._num_unsearched < 0)",
            "search=self._num_unsearched <= 0)",
        ),
        ("a torn character at the end is lost", "text if finished else _complete(text)", "_complete(text)"),
    ),
    *mutants_of(
        f"{TEXT}/output.py",
        ("tests/text/test_output.py",),
        ("the bytes of what was sent go on counting", "        self.num_bytes = 0\n\n    def keep", "\n    def keep"),
    ),
    Mutant(
        "log-probabilities go on past a stop string",
        f"{TEXT}/output.py",
        "            if self._stopped:\n                return index + 1\n",
        "",
        ("tests/text/test_output.py",),
    ),
    Mutant(
        "a step has the text of those before it too",
        f"{TEXT}/output.py",
        "sum(map(len, self.text[num_pieces:]))",
        "sum(map(len, self.text))",
        ("tests/text/test_output.py",),
    ),
    Mutant(
        "the drafts of a step are not told",
        "dflash_backend/core/engine.py",
        "logprobs, prompt_logprobs, result.num_verified",
        "logprobs, prompt_logprobs, 0",
        ("tests/core/test_engine_core.py",),
    ),
    Mutant(
        "a browser keeps the page of an older server",
        "frontend/dflash_openai/playground.py",
        'if request.headers.get("if-none-match") == self.headers["etag"]:',
        'if request.headers.get("if-none-match") is not None:',
        ("tests/frontend/playground/test_files.py",),
    ),
    Mutant(
        "one character less is held back for a stop string",
        f"{TEXT}/stop_strings.py",
        "held = 0 if finished else machine.depth[state]",
        "held = 0 if finished else max(0, machine.depth[state] - 1)",
        DETOKENIZER,
    ),
    Mutant(
        "only the first end-of-sequence id ends an answer",
        f"{TEXT}/tokenizer.py",
        "tuple(dict.fromkeys((*read_eos(directory), *own)))",
        "tuple(dict.fromkeys((*read_eos(directory), *own)))[:1]",
        ("tests/text/test_tokenizer.py",),
    ),
    Mutant(
        "a template computes any power",
        f"{TEXT}/tokenizer.py",
        "if any(map(has_any_power, given.values() if isinstance(given, Mapping) else [given])):",
        "if False:",
        ("tests/text/test_tokenizer.py",),
    ),
    Mutant(
        "a tool's description may begin a turn",
        f"{TEXT}/tokenizer.py",
        "(marked, values), mark = self._special.marked(given)",
        'tools = given[1].pop("tools")\n'
        "        (marked, values), mark = self._special.marked(given)\n"
        '        values = {**values, "tools": tools}',
        ("tests/text/test_tools.py",),
    ),
    Mutant(
        "queries and hits of the prefix cache change places",
        f"{TRITON}/metric_specs.py",
        '"Prompt tokens looked up in the prefix cache", "prefix_cache_queries"',
        '"Prompt tokens looked up in the prefix cache", "prefix_cache_hits"',
        METRICS,
        (
            (
                f"{TRITON}/metric_specs.py",
                '"Prompt tokens found in the prefix cache", "prefix_cache_hits"',
                '"Prompt tokens found in the prefix cache", "prefix_cache_queries"',
            ),
        ),
    ),
    Mutant(
        "buckets of seconds are milliseconds",
        f"{TRITON}/metrics.py",
        "_Histogram(self._specs[name].buckets)",
        "_Histogram(tuple(1000 * bound for bound in self._specs[name].buckets))",
        METRICS,
    ),
    *mutants_of(
        f"{TRITON}/request_metrics.py",
        LATENCIES,
        (
            "the time per output token counts the first token",
            "(now - state.first_token_at) / (longest - 1)",
            "(now - state.first_token_at) / longest",
        ),
        (
            "time to first token is not since the arrival",
            "first_token_at - state.arrived_at",
            "first_token_at",
        ),
    ),
    *mutants_of(
        f"{TRITON}/running_requests.py",
        LATENCIES,
        ("each completion of a request has a wait", "request.has_wait = True", "pass"),
        (
            "only finished requests have a time to first token",
            "if not request.has_first_token and",
            "if state.finished and not request.has_first_token and",
        ),
    ),
    *mutants_of(
        f"{TRITON}/running_requests.py",
        ("tests/triton/test_answers.py",),
        ("steps that arrive together share a response", "> MAX_SEPARATE_DELTAS:", "> 0:"),
        ("the output thread stays behind, a response for each step", "> MAX_SEPARATE_DELTAS:", "> 10**9:"),
    ),
    Mutant(
        "the engine is not told how many tokens count before a stop string",
        f"{TRITON}/running_requests.py",
        "AbortRequests([*aborted, *stopped_at], stopped_at)",
        "AbortRequests([*aborted, *stopped_at])",
        ("tests/triton/test_answers.py",),
    ),
    Mutant(
        "the engine is not told of a stop string in its last delta",
        "dflash_backend/text/output.py",
        "is_early = delta.finish_reason is None or count < len(delta.token_ids)",
        "is_early = delta.finish_reason is None",
        ("tests/text/test_output.py",),
    ),
    Mutant(
        "a long prompt's log-probabilities are one response",
        "dflash_backend/text/output.py",
        "if not self.parsed.stream or len(of_prompt) <= most:",
        "if True:",
        ("tests/text/test_output.py",),
    ),
    Mutant(
        "a stop waits for a stream that Triton keeps",
        "cli/dflash_cli/launcher/server.py",
        "if has_stub and time.monotonic() - busy_at > IDLE_EXIT_S:",
        "if False:",
        (
            "tests/cli/test_launcher.py::test_a_stream_that_triton_keeps_is_not_waited_for_once_the_model_has_no_requests",
        ),
    ),
    Mutant(
        "the engine is not told of a cancelled request",
        f"{TRITON}/running_requests.py",
        "self._engines.send(request.placement.engine, AbortRequests(request.state.engine_ids))",
        "pass",
        ("tests/triton/test_isolation.py",),
    ),
    *mutants_of(
        f"{TRITON}/reporter.py",
        ("tests/triton/test_reporter.py",),
        (
            "requests that end together are not on the metrics page",
            "now >= self._next_finished_report_at - FINISHED_BURST_S",
            "now >= self._next_finished_report_at",
        ),
        (
            "after a quiet time the metrics page takes all the time there is",
            "max(self._next_finished_report_at, now)",
            "self._next_finished_report_at",
        ),
        (
            "while requests end, the metrics of steps never reach the page",
            "self._requests_reported_at = now\n        self._has_changed = True",
            "self._requests_reported_at = self._reported_at = now\n        self._has_changed = True",
        ),
    ),
    *mutants_of(
        f"{TRITON}/metrics.py",
        METRICS,
        (
            "an observation that Triton did not take is lost",
            "if refused:\n                self._observations[name] += refused",
            "if False:\n                pass",
        ),
        (
            "a response waits for the metrics of steps",
            "due = [key for key in self._counts if of_steps or not self._specs[key[0]].of_steps]",
            "due = list(self._counts)",
        ),
    ),
    *mutants_of(
        "client/dflash_client/grpc_transport.py",
        ("tests/client/test_stream_ends.py",),
        ("a stream is cancelled as it ends", "ended.wait(END_S)", "pass"),
        ("a stream is cancelled as it ends, with asyncio", "timeout=END_S", "timeout=0"),
        ("a stream that does not end after its error is waited for", "ended.wait(END_S)", "ended.wait()"),
        (
            "large responses are read on the event loop",
            "return await asyncio.to_thread(read_response, data) if len(data) > LARGE_BYTES else read_response(data)",
            "yield read_response(data)",
        ),
    ),
    *mutants_of(
        f"{TRITON}/model_config.py",
        ("tests/triton/test_model_config.py",),
        (
            "GPU_DEVICE_IDS are not places in CUDA_VISIBLE_DEVICES",
            "visible[int(one)] if int(one) < len(visible) else one for one in device_ids",
            "one for one in device_ids",
        ),
        ("vLLM's names of values stay as they are", "_VALUES.get((name, str(value).lower()), value)", "value"),
    ),
    Mutant(
        "closing does not wait for what runs",
        f"{TRITON}/service.py",
        "DRAIN_S = 10.0",
        "DRAIN_S = 0.0",
        ("tests/triton/test_service.py",),
    ),
    Mutant(
        "request_timeout_s is not sent to the engine",
        f"{TRITON}/service.py",
        "self._config.request_timeout_s)",
        "0.0)",
        ("tests/triton/test_settings.py",),
    ),
)
