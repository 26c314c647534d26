"""The gated delta net of Qwen3-Next and Qwen3.5 (arXiv 2412.06464) in the place of attention: a short causal
convolution over queries, keys and values, the delta rule, and a norm times a gate.

Qwen3-Next's projections are stored key head by key head. They are brought into the order queries, keys, values, gate,
beta, decay, of all heads each, so that they are one product.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F

from dflash_backend.checkpoints.spec import DecoderSpec, DeltaNetSpec
from dflash_backend.checkpoints.weights import WeightSource
from dflash_backend.models.linear import Linear, ProductOf, QuantisedLinear
from dflash_backend.models.ops import LayerOps
from dflash_backend.models.recurrent_state import KeptBlock, StateGroup, StateRows
from dflash_kernels.conv_heads import DeltaHeads
from dflash_kernels.delta_rule import DeltaInputs


@dataclass(frozen=True)
class DeltaNetWeights:
    """inputs: hidden -> `conv_size + value_size + 2 * num_value_heads`, or the last `2 * num_value_heads` apart. conv:
    `[conv_size, conv_width]`. decay: float32 `[num_value_heads]`, how fast each head decays; decay_bias: float32, the
    same. norm: `[value_head_dim]`. output: value_size -> hidden."""

    inputs: tuple[Linear, ...]
    conv: torch.Tensor
    decay: torch.Tensor
    decay_bias: torch.Tensor
    norm: torch.Tensor
    output: Linear

    @classmethod
    def read(cls, source: WeightSource, prefix: str, decoder: DecoderSpec, net: DeltaNetSpec) -> DeltaNetWeights:
        """The layer whose tensors' names begin with `prefix`."""
        hidden = decoder.hidden_size
        # The logarithm of a rate: rounded to 16 bits, it would change what is left after many tokens.
        decay = source.tensor(f"{prefix}A_log", net.num_value_heads, dtype=torch.float32)
        return cls(
            inputs=(_read_grouped if net.grouped else _read_plain)(source, prefix, hidden, net),
            conv=source.tensor(f"{prefix}conv1d.weight", net.conv_size, 1, net.conv_width)[:, 0],
            decay=decay.exp(),
            decay_bias=source.tensor(f"{prefix}dt_bias", net.num_value_heads).float(),
            norm=source.tensor(f"{prefix}norm.weight", net.value_head_dim),
            output=Linear.read(source, prefix, {"out_proj": hidden}, net.value_size),
        )

    def with_product(self, product_of: ProductOf) -> DeltaNetWeights:
        """The same weights, multiplied by what `product_of` chooses for each."""
        inputs = tuple(each.with_product(product_of) for each in self.inputs)
        return replace(self, inputs=inputs, output=self.output.with_product(product_of))


