"""The systems that are compared, where each is looked for, and how it is started.

To add one: a `System` with what it lacks (`missing`) and what it is started with (`settings`), and a side in `sides`.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.peers.llama_files import drafter_file, target_file
from benchmarks.peers.pairs import DFLASH, MAX_MODEL_LEN, NGRAM, NONE, Pair, whole_vocabulary
from dflash_cli.launcher.ports import settle_ports

HOST = "127.0.0.1"
LOAD_TIMEOUT_S = 300.0
# What is looked up with prompt lookup: this engine's defaults, and asked of the others.
NGRAM_TOKENS, NGRAM_MAX, NGRAM_MIN = 5, 5, 2
MODEL = "peers"
# Sampling parameters that all systems have.
SAMPLING = {"temperature": float, "top_k": int, "top_p": float, "min_p": float}
# What others are compared with.
OURS, OURS_HTTP, OURS_QUANTISED = "ours", "ours-http", "ours-q4_1"


@dataclass(frozen=True)
class Context:
    """What all systems are started with. peers: where vLLM and llama.cpp are installed (benchmarks/README.md). folder:
    for files of this run. most_streams: requests in flight at most. sampling: parameters of all requests, of
    `SAMPLING`; without a temperature they are greedy."""

    peers: Path
    folder: Path
    threads: int
    most_streams: int
    sampling: Mapping[str, float] = field(default_factory=dict)

    @property
    def vllm(self) -> Path:
        """The Python that has vLLM."""
        return self.peers / "vllm" / "venv" / "bin" / "python"

    def llama(self, build: str) -> Path:
        """llama.cpp's server; build: `amx` or `plain`."""
        return self.peers / "llama.cpp" / build / "llama-server"

    def cores(self) -> list[int]:
        """The processor cores that all systems share."""
        return sorted(os.sched_getaffinity(0))[: self.threads]


@dataclass(frozen=True)
class System:
    """One way to run a model. side: the module of its process. missing: a sentence why it cannot run a pair with such
    drafts here, or an empty one. settings: of the process. environ: added to its environment. python: what runs it.
    http: measured through a server. only_one_stream: of the kinds of drafts that it takes with one request alone.
    beside: the name of our own system that it is compared with."""

    name: str
    title: str
    side: str
    missing: Callable[[Context, Pair, str], str]
    settings: Callable[[Context, Pair, str], dict[str, Any]]
    environ: Callable[[Context], Mapping[str, str]] = lambda context: {}
    python: Callable[[Context], str] = lambda context: sys.executable
    http: bool = False
    only_one_stream: tuple[str, ...] = ()
    beside: str = OURS

    def command(self, context: Context, pair: Pair, drafts: str) -> list[str]:
        """What starts its process."""
        settings = json.dumps(self.settings(context, pair, drafts))
        return [self.python(context), "-m", f"benchmarks.peers.sides.{self.side}", settings]


def _common(context: Context, pair: Pair, drafts: str) -> dict[str, Any]:
    return {
        "target": str(pair.target),
        "drafts": drafts,
        "dtype": pair.dtype,
        "threads": context.threads,
        "max_num_seqs": context.most_streams,
        "max_model_len": MAX_MODEL_LEN,
        "num_speculative_tokens": NGRAM_TOKENS if drafts == NGRAM else pair.num_speculative_tokens,
        "prompt_lookup_max": NGRAM_MAX,
        "sampling": dict(context.sampling),
    }


def _no_drafter(context: Context, pair: Pair, drafts: str) -> str:
    return f"{pair.name} has no DFlash drafter here: --drafter DIR" if drafts == DFLASH and not pair.drafter else ""


def _own_draft(pair: Pair, drafts: str) -> str:
    return {NONE: "", NGRAM: NGRAM, DFLASH: str(pair.drafter)}[drafts]


def _ours(context: Context, pair: Pair, drafts: str) -> dict[str, Any]:
    return _common(context, pair, drafts) | {"draft": _own_draft(pair, drafts)}


