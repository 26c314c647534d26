"""Every setting of the server, declared once: parsing, validation, help and the docs table come from the declaration.

Settings reach us from four sources, the later winning: `parameters` in `config.pbtxt`, the model.json of a model of
Triton's vLLM backend, the environment (`DFLASH_<NAME>`), and `dflash-triton serve --set name=value` (which the launcher
passes on as environment). `dflash_backend.LLM` passes Python values through the same declarations.
"""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from dflash_backend.setting_names import nearest
from dflash_backend.settings import ConfigError as ConfigError
from dflash_backend.settings import as_text, check_endpoint, parse_bool, setting, settings_of
from dflash_backend.tenant_names import parse_tenant_weights

ENV_PREFIX = "DFLASH_"

# Environment names under our prefix that are not settings of the engine.
RESERVED_ENV_PREFIX = (
    "DFLASH_REAL_WEIGHTS_",  # tests/evaluation/test_real_weights.py
    "DFLASH_API_KEY",  # What the command line sends to a server,
    "DFLASH_CLIENT_ADMIN_KEY",  # what it sends to one that it changes,
    "DFLASH_URL",  # and where that is.
    "DFLASH_SERVE_",  # Defaults of options of `dflash-triton serve`.
    "DFLASH_CPU_OPS",  # Whether a CPU's operations in C++ are taken, or built first (docs/cpu.md).
    "DFLASH_HEARTBEAT_FILE",  # The stub touches it while its output thread lives; `serve` looks at its age.
)

# Parameters of config.pbtxt that are no settings of the engine. Triton's Python backend reads its two itself. Of its
# vLLM backend's, the stub reads REPORT_CUSTOM_METRICS, and the health of the engine is always checked. The stub shows
# the engine the GPUs of GPU_DEVICE_IDS.
REPORT_CUSTOM_METRICS = "REPORT_CUSTOM_METRICS"
_TRITON_FLAGS = (REPORT_CUSTOM_METRICS, "ENABLE_VLLM_HEALTH_CHECK")
GPU_DEVICE_IDS = "GPU_DEVICE_IDS"
TRITON_PARAMETERS = frozenset(("EXECUTION_ENV_PATH", "FORCE_CPU_ONLY_INPUT_TENSORS", GPU_DEVICE_IDS, *_TRITON_FLAGS))
# As `draft_model`: prompt lookup, which has no checkpoint. A directory of that name is ./ngram.
NGRAM = "ngram"
# Variables that Kubernetes gives a container for each Service of its namespace: the Service's name, then one of these.
_SERVICE_LINK = re.compile(r"(\w+?)(_SERVICE_HOST|_SERVICE_PORT(?:_\w+)?|_PORT(?:_\d+_(?:TCP|UDP|SCTP)(?:_\w+)?)?)")
_SERVICE_URL = re.compile(r"(?:tcp|udp|sctp)://")
# In a model.json of that backend.
DISABLE_LOG_STATS = "disable_log_stats"

# Values of `quantization` that other servers know, and what would work here.
_NOT_READ = (
    "weights in {0} are not supported: take a checkpoint in FP8, in INT4 or in bfloat16, the last one also with fp8"
)
_FROM_FILES = "a checkpoint in {0} says so itself: leave the setting on auto"
_OTHER_QUANTIZATION = {
    **{name: _NOT_READ.format(name.upper()) for name in ("nvfp4", "mxfp8")},
    "gguf": "a file in GGUF is given as the model itself, and says its types: leave the setting on auto",
    "mxfp4": "MXFP4 is for gpt-oss alone, whose checkpoint says so itself: leave the setting on auto. Of other targets "
    "take a checkpoint in FP8, in INT4 or in bfloat16, the last one also with fp8",
    "modelopt": _NOT_READ.format("modelopt's formats"),
    "bitsandbytes": _NOT_READ.format("bitsandbytes"),
    **{name: _FROM_FILES.format(name) for name in ("gptq", "awq", "compressed-tensors", "fbgemm_fp8")},
}

MAX_ADAPTER_NAME_CHARS = 256

