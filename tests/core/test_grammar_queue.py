"""Requests that wait for their grammars."""

from __future__ import annotations

from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

import pytest

from dflash_backend.core import grammar_queue
from dflash_backend.core.admission import RequestError
from dflash_backend.core.grammar_queue import GrammarQueue
from dflash_backend.messages import StructuredOutputs


class ScriptedCompiler:
    """Compiles nothing, and keeps whose grammars it was given."""

    num_compiled, compile_seconds = 0, 0.0

    def __init__(self) -> None:
        self.tenants: list[str] = []
        self.future: Future[Any] = Future()

    def submit(self, grammar: StructuredOutputs, eos_token_ids: tuple[int, ...], tenant: str) -> Future[Any]:
        self.tenants.append(tenant)
        return self.future


def request() -> Any:
    sampling = SimpleNamespace(structured_outputs=StructuredOutputs("regex", "a+"), tenant="red")
    return SimpleNamespace(request_id="1", sampling=sampling, eos_token_ids=(2,), grammar=None)


@pytest.mark.parametrize(
    ("has_begun", "status", "words"),
    [
        (False, "UNAVAILABLE", "has waited for 0 s while others were compiled; try again later"),
        (True, "UNAVAILABLE", "is not compiled yet; try again later"),
    ],
)
def test_a_grammar_that_is_not_compiled_in_time_is_not_at_fault(
    has_begun: bool, status: str, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(grammar_queue, "TIME_LIMIT_S", 0.0)
    compiler = ScriptedCompiler()
    queue = GrammarQueue(compiler, 8)
    assert queue.add(request())
    assert compiler.tenants == ["red"]
    if has_begun:
        compiler.future.set_running_or_notify_cancel()
    ((_, error),) = queue.pop_done(idle=False)
    assert error is not None
    assert error.status == status
    assert words in str(error)
    assert queue.num_waiting == 0


@pytest.mark.parametrize("at_once", [True, False])
@pytest.mark.parametrize(
    ("error", "status", "words"),
    [
        (ValueError("is wrong"), "INVALID_ARGUMENT", "the grammar in 'structured_outputs' is wrong"),
        (OSError("could not be tried"), "UNAVAILABLE", "the grammar in 'structured_outputs' could not be tried"),
        (KeyError("x"), "INTERNAL", "could not be compiled (KeyError: 'x')"),
    ],
)
def test_a_grammar_is_only_blamed_for_what_is_wrong_with_it(
    error: Exception, status: str, words: str, at_once: bool
) -> None:
    compiler = ScriptedCompiler()
    queue = GrammarQueue(compiler, 8)
    if at_once:
        compiler.future.set_exception(error)
        with pytest.raises(RequestError) as raised:
            queue.add(request())
        refusal = raised.value
    else:
        assert queue.add(request())
        compiler.future.set_exception(error)
        ((_, found),) = queue.pop_done(idle=False)
        assert found is not None
        refusal = found
    assert refusal.status == status
    assert words in str(refusal)
