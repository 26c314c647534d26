"""A service with several engines: where requests go, and what one engine's death costs the others."""

from __future__ import annotations

import itertools
import os
import signal
import time
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from dflash_backend.config import EngineConfig
from dflash_backend.engine_client.client import EngineError
from dflash_backend.engine_client.replicas import Replicas, _of_engine, changed
from dflash_backend.messages import EngineReady
from dflash_backend.triton.service import TritonService
from tests.engine_client import toy_process
from tests.support.waiting import eventually
from tests.triton.serving import joined, submit

NUM = 3


def prompt(number: int, num_tokens: int = 64) -> list[int]:
    """Four blocks that no other number's prompt has."""
    return [number % 200 + 1, *range(1, num_tokens)]


def engine_of(service: TritonService) -> dict[int, int]:
    """The engine of each running request, by the request's number."""
    return {int(key): request.placement.engine for key, request in service._requests._requests.items()}


def where(service: TritonService, token_ids: list[int], **inputs) -> int:
    """The engine that gets this prompt, once its answer is there."""
    seen: list[int] = []
    start = service._start
    service._start = lambda state, responder, at: (seen.append(at.engine), start(state, responder, at))
    try:
        assert submit(service, token_ids, max_tokens=3, **inputs).all()[-1].error is None
    finally:
        service._start = start
    return seen[0]


def start_streams(service: TritonService, count: int) -> list:
    """Streams that go on for ever, of prompts that share no block."""
    slow = toy_process.SLOW
    senders = [submit(service, [slow, *prompt(10 + n)], max_tokens=10**9, stream=True) for n in range(count)]
    for sender in senders:
        sender.next()
    return senders


def test_a_block_is_an_engines_as_long_as_the_device_or_a_tier_has_it():
    copies: Counter[bytes] = Counter()
    assert changed(copies, [b"a", b"b"], is_stored=True) == [b"a", b"b"]  # the device
    assert changed(copies, [b"a"], is_stored=True) == []  # a tier
    assert changed(copies, [b"a", b"b"], is_stored=False) == [b"b"]
    assert changed(copies, [b"a"], is_stored=False) == [b"a"]
    assert not copies


def test_requests_follow_their_prefix_and_new_ones_are_spread(serve, triton):
    service = serve(data_parallel_size=NUM)
    first = [where(service, prompt(number)) for number in range(2 * NUM)]
    assert Counter(first) == dict.fromkeys(range(NUM), 2)
    longer = [where(service, [*prompt(number), 7, 8, 9]) for number in range(2 * NUM)]
    assert longer == first
    service.close()
    routed = {key[1]: value for key, value in triton.values.items() if key[0] == "dflash:requests_routed_total"}
    assert routed == {f"dflash_0_0-{index}": 4 for index in range(NUM)}


def test_a_request_is_no_load_any_more_when_its_answer_leaves(serve, monkeypatch):
    service = serve(data_parallel_size=2)
    loads = []
    answer = service._requests._answer

    def look(request):
        if request.state.finished:
            loads.append([service._engines._router.load(index) for index in range(2)])
        answer(request)

    monkeypatch.setattr(service._requests, "_answer", look)
    submit(service, prompt(1), max_tokens=3).all()
    assert loads == [[0, 0]]


def test_a_salt_keeps_texts_apart_and_its_engine(serve):
    service = serve(data_parallel_size=2)
    (mine, others) = (where(service, prompt(1), sampling={"cache_salt": salt}) for salt in ("mine", "others"))
    assert mine != others
    assert where(service, prompt(2), sampling={"cache_salt": "mine"}) == mine
    assert where(service, prompt(3), sampling={"cache_salt": "others"}) == others


def test_what_an_engine_has_evicted_draws_no_request(serve):
    service = serve(data_parallel_size=2)
    first = where(service, prompt(1))
    where(service, prompt(2))
    assert where(service, prompt(1)) == first
    blocks = service._engines._router.index
    held = blocks.num_blocks(first)
    assert where(service, [*prompt(1)[:32], *range(100, 116), toy_process.EVICT]) == first
    assert blocks.num_blocks(first) > held
    # The prompt shares a beginning, so it goes where that is; all blocks of that engine are reported as evicted.
    submit(service, [toy_process.EVICT, *prompt(1)], max_tokens=3, sampling={"cache_salt": ""}).all()
    eventually(lambda: 0 in (blocks.num_blocks(0), blocks.num_blocks(1)))


def test_round_robin_is_blind(serve):
    service = serve(data_parallel_size=NUM, routing="round_robin")
    assert [where(service, prompt(1)) for _ in range(5)] == [0, 1, 2, 0, 1]


