"""Which rows of a step read the beginning of their KV together: decode rows whose block tables begin alike.

Two requests hold the same block only where one of them found it in the prefix cache, whose blocks follow from all
tokens before them, so one block at the right place says that a prefix is shared. (Not all blocks before it need be the
same ones: a prompt that two requests computed at the same time is there twice.)
"""

from __future__ import annotations

import bisect
from collections.abc import Mapping, Sequence

from dflash_backend.core.plan import MAX_SHARED_PREFIXES, MIN_SHARING_ROWS, ScheduledRequest, SharedPrefix
from dflash_backend.core.request import Request
from dflash_backend.core.scheduler_config import SchedulerConfig


def share_prefixes(
    rows: list[ScheduledRequest], running: Mapping[str, Request], config: SchedulerConfig
) -> tuple[list[ScheduledRequest], list[SharedPrefix]]:
    """The rows of a step in an order in which those that share a prefix of at least `config.min_shared_positions`
    positions are neighbours, and these groups: those that save most, each of `MIN_SHARING_ROWS` rows at least. Where
    there is none the rows are in the order given."""
    place = -(-config.min_shared_positions // config.block_size) - 1
    by_block: dict[int, list[ScheduledRequest]] = {}
    for row in rows:
        blocks = running[row.request_id].block_ids
        if row.sample and row.num_new == 1 and place < len(blocks):
            by_block.setdefault(blocks[place], []).append(row)
    found = []
    for group in by_block.values():
        if len(group) >= MIN_SHARING_ROWS:
            num_blocks = _common([running[row.request_id] for row in group], config.block_size)
            if num_blocks > place and _pays(group, num_blocks * config.block_size, config):
                found.append((num_blocks, group))
    if not found:
        return rows, []
    found.sort(key=lambda each: each[0] * (len(each[1]) - 1), reverse=True)
    ordered: list[ScheduledRequest] = []
    prefixes = []
    for num_blocks, group in found[:MAX_SHARED_PREFIXES]:
        prefixes.append(SharedPrefix(len(ordered), len(group), num_blocks))
        ordered += group
    names = {row.request_id for row in ordered}
    return ordered + [row for row in rows if row.request_id not in names], prefixes


def _pays(group: Sequence[ScheduledRequest], num_positions: int, config: SchedulerConfig) -> bool:
    """Whether reading `num_positions` once for each tile of queries, and not for each row, saves more than twice what
    writing and reading partial results costs."""
    num_queries = sum(row.num_new + row.num_draft for row in group)
    num_tiles = -(-num_queries // config.shared_queries_per_tile)
    saved = (len(group) - num_tiles) * num_positions
    return saved > 2 * num_queries * config.positions_per_shared_query


def _common(requests: Sequence[Request], block_size: int) -> int:
    """How many of the first blocks all of `requests` have in common, and have computed."""
    first = requests[0].block_ids
    most = min(request.num_computed // block_size for request in requests)
    for request in requests[1:]:
        blocks = request.block_ids
        if first[:most] != blocks[:most]:
            most = bisect.bisect_left(range(most), True, key=lambda i: first[: i + 1] != blocks[: i + 1])
    return most
