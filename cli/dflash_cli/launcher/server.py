"""Starts a `tritonserver` with the DFlash model, watches it load, and stops it without leaving anything behind.

`dflash-triton serve`, the tests and the benchmarks use `TritonServer`. Linux only, as Triton's Python backend is.
"""

from __future__ import annotations

import os
import secrets
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path

from dflash_backend.config import asset_path, environment_name
from dflash_cli.launcher.guardian import Guardian
from dflash_cli.launcher.loading import POLL_S, Loading
from dflash_cli.launcher.model_files import adapt, copy_model
from dflash_cli.launcher.parent_death_signal import with_death_signal
from dflash_cli.launcher.ports import reachable_host, settle_ports
from dflash_cli.launcher.processes import Process, end, family, marked, named
from dflash_cli.launcher.server_files import ServerFiles
from dflash_cli.launcher.server_log import LogLine, ServerLog
from dflash_cli.launcher.server_options import (
    RESTRICTED_APIS,
    GrpcTls,
    addresses,
    check_apis,
    checked_extra,
    checked_models,
    environment_with,
    restrictions,
)
from dflash_cli.launcher.triton_install import LauncherError, TritonInstall, find_triton

__all__ = ["GrpcTls", "LauncherError", "TritonServer"]

# Over and above Triton's own exit timeout: it looks once a second whether its models are unloaded.
EXIT_MARGIN_S = 3.0
# A server that has not finished loading has no requests to wait for, and does not heed a signal until it has.
LOADING_EXIT_S = 1.0
# A server whose models have had no request for so long has nothing to wait for. Triton 2.51 may wait all the same, for
# a stream that was cancelled in the moment in which it ended (server pull request 8078).
IDLE_EXIT_S = 2.5
# Once its models' stubs have ended, a server has sent all answers, but waits for up to two seconds more.
UNLOADED_EXIT_S = 0.3
TERMINATE_S = 0.5
KILL_S = 2.0
STUB_NAME = "triton_python_backend_stub"
# A path in the environment of each of the server's processes: what the stub touches while it lives, and what tells the
# processes of this server from all others.
HEARTBEAT_ENV = "DFLASH_HEARTBEAT_FILE"


