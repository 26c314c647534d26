"""Ctrl-C in the offline API: the step that runs is finished, and the engine goes on as if nothing had been asked."""

from __future__ import annotations

import itertools
import signal
import threading
from collections.abc import Callable
from typing import Any

import pytest

from dflash_backend import LLM
from dflash_backend.core.tenants import FairQueue
from dflash_backend.engine.llm import HeldInterrupt

QUESTION = "Sam fills 4 bags with 6 marbles each and gives away 7 marbles. How many marbles does Sam keep?"


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM(max_num_seqs=2, max_model_len=512, kv_cache_gb=0.05)


def interrupting(function: Callable[..., Any], at: int, times: int = 1) -> Callable[..., Any]:
    """`function`, which gets Ctrl-C `times` times before its call number `at`."""
    calls = itertools.count()

    def wrapped(*args: Any) -> Any:
        if next(calls) == at:
            for _ in range(times):
                signal.raise_signal(signal.SIGINT)
        return function(*args)

    return wrapped


@pytest.mark.parametrize(("name", "at"), [("_count_crowd", 1), ("_count_crowd", 6), ("start", 3), ("stop", 0)])
def test_an_engine_that_was_interrupted_within_a_step_goes_on_as_before(
    llm: LLM, monkeypatch: pytest.MonkeyPatch, name: str, at: int
) -> None:
    (before,) = llm.generate(QUESTION, max_tokens=64, temperature=0)
    with monkeypatch.context() as patch:
        patch.setattr(FairQueue, name, interrupting(getattr(FairQueue, name), at))
        with pytest.raises(KeyboardInterrupt):
            llm.generate([QUESTION] * 5, max_tokens=64, temperature=0)
    scheduler = llm.engine.core.scheduler
    assert not scheduler.queue.tenants
    assert not scheduler.queue.waiting
    assert not scheduler.queue.crowded
    assert scheduler.queue.num_waiting_tokens == 0
    assert not llm.engine.core.has_unfinished()
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    (after,) = llm.generate(QUESTION, max_tokens=64, temperature=0)
    assert after.token_ids == before.token_ids


def test_an_interrupt_waits_for_the_end_of_its_step_and_for_no_other(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    step, ended = llm.engine.core.step, []

    def watched() -> Any:
        outputs = step()
        ended.append(outputs)
        return outputs

    monkeypatch.setattr(llm.engine.core, "step", interrupting(watched, 3))
    with pytest.raises(KeyboardInterrupt):
        llm.generate(QUESTION, max_tokens=64, temperature=0, ignore_eos=True)
    assert len(ended) == 4


def test_a_second_interrupt_ends_the_step_at_once() -> None:
    reached: list[int] = []

    def step() -> None:
        with HeldInterrupt():
            for number in range(3):
                signal.raise_signal(signal.SIGINT)
                reached.append(number)

    with pytest.raises(KeyboardInterrupt):
        step()
    assert reached == [0]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_an_error_of_the_step_comes_through() -> None:
    def step() -> None:
        with HeldInterrupt():
            signal.raise_signal(signal.SIGINT)
            raise ValueError("of the step")

    with pytest.raises((ValueError, KeyboardInterrupt)) as raised:  # pytest itself would end with the latter
        step()
    assert raised.type is ValueError
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_a_program_that_handles_ctrl_c_itself_gets_it_at_once() -> None:
    came: list[int] = []
    before = signal.signal(signal.SIGINT, lambda number, frame: came.append(number))
    try:
        with HeldInterrupt():
            signal.raise_signal(signal.SIGINT)
            assert came == [signal.SIGINT]
    finally:
        signal.signal(signal.SIGINT, before)


def test_other_threads_can_generate(llm: LLM) -> None:
    outputs: list[Any] = []
    thread = threading.Thread(target=lambda: outputs.extend(llm.generate(QUESTION, max_tokens=4, temperature=0)))
    thread.start()
    thread.join(60)
    assert [len(output.token_ids) for output in outputs] == [4]
