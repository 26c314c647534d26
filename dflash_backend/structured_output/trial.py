"""Compiles a grammar in a process of its own first, which can be ended when that takes too long.

Some grammars take llguidance minutes: intersections and complements of regular expressions, for which its limits do not
count. A thread that compiles one could not be stopped. The process is started with the first grammar that needs a trial
(`needs_trial`), stays for the next ones, and ends with this one.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import resource
import select
import subprocess
import sys
import threading
from typing import Any

from llguidance import LLMatcher, LLParserLimits, LLTokenizer

from dflash_backend.messages import StructuredOutputs

# Of JSON schemas that have no regular expressions in them; what llguidance does with them grows with the square.
MAX_UNTRIED_CHARS = 16_384
# The address space of the process: more than any tokenizer needs, and no more than a machine can spare.
MAX_BYTES = 8 << 30
# From its start to its reading of the tokenizer.
START_LIMIT_S = 60.0
DONE = b"\n"
_REGEX_IN_SCHEMA = re.compile(r'"(?:pattern|patternProperties|format|allOf|multipleOf)"')


def needs_trial(grammar: StructuredOutputs) -> bool:
    """Whether a grammar may take longer than its size says."""
    if grammar.kind in ("regex", "choice"):
        return False
    if grammar.kind == "json":
        return len(grammar.text) > MAX_UNTRIED_CHARS or _REGEX_IN_SCHEMA.search(grammar.text) is not None
    return True


class GrammarTrial:
    """The process, for one grammar at a time. Any thread may use it."""

    def __init__(self, tokenizer_json: str, vocab_size: int, eos_token_ids: list[int], time_limit_s: float) -> None:
        """time_limit_s: of one grammar."""
        self._setup = {
            "tokenizer": tokenizer_json,
            "vocab_size": vocab_size,
            "eos": eos_token_ids,
            "time_limit_s": time_limit_s,
        }
        self._time_limit_s = time_limit_s
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None

    def run(self, grammar: str) -> str | None:
        """Compile a grammar of llguidance's own form. Returns why it takes too much, or None. What else is wrong with
        it shows when it is compiled for good."""
        with self._lock:
            if self._process is None or self._process.poll() is not None:
                self._start()
            assert self._process is not None
            try:
                self._send({"grammar": grammar})
                in_time = self._answers_within(self._time_limit_s)
            except OSError:
                self.close()
                return "needs too much memory to compile. Make it simpler"
            if not in_time:
                self.close()
                return f"takes longer than {self._time_limit_s:g} s to compile. Make it simpler"
            return None

    def close(self) -> None:
        """End the process."""
        if self._process is not None:
            self._process.kill()
            self._process.communicate()
            self._process = None

    def _start(self) -> None:
        environ = {**os.environ, "PYTHONPATH": os.pathsep.join(entry for entry in sys.path if entry)}
        self._process = subprocess.Popen(
            [sys.executable, "-m", "dflash_backend.structured_output.trial"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=environ,
            start_new_session=True,
        )
        self._send(self._setup)
        # Reading the tokenizer is not the grammar's time.
        if not self._answers_within(START_LIMIT_S):
            raise OSError("the process that tries grammars does not start")

    def _send(self, message: dict[str, Any]) -> None:
        assert self._process is not None
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(message).encode() + b"\n")
        self._process.stdin.flush()

    def _answers_within(self, timeout_s: float) -> bool:
        """Whether the process answers in time. Raises `OSError` when it has ended."""
        assert self._process is not None
        assert self._process.stdout is not None
        if not select.select([self._process.stdout], [], [], timeout_s)[0]:
            return False
        if os.read(self._process.stdout.fileno(), len(DONE)) != DONE:
            raise OSError("the process that tries grammars has ended")
        return True


def main() -> None:
    """The process: a tokenizer, then grammars, a line of JSON each; its standard input ends with the engine."""
    with contextlib.suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_AS, (MAX_BYTES, MAX_BYTES))
    os.nice(5)
    setup = json.loads(sys.stdin.buffer.readline())
    tokenizer = LLTokenizer(setup["tokenizer"], n_vocab=setup["vocab_size"], eos_token=setup["eos"])
    os.write(1, DONE)
    for line in sys.stdin.buffer:
        # Should the engine be gone by then, nothing else would end this process.
        alarm = threading.Timer(setup["time_limit_s"] + 5, os._exit, (1,))
        alarm.daemon = True
        alarm.start()
        compile_grammar(tokenizer, json.loads(line)["grammar"])
        alarm.cancel()
        os.write(1, DONE)


def compile_grammar(tokenizer: LLTokenizer, grammar: str) -> LLMatcher:
    """A matcher that has its first mask, or an error."""
    matcher = LLMatcher(tokenizer, grammar, log_level=0, limits=LLParserLimits(verbose_errors=False))
    if not matcher.is_error():
        matcher.compute_bitmask()
    return matcher


if __name__ == "__main__":
    main()
