"""DFlash speculative decoding engine and its Triton backend.

Nothing heavy is imported here: `dflash_backend.LLM` loads torch on first use.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dflash_backend.engine.llm import LLM
    from dflash_backend.messages import SamplingParams

__version__ = "0.1.0"
__all__ = ["LLM", "SamplingParams", "__version__"]


def __getattr__(name: str) -> Any:
    if name == "LLM":
        from dflash_backend.engine.llm import LLM

        return LLM
    if name == "SamplingParams":
        from dflash_backend.messages import SamplingParams

        return SamplingParams
    raise AttributeError(f"module 'dflash_backend' has no attribute {name!r}")
