"""A hybrid target for the demo: Qwen3.5's layers, three with a gated delta net for each one with attention, around the
embedding and the MLPs of the demo's Qwen3 target. The module is that of `transformers`, whose import takes longer than
that of torch: it comes with the first hybrid, since the processes that train other pairs read this file, too."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from demo.data import SPECIAL_TOKEN_IDS
from demo.model import PairConfig

if TYPE_CHECKING:
    from transformers import Qwen3_5TextConfig

ARCHITECTURE = "Qwen3_5ForCausalLM"
# Heads of the delta nets are as large as those of attention.
ROTATED_SHARE = 0.5


def hybrid_config(config: PairConfig) -> Qwen3_5TextConfig:
    """What `transformers` builds the target from."""
    from transformers import Qwen3_5TextConfig

    shape = config.shape
    return Qwen3_5TextConfig(
        architectures=[ARCHITECTURE],
        vocab_size=shape.vocab_size,
        hidden_size=shape.hidden_size,
        intermediate_size=shape.intermediate_size,
        num_hidden_layers=config.target_layers,
        num_attention_heads=shape.num_attention_heads,
        num_key_value_heads=shape.num_key_value_heads,
        head_dim=shape.head_dim,
        linear_num_key_heads=shape.num_attention_heads,
        linear_num_value_heads=shape.num_attention_heads,
        linear_key_head_dim=shape.head_dim,
        linear_value_head_dim=shape.head_dim,
        rms_norm_eps=shape.rms_norm_eps,
        max_position_embeddings=shape.max_position_embeddings,
        rope_parameters={
            "rope_type": "default",
            "rope_theta": shape.rope_theta,
            "partial_rotary_factor": ROTATED_SHARE,
        },
        tie_word_embeddings=True,
        bos_token_id=SPECIAL_TOKEN_IDS["<|endoftext|>"],
        eos_token_id=SPECIAL_TOKEN_IDS["<|im_end|>"],
        pad_token_id=SPECIAL_TOKEN_IDS["<|endoftext|>"],
        dtype="bfloat16",
    )


class HybridTarget(nn.Module):
    """A hybrid target, with the interface of `TargetModel`."""

    def __init__(self, config: PairConfig) -> None:
        from transformers import Qwen3_5TextModel

        super().__init__()
        self.config = config
        self.model = Qwen3_5TextModel(hybrid_config(config))
        self._outputs: dict[int, Tensor] = {}
        for index in config.target_layer_ids:
            self.model.layers[index].register_forward_hook(self._keep(index))

    def _keep(self, index: int) -> Callable[..., None]:
        def hook(_module: nn.Module, _inputs: object, output: Tensor | tuple[Tensor, ...]) -> None:
            self._outputs[index] = output[0] if isinstance(output, tuple) else output

        return hook

    def forward(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """As `TargetModel.forward`."""
        hidden = self.model(input_ids=tokens, use_cache=False).last_hidden_state
        return hidden, torch.cat([self._outputs[index] for index in self.config.target_layer_ids], dim=-1)

    def logits(self, hidden: Tensor) -> Tensor:
        """The tied LM head: hidden [..., hidden] to [..., vocab]."""
        return F.linear(hidden, self.model.embed_tokens.weight)

    def begin_from(self, weights: dict[str, Tensor]) -> None:
        """Take what a Qwen3 target of the same sizes has too: embedding, MLPs, norms, and keys, values and outputs of
        attention. Norms here multiply by 1 plus their weight."""
        own = self.state_dict()
        with torch.no_grad():
            for name, value in weights.items():
                if name in own and own[name].shape == value.shape:
                    own[name].copy_(value - 1.0 if name.endswith("norm.weight") else value)
