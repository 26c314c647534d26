"""A weight source without files."""

from __future__ import annotations

import torch

from dflash_backend.checkpoints.quantization.slices import Slice
from dflash_backend.checkpoints.weights import WeightSource


class TensorSource(WeightSource):
    """Gives the tensors of a dictionary in float32, each once, and keeps where they went."""

    def __init__(self, tensors: dict[str, torch.Tensor]) -> None:
        super().__init__(torch.float32, torch.device("cpu"))
        self.unread = dict(tensors)
        self.outs: dict[str, torch.Tensor] = {}

    def read(self, name: str, out: torch.Tensor, taken: Slice | None = None) -> None:
        assert taken is None
        assert out.shape == self.unread[name].shape
        self.outs[name] = out.copy_(self.unread.pop(name))
