"""Triton servers on free loopback ports, to which no setting of the caller's environment comes through."""

from __future__ import annotations

import os
from typing import Any

import httpx

from dflash_cli.launcher.server import TritonServer
from dflash_cli.launcher.server_options import KEY_HEADER

PORT_OPTIONS = ("--port", "0", "--http-port", "0", "--grpc-port", "0", "--metrics-port", "0")


def clean_environ(**more: str) -> dict[str, str]:
    """The environment of this process without settings of the engine and of the toy model, and with `more`."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("DFLASH_", "TOY_"))}
    return kept | more


def local_server(
    settings: dict[str, str] | None = None, environ: dict[str, str] | None = None, **options: Any
) -> TritonServer:
    """A server that is not started yet. `environ` is added to the clean environment, `options` are `TritonServer`'s."""
    chosen = {"host": "127.0.0.1", "http_port": 0, "grpc_port": 0, "metrics_port": 0, "ready_timeout_s": 120.0}
    return TritonServer(settings, environ=clean_environ(**(environ or {})), **(chosen | options))


def answers(address: str, path: str = "/v2/models/dflash/ready") -> bool:
    """Whether what listens at `host:port` says yes over HTTP; no when nothing listens there."""
    try:
        return httpx.get(f"http://{address}{path}", timeout=2, trust_env=False, verify=False).is_success
    except httpx.TransportError:
        return False


def change_model(server: TritonServer, action: str, model: str = "dflash") -> httpx.Response:
    """`load` or `unload` a model through the repository API; it returns when Triton has done it. Raises
    `AssertionError` with the server's last lines where it has ended."""
    url = f"http://{server.http_url}/v2/repository/models/{model}/{action}"
    try:
        headers = {KEY_HEADER: server.api_key}
        return httpx.post(url, json={}, headers=headers, timeout=60, trust_env=False, verify=False)
    except httpx.TransportError as error:
        raise AssertionError(
            f"the server does not answer ({error}; exit status {server.poll()}):\n{server.log_tail()}"
        ) from error