def _server(
    context: Context, name: str, command: list[str], port: int, api: str, environ: Mapping[str, str] | None = None
) -> dict[str, Any]:
    paths = {"openai": "/v1/completions", "llama": "/completion"}
    return {
        "command": command,
        "env": dict(environ or {}),
        "port": port,
        "api": api,
        "path": paths[api],
        "health": "/health",
        "model": MODEL,
        "log": str(context.folder / f"{name}.log"),
        "load_timeout_s": LOAD_TIMEOUT_S,
        "sampling": dict(context.sampling),
        "version": "",
    }


def _free_port() -> int:
    return settle_ports(HOST, {"--port": 0})["--port"]


def _ours_http(context: Context, pair: Pair, drafts: str) -> dict[str, Any]:
    return _ours_server(context, "ours-http", pair, drafts, [str(pair.target), "--dtype", pair.dtype])


def _ours_quantised_missing(context: Context, pair: Pair, drafts: str) -> str:
    return f"{pair.name} is no quantised GGUF" if pair.original is None else _no_drafter(context, pair, drafts)


def _ours_quantised(context: Context, pair: Pair, drafts: str) -> dict[str, Any]:
    """As a user serves the file: in float32, which has its very numbers."""
    return _ours_server(context, OURS_QUANTISED, pair, drafts, [str(pair.original)])


def _ours_server(context: Context, name: str, pair: Pair, drafts: str, target: list[str]) -> dict[str, Any]:
    names = ("--port", "--http-port", "--grpc-port", "--metrics-port")
    ports = settle_ports(HOST, dict.fromkeys(names, 0))
    command = [str(Path(sys.executable).parent / "dflash-triton"), "serve", *target]
    command += ["--draft", _own_draft(pair, drafts), "--served-model-name", MODEL]
    command += ["--max-num-seqs", str(context.most_streams), "--max-model-len", str(MAX_MODEL_LEN)]
    command += ["--set", "device=cpu", "--set", "enable_prefix_caching=false", "--no-restart"]
    command += [word for name, port in ports.items() for word in (name, str(port))]
    # Its /health says that the front end lives, which it does before there is a model.
    return _server(context, name, command, ports["--port"], "openai") | {"health": "/health/ready"}


def _vllm_missing(context: Context, pair: Pair, drafts: str) -> str:
    if not context.vllm.is_file():
        return f"vLLM is not installed: there is no {context.vllm} (benchmarks/README.md says how)"
    return _no_drafter(context, pair, drafts)


def _speculative(context: Context, pair: Pair, drafts: str) -> dict[str, Any] | None:
    """vLLM's `speculative_config`."""
    if drafts == NONE:
        return None
    if drafts == NGRAM:
        names = ("num_speculative_tokens", "prompt_lookup_max", "prompt_lookup_min")
        return {"method": "ngram"} | dict(zip(names, (NGRAM_TOKENS, NGRAM_MAX, NGRAM_MIN), strict=True))
    assert pair.drafter is not None
    return {
        "method": "dflash",
        "model": str(whole_vocabulary(pair.drafter, context.folder)),
        "num_speculative_tokens": pair.num_speculative_tokens,
    }


def _vllm(context: Context, pair: Pair, drafts: str) -> dict[str, Any]:
    return _common(context, pair, drafts) | {"speculative_config": _speculative(context, pair, drafts)}


def _vllm_environ(context: Context) -> dict[str, str]:
    return {
        "VLLM_CPU_KVCACHE_SPACE": "4",
        "VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, context.cores())),
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_LOGGING_LEVEL": "ERROR",
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
    }


def _vllm_http(context: Context, pair: Pair, drafts: str) -> dict[str, Any]:
    port = _free_port()
    command = [str(context.vllm), "-m", "vllm.entrypoints.openai.api_server", "--model", str(pair.target)]
    command += ["--host", HOST, "--port", str(port), "--served-model-name", MODEL, "--dtype", pair.dtype]
    command += ["--max-num-seqs", str(context.most_streams), "--max-model-len", str(MAX_MODEL_LEN)]
    command += ["--no-enable-prefix-caching"]
    if (config := _speculative(context, pair, drafts)) is not None:
        command += ["--speculative-config", json.dumps(config)]
    environ = _vllm_environ(context) | {"VLLM_ENABLE_V1_MULTIPROCESSING": "1"}
    return _server(context, "vllm-http", command, port, "openai", environ)


