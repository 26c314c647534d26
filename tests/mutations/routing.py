"""Defects of the router of replicas: answers stay right, but prefixes are missed, or requests lost with an engine."""

from __future__ import annotations

from tests.mutations.mutant import Mutant, mutants_of

ROUTING = "dflash_backend/routing"
ROUTED = ("tests/routing/test_router.py",)

ROUTING_MUTANTS: tuple[Mutant, ...] = (
    *mutants_of(
        f"{ROUTING}/router.py",
        ROUTED,
        ("the router ignores what is cached", "gain = num_blocks * self._block_size", "gain = 0"),
        ("a request goes to an engine that is down", "self._load[engine] = _DOWN", "self._load[engine] = 0"),
        (
            "an engine that died is believed to keep its blocks",
            "self._load[engine] = _DOWN\n        self._index.clear(engine)",
            "self._load[engine] = _DOWN",
        ),
        ("late ends lower the load of the next process", "if route.start == self._starts[route.engine]:", "if True:"),
        ("a salt has no engine of its own", "- STICKY_TOKENS\n", "\n"),
        ("salts are kept for ever", "if len(self._salts) > MAX_SALTS:", "if False:"),
        ("an engine that comes back gets all requests", "self._sent_tokens[engine] = min(", "_ = min("),
    ),
    *mutants_of(
        f"{ROUTING}/block_index.py",
        ROUTED,
        ("the router's index grows", "while len(recency) > self._capacity:", "while False:"),
        ("the beginnings of texts leave the index first", "in reversed(hashes[: self._capacity]):", "in hashes:"),
        ("blocks of all engines end with those of one", "& ~bit\n", "& 0\n"),
    ),
)