class TritonServer:
    """One server process with a DFlash model. A context manager; `start` returns when requests can be sent.

    `settings` are strings by name, as for `--set`, and win over the environment's. A port of 0 takes a free one:
    read `http_port`, `grpc_port` and `metrics_port` after the start. Metrics are at `metrics_host`, by default `host`.
    `model_repository` is a folder that holds one model folder, by default the project's own; it is served as
    `model_name`. `on_progress` gets a line whenever the load has something to say and every few seconds; `on_log` gets
    every line of the server's log, in another thread.
    `instances` engines share the model's requests. `more_models` are further models from the same folder, by name, with
    the settings that go into their config.pbtxt; those of `settings` and the environment are the server's and win.
    With `explicit`, clients may load and unload models through Triton's repository API, which lets them run code;
    without it they may not. The APIs of `RESTRICTED_APIS` need the header `KEY_HEADER` with `api_key`, but for those
    that `allow_apis` names: on a loopback address as well, which the pages in a local browser reach. `tls` encrypts
    gRPC. `extra_options` go to `tritonserver` as they are.

    A load that says nothing new for `ready_timeout_s` (0: any time) is given up. Requests in flight have
    `exit_timeout_s` at a stop. `ready_url`, in the file `ready-url` of `folder`, says whether requests are taken, by
    default Triton's own. `stopping` says that `stop` is under way. A stopped object can be started again. However
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
        metrics_host: str | None = None,
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
        ready_url: str | None = None,
        environ: Mapping[str, str] | None = None,
        on_progress: Callable[[str], None] | None = None,
        on_log: Callable[[LogLine], None] | None = None,
    ) -> None:
        self._models = checked_models(model_name, more_models or {})
        check_apis(allow_apis)
        self._instances = instances
        self.explicit = explicit
        self._allowed_apis = set(allow_apis)
        self.api_key = secrets.token_urlsafe(24)
        self.grpc_tls = tls is not None
        self._tls_options = tls.options() if tls is not None else []
        self._extra_options = checked_extra(extra_options)
        self.model_name = model_name
        self.host = host
        self.metrics_host = host if metrics_host is None else metrics_host
        self.http_port, self.grpc_port, self.metrics_port = http_port, grpc_port, metrics_port
        self._model_repository = model_repository
        self._ready_timeout_s = ready_timeout_s
        self._exit_timeout_s = exit_timeout_s
        self._ready_url = ready_url
        self._environ = environment_with(os.environ if environ is None else environ, settings or {})
        self._on_progress = on_progress
        self._on_log = on_log or (lambda line: None)
        self._files: ServerFiles | None = None
        self._guardian: Guardian | None = None
        self._process: subprocess.Popen[str] | None = None
        self._log: ServerLog | None = None
        self._ready = False
        self._hurry = threading.Event()
        self.stopping = False

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
        return f"{reachable_host(self.metrics_host)}:{self.metrics_port}"

    @property
    def pid(self) -> int:
        """The server's process number. Raises `LauncherError` before the start."""
        return self._running().pid

    @property
    def serves_demo_pair(self) -> bool:
        """Whether no setting names another target."""
        name = self._environ.get(environment_name("target_model"), "")
        return not name or Path(name) == asset_path("demo", "pair", "target")

    @property
    def restricted_apis(self) -> list[str]:
        """The APIs that need `api_key`."""
        return [name for name in RESTRICTED_APIS if name not in self._allowed_apis]

    @property
    def folder(self) -> Path:
        """The temporary folder of the running server. Raises `LauncherError` before the start."""
        return self._running_files().folder

    @property
    def heartbeat(self) -> Path:
        """The file that the model touches about once a second, from when it is ready."""
        return self._running_files().heartbeat

    def start(self) -> None:
        """Start the server and wait until the model is ready. Whatever stops this, nothing is left running."""
        self._hurry.clear()
        install = find_triton(self._environ)
        self.settle_ports()
        try:
            self._launch(install)
        except BaseException:
            self.stop()
            raise

    def settle_ports(self) -> None:
        """Find free ports for those that are 0. Raises `LauncherError` for one that is taken."""
        wanted, metrics = {"--http-port": self.http_port, "--grpc-port": self.grpc_port}, "--metrics-port"
        if self.metrics_host == self.host:
            settled = settle_ports(self.host, wanted | {metrics: self.metrics_port})
        else:
            settled = settle_ports(self.host, wanted) | settle_ports(self.metrics_host, {metrics: self.metrics_port})
        self.http_port, self.grpc_port = settled["--http-port"], settled["--grpc-port"]
        self.metrics_port = settled[metrics]

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
        """Restrict new shared memory, such as that of a model that is loaded again, to its owner; replace a guardian
        that was killed. To be called over and over while the server runs."""
        self._running_files().protect()
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
            if not self._ready:
                self._running_files().note_env_folders()
        if self._log is not None:
            self._log.join(KILL_S)
        if self._files is not None:
            self._files.remove()
            self._files = None
        # The last: until here it would finish what a launcher that is killed leaves undone.
        if self._guardian is not None:
            self._guardian.end()
            self._guardian = None
        self._ready = False
        self.stopping = False

    def __enter__(self) -> TritonServer:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def _running(self) -> subprocess.Popen[str]:
        if self._process is None:
            raise LauncherError("the server is not running")
        return self._process

    def _running_files(self) -> ServerFiles:
        if self._files is None:
            raise LauncherError("the server is not running")
        return self._files

    def _launch(self, install: TritonInstall) -> None:
        self._files = files = ServerFiles()
        source = self._model_repository or asset_path("model_repository")
        for name, settings in self._models.items():
            copy_model(source, files.folder / "models" / name)
            adapt(files.folder / "models" / name / "config.pbtxt", settings, self._instances)
        of_triton = f"http://{self.http_url}/v2/models/{self.model_name}/ready"
        files.write(self.http_url, self._ready_url or of_triton, self.api_key)
        command = [str(install.binary), *install.prepare_backends(files.folder / "backends"), *self._options(files)]
        # What the server's processes write lies in the launcher's folder, and goes with it.
        environ = install.environment(self._environ)
        environ |= {HEARTBEAT_ENV: str(files.heartbeat), "TMPDIR": str(files.folder)}
        patience_s = self._exit_timeout_s + EXIT_MARGIN_S
        self._guardian = Guardian(self._mark(), patience_s, files.folder, files.segments_pattern)
        self._guardian.start()
        # Linux would send the signal when the thread that starts the server ends.
        if threading.current_thread() is threading.main_thread():
            command = with_death_signal(command)
        # A session of its own: a Ctrl-C in the terminal reaches the launcher alone, which then stops the server.
        self._process = process = subprocess.Popen(
            command,
            env=environ,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            encoding="utf-8",
            errors="replace",
            start_new_session=True,
            pass_fds=files.locks,
        )
        assert process.stdout is not None
        loading = Loading(self.http_url, self.metrics_url, self._models, self._on_progress)
        self._log = ServerLog(process.stdout, lambda line: self._read_log(line, loading))
        loading.wait(process, self._log, self._ready_timeout_s)
        self.keep_safe()
        files.note_env_folders()
        self._log.mark_ready()
        self._ready = True

    def _mark(self) -> str:
        """What the environment of each of the server's processes holds, and of no other."""
        return f"{HEARTBEAT_ENV}={self.heartbeat}"

    def _options(self, files: ServerFiles) -> list[str]:
        debug = self._environ.get(environment_name("log_level"), "").strip() == "debug"
        return [
            f"--model-repository={files.folder / 'models'}",
            f"--model-control-mode={'explicit' if self.explicit else 'none'}",
            *(f"--load-model={name}" for name in self._models if self.explicit),
            "--disable-auto-complete-config",
            f"--backend-config=python,shm-region-prefix-name={files.segment_prefix}",
            f"--exit-timeout-secs={self._exit_timeout_s}",
            f"--log-verbose={int(debug)}",
            *addresses(self.host, self.metrics_host),
            f"--http-port={self.http_port}",
            f"--grpc-port={self.grpc_port}",
            "--allow-metrics=true",
            f"--metrics-port={self.metrics_port}",
            *restrictions(self.restricted_apis, self.api_key),
            *self._tls_options,
            *self._extra_options,
        ]

    def _read_log(self, line: LogLine, loading: Loading) -> None:
        if not self._ready:
            if line.progress is not None and self._files is not None:
                # A model's process runs, so Triton has made its environments.
                self._files.note_env_folders()
            loading.read(line)
        self._on_log(line)

    def _end(self, process: subprocess.Popen[str], wait_for_requests: bool) -> None:
        """Ask the server to end, then make everything that belongs to it end."""
        mark = self._mark()
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

    def _has_no_requests(self, stub: Process, began: float) -> bool:
        """Whether a model's process, which writes its number once a second, has said so since the stop began."""
        file = self.heartbeat.with_name(f"{self.heartbeat.name}-{stub.pid}")
        try:
            return file.stat().st_mtime >= began and file.read_text(encoding="ascii") == "0"
        except OSError:
            return False

    def _wait_for_end(self, process: subprocess.Popen[str], members: set[Process]) -> None:
        """Until it has ended, or its models have, or they have no requests, or the time for requests in flight is over,
        or there is a hurry."""
        patience = self._exit_timeout_s + EXIT_MARGIN_S if self._ready else LOADING_EXIT_S
        began, busy_at = time.time(), time.monotonic()
        deadline = busy_at + patience
        has_stub = self._ready and bool(named(members, STUB_NAME))
        while process.poll() is None and time.monotonic() < deadline and not self._hurry.is_set():
            stubs = named(members, STUB_NAME)
            if has_stub and not stubs:
                deadline, has_stub = min(deadline, time.monotonic() + UNLOADED_EXIT_S), False
            if not all(self._has_no_requests(stub, began) for stub in stubs):
                busy_at = time.monotonic()
            if has_stub and time.monotonic() - busy_at > IDLE_EXIT_S:
                break
            members |= family(process.pid, members)
            time.sleep(POLL_S)
