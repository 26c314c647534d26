"""Requests that wait for their grammars."""

from __future__ import annotations

from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

import pytest

from checks.core_state import check_core
from dflash_backend.core import grammar_queue
from dflash_backend.core.admission import RequestError
from dflash_backend.core.engine import EngineCore
from dflash_backend.core.grammar_queue import GrammarQueue
from dflash_backend.core.tenants import FairQueue
from dflash_backend.messages import StructuredOutputs
from tests.core.toy_engine import make_config, make_request
from tests.core.toy_worker import ToyWorker


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
    return SimpleNamespace(request_id="1", sampling=sampling, eos_token_ids=(2,), grammar=None, num_tokens=3)


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
    queue = GrammarQueue(compiler, FairQueue({}))
    assert queue.add(request())
    assert compiler.tenants == ["red"]
    if has_begun:
        compiler.future.set_running_or_notify_cancel()
    ((_, error),) = queue.pop_done(idle=False)
    assert error is not None
    assert error.status == status
    assert words in str(error)
    assert not queue.waiting


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
    queue = GrammarQueue(compiler, FairQueue({}))
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


def test_the_grammar_of_a_request_that_is_taken_out_is_not_compiled() -> None:
    """Its turn is for the grammars of clients that wait."""
    compiler = ScriptedCompiler()
    queue = GrammarQueue(compiler, FairQueue({}))
    gone = request()
    assert queue.add(gone)
    assert not queue.remove(request()), "another request of the same id"
    assert not compiler.future.cancelled()
    assert queue.remove(gone)
    assert compiler.future.cancelled()
    assert not queue.waiting


def test_those_that_wait_for_their_grammars_are_among_the_waiting() -> None:
    config, compiler = make_config(max_num_seqs=1), ScriptedCompiler()
    core = EngineCore(config, ToyWorker(config), grammars=compiler)
    grammar = StructuredOutputs("regex", "a+")
    for name in ("a", "b", "c"):
        core.add_request(make_request(name, [1, 2, 3], structured_outputs=grammar))
    core.add_request(make_request("runs", [4, 5]))
    core.add_request(make_request("queued", [6, 7]))
    core.step()
    counts = core.stats()
    assert (counts.num_requests_running, counts.num_requests_waiting, core.num_waiting) == (1, 1 + 3, 1 + 3)
    core.abort(["b"])
    assert core.stats().num_requests_waiting == 1 + 2


def test_requests_that_wait_for_their_grammars_are_bounded_by_tenant() -> None:
    """One tenant's grammars leave space for those of others, and for requests without one."""
    config = make_config(max_num_seqs=1, max_queue_size=16, max_queue_tokens=60)
    core = EngineCore(config, ToyWorker(config), grammars=ScriptedCompiler())
    grammar = StructuredOutputs("regex", "a+")

    def send(name: str, tenant: str, length: int = 1, **sampling: Any) -> None:
        core.add_request(make_request(name, [1] * length, tenant=tenant, **sampling))

    for number in range(17):  # the first has a free row
        send(f"a{number}", "a", structured_outputs=grammar)
    assert core.crowded_tenants() == {"a": 17}
    for more in ({}, {"structured_outputs": grammar}):
        with pytest.raises(RequestError, match=r"17 requests of tenant 'a' wait already and max_queue_size is 16"):
            send("more", "a", **more)
    send("b", "b", 40, structured_outputs=grammar)
    with pytest.raises(
        RequestError, match=r"with 40 tokens wait already \(57 of all tenants\), this one has 30"
    ) as error:
        send("c", "b", 30, structured_outputs=grammar)
    assert error.value.status == "UNAVAILABLE"
    core.abort([f"a{number}" for number in range(17)])
    assert core.crowded_tenants() == {"b": 1}
    check_core(core)
