"""The DFlash drafter (arXiv 2602.06036) as a torch module without a KV cache: what is trained.

Its parameters are named as in published checkpoints, so that saving is a cast and a write. The other kinds are built on
it, each in a file of its own.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dflash_backend.attention import AttentionPattern
from dflash_backend.checkpoints.spec import RopeSpec
from dflash_backend.models.rope import inverse_frequencies
from dflash_backend.training.loss import DraftBatch, TargetStates, draft_loss

DFLASH, DFLASH2, DSPARK, EAGLE3 = "dflash", "dflash2", "dspark", "eagle3"
SEES_ALL = AttentionPattern(causal=False)


@dataclass(frozen=True)
class Shape:
    """The sizes of a decoder layer, under the names of a `config.json`, and those of the vocabulary.

    rope: the rotary embedding where it is scaled; None for the plain one of base `rope_theta`. qk_norm: an RMSNorm on
    every query and key head.
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    rms_norm_eps: float = 1e-6
    rope_theta: float = 10000.0
    max_position_embeddings: int = 4096
    rope: RopeSpec | None = None
    qk_norm: bool = True


@dataclass(frozen=True)
class DrafterConfig:
    """A drafter to be trained, and what it must know of its target.

    drafter: its kind. target_layer_ids: features are the outputs of these decoder layers, counted from 0 (the z-lab
    convention). block_size: an anchor and its drafts. draft_vocab_size: tokens that it can propose; None for all.
    patterns: what the queries of each layer see; empty: every layer sees all. embedding_scale: what the embeddings of a
    block are multiplied by. The sizes from `conv_group_size` on are of DFlash2, of DSpark and of EAGLE-3.
    """

    shape: Shape
    target_layers: int
    draft_layers: int
    block_size: int
    target_layer_ids: tuple[int, ...]
    mask_token_id: int
    drafter: str = DFLASH
    draft_vocab_size: int | None = None
    patterns: tuple[AttentionPattern, ...] = ()
    embedding_scale: float = 1.0
    conv_group_size: int = 16
    selector_rank: int = 64
    selector_top_k: int = 16
    markov_rank: int = 64
    eagle_drafts: int = 7

    @property
    def num_drafts(self) -> int:
        """The most tokens behind an anchor that the drafter is trained to propose."""
        return self.eagle_drafts if self.drafter == EAGLE3 else self.block_size - 1

    @property
    def num_draft_tokens(self) -> int:
        """Tokens that it can propose."""
        return self.draft_vocab_size or self.shape.vocab_size


@dataclass(frozen=True)
class Tables:
    """What a drafter takes from its target, and what it does not train.

    embedding: `[vocab, hidden]`, as a drafter reads a token. head: `[draft vocab, hidden]`, the LM head's rows of the
    tokens that it can propose. draft_ids: int64 `[vocab]`, the draft id of each token, 0 where it has none; None where
    they are the same. target_head: the target's own rows of these tokens, where the drafter has another head. softcap:
    of the target's logits.
    """

    embedding: Tensor
    head: Tensor
    draft_ids: Tensor | None = None
    target_head: Tensor | None = None
    softcap: float | None = None

    def labels(self, tokens: Tensor) -> Tensor:
        """The draft ids of tokens, int64 of any shape."""
        return tokens if self.draft_ids is None else self.draft_ids[tokens]