def test_a_killed_engine_loses_its_own_streams_alone_and_comes_back(serve, triton):
    service = serve(data_parallel_size=NUM)
    senders = start_streams(service, 2 * NUM)
    placed = engine_of(service)
    assert Counter(placed.values()) == dict.fromkeys(range(NUM), 2)
    engines = service._engines
    dead = engines.supervisors[1].engine
    os.kill(dead.pid, signal.SIGKILL)
    for number, sender in enumerate(senders):
        if placed[number] == 1:
            error = sender.all()[-1].error
            assert (error.code, "died (signal 9)" in error.message) == ("INTERNAL", True)
    assert sorted(engine_of(service).values()) == [0, 0, 2, 2]
    assert 1 not in engines._router.engines_up or engines.supervisors[1].engine is not None
    assert service.ready
    # Nothing waits for the engine that restarts, also not the prompts that it had.
    after = [where(service, [toy_process.SLOW, *prompt(10 + number)]) for number in range(2 * NUM)]
    assert 1 not in after or engines.supervisors[1].engine is not None
    eventually(lambda: engines.up == [0, 1, 2])
    assert engines.supervisors[1].engine is not dead
    eventually(lambda: triton.values["dflash:engine_ready", "dflash_0_0-1"] == 1)
    assert triton.values["dflash:engine_restarts_total",] == 1
    assert any("engine 1 of 3: the engine process died (signal 9)" in line for line in triton.lines)
    numbers = itertools.count(100)
    # It begins with an empty cache and no load, so it gets the next new text.
    eventually(lambda: where(service, prompt(next(numbers))) == 1)
    assert sorted(set(engine_of(service).values()) - {1}) == [0, 2]
    for number, sender in enumerate(senders):
        sender.cancelled = placed[number] != 1
    for number, sender in enumerate(senders):
        if placed[number] != 1:
            assert sender.all()[-1].error.code == "CANCELLED"


def test_a_request_that_did_not_reach_the_engine_that_dies_is_served_by_another(serve, monkeypatch):
    service = serve(data_parallel_size=2)
    engine = service._engines.supervisors[0].engine
    os.kill(engine.pid, signal.SIGSTOP)
    senders = [submit(service, prompt(number), max_tokens=4) for number in range(6)]
    eventually(lambda: set(engine_of(service).values()) == {0})
    held = engine_of(service)  # three, or fewer where the other engine answers one before the last is sent
    assert held
    os.kill(engine.pid, signal.SIGKILL)
    assert [sender.all()[-1].error for sender in senders] == [None] * 6
    assert len(engine._unconfirmed) == len(held)


def test_the_blocks_of_an_engine_that_came_back_are_those_that_it_has_now(serve, triton, tmp_path, monkeypatch):
    lives = tmp_path / "lives"
    lives.write_text("live\nlive\nlarge", encoding="utf-8")
    monkeypatch.setenv("TOY_ENGINE_LIVES", str(lives))
    service = serve(data_parallel_size=2)
    assert triton.values["dflash:cache_config_info", "dflash_0_0", "16", "16"] == 1
    os.kill(service._engines.supervisors[1].engine.pid, signal.SIGKILL)
    eventually(lambda: triton.values["dflash:cache_config_info", "dflash_0_0", "16", "107"] == 1)
    held = service._engines._router.index
    held.add(0, [bytes([number]) for number in range(200)])
    assert held.num_blocks(0) == 99


def test_a_hanging_engine_holds_up_no_other_while_it_is_noticed_and_ended(serve, triton):
    service = serve(data_parallel_size=2, engine_hang_timeout_s=1.5)
    senders = start_streams(service, 2)
    placed = engine_of(service)
    hanging, other = (senders[n] for n in sorted(placed, key=lambda n: placed[n] != 0))
    stopped = service._engines.supervisors[0].engine
    os.kill(stopped.pid, signal.SIGSTOP)
    slowest, ended = 0.0, False
    # A stopped process takes two seconds to end: it is asked, and then killed.
    while not ended or psutil.pid_exists(stopped.pid):
        began = time.monotonic()
        other.next()
        slowest = max(slowest, time.monotonic() - began)
        ended = ended or hanging.answered
    assert slowest < 1.5, "the other engine's stream waited for the end of this one"
    error = hanging.all()[-1].error
    assert (error.code, "the engine hangs" in error.message) == ("INTERNAL", True)
    eventually(lambda: service._engines.up == [0, 1])
    other.cancelled = True


def test_the_model_is_ready_while_one_engine_is_and_refuses_when_none_is(serve, triton):
    service = serve(data_parallel_size=2)
    for supervisor in service._engines.supervisors:
        assert service.ready
        os.kill(supervisor.engine.pid, signal.SIGKILL)
        eventually(lambda supervisor=supervisor: supervisor.engine is None or supervisor.num_restarts)
    (response,) = submit(service, "ab", max_tokens=2).all()
    assert response.error is None or response.error.code == "UNAVAILABLE"
    eventually(lambda: service._engines.up == [0, 1])
    assert submit(service, "ab", max_tokens=2).all()[0].error is None


