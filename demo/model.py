"""The two networks of the demo pair as plain torch modules, for training and for the offline reference.

`TargetModel` is a Qwen3 decoder and `DraftModel` a DFlash drafter (arXiv 2602.06036); both name their parameters
as their checkpoints do, so that saving is a cast and a write. Neither has a KV cache.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from demo.data import MASK, SPECIAL_TOKEN_IDS

DFLASH, DFLASH2, DSPARK, EAGLE3 = "dflash", "dflash2", "dspark", "eagle3"
MASK_TOKEN = SPECIAL_TOKEN_IDS[MASK]


@dataclass(frozen=True)
class Shape:
    """The sizes that target and drafter share."""

    vocab_size: int = 1536
    hidden_size: int = 160
    intermediate_size: int = 384
    num_attention_heads: int = 4
    num_key_value_heads: int = 2
    head_dim: int = 32
    rms_norm_eps: float = 1e-6
    rope_theta: float = 10000.0
    max_position_embeddings: int = 4096


@dataclass(frozen=True)
class PairConfig:
    """A target and its drafter."""

    shape: Shape = Shape()
    target_layers: int = 8
    draft_layers: int = 3
    block_size: int = 16
    """An anchor and its drafts."""
    target_layer_ids: tuple[int, ...] = (1, 3, 5)
    """Features are the outputs of these decoder layers, counted from 0 (the z-lab convention)."""
    is_hybrid: bool = False
    """Whether the target has Qwen3.5's layers in place of Qwen3's."""
    drafter: str = DFLASH
    """Its kind. The sizes below are of DFlash2, of DSpark and of EAGLE-3."""
    conv_group_size: int = 16
    selector_rank: int = 64
    selector_top_k: int = 16
    markov_rank: int = 64
    eagle_drafts: int = 7

    @property
    def num_drafts(self) -> int:
        """The most tokens behind an anchor that the drafter is trained to propose."""
        return self.eagle_drafts if self.drafter == EAGLE3 else self.block_size - 1


def rope_tables(shape: Shape, length: int) -> tuple[Tensor, Tensor]:
    """Cosine and sine of every position's rotary angles, each [length, head_dim], float32."""
    exponents = torch.arange(0, shape.head_dim, 2, dtype=torch.float32) / shape.head_dim
    angles = torch.arange(length, dtype=torch.float32)[:, None] / shape.rope_theta**exponents
    angles = torch.cat((angles, angles), dim=-1)
    return angles.cos(), angles.sin()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Apply rotary embedding to x [batch, tokens, heads, head_dim]; cos and sin broadcast over heads."""
    half = x.shape[-1] // 2
    turned = torch.cat((-x[..., half:], x[..., :half]), dim=-1)
    return x * cos.to(x.dtype) + turned * sin.to(x.dtype)


class RMSNorm(nn.Module):
    """Root-mean-square norm over the last dimension, computed in float32."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
        return self.weight * normed.to(x.dtype)


