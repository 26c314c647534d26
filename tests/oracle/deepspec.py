"""Runs DeepSpec, the code of the DSpark authors. It is no package: its repository (github.com/deepseek-ai/DeepSpec, at
afdfa7c when the results were written) has to be on `PYTHONPATH`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, DynamicCache

from tests.oracle import cases, dspark_cases
from tests.oracle.cases import Step


class Arguments(dict[str, Any]):
    """What its training scripts pass, as attributes."""

    __getattr__ = dict.__getitem__


class CroppedCache(DynamicCache):
    """The cache as DeepSpec's version of transformers has it: cropped to a length, not by one."""

    def crop(self, max_length: int) -> None:
        super().crop(max_length - self.get_seq_length())


def save_case(case: str, target: Path, directory: Path) -> Path:
    """Have it make the config and the model of a case for a target, and save them."""
    from deepspec.modeling.dspark.qwen3.config import build_draft_config
    from deepspec.modeling.dspark.qwen3.modeling import Qwen3DSparkModel

    fields = dspark_cases.fields(dspark_cases.DEEPSPEC[case])
    arguments = Arguments(
        block_size=dspark_cases.BLOCK_SIZE,
        num_draft_layers=2,
        target_layer_ids=cases.TARGET_LAYER_IDS,
        mask_token_id=cases.MASK_TOKEN_ID,
        num_anchors=4,
        markov_rank=fields["markov_rank"],
        markov_head_type=fields["markov_head_type"],
        confidence_head_alpha=float(fields["enable_confidence_head"]),
        confidence_head_with_markov=fields["confidence_head_with_markov"],
    )
    config = build_draft_config(AutoConfig.from_pretrained(target), arguments)
    config._attn_implementation = "sdpa"
    model = Qwen3DSparkModel(config).float()
    model.load_state_dict(dspark_cases.deepspec_tensors(dspark_cases.DEEPSPEC[case]))
    model.save_pretrained(directory)
    return directory


@torch.inference_mode()
def drafts(draft: Path, case: str, steps: Sequence[Step]) -> list[tuple[torch.Tensor, list[int], torch.Tensor | None]]:
    """The logits that each step's greedy drafts were chosen by, float32 `[k, vocab]`, the drafts, and the confidence
    head's log-odds `[k]`, None without one: its evaluator's steps, with given features and tokens."""
    from deepspec.eval.dspark.draft_ops import build_dspark_proposal, forward_dspark_draft_block
    from deepspec.modeling.dspark.qwen3.modeling import Qwen3DSparkModel

    model = Qwen3DSparkModel.from_pretrained(draft, dtype=torch.float32, attn_implementation="sdpa").eval()
    context = cases.features(case, sum(step.num_new for step in steps))
    cache, found, start = CroppedCache(), [], 0
    for step in steps:
        new, start = context[start : start + step.num_new][None], start + step.num_new
        block = torch.tensor([[step.anchor] + [model.mask_token_id] * (step.k - 1)])
        hidden = forward_dspark_draft_block(
            model,
            draft_input_ids=block,
            position_ids=torch.arange(start + step.k)[None],
            past_key_values_draft=cache,
            target_hidden_states=new,
            start=start,
            block_size=step.k,
        )
        tokens, logits = model.sample_draft_tokens(
            model.compute_logits(hidden), first_prev_token_ids=block[:, 0], hidden_states=hidden
        )
        proposal = build_dspark_proposal(
            model=model,
            draft_input_ids=block,
            block_hidden=hidden,
            block_size=step.k,
            temperature=0.0,
            confidence_threshold=0.0,
        )
        assert torch.equal(proposal.verify_input_ids[:, 1:], tokens)
        confidence = proposal.confidence_logits
        found.append((logits[0], tokens[0].tolist(), None if confidence is None else confidence[0]))
    return found
