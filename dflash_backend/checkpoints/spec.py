"""What the rest of the project knows of a checkpoint, whatever format it came in."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class RopeSpec:
    """Rotary position embedding: base frequency `theta`. Scaled variants join with the other target families."""

    theta: float


@dataclass(frozen=True)
class DecoderSpec:
    """The shape of a Qwen3-style decoder stack, target or drafter. Sizes are numbers of elements."""

    num_layers: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    rope: RopeSpec
    attention_bias: bool
    max_position_embeddings: int

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
    """A target model. `dtype` is the name of the checkpoint's own dtype (`bfloat16`, ...)."""

    path: Path
    architecture: str
    decoder: DecoderSpec
    vocab_size: int
    tie_word_embeddings: bool
    dtype: str
    eos_token_ids: tuple[int, ...]


@dataclass(frozen=True)
class DraftSpec:
    """A DFlash drafter.

    `target_layer_ids` follow the layer-id convention: i is the output of target decoder layer i, 0-based.
    `block_size` is 1 + the k that the drafter was trained for. `causal` says per drafter layer whether a query sees
    only positions up to its own.
    """

    path: Path
    format: str
    decoder: DecoderSpec
    block_size: int
    target_layer_ids: tuple[int, ...]
    mask_token_id: int
    num_target_layers: int
    causal: tuple[bool, ...]
    dtype: str

    @property
    def max_speculative_tokens(self) -> int:
        """k that the checkpoint was trained for: the anchor takes one place of the block."""
        return self.block_size - 1
