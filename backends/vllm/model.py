"""The same model as a Triton backend of the name `vllm`, for programs that ask a model's config for that name.

Put this folder into Triton's backend directory, beside `python`; docs/openai-frontend.md says how.
"""

from dflash_backend.triton.model import TritonPythonModel

__all__ = ["TritonPythonModel"]
