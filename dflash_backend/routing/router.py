"""Chooses the engine of each request: where most of its prompt is cached, weighed against the engines' loads.

The rule: each engine that is up has a cost in tokens, and the lowest wins.

    cost = prompt tokens that are not cached there + unfinished work there - STICKY_TOKENS if it served the salt last

Unfinished work is the uncached prompt tokens of requests without a first token, and REQUEST_TOKENS for each unfinished
request. Of equal costs the engine to which fewer uncached tokens were sent wins, then the first. What is cached is what
was sent there, corrected by what the engine reports. Nothing is random: the same calls give the same engines.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Iterable, Sequence
from typing import NamedTuple

from dflash_backend.routing.block_index import BlockIndex

# What a request that decodes costs the next one, in prompt tokens. More would move requests off their prefix, to be
# computed and kept twice: in a simulated fleet 256 lose a tenth of the hits and no wait is shorter.
REQUEST_TOKENS = 32
# How many uncached tokens the engine that served a `cache_salt` last may have more, and still get its next request.
STICKY_TOKENS = 512
# Salts whose engine is remembered, the latest.
MAX_SALTS = 65536
# The load of an engine that is down: more than any other's.
_DOWN = 1 << 62


class NoEngineError(Exception):
    """No engine takes the request now. The message is for clients."""


class Route(NamedTuple):
    """Where a request goes. The caller gives it back with `prefilled` and `finished`."""

    engine: int
    # Of the engine's process: what an earlier one had to do is no load of its successor.
    start: int
    num_cached_tokens: int
    num_new_tokens: int
    # That the request counts as while it is unfinished, in tokens, beside its prompt.
    num_open_tokens: int = REQUEST_TOKENS


class Router:
    """The engines behind one model: what they have cached, their loads, and which of them are up. For one thread."""

    def __init__(self, num_engines: int, block_size: int, blocks_per_engine: int) -> None:
        """block_size: tokens of a KV block. blocks_per_engine: the blocks of an engine's KV cache and tiers. All
        engines are down until `set_up`. Raises `ValueError` for a number below 1."""
        numbers = {"num_engines": num_engines, "block_size": block_size, "blocks_per_engine": blocks_per_engine}
        for name, number in numbers.items():
            if number < 1:
                raise ValueError(f"{name} is {number}; it must be at least 1")
        self._block_size = block_size
        self._index = BlockIndex(num_engines, blocks_per_engine)
        self._up: list[int] = []
        self._up_mask = 0
        self._starts = [0] * num_engines
        self._load = [_DOWN] * num_engines
        self._sent_tokens = [0] * num_engines
        self._salts: OrderedDict[str, int] = OrderedDict()

    @property
    def index(self) -> BlockIndex:
        """What the engines have cached, as far as the router knows."""
        return self._index

    @property
    def engines_up(self) -> Sequence[int]:
        """The engines that get requests."""
        return self._up

    def load(self, engine: int) -> int:
        """The engine's unfinished work, in tokens; 0 when it is down."""
        return self._load[engine] if self._up_mask >> engine & 1 else 0

    def set_up(self, engine: int) -> None:
        """A new process of this engine is ready: with nothing cached and no load."""
        self.set_down(engine)
        # Equal costs would otherwise bring it all requests until it has had as many as the others.
        if self._up:
            self._sent_tokens[engine] = min(self._sent_tokens[other] for other in self._up)
        self._load[engine] = 0
        self._set_mask(self._up_mask | 1 << engine)

    def resize(self, blocks_per_engine: int) -> None:
        """Engines were started again and have this many blocks now, the largest of them, at least 1."""
        self._index.resize(blocks_per_engine)

    def set_down(self, engine: int) -> None:
        """The engine has died or restarts: it gets no requests, and what it had is gone."""
        self._set_mask(self._up_mask & ~(1 << engine))
        self._starts[engine] += 1
        self._load[engine] = _DOWN
        self._index.clear(engine)

    def route(
        self,
        hashes: Sequence[bytes],
        num_tokens: int,
        cache_salt: str = "",
        num_completions: int = 1,
        without: Collection[int] = (),
    ) -> Route:
        """Choose the engine of a request, and count it as sent there.

        hashes: of the prompt's full blocks, in order. num_tokens: of the prompt. num_completions: of the request, which
        decode at the same time. without: engines that cannot take it. Raises `NoEngineError` when no other is up.
        """
        up, mask, loads = self._up, self._up_mask, self._load
        if without:
            up = [engine for engine in up if engine not in without]
            mask = sum(1 << engine for engine in up)
            loads = [load if mask >> engine & 1 else _DOWN for engine, load in enumerate(loads)]
        if not up:
            raise NoEngineError("no engine of the model takes requests; try again in a few seconds")
        last = self._salts.get(cache_salt, -1) if cache_salt else -1
        prefixes = self._index.cached_prefixes(hashes, mask)
        engine, num_blocks = self._cheapest(prefixes, last, up, loads)
        num_cached = min(num_blocks * self._block_size, num_tokens)
        num_open = REQUEST_TOKENS * num_completions
        route = Route(engine, self._starts[engine], num_cached, num_tokens - num_cached, num_open)
        self._load[engine] += route.num_new_tokens + num_open
        self._sent_tokens[engine] += route.num_new_tokens
        self._index.add(engine, hashes)
        if cache_salt:
            self._remember(cache_salt, engine)
        return route

    def prefilled(self, route: Route) -> None:
        """The request has its first token: its prompt is no load any more. Once for each route, before `finished`."""
        self._subtract(route, route.num_new_tokens)

    def finished(self, route: Route, prefilled: bool = True) -> None:
        """The request has ended, or was aborted. prefilled: whether `prefilled` was called for it."""
        self._subtract(route, route.num_open_tokens + (0 if prefilled else route.num_new_tokens))

    def stored(self, engine: int, hashes: Sequence[bytes]) -> None:
        """The engine reports blocks that are in its prefix cache now. One that is down reports nothing."""
        if self._up_mask >> engine & 1:
            self._index.add(engine, hashes)

    def removed(self, engine: int, hashes: Iterable[bytes]) -> None:
        """The engine reports blocks that are no longer in its prefix cache."""
        self._index.remove(engine, hashes)

    def cleared(self, engine: int) -> None:
        """The engine reports that its prefix cache is empty."""
        self._index.clear(engine)

    def _cheapest(
        self, prefixes: list[tuple[int, int]], last: int, up: Sequence[int], loads: Sequence[int]
    ) -> tuple[int, int]:
        """The engine of lowest cost of those that are `up`, and the blocks that it has. Costs leave out the prompt's
        tokens, which are the same everywhere. `last`: the engine that served the salt last, or -1."""
        sent = self._sent_tokens
        # Without the cache: the lowest load. One pass over all engines, in C.
        cost = min(loads)
        engine = min([engine for engine in up if loads[engine] == cost], key=sent.__getitem__)
        cheapest = (cost, sent[engine], engine, 0)
        of_last = 0
        for num_blocks, engines in prefixes:
            gain = num_blocks * self._block_size
            if last >= 0 and engines >> last & 1:
                of_last = num_blocks
            while engines:
                bit = engines & -engines
                engines ^= bit
                engine = bit.bit_length() - 1
                if loads[engine] - gain <= cheapest[0]:
                    cheapest = min(cheapest, (loads[engine] - gain, sent[engine], engine, num_blocks))
        if last >= 0:
            cost = loads[last] - of_last * self._block_size - STICKY_TOKENS
            cheapest = min(cheapest, (cost, sent[last], last, of_last))
        return cheapest[2:]

    def _subtract(self, route: Route, num_tokens: int) -> None:
        if route.start == self._starts[route.engine]:
            self._load[route.engine] -= num_tokens

    def _remember(self, cache_salt: str, engine: int) -> None:
        self._salts[cache_salt] = engine
        self._salts.move_to_end(cache_salt)
        if len(self._salts) > MAX_SALTS:
            self._salts.popitem(last=False)

    def _set_mask(self, mask: int) -> None:
        self._up_mask = mask
        self._up = [engine for engine in range(len(self._load)) if mask >> engine & 1]
