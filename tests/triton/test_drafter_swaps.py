"""Requests for another drafter: who may send them, when they are answered, and what a new engine starts with."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from dflash_backend.engine_client.supervisor import EngineLost
from dflash_backend.messages import SwapDrafter
from dflash_backend.triton.drafter_swaps import read_swap_request
from dflash_backend.triton.service import TritonService
from dflash_backend.triton.submission import Refused
from tests.support.waiting import eventually
from tests.triton.fake_triton import FakeTriton, InferenceResponse, Request, Sender
from tests.triton.serving import submit

KEY = "a key"


@pytest.fixture
def key_file(tmp_path: Path) -> str:
    (tmp_path / "key").write_text(f"{KEY}\n", encoding="utf-8")
    return str(tmp_path / "key")


@pytest.fixture
def service(serve: Callable[..., TritonService], key_file: str) -> TritonService:
    return serve(admin_key_file=key_file)


def ask(service: TritonService, draft_model: str, **changes: object) -> Sender:
    """Ask for a drafter."""
    request = Request(swap_drafter=json.dumps({"draft_model": draft_model, "admin_key": KEY} | changes))
    service.submit(request)
    return request.sender


def only(sender: Sender) -> InferenceResponse:
    (response,) = sender.all()
    return response


def outcomes(triton: FakeTriton) -> dict[str, float]:
    """How many swaps had which outcome, by the metrics."""
    return {key[1]: value for key, value in triton.values.items() if key[0] == "dflash:drafter_swaps_total"}


def test_the_answer_comes_once_the_drafter_drafts(service: TritonService, triton: FakeTriton) -> None:
    response = only(ask(service, "slow", window=5, max_loss=0.5, draft_revision="main"))
    assert response.error is None
    assert json.loads(response.outputs["text_output"]) == {
        "outcome": "swapped",
        "message": "slow drafts now",
        "num_engines": 1,
    }
    # Requests are taken as before.
    assert submit(service, max_tokens=3).all()[-1].error is None
    assert eventually(lambda: outcomes(triton).get("swapped") == 1)


@pytest.mark.parametrize(
    ("draft", "message"),
    [
        ("wrong", "INVALID_ARGUMENT: the drafter was not swapped: the toy's target is another one"),
        ("too early", "UNAVAILABLE: the drafter was not swapped: the toy compares another one"),
        ("defect", "it could not be loaded (KeyError: 'the toy lacks a tensor'); the server's log has more"),
    ],
)
def test_why_it_is_not_swapped_reaches_the_client(service: TritonService, draft: str, message: str) -> None:
    error = only(ask(service, draft)).error
    assert error is not None
    assert message in error.message
    assert only(ask(service, "fine")).error is None


def test_an_engine_is_asked_for_all_that_the_client_asked_for(service: TritonService) -> None:
    sent: list[object] = []
    send = service._engines.send
    service._engines.send = lambda index, message: (sent.append(message), send(index, message))
    only(ask(service, "new", draft_revision="v2", window=7, max_loss=0.25))
    (message,) = sent
    assert isinstance(message, SwapDrafter)
    assert (message.draft_model, message.draft_revision) == ("new", "v2")
    assert (message.window, message.max_loss) == (7, 0.25)


def test_one_is_loaded_at_a_time(service: TritonService) -> None:
    first, second = ask(service, "slow"), ask(service, "other")
    error = only(second).error
    assert error is not None
    assert "another drafter is loaded; try again later" in error.message
    assert only(first).error is None


def test_a_drafter_whose_client_has_left_is_dropped_as_it_has_loaded(
    service: TritonService, triton: FakeTriton
) -> None:
    sender = ask(service, "very slow")
    sender.cancelled = True
    error = only(sender).error
    assert error is not None
    assert error.code == "CANCELLED"
    # Memory is for two drafters, so the next one waits until the one that was dropped has loaded.
    error = only(ask(service, "other")).error
    assert error is not None
    assert "another drafter is loaded" in error.message
    assert eventually(lambda: only(ask(service, "kept")).error is None)
    assert service._engines.supervisors[0].drafter == ("kept", "")
    assert eventually(lambda: outcomes(triton).get("swapped") == 1)
    assert any("refused: the client that asked for it has left" in line for line in triton.lines)


def test_an_engine_without_a_drafter_says_so(serve: Callable[..., TritonService], key_file: str) -> None:
    error = only(ask(serve(admin_key_file=key_file, draft_model=""), "other")).error
    assert error is not None
    assert "was started without a drafter that is a model" in error.message


def test_an_engine_that_is_started_anew_has_the_drafter_that_drafted(service: TritonService) -> None:
    (supervisor,) = service._engines.supervisors
    assert supervisor.drafter == (None, "")
    only(ask(service, "kept", draft_revision="v2"))
    assert supervisor.drafter == ("kept", "v2")
    only(ask(service, "reverted"))
    # What comes later is for the log, and for the next start.
    assert eventually(lambda: supervisor.drafter == ("kept", "v2"))


def test_what_is_described_is_the_drafter_that_drafts_now(service: TritonService) -> None:
    def described() -> str:
        request = Request(describe=[True])
        service.submit(request)
        description: str = json.loads(only(request.sender).outputs["text_output"])["description"]
        return description

    assert described() == "toy, drafter the first; KV"
    only(ask(service, "kept"))
    assert described() == "toy, drafter kept; KV"
    only(ask(service, "reverted"))
    assert eventually(lambda: described() == "toy, drafter kept; KV")
    only(ask(service, "die"))
    assert eventually(lambda: bool(service._engines.up))
    assert described() == "toy, drafter the first; KV", "the toy starts as it was"


def test_an_engine_that_dies_of_a_drafter_is_back_without_it(service: TritonService) -> None:
    error = only(ask(service, "die")).error
    assert error is not None
    assert error.message.startswith("INTERNAL: ")
    assert "the engine died while it loaded the drafter" in error.message
    assert eventually(lambda: bool(service._engines.up))
    assert service._engines.supervisors[0].drafter == (None, "")
    assert submit(service, max_tokens=3).all()[-1].error is None


def test_an_engine_that_dies_while_it_compares_is_back_with_the_drafter_before(
    service: TritonService, triton: FakeTriton
) -> None:
    only(ask(service, "kept"))
    only(ask(service, "deadly"))
    (supervisor,) = service._engines.supervisors
    assert supervisor.drafter == ("deadly", "")
    assert supervisor.engine is not None
    os.kill(supervisor.engine.pid, signal.SIGKILL)
    assert eventually(lambda: supervisor.drafter == ("kept", ""))
    assert outcomes(triton).get("reverted") == 1 or eventually(lambda: outcomes(triton).get("reverted") == 1)
    assert eventually(lambda: bool(service._engines.up))


def test_one_of_several_engines_that_dies_while_it_compares_is_not_started_with_that_drafter(
    serve: Callable[..., TritonService], key_file: str, triton: FakeTriton, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However late the thread that answers requests takes note of the loss."""
    service = serve(data_parallel_size=2, admin_key_file=key_file)
    only(ask(service, "kept"))
    only(ask(service, "deadly"))
    supervisor = service._engines.supervisors[1]
    started: list[tuple[str | None, str]] = []
    start, fail = supervisor._new_process, service._requests.fail_all_lost
    monkeypatch.setattr(supervisor, "_new_process", lambda: (started.append(supervisor.drafter), start())[1])

    def fail_late(lost: EngineLost) -> None:
        eventually(lambda: service._engines.up == [0, 1])
        fail(lost)

    monkeypatch.setattr(service._requests, "fail_all_lost", fail_late)
    assert supervisor.engine is not None
    os.kill(supervisor.engine.pid, signal.SIGKILL)
    assert eventually(lambda: outcomes(triton).get("reverted") == 1)
    assert started == [("kept", "")]
    assert [one.drafter for one in service._engines.supervisors] == [("deadly", ""), ("kept", "")]


