"""Clients of the OpenAI front end that harm, before a real server: `checks/abusive_clients.py` and
`checks/key_fairness.py` with fewer of them."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest

from checks.abusive_clients import KEYS as ABUSER_KEYS
from checks.abusive_clients import OPTIONS, SETTINGS, half_open, leavers, slow_readers
from checks.flooded import ALLOWED_RATIO
from checks.front_end import RunningFrontEnd, running_front_end
from checks.key_fairness import FLOOD, measure

FLOOD_CONCURRENCY = 4

pytestmark = pytest.mark.server


@pytest.fixture(scope="module")
def front_end() -> Iterator[RunningFrontEnd]:
    keys = f"{ABUSER_KEYS}\nflood {FLOOD} max_concurrency={FLOOD_CONCURRENCY}"
    with running_front_end(SETTINGS, OPTIONS, keys) as started:
        yield started


def test_clients_that_leave_in_mid_stream_cost_nothing_that_stays(front_end: RunningFrontEnd) -> None:
    outcome = asyncio.run(leavers(front_end, 80))
    assert outcome.kept, outcome
    assert outcome.first_token_s


def test_clients_that_do_not_read_harm_no_other_key(front_end: RunningFrontEnd) -> None:
    outcome = asyncio.run(slow_readers(front_end, 20, 3))
    assert outcome.kept, outcome


@pytest.mark.slow
def test_connections_on_which_no_request_comes_are_closed(front_end: RunningFrontEnd) -> None:
    outcome = asyncio.run(half_open(front_end, 60))
    assert outcome.kept, outcome
    assert outcome.num_closed == 60


@pytest.mark.slow
def test_a_key_that_floods_does_not_keep_another_waiting(front_end: RunningFrontEnd) -> None:
    found = asyncio.run(measure(front_end, num_streams=24, num_questions=5, num_running=FLOOD_CONCURRENCY))
    # The promise is one of an idle machine, and `checks.key_fairness` holds to it. Here other tests run beside, which
    # slow the steps of full rows most. Without limits the other key waits for answers of 400 tokens.
    assert found.ratio <= 4 * ALLOWED_RATIO, found
    assert found.num_refused > 0