def _llama_missing(build: str, quantised: bool) -> Callable[[Context, Pair, str], str]:
    def missing(context: Context, pair: Pair, drafts: str) -> str:
        if not context.llama(build).is_file():
            return f"llama.cpp is not installed: there is no {context.llama(build)} (benchmarks/README.md says how)"
        if quantised and pair.original is None:
            return f"{pair.name} is no quantised GGUF"
        return _no_drafter(context, pair, drafts)

    return missing


def _llama(build: str, quantised: bool) -> Callable[[Context, Pair, str], dict[str, Any]]:
    def settings(context: Context, pair: Pair, drafts: str) -> dict[str, Any]:
        port, streams = _free_port(), context.most_streams
        model = pair.original if quantised else target_file(context.peers / "llama.cpp", pair)
        command = [str(context.llama(build)), "-m", str(model), "--host", HOST, "--port", str(port)]
        command += ["-t", str(context.threads), "-tb", str(context.threads), "--no-cache-prompt", "--no-webui"]
        command += ["-np", str(streams), "-c", str(streams * MAX_MODEL_LEN), "-cram", "0", "-ctxcp", "0"]
        if pair.dtype == "float32":
            command += ["-ctk", "f32", "-ctv", "f32"]  # else KV is float16
        if drafts == NGRAM:
            command += ["--spec-type", "ngram-simple", "--spec-ngram-simple-size-n", str(NGRAM_MIN)]
            command += ["--spec-ngram-simple-size-m", str(NGRAM_TOKENS)]
        if drafts == DFLASH:
            command += [
                "--spec-type",
                "draft-dflash",
                "-md",
                str(drafter_file(context.peers / "llama.cpp", pair, context.folder)),
            ]
            command += ["--spec-draft-n-max", str(pair.num_speculative_tokens), "--spec-draft-p-min", "0"]
            command += ["-td", str(context.threads), "-tbd", str(context.threads)]
        environ = {"LD_LIBRARY_PATH": str(context.llama(build).parent)}
        return _server(context, f"llama-{build}", command, port, "llama", environ)

    return settings


def _transformers_missing(context: Context, pair: Pair, drafts: str) -> str:
    return "transformers has no DFlash" if drafts == DFLASH else ""


SYSTEMS = {
    system.name: system
    for system in (
        System(OURS, "this engine", "ours_side", _no_drafter, _ours),
        System(
            "vllm",
            "vLLM",
            "vllm_side",
            _vllm_missing,
            _vllm,
            environ=_vllm_environ,
            python=lambda context: str(context.vllm),
        ),
        System(
            "transformers",
            "transformers",
            "transformers_side",
            _transformers_missing,
            _common,
            only_one_stream=(NGRAM,),
        ),
        System(OURS_HTTP, "this engine, HTTP", "http_side", _no_drafter, _ours_http, http=True),
        System(
            OURS_QUANTISED,
            "this engine, the Q4_1 file, HTTP",
            "http_side",
            _ours_quantised_missing,
            _ours_quantised,
            http=True,
        ),
        System("vllm-http", "vLLM, HTTP", "http_side", _vllm_missing, _vllm_http, http=True, beside=OURS_HTTP),
        System(
            "llama",
            "llama.cpp, HTTP",
            "http_side",
            _llama_missing("amx", False),
            _llama("amx", False),
            http=True,
            beside=OURS_HTTP,
        ),
        System(
            "llama-q4_1",
            "llama.cpp, the Q4_1 file, HTTP",
            "http_side",
            _llama_missing("plain", True),
            _llama("plain", True),
            http=True,
            beside=OURS_QUANTISED,
        ),
    )
}
