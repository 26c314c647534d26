"""What the launcher tells `tritonserver` and its models: settings, which APIs need a key, TLS, and further options."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from dflash_backend.checkpoints.named import NAMED
from dflash_backend.config import NGRAM, EngineConfig, check_setting, environment_name, environment_settings
from dflash_cli.launcher.ports import numeric_host
from dflash_cli.launcher.triton_install import LauncherError

# APIs with which who reaches the server can read other requests' memory, write files, silence the log, or load models
# and with them code. Triton's own names.
RESTRICTED_APIS = ("shared-memory", "trace", "logging", "model-repository")
# The header that opens them. gRPC asks for it under a prefix of Triton's.
KEY_HEADER = "dflash-api-key"
GRPC_KEY_HEADER = f"triton-grpc-protocol-{KEY_HEADER}"

# Options that the launcher sets itself, and those that would undo them, with what to use instead.
OWNED = {
    "model-repository": "the model is given by --target and --model-name",
    "model-store": "the model is given by --target and --model-name",
    "model-control-mode": "use --explicit",
    "load-model": "the model is given by --target and --model-name",
    "backend-directory": "the launcher puts the Python backend together",
    "backend-config": "the launcher names the shared memory",
    "disable-auto-complete-config": "the launcher sets it",
    "exit-timeout-secs": "use --exit-timeout",
    "log-verbose": "use --set log_level=debug",
    "log-file": "the launcher reads the log; redirect its own output",
    "allow-http": "the launcher asks over HTTP whether the server lives",
    "http-address": "use --host",
    "http-port": "use --http-port",
    "http-restricted-api": "use --allow-api",
    "allow-grpc": "the launcher sets it",
    "grpc-address": "use --host",
    "grpc-port": "use --grpc-port",
    "grpc-restricted-protocol": "use --allow-api",
    "grpc-use-ssl": "use --grpc-tls-cert and --grpc-tls-key",
    "grpc-use-ssl-mutual": "use --grpc-tls-client-ca",
    "grpc-server-cert": "use --grpc-tls-cert",
    "grpc-server-key": "use --grpc-tls-key",
    "grpc-root-cert": "use --grpc-tls-client-ca",
    "allow-metrics": "the launcher sets it",
    "metrics-address": "use --metrics-host",
    "metrics-port": "use --metrics-port",
    "id": "the launcher sets it",
    "help": "run `tritonserver --help`",
}


@dataclass(frozen=True, slots=True)
class GrpcTls:
    """Files in PEM format: the server's certificate and its key, and, where clients must show a certificate of their
    own, the authority that signs those."""

    certificate: Path
    key: Path
    client_ca: Path | None = None

    def options(self) -> list[str]:
        """For `tritonserver`. Raises `LauncherError` with the file that cannot be read."""
        files = [("certificate", self.certificate), ("key", self.key), ("clients' authority", self.client_ca)]
        for what, path in files:
            if path is not None and not (path.is_file() and os.access(path, os.R_OK)):
                raise LauncherError(f"the {what} for TLS, {path}, is no file that can be read")
        options = ["--grpc-use-ssl=true", f"--grpc-server-cert={self.certificate}", f"--grpc-server-key={self.key}"]
        if self.client_ca is not None:
            options += ["--grpc-use-ssl-mutual=true", f"--grpc-root-cert={self.client_ca}"]
        return options


def check_apis(names: Collection[str]) -> None:
    """Raises `LauncherError` unless all are names of APIs that are restricted."""
    for name in names:
        if name not in RESTRICTED_APIS:
            raise LauncherError(f"'{name}' is no API that is restricted; those are: {', '.join(RESTRICTED_APIS)}")


def restrictions(apis: Sequence[str], key: str) -> list[str]:
    """Options that make each of these APIs ask for `key` in a header."""
    options = ("http-restricted-api", "grpc-restricted-protocol") if apis else ()
    return [f"--{option}={','.join(apis)}:{KEY_HEADER}={key}" for option in options]


def addresses(host: str, metrics_host: str) -> list[str]:
    """Where `tritonserver` listens. Its HTTP servers know no names, and write an address of IPv6 as libevhtp does; with
    another one they start and listen nowhere."""
    numeric, of_metrics = numeric_host(host), numeric_host(metrics_host)
    return [
        f"--http-address={'ipv6:' if ':' in numeric else ''}{numeric}",
        f"--grpc-address={f'[{numeric}]' if ':' in numeric else numeric}",
        f"--metrics-address={'ipv6:' if ':' in of_metrics else ''}{of_metrics}",
    ]


def checked_extra(options: Sequence[str]) -> list[str]:
    """Further options for `tritonserver`, as they are. Raises `LauncherError` for one that the launcher sets itself and
    for what is no option."""
    for position, option in enumerate(options):
        if not option.startswith("--"):
            # The value of the option before it, as in `--http-thread-count 4`.
            if position and options[position - 1].startswith("--") and "=" not in options[position - 1]:
                continue
            raise LauncherError(f"{option!r} is no option of tritonserver; they begin with '--', as in --name=value")
        name = option[2:].partition("=")[0]
        if name in OWNED:
            raise LauncherError(f"tritonserver's --{name} cannot be passed on: {OWNED[name]}")
    return list(options)


def checked_models(name: str, more: Mapping[str, Mapping[str, str]]) -> dict[str, Mapping[str, str]]:
    """Each model's own settings by its name, the first model's being none. Raises `ConfigError` for a bad setting and
    `LauncherError` for a name that is no folder's."""
    models = {name: {}, **more}
    for model, settings in models.items():
        for setting, value in settings.items():
            check_setting(setting, value, f"model {model}")
        if not re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9_.-]*", model):
            raise LauncherError(f"the model name {model!r} is not allowed; use letters, digits, '_', '-' and '.'")
    return models


def environment_with(environ: Mapping[str, str], settings: Mapping[str, str]) -> dict[str, str]:
    """The environment with the settings in it. Raises `ConfigError` for a bad one in either."""
    result = dict(environ)
    for name, value in settings.items():
        check_setting(name, value, "--set")
        # Empty is no path, but no drafter, and a drafter called ngram is none either, nor is a package's model.
        no_paths = {"target_model": ("", *NAMED), "draft_model": ("", NGRAM, *NAMED)}.get(name)
        if no_paths is not None and value not in no_paths and Path(value).exists():
            value = str(Path(value).resolve())
        if name == "lora_modules" and value:
            modules = json.loads(value).items()
            value = json.dumps(
                {key: str(Path(where).resolve()) if Path(where).exists() else where for key, where in modules}
            )
        result[environment_name(name)] = value
    EngineConfig.from_values(environment_settings(result), "environment")
    return result