# And of `kv_cache_dtype`.
_OTHER_KV = "a KV cache in {0} is not supported: fp8 is e4m3 with a scale for each token and head, auto is `dtype`"
_OTHER_KV_DTYPES = {name: _OTHER_KV.format(name) for name in ("fp8_e5m2", "int8", "nvfp4", "float16", "float32")}
_OTHER_KV_DTYPES["fp8_e4m3"] = "fp8 is e4m3 here"


def _check_adapters(text: str) -> None:
    """Raises ValueError unless `text` is empty, or an object of folders by name."""
    modules = json.loads(text or "{}")
    for name, where in modules.items():
        if not name.strip() or len(name) > MAX_ADAPTER_NAME_CHARS or not name.isprintable():
            raise ValueError(f"an adapter's name is printable text of 1 to {MAX_ADAPTER_NAME_CHARS} characters")
        if not isinstance(where, str) or not where.strip():
            raise ValueError(f'the adapter {name!r} has no folder; it is text, as in {{"NAME": "FOLDER"}}')


@dataclass(frozen=True)
class EngineConfig:
    """The settings, parsed. None stands for "auto"."""

    target_model: str = setting(
        "",
        "directory, hub id or file in GGUF of the target, or of a speculators drafter that names its target; empty: "
        "the demo target",
    )
    draft_model: str | None = setting(
        None,
        "directory, hub id or file in GGUF of the drafter; smollm2: the project's own for that target; "
        f"{NGRAM}: prompt lookup, for any target, without a drafter's checkpoint (a directory of that name is "
        f"./{NGRAM}); auto: the demo drafter with the demo target, "
        "else what the target's checkpoint names; empty: no speculation",
    )
    target_revision: str = setting("", "branch, tag or commit of a target from the hub; empty: its main branch")
    draft_revision: str = setting("", "branch, tag or commit of a drafter from the hub; empty: its main branch")
    num_speculative_tokens: int | None = setting(
        None,
        f"k, draft tokens in a step; auto: what the drafter was trained for, 5 with draft_model={NGRAM}",
        low=0,
        high=255,
    )
    prompt_lookup_max: int | None = setting(
        None,
        f"with draft_model={NGRAM}, tokens of the longest n-gram that is looked up; auto: 5, beside a drafter with "
        "prompt_lookup_min 16",
        low=1,
        high=64,
    )
    prompt_lookup_min: int | None = setting(
        None,
        f"with draft_model={NGRAM}, tokens of the shortest n-gram that is looked up; auto: 2. Beside a drafter: rows "
        "whose last tokens, at least as many as this, occurred before may draft what followed then; auto: none is "
        "looked up, with prompt_lookup_max 2",
        low=1,
        high=64,
    )
    causal: bool | None = setting(None, "causality of drafter layers; auto: what the checkpoint says")
    adaptive_speculation: bool = setting(
        True,
        "draft and verify as many tokens as make the most tokens a second at the present load and acceptance, k at "
        "most; off: always k",
    )
    draft_temperature_ratio: float = setting(
        0.0,
        "drafts are chosen at this times the request's temperature; 0: the drafter's most likely token; speed only",
        low=0,
        high=1,
    )
    device: str | None = setting(None, "auto: cuda where there is one", choices=("cpu", "cuda"))
    dtype: str | None = setting(
        None,
        "auto: float32 on cpu, the checkpoint's own on cuda; vLLM's names too: float is float32, half is float16",
        choices=("float32", "bfloat16", "float16", "float", "half", "bf16", "fp16", "fp32"),
    )
    quantization: str | None = setting(
        None,
        "auto: the target's weights are as its checkpoint holds them; fp8: those of a checkpoint that is not quantised "
        "become FP8 (e4m3, a scale for each row) at the load, which saves memory on a GPU; on a CPU they are what FP8 "
        "would hold, in `dtype`: it shows what FP8 costs; the drafter stays as it is",
        choices=("fp8",),
        refused=_OTHER_QUANTIZATION,
    )
    activation_quantization: str | None = setting(
        None,
        "auto: activations stay in `dtype`, whatever the checkpoint says of them; fp8: before products by FP8 weights "
        "of the target's projections they become FP8 (e4m3) with scales for each token, in every step; for GPUs, where "
        "long prompts then run as FP8 products (docs/checkpoints.md)",
        choices=("fp8",),
    )
    attention_backend: str | None = setting(
        None,
        "auto: the first one that can run both models, with FlashAttention or cuDNN for long prompts where these are "
        "faster",
        choices=("torch", "cpu", "triton", "flash_attn"),
    )
    batch_invariant: bool = setting(
        False,
        "a request's logits are the same to the bit alone and in any batch, with any number of drafts, chunks and "
        "prefix hits; slower (docs/batch-invariance.md)",
    )
    tensor_parallel_size: int = setting(
        1,
        "processes that share each layer of the target, each on a GPU of its own, or on CPUs (docs/tensor-parallel.md)",
        low=1,
        high=64,
    )
    distributed_executor: str | None = setting(
        None,
        "where the processes of tensor_parallel_size run: mp: all on this machine; ray: on as many nodes as there are "
        "of a Ray cluster that runs already, with the engine on this one; auto: mp",
        choices=("mp", "ray"),
    )
    data_parallel_size: int = setting(
        1,
        "engines behind the model, each with its own KV cache and on its own GPU; on a CPU they share the cores. Other "
        "settings hold for each of them (docs/scale.md)",
        low=1,
        high=64,
    )
    routing: str = setting(
        "prefix",
        "which of several engines gets a request: prefix: where most is cached, against the load; round_robin: in turn",
        choices=("prefix", "round_robin"),
    )
    kv_cache_dtype: str | None = setting(
        None,
        "of the target's KV; auto: `dtype`; fp8: e4m3 with a scale for each token and head, about half of bfloat16's "
        "memory; the drafter's KV stays in `dtype`",
        choices=("bfloat16", "bf16", "fp8"),
        refused=_OTHER_KV_DTYPES,
    )
    kv_block_size: int = setting(16, "tokens in a KV block", low=1, high=1024)
    gpu_memory_utilization: float = setting(
        0.9,
        "share of the GPU's memory that the server may use, when kv_cache_gb is auto",
        low=0.0,
        high=1.0,
        low_open=True,
    )
    kv_cache_gb: float | None = setting(
        None,
        "size of the KV cache in GiB; auto on cpu: what max_num_seqs requests of max_model_len need, at most 4",
        low=0.0,
        low_open=True,
    )
    kv_host_gb: float = setting(
        0.0,
        "GiB of host memory that keep KV blocks which leave the cache, so that later prompts find them; 0: none "
        "(docs/kv-tiers.md)",
        low=0.0,
    )
    kv_disk_path: str = setting(
        "", "folder of files that keep KV blocks below host memory, and over a restart; empty: none"
    )
    kv_disk_gb: float = setting(16.0, "GiB of files at kv_disk_path of each engine at most", low=0.0, low_open=True)
    kv_move_mb_s: float = setting(
        0.0,
        "megabytes of KV a second, at most, that go to host memory and disk and come back; 0: no "
        "bound, but 100 to them where a CPU computes",
        low=0.0,
    )
    kv_role: str = setting(
        "none",
        "prefill: keep the KV of prompts for decode servers; decode: fetch it from prefill servers; both; none "
        "(docs/disaggregation.md)",
        choices=("none", "prefill", "decode", "both"),
    )
    kv_transfer_backend: str = setting(
        "tcp",
        "how KV comes from another server: tcp: over the connection that asks for it; nixl: by the package nixl, over "
        "RDMA where there is some",
        choices=("tcp", "nixl"),
    )
    kv_transfer_host: str = setting(
        "127.0.0.1", "address of this machine at which decode servers reach a prefill server; it listens there alone"
    )
    kv_transfer_port: int = setting(
        0, "port of it, of engine i of data_parallel_size higher by i; 0: a free one", low=0, high=65535
    )
    kv_transfer_peers: str = setting(
        "",
        "the only prefill servers to which a decode server connects, as HOST or HOST:PORT, separated by commas; empty: "
        "those on this machine; *: any that a request names, for clients that are trusted",
    )
    kv_transfer_timeout_s: float = setting(
        120.0, "seconds for which a prefill server keeps KV that no decode server fetches", low=0.0, low_open=True
    )
    max_model_len: int | None = setting(
        None, "prompt plus output; auto: what the target can do and the KV cache holds", low=2
    )
    rope_scaling: str = setting(
        "",
        "rotary scaling of the target, in place of what its config.json says, as model cards ask for prompts longer "
        'than the trained length: {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}; the '
        "drafter keeps its own; empty: what the checkpoint says (docs/checkpoints.md)",
        is_object=True,
    )
    lora_modules: str = setting(
        "",
        "LoRA adapters of the target, which requests choose by lora_name and OpenAI clients as the model: "
        '{"NAME": "FOLDER or hub id"}, in PEFT\'s format; empty: none (docs/lora.md)',
        is_object=True,
        check=_check_adapters,
    )
    max_num_seqs: int = setting(64, "requests that run at the same time", low=1, high=4096)
    max_num_batched_tokens: int = setting(
        8192,
        "tokens of one step; longer prompts are chunked, and no more requests run than can decode in one step",
        low=1,
        high=1_000_000,
    )
    max_prefill_tokens_per_step: int | None = setting(
        None,
        "prompt tokens of a step in which other requests decode, so that a long prompt does not hold them up; auto: "
        "half as many as they decode, or as many as take half their time, more when more requests wait than decode, "
        "an eighth of all prompt tokens that are left, at least 64 on cpu, 256 on cuda",
        low=1,
    )
    enable_prefix_caching: bool = setting(True, "reuse the KV blocks of prompts that begin alike")
    kv_events_endpoint: str = setting(
        "",
        "where to publish what enters and leaves the prefix cache, the tokens too, in vLLM's format over ZeroMQ, as in "
        "tcp://127.0.0.1:5557; engine i of data_parallel_size is at a port higher by i; empty: off (docs/scale.md)",
        check=check_endpoint,
    )
    kv_events_replay_endpoint: str = setting(
        "", "address of which subscribers get the events that they have missed; empty: none", check=check_endpoint
    )
    kv_events_topic: str = setting("", "topic of these events; subscribers choose by its beginning")
    share_prefix_attention: bool = setting(True, "on a GPU, read KV that 4 requests share once, where it pays")
    num_state_snapshots: int | None = setting(
        None,
        "for a target with recurrent layers, how many copies of their states the prefix cache keeps, without which it "
        "has no hits; auto: half of max_num_seqs, 4 at least",
        low=0,
        high=65536,
    )
    max_step_time_ms: float | None = setting(
        None,
        "how long a step with prompts may take while requests of several tenants are served, eight times as long with "
        "one tenant; auto: 4 and 48, or 1.5 and 12 times as long as a step without prompts where that is more, with "
        "up to 48 where many tenants have prompts or all have requests that wait",
        low=0.0,
        low_open=True,
    )
    max_queue_size: int = setting(
        1024,
        "requests of one tenant that may wait, beside those that free slots will take; further ones are refused as "
        "UNAVAILABLE, and so are those beyond four times as many of all tenants together",
        low=1,
    )
    max_queue_tokens: int = setting(
        2_000_000, "tokens that the waiting requests of one tenant may have, bounded in the same way", low=1
    )
    tenant_weights: str = setting(
        "",
        "shares of the server between tenants that compete for it, such as `chat=4,batch=1`; a tenant without an entry "
        "has weight 1",
        check=parse_tenant_weights,
    )
    require_cache_salt: bool = setting(
        False, "refuse requests without a cache_salt, so that no two clients share cached prefixes by oversight"
    )
    stream_interval: int = setting(
        1,
        "tokens that a response of a stream waits for where the request says nothing; the first and the last response "
        "wait for none. More than a step yields: fewer responses, so more tokens a second at many streams",
        low=1,
    )
    max_stream_responses_per_s: int | None = setting(
        None,
        "responses to streams in a second, all together, since each costs the host as much however little it holds: "
        "where there would be more, tokens wait for those of the next steps, 50 ms at most, but for first and last "
        "responses and for requests that say a `stream_interval`; in a batch of a delta stream each request after the "
        "first counts as a quarter of a response; auto: 600 for each core, at most 6,000",
        low=1,
    )
    report_cached_tokens: bool = setting(
        False,
        "report num_cached_tokens also to requests without a cache_salt; with it a client can guess prompts of others "
        "and confirm the guess",
    )
    admin_key_file: str = setting(
        "",
        "file at the server whose text is the key of requests that change it, such as `swap_drafter`; empty: they are "
        "refused",
    )
    message_special_tokens: str = setting(
        "text",
        "how a special token spelled out in the content of messages is read: as text, so that content cannot begin a "
        "turn of its own, or as the control token",
        choices=("text", "control"),
    )
    generation_config: str = setting(
        "none",
        "auto: sampling parameters that a request leaves out are those of the target's generation_config.json; none: "
        "vLLM's defaults",
        choices=("none", "auto"),
    )
    request_timeout_s: float = setting(
        0.0, "seconds after which a request ends with the output it has; 0: never", low=0.0
    )
    engine_hang_timeout_s: float = setting(
        120.0,
        "seconds without a message from the engine after which it is killed and started again; it sends one after "
        "every step and once a second without steps, so this must be longer than the longest step; 0: never",
        low=0.0,
    )
    max_response_mb: float = setting(
        64.0,
        "megabytes that the responses to one request may hold altogether; a request that passes it ends with an error",
        low=0.0,
        low_open=True,
    )
    max_server_memory_gb: float = setting(
        4.0,
        "gigabytes of memory of tritonserver, which keeps what clients do not read, above which it may not grow: the "
        "stream that was sent the most ends with an error, unless large requests made it grow; 0: no limit",
        low=0.0,
    )
    kv_write_guard: bool = setting(False, "check every KV write against its owner and stop at a breach (slow)")
    enable_cuda_graphs: bool = setting(
        True,
        "on a GPU with the attention backend triton, capture the decode cycle as CUDA graphs at the start, which takes "
        "seconds and memory",
    )
    enable_measured_products: bool = setting(
        False,
        "on a GPU with CUDA graphs and one rank, time the ways that cuBLASLt has for each product of a captured step, "
        "of at most 32 rows, for 5 s of the start at most, and take the fastest: a cycle of one stream took 3% less "
        "time on an H200. Another start may choose other ways, whose results differ by roundings",
    )
    enable_coarse_head: bool = setting(
        True,
        "on a CPU, keep codes of 8 bits beside the target's LM head, a byte for each of its numbers: a step whose "
        "requests are greedy, or sample with any filters but top-p alone, finds the same tokens by them in less time",
    )
    enable_overlap: bool = setting(True, "plan the next step while the device runs this one; takes effect on a GPU")
    record_traffic: str = setting(
        "",
        "folder where prompts and answers are written down for `dflash-triton train --traffic`: personal data "
        "(docs/training.md); empty: none",
    )
    record_traffic_rate: float = setting(
        0.1, "share of requests that record_traffic writes down, by chance", low=0.0, high=1.0, low_open=True
    )
    record_traffic_gb: float = setting(
        1.0,
        "gigabytes that the files of record_traffic hold together at most; the oldest go first",
        low=0.0,
        low_open=True,
    )
    seed: int = setting(0, "seeds the requests that bring no seed of their own", low=0, high=2**63 - 1)
    trace_dir: str = setting(
        "", "folder for a trace of the engine's steps, for chrome://tracing and Perfetto; empty: no trace"
    )
    trace_steps: int = setting(5000, "steps that a trace keeps at least; at most twice as many are on the disk", low=1)
    log_level: str = setting(
        "info",
        "the lowest level of our own lines in the server's log; debug shows prompts, and Triton's verbose lines too",
        choices=("debug", "info", "warning", "error"),
    )
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
                    raise ConfigError(f"unknown setting '{name}' ({source}){nearest(name, tuple(_BY_NAME))}")
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
        Triton's vLLM backend brings, and over both the environment. That backend publishes its metrics where
        REPORT_CUSTOM_METRICS is true and `disable_log_stats` in the model.json is not; so are their names here."""
        own = {name: value for name, value in parameters.items() if name not in TRITON_PARAMETERS}
        triton = {name: str(value) for name, value in parameters.items() if name in TRITON_PARAMETERS}
        for name, value in triton.items():
            if name in _TRITON_FLAGS and parse_bool(value) is None:
                raise ConfigError(f"parameter '{name}' has the value {value!r} ({where}); allowed: true or false")
        from_json = dict(model_json or {})
        if from_json.pop(DISABLE_LOG_STATS, False) and parse_bool(triton.get(REPORT_CUSTOM_METRICS, "")):
            del triton[REPORT_CUSTOM_METRICS]
        layers: list[tuple[str, Mapping[str, Any]]] = [(where, own), ("model.json", from_json)]
        layers.append(("environment", environment_settings(environ)))
        return dataclasses.replace(cls.from_layers(layers), triton_parameters=triton)

    @property
    def target_rope(self) -> dict[str, Any]:
        """The fields of `rope_scaling`; empty where the target keeps its own."""
        fields: dict[str, Any] = json.loads(self.rope_scaling or "{}")
        return fields

    @property
    def adapters(self) -> dict[str, str]:
        """The folders, or hub ids, of `lora_modules` by name."""
        modules: dict[str, str] = json.loads(self.lora_modules or "{}")
        return modules

    @property
    def report_custom_metrics(self) -> bool | None:
        """What REPORT_CUSTOM_METRICS in config.pbtxt says; None where it is not there."""
        return parse_bool(self.triton_parameters.get(REPORT_CUSTOM_METRICS, ""))

    @property
    def reported_kv_events(self) -> Literal["off", "hashes", "tokens"]:
        """What an engine reports of its prefix cache."""
        if self.kv_events_endpoint:
            return "tokens"
        routes = self.data_parallel_size > 1 and self.routing == "prefix" and self.enable_prefix_caching
        return "hashes" if routes else "off"

    def as_strings(self) -> dict[str, str]:
        """Every effective setting as text, for the log line at start."""
        return {name: as_text(getattr(self, name)) for name in _BY_NAME}


SETTINGS = settings_of(EngineConfig)
_BY_NAME = {setting.name: setting for setting in SETTINGS}


def environment_settings(environ: Mapping[str, str]) -> dict[str, str]:
    """The settings in `environ`: `DFLASH_KV_BLOCK_SIZE=32` is `kv_block_size`. Unknown names are kept, so
    that a misspelt variable stops the load instead of being ignored; those of Kubernetes's service links are not."""
    return {
        name[len(ENV_PREFIX) :].lower(): value
        for name, value in environ.items()
        if name.startswith(ENV_PREFIX)
        and not name.startswith(RESERVED_ENV_PREFIX)
        and not _is_service_link(name, value, environ)
    }


