"""Defects of what keeps the OpenAI front end safe."""

from __future__ import annotations

from tests.mutations.mutant import mutants_of

FOLDER = "frontend/dflash_openai/middleware"
TESTS = "tests/frontend/middleware"
KEYS = (f"{TESTS}/test_api_keys.py",)
LIMITS = (f"{TESTS}/test_key_limits.py",)

SECURITY_MUTANTS = (
    *mutants_of(
        f"{FOLDER}/authentication.py",
        KEYS,
        ("any path that begins like an open one is open", "return path in self._open or", "return True or"),
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
        ("the comparison ends at the key that is found", "            found = key\n", "            return key\n"),
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
