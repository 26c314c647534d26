"""Tries a grammar in a process of its own first, which ends itself where that takes too much.

Some grammars take llguidance minutes: intersections and complements of regular expressions, for which its limits do not
count. A thread that compiles one could not be stopped. The process compiles the grammar, and each of its expressions by
itself, and follows a few answers in them, since an expression may be harmless until an answer comes to it. It is
started with the first grammar that needs a trial (`bounds.needs_trial`), stays for the next ones, and ends with this
one.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import json
import os
import random
import resource
import select
import signal
import subprocess
import sys
import threading
import time
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from llguidance import LLMatcher, LLTokenizer

from dflash_backend.structured_output.bounds import compile_grammar

# What the process may take beyond its tokenizer, and what a compiled grammar may keep, in bytes.
MAX_BYTES = 512 << 20
MAX_KEPT_BYTES = 64 << 20
# The most processor time of a single mask, or of taking a token: an engine's step waits for it.
MASK_LIMIT_S = 0.2
# Tokens along which an answer is followed, and how many answers: in the grammar, and in each expression by itself.
NUM_TOKENS, NUM_ANSWERS = 24, 2
NUM_TOKENS_OF_EXPRESSION = 8
# From its start to its reading of the tokenizer.
START_LIMIT_S = 60.0
# A process that uses no processor for this long stands still; one that is not done after that is starved.
STALLED_S = 5.0
WALL_LIMIT_S = 60.0
_POLL_S = 0.5
# How llguidance's errors begin where nothing can follow.
DEAD_END = "NoExtension"
# How a process ends that has run out of memory, or of stack.
_OUT_OF_MEMORY = (-signal.SIGABRT, -signal.SIGSEGV, 3)


class TrialUnavailable(OSError):
    """A grammar could not be tried, for which it is not to blame. The message completes a sentence."""


@dataclass(frozen=True)
class Verdict:
    """reason: why a grammar takes too much, or None. num_bytes: what it keeps as it is compiled. error: what llguidance
    says is wrong with it."""

    reason: str | None
    num_bytes: int = 0
    error: str | None = None


class _Ended(Exception):
    """The process ended before it answered, or stands still (`code` None)."""

    def __init__(self, code: int | None) -> None:
        super().__init__(code)
        self.code = code


class GrammarTrial:
    """The process, for one grammar at a time. Any thread may use it."""

    def __init__(self, tokenizer_json: str, vocab_size: int, eos_token_ids: list[int], time_limit_s: float) -> None:
        """time_limit_s: processor time of one grammar and its expressions."""
        self._setup = {
            "tokenizer": tokenizer_json,
            "vocab_size": vocab_size,
            "eos": eos_token_ids,
            "time_limit_s": time_limit_s,
        }
        self._time_limit_s = time_limit_s
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._number = 0
        self._read = b""

    def run(self, grammar: str, expressions: list[str] | None = None) -> Verdict:
        """Try a grammar of llguidance's own form, and each of its expressions by itself, of the same form. Raises
        `TrialUnavailable`."""
        with self._lock:
            code: int | None = None
            for _ in range(2):
                try:
                    return self._run({"grammar": grammar, "expressions": expressions or []})
                except _Ended as ended:
                    code = ended.code
                    self.close()
                if code == -signal.SIGXCPU:
                    limit = f"{self._time_limit_s:g} s of processor time"
                    return Verdict(f"takes longer than {limit} to compile. Make it simpler")
            if code in _OUT_OF_MEMORY:
                return Verdict("needs too much memory to compile. Make it simpler")
            raise TrialUnavailable(
                "could not be tried, since the process that tries grammars was lost twice; try again later"
            )

    def close(self) -> None:
        """End the process."""
        if self._process is not None:
            self._process.kill()
            self._process.communicate()
            self._process = None

    def _run(self, job: dict[str, Any]) -> Verdict:
        if self._process is None or self._process.poll() is not None:
            self._start()
        self._number += 1
        answer = self._ask({**job, "number": self._number}, WALL_LIMIT_S)
        return Verdict(answer["reason"], answer["num_bytes"], answer["error"])

    def _start(self) -> None:
        self.close()
        environ = {**os.environ, "PYTHONPATH": os.pathsep.join(entry for entry in sys.path if entry)}
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "dflash_backend.structured_output.trial"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,  # what Rust says of a grammar that is too large
                env=environ,
                start_new_session=True,
            )
        except OSError as error:
            raise TrialUnavailable(
                f"could not be tried, since the process that tries grammars does not start ({error})"
            ) from None
        self._read, self._number = b"", 0
        # Reading the tokenizer is not the grammar's time.
        try:
            self._ask({**self._setup, "number": 0}, START_LIMIT_S)
        except _Ended:
            self.close()
            raise TrialUnavailable(
                f"could not be tried, since the process that tries grammars does not start within {START_LIMIT_S:g} s"
            ) from None

    def _ask(self, message: dict[str, Any], limit_s: float) -> dict[str, Any]:
        """Send a message and wait for the answer of its number. Raises `_Ended`."""
        assert self._process is not None
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        began = active = time.monotonic()
        used = -1.0
        stdin, stdout = self._process.stdin.fileno(), self._process.stdout.fileno()
        # A tokenizer is larger than a pipe, and a process that hangs reads none of it.
        os.set_blocking(stdin, False)
        unsent = memoryview(json.dumps(message).encode() + b"\n")
        poller = select.poll()
        poller.register(stdout, select.POLLIN)
        poller.register(stdin, select.POLLOUT)
        try:
            while True:
                line, end, rest = self._read.partition(b"\n")
                if end:
                    self._read = rest
                    answer: dict[str, Any] = json.loads(line)
                    if answer["number"] == message["number"]:
                        return answer
                    continue
                ready = dict(poller.poll(1e3 * min(_POLL_S, limit_s)))
                if stdin in ready:
                    unsent = unsent[os.write(stdin, unsent) :]
                    if not unsent:
                        poller.unregister(stdin)
                if stdout in ready:
                    data = os.read(stdout, 1 << 16)
                    if not data:
                        raise _Ended(self._process.wait())
                    self._read += data
                if not ready:
                    now, seconds = time.monotonic(), processor_seconds(str(self._process.pid))
                    if seconds > used:
                        active, used = now, seconds
                    if now - active > STALLED_S or now - began > limit_s:
                        raise _Ended(None)
        except OSError:
            raise _Ended(self._process.wait()) from None


def processor_seconds(name: str) -> float:
    """What a process or a thread, by its folder in /proc, has used of the processors; 0 where that cannot be told."""
    try:
        with open(f"/proc/{name}/stat", encoding="ascii", errors="replace") as file:
            fields = file.read().rpartition(")")[2].split()
    except OSError:
        return 0.0
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


_SIZES = ("arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks", "fordblks", "keepcost")


class _MallInfo(ctypes.Structure):
    """glibc's `struct mallinfo2`."""

    _fields_ = [(name, ctypes.c_size_t) for name in _SIZES]


