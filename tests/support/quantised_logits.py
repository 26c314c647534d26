"""Compares a quantised checkpoint in our hands with its weights in those of `transformers`."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from dflash_backend.checkpoints import read_target
from dflash_backend.checkpoints.files import read_headers
from dflash_backend.checkpoints.quantization import load_quantization
from dflash_backend.checkpoints.quantization.stored import quantised
from dflash_backend.checkpoints.weights import WeightSource, load_weights
from dflash_backend.models import TargetModel, load_target
from tests.support.paged import block_tables, caches, context
from tests.support.quantised import Copies
from tests.support.tiny_models import VOCAB_SIZE

CPU = torch.device("cpu")
NUM_TOKENS = 29
# Logits of these models are about 10.
TOLERANCE = 1e-3


def ours(directory: Path, dtype: torch.dtype = torch.float32) -> TargetModel:
    """The target in a directory."""
    return load_target(read_target(directory), 64, dtype, CPU)


def our_logits(directory: Path, ids: torch.Tensor) -> torch.Tensor:
    """Logits `[n, vocab]` of the target in a directory for token ids `[n]`."""
    target = ours(directory)
    paged = context(block_tables(1), [0], [len(ids)])
    hidden = target.forward(ids, paged, caches(target.spec.decoder), ()).hidden
    return target.logits(hidden)


def assert_same_logits(copies: Copies) -> None:
    """Ours of the quantised checkpoint equal those of `transformers` for the weights that it stands for."""
    ids = torch.randint(0, VOCAB_SIZE, (NUM_TOKENS,), generator=torch.Generator().manual_seed(0))
    reference = AutoModelForCausalLM.from_pretrained(copies.plain, dtype=torch.float32).eval()
    expected = reference(ids[None]).logits[0]
    torch.testing.assert_close(our_logits(copies.quantised, ids), expected, atol=TOLERANCE, rtol=0.0)


def projections(directory: Path) -> set[str]:
    """The projections of a checkpoint that are quantised."""
    quantization = load_quantization(directory)
    assert quantization is not None
    return set(quantised(read_headers(directory), quantization))


def weight_of(directory: Path, projection: str, out_features: int, in_features: int) -> torch.Tensor:
    """The weight of one projection as a model gets it."""

    def read(source: WeightSource) -> torch.Tensor:
        source.read_projection(f"{projection}.weight", out := source.empty(out_features, in_features))
        return out

    if load_quantization(directory) is None:
        return load_file(directory / "model.safetensors")[f"{projection}.weight"].float()
    return load_weights(directory, read, torch.float32, CPU, ignored=lambda name: True)
