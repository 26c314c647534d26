"""Several servers behind one front end."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from typing import Any

import pytest

from dflash_client import Delta
from dflash_client.connection import Tls
from dflash_client.errors import (
    Cancelled,
    ClientError,
    ConnectionFailed,
    ConnectionLost,
    InvalidArgument,
    QueueFull,
    Unavailable,
    error_in_text,
)
from dflash_openai import triton_pool
from dflash_openai.config import FrontendConfig
from dflash_openai.triton_pool import TritonPool

DESCRIPTION = {"max_model_len": 9, "vocab_size": 9, "num_speculative_tokens": 0, "max_n": 1, "tokenizer": "/x"}


class ScriptedStream:
    """Has what the pool uses of an `AsyncStream`."""

    def __init__(self, client: ScriptedClient) -> None:
        self._client = client

    def cancel(self) -> None:
        self._client.cancelled = True

    async def __aenter__(self) -> AsyncGenerator[Delta, None]:
        return self._deltas()

    async def __aexit__(self, *raised: Any) -> None:
        return None

    async def _deltas(self) -> AsyncGenerator[Delta, None]:
        if self._client.error is not None and not self._client.answers:
            raise self._client.error
        yield Delta(self._client.name, kv_transfer_params=self._client.kept)
        if self._client.error is not None:
            raise self._client.error


class ScriptedClient:
    """Has what the pool uses of an `AsyncDFlashClient`; `error` comes at the beginning, or after a delta."""

    def __init__(self, name: str, error: ClientError | None = None, answers: bool = False) -> None:
        self.name, self.error, self.answers = name, error, answers
        self.address = f"{name}:1"
        self.cancelled = False
        self.kept: dict[str, Any] | None = None
        self.asked: list[tuple[bool, int, Any]] = []

    def request(self, stream: bool, token_ids: Sequence[int], *given: Any, **options: Any) -> ScriptedStream:
        self.asked.append((stream, len(token_ids), given[1]))
        return ScriptedStream(self)

    async def probe(self, timeout_s: float) -> ClientError | None:
        return self.error

    async def describe(self, timeout_s: float) -> dict[str, Any]:
        if self.error is not None:
            raise self.error
        return {**DESCRIPTION, "tokenizer": self.name}


def pool_of(*clients: ScriptedClient, prefill: Sequence[ScriptedClient] = ()) -> TritonPool:
    pool = TritonPool(FrontendConfig(triton_urls=()))
    pool._clients, pool._prefill_clients = list(clients), list(prefill)  # type: ignore[arg-type]
    pool._num_running = dict.fromkeys([*pool._clients, *pool._prefill_clients], 0)
    return pool


def answer(pool: TritonPool, num_tokens: int = 1, **sampling: Any) -> Sequence[str]:
    async def run() -> list[str]:
        return [delta.text async for delta in pool.request(True, [1] * num_tokens, sampling).deltas()]

    return asyncio.run(run())


@pytest.mark.parametrize("error", [Unavailable("starting"), QueueFull("full"), ConnectionFailed("gone")])
def test_a_request_that_a_server_has_not_begun_goes_to_the_next(error: ClientError) -> None:
    assert answer(pool_of(ScriptedClient("a", error), ScriptedClient("b"))) == ["b"]


@pytest.mark.parametrize("error", [InvalidArgument("wrong"), ConnectionLost("broke")])
def test_a_request_that_a_server_may_have_begun_does_not(error: ClientError) -> None:
    with pytest.raises(type(error)):
        answer(pool_of(ScriptedClient("a", error), ScriptedClient("b")))


def test_a_request_that_has_no_json_form_is_wrong_and_no_defect() -> None:
    deep: list[Any] = []
    for _ in range(100_000):
        deep = [deep]

    async def run() -> None:
        pool = TritonPool(FrontendConfig(triton_urls=("grpc://127.0.0.1:1",)))
        try:
            _ = [delta async for delta in pool.request(False, [1], {"structured_outputs": {"json": deep}}).deltas()]
        finally:
            await pool.close()

    with pytest.raises(InvalidArgument, match="nested too deeply"):
        asyncio.run(run())


def test_a_request_that_was_answered_in_part_does_not() -> None:
    with pytest.raises(Unavailable):
        answer(pool_of(ScriptedClient("a", Unavailable("stopped"), answers=True), ScriptedClient("b")))


def test_the_last_refusal_is_the_answer() -> None:
    with pytest.raises(QueueFull, match="last"):
        answer(pool_of(ScriptedClient("a", Unavailable("first")), ScriptedClient("b", QueueFull("last"))))


def test_a_request_goes_to_the_server_with_the_fewest() -> None:
    async def run() -> list[str]:
        pool = pool_of(ScriptedClient("a"), ScriptedClient("b"))
        running = [pool.request(True, [1], {}).deltas() for _ in range(4)]
        return [(await anext(deltas)).text for deltas in running]

    assert sorted(asyncio.run(run())) == ["a", "a", "b", "b"]


def test_a_request_that_has_ended_counts_no_more() -> None:
    async def run() -> list[str]:
        pool = pool_of(ScriptedClient("a"), ScriptedClient("b"))
        return [delta.text for _ in range(3) async for delta in pool.request(True, [1], {}).deltas()]

    assert asyncio.run(run()) == ["a", "a", "a"]


KEPT = {"do_remote_prefill": True, "remote_host": "p", "remote_port": 7, "remote_num_blocks": 4}


def test_a_long_prompt_goes_to_a_prefill_server_first() -> None:
    first, second = ScriptedClient("p"), ScriptedClient("d")
    first.kept = KEPT
    sampling = {"max_tokens": 9, "temperature": 0.7, "cache_salt": "s", "lora_name": "l", "tenant": "t", "n": 2}
    assert answer(pool_of(second, prefill=[first]), 64, **sampling) == ["d"]
    asked = {
        "cache_salt": "s",
        "lora_name": "l",
        "tenant": "t",
        "max_tokens": 1,
        "temperature": 0,
        "record_traffic": False,
    }
    assert first.asked == [(False, 64, {**asked, "kv_transfer_params": {"do_remote_decode": True}})]
    assert second.asked == [(True, 64, {**sampling, "kv_transfer_params": KEPT})]


@pytest.mark.parametrize(
    ("num_tokens", "sampling"), [(63, {}), (64, {"prompt_logprobs": 0}), (64, {"kv_transfer_params": KEPT})]
)
def test_a_prompt_that_gains_nothing_does_not(num_tokens: int, sampling: dict[str, Any]) -> None:
    first, second = ScriptedClient("p"), ScriptedClient("d")
    assert answer(pool_of(second, prefill=[first]), num_tokens, **sampling) == ["d"]
    assert not first.asked
    assert second.asked == [(True, num_tokens, sampling)]


@pytest.mark.parametrize("error", [Unavailable("starting"), ConnectionLost("broke"), InvalidArgument("wrong")])
def test_a_prefill_server_that_fails_leaves_the_prompt_to_the_decode_server(error: ClientError) -> None:
    second = ScriptedClient("d")
    assert answer(pool_of(second, prefill=[ScriptedClient("p", error)]), 64) == ["d"]
    assert second.asked == [(True, 64, {})]


def test_a_prefill_server_that_hangs_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    async def hang(stream: ScriptedStream) -> AsyncGenerator[Delta, None]:
        await asyncio.sleep(10 if stream._client is first else 0)
        yield Delta(stream._client.name)

    monkeypatch.setattr(triton_pool, "MAX_PREFILL_S", 0.01)
    monkeypatch.setattr(ScriptedStream, "_deltas", hang)
    first, second = ScriptedClient("p"), ScriptedClient("d")
    pool = pool_of(second, prefill=[first])
    assert answer(pool, 64) == ["d"]
    assert second.asked == [(True, 64, {})]
    assert not any(pool._num_running.values())


@pytest.mark.parametrize(("num_tokens", "asked"), [(64, {}), (400, {"remote_block_hash": "k"})])
def test_a_long_prompt_has_more_time(num_tokens: int, asked: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    async def compute(stream: ScriptedStream) -> AsyncGenerator[Delta, None]:
        if stream._client is first:
            await asyncio.sleep(0.1)
        yield Delta(stream._client.name, kv_transfer_params={"remote_block_hash": "k"})

    monkeypatch.setattr(triton_pool, "MAX_PREFILL_S", 0.0)
    monkeypatch.setattr(triton_pool, "MAX_TOKEN_S", 0.001)
    monkeypatch.setattr(ScriptedStream, "_deltas", compute)
    first, second = ScriptedClient("p"), ScriptedClient("d")
    assert answer(pool_of(second, prefill=[first]), num_tokens) == ["d"]
    assert [given[2].get("kv_transfer_params", {}) for given in second.asked] == [asked]


def test_a_client_that_leaves_while_its_prompt_is_computed_has_nothing_decoded() -> None:
    second = ScriptedClient("d")
    with pytest.raises(Cancelled):
        answer(pool_of(second, prefill=[ScriptedClient("p", Cancelled("left"))]), 64)
    assert not second.asked


def test_a_prefill_server_that_is_full_is_passed_over() -> None:
    first, other = ScriptedClient("p", QueueFull("full")), ScriptedClient("q")
    second = ScriptedClient("d")
    other.kept = KEPT
    assert answer(pool_of(second, prefill=[first, other]), 64) == ["d"]
    assert second.asked == [(True, 64, {"kv_transfer_params": KEPT})]


def test_a_server_that_says_nothing_is_the_last_that_is_asked(caplog: pytest.LogCaptureFixture) -> None:
    """It is the one with the fewest requests, and each that goes there waits until the time of requests is over."""
    gone, other, prefill = ScriptedClient("a"), ScriptedClient("b"), ScriptedClient("p")
    prefill.kept = KEPT
    pool = pool_of(gone, other, prefill=[prefill])
    assert answer(pool, 64) == ["a"]
    gone.error = prefill.error = ConnectionFailed("a:1 has not answered within 5 s")
    asyncio.run(pool.look(5))
    gone.asked.clear()
    prefill.asked.clear()
    pool.count(other, 3)  # type: ignore[arg-type]
    assert answer(pool, 64) == ["b"]
    assert gone.asked == prefill.asked == []
    gone.error = prefill.error = None
    asyncio.run(pool.look(5))
    assert answer(pool, 64) == ["a"]
    assert (len(gone.asked), len(prefill.asked)) == (1, 1)
    assert [record.getMessage() for record in caplog.records] == [
        *["requests go to other servers: a:1 has not answered within 5 s"] * 2,
        "a:1 is back",
        "p:1 is back",
    ]


STOPPING = (
    "[request id: <id_unknown>] Server is stopping, scheduler for model has stopped accepting new inference requests"
)


def test_a_server_that_stops_does_not_draw_the_requests_to_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton keeps its connections open while it stops, and has the fewest requests then."""
    stopping, other = ScriptedClient("a", error_in_text(STOPPING)), ScriptedClient("b")
    pool = pool_of(stopping, other)
    pool.count(other, 3)  # type: ignore[arg-type]
    assert [*answer(pool), *answer(pool), *answer(pool)] == ["b"] * 3
    assert len(stopping.asked) == 1
    # It is asked again after a while, and as before once it takes a request.
    stopping.error = None
    monkeypatch.setattr(triton_pool, "REFUSED_S", -1.0)
    pool.heard(stopping, Unavailable("it stops"))  # type: ignore[arg-type]
    assert [*answer(pool), *answer(pool)] == ["a"] * 2


