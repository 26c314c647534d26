"""What must hold of the core's requests between two steps, checked by tests."""

from __future__ import annotations

from collections.abc import Mapping

from dflash_backend.core.grammar_queue import GrammarQueue
from dflash_backend.core.request import Request
from dflash_backend.core.scheduler import Scheduler
from dflash_backend.core.scheduler_config import SchedulerConfig


def check_queues(
    requests: Mapping[str, Request], scheduler: Scheduler, grammars: GrammarQueue, config: SchedulerConfig
) -> None:
    """Raise AssertionError when a request is in no queue or in two, or OWN or RETURN is broken."""
    compiling = {request_id: entry[0] for request_id, entry in grammars.waiting.items()}
    queues = (scheduler.running, scheduler.waiting, compiling)
    assert scheduler.running | scheduler.waiting | compiling == requests, "a request is in no queue"
    assert sum(map(len, queues)) == len(requests), "a request is in two queues"
    scheduler.queue.check()
    assert len(scheduler.running) <= config.max_num_seqs, "more requests run than max_num_seqs"
    for request in scheduler.waiting.values():
        assert not request.block_ids, f"{request.request_id} waits and holds blocks"
        assert request.num_computed == 0, f"{request.request_id} waits and has computed positions"
    for request in scheduler.running.values():
        assert request.num_computed < request.num_tokens, f"{request.request_id} has computed its last token"
    scheduler.kv.check(scheduler.running.values())
