"""Starts a `tritonserver` with the DFlash model, watches it load, and stops it without leaving anything behind.

`dflash-triton serve`, the tests and the benchmarks use `TritonServer`. Linux only, as Triton's Python backend is.
"""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import shutil
import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
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
from dflash_cli.launcher.guardian import Guardian
from dflash_cli.launcher.model_files import adapt, copy_model
from dflash_cli.launcher.parent_death_signal import tied
from dflash_cli.launcher.ports import is_loopback, reachable_host, settle_ports
from dflash_cli.launcher.processes import Process, end, family, marked, named
from dflash_cli.launcher.server_log import LogLine, ServerLog
from dflash_cli.launcher.server_options import RESTRICTED_APIS, GrpcTls, check_apis, checked_extra, restrictions
from dflash_cli.launcher.triton_install import LauncherError, TritonInstall, find_triton

__all__ = ["GrpcTls", "LauncherError", "TritonServer"]

HEARTBEAT_S = 5.0
POLL_S = 0.1
LIVE_TIMEOUT_S = 2.0
# Over and above Triton's own exit timeout: it looks once a second whether its models are unloaded.
EXIT_MARGIN_S = 3.0
# A server that has not finished loading has no requests to wait for, and does not heed a signal until it has.
LOADING_EXIT_S = 1.0
# Once its models' stubs have ended, a server has sent all answers, but waits for up to two seconds more.
UNLOADED_EXIT_S = 0.3
TERMINATE_S = 0.5
KILL_S = 2.0
SHARED_MEMORY = Path("/dev/shm")
# A folder that Triton's Python backend makes as it is loaded, whatever TMPDIR says, and removes when it ends by itself.
PYTHON_ENV_FOLDERS = ("/tmp", "python_env_*")
# Newer Tritons protect shared memory whose name begins so from clients that register it.
SEGMENT_PREFIX = "triton_python_backend_shm_region_dflash_"
STUB_NAME = "triton_python_backend_stub"
# A path in the environment of each of the server's processes: what the stub touches while it lives, and what tells the
# processes of this server from all others.
HEARTBEAT_ENV = "DFLASH_HEARTBEAT_FILE"
# The name of a socket has at most 107 characters (`man 7 unix`); the engine's are `dflash-xxxxxxxx/out` in TMPDIR.
LONGEST_FOLDER = 107 - len("/dflash-xxxxxxxx/out")


