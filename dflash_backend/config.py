"""Every setting of the server: one schema that parsing, validation, help and the docs table come from.

Settings reach us as strings from three places, the later winning: `parameters` in `config.pbtxt`, the
environment (`DFLASH_<NAME>`), and `dflash-triton serve --set name=value` (which the launcher hands on as
environment). `dflash_backend.LLM` passes Python values through the same schema.
"""

from __future__ import annotations

import dataclasses
import difflib
import json
import math
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from dflash_backend.tenant_names import parse_tenant_weights

ENV_PREFIX = "DFLASH_"
AUTO = "auto"

# Environment names under our prefix that are not settings of the engine.
RESERVED_ENV_PREFIX = (
    "DFLASH_REAL_WEIGHTS_",  # tests/test_real_weights.py
    "DFLASH_API_KEY",  # What the command line sends to a server,
    "DFLASH_URL",  # and where that is.
    "DFLASH_SERVE_",  # Defaults of options of `dflash-triton serve`.
    "DFLASH_HEARTBEAT_FILE",  # The stub touches it while its output thread lives; `serve` looks at its age.
)


# Parameters of config.pbtxt that are not ours. Triton's Python backend reads its two itself. Of its vLLM backend's, the
# frontend reads REPORT_CUSTOM_METRICS, and the health of the engine is always checked.
_TRITON_FLAGS = ("REPORT_CUSTOM_METRICS", "ENABLE_VLLM_HEALTH_CHECK")
TRITON_PARAMETERS = frozenset(("EXECUTION_ENV_PATH", "FORCE_CPU_ONLY_INPUT_TENSORS", *_TRITON_FLAGS))


class ConfigError(ValueError):
    """A setting is unknown or has a value that is not allowed. The message is for the operator."""


@dataclass(frozen=True, slots=True)
class Setting:
    """One setting: its name, the type and bounds of its values, and what it does.

    `kind` is one of `str`, `int`, `float`, `bool`; `auto` says that the word `auto` is accepted as well and
    becomes `None`. `check` raises ValueError for a text that is not allowed, with a sentence.
    """

    name: str
    kind: type
    default: Any
    help: str
    auto: bool = False
    choices: tuple[str, ...] = ()
    low: float | None = None
    high: float | None = None
    low_open: bool = False
    check: Callable[[str], object] | None = None

    @property
    def allowed(self) -> str:
        """The values that are allowed, in words."""
        if self.choices:
            words = list(self.choices)
        elif self.kind is bool:
            words = ["true", "false"]
        elif self.kind is str:
            words = ["text"]
        else:
            noun = "an integer" if self.kind is int else "a number"
            if self.low is not None and self.high is not None:
                noun += f" {'above' if self.low_open else 'from'} {self.low:g} to {self.high:g}"
            elif self.low is not None:
                noun += f" {'above' if self.low_open else 'of at least'} {self.low:g}"
            words = [noun]
        return " or ".join((["auto"] if self.auto else []) + words)

    def parse(self, value: Any, source: str) -> Any:
        """Turn `value` (a string, or already of the right type) into the setting's type.

        Raises `ConfigError` with name, value, what is allowed and where it came from.
        """
        text = value.strip() if isinstance(value, str) else value
        if self.auto and (text is None or (isinstance(text, str) and text.lower() == AUTO)):
            return None
        parsed: Any = None
        if self.kind is bool:
            parsed = _parse_bool(text)
        elif self.kind is str:
            parsed = str(text) if isinstance(text, str | os.PathLike) else None
        else:
            parsed = _parse_number(text, self.kind)
        if parsed is None or not self._within(parsed):
            raise ConfigError(f"setting '{self.name}' has the value {value!r} ({source}); allowed: {self.allowed}")
        if self.check is not None:
            try:
                self.check(parsed)
            except ValueError as error:
                raise ConfigError(f"setting '{self.name}' has the value {value!r} ({source}): {error}") from None
        return parsed

    def _within(self, value: Any) -> bool:
        if self.choices:
            return value in self.choices
        if self.kind in (int, float):
            if self.low is not None and (value <= self.low if self.low_open else value < self.low):
                return False
            return self.high is None or value <= self.high
        return True


