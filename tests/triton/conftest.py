from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from dflash_backend.config import EngineConfig
from dflash_backend.triton.service import TritonService, end_process
from tests.support.byte_tokenizer import model_dir, tokenizer  # noqa: F401
from tests.triton.fake_triton import FakeTriton
from tests.triton.serving import COMMAND


@pytest.fixture
def triton() -> FakeTriton:
    return FakeTriton()


@pytest.fixture
def serve(model_dir: Path, triton: FakeTriton) -> Iterator[Callable[..., TritonService]]:  # noqa: F811
    """Makes a service with some settings; it is closed after the test."""
    services: list[TritonService] = []

    def serve(
        abandon: Callable[[], None] = end_process,
        server_pid: int = 0,
        as_vllm: bool = False,
        num_instances: int = 1,
        **settings: Any,
    ) -> TritonService:
        config = EngineConfig(target_model=str(model_dir), **settings)
        service = TritonService(
            config,
            "dflash",
            triton,
            COMMAND,
            server_pid=server_pid,
            abandon=abandon,
            as_vllm=as_vllm,
            num_instances=num_instances,
        )
        services.append(service)
        return service

    yield serve
    for service in services:
        service.close()


@pytest.fixture
def service(serve: Callable[..., TritonService]) -> TritonService:
    return serve()
