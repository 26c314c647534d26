"""What a drafter begins as: sizes by those of its target, weights by the target's own layers, or a drafter that there
is."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from dflash_backend.checkpoints.spec import CheckpointError, DecoderSpec, TargetSpec
from dflash_backend.checkpoints.weights import WeightSource, load_weights
from dflash_backend.drafters.base import draft_patterns, is_unused
from dflash_backend.drafters.dflash.config import DFlashSpec, default_layer_ids
from dflash_backend.drafters.dflash2.config import DFlash2Spec
from dflash_backend.drafters.dspark.config import VANILLA, DSparkSpec
from dflash_backend.drafters.eagle3.config import NORMS, Eagle3Spec
from dflash_backend.drafters.registry import read_draft
from dflash_backend.drafters.spec import DraftModelSpec
from dflash_backend.models.layers import LayerWeights
from dflash_backend.models.mlp import DenseMlp
from dflash_backend.text.tokenizer import Tokenizer
from dflash_backend.training.errors import TrainingError
from dflash_backend.training.network import DFLASH2, EAGLE3, DrafterConfig, DraftModel, Shape, layers_of

# From how many hidden numbers on a target gets five layers and blocks of 16 in place of three and 8.
LARGE = 1536
# What a checkpoint may have beside its layers, which is not trained.
SHIPPED = frozenset(("embed_tokens.weight", "lm_head.weight", "d2t", "t2d"))
NO_NORM = 0.1
"""An embedding that is shorter than this share of the usual one tells a layer nothing."""
MASKS = ("<|mask|>", "<mask>", "[MASK]", "<|reserved_special_token_0|>", "<|fim_pad|>", "<unk>", "<|unk|>")


def default_config(target: TargetSpec, kind: str, mask_token_id: int, **given: Any) -> DrafterConfig:
    """A drafter for a target. given: fields of `DrafterConfig` and `intermediate_size`, those that are not None. Raises
    `TrainingError`."""
    decoder, own = target.decoder, {name: value for name, value in given.items() if value is not None}
    large = decoder.hidden_size >= LARGE
    if not 0 <= mask_token_id < target.vocab_size:
        raise TrainingError(f"--mask-token is {mask_token_id}; the target has the tokens 0 to {target.vocab_size - 1}")
    if own.get("block_size", 2) < 2:
        raise TrainingError(f"--block-size is {own['block_size']}; a block has an anchor and at least one draft")
    layers = 1 if kind == EAGLE3 else own.pop("draft_layers", 5 if large else 3)
    num = decoder.num_layers
    inner = own.pop("intermediate_size", None)
    if inner is None:
        inner = decoder.intermediate_size if decoder.moe is None else 3 * decoder.hidden_size
    shape = _shape(decoder, target.vocab_size, intermediate_size=inner)
    if "target_layer_ids" not in own:
        own["target_layer_ids"] = _taps(num, layers, kind)
    if max(own["target_layer_ids"]) >= num or min(own["target_layer_ids"]) < 0:
        raise TrainingError(
            f"--layer-ids are {list(own['target_layer_ids'])}; the target has the layers 0 to {num - 1}"
        )
    if kind == DFLASH2:
        own.setdefault("conv_group_size", next(n for n in (16, 8, 4, 2, 1) if decoder.hidden_size % n == 0))
    own.setdefault("block_size", 16 if large else 8)
    return DrafterConfig(shape, num, layers, mask_token_id=mask_token_id, drafter=kind, **own)


def _shape(decoder: DecoderSpec, vocab_size: int, **own: Any) -> Shape:
    """That of a decoder, but for fields that are its `own`."""
    fields = {
        "intermediate_size": decoder.intermediate_size,
        "num_attention_heads": decoder.num_heads,
        "num_key_value_heads": decoder.num_kv_heads,
        "head_dim": decoder.head_dim,
        "rms_norm_eps": decoder.rms_norm_eps,
        "rope_theta": decoder.rope.theta,
        "max_position_embeddings": decoder.max_len,
    }
    return Shape(vocab_size, decoder.hidden_size, **{**fields, **own})


def _taps(num_target_layers: int, layers: int, kind: str) -> tuple[int, ...]:
    """The target's layers that are read: EAGLE-3's three, else one for each layer of the drafter, at least two."""
    ids = (1, num_target_layers // 2 - 1, num_target_layers - 4)
    if kind == EAGLE3 and list(ids) == sorted(set(ids)):
        return ids
    try:
        return tuple(sorted(set(default_layer_ids(num_target_layers, max(2, layers)))))
    except CheckpointError:
        return (num_target_layers // 2,)


def mask_token(tokenizer: Tokenizer, embedding: Tensor) -> int:
    """A token that stands for what is to be drafted: one that no text has, with an embedding that tells it from none.
    embedding: `[vocab, hidden]`. Raises `TrainingError`."""
    norms = embedding.float().norm(dim=-1)
    usual = float(norms.median())
    special = tokenizer.special_token_ids
    named = [special[name] for name in MASKS if name in special]
    unused = [token for token in range(len(norms) - 1, -1, -1) if not tokenizer.token_texts([token])[0]][:64]
    others = [token for token in special.values() if token not in tokenizer.eos_token_ids]
    for token in (*named, *unused, *others):
        if 0 <= token < len(norms) and float(norms[token]) > NO_NORM * usual:
            return token
    raise TrainingError("the target's vocabulary has no token to spare for masks; name one by --mask-token ID")


def draft_vocabulary(samples: list[tuple[int, ...]], size: int, vocab_size: int) -> Tensor | None:
    """The `size` tokens that answers have most often, ascending, int64; None where that is all of the vocabulary."""
    if size >= vocab_size:
        return None
    counts = torch.zeros(vocab_size, dtype=torch.int64)
    for answer in samples:
        counts += torch.bincount(torch.tensor(answer), minlength=vocab_size)
    # Of tokens that no answer has the first are taken: vocabularies begin with the usual ones.
    order = torch.sort(counts, descending=True, stable=True).indices[:size]
    return order.sort().values


def begin_from_target(draft: DraftModel, target: TargetSpec) -> int:
    """Give a drafter layers of its target where these have its shape. Returns how many it got."""
    decoder, config = target.decoder, draft.config
    _mean_of_taps(draft)
    dense = decoder.moe is None and decoder.delta_net is None and decoder.gemma4 is None
    dense = dense and not (decoder.centred_norms or decoder.attention_gate or decoder.rotary_dim)
    if not dense or config.drafter == EAGLE3 or config.shape.intermediate_size > decoder.intermediate_size:
        return 0
    count = min(config.draft_layers, decoder.num_layers)
    first = decoder.num_layers // 2
    ids = [round(first + (decoder.num_layers - 1 - first) * i / max(1, count - 1)) for i in range(count)]
    prefixes = {f"{target.prefix}layers.{index}.": index for index in ids}

    final = f"{target.prefix}norm.weight"

    def read(source: WeightSource) -> tuple[dict[int, LayerWeights], Tensor]:
        layers = {index: LayerWeights.read(source, prefix, decoder, index) for prefix, index in prefixes.items()}
        return layers, source.tensor(final, decoder.hidden_size)

    read_layers, final_norm = load_weights(
        target.path,
        read,
        torch.float32,
        torch.device("cpu"),
        ignored=lambda name: not name.startswith((*prefixes, final)),
    )
    with torch.no_grad():
        # The target's LM head is made for what this norm gives.
        draft.norm.weight.copy_(final_norm)
        for own, index in zip(layers_of(draft.layers), ids, strict=False):
            _copy_layer(own, read_layers[index], decoder)
    return count


def _mean_of_taps(draft: DraftModel) -> None:
    """The context begins as the mean of the features."""
    size, taps = draft.config.shape.hidden_size, len(draft.config.target_layer_ids)
    with torch.no_grad():
        draft.fc.weight.mul_(0.2).add_(torch.eye(size, device=draft.fc.weight.device).repeat(1, taps) / taps)


def _copy_layer(own: Any, weights: LayerWeights, decoder: DecoderSpec) -> None:
    query, kv = decoder.query_size, decoder.kv_size
    q, k, v = weights.qkv.weight.split([query, kv, kv])
    attention = own.self_attn
    assert isinstance(weights.mlp, DenseMlp)
    gate, up, down = _widest(weights.mlp, own.mlp.gate_proj.weight.shape[0])
    pairs = [
        (attention.q_proj.weight, q),
        (attention.k_proj.weight, k),
        (attention.v_proj.weight, v),
        (attention.o_proj.weight, weights.output.weight),
        (own.mlp.gate_proj.weight, gate),
        (own.mlp.up_proj.weight, up),
        (own.mlp.down_proj.weight, down),
        (own.input_layernorm.weight, weights.input_norm),
        (own.post_attention_layernorm.weight, weights.post_norm),
    ]
    if weights.qk_norm is not None:
        pairs += [(attention.q_norm.weight, weights.qk_norm[0]), (attention.k_norm.weight, weights.qk_norm[-1])]
    for parameter, value in pairs:
        parameter.copy_(value)


def _widest(mlp: DenseMlp, inner: int) -> tuple[Tensor, Tensor, Tensor]:
    """Weights of gate, up and down of the `inner` channels of an MLP that weigh most, in their order."""
    gate, up = mlp.gate_up.weight.chunk(2)
    down = mlp.down.weight
    strength = gate.norm(dim=1) * up.norm(dim=1) * down.norm(dim=0)
    kept = strength.topk(inner).indices.sort().values
    return gate[kept], up[kept], down[:, kept]


@dataclass(frozen=True)
class Published:
    """A drafter that training goes on from. fields: its `config.json`, which stays. tensors: what it ships beside what
    is trained: embedding, LM head, maps of vocabularies, in the order and dtype of its files."""

    spec: DraftModelSpec
    config: DrafterConfig
    fields: Mapping[str, Any]
    tensors: Mapping[str, Tensor] = field(default_factory=dict)

    def load(self, draft: DraftModel) -> None:
        """Give `draft` the weights. Raises `CheckpointError`."""
        names = {name: tuple(tensor.shape) for name, tensor in draft.state_dict().items()}
        renamed = {name: _stored(name, self.spec) for name in names}

        def read(source: WeightSource) -> dict[str, Tensor]:
            return {name: source.tensor(renamed[name], *shape) for name, shape in names.items()}

        draft.load_state_dict(
            load_weights(
                self.spec.path,
                read,
                torch.float32,
                torch.device("cpu"),
                ignored=lambda name: name in SHIPPED or is_unused(self.spec, name),
            )
        )


def _stored(name: str, spec: DraftModelSpec) -> str:
    if isinstance(spec, DFlash2Spec) and name.endswith("_codebook"):
        return name + spec.selector.codebook_suffix
    return name.replace("layers.0.", spec.layer_prefix) if isinstance(spec, Eagle3Spec) else name


def read_published(directory: Path, target: TargetSpec) -> Published:
    """The drafter in a directory, to be trained further. Raises `TrainingError` for what cannot be, and
    `CheckpointError`."""
    spec = read_draft(directory).for_target(target)
    assert isinstance(spec, DraftModelSpec)
    fields = json.loads((directory / "config.json").read_text(encoding="utf-8"))
    if why := _cannot_train(spec, fields, target):
        raise TrainingError(f"{directory}: {why}; leave --from out, and a new drafter is trained")
    decoder, own = spec.decoder, _own_sizes(spec)
    config = DrafterConfig(
        shape=_shape(decoder, spec.vocab_size, rope=decoder.rope, qk_norm=decoder.qk_norm),
        target_layers=target.decoder.num_layers,
        draft_layers=decoder.num_layers,
        target_layer_ids=spec.target_layer_ids,
        drafter=spec.method,
        draft_vocab_size=spec.draft_vocab_size if spec.maps_vocabulary else None,
        **own,
    )
    return Published(spec, config, fields, _shipped(spec))


def _own_sizes(spec: DraftModelSpec) -> dict[str, Any]:
    if isinstance(spec, Eagle3Spec):
        k = max(2, min(spec.num_speculative_tokens, 16))
        return {"eagle_drafts": k, "block_size": k + 1, "mask_token_id": 0}
    assert isinstance(spec, DFlashSpec)
    own: dict[str, Any] = {
        "block_size": spec.block_size,
        "mask_token_id": spec.mask_token_id,
        "embedding_scale": spec.input_embedding_scale,
    }
    windows = zip(spec.causal, spec.decoder.sliding_windows, strict=True)
    if any(causal or window for causal, window in windows):
        own["patterns"] = draft_patterns(spec)
    if isinstance(spec, DFlash2Spec):
        own |= {
            "conv_group_size": spec.conv.group_size,
            "selector_rank": spec.selector.rank,
            "selector_top_k": spec.selector.top_k,
        }
    if isinstance(spec, DSparkSpec):
        assert spec.markov is not None
        own |= {"markov_rank": spec.markov.rank, "block_size": spec.block_size + 1}
    return own


def _cannot_train(spec: DraftModelSpec, fields: Mapping[str, Any], target: TargetSpec) -> str | None:
    """Why a drafter cannot be trained further; None where it can. fields: of its `config.json`."""
    decoder = spec.decoder
    if fields.get("quantization_config") or fields.get("compression_config") or fields.get("gguf"):
        return "its weights are quantised or come from a GGUF file"
    if decoder.hidden_size != target.decoder.hidden_size or spec.target_hidden_size != decoder.hidden_size:
        return f"it has a hidden size of {decoder.hidden_size}, and the target one of {target.decoder.hidden_size}"
    if decoder.qkv_bias or decoder.output_bias or decoder.mlp_bias or decoder.sinks or decoder.moe is not None:
        return "its layers have biases, sinks or experts"
    if isinstance(spec, DFlashSpec) and spec.has_mask_embedding:
        return "its mask token has an embedding of its own"
    if isinstance(spec, DFlash2Spec) and spec.conv.kernel_size != 2:
        return f"its convolutions have {spec.conv.kernel_size} taps, and 2 are trained"
    if isinstance(spec, DSparkSpec):
        trained = spec.markov is not None and spec.markov.kind == VANILLA and spec.from_anchor
        if not (trained and spec.has_confidence_head and spec.confidence_reads_markov):
            return "a DSpark drafter is trained with a vanilla Markov head, both heads, and drafts from its anchor"
    if isinstance(spec, Eagle3Spec) and any(getattr(spec, name) for name in NORMS):
        return f"an EAGLE-3 drafter is trained without {', '.join(NORMS)}"
    return None


def _shipped(spec: DraftModelSpec) -> dict[str, Tensor]:
    """Tensors that a checkpoint has beside its layers and that are not trained."""
    found: dict[str, Tensor] = {}
    for path in sorted(spec.path.glob("*.safetensors")):
        for name, tensor in load_file(path).items():
            short = name.removeprefix("model.")
            if short in SHIPPED:
                found[short] = tensor
    return found
