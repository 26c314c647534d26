"""Rewrites a z-lab drafter as a checkpoint of the speculators library, which carries the same weights otherwise.

It needs no library, and ships an embedding and an LM head, the target's, as versions before 0.9 did; `tests/oracle` has
what the library's own converter writes.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from dflash_backend.text.tokenizer import Tokenizer
from tests.support.tiny_models import save_checkpoint

# What surrounds the decoder in a z-lab config; the rest is the Qwen3 part.
ZLAB_FIELDS = ("architectures", "block_size", "num_target_layers", "dflash_config", "dtype")


def rewrite(
    draft: Path,
    target: Path,
    out: Path,
    kept: Sequence[int] | None = None,
    boundary_offset: int = 1,
    num_speculative_tokens: int | None = None,
) -> Path:
    """Write the z-lab drafter of `draft` for `target` as a speculators checkpoint to `out`, and return `out`.

    kept: the target's ids that it can still propose, ascending; None for all. boundary_offset: what is added to a layer
    id to make a boundary id; anything but 1 is a mistake to be noticed. num_speculative_tokens: the k that it asks for,
    by default the whole block.
    """
    config = json.loads((draft / "config.json").read_text(encoding="utf-8"))
    vocab_size = config["vocab_size"]
    k = num_speculative_tokens or config["block_size"] - 1
    fields = speculators_config(config, str(target.resolve()), len(kept or range(vocab_size)), k, boundary_offset)
    tensors = load_file(draft / "model.safetensors") | target_tensors(target, vocab_size, kept)
    return save_checkpoint(out, fields, tensors)


def speculators_config(
    config: dict[str, Any], verifier: str | None, draft_vocab_size: int, k: int, boundary_offset: int = 1
) -> dict[str, Any]:
    """`config.json` in the form of the speculators library, from a z-lab one."""
    method = {"proposal_type": "greedy", "speculative_tokens": k, "verifier_accept_k": 1, "accept_tolerance": 0.0}
    return {
        "architectures": ["DFlashDraftModel"],
        "speculators_model_type": "dflash",
        "aux_hidden_state_layer_ids": [i + boundary_offset for i in config["dflash_config"]["target_layer_ids"]],
        "block_size": config["block_size"],
        "mask_token_id": config["dflash_config"]["mask_token_id"],
        "draft_vocab_size": draft_vocab_size,
        "target_hidden_size": None,
        "sample_from_anchor": False,
        "sliding_window_non_causal": False,
        "tie_word_embeddings": False,
        "torch_dtype": config.get("torch_dtype") or config["dtype"],
        "transformer_layer_config": {name: value for name, value in config.items() if name not in ZLAB_FIELDS},
        "speculators_config": {
            "algorithm": "dflash",
            "default_proposal_method": "greedy",
            "proposal_methods": [method],
            "verifier": {"name_or_path": verifier, "architectures": ["Qwen3ForCausalLM"]},
        },
    }


def target_tensors(target: Path, vocab_size: int, kept: Sequence[int] | None) -> dict[str, torch.Tensor]:
    """What speculators copies from the target, and the maps of a draft vocabulary that was cut."""
    tensors = load_file(target / "model.safetensors")
    embedding = tensors["model.embed_tokens.weight"]
    head = tensors.get("lm_head.weight", embedding)
    copied = {"embed_tokens.weight": embedding, "verifier_norm.weight": tensors["model.norm.weight"]}
    if kept is None:
        return copied | {"lm_head.weight": head.clone()}
    ids = torch.tensor(kept, dtype=torch.int64)
    return copied | {
        "lm_head.weight": head[ids].clone(),
        "d2t": ids - torch.arange(len(ids)),
        "t2d": torch.zeros(vocab_size, dtype=torch.bool).index_fill_(0, ids, True),
    }


def frequent_tokens(target: Path, held_out: Sequence[Path], count: int) -> list[int]:
    """The `count` tokens of the target that its answers use most, ascending: those of the references, each with the
    end of its turn, which the drafter must be able to propose as well. Ids that no answer uses fill up."""
    tokenizer = Tokenizer.load(target)
    config = json.loads((target / "config.json").read_text(encoding="utf-8"))
    counts: Counter[int] = Counter()
    for file in held_out:
        for line in file.read_text(encoding="utf-8").splitlines():
            counts.update([*tokenizer.encode(json.loads(line)["reference"]), config["eos_token_id"]])
    used = [token for token, _ in counts.most_common(count)]
    unused = [token for token in range(config["vocab_size"]) if token not in counts]
    return sorted(used + unused[: count - len(used)])
