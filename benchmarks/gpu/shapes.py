"""Published shapes with random weights: what `make bench-gpu` runs, so that nothing has to be downloaded.

A shape is a `TargetSpec` and a `DFlashSpec` without files. The targets have the dimensions of the published models; the
drafters have the target's widths, 5 layers and a block of 16, as z-lab's drafter of Qwen3-8B has. `RandomTensors`
stands in for a checkpoint: a model reads its tensors from it one by one, and each is made when it is read.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from dflash_backend.checkpoints.quantization.kept import KeptWeight
from dflash_backend.checkpoints.quantization.slices import Slice
from dflash_backend.checkpoints.spec import ClampedSwiglu, DecoderSpec, MoeSpec, RopeSpec, TargetSpec
from dflash_backend.checkpoints.weights import NO_SLICES, Slices, WeightSource, expected_tensors
from dflash_backend.drafters.dflash.config import DFlashSpec
from dflash_backend.drafters.dflash.drafter import DFlashDrafter
from dflash_backend.drafters.registry import drafter_class
from dflash_backend.models.decoder import TargetWeights
from dflash_kernels.quantised_weight import FP8, MXFP4

WEIGHT_STD = 0.02
NO_FILES = Path("random weights")


@dataclass(frozen=True)
class Shape:
    """A pair of models by their dimensions, and the block size of the drafter: k is one less."""

    name: str
    target: TargetSpec
    draft: DFlashSpec

    @property
    def num_speculative_tokens(self) -> int:
        """k."""
        return self.draft.max_speculative_tokens

    @property
    def num_parameters(self) -> int:
        """Of both models."""
        return num_elements(target_expected(self)) + num_elements(draft_expected(self))


class RandomTensors(WeightSource):
    """The tensors of a checkpoint, of the shapes in `expected`, made on the device when they are read.

    Matrices are normal with a standard deviation of 0.02, norms are 1. A name has the same values whenever it is
    asked for, so that two implementations can run the same weights without a second copy being kept.
    """

    def __init__(
        self, expected: dict[str, torch.Tensor], dtype: torch.dtype, device: torch.device, seed: int = 0
    ) -> None:
        super().__init__(dtype, device)
        self.expected = expected
        self.seed = seed

    def read(self, name: str, out: torch.Tensor, taken: Slice | None = None) -> None:
        """Make the tensor `name` in `out`."""
        if out.dim() == 1:
            out.fill_(1.0)
            return
        generator = torch.Generator(self.device).manual_seed(self.seed + zlib.crc32(name.encode()))
        out.normal_(std=WEIGHT_STD, generator=generator)

    def make(self, name: str) -> torch.Tensor:
        """The tensor `name`. Raises `KeyError` where the checkpoint has none."""
        return self.tensor(name, *self.expected[name].shape)


class RandomQuantised(RandomTensors):
    """As `RandomTensors`, whose projections stay quantised: FP8 with a scale for each 128 x 128, or INT4 with a scale
    and a zero point for each 128 weights of a row. Of MXFP4 the experts of gpt-oss are, and nothing else."""

    def __init__(
        self, expected: dict[str, torch.Tensor], dtype: torch.dtype, device: torch.device, kind: str, seed: int = 0
    ) -> None:
        super().__init__(expected, dtype, device, seed)
        self.kind, self.keep_quantised = kind, True

    def read(self, name: str, out: torch.Tensor, taken: Slice | None = None) -> None:
        if out.dtype == torch.uint8:  # every byte is two codes; scales are about 2 ** -7
            out.random_(117, 123) if name.endswith("_scales") else out.random_(0, 256)
        else:
            super().read(name, out)

    def keeps(
        self, names: Mapping[str, int], in_features: int, *, ordered: bool = True, slices: Slices = NO_SLICES
    ) -> bool:
        if self.kind == MXFP4:
            return False
        return all(name.endswith(("_proj.weight", "in_proj_qkv.weight", "in_proj_z.weight")) for name in names)

    def read_kept(self, name: str, out_features: int, in_features: int, taken: Slice | None = None) -> KeptWeight:
        generator = torch.Generator(self.device).manual_seed(self.seed + zlib.crc32(name.encode()))

        def integers(high: int, *shape: int) -> torch.Tensor:
            return torch.randint(0, high, shape, dtype=torch.uint8, device=self.device, generator=generator)

        columns, rows = min(128, in_features), 128 if self.kind == FP8 else 1
        blocks = -(-out_features // rows), -(-in_features // columns)
        of_numbers = torch.float32 if self.kind == FP8 else torch.float16
        scales = torch.full(blocks, WEIGHT_STD / 8, dtype=of_numbers, device=self.device)
        zeros = None if self.kind == FP8 else integers(16, *blocks)
        # Codes below 0x70 of e4m3 are numbers of up to 128.
        codes = integers(0x70 if self.kind == FP8 else 16, out_features, in_features)
        return KeptWeight(self.kind, codes, scales, zeros, rows, columns)


def _decoder(
    layers: int, hidden: int, inner: int, heads: int, kv_heads: int, head_dim: int, **rest: Any
) -> DecoderSpec:
    """A decoder of Qwen3's layers."""
    fields: dict[str, Any] = {"rope": RopeSpec(1e6), "max_len": 40960, "rms_norm_eps": 1e-6, "qk_norm": True} | rest
    return DecoderSpec(
        num_layers=layers,
        hidden_size=hidden,
        intermediate_size=inner,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        qkv_bias=False,
        output_bias=False,
        mlp_bias=False,
        sliding_windows=(None,) * layers,
        **fields,
    )


