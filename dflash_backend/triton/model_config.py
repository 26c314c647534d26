"""What Triton must know of the model, and what is read from a model directory beside config.pbtxt.

The tables of inputs and outputs are those of the shipped config.pbtxt; a config.pbtxt without them is completed.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, MutableMapping, Sequence
from pathlib import Path
from typing import Any

from dflash_backend.config import DISABLE_LOG_STATS, GPU_DEVICE_IDS, NGRAM, ConfigError
from dflash_backend.drafters.registry import METHODS
from dflash_backend.text.sampling_params import MAX_LOGPROBS

# Name to type and number of elements, -1 for any. All are optional.
INPUTS: dict[str, tuple[str, int]] = {
    "text_input": ("TYPE_STRING", 1),
    "input_ids": ("TYPE_INT64", -1),
    "messages": ("TYPE_STRING", 1),
    "stream": ("TYPE_BOOL", 1),
    "sampling_parameters": ("TYPE_STRING", 1),
    "exclude_input_in_output": ("TYPE_BOOL", 1),
    "return_finish_reason": ("TYPE_BOOL", 1),
    "return_num_input_tokens": ("TYPE_BOOL", 1),
    "return_num_output_tokens": ("TYPE_BOOL", 1),
    "return_logprobs": ("TYPE_BOOL", 1),
    "return_cumulative_logprob": ("TYPE_BOOL", 1),
    "return_token_ids": ("TYPE_BOOL", 1),
    "return_spec_stats": ("TYPE_BOOL", 1),
    "return_steps": ("TYPE_BOOL", 1),
    "return_stop_reason": ("TYPE_BOOL", 1),
    "describe": ("TYPE_BOOL", 1),
    "delta_stream": ("TYPE_STRING", 1),
    "swap_drafter": ("TYPE_STRING", 1),
    "image": ("TYPE_STRING", -1),
    "embedding_request": ("TYPE_STRING", 1),
}
OUTPUTS: dict[str, tuple[str, int]] = {
    "text_output": ("TYPE_STRING", -1),
    "finish_reason": ("TYPE_STRING", -1),
    "cumulative_logprob": ("TYPE_FP32", -1),
    "logprobs": ("TYPE_STRING", -1),
    "prompt_logprobs": ("TYPE_STRING", 1),
    "num_input_tokens": ("TYPE_UINT32", -1),
    "num_output_tokens": ("TYPE_UINT32", -1),
    "token_ids": ("TYPE_INT32", -1),
    "spec_stats": ("TYPE_STRING", -1),
    "steps": ("TYPE_STRING", -1),
    "stop_reason": ("TYPE_STRING", -1),
    "kv_transfer_params": ("TYPE_STRING", 1),
    "delta_batches": ("TYPE_INT64", 1),
}

# Arguments of vLLM's engine in a model.json that are settings here, by the same names and by others.
_SAME_NAMES = [
    "dtype",
    "seed",
    "max_model_len",
    "rope_scaling",
    "max_num_seqs",
    "max_num_batched_tokens",
    "gpu_memory_utilization",
    "enable_prefix_caching",
    "quantization",
    "kv_cache_dtype",
    "tensor_parallel_size",
    "data_parallel_size",
]
ENABLE_LORA, MULTI_LORA = "enable_lora", "multi_lora.json"
_SETTINGS = {name: name for name in _SAME_NAMES} | {
    "model": "target_model",
    "revision": "target_revision",
    "block_size": "kv_block_size",
    "distributed_executor_backend": "distributed_executor",
}
# Where vLLM has other names for a value.
_VALUES = {
    ("dtype", "half"): "float16",
    ("dtype", "float"): "float32",
    ("kv_cache_dtype", "fp8_e4m3"): "fp8",
    ("distributed_executor_backend", "uni"): "auto",
}
# Those that are no settings, with the values that are taken, all of them where that is None. All but the first change
# nothing here.
_NO_SETTINGS: dict[str, Sequence[Any] | None] = {
    DISABLE_LOG_STATS: (True, False),
    "disable_log_requests": (True, False),
    "enable_log_requests": (False,),
    "enable_chunked_prefill": (True,),
    **dict.fromkeys((ENABLE_LORA, "max_loras", "max_lora_rank", "max_cpu_loras", "lora_dtype")),  # `_adapters`
    "trust_remote_code": (True, False),
    "pipeline_parallel_size": (1,),
    "max_logprobs": range(MAX_LOGPROBS + 1),
    "served_model_name": None,  # Triton's name of the model
    "swap_space": None,  # for KV of requests that were preempted; here it is computed again
    "load_format": ("auto", "safetensors"),
    "generation_config": ("vllm", "auto"),
}
# What vLLM's `speculative_config` has beside the method, and the settings.
_SPECULATION = {
    "model": "draft_model",
    "num_speculative_tokens": "num_speculative_tokens",
    "prompt_lookup_max": "prompt_lookup_max",
    "prompt_lookup_min": "prompt_lookup_min",
}
# What vLLM's `kv_transfer_config` calls the roles.
_TRANSFER_ROLES = {"kv_producer": "prefill", "kv_consumer": "decode", "kv_both": "both"}
NIXL_CONNECTOR = "NixlConnector"
# Older versions of vLLM name the method here.
_NGRAM_MODELS = (NGRAM, f"[{NGRAM}]")


def complete_model_config(config: Any) -> None:
    """Add what a config.pbtxt leaves out. `config` is the `ModelConfig` of Triton's Python backend, whose methods raise
    ValueError where config.pbtxt says something else."""
    given = config.as_dict()
    present = {tensor["name"] for kind in ("input", "output") for tensor in given.get(kind, [])}
    for name, (data_type, size) in INPUTS.items():
        if name not in present:
            config.add_input({"name": name, "data_type": data_type, "dims": [size], "optional": True})
    for name, (data_type, size) in OUTPUTS.items():
        if name not in present:
            config.add_output({"name": name, "data_type": data_type, "dims": [size]})
    config.set_model_transaction_policy({"decoupled": True})
    config.set_max_batch_size(0)


def check_model_config(config: Mapping[str, Any]) -> None:
    """Check that requests can reach the model and responses leave it. Raises `ConfigError`."""
    if not config.get("model_transaction_policy", {}).get("decoupled", False):
        raise ConfigError(
            "config.pbtxt has no `model_transaction_policy { decoupled: true }`, without which Triton takes a single "
            "response to a request and streams cannot be sent; add that line"
        )
    if config.get("max_batch_size", 0) > 0:
        raise ConfigError("config.pbtxt has a max_batch_size above 0; set it to 0: the engine batches by itself")
    for kind, tensors in (("input", INPUTS), ("output", OUTPUTS)):
        missing = sorted(tensors.keys() - {tensor["name"] for tensor in config.get(kind, [])})
        if missing:
            raise ConfigError(
                f"config.pbtxt has no {kind} {', '.join(missing)}; copy the list of {kind}s from the model_repository "
                "of dflash-triton, or leave --disable-auto-complete-config out"
            )


def num_instances(config: Mapping[str, Any]) -> int:
    """How many instances of the model Triton starts, each with engines of its own: those of its instance groups, on
    each of a group's GPUs; at least 1."""
    groups = config.get("instance_group", [])
    return max(1, sum(group.get("count", 1) * max(1, len(group.get("gpus", []))) for group in groups))


