"""What to say of a setting that does not exist: the name that was meant, or why there is no such setting."""

from __future__ import annotations

import difflib
from collections.abc import Sequence

# What other servers call settings that are here.
_OTHER_NAMES = {
    "model": "target_model",
    "target": "target_model",
    "draft": "draft_model",
    "revision": "target_revision",
    "drafter": "draft_model",
    "speculative_model": "draft_model",
    "ngram_prompt_lookup_max": "prompt_lookup_max",
    "ngram_prompt_lookup_min": "prompt_lookup_min",
    "max_seq_len": "max_model_len",
    "block_size": "kv_block_size",
    "enable_prefix_cache": "enable_prefix_caching",
    "max_batch_size": "max_num_seqs",
    "mem_fraction_static": "gpu_memory_utilization",
    "chunked_prefill_size": "max_prefill_tokens_per_step",
    "rope_parameters": "rope_scaling",
}

# Settings of other servers that nothing here stands for, and why.
_NOT_HERE = {
    "enable_lora": "lora_modules says which LoRA adapters there are",
    **dict.fromkeys(("max_loras", "max_lora_rank", "max_cpu_loras"), "all adapters of lora_modules are in memory"),
    "pipeline_parallel_size": "layers are not spread over GPUs; tensor_parallel_size shares each of them",
    "hf_overrides": "fields of config.json are not overridden, but for its rotary scaling by rope_scaling",
    "trust_remote_code": "no code of a checkpoint is ever run",
}

# Names up to this length are compared with the known ones.
MAX_COMPARED_CHARS = 64


def nearest(name: str, names: Sequence[str]) -> str:
    """`; did you mean ...` when one of `names`, those of the settings, is close to `name`, else what there is."""
    if name in _OTHER_NAMES:
        return f"; here that is '{_OTHER_NAMES[name]}'"
    if name in _NOT_HERE:
        return f"; {_NOT_HERE[name]}"
    return closest(name, names, "settings", cutoff=0.7)


def closest(name: str, names: Sequence[str], kind: str, cutoff: float) -> str:
    """`; did you mean ...` when one of `names` is as close as that to `name`, else what there is of the kind."""
    close = difflib.get_close_matches(name, names, n=1, cutoff=cutoff) if len(name) <= MAX_COMPARED_CHARS else []
    return f"; did you mean '{close[0]}'?" if close else f"; the {kind} are: {', '.join(names)}"
