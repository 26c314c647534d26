"""What the rest of the project knows of a checkpoint, whatever format it came in, and the error of one that cannot be
used."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

# The kinds of a `config.json`'s `layer_types`.
SLIDING, FULL, LINEAR = "sliding_attention", "full_attention", "linear_attention"


class CheckpointError(ValueError):
    """A checkpoint cannot be used. The message names the file, the field or tensor, and what is expected."""


@dataclass(frozen=True)
class RopeSpec:
    """Rotary position embedding: base frequency `theta`, and how `kind` scales the frequencies.

    kind: `default`; `linear` and `dynamic` (NTK) by `factor`; `yarn` (arXiv 2309.00071) by `factor`, with `beta_fast`,
    `beta_slow` and `truncate`; `llama3` (Llama 3.1) by `factor`, `low_freq_factor` and `high_freq_factor`. The last two
    start from `original_max_positions`. `attention_factor` multiplies cosine and sine. `proportional` (Gemma 4) divides
    by `factor` and turns the first `share` of the pairs alone, which have the frequencies of the whole head.

    `dynamic` depends on the length of the sequence, but KV that other sequences share must not: `length` is the one
    length that frequencies are computed for. Up to `original_max_positions` they are unscaled.
    """

    theta: float
    kind: str = "default"
    factor: float = 1.0
    original_max_positions: int = 0
    attention_factor: float = 1.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    length: int = 0
    share: float = 1.0


@dataclass(frozen=True)
class ClampedSwiglu:
    """gpt-oss's activation of an expert: `(up + 1) * gate * sigmoid(alpha * gate)`, the gate cut off above `limit` and
    up outside of `[-limit, limit]`."""

    alpha: float
    limit: float


@dataclass(frozen=True)
class MoeSpec:
    """Mixture of experts in place of the MLP: `sparse_layers` says in which layers.

    The router takes the `experts_per_token` most likely of `num_experts`; with `norm_topk_prob` their weights are
    scaled to sum to 1. `intermediate_size` is that of one expert. `swiglu`: gpt-oss's experts and router, which have
    biases; None for Qwen3-MoE's, which have none and SiLU for their gate. `mxfp4`: experts are stored in MXFP4.
    `shared_size`: the intermediate size of one more expert that runs over every token, times a gate of its own; None
    where there is none. `stacked`: files hold the experts of a layer in one tensor for each projection. `gelu`: their
    gate is GELU, and the router and the norms are Gemma 4's.
    """

    num_experts: int
    experts_per_token: int
    intermediate_size: int
    norm_topk_prob: bool
    sparse_layers: tuple[bool, ...]
    swiglu: ClampedSwiglu | None = None
    mxfp4: bool = False
    shared_size: int | None = None
    stacked: bool = False
    gelu: bool = False


@dataclass(frozen=True)
class Gemma4Spec:
    """What a decoder of Gemma 4 has of its own, beside norms on both sides of each sublayer, GELU, and embeddings times
    the square root of the hidden size.

    global_layers: which layers see everything. These have `num_kv_heads` key heads, all heads of size `head_dim`, and
    the rotary embedding `rope`; with `keys_are_values` their values are the keys before norm and rotation. softcap:
    logits are `softcap * tanh(logits / softcap)`; None for no such cap.
    """

    global_layers: tuple[bool, ...]
    num_kv_heads: int
    head_dim: int
    rope: RopeSpec
    keys_are_values: bool
    softcap: float | None


@dataclass(frozen=True)
class DeltaNetSpec:
    """Gated delta net layers (arXiv 2412.06464) in place of attention: `layers` says which.

    Such a layer keeps of a request one state `[num_value_heads, key_head_dim, value_head_dim]`, and the last
    `conv_width - 1` inputs of its convolution. Each key head serves `num_value_heads / num_key_heads` value heads.
    `grouped`: its projections are stored key head by key head (Qwen3-Next), else one after the other (Qwen3.5).
    """

    layers: tuple[bool, ...]
    num_key_heads: int
    num_value_heads: int
    key_head_dim: int
    value_head_dim: int
    conv_width: int
    grouped: bool = True

    @property
    def key_size(self) -> int:
        """Width of the key (or query) projection."""
        return self.num_key_heads * self.key_head_dim

    @property
    def value_size(self) -> int:
        """Width of the value projection."""
        return self.num_value_heads * self.value_head_dim

    @property
    def conv_size(self) -> int:
        """Channels of the convolution: queries, keys and values."""
        return 2 * self.key_size + self.value_size

    def state_bytes(self, dtype_size: int) -> int:
        """Bytes that all layers keep of one request. dtype_size: bytes of a number of the convolution's inputs; the
        state itself is float32."""
        state = 4 * self.num_value_heads * self.key_head_dim * self.value_head_dim
        return sum(self.layers) * (state + (self.conv_width - 1) * self.conv_size * dtype_size)


@dataclass(frozen=True)
class AttentionCache:
    """What an attention layer keeps of each token of a request: K and V of `num_kv_heads` heads of `head_dim` numbers.

    sliding_window: a query reads that many positions, its own included; None for all.
    """

    num_kv_heads: int
    head_dim: int
    sliding_window: int | None

    @property
    def token_shape(self) -> tuple[int, int, int]:
        """One token's K and V: `[2, num_kv_heads, head_dim]`."""
        return 2, self.num_kv_heads, self.head_dim


