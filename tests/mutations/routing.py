"""Defects of the router of replicas: answers stay right, but prefixes are missed, or requests lost with an engine."""

from __future__ import annotations

from tests.mutations.mutant import Mutant, mutants_of

ROUTING = "dflash_backend/routing"
ROUTED = ("tests/routing/test_router.py",)
CLIENT = "dflash_backend/engine_client"
TRITON = "dflash_backend/triton"
REPLICAS = ("tests/triton/test_replicas.py",)
EVENTS = ("tests/core/test_kv_events.py",)

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
    *mutants_of(
        f"{CLIENT}/replicas.py",
        REPLICAS,
        (
            "the router is not told that an engine has died",
            "self._of_router.set_down(index)",
            "pass",
        ),
        ("an engine that is back gets no requests", "if not is_up and supervisor.engine is not None:", "if False:"),
        (
            "blocks that an engine has evicted draw requests to it",
            "self._of_router.removed(index, hashes)",
            "pass",
        ),
        ("engines give requests without a seed the same one", "index * SEED_STEP", "0 * SEED_STEP"),
        ("the router's index stays as large as at first", "self._of_router.resize(self.most_blocks)", "pass"),
        ("a full engine gets requests all the same", "without = set(full)", "without = set()"),
        (
            "a request that ends stays a load",
            "self._of_router.finished(placement.route, prefilled)",
            "pass",
        ),
    ),
    *mutants_of(
        f"{TRITON}/running_requests.py",
        REPLICAS,
        (
            "an engine that dies takes the requests of all engines along",
            "if request.sent and request.placement.client is lost.engine:",
            "if request.sent:",
        ),
        ("a request that never reached a dead engine is refused", "elif not self._move(request):", "else:"),
        (
            "a request counts as load until its answer has left",
            "            self._release(request)\n            count_tokens",
            "            count_tokens",
        ),
    ),
    Mutant(
        "engines of one model see each other's GPUs",
        f"{CLIENT}/gpus.py",
        "visible[i * each : (i + 1) * each]",
        "visible",
        ("tests/engine_client/test_gpus.py",),
    ),
    Mutant(
        "evicted blocks are not reported",
        "dflash_backend/core/kv/block_pool.py",
        "        self.num_evicted += 1\n        if self._removed is not None:",
        "        self.num_evicted += 1\n        if False:",
        EVENTS,
    ),
    *mutants_of(
        f"{CLIENT}/kv_publisher.py",
        ("tests/triton/test_kv_events.py",),
        ("published hashes are not those of earlier events", "block_hash[-8:]", "block_hash[:8]"),
        ("replay begins one batch late", "if number >= frames[2]:", "if number > frames[2]:"),
        (
            "events wait for the address of the replay",
            "public = public or self._bind(zmq.PUB, endpoint)",
            "public = public or (replay or not replay_endpoint or None) and self._bind(zmq.PUB, endpoint)",
        ),
        ("an ipc address is taken from its owner", "if _has_listener(endpoint):", "if False:"),
        ("engines publish at one address", "int(found[2]) + rank", "int(found[2])"),
        (
            "what is published while an address is in use is lost beyond some",
            "            end.set_hwm(0)\n",
            "            pass\n",
        ),
        (
            "a publisher waits for a thread that has ended",
            "self._batches.send(batch, zmq.NOBLOCK)",
            "self._batches.setsockopt(zmq.SNDTIMEO, 20_000) or self._batches.send(batch)",
        ),
    ),
    Mutant(
        "a client of Dynamo that leaves goes on costing",
        "cli/dflash_cli/dynamo_engine.py",
        "stream.cancel()",
        "pass",
        ("tests/cli/test_dynamo.py",),
    ),
    Mutant(
        "subscribers are not told that a cache is gone with its engine",
        f"{TRITON}/service.py",
        "self._publishers[lost.index].clear()",
        "pass",
        ("tests/triton/test_kv_events.py",),
    ),
    Mutant(
        "routers read the load of one engine of several",
        f"{TRITON}/metrics.py",
        "self.set(alias, sum(values) /",
        "self.set(alias, values[0] /",
        ("tests/triton/test_metrics.py",),
    ),
    *mutants_of(
        "dflash_backend/core/kv/block_pool.py",
        EVENTS,
        (
            "events lose their order",
            "last = self._events[-1] if self._events else None\n        if isinstance(last, kind)",
            "last = next((each for each in self._events if isinstance(each, kind)), None)\n        if last",
        ),
        ("a stored block has the wrong parent", "last.block_hashes[-1] == parent:", "True:"),
    ),
)