class Mlp(nn.Module):
    """Gated feed-forward block (SwiGLU)."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(shape.hidden_size, shape.intermediate_size, bias=False)
        self.up_proj = nn.Linear(shape.hidden_size, shape.intermediate_size, bias=False)
        self.down_proj = nn.Linear(shape.intermediate_size, shape.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
        return out


class Attention(nn.Module):
    """Projections, per-head norms and rotary embedding of Qwen3; the models attend differently. It reads vectors of
    `input_size`, by default the hidden size."""

    def __init__(self, shape: Shape, input_size: int | None = None) -> None:
        super().__init__()
        self.shape = shape
        query_size = shape.num_attention_heads * shape.head_dim
        kv_size = shape.num_key_value_heads * shape.head_dim
        size = input_size or shape.hidden_size
        self.q_proj = nn.Linear(size, query_size, bias=False)
        self.k_proj = nn.Linear(size, kv_size, bias=False)
        self.v_proj = nn.Linear(size, kv_size, bias=False)
        self.o_proj = nn.Linear(query_size, shape.hidden_size, bias=False)
        self.q_norm = RMSNorm(shape.head_dim, shape.rms_norm_eps)
        self.k_norm = RMSNorm(shape.head_dim, shape.rms_norm_eps)

    def queries(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """x [batch, tokens, hidden] to [batch, num_attention_heads, tokens, head_dim]."""
        q = self.q_proj(x).unflatten(-1, (-1, self.shape.head_dim))
        return rotate(self.q_norm(q), cos, sin).transpose(1, 2)

    def keys_values(self, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        """x [batch, tokens, hidden] to keys and values, [batch, num_attention_heads, tokens, head_dim] each."""
        groups = self.shape.num_attention_heads // self.shape.num_key_value_heads
        k = self.k_proj(x).unflatten(-1, (-1, self.shape.head_dim))
        v = self.v_proj(x).unflatten(-1, (-1, self.shape.head_dim))
        k = rotate(self.k_norm(k), cos, sin)
        return (
            k.transpose(1, 2).repeat_interleave(groups, dim=1),
            v.transpose(1, 2).repeat_interleave(groups, dim=1),
        )

    def output(self, heads: Tensor) -> Tensor:
        """heads [batch, num_attention_heads, tokens, head_dim] to [batch, tokens, hidden]."""
        out: Tensor = self.o_proj(heads.transpose(1, 2).flatten(2))
        return out


class Layer(nn.Module):
    """One pre-norm decoder layer; who calls it decides what is attended to."""

    def __init__(self, shape: Shape, input_size: int | None = None) -> None:
        super().__init__()
        self.self_attn = Attention(shape, input_size)
        self.mlp = Mlp(shape)
        self.input_layernorm = RMSNorm(shape.hidden_size, shape.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(shape.hidden_size, shape.rms_norm_eps)

    def feed_forward(self, x: Tensor) -> Tensor:
        """The second half of the layer with its residual."""
        out: Tensor = x + self.mlp(self.post_attention_layernorm(x))
        return out


def layers_of(modules: nn.ModuleList) -> list[Layer]:
    """The layers of a module list under their own type."""
    return [cast(Layer, module) for module in modules]


class Decoder(nn.Module):
    """Embedding, layers and final norm under the names of a Qwen3 checkpoint."""

    def __init__(self, config: PairConfig) -> None:
        super().__init__()
        shape = config.shape
        self.embed_tokens = nn.Embedding(shape.vocab_size, shape.hidden_size)
        self.layers = nn.ModuleList(Layer(shape) for _ in range(config.target_layers))
        self.norm = RMSNorm(shape.hidden_size, shape.rms_norm_eps)


class TargetModel(nn.Module):
    """A Qwen3 causal language model with tied embeddings."""

    cos: Tensor
    sin: Tensor

    def __init__(self, config: PairConfig) -> None:
        super().__init__()
        self.config = config
        self.model = Decoder(config)
        cos, sin = rope_tables(config.shape, config.shape.max_position_embeddings)
        self.register_buffer("cos", cos, persistent=False)
        self.register_buffer("sin", sin, persistent=False)
        initialise(self, config.target_layers)

    def forward(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """Run tokens [batch, length] causally.

        Returns the final normed hidden states [batch, length, hidden] and the drafter's context features
        [batch, length, layers * hidden]: the outputs of the layers in `target_layer_ids`, concatenated.
        """
        length = tokens.shape[1]
        cos, sin = self.cos[:length, None], self.sin[:length, None]
        x = self.model.embed_tokens(tokens)
        outputs = []
        for layer in layers_of(self.model.layers):
            normed = layer.input_layernorm(x)
            q = layer.self_attn.queries(normed, cos, sin)
            k, v = layer.self_attn.keys_values(normed, cos, sin)
            x = x + layer.self_attn.output(F.scaled_dot_product_attention(q, k, v, is_causal=True))
            x = layer.feed_forward(x)
            outputs.append(x)
        features = torch.cat([outputs[i] for i in self.config.target_layer_ids], dim=-1)
        return self.model.norm(x), features

    def logits(self, hidden: Tensor) -> Tensor:
        """The tied LM head: hidden [..., hidden] to [..., vocab]."""
        return F.linear(hidden, self.model.embed_tokens.weight)


class DraftModel(nn.Module):
    """A DFlash drafter: it reads the context through the target's features and fills a block of masks."""

    cos: Tensor
    sin: Tensor
    anchor_factor = 1
    """How many times as many blocks of a row it is trained on as this one."""

    def __init__(self, config: PairConfig) -> None:
        super().__init__()
        self.config = config
        shape = config.shape
        self.fc = nn.Linear(len(config.target_layer_ids) * shape.hidden_size, shape.hidden_size, bias=False)
        self.hidden_norm = RMSNorm(shape.hidden_size, shape.rms_norm_eps)
        self.layers = nn.ModuleList(Layer(shape) for _ in range(config.draft_layers))
        self.norm = RMSNorm(shape.hidden_size, shape.rms_norm_eps)
        cos, sin = rope_tables(shape, shape.max_position_embeddings + config.block_size)
        self.register_buffer("cos", cos, persistent=False)
        self.register_buffer("sin", sin, persistent=False)
        initialise(self, config.draft_layers)

    def forward(self, features: Tensor, blocks: Tensor, anchors: Tensor) -> Tensor:
        """Draft every block against the context before its anchor.

        features: [batch, length, layers * hidden], the target's features at positions 0 to length - 1.
        blocks:   [batch, num_blocks, block, hidden], embeddings of anchor, mask, mask, ...
        anchors:  [batch, num_blocks], the anchors' positions; block a sees the features before anchors[a].
        Returns the final normed hidden states, shaped as `blocks`.
        """
        _, num_blocks, block, _ = blocks.shape
        length = features.shape[1]
        context = self.hidden_norm(self.fc(features))
        cos, sin = self.cos[:length, None], self.sin[:length, None]
        positions = anchors[..., None] + torch.arange(block)
        block_cos = self.cos[positions].flatten(1, 2)[:, :, None]
        block_sin = self.sin[positions].flatten(1, 2)[:, :, None]
        hidden_context = torch.arange(length) >= anchors[..., None]
        hidden_context = hidden_context.repeat_interleave(block, dim=1)[:, None]
        x = blocks.flatten(1, 2)
        for index, layer in enumerate(layers_of(self.layers)):

            def attend(normed: Tensor, attention: Attention = layer.self_attn) -> Tensor:
                q = attention.queries(normed, block_cos, block_sin)
                context_k, context_v = attention.keys_values(context, cos, sin)
                block_k, block_v = attention.keys_values(normed, block_cos, block_sin)
                return attention.output(_attend(q, context_k, context_v, hidden_context, block_k, block_v, num_blocks))

            x = x + self.sublayer(index, "attention", layer.input_layernorm(x), attend, block)
            x = x + self.sublayer(index, "mlp", layer.post_attention_layernorm(x), layer.mlp, block)
        out: Tensor = self.norm(x).view(-1, num_blocks, block, x.shape[-1])
        return out

    def sublayer(self, index: int, name: str, normed: Tensor, run: Callable[[Tensor], Tensor], block: int) -> Tensor:
        """What a sublayer of layer `index` adds to blocks of this length: [batch, blocks * block, hidden]."""
        return run(normed)

    def losses(self, embedding: Tensor, features: Tensor, tokens: Tensor, anchors: Tensor, labels: Tensor) -> Tensor:
        """What each draft of training blocks costs: `[batch, blocks, drafts]`.

        embedding: `[vocab, hidden]`, the target's, which is its LM head too. features: as `forward` has them. tokens:
        int64 `[batch, length]`, those of the rows. anchors: int64 `[batch, blocks]`. labels: int64
        `[batch, blocks, block]`, the true tokens from the anchor on.
        """
        hidden = self.outputs(embedding, features, anchors, labels[..., 0])[:, :, 1:]
        return token_losses(F.linear(hidden, embedding).float(), labels[..., 1:])

    def outputs(
        self, embedding: Tensor, features: Tensor, anchors: Tensor, first: Tensor, masks: int | None = None
    ) -> Tensor:
        """`forward` of blocks that begin with the tokens `first` [batch, blocks], masks behind them."""
        inputs = F.pad(first[..., None], (0, masks or self.config.block_size - 1), value=MASK_TOKEN)
        out: Tensor = self(features, F.embedding(inputs, embedding), anchors)
        return out

    def propose(self, embedding: Tensor, features: Tensor, tokens: Sequence[int]) -> list[int]:
        """The drafts behind the last of `tokens`, before which features [1, length, layers * hidden] are known."""
        anchors, first = torch.tensor([[features.shape[1]]]), torch.tensor([[tokens[-1]]])
        hidden = self.outputs(embedding, features, anchors, first)[0, 0, 1:]
        return self.choose(F.linear(hidden, embedding), hidden, tokens[-1])

    def choose(self, logits: Tensor, hidden: Tensor, anchor: int) -> list[int]:
        """The drafts behind an anchor, from their logits [k, vocab] and final hidden states [k, hidden]."""
        return logits.argmax(-1).tolist()


