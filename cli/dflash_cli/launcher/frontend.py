"""The OpenAI front end that `dflash-triton serve` runs beside its server, as a process of its own."""

from __future__ import annotations

import io
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

import httpx

from dflash_cli.launcher.parent_death_signal import with_death_signal
from dflash_cli.launcher.ports import reachable_host, settle_ports
from dflash_cli.launcher.restarts import FIRST_DELAY_S
from dflash_cli.launcher.triton_install import LauncherError
from dflash_cli.launcher.watch import Silence

if TYPE_CHECKING:
    from dflash_openai.security import ServerTls

READY_TIMEOUT_S = 60.0
PROBE_TIMEOUT_S = 5.0
POLL_S = 0.1
KILL_S = 2.0
LONGEST_DELAY_S = 30.0
# One that ran for so long did not fail at its start.
SERVED_S = 60.0


class FrontendProcess:
    """Runs `dflash-triton openai` and starts it again when it dies or hangs. All methods are for the main thread: the
    process ends with the thread that has started it."""

    def __init__(
        self,
        host: str,
        port: int,
        options: Sequence[str],
        environ: Mapping[str, str] | None = None,
        say: Callable[[str], None] = lambda text: None,
        tls: ServerTls | None = None,
        hang_timeout_s: float = 0.0,
    ) -> None:
        """`options` are those of the command, but for host and port; `tls` says what they make of HTTPS. It hangs when
        its event loop has not run for `hang_timeout_s`; 0: it is not taken to hang. Raises `LauncherError` for a port
        that is taken."""
        settle_ports(host, {"--port": port})
        self._host, self._port = host, port
        self._options = list(options)
        self._addresses: list[str] = []  # those of the server behind it, as options
        self._environ = dict(os.environ if environ is None else environ)
        self._say = say
        self._tls = tls
        self._hang_timeout_s = hang_timeout_s
        self._process: subprocess.Popen[bytes] | None = None
        self._started_at = 0.0
        # What it waits for once it has imported what it needs; None where it does not wait, or not any more.
        self._go: int | None = None
        # What its event loop writes once a second, from when it listens.
        self._heartbeats: io.FileIO | None = None
        self._has_beaten = False
        self._silence = Silence()
        self._looked_at = 0.0
        self._delay_s = FIRST_DELAY_S
        self._restart_at: float | None = None

    @property
    def url(self) -> str:
        """The base URL of the API, reachable from this machine."""
        return f"{'http' if self._tls is None else 'https'}://{reachable_host(self._host)}:{self._port}"

    @property
    def ready_url(self) -> str | None:
        """What says whether requests are taken, to who has no certificate; None where it lets in no one without."""
        return None if self._tls is not None and self._tls.client_ca is not None else f"{self.url}/health/ready"

    @property
    def pid(self) -> int | None:
        """Its process; None when it does not run."""
        return None if self._process is None else self._process.pid

    def launch(self, grpc_url: str, metrics_url: str) -> None:
        """Start the process, which is to be before the server at these addresses, and let it import what it needs: it
        listens from `start` on. Raises `ValueError` for ports that are still 0: the server's `settle_ports` comes
        first."""
        for url in (grpc_url, metrics_url):
            if url.endswith(":0"):
                raise ValueError(f"the port of {url} is not settled")
        self._addresses = ["--triton", f"grpc://{grpc_url}", "--triton-metrics", f"http://{metrics_url}/metrics"]
        go, self._go = os.pipe()
        try:
            self._spawn(go)
        finally:
            os.close(go)

    def start(self, trouble: Callable[[], str | None] = lambda: None) -> None:
        """Let it listen, and wait for a while until it can answer requests: not while the server is in `trouble`, since
        it is never ready before one that is dead. Raises `LauncherError` when it ends."""
        self._close_go()
        deadline = time.monotonic() + READY_TIMEOUT_S
        while (why := self._why_not_ready()) is not None:
            if self._process is None or self._process.poll() is not None:
                self.stop()
                raise LauncherError("the OpenAI front end did not start; --port 0 leaves it out")
            if trouble() is not None:
                return
            if time.monotonic() > deadline:
                self._say(f"warning: the OpenAI front end is not ready: {why}")
                return
            time.sleep(POLL_S)

    def keep(self) -> None:
        """Start it again where it has died, after a delay that doubles with each start that fails; end it where it
        hangs."""
        now = time.monotonic()
        elapsed_s, self._looked_at = now - self._looked_at, now
        if self._restart_at is None:
            if self._process is None:
                return
            if (status := self._process.poll()) is None:
                self._end_if_it_hangs(self._process, elapsed_s)
                return
            if now - self._started_at > SERVED_S:
                self._delay_s = FIRST_DELAY_S
            self._say(f"the OpenAI front end ended with status {status}; it is started anew in {self._delay_s:g} s")
            self._restart_at = now + self._delay_s
            self._delay_s = min(2 * self._delay_s, LONGEST_DELAY_S)
        elif now >= self._restart_at:
            self._restart_at = None
            self._spawn()

    def drain(self) -> None:
        """Let it refuse new requests, and end once those that run have finished. Does nothing when it does not run."""
        if self._process is not None:
            self._process.send_signal(signal.SIGTERM)

    def stop(self) -> None:
        """End it now. Does nothing when it does not run."""
        process, self._process = self._process, None
        self._restart_at = None
        self._close_go()
        if self._heartbeats is not None:
            self._heartbeats.close()
        if process is None:
            return
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(KILL_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()

    def _end_if_it_hangs(self, process: subprocess.Popen[bytes], elapsed_s: float) -> None:
        """The next look finds it dead."""
        assert self._heartbeats is not None
        beat = bool(self._heartbeats.read(4096))
        self._has_beaten = self._has_beaten or beat
        self._silence.look(elapsed_s, beat or not self._has_beaten)
        if self._hang_timeout_s and self._silence.longer_than(self._hang_timeout_s):
            self._say(f"the OpenAI front end has given no sign of life for {self._silence.seconds:.0f} s")
            process.kill()
            self._silence = Silence()

    def _why_not_ready(self) -> str | None:
        """None once it answers requests."""
        try:
            if self._tls is not None and self._tls.client_ca is not None:
                # We have no certificate that it would let in.
                socket.create_connection((reachable_host(self._host).strip("[]"), self._port), PROBE_TIMEOUT_S).close()
                return None
            # Its certificate is for the name that clients use.
            answer = httpx.get(f"{self.url}/health/ready", timeout=PROBE_TIMEOUT_S, trust_env=False, verify=False)
        except (OSError, httpx.TransportError) as error:
            return str(error)
        return None if answer.is_success else answer.text

    def _close_go(self) -> None:
        if self._go is not None:
            os.close(self._go)
        self._go = None

    def _spawn(self, go: int | None = None) -> None:
        """Start the process. It waits until the other end of the pipe `go` is closed, where there is one."""
        command = [sys.executable, "-m", "dflash_cli.main", "openai", "--host", self._host, "--port", str(self._port)]
        fds, waits = ([], []) if go is None else ([go], ["--start-fd", str(go)])
        self._started_at = self._looked_at = time.monotonic()
        if self._heartbeats is not None:
            self._heartbeats.close()
        reader, writer = os.pipe()
        os.set_blocking(reader, False)
        self._heartbeats, self._has_beaten, self._silence = io.FileIO(reader), False, Silence()
        try:
            self._process = subprocess.Popen(
                with_death_signal([*command, "--heartbeat-fd", str(writer), *waits, *self._options, *self._addresses]),
                env=self._environ,
                pass_fds=[writer, *fds],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                # A Ctrl-C in the terminal reaches the launcher alone, which then stops it.
                start_new_session=True,
            )
        finally:
            os.close(writer)