def _parse_bool(value: Any) -> bool | None:
    if isinstance(value, bool):
        return value
    return {"true": True, "1": True, "false": False, "0": False}.get(str(value).lower())


def _parse_number(value: Any, kind: type) -> int | float | None:
    if isinstance(value, bool):
        return None
    try:
        number = float(value)
        if kind is float:
            return number if math.isfinite(number) else None
        return int(value) if not isinstance(value, float) else (int(value) if value.is_integer() else None)
    except (TypeError, ValueError, OverflowError):
        return None


SETTINGS: tuple[Setting, ...] = (
    Setting(
        "target_model",
        str,
        "",
        "directory or hub id of the target, or of a speculators drafter that names its target; empty: the demo target",
    ),
    Setting(
        "draft_model",
        str,
        None,
        auto=True,
        help="directory or hub id of the DFlash drafter; auto: the demo drafter with the demo target, else what "
        "the target's checkpoint names; empty: no speculation",
    ),
    Setting("target_revision", str, "", "branch, tag or commit of a target from the hub; empty: its main branch"),
    Setting("draft_revision", str, "", "branch, tag or commit of a drafter from the hub; empty: its main branch"),
    Setting(
        "num_speculative_tokens",
        int,
        None,
        auto=True,
        low=0,
        high=255,
        help="k, draft tokens in a step; auto: what the drafter was trained for",
    ),
    Setting("causal", bool, None, auto=True, help="causality of drafter layers; auto: what the checkpoint says"),
    Setting(
        "draft_sample_method",
        str,
        "probabilistic",
        choices=("probabilistic", "greedy"),
        help="how drafts are drawn for sampled requests",
    ),
    Setting("device", str, None, auto=True, choices=("cpu", "cuda"), help="auto: cuda where there is one"),
    Setting(
        "dtype",
        str,
        None,
        auto=True,
        choices=("float32", "bfloat16", "float16"),
        help="auto: float32 on cpu, the checkpoint's own on cuda",
    ),
    Setting(
        "attention_backend",
        str,
        None,
        auto=True,
        choices=("torch", "triton", "flash_attn"),
        help="auto: the first one that can run both models",
    ),
    Setting("kv_block_size", int, 16, low=1, high=1024, help="tokens in a KV block"),
    Setting(
        "gpu_memory_utilization",
        float,
        0.9,
        low=0.0,
        high=1.0,
        low_open=True,
        help="share of the GPU's memory that the server may use, when kv_cache_gb is auto",
    ),
    Setting(
        "kv_cache_gb",
        float,
        None,
        auto=True,
        low=0.0,
        low_open=True,
        help="size of the KV cache in GiB; auto on cpu: what max_num_seqs requests of max_model_len need, at most 4",
    ),
    Setting(
        "max_model_len",
        int,
        None,
        auto=True,
        low=2,
        help="prompt plus output; auto: what the target can do and the KV cache holds",
    ),
    Setting("max_num_seqs", int, 64, low=1, high=4096, help="requests that run at the same time"),
    Setting(
        "max_num_batched_tokens",
        int,
        8192,
        low=1,
        help="tokens of one step; longer prompts are chunked, and no more requests run than can decode in one step",
    ),
    Setting(
        "max_prefill_tokens_per_step",
        int,
        None,
        auto=True,
        low=1,
        help="prompt tokens of a step that other requests decode in, so that a long prompt does not hold them up; "
        "auto: half as many as they decode, more when more requests wait than decode, at least 64 on cpu, 256 on cuda",
    ),
    Setting("enable_prefix_caching", bool, True, "reuse the KV blocks of prompts that begin alike"),
    Setting(
        "max_step_time_ms",
        float,
        None,
        auto=True,
        low=0.0,
        low_open=True,
        help="how long a step with prompts may take while requests of several tenants are served, eight times as "
        "long with those of one; auto: 10, or twice as long as a step without prompts if that is more",
    ),
    Setting(
        "max_queue_size",
        int,
        1024,
        low=1,
        help="requests of one tenant that may wait, those apart that free rows wait for; more are refused as "
        "UNAVAILABLE, and so are more than four times as many of all tenants together",
    ),
    Setting(
        "max_queue_tokens",
        int,
        2_000_000,
        low=1,
        help="tokens that the waiting requests of one tenant may have, bounded in the same way",
    ),
    Setting(
        "tenant_weights",
        str,
        "",
        help="shares of the server between tenants that compete for it, such as `chat=4,batch=1`; who is not named has "
        "1",
        check=parse_tenant_weights,
    ),
    Setting(
        "require_cache_salt",
        bool,
        False,
        "refuse requests without a cache_salt, so that no two clients share cached prefixes by oversight",
    ),
    Setting(
        "report_cached_tokens",
        bool,
        False,
        "tell num_cached_tokens also to requests without a cache_salt; who guesses prompts can confirm others' with it",
    ),
    Setting(
        "message_special_tokens",
        str,
        "text",
        choices=("text", "control"),
        help="what a special token that the content of messages spells out is: text, so that content cannot begin a "
        "turn of its own, or the control token",
    ),
    Setting(
        "generation_config",
        str,
        "none",
        choices=("none", "auto"),
        help="auto: sampling parameters that a request leaves out are those of the target's generation_config.json; "
        "none: vLLM's defaults",
    ),
    Setting(
        "request_timeout_s",
        float,
        0.0,
        low=0.0,
        help="seconds after which a request ends with what it has; 0: never",
    ),
    Setting(
        "engine_hang_timeout_s",
        float,
        120.0,
        low=0.0,
        help="seconds without a word from the engine after which it is killed and started again; it speaks after every "
        "step and once a second without one, so this must be longer than the longest step; 0: never",
    ),
    Setting(
        "max_response_mb",
        float,
        64.0,
        low=0.0,
        low_open=True,
        help="megabytes that the responses to one request may hold altogether; a request that passes it ends with an "
        "error",
    ),
    Setting(
        "max_server_memory_gb",
        float,
        4.0,
        low=0.0,
        help="gigabytes of memory of tritonserver, which keeps what clients do not read, above which it may not grow: "
        "the stream that was sent the most ends with an error; 0: no limit",
    ),
    Setting("kv_write_guard", bool, False, "check every KV write against its owner and stop at a breach (slow)"),
    Setting(
        "enable_cuda_graphs",
        bool,
        True,
        "on a GPU with the attention backend triton, capture the decode cycle as CUDA graphs at the start, which takes "
        "seconds and memory",
    ),
    Setting("enable_overlap", bool, True, "plan the next step while the device runs this one; takes effect on a GPU"),
    Setting("seed", int, 0, low=0, high=2**63 - 1, help="seeds the requests that bring no seed of their own"),
    Setting(
        "trace_dir",
        str,
        "",
        "folder for a trace of the engine's steps, for chrome://tracing and Perfetto; empty: no trace",
    ),
    Setting(
        "trace_steps",
        int,
        5000,
        low=1,
        help="steps that a trace keeps at least; twice as many at most are on the disk",
    ),
    Setting(
        "log_level",
        str,
        "info",
        choices=("debug", "info", "warning", "error"),
        help="the least of our own lines in the server's log; debug shows prompts, and Triton's verbose lines too",
    ),
)

