"""Which rows of a plan read the beginning of their KV together. The toy worker checks each plan: one prefix for a
group, of final blocks that all of it hold."""

from __future__ import annotations

import random

from dflash_backend.core.kv.manager import share_prefixes
from dflash_backend.core.plan import ScheduledRequest, SchedulerOutput, SharedPrefix
from dflash_backend.core.request import Request
from dflash_backend.core.scheduler_config import SchedulerConfig
from tests.core.toy_engine import Engine, make_config, make_request

SYSTEM, OTHER = list(range(30, 62)), list(range(70, 98))
CONFIG = {"min_shared_positions": 12, "num_blocks": 256, "max_num_seqs": 16}


def sharing(**changes: object) -> tuple[Engine, list[SchedulerOutput]]:
    """An engine, and the plans that it makes."""
    engine = Engine(make_config(**(CONFIG | changes)), lag=2)
    plans: list[SchedulerOutput] = []
    submit = engine.worker.submit
    engine.worker.submit = lambda plan: (plans.append(plan), submit(plan))[1]  # type: ignore[method-assign]
    return engine, plans


def ask(engine: Engine, prompt: list[int], count: int, first: int = 0) -> None:
    """Requests for a prompt, each with an end of its own; the first has published it before the others come."""
    for i in range(count):
        engine.add(make_request(f"r{first + i}", [*prompt, 100 + i], max_tokens=60, seed=i))
        engine.steps(3)


def groups(plan: SchedulerOutput) -> list[tuple[set[str], int]]:
    return [
        ({row.request_id for row in plan.rows[each.first_row :][: each.num_rows]}, each.num_blocks)
        for each in plan.shared_prefixes
    ]


def test_four_rows_with_the_same_blocks_share_all_of_them() -> None:
    engine, plans = sharing()
    ask(engine, SYSTEM, 3)
    assert not any(plan.shared_prefixes for plan in plans)
    ask(engine, SYSTEM, 1, first=3)
    assert groups(plans[-1]) == [({"r0", "r1", "r2", "r3"}, len(SYSTEM) // 4)]


def test_rows_that_share_less_than_the_bound_do_not() -> None:
    engine, plans = sharing(min_shared_positions=len(SYSTEM) + 1)
    ask(engine, SYSTEM, 5)
    assert not any(plan.shared_prefixes for plan in plans)


def test_without_a_bound_nothing_is_shared() -> None:
    engine, plans = sharing(min_shared_positions=0)
    ask(engine, SYSTEM, 5)
    assert not any(plan.shared_prefixes for plan in plans)


def test_rows_that_save_too_little_do_not_share() -> None:
    """Two rows a tile: of 8 rows with 32 positions 128 are saved, against twice 4 * 8 * 4 for four queries each. With a
    little more for a query it does not pay, nor where each row is a tile."""
    for per_tile, cost, shares in [(8, 1.9, True), (8, 2.1, False), (4, 0.1, False)]:
        engine, plans = sharing(shared_queries_per_tile=per_tile, positions_per_shared_query=cost)
        ask(engine, SYSTEM, 8)
        assert bool(plans[-1].shared_prefixes) == shares


def test_groups_are_neighbours_and_the_one_that_saves_most_comes_first() -> None:
    engine, plans = sharing()
    for i in range(4):
        ask(engine, OTHER, 1, first=2 * i)
        ask(engine, SYSTEM, 1, first=2 * i + 1)
    engine.add(make_request("alone", [1, 2, 3], max_tokens=60))
    engine.steps(3)
    assert groups(plans[-1]) == [({"r1", "r3", "r5", "r7"}, 8), ({"r0", "r2", "r4", "r6"}, 7)]
    assert plans[-1].rows[-1].request_id == "alone"


def test_what_all_rows_of_a_group_share_counts_and_not_what_some_do() -> None:
    engine, plans = sharing()
    ask(engine, SYSTEM, 3)
    ask(engine, SYSTEM[:18], 1, first=3)
    assert groups(plans[-1]) == [({"r0", "r1", "r2", "r3"}, 4)]


def test_no_group_beside_a_chunk_of_a_prompt() -> None:
    engine, plans = sharing()
    ask(engine, SYSTEM, 4)
    assert plans[-1].shared_prefixes
    engine.add(make_request("long", [*OTHER, *OTHER], max_tokens=4))
    engine.step()
    assert any(row.request_id == "long" for row in plans[-1].rows)
    assert not plans[-1].shared_prefixes


def test_a_prompt_that_two_requests_computed_at_once_is_shared_up_to_where_their_blocks_part() -> None:
    """Their blocks are the same from the third on, as where the second was computed twice and the third was not."""
    config: SchedulerConfig = make_config(**CONFIG)
    running, rows = {}, []
    for i in range(4):
        request = Request.from_generation_request(make_request(f"r{i}", SYSTEM), config, 0, 0.0)
        request.block_ids, request.num_computed = [5, 6 + 10 * (i == 3), 7, 8, 9, 20 + i], 20
        running[request.request_id] = request
        rows.append(engine_row(request))
    assert share_prefixes(rows, running, config) == (rows, [])
    for request in running.values():
        request.block_ids[1] = 6
    assert share_prefixes(rows, running, config) == (rows, [SharedPrefix(0, 4, 5)])
    running["r2"].num_computed = 19
    assert share_prefixes(rows, running, config) == (rows, [SharedPrefix(0, 4, 4)])


def engine_row(request: Request) -> ScheduledRequest:
    return ScheduledRequest(request.request_id, request.num_computed, 1, 0, True, 0, [])


def test_random_traffic_over_two_prompts_is_answered_as_without() -> None:
    for seed in range(6):
        outputs = []
        for bound in (0, 8):
            rng = random.Random(seed)
            engine, plans = sharing(min_shared_positions=bound, num_blocks=rng.choice([60, 256]))
            for i in range(14):
                stem = rng.choice([SYSTEM, OTHER])[: rng.randint(12, 32)]
                engine.add(make_request(f"r{i}", [*stem, rng.randrange(20)], max_tokens=rng.randint(8, 40), seed=i))
                engine.steps(rng.randint(0, 3))
            engine.run()
            outputs.append({name: output.token_ids for name, output in engine.outputs.items()})
        assert outputs[0] == outputs[1]
        assert any(plan.shared_prefixes for plan in plans)
