"""What a drafter in training is worth: the acceptance length of its target's answers to held-out prompts, by the engine
that would serve it."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from dflash_backend.engine.llm import LLM
from dflash_backend.spec_stats import SpecDecodingStats
from dflash_backend.training.features import Teacher

MAX_TOKENS = 128


def measure_acceptance(
    target: str,
    draft: Path,
    prompts: Sequence[Sequence[int]],
    temperature: float,
    settings: Mapping[str, Any],
    teacher: Teacher | None = None,
) -> tuple[float, float]:
    """Answer `prompts` with the drafter in a folder, as many drafts in each step as it can give. teacher: whose target
    is taken, loaded by an engine with the same `settings`. Returns the acceptance length, 1 + accepted drafts / blocks,
    and tokens of all answers a second."""
    loaded = None if teacher is None else teacher.target
    llm = LLM(target, str(draft), loaded=loaded, **{**settings, "adaptive_speculation": False})
    space = llm.engine.ready.max_model_len
    params = [
        {"temperature": temperature, "seed": index, "max_tokens": max(1, min(MAX_TOKENS, space - len(prompt)))}
        for index, prompt in enumerate(prompts)
    ]
    began = time.monotonic()
    outputs = llm.generate([list(prompt) for prompt in prompts], params)
    seconds = time.monotonic() - began
    total = SpecDecodingStats.total(output.stats.spec_decoding for output in outputs if output.stats is not None)
    return total.acceptance_length or 1.0, sum(len(output.token_ids) for output in outputs) / seconds
