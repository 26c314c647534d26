"""Keeps torch out of processes that only tokenize: the stub of the Triton model, and the OpenAI front end."""

from __future__ import annotations

import os
import sys


def leave_torch_out() -> None:
    """Make an import of torch fail in this process, unless it has imported torch.

    transformers, for the tokenizer, imports torch where it finds it: more than a second and 180 MB for nothing. It must
    not have been imported before.
    """
    sys.modules.setdefault("torch", None)  # type: ignore[arg-type]
    # It would say that there is no torch.
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")
