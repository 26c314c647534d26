"""The router of replicas: where a request goes, and what it never does."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from dflash_backend.routing import router as router_module
from dflash_backend.routing.block_index import BlockIndex
from dflash_backend.routing.router import REQUEST_TOKENS, STICKY_TOKENS, NoEngineError, Route, Router

BLOCK = 16
CAPACITY = 100


def text(name: str, num_blocks: int, shared: str = "", num_shared: int = 0) -> list[bytes]:
    """The hashes of a prompt that begins with `num_shared` blocks of the text `shared`."""
    beginning = [f"{shared}{i}".encode() for i in range(num_shared)]
    return beginning + [f"{name}{i}".encode() for i in range(num_shared, num_blocks)]


def make_router(num_engines: int = 3) -> Router:
    router = Router(num_engines, BLOCK, CAPACITY)
    for engine in range(num_engines):
        router.set_up(engine)
    return router


def send(router: Router, hashes: list[bytes], cache_salt: str = "") -> Route:
    return router.route(hashes, len(hashes) * BLOCK, cache_salt)


def serve(router: Router, hashes: list[bytes], cache_salt: str = "") -> Route:
    """A request that is finished before the next one comes."""
    route = send(router, hashes, cache_salt)
    router.prefilled(route)
    router.finished(route)
    return route


def test_a_request_goes_where_most_of_its_prompt_is_cached() -> None:
    router = make_router()
    serve(router, text("a", 10))
    longer = serve(router, text("b", 10))
    router.stored(2, text("b", 4))
    assert serve(router, text("c", 10, "b", 8))[:4] == (longer.engine, longer.start, 8 * BLOCK, 2 * BLOCK)


def test_prompts_that_share_nothing_are_spread() -> None:
    router = make_router()
    assert [serve(router, text(name, 5)).engine for name in "abcdef"] == [0, 1, 2, 0, 1, 2]


def test_load_outweighs_a_cached_prefix_when_it_costs_more() -> None:
    router = make_router(2)
    home = serve(router, text("a", 20)).engine
    engines = [send(router, text("a", 20)).engine for _ in range(20 * BLOCK // REQUEST_TOKENS + 1)]
    assert engines == [home] * (len(engines) - 1) + [1 - home]


def test_load_is_the_prompt_until_the_first_token_and_the_request_until_its_end() -> None:
    router = make_router(1)
    route = send(router, text("a", 5))
    loads = [router.load(0)]
    router.prefilled(route)
    loads.append(router.load(0))
    router.finished(route)
    aborted = send(router, text("b", 5))
    router.finished(aborted, prefilled=False)
    assert [*loads, router.load(0)] == [5 * BLOCK + REQUEST_TOKENS, REQUEST_TOKENS, 0]


def test_removed_blocks_are_not_counted_and_cleared_ones_neither() -> None:
    router = make_router(1)
    serve(router, text("a", 10))
    router.removed(0, text("a", 10)[6:])
    assert send(router, text("a", 10)).num_cached_tokens == 6 * BLOCK
    router.cleared(0)
    assert send(router, text("a", 10)).num_cached_tokens == 0


def test_a_salt_stays_with_its_engine_until_that_costs_too_much() -> None:
    router = make_router()
    home = serve(router, text("a", 2), "tenant").engine
    names = iter("bcdefghijklmnop")
    assert {serve(router, text(next(names), 2), "tenant").engine for _ in range(5)} == {home}
    cost = 10 * BLOCK + REQUEST_TOKENS
    engines = [send(router, text(next(names), 10), "tenant").engine for _ in range(STICKY_TOKENS // cost + 2)]
    assert engines[:-1] == [home] * (len(engines) - 1)
    assert engines[-1] != home


def test_a_salt_leaves_an_engine_that_is_down() -> None:
    router = make_router(2)
    home = serve(router, text("a", 2), "tenant").engine
    router.set_down(home)
    assert serve(router, text("a", 2), "tenant").engine == 1 - home


def test_salts_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(router_module, "MAX_SALTS", 3)
    router = make_router()
    for i in range(10):
        serve(router, text("a", 1), f"tenant {i}")
    assert list(router._salts) == ["tenant 7", "tenant 8", "tenant 9"]


def test_a_new_process_has_neither_blocks_nor_load_and_late_ends_do_not_count() -> None:
    router = make_router(2)
    late = send(router, text("a", 10))
    router.set_down(late.engine)
    router.stored(late.engine, text("a", 10))
    router.set_up(late.engine)
    router.prefilled(late)
    router.finished(late)
    assert router.load(late.engine) == 0
    assert router.index.num_blocks(late.engine) == 0


def test_a_new_process_does_not_get_all_requests() -> None:
    router = make_router(2)
    router.set_down(1)
    for i in range(20):
        serve(router, text(f"t{i}.", 5))
    router.set_up(1)
    assert {serve(router, text(f"u{i}.", 5)).engine for i in range(4)} == {0, 1}


def test_without_an_engine_the_error_says_what_to_do() -> None:
    with pytest.raises(NoEngineError, match="try again in a few seconds"):
        send(Router(2, BLOCK, CAPACITY), text("a", 1))


@pytest.mark.parametrize("numbers", [(0, 16, 1), (1, 0, 1), (1, 16, 0)])
def test_sizes_below_one_are_refused(numbers: tuple[int, int, int]) -> None:
    with pytest.raises(ValueError, match="must be at least 1"):
        Router(*numbers)


def test_a_full_index_removes_what_was_longest_unused_from_its_end() -> None:
    index = BlockIndex(1, 10)
    index.add(0, text("a", 6))
    index.add(0, text("b", 4))
    index.add(0, text("a", 3))
    index.add(0, text("c", 4))
    assert index.cached_prefixes(text("a", 6), 1) == [(3, 1)]
    assert index.cached_prefixes(text("b", 4), 1) == [(3, 1)]
    assert index.cached_prefixes(text("c", 4), 1) == [(4, 1)]


def test_an_index_keeps_as_many_as_the_engines_have_now() -> None:
    index = BlockIndex(1, 10)
    index.resize(12)
    index.add(0, text("a", 20))
    assert index.num_blocks(0) == 12
    index.resize(5)
    index.add(0, text("b", 1))
    assert index.num_blocks(0) == 5


class RouterMachine(RuleBasedStateMachine):
    """Any order of requests, reports, deaths and starts; a second router gets the same calls."""

    names = st.sampled_from("abcd")
    engines = st.integers(0, 4)
    lengths = st.integers(0, 60)

    @initialize(num_engines=st.integers(1, 5))
    def start(self, num_engines: int) -> None:
        self.num_engines = num_engines
        self.routers = [Router(num_engines, BLOCK, CAPACITY) for _ in range(2)]
        self.up: set[int] = set()
        self.blocks: list[set[bytes]] = [set() for _ in range(num_engines)]
        self.running: list[tuple[Route, bool]] = []

    @rule(engine=engines)
    def up_again(self, engine: int) -> None:
        self._change(engine, up=True)

    @rule(engine=engines)
    def dies(self, engine: int) -> None:
        self._change(engine, up=False)

    def _change(self, engine: int, up: bool) -> None:
        engine %= self.num_engines
        for router in self.routers:
            (router.set_up if up else router.set_down)(engine)
        (self.up.add if up else self.up.discard)(engine)
        self.blocks[engine].clear()
        self.running = [entry for entry in self.running if entry[0].engine != engine]

    @precondition(lambda self: self.up)
    @rule(name=names, shared=names, length=lengths, num_shared=lengths, salt=st.sampled_from(["", "x", "y"]))
    def request(self, name: str, shared: str, length: int, num_shared: int, salt: str) -> None:
        hashes = text(name, length, shared, min(num_shared, length))
        prefixes = self.routers[0].index.cached_prefixes(hashes, sum(1 << engine for engine in self.up))
        route, again = (send(router, hashes, salt) for router in self.routers)
        assert route == again
        assert route.engine in self.up
        held = {engine: n for n, mask in prefixes for engine in range(self.num_engines) if mask >> engine & 1}
        assert route.num_cached_tokens == held.get(route.engine, 0) * BLOCK
        # Only what was sent or reported is taken to be cached.
        assert not route.num_cached_tokens or hashes[route.num_cached_tokens // BLOCK - 1] in self.blocks[route.engine]
        self.blocks[route.engine].update(hashes)
        self.running.append((route, False))

    @precondition(lambda self: self.running)
    @rule(which=st.integers(0, 99))
    def goes_on(self, which: int) -> None:
        route, prefilled = self.running.pop(which % len(self.running))
        for router in self.routers:
            if prefilled:
                router.finished(route)
            else:
                router.prefilled(route)
        if not prefilled:
            self.running.append((route, True))

    @rule(
        engine=engines, name=names, start=lengths, end=lengths, kind=st.sampled_from(["stored", "removed", "cleared"])
    )
    def report(self, engine: int, name: str, start: int, end: int, kind: str) -> None:
        engine %= self.num_engines
        hashes = text(name, end)[start:]
        for router in self.routers:
            if kind == "cleared":
                router.cleared(engine)
            else:
                getattr(router, kind)(engine, hashes)
        if kind == "cleared":
            self.blocks[engine].clear()
        elif kind == "removed":
            self.blocks[engine].difference_update(hashes)
        elif engine in self.up:
            self.blocks[engine].update(hashes)

    @invariant()
    def memory_is_bounded_and_loads_are_those_of_what_runs(self) -> None:
        if not hasattr(self, "routers"):
            return
        index = self.routers[0].index
        for engine in range(self.num_engines):
            assert index.num_blocks(engine) <= CAPACITY
            running = [(route, done) for route, done in self.running if route.engine == engine]
            load = sum(REQUEST_TOKENS + (0 if done else route.num_new_tokens) for route, done in running)
            assert self.routers[0].load(engine) == load
        assert len(index) <= sum(index.num_blocks(engine) for engine in range(self.num_engines))
        assert len(index) == len({block for engine in range(self.num_engines) for block in index._recency[engine]})


TestAnyOrder = RouterMachine.TestCase
TestAnyOrder.settings = settings(max_examples=60, stateful_step_count=40, deadline=None, derandomize=True)