def test_a_drafter_that_is_not_compared_stays_when_its_engine_dies(service: TritonService, triton: FakeTriton) -> None:
    only(ask(service, "fine", window=0))
    (supervisor,) = service._engines.supervisors
    assert supervisor.engine is not None
    os.kill(supervisor.engine.pid, signal.SIGKILL)
    assert eventually(lambda: not service._engines.up)
    assert eventually(lambda: bool(service._engines.up))
    assert supervisor.drafter == ("fine", "")
    assert "reverted" not in outcomes(triton)


def test_all_engines_swap_before_it_is_answered(
    serve: Callable[..., TritonService], key_file: str, triton: FakeTriton
) -> None:
    service = serve(data_parallel_size=2, admin_key_file=key_file)
    response = only(ask(service, "slow"))
    assert json.loads(response.outputs["text_output"])["num_engines"] == 2
    assert {one.drafter for one in service._engines.supervisors} == {("slow", "")}
    error = only(ask(service, "wrong")).error
    assert error is not None
    assert "engine 0: the toy's target is another one; engine 1: the toy's target is another one" in error.message


def test_one_of_several_instances_swaps_nothing(serve: Callable[..., TritonService], key_file: str) -> None:
    """Triton gives a request to one of them."""
    service = serve(num_instances=2, admin_key_file=key_file)
    error = only(ask(service, "kept")).error
    assert error is not None
    assert "the model has 2 instances" in error.message
    assert service._engines.supervisors[0].drafter == (None, "")


