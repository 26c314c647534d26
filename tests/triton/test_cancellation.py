"""How often each request is asked about, by a clock of the test."""

from __future__ import annotations

import pytest

from dflash_backend.triton.cancellation import (
    ASK_ALL_S,
    CHECKS_A_TURN,
    MAX_NOTICE_S,
    NOTICE_S,
    TICK_S,
    CancellationWatch,
)
from dflash_backend.triton.responder import SendFailed


class Client:
    """Stands in for a `Responder`: counts how often it is asked whether its client has left."""

    def __init__(self) -> None:
        self.asked = 0
        self.left = False
        self.unreachable = False

    def is_cancelled(self) -> bool:
        self.asked += 1
        if self.unreachable:
            raise SendFailed("Triton could not be asked")
        return self.left


def watch(count: int) -> tuple[CancellationWatch, dict[str, Client]]:
    watched, clients = CancellationWatch(), {str(n): Client() for n in range(count)}
    for request_id, client in clients.items():
        watched.add(request_id, client)
    # The first look comes after the silence before.
    turn(watched, clients, 100.0)
    for client in clients.values():
        client.asked = 0
    return watched, clients


def turn(watched: CancellationWatch, clients: dict[str, Client], now: float) -> list[str]:
    """All that is asked at `now`."""
    gone = watched.ask(now, clients)[0]
    while watched.timeout_s() == 0.0:
        gone += watched.ask(now, clients)[0]
    return gone


@pytest.mark.parametrize(("count", "within_s"), [(1, NOTICE_S), (64, NOTICE_S), (100, 0.32), (1024, MAX_NOTICE_S)])
def test_each_request_is_asked_about_in_time_and_no_more_often(count, within_s):
    watched, clients = watch(count)
    rounds, ticks = 4, round(4 * within_s / TICK_S)
    for tick in range(1, ticks + 1):
        turn(watched, clients, 100.0 + tick * TICK_S)
    asked = [client.asked for client in clients.values()]
    assert rounds - 1 <= min(asked) <= max(asked) <= rounds + 1


def test_the_one_whose_client_has_left_is_found_and_not_asked_about_again():
    watched, clients = watch(64)
    clients["40"].left = True
    found = [gone for tick in range(1, 9) for gone in turn(watched, clients, 100.0 + tick * TICK_S)]
    assert found == ["40"]


def test_one_that_triton_cannot_be_asked_about_is_told_with_the_reason_and_the_others_are_asked():
    watched, clients = watch(3)
    clients["1"].unreachable = True
    answers = [watched.ask(101.0 + tick * NOTICE_S, clients) for tick in range(3)]
    assert [(request_id, str(error)) for _, failed in answers for request_id, error in failed] == [
        ("1", "Triton could not be asked")
    ]
    assert clients["1"].asked == 1
    assert min(clients["0"].asked, clients["2"].asked) > 1


def test_a_request_that_has_ended_is_not_asked_about():
    watched, clients = watch(3)
    ended = clients.pop("1")
    for tick in range(1, 20):
        turn(watched, clients, 100.0 + tick * TICK_S)
    assert ended.asked == 0
    assert min(client.asked for client in clients.values()) > 0


@pytest.mark.parametrize(("lasts_s", "pause_s"), [(0.02, 0.03), (0.18, 0.06), (0.02, 1.0)])
def test_requests_that_come_one_after_the_other_do_not_pile_up(lasts_s, pause_s):
    """Each ends before it is asked about, and with none in flight nothing is due."""
    watched, now = CancellationWatch(), 100.0
    for n in range(500):
        client = Client()
        watched.add(str(n), client)
        for step in range(4):
            watched.ask(now + step / 4 * lasts_s, {str(n): client})
        now += lasts_s
        for _ in range(round(pause_s / 0.25) + 1):
            watched.ask(now, {})
            now += min(pause_s, 0.25)
        assert len(watched._watched) <= 1


def test_outputs_get_their_turn_between_many_questions():
    watched, clients = watch(1024)
    watched.ask(200.0, clients)
    assert sum(client.asked for client in clients.values()) == CHECKS_A_TURN
    assert watched.timeout_s() == 0.0


def test_after_one_that_left_all_others_are_asked_about_soon():
    watched, clients = watch(1024)
    clients["0"].left = True
    found_at = next(at for tick in range(1, 12) if turn(watched, clients, at := 100.0 + tick * TICK_S))
    for client in clients.values():
        client.asked = 0
        client.left = True
    found = turn(watched, clients, found_at + ASK_ALL_S)
    assert sorted(found, key=int) == [str(n) for n in range(1, 1024)]
