"""The hit rate that a workload could have at best: a prefix cache without a bound, asked in the order of sending.

A model of its own, on token ids: nothing of the engine's prefix cache is used, so that neither's mistakes hide the
other's. With a `capacity` the cache forgets the block that was used longest ago.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from load_tests.reference import Expected


@dataclass(frozen=True, slots=True)
class IdealHits:
    """Over all requests: tokens looked up, tokens found, and the blocks that were in the cache at the end."""

    queries: int
    hits: int
    num_blocks: int

    @property
    def rate(self) -> float:
        """0 to 1; 0 when nothing was asked."""
        return self.hits / self.queries if self.queries else 0.0


class _Names:
    """A number for each chain of blocks from the start of a sequence, the same for the same tokens."""

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._numbers: dict[tuple[int, tuple[int, ...]], int] = {}

    def chain(self, token_ids: Sequence[int]) -> list[int]:
        """The numbers of the full blocks."""
        chain: list[int] = []
        parent = 0
        for start in range(0, len(token_ids) - self._block_size + 1, self._block_size):
            block = tuple(token_ids[start : start + self._block_size])
            parent = self._numbers.setdefault((parent, block), len(self._numbers) + 1)
            chain.append(parent)
        return chain


def ideal_hits(
    asked: Iterable[tuple[str, str]],
    answers: Mapping[str, Expected],
    block_size: int,
    capacity: int | None = None,
) -> IdealHits:
    """`asked` is (question, salt) of each request in the order of sending. The last token of a prompt at least is
    always computed, and the last token of an answer never is; what is computed of both is found by those who come
    later."""
    names = _Names(block_size)
    prompts = {id_: names.chain(answer.prompt_ids[:-1]) for id_, answer in answers.items()}
    wholes = {id_: names.chain((*answer.prompt_ids, *answer.token_ids)[:-1]) for id_, answer in answers.items()}
    cached: OrderedDict[tuple[str, int], None] = OrderedDict()
    queries = hits = 0
    for question, salt in asked:
        queries += len(answers[question].prompt_ids)
        for block in prompts[question]:
            if (salt, block) not in cached:
                break
            hits += block_size
        # Later blocks are of no use without the earlier ones, so those are used last and go last.
        for block in reversed(wholes[question]):
            cached[salt, block] = None
            cached.move_to_end((salt, block))
        while capacity is not None and len(cached) > capacity:
            cached.popitem(last=False)
    return IdealHits(queries, hits, len(cached))
