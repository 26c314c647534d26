"""A drafter in the speculators format, written from the small z-lab one, and edits of checkpoints, for these tests."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from dflash_backend.config import asset_path
from dflash_backend.text.tokenizer import Tokenizer
from tests.support.speculators_checkpoint import speculators_config
from tests.support.tiny_models import (
    DRAFT_INTERMEDIATE,
    HIDDEN,
    VOCAB_SIZE,
    decoder_config,
    eagle3_shapes,
    make_draft,
    save_checkpoint,
)

DRAFT_VOCAB_SIZE = 24


def make_speculators(directory: Path, target: str | None = None, **changes: Any) -> None:
    """Save a speculators drafter with a vocabulary of its own: every fourth token of the target's."""
    tensors = make_draft(directory)
    config = json.loads((directory / "config.json").read_text())
    tensors["lm_head.weight"] = torch.randn(DRAFT_VOCAB_SIZE, HIDDEN, generator=torch.Generator().manual_seed(2))
    tensors["d2t"] = 3 * torch.arange(DRAFT_VOCAB_SIZE)
    tensors["t2d"] = torch.arange(VOCAB_SIZE) % 4 == 0
    save_checkpoint(directory, speculators_config(config, target, DRAFT_VOCAB_SIZE, k=5) | changes, tensors)


def edit(path: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Change a JSON file in place."""
    data = json.loads(path.read_text())
    change(data)
    path.write_text(json.dumps(data))


def put(path: Path, **fields: Any) -> None:
    """Set top-level fields of a JSON file."""
    edit(path, lambda data: data.update(fields))


def make_dflash2(
    directory: Path, taps: int = 2, group_size: int = 8, rank: int = 6, top_k: int = 5, **changes: Any
) -> dict[str, torch.Tensor]:
    """Save a random z-lab DFlash2 drafter for `make_target`'s model and return its tensors."""
    tensors = make_draft(directory)
    config = json.loads((directory / "config.json").read_text())
    own = {"conv_kernel_size": taps, "conv_group_size": group_size, "selector_rank": rank, "selector_top_k": top_k}
    config |= {"architectures": ["DFlash2DraftModel"], "dflash_config": config["dflash_config"] | own}
    tensors |= dflash2_tensors(config, seed=3)
    save_checkpoint(directory, config | changes, tensors)
    return tensors


def dflash2_tensors(config: dict[str, Any], seed: int, scale: float = 0.5) -> dict[str, torch.Tensor]:
    """Random convolutions and a random selector for a z-lab drafter with this config. scale: of the convolutions' part
    that is not the identity."""
    own, hidden, vocab = config["dflash_config"], config["hidden_size"], config["vocab_size"]
    taps, rank, groups = own["conv_kernel_size"], own["selector_rank"], hidden // own["conv_group_size"]
    generator = torch.Generator().manual_seed(seed)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator) * scale

    found = {
        "candidate_selector.hidden_projection.weight": random(rank, hidden),
        "candidate_selector.predecessor_codebook": random(vocab, rank),
        "candidate_selector.successor_codebook": random(vocab, rank),
    }
    for layer in range(config["num_hidden_layers"]):
        for name in (f"layers.{layer}.attention_conv", f"layers.{layer}.mlp_conv"):
            base = random(2, taps, hidden)
            base[:, 0] += 1.0
            found[f"{name}.base_kernel"] = base
            found[f"{name}.kernel_projection.weight"] = random(2 * taps * groups, hidden) / hidden**0.5
    return found


def make_demo_dflash2(directory: Path) -> Path:
    """Save the demo drafter as a DFlash2 drafter with small random convolutions and a small random selector beside
    its own weights, most of whose drafts remain, and return its directory."""
    demo = asset_path("demo", "pair", "draft")
    config = json.loads((demo / "config.json").read_text())
    own = {"conv_kernel_size": 2, "conv_group_size": 16, "selector_rank": 16, "selector_top_k": 8}
    config |= {"architectures": ["DFlash2DraftModel"], "dflash_config": config["dflash_config"] | own}
    tensors = load_file(demo / "model.safetensors") | dflash2_tensors(config, seed=4, scale=0.15)
    return save_checkpoint(directory, config, tensors)


def make_dspark(
    directory: Path,
    kind: str = "vanilla",
    rank: int = 6,
    confidence: bool = True,
    reads_markov: bool = True,
    draft_vocab_size: int = VOCAB_SIZE,
    **changes: Any,
) -> dict[str, torch.Tensor]:
    """Save a random DSpark drafter in the format of DeepSpec for `make_target`'s model and return its tensors. Its
    draft vocabulary has every fourth token where it is smaller."""
    tensors = make_draft(directory)
    config = json.loads((directory / "config.json").read_text())
    config |= config.pop("dflash_config") | {
        "architectures": ["Qwen3DSparkModel"],
        "num_anchors": 512,
        "sample_from_anchor": True,
        "draft_vocab_size": draft_vocab_size,
        **dspark_fields(kind, rank, confidence, reads_markov and rank > 0),
    }
    tensors |= dspark_tensors(config, seed=3)
    if draft_vocab_size < VOCAB_SIZE:
        tensors["lm_head.weight"] = torch.randn(draft_vocab_size, HIDDEN, generator=torch.Generator().manual_seed(2))
        tensors["d2t"] = 3 * torch.arange(draft_vocab_size)
    save_checkpoint(directory, config | changes, tensors)
    return tensors