def bytes_in_use() -> int:
    """What this process has from `malloc` and has not given back; 0 where the C library does not say."""
    try:
        call = ctypes.CDLL(None).mallinfo2
    except AttributeError:
        return 0
    call.restype = _MallInfo
    info = call()
    return int(info.uordblks + info.hblkhd)


def main() -> None:
    """The process: a tokenizer, then grammars, a line of JSON each; its standard input ends with the engine."""
    os.nice(5)
    setup = json.loads(sys.stdin.buffer.readline())
    tokenizer = LLTokenizer(setup["tokenizer"], n_vocab=setup["vocab_size"], eos_token=setup["eos"])
    compile_grammar(tokenizer, str(LLMatcher.grammar_from_regex("a")))
    # What a grammar keeps is the memory of after less that of before: nothing of earlier ones may go in between.
    gc.collect()
    gc.freeze()
    gc.disable()
    _limit_memory()
    _answer(setup["number"], Verdict(None))
    for line in sys.stdin.buffer:
        job = json.loads(line)
        _limit_processor(setup["time_limit_s"])
        try:
            verdict = _try(tokenizer, set(setup["eos"]), job)
        except MemoryError:
            os._exit(3)
        _answer(job["number"], verdict)


def _answer(number: int, verdict: Verdict) -> None:
    text = json.dumps({"number": number, **asdict(verdict)})
    os.write(1, text.encode() + b"\n")


