"""Starts a `tritonserver` with the DFlash model, watches it load, and stops it without leaving anything behind.

`dflash-triton serve`, the tests and the benchmarks use `TritonServer`. Linux only, as Triton's Python backend is.
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
import secrets
import shutil
import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType

import httpx

from dflash_backend.config import (
    EngineConfig,
    asset_path,
    check_setting,
    environment_name,
    environment_settings,
)
from dflash_client.ports import reachable_host, settle_ports
from dflash_client.processes import family, gone, send
from dflash_client.server_log import LogLine, ServerLog
from dflash_client.tied import tied
from dflash_client.triton_install import LauncherError, TritonInstall, find_triton

__all__ = ["LauncherError", "TritonServer"]

HEARTBEAT_S = 5.0
POLL_S = 0.1
# Over and above Triton's own exit timeout: it looks once a second whether its models are unloaded.
EXIT_MARGIN_S = 3.0
# A server that has not finished loading has no requests to wait for, and does not heed a signal until it has.
LOADING_EXIT_S = 1.0
TERMINATE_S = 0.5
KILL_S = 2.0
SHARED_MEMORY = Path("/dev/shm")
# Packages that the model imports in Triton's stub.
MODEL_PACKAGES = ("dflash_backend", "dflash_kernels")


class TritonServer:
    """One server process with a DFlash model. A context manager; `start` returns when requests can be sent.

    `settings` are strings by name, as for `--set`, and win over the environment's. A port of 0 takes a free one:
    read `http_port`, `grpc_port` and `metrics_port` after the start. `model_repository` is a folder that holds one
    model folder, by default the project's own; it is served as `model_name`. `on_progress` gets a line whenever the
    load has something to say and every few seconds; `on_log` gets every line of the server's log, in another thread.
    `instances` engines share the model's requests. `more_models` are further models from the same folder, by name, with
    the settings that go into their config.pbtxt; those of `settings` and the environment are the server's and win.
    With `explicit`, clients may load and unload models through Triton's repository API; without it they may not.
    `stopping` says that `stop` has begun. A server that the main thread started ends with the process, however that
    ends; of one that was killed a temporary folder stays. Raises `LauncherError` or `ConfigError`, with a sentence for
    the operator.
    """

    def __init__(
        self,
        settings: Mapping[str, str] | None = None,
        *,
        model_name: str = "dflash",
        model_repository: Path | None = None,
        host: str = "0.0.0.0",
        http_port: int = 8000,
        grpc_port: int = 8001,
        metrics_port: int = 8002,
        instances: int = 1,
        more_models: Mapping[str, Mapping[str, str]] | None = None,
        explicit: bool = False,
        ready_timeout_s: float = 1800.0,
        exit_timeout_s: int = 5,
        environ: Mapping[str, str] | None = None,
        on_progress: Callable[[str], None] | None = None,
        on_log: Callable[[LogLine], None] | None = None,
    ) -> None:
        self._models: dict[str, Mapping[str, str]] = {model_name: {}, **(more_models or {})}
        for name, own_settings in self._models.items():
            for setting, value in own_settings.items():
                check_setting(setting, value, f"model {name}")
            if not re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9_.-]*", name):
                raise LauncherError(f"the model name {name!r} is not allowed; use letters, digits, '_', '-' and '.'")
        self._instances = instances
        self._explicit = explicit
        self.model_name = model_name
        self.host = host
        self.http_port, self.grpc_port, self.metrics_port = http_port, grpc_port, metrics_port
        self._model_repository = model_repository
        self._ready_timeout_s = ready_timeout_s
        self._exit_timeout_s = exit_timeout_s
        self._environ = _with_settings(os.environ if environ is None else environ, settings or {})
        self._on_progress = on_progress
        self._on_log = on_log
        self._shared_memory_prefix = f"dflash_{os.getpid()}_{secrets.token_hex(4)}_"
        self._progress_line = ""
        self._process: subprocess.Popen[str] | None = None
        self._log: ServerLog | None = None
        self._ready = False
        self._hurry = threading.Event()
        self.stopping = False
        self._directory: Path | None = None

    @property
    def http_url(self) -> str:
        """`host:port` of the HTTP endpoint, reachable from this machine."""
        return f"{reachable_host(self.host)}:{self.http_port}"

    @property
    def grpc_url(self) -> str:
        """`host:port` of the gRPC endpoint, reachable from this machine."""
        return f"{reachable_host(self.host)}:{self.grpc_port}"

    @property
    def metrics_url(self) -> str:
        """`host:port` of the metrics endpoint, reachable from this machine."""
        return f"{reachable_host(self.host)}:{self.metrics_port}"

    @property
    def pid(self) -> int:
        """The server's process number. Raises `LauncherError` before the start."""
        return self._running().pid

    def start(self) -> None:
        """Start the server and wait until the model is ready. Whatever stops this, nothing is left running."""
        self.stopping = False
        install = find_triton(self._environ)
        names = ("--http-port", "--grpc-port", "--metrics-port")
        wanted = dict(zip(names, (self.http_port, self.grpc_port, self.metrics_port), strict=True))
        settled = settle_ports(self.host, wanted)
        self.http_port, self.grpc_port, self.metrics_port = (settled[name] for name in names)
        try:
            self._launch(install)
            self._wait_until_ready()
        except BaseException:
            self.stop()
            raise

    def wait(self) -> int:
        """Wait until the server ends by itself, and return its exit status."""
        return self._running().wait()

    def failure(self) -> str:
        """Why the server ended, from its log."""
        return self._log.failure() if self._log is not None else ""

    def log_tail(self, lines: int = 50) -> str:
        """The last lines of the server's log."""
        return self._log.tail(lines) if self._log is not None else ""

    def hurry(self) -> None:
        """Make a `stop` that is under way, or is to come, not wait for requests. Safe in a signal handler."""
        self._hurry.set()

    def stop(self) -> None:
        """Stop the server: requests in flight may finish within the exit timeout. Does nothing when stopped."""
        self.stopping = True
        process, self._process = self._process, None
        if process is not None:
            self._end(process)
        if self._log is not None:
            self._log.join(KILL_S)
        if self._directory is not None:
            shutil.rmtree(self._directory, ignore_errors=True)
            self._directory = None
        for segment in SHARED_MEMORY.glob(self._shared_memory_prefix + "*"):
            segment.unlink(missing_ok=True)
        self._ready = False

    def __enter__(self) -> TritonServer:
        self.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.stop()

    def _running(self) -> subprocess.Popen[str]:
        if self._process is None:
            raise LauncherError("the server is not running")
        return self._process

    def _launch(self, install: TritonInstall) -> None:
        self._directory = Path(tempfile.mkdtemp(prefix=f"dflash-triton-{os.getpid()}-"))
        repository = self._directory / "models"
        source = self._model_repository or asset_path("model_repository")
        for name, settings in self._models.items():
            _copy_model(source, repository / name)
            _adapt(repository / name / "config.pbtxt", settings, self._instances)
        command = [
            str(install.binary),
            f"--model-repository={repository}",
            *install.prepare_backends(self._directory / "backends"),
            *self._options(),
        ]
        # Of a thread that ends before the process the server would go with the thread.
        if threading.current_thread() is threading.main_thread():
            command = tied(command)
        # A session of its own: a Ctrl-C in the terminal reaches the launcher alone, which then stops the server.
        self._process = subprocess.Popen(
            command,
            env=install.environment(self._environ),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            encoding="utf-8",
            errors="replace",
            start_new_session=True,
        )
        assert self._process.stdout is not None
        self._log = ServerLog(self._process.stdout, self._read_log)

    def _options(self) -> list[str]:
        debug = self._environ.get(environment_name("log_level"), "").strip() == "debug"
        if self._explicit:
            control = ["--model-control-mode=explicit", *(f"--load-model={name}" for name in self._models)]
        else:
            control = ["--model-control-mode=none"]
        return [
            *control,
            "--disable-auto-complete-config",
            f"--backend-config=python,shm-region-prefix-name={self._shared_memory_prefix}",
            f"--exit-timeout-secs={self._exit_timeout_s}",
            f"--log-verbose={int(debug)}",
            f"--http-address={self.host}",
            f"--http-port={self.http_port}",
            f"--grpc-address={self.host}",
            f"--grpc-port={self.grpc_port}",
            "--allow-metrics=true",
            f"--metrics-address={self.host}",
            f"--metrics-port={self.metrics_port}",
        ]

    def _read_log(self, line: LogLine) -> None:
        if not self._ready and line.progress is not None:
            self._progress_line = line.progress
            self._say(line.progress)
        if self._on_log is not None:
            self._on_log(line)

    def _say(self, text: str) -> None:
        if self._on_progress is not None:
            self._on_progress(text)

    def _wait_until_ready(self) -> None:
        process = self._running()
        start = time.monotonic()
        next_beat = start + HEARTBEAT_S
        with httpx.Client(base_url=f"http://{self.http_url}", timeout=2.0, trust_env=False) as http:
            while not self._answers(http):
                if process.poll() is not None:
                    self._raise_ended(process)
                now = time.monotonic()
                if now - start > self._ready_timeout_s:
                    raise LauncherError(
                        f"the server was not ready after {self._ready_timeout_s:g} s; the end of its log:\n"
                        + self.log_tail(15)
                    )
                if now >= next_beat:
                    next_beat += HEARTBEAT_S
                    self._say(f"{self._progress_line or 'loading'} ({now - start:.0f} s so far)")
                time.sleep(POLL_S)
        self._ready = True

    def _answers(self, http: httpx.Client) -> bool:
        try:
            paths = ("/v2/health/ready", *(f"/v2/models/{name}/ready" for name in self._models))
            return all(http.get(path).status_code == 200 for path in paths)
        except httpx.TransportError:
            return False

    def _raise_ended(self, process: subprocess.Popen[str]) -> None:
        if self._log is not None:
            self._log.join(KILL_S)
        code = process.returncode
        how = f"signal {signal.Signals(-code).name}" if code < 0 else f"status {code}"
        raise LauncherError(f"the server ended while it loaded ({how}): {self.failure()}")

    def _end(self, process: subprocess.Popen[str]) -> None:
        """Ask the server to end, then make everything that belongs to it end."""
        members = family(process.pid)
        if process.poll() is None:
            process.send_signal(signal.SIGINT)
            patience = self._exit_timeout_s + EXIT_MARGIN_S if self._ready else LOADING_EXIT_S
            deadline = time.monotonic() + patience
            while process.poll() is None and time.monotonic() < deadline and not self._hurry.is_set():
                members |= family(process.pid, members)
                time.sleep(POLL_S)
        for number, patience in ((signal.SIGTERM, TERMINATE_S), (signal.SIGKILL, KILL_S)):
            members = family(process.pid, members)
            send(members, number)
            process.poll()
            if gone(members, patience):
                break
        process.wait(KILL_S)


