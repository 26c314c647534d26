"""Notices that a running server is dead or hangs, whichever of its processes it is.

Triton itself replaces neither: when the stub of a decoupled model dies, its requests hang and new ones are refused for
ever, while every health end point says that all is well.
"""

from __future__ import annotations

import time
from contextlib import suppress
from pathlib import Path

import httpx

from dflash_cli.launcher.loading import LIVE_TIMEOUT_S, how_it_ended
from dflash_cli.launcher.processes import Process, named, unreaped_children
from dflash_cli.launcher.server import STUB_NAME, TritonServer
from dflash_cli.launcher.server_options import KEY_HEADER

PROBE_S = 2.0
# A single late answer, or a watch that itself did not run for long, proves nothing.
MIN_FAILURES = 3
MAX_TICK_S = 5.0


class Silence:
    """Seconds for which something has given no sign of life, counted only while the watch ran: neither a machine that
    slept nor a clock that was set makes a healthy server look dead."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self.looks = 0

    def look(self, elapsed_s: float, alive: bool) -> None:
        """A look, `elapsed_s` after the one before."""
        self.seconds = 0.0 if alive else self.seconds + min(elapsed_s, MAX_TICK_S)
        self.looks = 0 if alive else self.looks + 1

    def longer_than(self, limit_s: float) -> bool:
        """Whether there has been no sign for so long."""
        return self.looks >= MIN_FAILURES and self.seconds >= limit_s


class Watch:
    """Looks after one server from when it is ready. Call `trouble` about twice a second."""

    def __init__(self, server: TritonServer, hang_timeout_s: float) -> None:
        """What gives no sign of life for `hang_timeout_s` hangs; 0: nothing is taken to hang."""
        self._server = server
        self._hang_timeout_s = hang_timeout_s
        self._looked_at = self._probed_at = time.monotonic()
        self._stubs: set[Process] = server.stubs()
        self._num_dead_looks = 0
        self._http = Silence()
        # Of each heartbeat file when it was last touched, and for how long it was not.
        self._beats: dict[Path, tuple[float, Silence]] = {}
        url = f"http://{server.http_url}"
        self._client = httpx.Client(base_url=url, timeout=LIVE_TIMEOUT_S, trust_env=False, verify=False)

    def close(self) -> None:
        """Give back the connection."""
        self._client.close()

    def trouble(self) -> str | None:
        """Why the server must be replaced, if it must. Keeps its shared memory and its guardian in order as well."""
        now = time.monotonic()
        elapsed_s, self._looked_at = now - self._looked_at, now
        if (status := self._server.poll()) is not None:
            return f"tritonserver ended by itself ({how_it_ended(status)})"
        self._server.keep_safe()
        return self._dead_stub() or self._hanging(now, elapsed_s)

    def _dead_stub(self) -> str | None:
        """A stub that has died stays unreaped; one whose model is unloaded is asked for. The second look tells them
        apart."""
        alive = named(self._stubs, STUB_NAME)
        if alive == self._stubs and alive:
            self._num_dead_looks = 0
            return None
        dead = unreaped_children(self._server.pid, STUB_NAME)
        self._num_dead_looks = self._num_dead_looks + 1 if dead or not self._server.explicit else 0
        if self._num_dead_looks > 1:
            return "the model's process, Triton's Python backend stub, has died"
        if not dead:
            # Unloaded, or loaded again with a new stub.
            self._stubs = self._server.stubs()
        return None

    def _hanging(self, now: float, elapsed_s: float) -> str | None:
        limit_s = self._hang_timeout_s
        if not limit_s:
            return None
        self._look_at_beats(elapsed_s)
        if now - self._probed_at >= PROBE_S:
            self._http.look(now - self._probed_at, self._is_live())
            self._probed_at = now
        if self._http.longer_than(limit_s):
            return f"tritonserver has not answered for {self._http.seconds:.0f} s"
        silent = [silence for _, silence in self._beats.values() if silence.longer_than(limit_s)]
        if silent:
            if not self._server.explicit or self._is_loaded():
                return f"the model has given no sign of life for {silent[0].seconds:.0f} s"
            self._beats = {}
        return None

    def _look_at_beats(self, elapsed_s: float) -> None:
        """See who was alive since the last look: the file that all models touch, and that of each of their processes,
        since others go on where one of them hangs. Without a file a model is not ready yet, or does not beat."""
        file, found = self._server.heartbeat, {}
        for path in (file, *(file.with_name(f"{file.name}-{stub.pid}") for stub in self._stubs)):
            with suppress(FileNotFoundError):
                beat = path.stat().st_mtime
                before, silence = self._beats.get(path, (None, Silence()))
                silence.look(elapsed_s, beat != before)
                found[path] = beat, silence
        self._beats = found

    def _is_live(self) -> bool:
        try:
            return self._client.get("/v2/health/live").status_code == 200
        except httpx.TransportError:
            return False

    def _is_loaded(self) -> bool:
        """Whether Triton takes the model for loaded, also where clients may unload it."""
        try:
            response = self._client.post("/v2/repository/index", headers={KEY_HEADER: self._server.api_key})
            response.raise_for_status()
            index = response.json()
        except (httpx.HTTPError, ValueError):
            return False
        return any(entry.get("name") == self._server.model_name and entry.get("state") == "READY" for entry in index)
