"""Target decoders over paged attention, with capture of hidden states for the drafter, for every family of
`checkpoints.families`."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import torch

from dflash_backend.attention import AttentionPattern, KVLayer
from dflash_backend.checkpoints.lora import LoraAdapters
from dflash_backend.checkpoints.quantization.at_load import Fp8Source
from dflash_backend.checkpoints.spec import DecoderSpec, RopeSpec, TargetSpec
from dflash_backend.checkpoints.weights import Progress, WeightSource, load_weights
from dflash_backend.models.gemma4 import Gemma4Layer, Gemma4LayerWeights
from dflash_backend.models.hybrid_layers import (
    DeltaNetLayer,
    DeltaNetLayerWeights,
    GatedAttentionLayer,
    read_hybrid_layer,
    read_norm,
)
from dflash_backend.models.interface import PagedContext, TargetModel, TargetOutput, target_patterns
from dflash_backend.models.layer_stack import LayerStack
from dflash_backend.models.layers import DecoderLayer, LayerWeights
from dflash_backend.models.linear import Linear, PackedLinear, Table, embedded, table_of, using_adapters
from dflash_backend.models.ops import LayerOps, select_ops
from dflash_backend.models.rope import Rotary
from dflash_kernels.cpu_head import CoarseHead
from dflash_kernels.cpu_ops import PackedWeight

AnyLayerWeights = LayerWeights | DeltaNetLayerWeights | Gemma4LayerWeights


@dataclass(frozen=True)
class TargetWeights:
    """The parameters of a target. embedding: `[vocab_size, hidden_size]`, which is the head's weight where the two are
    tied. share: what gives all ranks of a shared target the embeddings of tokens; None where there are no others.
    first_id: the first token of a rank's slice of embedding and head; None where there is one slice. adapter_names: of
    the LoRA adapters that the layers' products add."""

    embedding: Table
    layers: list[AnyLayerWeights]
    final_norm: torch.Tensor
    lm_head: Linear
    share: Callable[[torch.Tensor], torch.Tensor] | None = None
    first_id: int | None = None
    adapter_names: tuple[str, ...] = ()

    @classmethod
    def read(cls, source: WeightSource, spec: TargetSpec) -> TargetWeights:
        """Read every tensor of a target of any family."""
        decoder, prefix = spec.decoder, spec.prefix
        hidden, vocab = decoder.hidden_size, spec.vocab_size
        name, tied = f"{prefix}embed_tokens.weight", spec.tie_word_embeddings
        packed = source.of_blocks([name], partial(PackedWeight.of_blocks, dtype=source.dtype))
        embedding: Table = source.tensor(name, vocab, hidden) if packed is None else packed
        head = None
        if tied:
            head = Linear(embedding) if isinstance(embedding, torch.Tensor) else PackedLinear(embedding)
        read_layer: Callable[[WeightSource, str, DecoderSpec, int], AnyLayerWeights] = LayerWeights.read
        if decoder.gemma4 is not None:
            read_layer = Gemma4LayerWeights.read
        elif decoder.delta_net is not None:
            read_layer = read_hybrid_layer
        weights = cls(
            embedding if head is None else table_of(head),
            [read_layer(source, f"{prefix}layers.{i}.", decoder, i) for i in range(decoder.num_layers)],
            read_norm(source, f"{prefix}norm.weight", decoder, hidden),
            Linear.read(source, "", {"lm_head": vocab}, hidden) if head is None else head,
            adapter_names=() if source.adapters is None else source.adapters.names,
        )
        if source.adapters is not None:
            source.adapters.check_taken()
        return weights