def read_model_json(path: Path) -> dict[str, Any]:
    """The settings in a model.json, which Triton's vLLM backend reads, and its `disable_log_stats`; empty where there
    is none.

    An argument that is null counts as left out. Raises `ConfigError` for a file that cannot be read, and for an
    argument that means nothing here, by name.
    """
    if not path.is_file():
        return {}
    try:
        given = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ConfigError(f"{path}: it is not JSON: {error}") from None
    if not isinstance(given, dict):
        raise ConfigError(f"{path}: it must be a JSON object")
    settings: dict[str, Any] = {}
    for name, value in given.items():
        if value is None:  # vLLM's own default
            continue
        if name in _SETTINGS:
            settings[_SETTINGS[name]] = _VALUES.get((name, str(value).lower()), value)
        elif name == "enforce_eager":
            settings["enable_cuda_graphs"] = str(value).lower() == "false"
        elif name == "speculative_config" and isinstance(value, dict):
            settings |= _speculation(value, path)
        elif name == "kv_transfer_config":
            settings |= _transfer(value, path)
        elif name == "tokenizer" and value == given.get("model"):
            continue
        elif name not in _NO_SETTINGS:
            raise ConfigError(f"{path}: '{name}' has no counterpart here; remove it")
        elif (taken := _NO_SETTINGS[name]) is not None and _plain(value) not in taken:
            numbers = isinstance(taken, range)
            allowed = f"0 to {taken[-1]}" if numbers else " or ".join(json.dumps(one) for one in taken)
            raise ConfigError(f"{path}: '{name}' is {json.dumps(value)}; allowed: {allowed}")
        elif name == DISABLE_LOG_STATS:
            settings[name] = _plain(value)
    if _plain(given.get(ENABLE_LORA)) is True:
        settings["lora_modules"] = _adapters(path.with_name(MULTI_LORA))
    return settings


