"""Quantised weights: what `config.json` says of them, and how a projection's weight is made from the tensors that hold
it. Reading the config costs no torch; `dequantise` does."""

from dflash_backend.checkpoints.quantization.config import load_quantization, read_quantization, refuse_nested
from dflash_backend.checkpoints.quantization.scheme import Quantization, Scheme

__all__ = ["Quantization", "Scheme", "load_quantization", "read_quantization", "refuse_nested"]
