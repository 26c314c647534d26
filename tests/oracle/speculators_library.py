"""Runs the library `speculators`: its model, its files and its converter, by `make oracle`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from transformers import Qwen3Config

from tests.oracle import cases
from tests.oracle.cases import SpeculatorsCase
from tests.tiny_models import HIDDEN


def build(case: SpeculatorsCase, target: Path) -> Any:
    """The library's DFlash model with the weights of the case, its verifier's embedding and LM head."""
    from speculators.config import SpeculatorsConfig, VerifierConfig
    from speculators.models.dflash import DFlashDraftModel, DFlashSpeculatorConfig
    from speculators.proposals.greedy import GreedyTokenProposalConfig

    layer = Qwen3Config(**{k: v for k, v in cases.drafter_config().items() if k != "model_type"}, **case.layer)
    layer._attn_implementation = "eager"
    config = DFlashSpeculatorConfig(
        transformer_layer_config=layer,
        draft_vocab_size=len(cases.DRAFT_VOCAB) if case.small_vocabulary else cases.VOCAB_SIZE,
        block_size=case.block_size,
        aux_hidden_state_layer_ids=[i + 1 for i in cases.TARGET_LAYER_IDS],
        mask_token_id=cases.MASK_TOKEN_ID,
        sliding_window_non_causal=case.non_causal,
        speculators_config=SpeculatorsConfig(
            algorithm="dflash",
            proposal_methods=[GreedyTokenProposalConfig(speculative_tokens=case.block_size - 1)],
            default_proposal_method="greedy",
            verifier=VerifierConfig(name_or_path=str(target), architectures=["Qwen3ForCausalLM"]),
        ),
    )
    model = DFlashDraftModel(config=config)
    if case.small_vocabulary:
        maps = cases.vocabulary_maps()
        model.load_vocab_mappings(maps["t2d"], maps["d2t"])
    model.load_state_dict(cases.drafter_tensors(), strict=False)
    model.load_verifier_weights()
    return model.float().eval()


@torch.inference_mode()
def draft_logits(model: Any, name: str, anchors: tuple[int, ...], num_tokens: int) -> torch.Tensor:
    """Logits of the masks of the block at each anchor of one sequence, float32 `[anchors, block - 1, draft_vocab]`."""
    ids = cases.token_ids(num_tokens)
    loss_mask = torch.zeros(1, num_tokens)
    loss_mask[0, list(anchors)] = 1
    _, logits, *_ = model._backbone_forward(
        cases.features(name, num_tokens)[None],
        ids[None],
        loss_mask,
        torch.zeros(1, num_tokens, HIDDEN),
        torch.zeros(1, num_tokens, dtype=torch.long),
        max_anchors=len(anchors),
    )
    return logits.view(len(anchors), model.block_size, -1)[:, 1:].float()


def config_of(directory: Path) -> dict[str, Any]:
    """The config that the library saved."""
    return json.loads((directory / "config.json").read_text(encoding="utf-8"))


def convert(draft: Path, target: Path, out: Path) -> Path:
    """Have the library's converter write a z-lab drafter in its own format."""
    from speculators.convert.dflash.converter import DFlashConverter

    DFlashConverter().convert(draft, out, str(target), validate=False)
    return out