def rope_tables(shape: Shape, positions: Tensor) -> tuple[Tensor, Tensor]:
    """Cosine and sine of the rotary angles at positions, int64 `[...]`: float32 `[..., head_dim]` each."""
    rope = shape.rope or RopeSpec(shape.rope_theta)
    frequencies = inverse_frequencies(rope, shape.head_dim).to(positions.device)
    angles = positions[..., None].float() * frequencies
    angles = torch.cat((angles, angles), dim=-1)
    return angles.cos() * rope.attention_factor, angles.sin() * rope.attention_factor


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Apply rotary embedding to x `[batch, tokens, heads, head_dim]`; cos and sin broadcast over heads."""
    half = x.shape[-1] // 2
    turned = torch.cat((-x[..., half:], x[..., :half]), dim=-1)
    return x * cos.to(x.dtype) + turned * sin.to(x.dtype)


class RMSNorm(nn.Module):
    """Root-mean-square norm over the last dimension, computed in float32 or wider."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        wide = x if x.dtype == torch.float64 else x.float()
        normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
        return self.weight.to(x.dtype) * normed.to(x.dtype)


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
        self.q_norm = RMSNorm(shape.head_dim, shape.rms_norm_eps) if shape.qk_norm else nn.Identity()
        self.k_norm = RMSNorm(shape.head_dim, shape.rms_norm_eps) if shape.qk_norm else nn.Identity()

    def queries(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """x `[batch, tokens, hidden]` to `[batch, num_attention_heads, tokens, head_dim]`."""
        q = self.q_proj(x).unflatten(-1, (-1, self.shape.head_dim))
        return rotate(self.q_norm(q), cos, sin).transpose(1, 2)

    def keys_values(self, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        """x `[batch, tokens, hidden]` to keys and values, `[batch, num_attention_heads, tokens, head_dim]` each."""
        groups = self.shape.num_attention_heads // self.shape.num_key_value_heads
        k = self.k_proj(x).unflatten(-1, (-1, self.shape.head_dim))
        v = self.v_proj(x).unflatten(-1, (-1, self.shape.head_dim))
        k = rotate(self.k_norm(k), cos, sin)
        return (
            k.transpose(1, 2).repeat_interleave(groups, dim=1),
            v.transpose(1, 2).repeat_interleave(groups, dim=1),
        )

    def output(self, heads: Tensor) -> Tensor:
        """heads `[batch, num_attention_heads, tokens, head_dim]` to `[batch, tokens, hidden]`."""
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


@dataclass
class BlockView:
    """What the queries of blocks see, and where they are.

    anchors: int64 `[batch, blocks]`. length: positions of the context. block: queries of each block.
    """

    anchors: Tensor
    length: int
    block: int
    _hidden: dict[AttentionPattern, tuple[Tensor, Tensor | None]] = field(default_factory=dict)

    @property
    def positions(self) -> Tensor:
        """int64 `[batch, blocks * block]`."""
        return (self.anchors[..., None] + torch.arange(self.block, device=self.anchors.device)).flatten(1)

    def hidden(self, pattern: AttentionPattern) -> tuple[Tensor, Tensor | None]:
        """What a layer's queries do not see: of the context, bool `[batch, 1, blocks * block, length]`, and of their
        own block, bool `[block, block]`; None for nothing."""
        if pattern not in self._hidden:
            key = torch.arange(self.length, device=self.anchors.device)
            context = (key >= self.anchors[..., None]).repeat_interleave(self.block, dim=1)
            place = torch.arange(self.block, device=self.anchors.device)
            own = place[None] > place[:, None] if pattern.causal else None
            if pattern.sliding_window is not None:
                context = context | (self.positions[..., None] - key >= pattern.sliding_window)
                far = abs(place[None] - place[:, None]) >= pattern.sliding_window
                own = far if own is None else own | far
            self._hidden[pattern] = context[:, None], own
        return self._hidden[pattern]


class DraftModel(nn.Module):
    """A DFlash drafter: it reads the context through the target's features and fills a block of masks."""

    anchor_factor = 1
    """How many times as many blocks of a row it is trained on as this one."""

    def __init__(self, config: DrafterConfig) -> None:
        super().__init__()
        self.config = config
        shape = config.shape
        self.fc = nn.Linear(len(config.target_layer_ids) * shape.hidden_size, shape.hidden_size, bias=False)
        self.hidden_norm = RMSNorm(shape.hidden_size, shape.rms_norm_eps)
        self.layers = nn.ModuleList(Layer(shape) for _ in range(config.draft_layers))
        self.norm = RMSNorm(shape.hidden_size, shape.rms_norm_eps)
        initialise(self, config.draft_layers)

    def forward(self, features: Tensor, blocks: Tensor, anchors: Tensor) -> Tensor:
        """Draft every block against the context before its anchor.

        features: `[batch, length, layers * hidden]`, the target's features at positions 0 to length - 1.
        blocks:   `[batch, num_blocks, block, hidden]`, embeddings of anchor, mask, mask, ...
        anchors:  `[batch, num_blocks]`, the anchors' positions; block a sees the features before anchors[a].
        Returns the final normed hidden states, shaped as `blocks`.
        """
        _, num_blocks, block, _ = blocks.shape
        view = BlockView(anchors, features.shape[1], block)
        context = self.hidden_norm(self.fc(features))
        cos, sin = self.rotary(torch.arange(view.length, device=features.device))
        block_cos, block_sin = self.rotary(view.positions)
        x = blocks.flatten(1, 2)
        patterns = self.config.patterns or (SEES_ALL,) * len(self.layers)
        for index, (layer, pattern) in enumerate(zip(layers_of(self.layers), patterns, strict=True)):

            def attend(
                normed: Tensor, attention: Attention = layer.self_attn, pattern: AttentionPattern = pattern
            ) -> Tensor:
                q = attention.queries(normed, block_cos, block_sin)
                context_kv = attention.keys_values(context, cos, sin)
                block_kv = attention.keys_values(normed, block_cos, block_sin)
                return attention.output(_attend(q, context_kv, block_kv, view.hidden(pattern), num_blocks))

            x = x + self.sublayer(index, "attention", layer.input_layernorm(x), attend, block)
            x = x + self.sublayer(index, "mlp", layer.post_attention_layernorm(x), layer.mlp, block)
        out: Tensor = self.norm(x).view(-1, num_blocks, block, x.shape[-1])
        return out

    def rotary(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Cosine and sine at positions, to be shared by all heads: `[..., 1, head_dim]` each."""
        cos, sin = rope_tables(self.config.shape, positions)
        return cos.unsqueeze(-2), sin.unsqueeze(-2)

    def sublayer(self, index: int, name: str, normed: Tensor, run: Callable[[Tensor], Tensor], block: int) -> Tensor:
        """What a sublayer of layer `index` adds to blocks of this length: `[batch, blocks * block, hidden]`."""
        return run(normed)

    def losses(self, tables: Tables, features: Tensor, batch: DraftBatch, target: TargetStates | None = None) -> Tensor:
        """What each draft of training blocks costs: float32 `[batch, blocks, drafts]`.

        features: as `forward` has them. target: where it chose each draft's token, `[batch, blocks, drafts, hidden]`.
        """
        hidden = self.outputs(tables, features, batch.anchors, batch.labels[..., 0])[:, :, 1:]
        return draft_loss(tables.labels(batch.labels[..., 1:]), (hidden, tables.head), target=target)[0]

    def outputs(
        self, tables: Tables, features: Tensor, anchors: Tensor, first: Tensor, masks: int | None = None
    ) -> Tensor:
        """`forward` of blocks that begin with the tokens `first` `[batch, blocks]`, masks behind them."""
        inputs = F.pad(first[..., None], (0, masks or self.config.block_size - 1), value=self.config.mask_token_id)
        out: Tensor = self(features, self.embed(tables, inputs), anchors)
        return out

    def embed(self, tables: Tables, tokens: Tensor) -> Tensor:
        """Tokens as a block has them: int64 `[...]` -> `[..., hidden]`."""
        rows = F.embedding(tokens, tables.embedding)
        return rows if self.config.embedding_scale == 1 else rows * self.config.embedding_scale


def _attend(
    q: Tensor,
    context_kv: tuple[Tensor, Tensor],
    block_kv: tuple[Tensor, Tensor],
    hidden: tuple[Tensor, Tensor | None],
    blocks: int,
) -> Tensor:
    """Softmax over the visible context and the visible part of the query's own block.

    q, and keys and values of blocks: `[batch, heads, blocks * block, head_dim]`; those of the context: `[batch, heads,
    length, head_dim]`; hidden: `BlockView.hidden`. Returns the shape of q.
    """
    batch, num_heads, _, head_dim = q.shape
    by_block = (batch, num_heads, blocks, -1, head_dim)
    q = q * head_dim**-0.5
    to_context = (q @ context_kv[0].transpose(2, 3)).masked_fill(hidden[0], float("-inf"))
    own = q.reshape(by_block) @ block_kv[0].reshape(by_block).transpose(3, 4)
    if hidden[1] is not None:
        own = own.masked_fill(hidden[1], float("-inf"))
    scores = torch.cat((to_context, own.flatten(2, 3)), dim=-1)
    weights = softmax(scores)
    length = to_context.shape[-1]
    own_weights = weights[..., length:].reshape(own.shape)
    from_own = (own_weights @ block_kv[1].reshape(by_block)).flatten(2, 3)
    return weights[..., :length] @ context_kv[1] + from_own


def softmax(scores: Tensor) -> Tensor:
    """Over the last dimension, computed in float32 or wider, in the dtype of the scores."""
    wide = scores if scores.dtype == torch.float64 else scores.float()
    return torch.softmax(wide, dim=-1).to(scores.dtype)


def initialise(model: nn.Module, num_layers: int) -> None:
    """Normal initialisation, with the projections that write to the residual stream scaled by depth."""
    for name, parameter in model.named_parameters():
        if parameter.dim() < 2:
            continue
        std = 0.05 if "embed" not in name else 0.02
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            std /= (2 * num_layers) ** 0.5
        nn.init.normal_(parameter, std=std)
