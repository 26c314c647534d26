"""LoRA adapters in OpenAI's API: each is a model of its own name."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from starlette.testclient import TestClient

from dflash_openai.app import create_app
from dflash_openai.config import FrontendConfig
from tests.frontend.conftest import wait_until_ready
from tests.frontend.scripted_pool import ScriptedPool
from tests.support.waiting import eventually

BODIES: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "a"},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "a"}]},
    "/v1/responses": {"input": "a"},
    "/v1/messages": {"messages": [{"role": "user", "content": "a"}], "max_tokens": 4},
}


def adapted_pool(model_dir: Path, *names: str) -> ScriptedPool:
    pool = ScriptedPool(model_dir)
    pool.description = msgspec.structs.replace(pool.description, lora_names=names)
    return pool


@pytest.fixture(scope="module")
def adapted(model_dir: Path) -> Iterator[tuple[ScriptedPool, TestClient]]:
    pool = adapted_pool(model_dir, "doll", "sheep")
    with TestClient(create_app(FrontendConfig(), pool), raise_server_exceptions=False) as http:
        wait_until_ready(http)
        yield pool, http


@pytest.mark.parametrize("path", list(BODIES))
@pytest.mark.parametrize(("model", "lora_name"), [("sheep", "sheep"), ("toys/target", None), (None, None)])
def test_the_name_of_the_model_chooses_the_adapter(
    adapted: tuple[ScriptedPool, TestClient], path: str, model: str | None, lora_name: str | None
) -> None:
    pool, http = adapted
    answer = http.post(path, json=BODIES[path] | ({} if model is None else {"model": model}))
    assert answer.status_code == 200, answer.text
    assert answer.json()["model"] == (model or "toys/target")
    assert pool.asked[-1].sampling.get("lora_name") == lora_name


def test_adapters_are_listed_behind_the_model_that_they_adapt(adapted: tuple[ScriptedPool, TestClient]) -> None:
    _, http = adapted
    listed = http.get("/v1/models").json()["data"]
    assert [(model["id"], model["parent"]) for model in listed] == [
        ("toys/target", None),
        ("dflash", None),
        ("doll", "toys/target"),
        ("sheep", "toys/target"),
    ]
    assert http.get("/v1/models/doll").json() == listed[2]
    assert http.get("/v1/models/goat").status_code == 404


def test_a_name_that_means_both_the_model_and_an_adapter_is_said(model_dir: Path) -> None:
    config = FrontendConfig(served_model_names=("mine", "doll"))
    with TestClient(create_app(config, adapted_pool(model_dir, "doll")), raise_server_exceptions=False) as http:
        eventually(lambda: "'doll' is the model's name and that of a LoRA adapter" in http.get("/v1/models").text)
