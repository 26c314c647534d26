"""Answers prompts by vLLM with a drafter, for `checks.vllm_drafts`; the interpreter that has vLLM runs this file.

`python vllm_side.py SETTINGS`, a JSON file with `target`, `draft`, `drafts`, `prompts` and `max_tokens`, and
`own_norms`: whether keys of the context get the norm of their own layer. The last line of the output is JSON.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any


def use_own_norms() -> None:
    """Norm the context's keys of each layer by that layer's weights: the operation of vLLM's CPU build reads the first
    row of weights `[layers, head_dim]` alone."""
    import torch
    from vllm import _custom_ops
    from vllm.model_executor.models import qwen3_dflash

    def normalised(model: Any, keys: torch.Tensor) -> torch.Tensor:
        out = torch.empty_like(keys)
        for layer, weight in enumerate(model._k_norm_weights):
            _custom_ops.rms_norm(out[layer], keys[layer].contiguous(), weight, model._rms_norm_eps)
        return out

    qwen3_dflash.DFlashQwen3Model._normalize_context_k = normalised


def main() -> None:
    """Entry point."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("settings", type=Path, help="the JSON file")
    arguments = parser.parse_args()
    import vllm  # which only the interpreter of `checks.vllm_drafts --python` has

    settings = json.loads(arguments.settings.read_text(encoding="utf-8"))
    if settings["own_norms"]:
        use_own_norms()
    llm = vllm.LLM(
        model=settings["target"],
        dtype="float32",
        max_model_len=1024,
        max_num_seqs=32,
        speculative_config={
            "method": "dflash",
            "model": settings["draft"],
            "num_speculative_tokens": settings["drafts"],
        },
        enable_prefix_caching=False,
        enforce_eager=True,
        disable_log_stats=False,
    )
    prompts = [{"prompt_token_ids": prompt} for prompt in settings["prompts"]]
    sampling = vllm.SamplingParams(temperature=0, max_tokens=settings["max_tokens"])
    answers = [list(output.outputs[0].token_ids) for output in llm.generate(prompts, sampling, use_tqdm=False)]
    counts = {metric.name: metric.value for metric in llm.get_metrics() if hasattr(metric, "value")}
    print(
        json.dumps({"answers": answers, "drafts": counts["vllm:spec_decode_num_drafts"], "version": vllm.__version__})
    )


if __name__ == "__main__":
    main()