class LayeredTarget(TargetModel, ABC):
    """What targets of all families share: embedding, capture, final norm and head."""

    def __init__(self, spec: TargetSpec, weights: TargetWeights, ops: LayerOps | None = None) -> None:
        """`ops`: by default those for the weights' device."""
        self.spec = spec
        self.eps = spec.decoder.rms_norm_eps
        self.final_norm = weights.final_norm
        self._share, self._first_id = weights.share, weights.first_id
        self.adapter_names = weights.adapter_names
        self.ops = ops or select_ops(weights.embedding.device)
        # Drafters multiply by the head as well, in their own way.
        self._head = weights.lm_head.with_product(self.ops.product_of)
        packed = isinstance(self._head, PackedLinear)
        self.lm_head = self._head if packed else weights.lm_head
        # One copy serves both where they are tied.
        self.embedding: Table = weights.embedding
        if packed and spec.tie_word_embeddings:
            self.embedding = table_of(self._head)
        self.patterns = target_patterns(spec)

    def add_coarse_head(self) -> None:
        head = self._head
        if self.coarse_head is None and isinstance(head, PackedLinear) and head.bias is None:
            self.coarse_head = CoarseHead.of(head.packed)

    @abstractmethod
    def _run_layers(self, hidden: torch.Tensor, context: PagedContext, caches: list[KVLayer]) -> Iterator[torch.Tensor]:
        """The output of each layer: `[num_tokens, hidden_size]`, of the embeddings `hidden`."""

    def _run_at_once(
        self, token_ids: torch.Tensor, context: PagedContext, caches: list[KVLayer], capture: tuple[int, ...]
    ) -> TargetOutput | None:
        """The forward pass in one call; None where layers must be run one by one."""
        return None

    def embed(self, token_ids: torch.Tensor, scaled: bool = True) -> torch.Tensor:
        return embedded(token_ids, self.embedding, self._first_id)

    def forward(
        self, token_ids: torch.Tensor, context: PagedContext, caches: list[KVLayer], capture: tuple[int, ...]
    ) -> TargetOutput:
        if context.adapter_ids is None:
            found = self._run_at_once(token_ids, context, caches, capture)
            if found is not None:
                return found
        hidden = embeddings = self.embed(token_ids)
        if self._share is not None:
            hidden = embeddings = self._share(embeddings)
        captured: dict[int, torch.Tensor] = {}
        num_layers = self.spec.decoder.num_layers
        with using_adapters(context.adapter_ids):
            for index, hidden in enumerate(self._run_layers(embeddings, context, caches)):
                if index in capture:
                    captured[index] = hidden
        if num_layers in capture:
            captured[num_layers] = self.ops.rms_norm(hidden, self.final_norm, self.eps)
        features = torch.cat([captured[index] for index in capture], dim=-1) if capture else None
        return TargetOutput(hidden, features)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return self._head(self.ops.rms_norm(hidden, self.final_norm, self.eps))

    def likeliest(self, hidden: torch.Tensor, *sampling: torch.Tensor) -> torch.Tensor | None:
        if self.coarse_head is None:
            return None
        return self.coarse_head.likeliest(self.ops.rms_norm(hidden, self.final_norm, self.eps), *sampling)


