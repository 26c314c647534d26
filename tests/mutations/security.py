"""Defects of what keeps the OpenAI front end and Triton's own ports safe."""

from __future__ import annotations

from tests.mutations.mutant import mutants_of

FOLDER = "frontend/dflash_openai/middleware"
TESTS = "tests/frontend/middleware"
KEYS = (f"{TESTS}/test_api_keys.py",)
LIMITS = (f"{TESTS}/test_key_limits.py",)

FRONT_END_PROCESS = "tests/cli/test_frontend_process.py"
SERVER_OPTIONS = "tests/cli/test_server_options.py"

SECURITY_MUTANTS = (
    *mutants_of(
        "cli/dflash_cli/launcher/server.py",
        (SERVER_OPTIONS,),
        (
            "pages in a local browser may load models",
            "self._allowed_apis = set(allow_apis)",
            'self._allowed_apis = {*allow_apis, *(["model-repository"] if explicit else [])}',
        ),
        (
            "metrics are where the other ports are",
            "*addresses(self.host, self.metrics_host)",
            "*addresses(self.host, self.host)",
        ),
    ),
    *mutants_of(
        "cli/dflash_cli/commands/serve.py",
        (SERVER_OPTIONS,),
        (
            "that a local page may run code is not said",
            'if arguments.explicit and "model-repository" in',
            'if public and arguments.explicit and "model-repository" in',
        ),
    ),
    *mutants_of(
        "cli/dflash_cli/commands/openai.py",
        (f"{FRONT_END_PROCESS}::test_a_log_that_nobody_reads_holds_no_request_up",),
        ("requests wait for who reads the log", "handlers=[LinesHandler(lines)]", "handlers=[logging.StreamHandler()]"),
    ),
    *mutants_of(
        "cli/dflash_cli/launcher/frontend.py",
        (f"{FRONT_END_PROCESS}::test_one_that_hangs_is_replaced_and_one_that_does_not_is_kept",),
        (
            "a front end that hangs is kept",
            "            process.kill()\n            self._silence",
            "            self._silence",
        ),
        (
            "a front end that runs is taken to hang",
            "self._silence.look(elapsed_s, beat or",
            "self._silence.look(elapsed_s, False and",
        ),
    ),
    *mutants_of(
        f"{FOLDER}/authentication.py",
        KEYS,
        (
            "any path that begins like an open one is open",
            'is_open = scope["path"] in self._open or',
            "is_open = True or",
        ),
        (
            "a request without a key is let in",
            "if key is None and self._keys and",
            "if key is None and not self._keys and",
        ),
        ("the key of any scheme counts", 'if scheme.lower() != "bearer":', 'if scheme.lower() == "":'),
    ),
    *mutants_of(
        f"{FOLDER}/api_keys.py",
        KEYS,
        (
            "the comparison ends at the key that is found",
            "    found = [key for key in keys if hmac.compare_digest(key.digest, digest)]\n",
            "    found = [next((key for key in keys if hmac.compare_digest(key.digest, digest)), None)]\n",
        ),
        ("a file without keys opens the server", "        if not found:\n", "        if found is None:\n"),
    ),
    *mutants_of(
        f"{FOLDER}/key_limits.py",
        LIMITS,
        (
            "a request that has failed counts as running",
            "        finally:\n            usage.end()",
            "        except ApiError:\n            usage.end()",
        ),
        (
            "all keys share one count",
            "name = None if key is None else key.name\n        if name",
            "name = None\n        if name",
        ),
        ("SageMaker's path has no limits", '"/detokenize", "/invocations")', '"/detokenize")'),
        ("who comes back when it was told is refused again", "math.ceil(wait_s)", "math.floor(wait_s)"),
        ("a key may name another's tenant", "if asked is not None and asked != key.name:", "if asked is None:"),
    ),
    *mutants_of(
        f"{FOLDER}/body_limit.py",
        (f"{TESTS}/test_body_limit.py",),
        ("a chunked body has no limit", "if len(parts) > self._max_bytes:", "if not parts:"),
    ),
    *mutants_of(
        f"{FOLDER}/access_log.py",
        (f"{TESTS}/test_access_log.py",),
        (
            "a request's id may be anything",
            "return given if _SANE_ID.fullmatch(given) else uuid.uuid4().hex",
            "return given or uuid.uuid4().hex",
        ),
        ("a path may write lines of its own", "json.dumps(self._scope['path'][:256])", "self._scope['path'][:256]"),
    ),
    *mutants_of(
        f"{FOLDER}/write_timeout.py",
        (f"{TESTS}/test_write_timeout.py",),
        (
            "the time of a part counts from that of the one before",
            "left_s = self._began + self._timeout_s - self._loop.time()",
            "left_s = 0.0",
        ),
        ("the timer of a response goes on after it", "            bounded.close()\n", "            pass\n"),
        (
            "another's cancellation is taken for the timer's",
            "if self._overdue and self._task is not None",
            "if self._task is not None",
        ),
    ),
)
