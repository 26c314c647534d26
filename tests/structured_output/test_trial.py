"""The process that tries grammars: what it refuses, and that bad luck is not a grammar's fault."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import threading
import time
import weakref
from collections.abc import Iterator
from pathlib import Path

import pytest
from llguidance import LLMatcher, LLTokenizer

from checks.byte_tokenizer import EOS, write_byte_tokenizer
from dflash_backend.structured_output import compiler as compiler_module
from dflash_backend.structured_output import trial as trial_module
from dflash_backend.structured_output.compiler import GrammarCompiler, GrammarError
from dflash_backend.structured_output.trial import GrammarTrial, TrialUnavailable, Verdict
from dflash_backend.text.tokenizer import tokenizer_json
from tests.structured_output.test_compiler import of

LARGE = str(LLMatcher.grammar_from_lark("start: A\nA: " + " & ".join(f"/.*{i}.*/" for i in range(200))))
HARMLESS = str(LLMatcher.grammar_from_lark('start: "a"'))


@pytest.fixture(scope="module")
def tokenizer_text(tmp_path_factory: pytest.TempPathFactory) -> str:
    directory: Path = tmp_path_factory.mktemp("model")
    write_byte_tokenizer(directory)
    return tokenizer_json(directory)


@pytest.fixture(scope="module")
def trial(tokenizer_text: str) -> Iterator[GrammarTrial]:
    """One process for the tests that do not end it."""
    trial = GrammarTrial(tokenizer_text, 300, [EOS], 1.0)
    yield trial
    trial.close()


def pid_of(trial: GrammarTrial) -> int:
    assert trial._process is not None
    return trial._process.pid


def test_an_expression_is_tried_where_an_answer_comes_to_it(trial: GrammarTrial) -> None:
    late = str(LLMatcher.grammar_from_lark('start: "x" T\nT: /' + "a?" * 1000 + "zz/"))
    alone = str(LLMatcher.grammar_from_lark("start: /" + "a?" * 1000 + "zz/"))
    assert "too much within its answers" in (trial.run(late).reason or "")
    far = str(LLMatcher.grammar_from_lark('start: "' + "x" * 200 + '" T\nT: /' + "a?" * 1000 + "zz/"))
    assert trial.run(far).reason is None
    assert "too much within its answers" in (trial.run(far, [HARMLESS, alone]).reason or "")


def test_the_bytes_that_a_grammar_keeps_are_measured(trial: GrammarTrial) -> None:
    small, large = trial.run(HARMLESS), trial.run(str(LLMatcher.grammar_from_regex("(.?[a-z]){60}|" * 9)))
    assert small.reason is large.reason is None
    assert 1000 < small.num_bytes < 100_000 < large.num_bytes < 20_000_000


def test_what_earlier_grammars_left_is_freed_before_memory_is_measured(
    tokenizer_text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Left:
        pass

    left = Left()
    left.itself = left  # type: ignore[attr-defined]
    alive, looks = weakref.ref(left), []
    del left
    measure = trial_module.bytes_in_use

    def bytes_in_use() -> int:
        looks.append(alive() is not None)
        return measure()

    monkeypatch.setattr(trial_module, "bytes_in_use", bytes_in_use)
    tokenizer = LLTokenizer(tokenizer_text, n_vocab=300, eos_token=EOS)
    gc.disable()
    try:
        trial_module._try(tokenizer, {EOS}, {"grammar": HARMLESS, "expressions": []})
    finally:
        gc.enable()
    assert looks[0] is False


def test_a_paused_process_is_replaced_and_the_grammar_tried_again(
    trial: GrammarTrial, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trial_module, "_POLL_S", 0.1)
    trial.run(HARMLESS)
    paused, start = pid_of(trial), trial._start
    os.kill(paused, signal.SIGSTOP)

    def patient() -> None:
        monkeypatch.setattr(trial_module, "STALLED_S", 30.0)
        start()

    monkeypatch.setattr(trial_module, "STALLED_S", 0.3)
    monkeypatch.setattr(trial, "_start", patient)
    assert trial.run(HARMLESS).reason is None
    assert pid_of(trial) != paused


def test_a_process_that_is_lost_twice_is_not_the_grammars_fault(
    tokenizer_text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiler = GrammarCompiler(lambda: tokenizer_text, 300)
    grammar = of("grammar", 'start: "x" T\nT: /[a-z]+/')
    vocabulary = compiler._vocabulary((EOS,))
    runs = []

    def lost(job: dict[str, object]) -> Verdict:
        runs.append(job)
        raise trial_module._Ended(-signal.SIGKILL)

    with monkeypatch.context() as patched:
        patched.setattr(vocabulary.trials[False], "_run", lost)
        with pytest.raises(TrialUnavailable, match="lost twice; try again later"):
            compiler.compile(grammar, (EOS,))
    assert len(runs) == 2
    # Nothing of it is remembered.
    monkeypatch.setattr(vocabulary.trials[False], "_run", lambda job: Verdict(None, 5))
    assert compiler.compile(grammar, (EOS,)) is not None


def test_a_refusal_is_remembered_for_some_minutes(tokenizer_text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    compiler = GrammarCompiler(lambda: tokenizer_text, 300)
    grammar = of("grammar", 'start: "x" T\nT: /[a-z]+/')
    verdicts = [Verdict("takes too much"), Verdict(None, 5)]
    monkeypatch.setattr(compiler._vocabulary((EOS,)).trials[False], "_run", lambda job: verdicts.pop(0))
    for _ in range(2):
        with pytest.raises(GrammarError, match="takes too much"):
            compiler.compile(grammar, (EOS,))
    now = time.monotonic() + compiler_module.REFUSED_FOR_S
    monkeypatch.setattr(compiler_module.time, "monotonic", lambda: now)
    assert compiler.compile(grammar, (EOS,)) is not None
    assert verdicts == []


def test_a_process_that_starts_too_slowly_is_ended_and_not_the_grammars_fault(
    tokenizer_text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    trial = GrammarTrial(tokenizer_text, 300, [EOS], 1.0)
    with monkeypatch.context() as patched:
        patched.setattr(trial_module, "START_LIMIT_S", 0.001)
        with pytest.raises(TrialUnavailable, match="does not start within 0.001 s"):
            trial.run(HARMLESS)
    # Its late answer is that of no other grammar.
    assert trial._process is None


def test_a_process_that_reads_nothing_is_ended(tokenizer_text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A pipe takes less than a tokenizer."""
    monkeypatch.setattr(trial_module, "STALLED_S", 0.3)
    start = subprocess.Popen
    monkeypatch.setattr(trial_module.subprocess, "Popen", lambda command, **options: start(["sleep", "60"], **options))
    trial = GrammarTrial(tokenizer_text + " " * 1_000_000, 300, [EOS], 1.0)
    began = time.monotonic()
    with pytest.raises(TrialUnavailable, match="does not start within"):
        trial.run(HARMLESS)
    assert time.monotonic() - began < 10
    assert trial._process is None


@pytest.mark.nightly
def test_a_grammar_that_takes_too_much_memory_is_refused(tokenizer_text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    trial = GrammarTrial(tokenizer_text, 300, [EOS], 60.0)
    assert "memory" in (trial.run(LARGE).reason or "")
    trial.close()


def test_an_answer_of_another_number_is_no_verdict(trial: GrammarTrial) -> None:
    trial.run(HARMLESS)
    trial._read = b'{"number": 1, "reason": "of another one", "num_bytes": 1}\n' + trial._read
    trial._number = 7
    assert trial.run(HARMLESS).reason is None


def test_a_process_that_is_killed_is_replaced_once(trial: GrammarTrial) -> None:
    trial.run(HARMLESS)
    killed = pid_of(trial)
    os.kill(killed, signal.SIGSTOP)
    timer = threading.Timer(0.2, os.kill, (killed, signal.SIGKILL))
    timer.start()
    assert trial.run(HARMLESS).reason is None
    assert pid_of(trial) != killed