class DecoderTarget(LayeredTarget):
    """A target of any family but Gemma 4."""

    def __init__(
        self, spec: TargetSpec, weights: TargetWeights, max_positions: int, ops: LayerOps | None = None
    ) -> None:
        """Able to run positions below `max_positions`."""
        super().__init__(spec, weights, ops)
        self.rotary = Rotary(spec.decoder, max_positions, weights.embedding.device, weights.embedding.dtype)
        for index, layer in enumerate(weights.layers):
            weights.layers[index] = layer.with_product(self.ops.product_of)  # what it was made of need not stay
        self.layers = _layers(spec.decoder, weights.layers, self.patterns, self.ops)
        self._adapted = self.layers
        if self.adapter_names:  # for a pass without adapters there are faster operations
            plain: list[AnyLayerWeights] = [layer.without_adapters() for layer in weights.layers]
            self.layers = _layers(spec.decoder, plain, self.patterns, self.ops)
        self.stack = LayerStack.of(self.layers, self.ops, self.final_norm)
        if self.stack is not None and isinstance(self._head, PackedLinear):
            self.stack.end_with(self._head.packed)

    def add_coarse_head(self) -> None:
        super().add_coarse_head()
        if self.stack is not None and self.coarse_head is not None:
            self.stack.order[-1].precede(self.coarse_head.data)

    def _run_at_once(
        self, token_ids: torch.Tensor, context: PagedContext, caches: list[KVLayer], capture: tuple[int, ...]
    ) -> TargetOutput | None:
        inner = capture[:-1] if capture and capture[-1] == len(self.layers) else capture
        if self.stack is None or (rows := self.stack.rows(context, self.embedding.dtype, inner)) is None:
            return None
        table = self.embedding
        looked_up: tuple[torch.Tensor | None, PackedWeight | None] = None, None
        if isinstance(table, PackedWeight) and self._first_id is None and self._share is None:
            hidden = torch.empty((len(token_ids), table.shape[1]), dtype=table.dtype)
            looked_up = token_ids.contiguous(), table
        else:
            embeddings = self.embed(token_ids)
            hidden = (embeddings if self._share is None else self._share(embeddings)).contiguous()
        norm = None if inner == capture else self.final_norm
        normed, features = self.stack.forward(
            rows, hidden, caches, self.rotary, context.positions, norm, inner, *looked_up
        )  # fmt: skip
        if inner != capture:
            features = normed if features is None else torch.cat((features, normed), dim=-1)
        return TargetOutput(hidden, features)

    def _run_layers(self, hidden: torch.Tensor, context: PagedContext, caches: list[KVLayer]) -> Iterator[torch.Tensor]:
        rotation = self.ops.rotation(self.rotary, context.positions)
        layers = self.layers if context.adapter_ids is None else self._adapted
        normed = self.ops.rms_norm(hidden, layers[0].weights.input_norm, self.eps)
        own_cache = iter(caches)
        for index, layer in enumerate(layers):
            if isinstance(layer, DeltaNetLayer):
                added, hidden = layer.forward(normed, hidden, context)
            else:
                added, hidden = layer.forward(normed, hidden, context, next(own_cache), rotation)
            if index + 1 < len(layers):
                next_norm = layers[index + 1].weights.input_norm
                normed, hidden = self.ops.add_rms_norm(added, hidden, next_norm, self.eps)
            else:
                hidden = hidden + added
            yield hidden


class Gemma4Target(LayeredTarget):
    """A target of the family Gemma 4, whose layers have heads of two kinds."""

    def __init__(
        self, spec: TargetSpec, weights: TargetWeights, max_positions: int, ops: LayerOps | None = None
    ) -> None:
        """Able to run positions below `max_positions`."""
        super().__init__(spec, weights, ops)
        decoder = spec.decoder
        assert decoder.gemma4 is not None
        self.softcap = decoder.gemma4.softcap
        device, dtype = weights.embedding.device, weights.embedding.dtype
        # In the model's dtype, as the family was trained.
        self.embedding_scale = float(torch.tensor(decoder.hidden_size**0.5, dtype=dtype))
        heads = [decoder.of_layer(index) for index in range(decoder.num_layers)]
        self.rotaries = {
            (own.rope, own.head_dim): Rotary(own, max_positions, device, dtype) for own in dict.fromkeys(heads)
        }
        self._kinds: list[tuple[RopeSpec, int]] = [(own.rope, own.head_dim) for own in heads]
        self._adapted = [
            Gemma4Layer(own, layer.with_product(self.ops.product_of), pattern, self.ops)
            for own, layer, pattern in zip(heads, weights.layers, self.patterns, strict=True)
            if isinstance(layer, Gemma4LayerWeights)
        ]
        self.layers = self._adapted
        if self.adapter_names:
            self.layers = [
                Gemma4Layer(own, layer.weights.without_adapters(), layer.pattern, self.ops)
                for own, layer in zip(heads, self._adapted, strict=True)
            ]

    def embed(self, token_ids: torch.Tensor, scaled: bool = True) -> torch.Tensor:
        rows = super().embed(token_ids)
        return rows * self.embedding_scale if scaled else rows

    def _run_layers(self, hidden: torch.Tensor, context: PagedContext, caches: list[KVLayer]) -> Iterator[torch.Tensor]:
        rotations = {kind: self.ops.rotation(rotary, context.positions) for kind, rotary in self.rotaries.items()}
        layers = self.layers if context.adapter_ids is None else self._adapted
        for layer, kind, cache in zip(layers, self._kinds, caches, strict=True):
            hidden = layer.forward(hidden, context, cache, rotations[kind])
            yield hidden

    def add_coarse_head(self) -> None:
        """None under a soft cap, which may make logits equal that are not."""
        if self.softcap is None:
            super().add_coarse_head()

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        logits = super().logits(hidden)
        return logits if self.softcap is None else torch.tanh(logits / self.softcap) * self.softcap


