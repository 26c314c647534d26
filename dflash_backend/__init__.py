"""DFlash speculative decoding engine and its Triton backend.

Nothing heavy is imported here: `dflash_backend.LLM` loads torch on first use.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dflash_backend.engine.llm import LLM
    from dflash_backend.messages import SamplingParams

__version__ = "0.1.0"
__all__ = ["LLM", "SamplingParams", "__version__"]

# For torch, if it is not loaded yet: its OpenMP threads would spin for milliseconds after each operation, on the cores
# that the engine's own threads then wait for.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")


def __getattr__(name: str) -> Any:
    if name == "LLM":
        from dflash_backend.engine.llm import LLM

        return LLM
    if name == "SamplingParams":
        from dflash_backend.messages import SamplingParams

        return SamplingParams
    raise AttributeError(f"module 'dflash_backend' has no attribute {name!r}")
