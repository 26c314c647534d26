"""Describes the model to a front end, which needs no configuration of its own then: the input `describe`."""

from __future__ import annotations

import json
from pathlib import Path

from dflash_backend.config import EngineConfig
from dflash_backend.engine_client.kv_publisher import event_endpoints
from dflash_backend.messages import EngineReady
from dflash_backend.text.request import RequestRules


def describe_model(config: EngineConfig, ready: EngineReady, target_dir: Path, rules: RequestRules) -> str:
    """A JSON object: lengths in tokens, counts, and where the tokenizer lies on the server's machine.

    `tokenizer` is a directory; `target_model` and `target_revision` are the settings, by which another machine finds
    the same files on the hub. `sampling_defaults` are those for parameters that a request leaves out.
    """
    return json.dumps(
        {
            "max_model_len": ready.max_model_len,
            "vocab_size": ready.vocab_size,
            "num_speculative_tokens": ready.num_speculative_tokens,
            "adaptive_speculation": config.adaptive_speculation,
            "max_n": rules.max_n,
            "require_cache_salt": rules.require_cache_salt,
            "sampling_defaults": dict(rules.sampling_defaults),
            "tokenizer": str(target_dir.absolute()),
            "target_model": config.target_model,
            "target_revision": config.target_revision,
            "structured_outputs": True,
            "trust_messages": config.message_special_tokens == "control",
            "description": ready.description,
            "data_parallel_size": config.data_parallel_size,
            "kv_block_size": ready.kv_block_size,
            "num_kv_blocks": ready.num_kv_blocks,
            "max_num_seqs": config.max_num_seqs,
            "max_response_mb": config.max_response_mb,
            "max_queue_tokens": config.max_queue_tokens,
            "max_num_batched_tokens": config.max_num_batched_tokens,
            "kv_events_endpoints": event_endpoints(config),
            "kv_events_topic": config.kv_events_topic,
            "lora_names": ready.lora_names,
        }
    )