def dspark_fields(kind: str, rank: int, confidence: bool = True, reads_markov: bool = True) -> dict[str, Any]:
    """The fields of a DSpark config that its heads have."""
    return {
        "markov_rank": rank,
        "markov_head_type": kind,
        "enable_confidence_head": confidence,
        "confidence_head_with_markov": reads_markov,
    }


def dspark_tensors(config: dict[str, Any], seed: int, scale: float = 0.5) -> dict[str, torch.Tensor]:
    """Random heads for a drafter with this config. scale: of the Markov head's tables."""
    rank, hidden, vocab = config["markov_rank"], config["hidden_size"], config["vocab_size"]
    generator = torch.Generator().manual_seed(seed)

    def random(*shape: int, of: float = 0.5) -> torch.Tensor:
        return torch.randn(shape, generator=generator) * of

    found = {}
    if rank:
        found["markov_head.markov_w1.weight"] = random(vocab, rank, of=2 * scale)
        found["markov_head.markov_w2.weight"] = random(config.get("draft_vocab_size", vocab), rank, of=2 * scale)
    name, parts, inner = {"gated": ("gate_proj", 1, 1), "rnn": ("joint_proj", 3, 2)}.get(
        config["markov_head_type"], ("", 0, 0)
    )
    if rank and name:
        found[f"markov_head.{name}.weight"] = random(parts * rank, inner * rank + hidden)
        found[f"markov_head.{name}.bias"] = random(parts * rank)
    if config["enable_confidence_head"]:
        width = hidden + (rank if config["confidence_head_with_markov"] else 0)
        found["confidence_head.proj.weight"] = random(1, width)
        found["confidence_head.proj.bias"] = random(1)
    return found


def make_demo_dspark(directory: Path, kind: str = "vanilla", from_anchor: bool = True) -> Path:
    """Save the demo drafter as a DSpark drafter with small random heads beside its own weights, and return its
    directory.

    With `from_anchor` its outputs are for other positions than it was trained for. There they count little, and its
    Markov head knows which tokens follow one another, as far as its rank goes.
    """
    demo = asset_path("demo", "pair", "draft")
    config = json.loads((demo / "config.json").read_text())
    config |= config.pop("dflash_config") | {"architectures": ["Qwen3DSparkModel"], "sample_from_anchor": from_anchor}
    config |= dspark_fields(kind, 64 if from_anchor else 16)
    tensors = load_file(demo / "model.safetensors") | dspark_tensors(config, seed=4, scale=0.1)
    if from_anchor:
        tensors["norm.weight"] = tensors["norm.weight"] * 0.05
        if kind == "gated":
            tensors["markov_head.gate_proj.weight"] *= 0.02
        left, values, right = torch.linalg.svd(8 * chances_of_next_tokens(), full_matrices=False)
        root = values[:64].sqrt()
        tensors["markov_head.markov_w1.weight"] = (left[:, :64] * root).contiguous()
        tensors["markov_head.markov_w2.weight"] = (right[:64].T * root).contiguous()
    return save_checkpoint(directory, config, tensors)


def chances_of_next_tokens() -> torch.Tensor:
    """How often each token of the demo target follows each other one in answers to its held-out questions: float32
    `[vocab, vocab]`."""
    target = asset_path("demo", "pair", "target")
    tokenizer = Tokenizer.load(target)
    size = json.loads((target / "config.json").read_text())["vocab_size"]
    counts = torch.zeros(size, size)
    for name in ("chat", "code", "math"):
        lines = asset_path("demo", "held_out").joinpath(f"{name}.jsonl").read_text().splitlines()
        for line in lines:
            tokens = torch.tensor(tokenizer.encode(json.loads(line)["reference"]))
            counts.index_put_((tokens[:-1], tokens[1:]), torch.ones(len(tokens) - 1), accumulate=True)
    return counts / counts.sum(dim=1, keepdim=True).clamp(min=1)


