"""Where the CPU's operations are not there in C++ torch computes, and the text is the same."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

import pytest

from dflash_backend import LLM
from dflash_backend.config import asset_path
from dflash_kernels.cpu_ops import HAS_CPU_OPS

PROMPTS = ["What is 3 plus 4?", "Sam fills 4 bags with 6 marbles each and gives away 7 marbles."]


def answers() -> list[dict[str, Any]]:
    """What the demo pair answers, and with which drafts."""
    pair = asset_path("demo", "pair")
    settings = {"max_model_len": 512, "kv_cache_gb": 0.1, "max_num_seqs": 4, "adaptive_speculation": False}
    llm = LLM(str(pair / "target"), str(pair / "draft"), device="cpu", **settings)
    outputs = llm.generate(PROMPTS, max_tokens=40, temperature=0)
    return [
        {"ids": list(output.token_ids), "accepted": output.stats.spec_decoding.num_accepted_tokens}
        for output in outputs
        if output.stats is not None
    ]


@pytest.mark.skipif(not HAS_CPU_OPS, reason="needs a C++ compiler")
def test_torch_alone_gives_the_same_text_and_accepts_as_many_drafts() -> None:
    code = (
        "import json; from dflash_kernels.cpu_ops import HAS_CPU_OPS; assert not HAS_CPU_OPS; "
        "from tests.engine.test_without_compiler import answers; print(json.dumps(answers()))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=os.environ | {"DFLASH_CPU_OPS": "0"},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert found == answers()
    assert all(answer["accepted"] > 10 for answer in found)
