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


def test_a_server_is_measured_as_the_engine_is(server: TritonServer, capsys: pytest.CaptureFixture[str]) -> None:
    target = str(asset_path("demo", "pair", "target"))
    here = overall(capsys, "--set", "max_model_len=1024")
    for protocol, url in (("grpc", server.grpc_url), ("http", server.http_url)):
        there = ["--url", url, "--protocol", protocol]
        assert overall(capsys, *there) == here
        assert overall(capsys, *there, "--target", target, "--concurrency", "1") == here