def make_eagle3(
    directory: Path,
    seed: int = 5,
    layer: str = "midlayer.",
    qwen3: bool = False,
    draft_vocab_size: int = DRAFT_VOCAB_SIZE,
    embedding: bool = False,
    head: bool = True,
    target_hidden: int = HIDDEN,
    num_features: int = 3,
    **changes: Any,
) -> dict[str, torch.Tensor]:
    """Save a random EAGLE-3 drafter in its authors' format for `make_target`'s model and return its tensors. Its draft
    vocabulary has every fourth token where it is smaller. layer: what the names of its layer's tensors begin with."""
    config = decoder_config(1, DRAFT_INTERMEDIATE, VOCAB_SIZE) | {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "qwen3" if qwen3 else "llama",
        "draft_vocab_size": draft_vocab_size,
        "target_hidden_size": target_hidden,
        "eagle_aux_hidden_state_layer_ids": [1, 3, 4][:num_features],
        "norm_before_residual": False,
        "norm_output": False,
        "tie_word_embeddings": False,
        "torch_dtype": "float32",
    }
    config = {name: value for name, value in (config | changes).items() if value is not None}
    generator = torch.Generator().manual_seed(seed)

    def random(name: str, shape: tuple[int, ...]) -> torch.Tensor:
        values = torch.randn(shape, generator=generator) * 0.25
        return values.abs() + 0.6 if "norm" in name else values

    norms = [name for name in ("norm_before_fc", "fc_norm") if config.get(name)]
    shapes = eagle3_shapes(layer, DRAFT_INTERMEDIATE, num_features, target_hidden, qwen3, norms)
    if config.get("attention_bias"):
        rows = {name: shape[0] for name, shape in shapes.items() if name.endswith("_proj.weight") and "attn" in name}
        shapes |= {name.replace(".weight", ".bias"): (size,) for name, size in rows.items()}
    if embedding:
        shapes["embed_tokens.weight"] = (VOCAB_SIZE, HIDDEN)
    if head:
        shapes["lm_head.weight"] = (draft_vocab_size, HIDDEN)
    tensors = {name: random(name, shape) for name, shape in shapes.items()}
    if draft_vocab_size < VOCAB_SIZE:
        tensors["d2t"] = 3 * torch.arange(draft_vocab_size)
        tensors["t2d"] = torch.arange(VOCAB_SIZE) % 4 == 0
    save_checkpoint(directory, config, tensors)
    return tensors


def make_demo_eagle3(directory: Path, **changes: Any) -> Path:
    """Save an EAGLE-3 drafter for the demo target and return its directory. As far as its rank goes it knows which
    tokens follow one another.

    Attention looks at little but the newest token, whose embedding it passes on to the LM head. What it reads of the
    features and of the tokens before is small and random, so that drafts differ where that is wrong.
    """
    config = json.loads((asset_path("demo", "pair", "target") / "config.json").read_text())
    hidden, head_dim = config["hidden_size"], config["head_dim"]
    config |= {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "num_hidden_layers": 1,
        "layer_types": None,
        "num_attention_heads": hidden // head_dim,
        "num_key_value_heads": hidden // head_dim,
        "attention_bias": True,
        "rope_theta": 100.0,
        "norm_before_residual": True,
        "eagle_aux_hidden_state_layer_ids": [2, 4, 7],
        "tie_word_embeddings": False,
    }
    tensors = bigram_eagle3_tensors(hidden, head_dim, config["intermediate_size"])
    return save_checkpoint(directory, config | changes, {name: each.contiguous() for name, each in tensors.items()})


def bigram_eagle3_tensors(hidden: int, head_dim: int, intermediate: int) -> dict[str, torch.Tensor]:
    """The tensors of `make_demo_eagle3`."""
    generator = torch.Generator().manual_seed(6)

    def random(*shape: int, scale: float = 0.02) -> torch.Tensor:
        return torch.randn(shape, generator=generator) * scale

    # One vector for all queries and keys, in whose fastest pairs positions differ.
    newest = torch.zeros(hidden // head_dim, head_dim)
    newest[:, :4] = newest[:, head_dim // 2 : head_dim // 2 + 4] = (8.0 / head_dim**0.5) ** 0.5 * 1.7
    left, values, right = torch.linalg.svd(8 * chances_of_next_tokens(), full_matrices=False)
    root = values[:hidden].sqrt()
    tensors = {
        "embed_tokens.weight": left[:, :hidden] * root,
        "lm_head.weight": right[:hidden].T * root,
        "fc.weight": random(hidden, 3 * hidden),
        "norm.weight": torch.ones(hidden),
        "midlayer.input_layernorm.weight": torch.ones(hidden),
        "midlayer.hidden_norm.weight": torch.full((hidden,), 0.1),
        "midlayer.post_attention_layernorm.weight": torch.ones(hidden),
        "midlayer.self_attn.v_proj.weight": torch.cat([torch.eye(hidden), random(hidden, hidden)], dim=1),
        "midlayer.self_attn.v_proj.bias": torch.zeros(hidden),
        "midlayer.self_attn.o_proj.weight": torch.eye(hidden),
        "midlayer.self_attn.o_proj.bias": torch.zeros(hidden),
        "midlayer.mlp.gate_proj.weight": random(intermediate, hidden),
        "midlayer.mlp.up_proj.weight": random(intermediate, hidden),
        "midlayer.mlp.down_proj.weight": random(hidden, intermediate),
    }
    for name in ("q_proj", "k_proj"):
        tensors[f"midlayer.self_attn.{name}.weight"] = random(hidden, 2 * hidden, scale=0.05)
        tensors[f"midlayer.self_attn.{name}.bias"] = newest.flatten().clone()
    return tensors
