"""Waits until a server that was started has loaded its models, and says how far they are."""

from __future__ import annotations

import signal
import subprocess
import time
from collections.abc import Callable, Iterable

import httpx

from dflash_cli.launcher.server_log import LogLine, ServerLog
from dflash_cli.launcher.triton_install import LauncherError

HEARTBEAT_S = 5.0
POLL_S = 0.1
LIVE_TIMEOUT_S = 2.0
LAST_LINES_S = 2.0


class Loading:
    """The load of one server: `read` takes the lines of its log, in another thread, while `wait` waits."""

    def __init__(
        self, http_url: str, metrics_url: str, models: Iterable[str], on_progress: Callable[[str], None] | None
    ) -> None:
        """`on_progress` gets a line whenever the load has something to say and every few seconds."""
        self._http_url = http_url
        # Triton opens the port of its metrics last, a moment after its models can be asked.
        self._pages = (
            "/v2/health/ready",
            *(f"/v2/models/{name}/ready" for name in models),
            f"http://{metrics_url}/metrics",
        )
        self._say = on_progress or (lambda text: None)
        self._line = ""
        self._changed_at = time.monotonic()

    def read(self, line: LogLine) -> None:
        """Take a line of the server's log."""
        if line.progress is not None:
            if line.progress != self._line:
                self._changed_at = time.monotonic()
            self._line = line.progress
            self._say(line.progress)

    def wait(self, process: subprocess.Popen[str], log: ServerLog, timeout_s: float) -> None:
        """Wait until all models and the metrics are ready. Raises `LauncherError` when the server ends, or its load
        says nothing new for `timeout_s` (0: any time)."""
        start = time.monotonic()
        next_beat = start + HEARTBEAT_S
        url = f"http://{self._http_url}"
        with httpx.Client(base_url=url, timeout=LIVE_TIMEOUT_S, trust_env=False, verify=False) as http:
            while not self._is_ready(http):
                if process.poll() is not None:
                    log.join(LAST_LINES_S)
                    raise LauncherError(
                        f"the server ended while it loaded ({how_it_ended(process.returncode)}): {log.failure()}"
                    )
                now = time.monotonic()
                if timeout_s and now - self._changed_at > timeout_s:
                    raise LauncherError(
                        f"the server was not ready after {now - start:.0f} s, and its loading has said nothing new for "
                        f"{timeout_s:g} s (--load-timeout); the end of its log:\n" + log.tail(15)
                    )
                if now >= next_beat:
                    next_beat += HEARTBEAT_S
                    self._say(f"{self._line or 'loading'} ({now - start:.0f} s so far)")
                time.sleep(POLL_S)

    def _is_ready(self, http: httpx.Client) -> bool:
        try:
            return all(http.get(page).status_code == 200 for page in self._pages)
        except httpx.TransportError:
            return False


def how_it_ended(status: int) -> str:
    """A process's exit status in words; below 0 it is a signal's number."""
    if status >= 0:
        return f"status {status}"
    try:
        return f"signal {signal.Signals(-status).name}"
    except ValueError:  # A real-time signal.
        return f"signal {-status}"
