"""A server as a worker of NVIDIA Dynamo: what passes between the two, on a stand-in for Dynamo's package."""

from __future__ import annotations

import argparse
import asyncio
import importlib
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from dflash_cli.commands import dynamo as command
from dflash_cli.dynamo_requests import chunk, event_sources, sampling
from dflash_cli.main import main
from dflash_client import Cancelled, ClientError, Delta, Internal
from dflash_client import InvalidArgument as Refused

DESCRIPTION = {
    "tokenizer": "/models/target",
    "max_model_len": 1024,
    "kv_block_size": 16,
    "num_kv_blocks": 400,
    "max_num_seqs": 8,
    "max_num_batched_tokens": 2048,
    "data_parallel_size": 2,
    "kv_events_endpoints": ["tcp://*:5557", "tcp://*:5558"],
    "kv_events_topic": "kv",
}


class InvalidArgument(Exception):
    pass


class Record(SimpleNamespace):
    """Stands for each of Dynamo's dataclasses."""


class ZmqSource(tuple):
    def __new__(cls, *values: Any) -> ZmqSource:
        return super().__new__(cls, values)


class Stream:
    """An answer of three deltas, or one that never ends, or an error."""

    def __init__(self, endless: bool, error: ClientError | None = None) -> None:
        self.endless, self.error, self.was_cancelled = endless, error, asyncio.Event()

    async def __aenter__(self) -> Stream:
        return self

    async def __aexit__(self, *error: object) -> None:
        self.was_cancelled.set()

    async def __aiter__(self) -> AsyncIterator[Delta]:
        if self.error is not None:
            raise self.error
        yield Delta("", (5, 6))
        if self.endless:
            await self.was_cancelled.wait()
            raise Cancelled("the request was cancelled")
        yield Delta("", (7,))
        yield Delta("", (), finish_reason="stop", spec_stats={"num_cached_tokens": 16})

    def cancel(self) -> None:
        self.was_cancelled.set()