def test_a_full_engine_is_left_out_and_a_full_fleet_refuses(serve):
    service = serve(data_parallel_size=2, max_num_seqs=toy_process.NUM_ROWS, max_queue_size=1)
    quiet = [toy_process.QUIET, *range(1, 64)]
    waiting = []
    salt = {"cache_salt": "one"}
    for _ in range(3):  # two wait for two rows, the third in the queue; the salt keeps them together
        waiting.append(submit(service, quiet, sampling=salt))
    eventually(lambda: sum(load.all_tenants for load in service._engines.queue_loads().values()) == 3)
    assert Counter(engine_of(service).values()).most_common(1)[0][1] == 3
    waiting += [submit(service, quiet, sampling=salt) for _ in range(3)]
    assert sorted(Counter(engine_of(service).values()).values()) == [3, 3]
    (refused,) = submit(service, "ab", max_tokens=2).all()
    assert refused.error.code == "UNAVAILABLE"
    assert "3 requests wait already for each of 2 engines" in refused.error.message
    for sender in waiting:
        sender.cancelled = True
    assert [sender.all()[0].error.code for sender in waiting] == ["CANCELLED"] * 6
    eventually(lambda: all(not load.all_tenants for load in service._engines.queue_loads().values()))
    assert submit(service, "ab", max_tokens=2).all()[0].error is None


def test_a_request_that_ends_leaves_no_load_with_the_router(serve):
    service = serve(data_parallel_size=2)
    broken, cancelled = (submit(service, [toy_process.QUIET, number], sampling={"n": 2}) for number in (1, 2))
    broken.unreachable = cancelled.cancelled = True
    refused = submit(service, [toy_process.REFUSE, 5])
    whole = submit(service, prompt(4), max_tokens=30, sampling={"n": 2})
    for sender in (broken, cancelled, refused, whole):
        sender.all()
    eventually(lambda: not service._requests)
    assert [service._engines._router.load(index) for index in range(2)] == [0, 0]


def test_closing_lets_requests_of_all_engines_finish_and_ends_all_processes(serve):
    before = psutil.Process().children()
    service = serve(data_parallel_size=NUM)
    children = [child for child in psutil.Process().children() if child not in before]
    assert len(children) == NUM
    senders = [submit(service, "ab" + "c" * n, max_tokens=3000, exclude_input_in_output=True) for n in range(6)]
    service.close()
    assert [len(joined(sender.all())) for sender in senders] == [3000] * 6
    assert not any(child.is_running() for child in children)


def test_an_engine_that_cannot_load_ends_the_others(serve, tmp_path: Path, monkeypatch):
    before = psutil.Process().children()
    lives = tmp_path / "lives"
    lives.write_text("live\nfail\nlive", encoding="utf-8")
    monkeypatch.setenv("TOY_ENGINE_LIVES", str(lives))
    with pytest.raises(EngineError, match="the toy cannot load"):
        serve(data_parallel_size=2)
    assert not [child for child in psutil.Process().children() if child not in before]


def test_gauges_are_by_engine_and_counters_of_the_model(serve, triton):
    service = serve(data_parallel_size=2)
    senders = start_streams(service, 2)
    running = "dflash:num_requests_running"
    eventually(lambda: [triton.values[running, f"dflash_0_0-{index}"] for index in range(2)] == [1, 1])
    eventually(lambda: triton.values["dflash:num_requests_in_flight", "dflash_0_0"] == 2)
    assert (running, "dflash_0_0") not in triton.values
    for sender in senders:
        sender.cancelled = True
        sender.all()
    assert "dflash: ready: 2 engines, each: toy, drafter the first; KV" in triton.lines


def test_engines_seed_requests_differently(serve):
    service = serve(data_parallel_size=NUM, seed=2**63 - 1)
    seeds = {supervisor._config.seed for supervisor in service._engines.supervisors}
    assert len(seeds) == NUM
    assert all(0 <= seed < 2**63 for seed in seeds)
    assert service._engines.supervisors[0]._config.seed == 2**63 - 1


def test_each_engine_sends_kv_at_a_port_of_its_own():
    first, third = (_of_engine(EngineConfig(kv_transfer_port=7000), index) for index in (0, 2))
    assert (first.kv_transfer_port, third.kv_transfer_port) == (7000, 7002)
    assert _of_engine(EngineConfig(), 2).kv_transfer_port == 0


def test_the_engine_with_the_least_room_bounds_requests():
    """A request may go to any of them."""
    engines = object.__new__(Replicas)
    made = [EngineReady(length, 5, blocks, 16, 300, "toy") for length, blocks in ((900, 10), (600, 90), (800, 5))]
    engines.supervisors = [
        SimpleNamespace(ready=ready, num_restarts=count, engine=None if count else object())
        for ready, count in zip(made, (2, 0, 5), strict=True)
    ]
    assert engines.ready is made[1]
    assert (len(engines), engines.num_kv_blocks, engines.num_restarts, engines.up) == (3, 10 + 90 + 5, 7, [1])


def test_the_router_knows_as_many_blocks_as_an_engines_device_and_tiers_hold():
    engines = object.__new__(Replicas)
    made = [EngineReady(900, 5, blocks, 16, 300, "toy", num_tier_blocks=more) for blocks, more in ((10, 7), (5, 100))]
    engines.supervisors = [SimpleNamespace(ready=ready) for ready in made]
    assert engines.most_blocks == 105