def _adapters(path: Path) -> dict[str, Any]:
    """The LoRA adapters, which Triton's vLLM backend has in a file beside the model.json."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError(f"{path} does not exist; with 'enable_lora' it names the adapters' folders") from None
    except ValueError as error:
        raise ConfigError(f"{path}: it is not JSON: {error}") from None
    if not isinstance(found, dict) or not found:
        raise ConfigError(f'{path}: it must be a JSON object, such as {{"NAME": "FOLDER"}}')
    return found


def _plain(value: Any) -> Any:
    """A value that vLLM's backend takes as text too."""
    return {"true": True, "false": False}.get(value.lower(), value) if isinstance(value, str) else value


def _transfer(given: Any, path: Path) -> dict[str, Any]:
    """vLLM's description of a prefill or a decode server, whose connector is NIXL's; what else it has is NIXL's own."""
    connector = given.get("kv_connector") if isinstance(given, dict) else None
    role = given.get("kv_role") if isinstance(given, dict) else None
    if connector != NIXL_CONNECTOR or role not in _TRANSFER_ROLES:
        allowed = " or ".join(f"'{name}'" for name in _TRANSFER_ROLES)
        raise ConfigError(
            f"{path}: 'kv_transfer_config' has the connector {connector!r} and the role {role!r}; allowed: "
            f"'{NIXL_CONNECTOR}', and {allowed}"
        )
    return {"kv_role": _TRANSFER_ROLES[role], "kv_transfer_backend": "nixl"}


def _speculation(given: Mapping[str, Any], path: Path) -> dict[str, Any]:
    """vLLM's description of a drafter."""
    unknown = sorted(given.keys() - _SPECULATION.keys() - {"method"})
    if unknown:
        raise ConfigError(f"{path}: 'speculative_config' has '{unknown[0]}', which has no counterpart here; remove it")
    if given.get("method") is not None and given["method"] not in METHODS:
        allowed = ", ".join(f"'{name}'" for name in METHODS)
        raise ConfigError(f"{path}: 'speculative_config' has the method {given['method']!r}; allowed: {allowed}")
    settings = {_SPECULATION[name]: value for name, value in given.items() if name != "method"}
    method, model = given.get("method"), given.get("model")
    if method == NGRAM and model not in (*_NGRAM_MODELS, None):
        raise ConfigError(
            f"{path}: 'speculative_config' has the method '{NGRAM}' and the model {model!r}; that method has no model"
        )
    if method == NGRAM or (method is None and model in _NGRAM_MODELS):
        settings["draft_model"] = NGRAM
    elif method is not None or model is not None:
        for name in ("prompt_lookup_max", "prompt_lookup_min"):  # which vLLM reads with n-grams alone
            settings.pop(name, None)
    return settings


def use_gpus_of_model(
    args: Mapping[str, str], parameters: Mapping[str, str], environ: MutableMapping[str, str]
) -> None:
    """Show the engine only the GPUs that Triton gave this model instance, or that config.pbtxt names.

    `args` are those of Triton's `initialize`, `parameters` those of config.pbtxt. An instance group of `KIND_GPU` has
    an instance for each of its `gpus`; one of `KIND_CPU` or `KIND_MODEL` leaves the choice to the parameter
    `GPU_DEVICE_IDS` (`0,1`), and without it to the setting `device`. Triton numbers the GPUs that its own process sees,
    so an id is a place in `CUDA_VISIBLE_DEVICES` where that is set. Raises `ConfigError` for ids that name no GPUs, and
    for ids beside `KIND_GPU`.
    """
    given = parameters.get(GPU_DEVICE_IDS, "").strip()
    device_ids = [one.strip() for one in given.split(",")] if given else []
    if len({*device_ids}) != len(device_ids) or not all(one.isascii() and one.isdigit() for one in device_ids):
        raise ConfigError(
            f"parameter '{GPU_DEVICE_IDS}' has the value {given!r} (config.pbtxt); allowed: different numbers of GPUs, "
            "such as 0,1"
        )
    if args.get("model_instance_kind") == "GPU":
        if device_ids:
            raise ConfigError(
                f"config.pbtxt has an instance_group of KIND_GPU and the parameter '{GPU_DEVICE_IDS}'; keep one of "
                "them: KIND_GPU shows an engine one GPU, KIND_MODEL with the parameter those that it names"
            )
        device_ids = [args["model_instance_device_id"]]
    if not device_ids:
        return
    visible = [name.strip() for name in environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if name.strip()]
    if visible and given and (beyond := [one for one in device_ids if int(one) >= len(visible)]):
        raise ConfigError(
            f"parameter '{GPU_DEVICE_IDS}' names GPU {beyond[0]} (config.pbtxt), and the server sees {len(visible)}: "
            f"CUDA_VISIBLE_DEVICES is {environ['CUDA_VISIBLE_DEVICES']!r}"
        )
    shown = [visible[int(one)] if int(one) < len(visible) else one for one in device_ids]
    environ["CUDA_VISIBLE_DEVICES"] = ",".join(shown)