@dataclass(frozen=True)
class DecoderSpec:
    """The shape of a decoder stack, target or drafter. Sizes are numbers of elements.

    qk_norm: an RMSNorm on every query and key head before the rotation. qkv_bias, output_bias, mlp_bias: the
    projections into attention, the one out of it and those of the MLP have biases. sinks: each query head has a learned
    logit in its softmax. sliding_windows has one entry for each layer: the number of positions that a query sees, its
    own included, or None for all. max_len is the number of positions that the model
    can address, rotary scaling included. delta_net: the layers that have no attention; None: all have. attention_gate:
    the output of attention is multiplied by the sigmoid of one more projection. centred_norms: an RMSNorm multiplies by
    1 plus its weight. rotary_dim: numbers of a head that are rotated, the first ones; 0 for all. gemma4: what Gemma 4
    has of its own; None for other families. Heads and rope are then those of the layers with a window.
    """

    num_layers: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    rope: RopeSpec
    qk_norm: bool
    qkv_bias: bool
    output_bias: bool
    mlp_bias: bool
    sliding_windows: tuple[int | None, ...]
    max_len: int
    moe: MoeSpec | None = None
    sinks: bool = False
    delta_net: DeltaNetSpec | None = None
    attention_gate: bool = False
    centred_norms: bool = False
    rotary_dim: int = 0
    gemma4: Gemma4Spec | None = None

    def of_layer(self, index: int) -> DecoderSpec:
        """The same decoder with the heads and the rotary embedding of this layer."""
        own = self.gemma4
        if own is None or not own.global_layers[index]:
            return self
        return replace(self, num_kv_heads=own.num_kv_heads, head_dim=own.head_dim, rope=own.rope)

    @property
    def head_dims(self) -> frozenset[int]:
        """The sizes that heads have."""
        return frozenset(cache.head_dim for cache in self.caches)

    def has_attention(self, index: int) -> bool:
        """Whether the layer with this index has attention, and so a KV cache."""
        return self.delta_net is None or not self.delta_net.layers[index]

    def experts_of(self, index: int) -> MoeSpec | None:
        """The experts in place of the MLP of the layer with this index."""
        return self.moe if self.moe is not None and self.moe.sparse_layers[index] else None

    @property
    def caches(self) -> tuple[AttentionCache, ...]:
        """What each layer that has attention keeps of a request."""
        own = [self.of_layer(index) for index in range(self.num_layers)]
        return tuple(
            AttentionCache(own[index].num_kv_heads, own[index].head_dim, window)
            for index, window in enumerate(self.sliding_windows)
            if self.has_attention(index)
        )

    @property
    def query_size(self) -> int:
        """Width of the query projection: `num_heads * head_dim`."""
        return self.num_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        """Width of the key (or value) projection: `num_kv_heads * head_dim`."""
        return self.num_kv_heads * self.head_dim


@dataclass(frozen=True)
class TargetSpec:
    """A target model. `dtype` is the name of the checkpoint's own dtype (`bfloat16`, ...). prefix: how the names of the
    decoder's tensors begin. left_out: how those of parts begin that are not served. notes: sentences on what the
    checkpoint leaves open or says twice, and how it was read; for the log."""

    path: Path
    architecture: str
    decoder: DecoderSpec
    vocab_size: int
    tie_word_embeddings: bool
    dtype: str
    eos_token_ids: tuple[int, ...]
    prefix: str = "model."
    left_out: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