def token_losses(logits: Tensor, right: Tensor) -> Tensor:
    """Cross-entropy of right tokens, int64 [...], by logits [..., vocab]; returns [...]."""
    return F.cross_entropy(logits.flatten(0, -2), right.flatten(), reduction="none").view(right.shape)


def _attend(
    q: Tensor,
    context_k: Tensor,
    context_v: Tensor,
    hidden_context: Tensor,
    block_k: Tensor,
    block_v: Tensor,
    blocks: int,
) -> Tensor:
    """Softmax over the visible context and the query's own block, which is attended to in full.

    q, block_k, block_v: [batch, heads, blocks * block, head_dim]; context_k, context_v: [batch, heads, length,
    head_dim]; hidden_context: bool [batch, 1, blocks * block, length]. Returns the shape of q.
    """
    batch, num_heads, _, head_dim = q.shape
    by_block = (batch, num_heads, blocks, -1, head_dim)
    q = q * head_dim**-0.5
    to_context = (q @ context_k.transpose(2, 3)).masked_fill(hidden_context, float("-inf"))
    own = q.reshape(by_block) @ block_k.reshape(by_block).transpose(3, 4)
    scores = torch.cat((to_context, own.flatten(2, 3)), dim=-1)
    weights = torch.softmax(scores.float(), dim=-1).to(q.dtype)
    length = context_k.shape[2]
    own_weights = weights[..., length:].reshape(own.shape)
    from_own = (own_weights @ block_v.reshape(by_block)).flatten(2, 3)
    return weights[..., :length] @ context_v + from_own


def initialise(model: nn.Module, num_layers: int) -> None:
    """Normal initialisation, with the projections that write to the residual stream scaled by depth."""
    for name, parameter in model.named_parameters():
        if parameter.dim() < 2:
            continue
        std = 0.05 if "embed" not in name else 0.02
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            std /= (2 * num_layers) ** 0.5
        nn.init.normal_(parameter, std=std)
