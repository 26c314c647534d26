"""LoRA adapters through Triton: requests with two and with none side by side, over gRPC, HTTP and OpenAI's API."""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest
from transformers import AutoModelForCausalLM

from dflash_backend import LLM
from dflash_backend.config import asset_path
from dflash_cli.launcher.server import TritonServer
from dflash_client import DFlashClient
from dflash_client.errors import InvalidArgument
from tests.server.conftest import SETTINGS, new_server
from tests.support.frontends import local_frontend
from tests.support.lora_adapter import make_adapter

PROMPT = "def add(a, b):"
SAMPLING: dict[str, Any] = {"temperature": 0.0, "max_tokens": 24}
NAMES = ("", "one", "two")


@pytest.fixture(scope="module")
def settings(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("adapters")
    model = AutoModelForCausalLM.from_pretrained(asset_path("demo", "pair", "target"))
    modules = {
        name: str(make_adapter(folder / name, model, rank, seed=rank).directory)
        for name, rank in (("one", 4), ("two", 8))
    }
    return {**SETTINGS, "lora_modules": json.dumps(modules)}


@pytest.fixture(scope="module")
def server(settings: dict[str, str]) -> Iterator[TritonServer]:
    with new_server(settings) as running:
        yield running


@pytest.fixture(scope="module")
def wanted(settings: dict[str, str]) -> dict[str, str]:
    """What each adapter answers in process without drafts, one after the other."""
    llm = LLM(draft="", **{**settings, "device": "cpu"})
    return {name: llm.generate(PROMPT, lora_name=name, **SAMPLING)[0].text for name in NAMES}


def test_every_request_gets_the_answer_of_its_adapter(server: TritonServer, wanted: dict[str, str]) -> None:
    assert len(set(wanted.values())) == len(NAMES)

    def ask(number: int) -> tuple[str, str]:
        name = NAMES[number % len(NAMES)]
        given = {**SAMPLING, "lora_name": name} if name else SAMPLING
        url, protocol = ((server.grpc_url, "grpc"), (server.http_url, "http"))[number % 2]
        with DFlashClient(url, protocol, timeout_s=60) as client:
            return name, client.generate(PROMPT, **given).text

    with ThreadPoolExecutor(6) as pool:
        for name, text in pool.map(ask, range(12)):
            assert text == wanted[name], name


def test_an_adapter_that_is_not_there_is_refused_by_name(server: TritonServer) -> None:
    message = r"LoRA 'three' is not supported, we currently support \['one', 'two'\]"
    with DFlashClient(server.grpc_url, "grpc", timeout_s=60) as client, pytest.raises(InvalidArgument, match=message):
        client.generate(PROMPT, lora_name="three", **SAMPLING)


def test_clients_of_openai_name_an_adapter_as_the_model(server: TritonServer, wanted: dict[str, str]) -> None:
    with local_frontend(server) as frontend, httpx.Client(base_url=f"{frontend.url}/v1", trust_env=False) as http:
        assert {"one", "two"} < {model["id"] for model in http.get("/models").json()["data"]}
        for name in ("one", "two"):
            answer = http.post("/completions", json={"model": name, "prompt": PROMPT, **SAMPLING}, timeout=60).json()
            assert (answer["model"], answer["choices"][0]["text"]) == (name, wanted[name])