def _layers(
    decoder: DecoderSpec,
    weights: list[AnyLayerWeights],
    patterns: tuple[AttentionPattern, ...],
    ops: LayerOps,
) -> list[DecoderLayer | DeltaNetLayer]:
    """The layers with these weights; patterns: of those that have attention, in their order."""
    attention = GatedAttentionLayer if decoder.attention_gate else DecoderLayer
    own_pattern = iter(patterns)
    layers: list[DecoderLayer | DeltaNetLayer] = []
    for layer in weights:
        if isinstance(layer, LayerWeights):
            layers.append(attention(decoder, layer, next(own_pattern), ops))
        elif isinstance(layer, DeltaNetLayerWeights):
            number = sum(isinstance(before, DeltaNetLayer) for before in layers)
            layers.append(DeltaNetLayer(decoder, layer, number, ops))
    return layers


def load_target(
    spec: TargetSpec,
    max_positions: int,
    dtype: torch.dtype,
    device: torch.device,
    progress: Progress | None = None,
    ops: LayerOps | None = None,
    *,
    fp8: bool = False,
    adapters: LoraAdapters | None = None,
) -> TargetModel:
    """Load the target in `spec.path`, able to run positions below `max_positions`. `ops`: by default those for the
    device. fp8: with the weights that FP8 would hold in place of its own. adapters: what requests may have it add.
    Raises `CheckpointError`."""
    weights = load_target_weights(spec, dtype, device, progress, ops, fp8=fp8, adapters=adapters)
    return target_of(spec, weights, max_positions, ops)


def load_target_weights(
    spec: TargetSpec,
    dtype: torch.dtype,
    device: torch.device,
    progress: Progress | None,
    ops: LayerOps | None,
    *,
    fp8: bool,
    part: Callable[[WeightSource], WeightSource] = lambda source: source,
    adapters: LoraAdapters | None = None,
) -> TargetWeights:
    """The weights of a target, or a part of them: `spec` is that part's. Arguments as of `load_target`."""

    def read(source: WeightSource) -> TargetWeights:
        whole = part(Fp8Source(source) if fp8 else source)
        whole.adapters = adapters
        return TargetWeights.read(whole, spec)

    return load_weights(
        spec.path,
        read,
        dtype,
        device,
        ignored=lambda name: is_unused(spec, name),
        progress=progress,
        keep_quantised=(ops or select_ops(device)).keeps_quantised,
        keep_blocks=(ops or select_ops(device)).keeps_blocks,
    )


def target_of(spec: TargetSpec, weights: TargetWeights, max_positions: int, ops: LayerOps | None = None) -> TargetModel:
    """The target with these weights, of any family."""
    return (DecoderTarget if spec.decoder.gemma4 is None else Gemma4Target)(spec, weights, max_positions, ops)


def is_unused(spec: TargetSpec, name: str) -> bool:
    """Whether a tensor of the checkpoint is left out: frequencies, which follow from config.json and which some older
    exports store, a tied head, which repeats the embedding, the embedding of a rank without a vocabulary, a hybrid's
    own layers for drafting (MTP), and parts that are not served."""
    if name.startswith(spec.left_out):
        return True
    if spec.decoder.delta_net is not None and name.startswith("mtp."):
        return True
    if not spec.vocab_size and name.endswith("embed_tokens.weight"):
        return True
    return name.endswith("rotary_emb.inv_freq") or (spec.tie_word_embeddings and name == "lm_head.weight")