_BY_NAME = {setting.name: setting for setting in SETTINGS}


@dataclass(frozen=True)
class EngineConfig:
    """The settings, parsed. `None` stands for `auto`. Field names and order are those of `SETTINGS`."""

    target_model: str = ""
    draft_model: str | None = None
    target_revision: str = ""
    draft_revision: str = ""
    num_speculative_tokens: int | None = None
    causal: bool | None = None
    draft_sample_method: str = "probabilistic"
    device: str | None = None
    dtype: str | None = None
    attention_backend: str | None = None
    kv_block_size: int = 16
    gpu_memory_utilization: float = 0.9
    kv_cache_gb: float | None = None
    max_model_len: int | None = None
    max_num_seqs: int = 64
    max_num_batched_tokens: int = 8192
    max_prefill_tokens_per_step: int | None = None
    enable_prefix_caching: bool = True
    max_step_time_ms: float | None = None
    max_queue_size: int = 1024
    max_queue_tokens: int = 2_000_000
    tenant_weights: str = ""
    require_cache_salt: bool = False
    report_cached_tokens: bool = False
    message_special_tokens: str = "text"
    generation_config: str = "none"
    request_timeout_s: float = 0.0
    engine_hang_timeout_s: float = 120.0
    max_response_mb: float = 64.0
    max_server_memory_gb: float = 4.0
    kv_write_guard: bool = False
    enable_cuda_graphs: bool = True
    enable_overlap: bool = True
    seed: int = 0
    trace_dir: str = ""
    trace_steps: int = 5000
    log_level: str = "info"
    sources: Mapping[str, str] = field(default_factory=dict, compare=False, repr=False)
    # Of config.pbtxt: what the parameters of Triton and of its vLLM backend say.
    triton_parameters: Mapping[str, str] = field(default_factory=dict, compare=False, repr=False)

    @classmethod
    def from_values(cls, values: Mapping[str, Any], source: str = "argument") -> EngineConfig:
        """Parse `values`, raising `ConfigError` on the first unknown name or bad value."""
        return cls.from_layers([(source, values)])

    @classmethod
    def from_layers(cls, layers: list[tuple[str, Mapping[str, Any]]]) -> EngineConfig:
        """Parse several layers of `(where it comes from, values)`, the later winning over the earlier.

        Every layer is validated, also where a later one overrides it. Raises `ConfigError`.
        """
        parsed: dict[str, Any] = {}
        sources: dict[str, str] = {}
        for source, values in layers:
            for name, value in values.items():
                setting = _BY_NAME.get(name)
                if setting is None:
                    raise ConfigError(f"unknown setting '{name}' ({source}){nearest(name)}")
                parsed[name] = setting.parse(value, source)
                sources[name] = source
        return cls(**parsed, sources=sources)

    @classmethod
    def load(
        cls,
        parameters: Mapping[str, Any],
        environ: Mapping[str, str],
        where: str = "config.pbtxt",
        model_json: Mapping[str, Any] | None = None,
    ) -> EngineConfig:
        """Settings of a Triton model: `parameters` of its `config.pbtxt`, over them `model_json`, which a model of
        Triton's vLLM backend brings, and over both the environment."""
        own = {name: value for name, value in parameters.items() if name not in TRITON_PARAMETERS}
        triton = {name: str(value) for name, value in parameters.items() if name in TRITON_PARAMETERS}
        for name, value in triton.items():
            if name in _TRITON_FLAGS and _parse_bool(value) is None:
                raise ConfigError(f"parameter '{name}' has the value {value!r} ({where}); allowed: true or false")
        layers = [(where, own), ("model.json", model_json or {}), ("environment", environment_settings(environ))]
        return dataclasses.replace(cls.from_layers(layers), triton_parameters=triton)

    @property
    def report_custom_metrics(self) -> bool | None:
        """What REPORT_CUSTOM_METRICS in config.pbtxt says; None where it is not there."""
        return _parse_bool(self.triton_parameters.get("REPORT_CUSTOM_METRICS", ""))

    def as_strings(self) -> dict[str, str]:
        """Every effective setting as text, for the log line at start."""
        values = {f.name: getattr(self, f.name) for f in fields(self) if f.name not in ("sources", "triton_parameters")}
        return {name: _as_text(value) for name, value in values.items()}


