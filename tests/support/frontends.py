"""A real front end before a running server."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from dflash_cli.launcher.frontend import FrontendProcess
from dflash_cli.launcher.ports import settle_ports
from dflash_cli.launcher.server import TritonServer
from tests.support.servers import clean_environ

HOST = "127.0.0.1"


@contextmanager
def local_frontend(server: TritonServer, *options: str) -> Iterator[FrontendProcess]:
    """`dflash-triton openai` on a free loopback port, once it is ready."""
    port = settle_ports(HOST, {"--port": 0})["--port"]
    frontend = FrontendProcess(HOST, port, ["--model-name", server.model_name, *options], clean_environ())
    try:
        frontend.launch(server.grpc_url, server.metrics_url)
        frontend.start()
        yield frontend
    finally:
        frontend.stop()
