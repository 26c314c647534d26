"""When a server counts as ready."""

from __future__ import annotations

import http.server
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

from dflash_cli.launcher.loading import Loading


class Answers(http.server.BaseHTTPRequestHandler):
    """200 to everything."""

    def do_GET(self) -> None:
        self.send_response(200)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, *given: Any) -> None:
        return None


@contextmanager
def serving(server: http.server.ThreadingHTTPServer) -> Iterator[None]:
    thread = threading.Thread(target=server.serve_forever, args=(0.05,))
    thread.start()
    try:
        yield
    finally:
        server.shutdown()
        thread.join()


def test_a_server_whose_metrics_are_not_served_yet_is_not_ready() -> None:
    running: Any = SimpleNamespace(poll=lambda: None)
    with (
        http.server.ThreadingHTTPServer(("127.0.0.1", 0), Answers) as models,
        http.server.ThreadingHTTPServer(("127.0.0.1", 0), Answers, bind_and_activate=False) as metrics,
        serving(models),
    ):
        metrics.server_bind()  # It does not listen yet.
        urls = [f"127.0.0.1:{server.server_address[1]}" for server in (models, metrics)]
        waiting = threading.Thread(target=Loading(*urls, ["dflash"], None).wait, args=(running, None, 30.0))
        waiting.start()
        time.sleep(0.5)
        assert waiting.is_alive()
        metrics.server_activate()
        with serving(metrics):
            waiting.join(10)
        assert not waiting.is_alive()