def test_a_service_that_ends_answers_who_waits(serve: Callable[..., TritonService], key_file: str) -> None:
    service = serve(admin_key_file=key_file)
    sender = ask(service, "slow")
    service.close()
    assert sender.answered


def test_a_key_file_that_cannot_be_used_is_said_at_the_load_and_may_come_later(
    serve: Callable[..., TritonService], triton: FakeTriton, tmp_path: Path
) -> None:
    file = tmp_path / "key"
    service = serve(admin_key_file=str(file))
    assert any("admin_key_file cannot be read" in line and str(file) in line for line in triton.lines)
    file.write_text(KEY, encoding="utf-8")
    assert only(ask(service, "slow")).error is None


def asked(**changes: object) -> str:
    return json.dumps({"draft_model": "d", "admin_key": KEY} | changes)


@pytest.mark.parametrize(
    ("text", "status", "message"),
    [
        (asked(admin_key="another"), "INVALID_ARGUMENT", "admin_key is not the one"),
        ('{"draft_model": "d"}', "INVALID_ARGUMENT", "admin_key is not the one"),
        ("{}", "INVALID_ARGUMENT", "missing required field `draft_model`"),
        ("[1", "INVALID_ARGUMENT", "the input swap_drafter is wrong"),
        (asked(draft_model=""), "INVALID_ARGUMENT", "draft_model is empty"),
        (asked(window=-1), "INVALID_ARGUMENT", "window is -1; allowed: an integer from 0 to 10000000"),
        (asked(max_loss=1.5), "INVALID_ARGUMENT", "max_loss is 1.5; allowed: a number from 0 to 1"),
        (asked(windows=3), "INVALID_ARGUMENT", "unknown field `windows`"),
        (asked(**{"w" * 9000: 3}), "INVALID_ARGUMENT", "unknown field `ww"),
        (asked(note="w" * 20_000), "INVALID_ARGUMENT", "has 200.. characters; allowed: at most 16384"),
    ],
)
def test_a_wrong_request_says_what_is_wrong(key_file: str, text: str, status: str, message: str) -> None:
    with pytest.raises(Refused, match=message) as refused:
        read_swap_request(text, key_file)
    assert refused.value.status == status
    assert len(str(refused.value)) < 400


def test_without_a_key_nobody_may(key_file: str, tmp_path: Path) -> None:
    assert read_swap_request(asked(), key_file).draft_model == "d"
    with pytest.raises(Refused, match="admin_key_file names no file") as refused:
        read_swap_request(asked(admin_key=""), "")
    assert refused.value.status == "UNAVAILABLE"
    (tmp_path / "empty").write_text("\n", encoding="utf-8")
    with pytest.raises(Refused, match="is empty"):
        read_swap_request(asked(admin_key=""), str(tmp_path / "empty"))
    with pytest.raises(Refused, match="cannot be read"):
        read_swap_request(asked(), str(tmp_path / "none"))


def test_an_input_that_is_no_text_is_refused(service: TritonService) -> None:
    request = Request(swap_drafter=[1, 2])
    service.submit(request)
    error = only(request.sender).error
    assert error is not None
    assert "the input swap_drafter is wrong" in error.message