def _target(architecture: str, decoder: DecoderSpec, vocab_size: int) -> TargetSpec:
    return TargetSpec(NO_FILES, architecture, decoder, vocab_size, False, "bfloat16", eos_token_ids=())


def _draft(target: TargetSpec, decoder: DecoderSpec, block_size: int, num_features: int) -> DFlashSpec:
    """A z-lab style drafter: non-causal inside its block, without embedding and head of its own."""
    layers = target.decoder.num_layers
    # Evenly over the target, from its second layer to its third from last.
    first, last = min(1, layers - 1), max(layers - 3, layers // 2)
    step = (last - first) / max(num_features - 1, 1)
    return DFlashSpec(
        path=NO_FILES,
        format="zlab",
        decoder=decoder,
        block_size=block_size,
        num_speculative_tokens=block_size - 1,
        target_layer_ids=tuple(sorted({round(first + i * step) for i in range(num_features)})),
        mask_token_id=target.vocab_size - 1,
        causal=(False,) * decoder.num_layers,
        vocab_size=target.vocab_size,
        draft_vocab_size=target.vocab_size,
        target_hidden_size=target.decoder.hidden_size,
        num_target_layers=layers,
        target_name=None,
        has_embedding=False,
        has_lm_head=False,
        has_mask_embedding=False,
        dtype="bfloat16",
    )


def qwen3_8b() -> Shape:
    """Qwen3-8B (arXiv 2505.09388) with a drafter of five of its layers."""
    target = _target("Qwen3ForCausalLM", _decoder(36, 4096, 12288, 32, 8, 128), 151936)
    return Shape("Qwen3-8B", target, _draft(target, _decoder(5, 4096, 12288, 32, 8, 128), 16, 5))


def llama_31_8b() -> Shape:
    """Llama-3.1-8B (arXiv 2407.21783) with a drafter of five layers of its widths."""
    rope = RopeSpec(5e5, "llama3", factor=8.0, original_max_positions=8192, low_freq_factor=1.0, high_freq_factor=4.0)
    decoder = _decoder(32, 4096, 14336, 32, 8, 128, rope=rope, max_len=131072, rms_norm_eps=1e-5, qk_norm=False)
    target = _target("LlamaForCausalLM", decoder, 128256)
    return Shape("Llama-3.1-8B", target, _draft(target, _decoder(5, 4096, 14336, 32, 8, 128, max_len=131072), 16, 5))


def qwen3_30b_a3b() -> Shape:
    """Qwen3-30B-A3B (arXiv 2505.09388): 8 of 128 experts a token; the drafter is dense."""
    moe = MoeSpec(128, 8, 768, norm_topk_prob=True, sparse_layers=(True,) * 48)
    target = _target("Qwen3MoeForCausalLM", _decoder(48, 2048, 6144, 32, 4, 128, moe=moe), 151936)
    return Shape("Qwen3-30B-A3B", target, _draft(target, _decoder(5, 2048, 6144, 32, 4, 128), 16, 5))


def gpt_oss_20b() -> Shape:
    """gpt-oss-20b (arXiv 2508.10925): 4 of 32 experts a token, in MXFP4, and a window of 128 in every other layer; with
    a drafter of five dense layers of its heads."""
    moe = MoeSpec(32, 4, 2880, True, (True,) * 24, swiglu=ClampedSwiglu(1.702, 7.0), mxfp4=True)
    decoder = _decoder(24, 2880, 2880, 64, 8, 64, moe=moe, sinks=True, qk_norm=False)
    decoder = replace(decoder, sliding_windows=(128, None) * 12)
    target = _target("GptOssForCausalLM", decoder, 201088)
    return Shape("gpt-oss-20b", target, _draft(target, _decoder(5, 2880, 8640, 64, 8, 64), 16, 5))


def tiny() -> Shape:
    """A shape that runs on a CPU in seconds: it exercises the benchmark and measures nothing."""
    target = _target("Qwen3ForCausalLM", _decoder(2, 32, 48, 4, 2, 16, max_len=512), 97)
    return Shape("tiny", target, _draft(target, _decoder(1, 32, 48, 4, 2, 16, max_len=512), 4, 2))


def tiny_moe() -> Shape:
    """As `tiny`, with experts."""
    moe = MoeSpec(4, 2, 16, norm_topk_prob=True, sparse_layers=(True, True))
    target = _target("Qwen3MoeForCausalLM", _decoder(2, 32, 48, 4, 2, 16, max_len=512, moe=moe), 97)
    return Shape("tiny-moe", target, _draft(target, _decoder(1, 32, 48, 4, 2, 16, max_len=512), 4, 2))


def with_layers(shape: Shape, count: int) -> Shape:
    """A shape whose target has this many layers; the drafter's features are of as many of them as before."""
    decoder = replace(shape.target.decoder, num_layers=count, sliding_windows=(None,) * count)
    target = replace(shape.target, decoder=decoder)
    drafter = shape.draft
    draft = _draft(target, drafter.decoder, drafter.block_size, len(drafter.target_layer_ids))
    return replace(shape, target=target, draft=draft)


SHAPES: dict[str, Callable[[], Shape]] = {
    "qwen3-8b": qwen3_8b,
    "llama-3.1-8b": llama_31_8b,
    "qwen3-30b-a3b": qwen3_30b_a3b,
    "tiny": tiny,
    "tiny-moe": tiny_moe,
}
# Those of which the floor alone is printed.
FLOOR_SHAPES = SHAPES | {"gpt-oss-20b": gpt_oss_20b}
PUBLISHED = ("qwen3-8b", "llama-3.1-8b", "qwen3-30b-a3b")


def target_expected(shape: Shape) -> dict[str, torch.Tensor]:
    """The target's checkpoint tensors, without memory."""
    return expected_tensors(lambda source: TargetWeights.read(source, shape.target))


def draft_expected(shape: Shape) -> dict[str, torch.Tensor]:
    """The drafter's checkpoint tensors, without memory."""
    weights = block_drafter_class(shape.draft).model_class.weights_class
    return expected_tensors(lambda source: weights.read(source, shape.draft))


def block_drafter_class(spec: DFlashSpec) -> type[DFlashDrafter]:
    """What runs the drafter of `spec`: DFlash, or a method that is built on it."""
    found = drafter_class(spec)
    assert issubclass(found, DFlashDrafter)
    return found


def target_tensors(
    shape: Shape, dtype: torch.dtype, device: torch.device, quantised: str | None = None
) -> RandomTensors:
    """The target's checkpoint tensors. quantised: FP8 or INT4, of which its projections are."""
    return _random(target_expected(shape), dtype, device, 0, quantised)


def draft_tensors(
    shape: Shape, dtype: torch.dtype, device: torch.device, quantised: str | None = None
) -> RandomTensors:
    """The drafter's checkpoint tensors, as `target_tensors`."""
    return _random(draft_expected(shape), dtype, device, 1, quantised)


def _random(
    expected: dict[str, torch.Tensor], dtype: torch.dtype, device: torch.device, seed: int, quantised: str | None
) -> RandomTensors:
    if quantised is None:
        return RandomTensors(expected, dtype, device, seed)
    return RandomQuantised(expected, dtype, device, quantised, seed)


def num_elements(tensors: dict[str, torch.Tensor]) -> int:
    """Elements of all tensors together."""
    return sum(tensor.numel() for tensor in tensors.values())