class DeltaNet:
    """One layer's gated delta net. number: which of the layers that have a state it is."""

    def __init__(self, net: DeltaNetSpec, weights: DeltaNetWeights, eps: float, number: int, ops: LayerOps) -> None:
        self.net = net
        self.heads = DeltaHeads(net.num_key_heads, net.num_value_heads, net.key_head_dim, net.value_head_dim)
        self.ops = ops
        self.weights = weights
        self.eps = eps
        self.number = number

    def forward(self, normed: torch.Tensor, rows: StateRows) -> torch.Tensor:
        """`[num_tokens, hidden_size]` -> the same shape; `rows` keeps what `StateRows.commit` needs."""
        net, w = self.net, self.weights
        heads = net.num_value_heads
        mixed, gate, beta, decay = self._projected(normed)
        beta = beta.float().sigmoid()
        log_decay = -w.decay * F.softplus(decay.float() + w.decay_bias)
        # The place behind the last token takes what no token gives. Padding tokens have 0.
        outputs = normed.new_zeros(len(normed) + 1, heads, net.value_head_dim, dtype=torch.float32)
        for number, group in enumerate(rows.groups):
            found, kept = self._group(group, rows, mixed, beta, log_decay)
            outputs[group.place] = found.transpose(1, 2)
            rows.kept[self.number, number] = kept
        attended = self._gated_norm(outputs[:-1].to(normed.dtype), gate.unflatten(-1, (heads, -1)))
        return w.output(attended.flatten(1))

    def _projected(self, normed: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """What goes through the convolution, the gate, beta and decay, before anything is done to them."""
        heads, parts = self.net.num_value_heads, [product(normed) for product in self.weights.inputs]
        sizes = [self.net.conv_size, self.net.value_size, heads, heads]
        if len(parts) == 1:
            return parts[0].split(sizes, dim=-1)
        return (*parts[0].split(sizes[:2], dim=-1), *parts[1].split(sizes[2:], dim=-1))

    def _group(
        self, group: StateGroup, rows: StateRows, mixed: torch.Tensor, beta: torch.Tensor, log_decay: torch.Tensor
    ) -> tuple[torch.Tensor, KeptBlock]:
        """Outputs `[G, H, W, value_dim]` of a group's tokens, and what is kept of them."""
        state, tail = rows.load(self.number, group)
        # Where there is no token there may be any number: what is multiplied by 0 later must be finite.
        inputs = torch.cat([tail, mixed[group.index].masked_fill_(~group.valid[..., None], 0.0)], dim=1)
        no_token = ~group.valid[:, None]
        tokens = DeltaInputs(
            *self.ops.conv_heads(inputs, self.weights.conv, self.heads),
            beta[group.index].transpose(1, 2).masked_fill(no_token, 0.0),
            log_decay[group.index].transpose(1, 2).masked_fill(no_token, 0.0),
        )
        if not group.may_draft:
            outputs, state = self.ops.delta_chunked(tokens, state)
            return outputs, KeptBlock(inputs, state=state)
        block = self.ops.delta_block(tokens, state)
        return block.outputs, KeptBlock(inputs, tokens.keys, block)

    def _gated_norm(self, x: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
        """RMSNorm over each head, then the gate's SiLU: `[n, H, value_dim]`, in float32 but for the norm's result."""
        exact = x.float()
        exact = exact * torch.rsqrt(exact.square().mean(-1, keepdim=True) + self.eps)
        return ((self.weights.norm * exact.to(x.dtype)).float() * F.silu(gate.float())).to(x.dtype)


def _read_plain(source: WeightSource, prefix: str, hidden: int, net: DeltaNetSpec) -> tuple[Linear, ...]:
    """The projections of Qwen3.5."""
    large = {"in_proj_qkv": net.conv_size, "in_proj_z": net.value_size}
    small = dict.fromkeys(("in_proj_b", "in_proj_a"), net.num_value_heads)
    if source.keeps({f"{prefix}{name}.weight": size for name, size in large.items()}, hidden):
        return Linear.read(source, prefix, large, hidden), Linear.read(source, prefix, small, hidden)
    return (Linear.read(source, prefix, large | small, hidden),)


def _read_grouped(source: WeightSource, prefix: str, hidden: int, net: DeltaNetSpec) -> tuple[Linear, ...]:
    """The projections of Qwen3-Next, in the same order."""
    values = net.value_size // net.num_key_heads
    large = Linear.read(source, prefix, {"in_proj_qkvz": net.conv_size + net.value_size}, hidden)
    large = large.rows(_row_order(net, (net.key_head_dim,) * 2 + (values,) * 2).to(source.device))
    small = Linear.read(source, prefix, {"in_proj_ba": 2 * net.num_value_heads}, hidden)
    small = small.rows(_row_order(net, (net.num_value_heads // net.num_key_heads,) * 2).to(source.device))
    return (large, small) if isinstance(large, QuantisedLinear) else (Linear.stacked([large, small]),)


def _row_order(net: DeltaNetSpec, sizes: tuple[int, ...]) -> torch.Tensor:
    """Which stored row comes to each place, int64: there are `sizes` rows of each projection for one key head after the
    other."""
    rows = torch.arange(net.num_key_heads * sum(sizes)).unflatten(0, (net.num_key_heads, sum(sizes)))
    return torch.cat([part.flatten() for part in rows.split(list(sizes), dim=1)])
