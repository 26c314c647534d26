"""What the process imports from which each run of pytest is forked: nothing of the source, which a mutant changes.

The models of transformers, which most tests of the worker compare with, take two seconds; they import Triton, which
reads where kernels run as it is imported (`tests/conftest.py`). What it imports stays, so no run looks through it for
garbage, nor copies its pages to do so.
"""

import gc
import os

import _hypothesis_pytestplugin  # noqa: F401
import hypothesis  # noqa: F401
import pytest  # noqa: F401
import torch
import xdist.looponfail
import xdist.plugin  # noqa: F401

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"

import transformers.models.auto.tokenization_auto
import transformers.models.qwen3.modeling_qwen3  # noqa: F401

gc.freeze()
