"""What the worker and the drafter need of a target model."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

import torch

from dflash_backend.attention import AttentionBackend, AttentionBatch, AttentionMetadata, AttentionPattern, KVLayer
from dflash_backend.checkpoints.spec import TargetSpec
from dflash_backend.models.linear import Linear
from dflash_backend.models.peers import ALONE, Peers
from dflash_backend.models.recurrent_state import StateRows
from dflash_kernels.cpu_head import CoarseHead


@dataclass(frozen=True)
class WindowSlots:
    """Where the KV of layers with a window lies, which have block ids of their own. slots: int64 `[num_tokens]`, below
    0 where the token's KV goes nowhere. layout: the rows, with the block tables of these layers."""

    slots: torch.Tensor
    layout: AttentionBatch


@dataclass
class PagedContext:
    """What a forward pass over paged KV needs besides its tokens.

    layout: the rows. positions: int64 `[num_tokens]`. slots: int64 `[num_tokens]`, where each token's KV goes. dtype:
    of the model. padded: whether there may be slots below 0, whose KV is written nowhere. (A kernel skips them in any
    case; torch on a CPU pays for looking.) states: what layers with a state need; None where there are none. windows:
    where the KV of layers with a window lies, where these have block ids of their own. row_index: int64
    `[num_tokens]`, each token's place in its row; None where no layer reads it. adapter_ids: int64 `[num_tokens]`, each
    token's LoRA adapter, 0 for none; None where no token has one.
    """

    layout: AttentionBatch
    positions: torch.Tensor
    slots: torch.Tensor
    backend: AttentionBackend
    dtype: torch.dtype
    padded: bool = False
    states: StateRows | None = None
    windows: WindowSlots | None = None
    row_index: torch.Tensor | None = None
    adapter_ids: torch.Tensor | None = None
    _metadata: dict[AttentionPattern, AttentionMetadata] = field(default_factory=dict)

    def slots_of(self, pattern: AttentionPattern) -> torch.Tensor:
        """Where each token's KV goes in a layer with this pattern: int64 `[num_tokens]`."""
        return self.slots if pattern.sliding_window is None or self.windows is None else self.windows.slots

    def metadata(self, pattern: AttentionPattern) -> AttentionMetadata:
        """What the backend makes of the rows for layers with this pattern, once in a pass."""
        found = self._metadata.get(pattern)
        if found is None:
            windows = None if pattern.sliding_window is None else self.windows
            layout = self.layout if windows is None else windows.layout
            found = self._metadata[pattern] = self.backend.prepare(layout, pattern, self.dtype)
        return found


@dataclass(frozen=True)
class TargetOutput:
    """hidden: `[num_tokens, hidden_size]`, before the final norm. features: `[num_tokens, L * hidden_size]`, the
    outputs of the L captured layers side by side, in the order asked for; None when none were."""

    hidden: torch.Tensor
    features: torch.Tensor | None


class TargetModel(Protocol):
    """A target decoder."""

    spec: TargetSpec

    patterns: tuple[AttentionPattern, ...]
    """What the queries of each layer that has attention see."""

    lm_head: Linear
    """hidden_size -> vocab_size, over the embedding itself where the two are tied; its input is normed."""

    adapter_names: tuple[str, ...] = ()
    """Its LoRA adapters, of which the first has the number 1 in `PagedContext.adapter_ids`."""

    peers: Peers = ALONE
    """What a step asks of the other processes that share this target."""

    def embed(self, token_ids: torch.Tensor, scaled: bool = True) -> torch.Tensor:
        """Token embeddings: int64 `[n]` -> `[n, hidden_size]`. scaled: as the first layer reads them, which for Gemma 4
        is times the root of the hidden size; else the rows as they are stored."""

    def forward(
        self, token_ids: torch.Tensor, context: PagedContext, caches: list[KVLayer], capture: tuple[int, ...]
    ) -> TargetOutput:
        """Run the decoder over `token_ids` (int64 `[num_tokens]`), writing their KV to `caches`, one for each
        layer that has attention, and capturing the outputs of the layers `capture`: layer ids, of which the number of
        layers means the last layer's output after the final norm."""

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Final norm and LM head: `[n, hidden_size]` -> `[n, vocab_size]`."""

    def add_coarse_head(self) -> None:
        """Keep coarse codes beside the LM head where they make `likeliest` faster: a byte for each of its numbers."""
        return

    coarse_head: CoarseHead | None = None
    """What finds tokens without logits, where there is any."""

    def likeliest(self, hidden: torch.Tensor, *sampling: torch.Tensor) -> torch.Tensor | None:
        """The token of the largest of the `logits` of each row, the first of equals; with `sampling` what
        `StepOps.chosen_tokens` gives for them: int64 `[n]`. None where that takes no less time than the logits do.
        sampling: temperature float32, seeds, positions and top_k int64, top_p and min_p float32, `[n]`."""
        return None


def target_patterns(spec: TargetSpec) -> tuple[AttentionPattern, ...]:
    """What the queries of each layer that has attention see."""
    sinks = spec.decoder.sinks
    return tuple(AttentionPattern(True, cache.sliding_window, sinks) for cache in spec.decoder.caches)