@pytest.mark.parametrize(("error", "num_asked"), [(Unavailable("the engine restarts"), 0), (QueueFull("full"), 1)])
def test_a_server_whose_probe_says_that_it_takes_no_requests_is_behind_the_others(
    error: ClientError, num_asked: int
) -> None:
    """A full queue may be that of one tenant."""
    refusing, other = ScriptedClient("a", error), ScriptedClient("b")
    pool = pool_of(refusing, other)
    pool.count(other, 3)  # type: ignore[arg-type]
    asyncio.run(pool.look(5))
    assert answer(pool) == ["b"]
    assert len(refusing.asked) == num_asked
    refusing.error = None
    asyncio.run(pool.look(5))
    assert answer(pool) == ["a"]


def test_where_no_server_says_anything_each_is_asked() -> None:
    error = ConnectionFailed("gone")
    pool = pool_of(ScriptedClient("a", error, answers=True), ScriptedClient("b", error, answers=True))
    asyncio.run(pool.look(5))
    with pytest.raises(ConnectionFailed, match="gone"):
        answer(pool)
    alone = pool_of(ScriptedClient("a", error))
    asyncio.run(alone.look(5))
    assert alone.by_load() == alone._clients


def test_the_description_is_that_of_a_server_that_answers() -> None:
    pool = pool_of(ScriptedClient("a", Unavailable("starting")), ScriptedClient("b"))
    assert asyncio.run(pool.describe(1)).tokenizer == "b"
    assert asyncio.run(pool.probe(1)) is None
    pool = pool_of(ScriptedClient("a", Unavailable("starting")))
    assert isinstance(asyncio.run(pool.probe(1)), Unavailable)


def test_a_server_that_is_silent_does_not_delay_the_answer_of_one_that_is_ready() -> None:
    async def run() -> ClientError | None:
        silent = ScriptedClient("a")
        silent.probe = lambda timeout_s: asyncio.sleep(timeout_s, Unavailable("silent"))  # type: ignore[method-assign]
        async with asyncio.timeout(5):
            return await pool_of(silent, ScriptedClient("b"), ScriptedClient("c", Unavailable("starting"))).probe(60)

    assert asyncio.run(run()) is None


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"triton_urls": ("http://a:8000",)}, "is not a gRPC address"),
        ({"triton_urls": ("grpc://a:x",)}, "is not a number"),
        ({"triton_urls": ("grpc://a:1",), "triton_tls": Tls(ca_cert="x.pem")}, "begin it with grpcs://"),
        ({"triton_urls": ("grpcs://a:1",), "triton_tls": Tls(ca_cert="/no/such")}, "cannot be read"),
    ],
)
def test_addresses_that_cannot_be_used_are_refused_at_the_start(fields: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        FrontendConfig(**fields)