class Client:
    """Stands for the client of a server; `asked` is what was sent."""

    endless = False
    error: ClientError | None = None

    def __init__(self, address: str, model: str, timeout_s: float) -> None:
        if ":" not in address:
            raise ValueError(f"{address!r} is not an address")
        self.address, self.model, self.timeout_s, self.closed = address, model, timeout_s, False
        self.asked: list[tuple[list[int], dict[str, Any]]] = []
        self.streams: list[Stream] = []

    async def wait_ready(self, timeout_s: float) -> None:
        pass

    async def describe(self) -> dict[str, Any]:
        return DESCRIPTION

    def stream(self, token_ids: list[int], **parameters: Any) -> Stream:
        self.asked.append((token_ids, parameters))
        self.streams.append(Stream(self.endless, self.error))
        return self.streams[-1]

    async def close(self) -> None:
        self.closed = True


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Our engine over the stand-ins, not connected."""
    parts = {
        "dynamo": {},
        "dynamo.common": {},
        "dynamo.common.backend": {
            **dict.fromkeys(("EngineConfig", "LlmRegistration", "WorkerConfig"), Record),
            "LLMEngine": object,
        },
        "dynamo.common.backend.publisher": {"ZmqSource": ZmqSource},
        "dynamo.common.backend.run": {"run": None},
        "dynamo.llm": {},
        "dynamo.llm.exceptions": {"InvalidArgument": InvalidArgument},
    }
    for name, contents in parts.items():
        module = ModuleType(name)
        vars(module).update(contents)
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.delitem(sys.modules, "dflash_cli.dynamo_engine", raising=False)
    module = importlib.import_module("dflash_cli.dynamo_engine")
    monkeypatch.setattr(module, "AsyncDFlashClient", Client)
    parser = argparse.ArgumentParser()
    command.add_parser(parser.add_subparsers())
    options = parser.parse_args(["dynamo", "--triton", "here:8001", "--served-model-name", "toy"])
    yield module.DFlashEngine(options)
    sys.modules.pop("dflash_cli.dynamo_engine", None)


CONTEXT = SimpleNamespace(id=lambda: "a")


def test_it_registers_with_what_the_server_says_of_itself(engine: Any) -> None:
    async def register() -> tuple[Record, Record, list[Any]]:
        return await engine.connect(), await engine.start(1), await engine.kv_event_sources()

    worker, config, sources = asyncio.run(register())
    assert (worker.model_name, worker.served_model_name, worker.namespace) == ("/models/target", "toy", "dynamo")
    assert (config.model, config.served_model_name) == ("/models/target", "toy")
    assert vars(config.llm) == {
        "context_length": 1024,
        "kv_cache_block_size": 16,
        "total_kv_blocks": 400,
        "max_num_seqs": 8,
        "max_num_batched_tokens": 2048,
        "data_parallel_size": 2,
    }
    assert sources == [("tcp://127.0.0.1:5557", "kv", 0), ("tcp://127.0.0.1:5558", "kv", 1)]


def test_tokens_come_as_chunks_the_last_of_which_has_the_usage(engine: Any) -> None:
    async def generate() -> list[dict[str, Any]]:
        await engine.connect()
        request = {"token_ids": [1, 2, 3], "stop_conditions": {"max_tokens": 9}}
        return [one async for one in engine.generate(request, CONTEXT)]

    chunks = asyncio.run(generate())
    assert engine._client.asked == [([1, 2, 3], {"max_tokens": 9})]
    assert chunks[:2] == [{"token_ids": [5, 6], "index": 0}, {"token_ids": [7], "index": 0}]
    assert chunks[2]["finish_reason"] == "stop"
    assert chunks[2]["completion_usage"] == {
        "prompt_tokens": 3,
        "completion_tokens": 3,
        "total_tokens": 6,
        "prompt_tokens_details": {"cached_tokens": 16},
    }
    assert not engine._streams


def test_an_aborted_request_is_cancelled_at_the_server(engine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Client, "endless", True)

    async def generate() -> int:
        await engine.connect()
        chunks = 0
        async for _ in engine.generate({"token_ids": [1]}, CONTEXT):
            chunks += 1
            await engine.abort(CONTEXT)
        await engine.abort(SimpleNamespace(id=lambda: "unknown"))
        return chunks

    assert asyncio.run(asyncio.wait_for(generate(), 10)) == 1
    assert engine._client.streams[0].was_cancelled.is_set()


@pytest.mark.parametrize(
    ("error", "kind"),
    [(Refused("too long"), InvalidArgument), (Internal("it died"), Internal), (Cancelled("no"), Cancelled)],
)
def test_what_the_server_refuses_is_dynamos_error(
    engine: Any, monkeypatch: pytest.MonkeyPatch, error: ClientError, kind: type[Exception]
) -> None:
    monkeypatch.setattr(Client, "error", error)

    async def generate() -> None:
        await engine.connect()
        async for _ in engine.generate({"token_ids": [1]}, CONTEXT):
            pass

    with pytest.raises(kind, match=str(error)):
        asyncio.run(generate())
    assert not engine._streams


@pytest.mark.parametrize(
    ("num_prompt", "stops", "expected"), [(24, {}, 1000), (24, None, 1000), (1024, {}, 1), (9000, {}, 1)]
)
def test_an_answer_without_max_tokens_has_the_rest_of_the_context(
    engine: Any, num_prompt: int, stops: Any, expected: int
) -> None:
    async def generate() -> None:
        await engine.connect()
        request = {"token_ids": [1] * num_prompt, "stop_conditions": stops}
        async for _ in engine.generate(request, CONTEXT):
            pass

    asyncio.run(generate())
    assert engine._client.asked[0][1] == {"max_tokens": expected}


def test_a_request_may_take_as_long_as_it_is_told(engine: Any) -> None:
    asyncio.run(engine.connect())
    assert engine._client.timeout_s == 3600.0
    engine._options.request_timeout = 7.0
    asyncio.run(engine.connect())
    assert engine._client.timeout_s == 7.0
    engine._options.triton = "nowhere"
    with pytest.raises(ClientError, match="'nowhere' is not an address"):
        asyncio.run(engine.connect())


def test_the_time_of_a_request_is_an_option() -> None:
    parser = argparse.ArgumentParser()
    command.add_parser(parser.add_subparsers())
    assert parser.parse_args(["dynamo", "--request-timeout", "21"]).request_timeout == 21.0


def test_what_the_server_cannot_do_is_an_error_of_the_request(engine: Any) -> None:
    async def generate() -> None:
        await engine.connect()
        async for _ in engine.generate({"token_ids": [1], "sampling_options": {"n": 2}}, CONTEXT):
            pass

    with pytest.raises(InvalidArgument, match="n is above 1"):
        asyncio.run(generate())
    assert engine._client.asked == []


def test_it_can_be_cleaned_up_twice_and_before_it_has_connected(engine: Any) -> None:
    async def clean() -> Client:
        await engine.cleanup()
        await engine.connect()
        client = engine._client
        await engine.cleanup()
        await engine.cleanup()
        return client

    assert asyncio.run(clean()).closed


@pytest.mark.parametrize(
    ("request_", "expected"),
    [
        ({}, {}),
        ({"sampling_options": None, "stop_conditions": None, "output_options": None}, {}),
        ({"sampling_options": {"n": 1, "temperature": 0.5, "top_p": None, "top_k": -1}}, {"temperature": 0.5}),
        ({"sampling_options": {"top_k": 4, "seed": 0}}, {"top_k": 4, "seed": 0}),
        (
            {"stop_conditions": {"max_tokens": 3, "stop": ["x"], "ignore_eos": True, "min_tokens": 0}},
            {"max_tokens": 3, "ignore_eos": True, "min_tokens": 0},
        ),
        (
            {"sampling_options": {"guided_decoding": {"regex": "a+", "json": None}}},
            {"structured_outputs": {"regex": "a+"}},
        ),
    ],
)
def test_requests_become_sampling_parameters(request_: dict[str, Any], expected: dict[str, Any]) -> None:
    assert sampling(request_) == expected


@pytest.mark.parametrize(
    ("request_", "words"),
    [
        ({"output_options": {"logprobs": 0}}, "log-probabilities do not come through Dynamo"),
        ({"sampling_options": {"guided_decoding": {"structural_tag": "x"}}}, "structural_tag; allowed: json, regex"),
    ],
)
def test_what_would_be_lost_is_refused(request_: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        sampling(request_)


def test_a_request_that_timed_out_is_cancelled_in_dynamos_words() -> None:
    assert chunk(Delta("", (1,), finish_reason="abort"), 2, 1)["finish_reason"] == "cancelled"


def test_events_are_read_where_the_command_line_says() -> None:
    assert event_sources(DESCRIPTION, ["tcp://pod:5557"]) == [("tcp://pod:5557", "kv", 0)]
    assert event_sources({**DESCRIPTION, "kv_events_endpoints": []}, []) == []


def test_without_the_package_it_says_what_to_install(capsys: pytest.CaptureFixture[str]) -> None:
    if importlib.util.find_spec("dynamo") is not None:
        pytest.skip("ai-dynamo is installed")
    assert main(["dynamo"]) == 1
    assert "pip install -e '.[dynamo]'" in capsys.readouterr().err


def test_without_a_package_that_it_needs_it_names_that_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "dynamo" / "common").mkdir(parents=True)
    (tmp_path / "dynamo" / "common" / "backend.py").write_text("import uvloop_that_is_not_there\n")
    for name in [name for name in sys.modules if name.split(".")[0] == "dynamo"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.delitem(sys.modules, "dflash_cli.dynamo_engine", raising=False)
    monkeypatch.syspath_prepend(tmp_path)
    try:
        assert main(["dynamo", "--triton", "127.0.0.1:1", "--served-model-name", "toy"]) == 1
    finally:
        for name in [name for name in sys.modules if name.split(".")[0] == "dynamo"]:
            del sys.modules[name]
    assert "pip install uvloop_that_is_not_there" in capsys.readouterr().err