def _as_text(value: Any) -> str:
    if value is None:
        return AUTO
    if isinstance(value, bool):
        return "true" if value else "false"
    return str(value)


# What other servers call settings that are here.
_OTHER_NAMES = {
    "model": "target_model",
    "target": "target_model",
    "draft": "draft_model",
    "revision": "target_revision",
    "drafter": "draft_model",
    "speculative_model": "draft_model",
    "max_seq_len": "max_model_len",
    "block_size": "kv_block_size",
    "enable_prefix_cache": "enable_prefix_caching",
    "max_batch_size": "max_num_seqs",
    "mem_fraction_static": "gpu_memory_utilization",
    "chunked_prefill_size": "max_prefill_tokens_per_step",
}

# Settings of other servers that nothing here stands for, and why.
_NOT_HERE = {
    "enable_lora": "there are no adapters",
    "lora_modules": "there are no adapters",
    "quantization": "weights are bfloat16, float16 or float32",
    "kv_cache_dtype": "the KV cache has the dtype of the weights",
    "tensor_parallel_size": "a model runs on one GPU; run a server for each",
    "pipeline_parallel_size": "a model runs on one GPU; run a server for each",
    "data_parallel_size": "a model runs on one GPU; run a server for each",
    "trust_remote_code": "no code of a checkpoint is ever run",
}