def _is_service_link(name: str, value: str, environ: Mapping[str, str]) -> bool:
    """Whether Kubernetes has set this variable for a Service, such as DFLASH_TRITON_PORT_8000_TCP for `dflash-triton`.
    The one that can have the name of a setting is NAME_PORT, whose value here is a URL: DFLASH_KV_TRANSFER_PORT."""
    found = _SERVICE_LINK.fullmatch(name)
    if found is None or f"{found[1]}_SERVICE_HOST" not in environ:
        return False
    if found[2] == "_PORT":
        return _SERVICE_URL.match(value) is not None
    return name[len(ENV_PREFIX) :].lower() not in _BY_NAME


def environment_name(setting: str) -> str:
    """The environment variable of a setting."""
    return ENV_PREFIX + setting.upper()


def check_setting(name: str, value: str, source: str) -> None:
    """Raise `ConfigError` unless `name` is a setting and `value` one of its values."""
    EngineConfig.from_values({name: value}, source)


def asset_path(*parts: str) -> Path:
    """A file shipped with the project (`model_repository`, `demo/pair`): in a checkout it lies beside the
    package, in an installed wheel inside it."""
    package = Path(__file__).resolve().parent
    for root in (package / "_assets", package.parent):
        path = root.joinpath(*parts)
        if path.exists():
            return path
    raise FileNotFoundError(f"{'/'.join(parts)} is missing from this installation; reinstall dflash-triton")
