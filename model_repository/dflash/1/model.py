"""The Triton model `dflash`. All of it is in the package `dflash_backend`."""

from dflash_backend.triton.model import TritonPythonModel

__all__ = ["TritonPythonModel"]
