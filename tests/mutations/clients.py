"""Defects of the client and its command line where a proxy, a signal, an encoding or a second model is in between."""

from __future__ import annotations

from tests.mutations.mutant import mutants_of

CLIENT = "client/dflash_client"
COMMANDS = "cli/dflash_cli/commands"

CLIENTS_MUTANTS = (
    *mutants_of(
        f"{CLIENT}/connection.py",
        ("tests/client/test_request.py",),
        ("a time-out may be infinite", "if not 0 < timeout_s <= LONGEST_TIMEOUT_S:", "if not 0 < timeout_s:"),
    ),
    *mutants_of(
        f"{CLIENT}/http_transport.py",
        ("tests/client/test_http_transport.py",),
        ("a long time-out is cut to 32 bits", "remaining if remaining < LONGEST_READ_S else None", "remaining"),
    ),
    *mutants_of(
        f"{CLIENT}/stream.py",
        ("tests/client/test_http_transport.py", "tests/client/test_stream_ends.py"),
        (
            "an answer that a proxy ended is whole",
            "contextlib.closing(call.responses()) as responses:\n"
            "                for outputs in responses:\n"
            "                    yield from attempts.reader.deltas(outputs)\n"
            "            attempts.check_end()\n",
            "contextlib.closing(call.responses()) as responses:\n"
            "                for outputs in responses:\n"
            "                    yield from attempts.reader.deltas(outputs)\n",
        ),
        (
            "an answer that a proxy ended is whole, with asyncio",
            "                        yield delta\n            attempts.check_end()\n",
            "                        yield delta\n",
        ),
    ),
    *mutants_of(
        f"{CLIENT}/responses.py",
        ("tests/client/test_request.py",),
        (
            "an answer is whole when one completion is",
            "len(self._finished) < self._num_completions",
            "not self._finished",
        ),
    ),
    *mutants_of(
        f"{CLIENT}/delta_stream.py",
        ("tests/client/test_delta_stream.py",),
        (
            "an answer whose last response does not come is whole",
            '            "finish_reason": ["None"],\n',
            "",
        ),
    ),
    *mutants_of(
        f"{CLIENT}/request.py",
        ("tests/client/test_request.py",),
        ("null is not sent", "None if value is NULL else value for name", "value for name"),
    ),
    *mutants_of(
        f"{CLIENT}/grpc_messages.py",
        ("tests/client/test_grpc_messages.py",),
        ("a proxy without an answer is no server", 'if status in ("502", "504"):', "if False:"),
        (
            "what a proxy never sent on is lost",
            "for known in _BROKEN) and not any(known in words for known in _NOT_SENT)",
            "for known in _BROKEN)",
        ),
    ),
    *mutants_of(
        f"{CLIENT}/client.py",
        ("tests/client/test_stream_ends.py",),
        (
            "a swap is sent again",
            "swap_drafter=wanted), timeout_s, RetryPolicy(0))",
            "swap_drafter=wanted), timeout_s)",
        ),
    ),
    *mutants_of(
        "dflash_backend/triton/drafter_swaps.py",
        ("tests/triton/test_drafter_swaps.py",),
        (
            "a drafter that an engine died of may be sent again",
            '"the engine died while it loaded the drafter", "INTERNAL"',
            '"the engine died while it loaded the drafter", "UNAVAILABLE"',
        ),
    ),
    *mutants_of(
        "cli/dflash_cli/dynamo_engine.py",
        ("tests/cli/test_dynamo.py",),
        ("an answer through Dynamo has 16 tokens", 'parameters.setdefault("max_tokens", ', "str("),
        (
            "Dynamo is not told who is wrong",
            "raise InvalidArgument(str(error)) from None\n        except",
            "raise\n        except",
        ),
        (
            "an abort is an error",
            "            if context.id() in self._streams:\n                raise\n",
            "            raise\n",
        ),
    ),
    *mutants_of(
        f"{COMMANDS}/serve.py",
        ("tests/cli/test_serve_options.py", "tests/cli/test_usage.py"),
        ("nohup has no effect", " or signal.getsignal(each) != signal.SIG_IGN]", " or True]"),
        (
            "Windows has no command line",
            'for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name)',
            'for name in ("SIGINT", "SIGTERM", "SIGHUP")',
        ),
        ("a model is taken for a name", "        check_lists(arguments)\n", ""),
    ),
    *mutants_of(
        f"{COMMANDS}/console.py",
        ("tests/cli/test_usage.py",),
        ("an answer ends at a character", 'stream.reconfigure(errors="backslashreplace")', "pass"),
    ),
    *mutants_of(
        "dflash_backend/evaluation/run.py",
        ("tests/evaluation/test_run.py",),
        (
            "a failed request takes all answers along",
            "except (KeyboardInterrupt, EvaluationError) as error:",
            "except KeyboardInterrupt as error:",
        ),
    ),
    *mutants_of(
        f"{COMMANDS}/eval.py",
        ("tests/cli/test_eval.py",),
        ("the first model's answers are lost with the second", 'alone")\n        show_first()\n', 'alone")\n'),
        ("a second pair is not looked at before the first", "    engine.resolved(_given(arguments, other))\n", ""),
    ),
)