class TritonServer:
    """One server process with a DFlash model. A context manager; `start` returns when requests can be sent.

    `settings` are strings by name, as for `--set`, and win over the environment's. A port of 0 takes a free one:
    read `http_port`, `grpc_port` and `metrics_port` after the start. `model_repository` is a folder that holds one
    model folder, by default the project's own; it is served as `model_name`. `on_progress` gets a line whenever the
    load has something to say and every few seconds; `on_log` gets every line of the server's log, in another thread.
    `instances` engines share the model's requests. `more_models` are further models from the same folder, by name, with
    the settings that go into their config.pbtxt; those of `settings` and the environment are the server's and win.
    With `explicit`, clients may load and unload models through Triton's repository API, which lets them run code;
    without it they may not. The APIs of `RESTRICTED_APIS` need the header `KEY_HEADER` with `api_key`, but for those
    that `allow_apis` names, and `model-repository` with `explicit` on a loopback address. `tls` encrypts gRPC.
    `extra_options` go to `tritonserver` as they are.

    A load that says nothing new for `ready_timeout_s` (0: any time) is given up. Requests in flight have
    `exit_timeout_s` at a stop. `stopping` says that `stop` is under way. A stopped object can be started again. However
    the process that started a server ends, the server ends too, and nothing of it stays. Raises `LauncherError` or
    `ConfigError`, with a sentence for the operator.
    """

    def __init__(
        self,
        settings: Mapping[str, str] | None = None,
        *,
        model_name: str = "dflash",
        model_repository: Path | None = None,
        host: str = "127.0.0.1",
        http_port: int = 8000,
        grpc_port: int = 8001,
        metrics_port: int = 8002,
        instances: int = 1,
        more_models: Mapping[str, Mapping[str, str]] | None = None,
        explicit: bool = False,
        allow_apis: Collection[str] = (),
        tls: GrpcTls | None = None,
        extra_options: Sequence[str] = (),
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
        check_apis(allow_apis)
        self._instances = instances
        self._explicit = explicit
        self._allowed_apis = {*allow_apis, *(["model-repository"] if explicit and is_loopback(host) else [])}
        self.api_key = secrets.token_urlsafe(24)
        self.grpc_tls = tls is not None
        self._tls_options = tls.options() if tls is not None else []
        self._extra_options = checked_extra(extra_options)
        self.model_name = model_name
        self.host = host
        self.http_port, self.grpc_port, self.metrics_port = http_port, grpc_port, metrics_port
        self._model_repository = model_repository
        self._ready_timeout_s = ready_timeout_s
        self._exit_timeout_s = exit_timeout_s
        self._environ = _with_settings(os.environ if environ is None else environ, settings or {})
        self._on_progress = on_progress
        self._on_log = on_log
        self._shared_memory_prefix = f"{SEGMENT_PREFIX}{os.getpid()}_{secrets.token_hex(4)}_"
        self._progress_line = ""
        self._progress_at = 0.0
        self._guardian: Guardian | None = None
        self._process: subprocess.Popen[str] | None = None
        self._log: ServerLog | None = None
        self._ready = False
        self._hurry = threading.Event()
        self.stopping = False
        self._directory: Path | None = None
        self._env_folders_before: set[Path] = set()
        self._env_folders: set[Path] = set()

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

    @property
    def explicit(self) -> bool:
        """Whether clients may unload models."""
        return self._explicit

    @property
    def restricted_apis(self) -> list[str]:
        """The APIs that need `api_key`."""
        return [name for name in RESTRICTED_APIS if name not in self._allowed_apis]

    @property
    def folder(self) -> Path:
        """The temporary folder of the running server. Raises `LauncherError` before the start."""
        if self._directory is None:
            raise LauncherError("the server is not running")
        return self._directory

    @property
    def heartbeat(self) -> Path:
        """The file that the model touches about once a second, from when it is ready."""
        return self.folder / "heartbeat"

    def start(self) -> None:
        """Start the server and wait until the model is ready. Whatever stops this, nothing is left running."""
        self._hurry.clear()
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

    def poll(self) -> int | None:
        """The exit status of a server that has ended by itself, else None."""
        return self._running().poll()

    def failure(self) -> str:
        """Why the server ended, from its log: why the load failed or, once it was ready, what it said at its end."""
        if self._log is None:
            return ""
        self._log.join(KILL_S)
        return self._log.last_words() if self._ready else self._log.failure()

    def log_tail(self, lines: int = 50) -> str:
        """The last lines of the server's log."""
        return self._log.tail(lines) if self._log is not None else ""

    def hurry(self) -> None:
        """Make a `stop` that is under way, or is to come, not wait for requests. Safe in a signal handler."""
        self._hurry.set()

    def keep_safe(self) -> None:
        """What has to be done again and again while the server runs: nobody else may read its shared memory, where
        prompts lie (Triton lets everybody, also in the segments of a model that is loaded again), and a guardian that
        was killed is replaced."""
        for segment in self._segments():
            with contextlib.suppress(FileNotFoundError):
                segment.chmod(0o600)
        if self._guardian is not None:
            self._guardian.start()

    def stubs(self) -> set[Process]:
        """The living processes of Triton's Python backend."""
        return named(family(self.pid), STUB_NAME)

    def stop(self, *, wait_for_requests: bool = True) -> None:
        """Stop the server: requests in flight may finish within the exit timeout, unless `wait_for_requests` is False.
        Does nothing when stopped."""
        self.stopping = True
        process, self._process = self._process, None
        if process is not None:
            self._end(process, wait_for_requests)
        if self._log is not None:
            self._log.join(KILL_S)
        for segment in self._segments():
            segment.unlink(missing_ok=True)
        if process is not None:
            # What a server that was killed has left. An environment in use is not empty, and so stays.
            folders = self._env_folders if self._ready else _env_folders() - self._env_folders_before
            for path in folders:
                with contextlib.suppress(OSError):
                    path.rmdir()
        if self._directory is not None:
            shutil.rmtree(self._directory, ignore_errors=True)
            self._directory = None
        # The last: until here it would finish what a launcher that is killed leaves undone.
        if self._guardian is not None:
            self._guardian.end()
            self._guardian = None
        self._ready = False
        self.stopping = False

    def _segments(self) -> list[Path]:
        return list(SHARED_MEMORY.glob(self._shared_memory_prefix + "*"))

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
        self._directory = folder = _temporary_folder()
        self._env_folders_before = _env_folders()
        repository = folder / "models"
        source = self._model_repository or asset_path("model_repository")
        for name, settings in self._models.items():
            copy_model(source, repository / name)
            adapt(repository / name / "config.pbtxt", settings, self._instances)
        # For health checks that do not know how the server was started, and for the operator.
        (folder / "http-address").write_text(self.http_url + "\n", encoding="utf-8")
        (folder / "api-key").write_text(self.api_key + "\n", encoding="utf-8")
        command = [
            str(install.binary),
            f"--model-repository={repository}",
            *install.prepare_backends(folder / "backends"),
            *self._options(),
        ]
        environ = install.environment(self._environ)
        # What the server's processes write lies in the launcher's folder, and goes with it.
        environ |= {HEARTBEAT_ENV: str(self.heartbeat), "TMPDIR": str(folder)}
        self._guardian = Guardian(
            mark=f"{HEARTBEAT_ENV}={self.heartbeat}",
            patience_s=self._exit_timeout_s + EXIT_MARGIN_S,
            folder=folder,
            segments=str(SHARED_MEMORY / (self._shared_memory_prefix + "*")),
        )
        self._guardian.start()
        # Of a thread that ends before the process the server would go with the thread.
        if threading.current_thread() is threading.main_thread():
            command = tied(command)
        # A session of its own: a Ctrl-C in the terminal reaches the launcher alone, which then stops the server.
        self._process = subprocess.Popen(
            command,
            env=environ,
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
            *restrictions(self._allowed_apis, self.api_key),
            *self._tls_options,
            *self._extra_options,
        ]

    def _read_log(self, line: LogLine) -> None:
        if not self._ready and line.progress is not None:
            if line.progress != self._progress_line:
                self._progress_at = time.monotonic()
            self._progress_line = line.progress
            self._say(line.progress)
        if self._on_log is not None:
            self._on_log(line)

    def _say(self, text: str) -> None:
        if self._on_progress is not None:
            self._on_progress(text)

    def _wait_until_ready(self) -> None:
        process = self._running()
        start = self._progress_at = time.monotonic()
        self._progress_line = ""
        next_beat = start + HEARTBEAT_S
        with httpx.Client(base_url=f"http://{self.http_url}", timeout=LIVE_TIMEOUT_S, trust_env=False) as http:
            while not self._answers(http):
                if process.poll() is not None:
                    self._raise_ended(process)
                now = time.monotonic()
                if self._ready_timeout_s and now - self._progress_at > self._ready_timeout_s:
                    raise LauncherError(
                        f"the server was not ready after {now - start:.0f} s, and its loading has said nothing new for "
                        f"{self._ready_timeout_s:g} s; the end of its log:\n" + self.log_tail(15)
                    )
                if now >= next_beat:
                    next_beat += HEARTBEAT_S
                    self._say(f"{self._progress_line or 'loading'} ({now - start:.0f} s so far)")
                time.sleep(POLL_S)
        self.keep_safe()
        self._env_folders = _env_folders() - self._env_folders_before
        if self._log is not None:
            self._log.mark_ready()
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

    def _end(self, process: subprocess.Popen[str], wait_for_requests: bool) -> None:
        """Ask the server to end, then make everything that belongs to it end."""
        mark = f"{HEARTBEAT_ENV}={self.heartbeat}"
        members = family(process.pid) | marked(mark)
        if process.poll() is None and wait_for_requests:
            process.send_signal(signal.SIGINT)
            self._wait_for_end(process, members)
        for _ in range(3):
            # A process may have started another one since the last look.
            members = family(process.pid, members) | marked(mark)
            process.poll()
            if not members or end(members, TERMINATE_S, KILL_S):
                break
        process.wait(KILL_S)

    def _wait_for_end(self, process: subprocess.Popen[str], members: set[Process]) -> None:
        """Until it has ended, or its models have, or the time for requests in flight is over, or there is a hurry."""
        patience = self._exit_timeout_s + EXIT_MARGIN_S if self._ready else LOADING_EXIT_S
        deadline = time.monotonic() + patience
        has_stub = self._ready and bool(named(members, STUB_NAME))
        while process.poll() is None and time.monotonic() < deadline and not self._hurry.is_set():
            if has_stub and not named(members, STUB_NAME):
                deadline, has_stub = min(deadline, time.monotonic() + UNLOADED_EXIT_S), False
            members |= family(process.pid, members)
            time.sleep(POLL_S)


def _env_folders() -> set[Path]:
    """Those there are now, of all servers on this machine."""
    folder, pattern = PYTHON_ENV_FOLDERS
    return set(Path(folder).glob(pattern))


def _with_settings(environ: Mapping[str, str], settings: Mapping[str, str]) -> dict[str, str]:
    """The environment with the settings in it. Raises `ConfigError` for a bad one in either."""
    result = dict(environ)
    for name, value in settings.items():
        check_setting(name, value, "--set")
        # Empty is no directory, but no drafter.
        if name in ("target_model", "draft_model") and value and Path(value).is_dir():
            value = str(Path(value).resolve())
        result[environment_name(name)] = value
    EngineConfig.from_values(environment_settings(result), "environment")
    return result


def _temporary_folder() -> Path:
    """A folder for a server's files and its processes' temporary ones. Raises `LauncherError` when the sockets in it
    would have too long a name."""
    prefix = f"dflash-triton-{os.getpid()}-"
    parent = tempfile.gettempdir()
    longest = LONGEST_FOLDER - len(f"/{prefix}xxxxxxxx")
    if len(os.fsencode(parent)) > longest:
        raise LauncherError(
            f"the temporary directory {parent} has a name of {len(os.fsencode(parent))} bytes; sockets lie in it, "
            f"whose names Linux bounds, so at most {longest} are allowed: set TMPDIR to a shorter one, such as /tmp"
        )
    return Path(tempfile.mkdtemp(prefix=prefix))
