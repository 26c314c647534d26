"""The muscle: KV tensors, request state and the model runner that executes step plans."""

from dflash_backend.worker.runner import ModelRunner

__all__ = ["ModelRunner"]
