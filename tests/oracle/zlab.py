"""Runs the DFlash authors' own code: the package `dflash`, by `make oracle`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM

from tests.oracle.cases import Step, features


def load_pair(target: Path, draft: Path) -> tuple[Any, Any]:
    """The target of `transformers`, and the authors' drafter."""
    from dflash.model import DFlash2DraftModel, DFlashDraftModel

    model = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32).eval()
    config = AutoConfig.from_pretrained(draft)
    if config.architectures == [DFlash2DraftModel.__name__]:
        return model, DFlash2DraftModel.from_pretrained(draft, dtype=torch.float32).eval()
    drafter = DFlashDraftModel(config).eval()
    drafter.load_state_dict({name: tensor.float() for name, tensor in load_file(draft / "model.safetensors").items()})
    return model, drafter


def draft_logits(target: Path, draft: Path, case: str, steps: Sequence[Step]) -> list[torch.Tensor]:
    """Logits of each step's drafts, float32 `[k, vocab]`: the loop of `dflash_generate`, with given features in place
    of the target's and given tokens accepted."""
    return [logits for logits, _ in drafts(target, draft, case, steps)]


@torch.inference_mode()
def drafts(target: Path, draft: Path, case: str, steps: Sequence[Step]) -> list[tuple[torch.Tensor, list[int]]]:
    """As `draft_logits`, with each step's greedy draft tokens."""
    from dflash.model import DFlash2DraftModel, _crop_to, _draft_value, _make_cache, _output_head, _raw_input_embeddings

    model, drafter = load_pair(target, draft)
    cache = _make_cache(drafter.config)
    context = features(case, sum(step.num_new for step in steps))
    found, start = [], 0
    for step in steps:
        new = context[start : start + step.num_new][None]
        start += step.num_new
        block = torch.tensor([[step.anchor] + [drafter.mask_token_id] * step.k])
        scale = float(_draft_value(drafter.config, "input_embedding_scale", 1.0))
        hidden = drafter(
            target_hidden=new,
            noise_embedding=_raw_input_embeddings(model, block, scale),
            position_ids=torch.arange(start - step.num_new, start + 1 + step.k)[None],
            past_key_values=cache,
            use_cache=True,
        )[:, -step.k :]
        _crop_to(cache, start)
        logits = drafter.compute_logits(hidden, _output_head(model))
        tokens = logits.argmax(dim=-1)
        if isinstance(drafter, DFlash2DraftModel):
            tokens, *_ = drafter.propose(hidden, block[:, 0], _output_head(model), 0.0)
        found.append((logits[0], tokens[0].tolist()))
    return found


@torch.inference_mode()
def target_features(target: Path, token_ids: torch.Tensor, layer_ids: list[int]) -> torch.Tensor:
    """What the authors' drafter is given of a sequence, float32 `[n, L * hidden]`."""
    from dflash.model import extract_context_feature

    model = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32).eval()
    states = model(token_ids[None], output_hidden_states=True).hidden_states
    return extract_context_feature(states, layer_ids)[0]


def generate(target: Path, draft: Path, prompt: list[int], stop: list[int], max_new_tokens: int) -> dict[str, Any]:
    """`dflash_generate`, greedy: the new tokens, and how many each step gave."""
    from dflash import model as zlab

    model, drafter = load_pair(target, draft)
    clock = zlab._cuda_time
    zlab._cuda_time = lambda: 0.0  # there is no GPU to wait for
    try:
        found = zlab.dflash_generate(drafter, model, torch.tensor([prompt]), max_new_tokens, stop, return_stats=True)
    finally:
        zlab._cuda_time = clock
    return {"tokens": found.output_ids[0, len(prompt) :].tolist(), "acceptance_lengths": found.acceptance_lengths}