def nearest(name: str) -> str:
    """`; did you mean ...` when a valid setting is close to `name`, else the hint where they are listed."""
    if name in _OTHER_NAMES:
        return f"; here that is '{_OTHER_NAMES[name]}'"
    if name in _NOT_HERE:
        return f"; {_NOT_HERE[name]}"
    close = difflib.get_close_matches(name, _BY_NAME, n=1, cutoff=0.7)
    if close:
        return f"; did you mean '{close[0]}'?"
    return "; the settings are: " + ", ".join(_BY_NAME)


def environment_settings(environ: Mapping[str, str]) -> dict[str, str]:
    """The settings in `environ`: `DFLASH_KV_BLOCK_SIZE=32` is `kv_block_size`. Unknown names are kept, so
    that a misspelt variable stops the load instead of being ignored."""
    return {
        name[len(ENV_PREFIX) :].lower(): value
        for name, value in environ.items()
        if name.startswith(ENV_PREFIX) and not name.startswith(RESERVED_ENV_PREFIX)
    }


def environment_name(setting: str) -> str:
    """The environment variable of a setting."""
    return ENV_PREFIX + setting.upper()


def check_setting(name: str, value: str, source: str) -> None:
    """Raise `ConfigError` unless `name` is a setting and `value` one of its values."""
    EngineConfig.from_values({name: value}, source)


def settings_table() -> str:
    """The settings as a Markdown table, for the docs."""
    rows = ["| name | default | allowed | meaning |", "| --- | --- | --- | --- |"]
    for setting in SETTINGS:
        default = _as_text(setting.default) or "empty"
        rows.append(f"| `{setting.name}` | {default} | {setting.allowed} | {setting.help} |")
    return "\n".join(rows)


def config_parameters() -> str:
    """The settings as `parameters` of a config.pbtxt, each with its default and a comment."""
    lines = []
    for setting in SETTINGS:
        lines.append(f"# {setting.help}. Allowed: {setting.allowed}")
        value = json.dumps(_as_text(setting.default))
        lines.append(f'parameters {{ key: "{setting.name}" value {{ string_value: {value} }} }}')
    return "\n".join(lines)


def asset_path(*parts: str) -> Path:
    """A file shipped with the project (`model_repository`, `demo/pair`): in a checkout it lies beside the
    package, in an installed wheel inside it."""
    package = Path(__file__).resolve().parent
    for root in (package / "_assets", package.parent):
        path = root.joinpath(*parts)
        if path.exists():
            return path
    raise FileNotFoundError(f"{'/'.join(parts)} is missing from this installation; reinstall dflash-triton")
