"""Kills the engine of a running server, keeps it down, lets it come back, and prints what each probe says meanwhile.

`python -m checks.readiness --down 10`. What must say "not ready" does so within a second of the kill, for as long as no
engine takes requests, and "ready" again within a second of the first request that is answered; what says that the front
end lives says so all the time. The exit status is 1 on a miss. Triton 2.51 calls a model ready for as long as its stub
lives: its own end points are shown, and count only with `--triton`, for a Triton whose Python backend asks the model.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial

import httpx
from tritonclient.grpc import InferenceServerClient

from checks.front_end import HOST, RunningFrontEnd, running_front_end
from dflash_client import DFlashClient
from load_tests.server_state import engine_pids

SETTINGS = {"max_num_seqs": "4", "max_model_len": "512", "kv_cache_gb": "0.05"}
# Within these seconds a probe has noticed. A probe is asked about ten times a second.
WITHIN_S = 1.0
INTERVAL_S = 0.1
BACK_WITHIN_S = 120.0
READY_PATHS = ("/health/ready", "/health/ready/", "/ping", "/ping/")
LIVE_PATHS = ("/health/live", "/health/live/", "/health", "/health/")


@dataclass
class Probe:
    """One way to ask, and what it said: `states` has the answer and the seconds since the kill at each change."""

    name: str
    ask: Callable[[], str]
    states: list[tuple[float, str]] = field(default_factory=list)
    # The times at which it was asked, and the answers.
    answers: list[tuple[float, str]] = field(default_factory=list)

    def run(self, began: float, done: threading.Event) -> None:
        """Ask until `done`."""
        while not done.is_set():
            asked = time.monotonic() - began
            answer = self.ask()
            # What was asked before the kill and answered after it may say either.
            self.answers.append((asked, answer))
            if not self.states or self.states[-1][1] != answer:
                self.states.append((time.monotonic() - began, answer))
            done.wait(INTERVAL_S)

    def line(self) -> str:
        """The changes in words."""
        return f"{self.name:28s} " + ", ".join(f"{at:6.2f} s {state}" for at, state in self.states)


def _status(client: httpx.Client, path: str) -> str:
    try:
        return str(client.get(path).status_code)
    except httpx.HTTPError as error:
        return type(error).__name__


def _one_token(client: httpx.Client) -> str:
    try:
        return str(client.post("/v1/completions", json={"prompt": "Hi", "max_tokens": 1}).status_code)
    except httpx.HTTPError as error:
        return type(error).__name__


def _grpc_ready(client: InferenceServerClient, model: str) -> str:
    try:
        return "200" if client.is_model_ready(model, client_timeout=WITHIN_S) else "503"
    except Exception as error:  # noqa: BLE001 - whatever it is, it is not ready
        return type(error).__name__


def _asked(client: DFlashClient) -> str:
    return "200" if client.probe(WITHIN_S) is None else "503"


class Verdict:
    """What was promised and what was seen."""

    def __init__(self, down_from: float, down_to: float) -> None:
        """Seconds since the kill between which no engine took requests, as those who sent one saw it."""
        self._down_from, self._down_to = down_from, down_to
        self.misses: list[str] = []

    def ready(self, probe: Probe) -> None:
        """It must say 503 while no engine takes requests, and 200 before and after, each within `WITHIN_S`."""
        for at, answer in probe.answers:
            if at < 0 or at > self._down_to + WITHIN_S:
                wanted = "200"
            elif self._down_from + WITHIN_S < at < self._down_to:
                wanted = "503"
            else:
                continue
            if answer != wanted:
                self.misses.append(f"{probe.name} said {answer} at {at:.2f} s, and not {wanted}")
                return

    def live(self, probe: Probe) -> None:
        """It must say 200 all the time."""
        self.misses += [f"{probe.name} said {state} at {at:.2f} s" for at, state in probe.states if state != "200"]


def _keep_down(front_end: RunningFrontEnd, began: float, down_s: float) -> None:
    """Kill the engine at `began`, and each that is started within `down_s` seconds of it."""
    while time.monotonic() < began:
        time.sleep(0.005)
    while time.monotonic() < began + down_s:
        for pid in engine_pids(front_end.server.pid):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.05)


def probes_of(
    front_end: RunningFrontEnd, http: httpx.Client, triton: httpx.Client, clients: Mapping[str, DFlashClient]
) -> dict[str, list[Probe]]:
    """By what they must say: `ready`, `live`, `triton` (as `ready`, where Triton asks the model) and `truth`."""
    model = front_end.server.model_name
    native = InferenceServerClient(front_end.server.grpc_url)
    return {
        "ready": [
            *(Probe(f"GET {path}", partial(_status, http, path)) for path in READY_PATHS),
            *(Probe(f"client over {name}", partial(_asked, client)) for name, client in clients.items()),
        ],
        "live": [Probe(f"GET {path}", partial(_status, http, path)) for path in LIVE_PATHS],
        "triton": [
            Probe("Triton's model ready, HTTP", lambda: _status(triton, f"/v2/models/{model}/ready")),
            Probe("Triton's server ready, HTTP", lambda: _status(triton, "/v2/health/ready")),
            Probe("Triton's model ready, gRPC", lambda: _grpc_ready(native, model)),
        ],
        "truth": [Probe("a request for one token", lambda: _one_token(http))],
    }


def run(down_s: float, triton_counts: bool) -> list[str]:
    """Play it once, print the states, and return what was not as promised."""
    with (
        running_front_end(SETTINGS, ["--no-access-log"]) as front_end,
        httpx.Client(base_url=f"http://{HOST}:{front_end.port}", timeout=30, trust_env=False) as http,
        httpx.Client(base_url=f"http://{front_end.server.http_url}", timeout=30, trust_env=False) as triton,
        DFlashClient(front_end.server.grpc_url) as grpc,
        DFlashClient(front_end.server.http_url, "http") as plain,
    ):
        # It has served, so that its first restart is at once.
        assert _one_token(http) == "200"
        groups = probes_of(front_end, http, triton, {"gRPC": grpc, "HTTP": plain})
        began, done = time.monotonic() + 1.0, threading.Event()
        threads = [
            threading.Thread(target=probe.run, args=(began, done)) for group in groups.values() for probe in group
        ]
        for thread in threads:
            thread.start()
        _keep_down(front_end, began, down_s)
        (truth,) = groups["truth"]
        deadline = time.monotonic() + BACK_WITHIN_S
        while truth.answers[-1][1] != "200" and time.monotonic() < deadline:
            time.sleep(INTERVAL_S)
        time.sleep(2 * WITHIN_S)
        done.set()
        for thread in threads:
            thread.join()
    for group in groups.values():
        for probe in group:
            print(probe.line(), flush=True)
    refused = [at for at, answer in truth.answers if answer == "503"]
    if not refused or truth.answers[-1][1] != "200":
        return ["no request was refused, or none was answered again"]
    verdict = Verdict(0.0, refused[-1])
    for probe in groups["ready"] + (groups["triton"] if triton_counts else []):
        verdict.ready(probe)
    for probe in groups["live"]:
        verdict.live(probe)
    print(f"no engine took requests for {refused[-1]:.1f} s")
    return verdict.misses


def main(arguments: list[str] | None = None) -> int:
    """Entry point."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--down", type=float, default=10.0, metavar="S", help="how long it is kept down (%(default)g)")
    parser.add_argument("--triton", action="store_true", help="Triton's own end points count too")
    given = parser.parse_args(arguments)
    misses = run(given.down, given.triton)
    print("\n".join(f"MISSED: {miss}" for miss in misses) or "kept", flush=True)
    return int(bool(misses))


if __name__ == "__main__":
    sys.exit(main())