def _with_settings(environ: Mapping[str, str], settings: Mapping[str, str]) -> dict[str, str]:
    """The environment with the settings in it. Raises `ConfigError` for a bad one in either."""
    result = dict(environ)
    for name, value in settings.items():
        check_setting(name, value, "--set")
        if name in ("target_model", "draft_model") and Path(value).is_dir():
            value = str(Path(value).resolve())
        result[environment_name(name)] = value
    EngineConfig.from_values(environment_settings(result), "environment")
    return result


def _copy_model(repository: Path, destination: Path) -> None:
    """Copy the one model of a repository under its new name, with links to the packages that it imports.

    The embedded stub ignores PYTHONPATH, but the folder of `model.py` is on its path; the links come last there, so
    installed packages win.
    """
    models = [path for path in repository.iterdir() if (path / "config.pbtxt").is_file()]
    if len(models) != 1:
        raise LauncherError(f"{repository} holds {len(models)} models with a config.pbtxt; it must hold one")
    shutil.copytree(models[0], destination, ignore=shutil.ignore_patterns("__pycache__"))
    config = destination / "config.pbtxt"
    # Without a name Triton takes the folder's.
    text = re.sub(r'(?m)^\s*name\s*:\s*"[^"]*"\s*$', "", config.read_text(encoding="utf-8"), count=1)
    config.write_text(text, encoding="utf-8")
    for package in MODEL_PACKAGES:
        spec = importlib.util.find_spec(package)
        if spec is not None and spec.submodule_search_locations:
            (destination / "1" / package).symlink_to(next(iter(spec.submodule_search_locations)))


def _adapt(config: Path, settings: Mapping[str, str], instances: int) -> None:
    """Write settings, which were checked, and the number of instances into a model's config.pbtxt."""
    text = config.read_text(encoding="utf-8")
    for name, value in settings.items():
        text = re.sub(rf'(?m)^parameters\s*{{\s*key:\s*"{re.escape(name)}".*\n?', "", text)
        text += f'\nparameters {{ key: "{name}" value {{ string_value: {json.dumps(value)} }} }}'
    if instances != 1:
        text, found = re.subn(r"(instance_group\s*\[\s*{\s*count:\s*)\d+", rf"\g<1>{instances}", text, count=1)
        if not found:
            raise LauncherError(f"{config.parent.name}/config.pbtxt has no instance_group with a count to change")
    config.write_text(text, encoding="utf-8")
