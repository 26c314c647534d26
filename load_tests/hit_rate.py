"""The best hit rate that a workload allows: that of an unbounded prefix cache, asked in the order of sending.

It works on token ids and shares no code with the engine's prefix cache, so that neither can hide the other's mistakes.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from load_tests.expected_answers import ExpectedAnswer


@dataclass(frozen=True, slots=True)
class IdealHits:
    """Over all requests: tokens looked up, and tokens found."""

    queries: int
    hits: int

    @property
    def rate(self) -> float:
        """0 to 1; 0 when nothing was asked."""
        return self.hits / self.queries if self.queries else 0.0


def ideal_hits(
    asked: Iterable[tuple[str, str]],
    answers: Mapping[str, ExpectedAnswer],
    block_size: int,
    capacity: int | None = None,
) -> IdealHits:
    """`asked` is (question, salt) of each request in the order of sending. With a `capacity` in blocks the cache evicts
    the block that was used longest ago. At least the last token of a prompt is always computed, and the last token of
    an answer never is; later requests find what is computed of both."""
    numbers: dict[tuple[int, tuple[int, ...]], int] = {}

    def chain(token_ids: Sequence[int]) -> list[int]:
        """A number for each full block and what is before it; the same for the same tokens."""
        blocks = [0]
        for start in range(0, len(token_ids) - block_size + 1, block_size):
            key = (blocks[-1], tuple(token_ids[start : start + block_size]))
            blocks.append(numbers.setdefault(key, len(numbers) + 1))
        return blocks[1:]

    prompts = {id_: chain(answer.prompt_ids[:-1]) for id_, answer in answers.items()}
    wholes = {id_: chain((*answer.prompt_ids, *answer.token_ids)[:-1]) for id_, answer in answers.items()}
    cached: OrderedDict[tuple[str, int], None] = OrderedDict()
    queries = hits = 0
    for question, salt in asked:
        queries += len(answers[question].prompt_ids)
        for block in prompts[question]:
            if (salt, block) not in cached:
                break
            hits += block_size
        # Later blocks are of no use without the earlier ones, so those count as used last and are evicted last.
        for block in reversed(wholes[question]):
            cached[salt, block] = None
            cached.move_to_end((salt, block))
        while capacity is not None and len(cached) > capacity:
            cached.popitem(last=False)
    return IdealHits(queries, hits)
