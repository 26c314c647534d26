"""`dflash-triton eval --url` counts what the engine in this process does."""

from __future__ import annotations

import json
from typing import Any

import pytest

from dflash_backend.config import asset_path
from dflash_cli.launcher.server import TritonServer
from dflash_cli.main import main


def overall(capsys: pytest.CaptureFixture[str], *options: str) -> dict[str, Any]:
    assert main(["eval", "--dataset", "math", "--limit", "4", "--json", *options]) == 0
    figures: dict[str, Any] = json.loads(capsys.readouterr().out)["overall"]
    return figures


@pytest.mark.parametrize("protocol", ["grpc", "http"])
def test_a_server_is_measured_as_the_engine_is(
    server: TritonServer, protocol: str, capsys: pytest.CaptureFixture[str]
) -> None:
    url = server.grpc_url if protocol == "grpc" else server.http_url
    there = ["--url", url, "--protocol", protocol]
    target = str(asset_path("demo", "pair", "target"))
    here = overall(capsys, "--set", "max_model_len=1024")
    assert overall(capsys, *there) == here
    assert overall(capsys, *there, "--target", target, "--concurrency", "1") == here
