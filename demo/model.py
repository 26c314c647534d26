"""The networks of the demo pair as plain torch modules, for training and for the offline reference.

`TargetModel` is a Qwen3 decoder; drafters are those of `dflash_backend.training`. Both name their parameters as their
checkpoints do, so that saving is a cast and a write. Neither has a KV cache.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from demo.data import MASK, SPECIAL_TOKEN_IDS
from dflash_backend.training.network import DrafterConfig, Layer, RMSNorm, Shape, initialise, layers_of, rope_tables

MASK_TOKEN = SPECIAL_TOKEN_IDS[MASK]
PAIR_SHAPE = Shape(
    vocab_size=1536,
    hidden_size=160,
    intermediate_size=384,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=32,
)


@dataclass(frozen=True)
class PairConfig(DrafterConfig):
    """A target and its drafter. is_hybrid: the target has Qwen3.5's layers in place of Qwen3's."""

    shape: Shape = PAIR_SHAPE
    target_layers: int = 8
    draft_layers: int = 3
    block_size: int = 16
    target_layer_ids: tuple[int, ...] = (1, 3, 5)
    mask_token_id: int = MASK_TOKEN
    is_hybrid: bool = False


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
        cos, sin = rope_tables(config.shape, torch.arange(config.shape.max_position_embeddings))
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