def _limit_memory() -> None:
    """Bound the address space to `MAX_BYTES` more than it has now."""
    with contextlib.suppress(ValueError, OSError), open("/proc/self/statm", encoding="ascii") as file:
        size = int(file.read().split()[0]) * resource.getpagesize() + MAX_BYTES
        resource.setrlimit(resource.RLIMIT_AS, (size, size))


def _limit_processor(seconds: float) -> None:
    """Bound the processor time to `seconds` more than was used up to now, rounded up."""
    with contextlib.suppress(ValueError, OSError):
        hard = resource.getrlimit(resource.RLIMIT_CPU)[1]
        resource.setrlimit(resource.RLIMIT_CPU, (int(time.process_time() + seconds) + 1, hard))


def _try(tokenizer: LLTokenizer, eos_token_ids: set[int], job: dict[str, Any]) -> Verdict:
    gc.collect()
    before = bytes_in_use()
    matcher = compile_grammar(tokenizer, job["grammar"])
    if matcher.is_error():
        return Verdict(None, error=matcher.get_error())
    reason = follow(matcher, eos_token_ids, NUM_TOKENS)
    num_bytes = max(0, bytes_in_use() - before)
    if reason is None and num_bytes > MAX_KEPT_BYTES:
        reason = f"takes {num_bytes >> 20} MB; allowed: {MAX_KEPT_BYTES >> 20} MB. Make it simpler"
    for expression in job["expressions"]:
        if reason is not None:
            break
        reason = follow(compile_grammar(tokenizer, expression), eos_token_ids, NUM_TOKENS_OF_EXPRESSION)
    return Verdict(reason, num_bytes)


def follow(matcher: LLMatcher, eos_token_ids: set[int], num_tokens: int) -> str | None:
    """Follow a few answers, each along tokens that its masks allow. Returns why they take too much, or None. Of the
    same grammar the same answers each time. `matcher` stays at its beginning."""
    slowest = 0.0
    for seed in range(NUM_ANSWERS):
        before, rng, answer = bytes_in_use(), random.Random(seed), matcher.deep_copy()
        for _ in range(num_tokens):
            began = time.process_time()
            mask = answer.compute_bitmask()
            slowest = max(slowest, time.process_time() - began)
            if answer.is_error() or slowest > MASK_LIMIT_S:
                break
            allowed = np.flatnonzero(np.unpackbits(np.frombuffer(mask, np.uint8), bitorder="little")).tolist()
            going_on = [token_id for token_id in allowed if token_id not in eos_token_ids]
            if not going_on:
                break
            began = time.process_time()
            answer.consume_token(rng.choice(going_on))
            slowest = max(slowest, time.process_time() - began)
        kept = bytes_in_use() - before
        if kept > MAX_KEPT_BYTES:
            return f"takes {kept >> 20} MB in an answer; allowed: {MAX_KEPT_BYTES >> 20} MB. Make it simpler"
        if slowest > MASK_LIMIT_S:
            return f"takes {slowest:.1f} s for one token; allowed: {MASK_LIMIT_S:g} s. Make it simpler"
        if answer.is_error() and not answer.get_error().startswith(DEAD_END):
            return f"takes too much within its answers ({answer.get_error().splitlines()[0][:200]}). Make it simpler"
    return None


if __name__ == "__main__":
    main()
