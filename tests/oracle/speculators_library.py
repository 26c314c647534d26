"""Runs the library `speculators`: its model, its files and its converter, by `make oracle`."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig, Qwen3Config

from tests.oracle import cases, dflash2_cases, dspark_cases, eagle3_cases
from tests.oracle.cases import SpeculatorsCase
from tests.support.tiny_models import HIDDEN


def build(case: SpeculatorsCase, target: Path) -> Any:
    """The library's DFlash model with the weights of the case, its verifier's embedding and LM head."""
    from speculators.models.dflash import DFlashDraftModel, DFlashSpeculatorConfig

    config = DFlashSpeculatorConfig(
        **_config_fields("dflash", target, case.layer, case.block_size),
        draft_vocab_size=len(cases.DRAFT_VOCAB) if case.small_vocabulary else cases.VOCAB_SIZE,
        sliding_window_non_causal=case.non_causal,
    )
    model = DFlashDraftModel(config=config)
    if case.small_vocabulary:
        maps = cases.vocabulary_maps()
        model.load_vocab_mappings(maps["t2d"], maps["d2t"])
    model.load_state_dict(cases.drafter_tensors(), strict=False)
    model.load_verifier_weights()
    return model.float().eval()


def build_dflash2(case: str, target: Path) -> Any:
    """The library's DFlash2 model of a case of `dflash2_cases.SPECULATORS`."""
    from speculators.models.dflash2 import DFlash2DraftModel, DFlash2SpeculatorConfig

    fields = _config_fields("dflash2", target, dflash2_cases.SPECULATORS[case], dflash2_cases.BLOCK_SIZE)
    config = DFlash2SpeculatorConfig(**fields, draft_vocab_size=cases.VOCAB_SIZE, **dflash2_cases.OWN)
    model = DFlash2DraftModel(config=config)
    model.load_state_dict(dflash2_cases.tensors(), strict=False)
    model.load_verifier_weights()
    return model.float().eval()


def build_dspark(name: str, target: Path) -> Any:
    """The library's DSpark model of a case of `dspark_cases.SPECULATORS`."""
    from speculators.models.dspark import DSparkDraftModel, DSparkSpeculatorConfig

    case = dspark_cases.SPECULATORS[name]
    k, small = dspark_cases.num_drafts(case), case.get("small_vocabulary", False)
    config = DSparkSpeculatorConfig(
        **_config_fields("dspark", target, {}, dspark_cases.BLOCK_SIZE, k),
        draft_vocab_size=len(cases.DRAFT_VOCAB) if small else cases.VOCAB_SIZE,
        sample_from_anchor=case.get("from_anchor", True),
        **dspark_cases.fields(case),
    )
    model = DSparkDraftModel(config=config)
    if small:
        maps = cases.vocabulary_maps()
        model.load_vocab_mappings(maps["t2d"], maps["d2t"])
    model.load_state_dict(dspark_cases.tensors(case), strict=False)
    model.load_verifier_weights()
    return model.float().eval()


def build_eagle3(name: str, target: Path) -> Any:
    """The library's EAGLE-3 model of a case of `eagle3_cases.SPECULATORS`."""
    from speculators.config import SpeculatorsConfig, VerifierConfig
    from speculators.models.eagle3 import Eagle3DraftModel, Eagle3SpeculatorConfig
    from speculators.proposals.greedy import GreedyTokenProposalConfig

    kind = {"llama": LlamaConfig, "qwen3": Qwen3Config}[eagle3_cases.SPECULATORS[name]["kind"]]
    shape = cases.drafter_config() | {"num_hidden_layers": 1}
    decoder = kind(**{field: value for field, value in shape.items() if field != "model_type"})
    decoder._attn_implementation = "sdpa"
    small = eagle3_cases.is_small(name)
    config = Eagle3SpeculatorConfig(
        transformer_layer_config=decoder,
        draft_vocab_size=len(cases.DRAFT_VOCAB) if small else cases.VOCAB_SIZE,
        eagle_aux_hidden_state_layer_ids=eagle3_cases.BOUNDARY_IDS,
        speculators_config=SpeculatorsConfig(
            algorithm="eagle3",
            proposal_methods=[GreedyTokenProposalConfig(speculative_tokens=eagle3_cases.K)],
            default_proposal_method="greedy",
            verifier=VerifierConfig(name_or_path=str(target), architectures=["Qwen3ForCausalLM"]),
        ),
        **eagle3_cases.fields(name),
    )
    model = Eagle3DraftModel(config=config)
    if small:
        maps = cases.vocabulary_maps()
        model.load_vocab_mappings(maps["t2d"], maps["d2t"])
    missing = model.load_state_dict(eagle3_cases.tensors(name), strict=False)
    assert not missing.unexpected_keys
    model.load_verifier_weights()
    return model.float().eval()


@torch.inference_mode()
def eagle3_drafts(model: Any, name: str, lengths: Sequence[int]) -> list[tuple[torch.Tensor, list[int]]]:
    """At each context length of one sequence the logits of k drafts, float32 `[k, draft_vocab]`, and the drafts.

    The library runs all passes over a whole sequence, as in training: pass s takes for each position the token s places
    behind its own, which must be known. Here those behind the last context position are the drafts, one more each time.
    """
    k, found = eagle3_cases.K, []
    captured: list[torch.Tensor] = []
    hook = model.lm_head.register_forward_hook(lambda module, inputs, output: captured.append(output))
    for n in lengths:
        features = torch.zeros(n + k - 1, len(cases.TARGET_LAYER_IDS) * HIDDEN)
        features[:n] = cases.features(name, n)
        tokens = torch.zeros(n + k - 1, dtype=torch.int64)
        tokens[:n] = cases.token_ids(n + 1)[1:]
        drafts: list[int] = []
        for number in range(k):
            captured.clear()
            model(features[None], tokens[None], torch.zeros(1, n + k - 1, dtype=torch.int64), ttt_steps=number + 1)
            chosen = int(captured[-1][0, n - 1].argmax())
            drafts.append(chosen if model.d2t is None else chosen + int(model.d2t[chosen]))
            if number + 1 < k:
                tokens[n + number] = drafts[-1]
        found.append((torch.stack([logits[0, n - 1] for logits in captured]).clone(), drafts))
    hook.remove()
    return found


def _config_fields(
    algorithm: str, target: Path, layer: dict[str, Any], block_size: int, k: int | None = None
) -> dict[str, Any]:
    """What the configs of all methods have, with these fields of the decoder's own. k: by default one less than the
    block has places."""
    from speculators.config import SpeculatorsConfig, VerifierConfig
    from speculators.proposals.greedy import GreedyTokenProposalConfig

    decoder = Qwen3Config(**{k: v for k, v in cases.drafter_config().items() if k != "model_type"}, **layer)
    decoder._attn_implementation = "eager"
    return {
        "transformer_layer_config": decoder,
        "block_size": block_size,
        "aux_hidden_state_layer_ids": [i + 1 for i in cases.TARGET_LAYER_IDS],
        "mask_token_id": cases.MASK_TOKEN_ID,
        "speculators_config": SpeculatorsConfig(
            algorithm=algorithm,
            proposal_methods=[GreedyTokenProposalConfig(speculative_tokens=k or block_size - 1)],
            default_proposal_method="greedy",
            verifier=VerifierConfig(name_or_path=str(target), architectures=["Qwen3ForCausalLM"]),
        ),
    }


def draft_logits(model: Any, name: str, anchors: tuple[int, ...], num_tokens: int) -> torch.Tensor:
    """Logits of the masks of the block at each anchor of one sequence, float32 `[anchors, block - 1, draft_vocab]`."""
    return _run_blocks(model, name, anchors, num_tokens)[1]


@torch.inference_mode()
def dflash2_drafts(
    model: Any, name: str, anchors: tuple[int, ...], num_tokens: int
) -> tuple[torch.Tensor, list[list[int]]]:
    """As `draft_logits`, and the greedy drafts of each block: the library selects for one predecessor at a time."""
    hidden, logits = _run_blocks(model, name, anchors, num_tokens)
    previous, path = cases.token_ids(num_tokens)[list(anchors)], []
    for i in range(logits.shape[1]):
        candidates, scores = model.candidate_selector.select(logits[:, i], hidden[:, i], previous)
        previous = candidates.gather(-1, scores.argmax(dim=-1, keepdim=True))[:, 0]
        path.append(previous)
    return logits, torch.stack(path, dim=1).tolist()


@torch.inference_mode()
def dspark_drafts(
    model: Any, name: str, anchors: tuple[int, ...], num_tokens: int
) -> tuple[torch.Tensor, list[list[int]], torch.Tensor]:
    """The logits that each block's greedy drafts were chosen by, `[anchors, k, draft_vocab]`, the drafts, and the
    confidence head's log-odds `[anchors, k]`.

    The library computes the biases of a whole block, of which each token before is known, as in training; here the
    tokens before are the drafts, one more each time.
    """
    hidden, logits = _all_blocks(model, name, anchors, num_tokens)
    first = 0 if model.config.sample_from_anchor else 1
    previous = cases.token_ids(num_tokens)[list(anchors)][:, None].repeat(1, model.block_size)
    tokens = []
    for place in range(first, model.block_size):
        biased = logits + model.markov_head.block_bias(prev_token_ids=previous, hidden_states=hidden)
        chosen = biased[:, place].argmax(dim=-1)
        tokens.append(chosen if model.d2t is None else chosen + model.d2t[chosen])
        if place + 1 < model.block_size:
            previous[:, place + 1] = tokens[-1]
    features = torch.cat([hidden, model.markov_head.prev_embeddings(previous)], dim=-1)
    return biased[:, first:], torch.stack(tokens, dim=1).tolist(), model.confidence_head(features)[:, first:]


def _run_blocks(model: Any, name: str, anchors: tuple[int, ...], num_tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Final-normed outputs and logits of the masks of each block."""
    hidden, logits = _all_blocks(model, name, anchors, num_tokens)
    return hidden[:, 1:], logits[:, 1:]


@torch.inference_mode()
def _all_blocks(model: Any, name: str, anchors: tuple[int, ...], num_tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Final-normed outputs and logits of the queries of each block."""
    ids = cases.token_ids(num_tokens)
    loss_mask = torch.zeros(1, num_tokens)
    loss_mask[0, list(anchors)] = 1
    hidden, logits, *_ = model._backbone_forward(
        cases.features(name, num_tokens)[None],
        ids[None],
        loss_mask,
        torch.zeros(1, num_tokens, HIDDEN),
        torch.zeros(1, num_tokens, dtype=torch.long),
        max_anchors=len(anchors),
    )
    blocks = (each.view(len(anchors), model.block_size, -1).float() for each in (hidden, logits))
    return next(blocks), next(blocks)


def config_of(directory: Path) -> dict[str, Any]:
    """The config that the library saved."""
    return json.loads((directory / "config.json").read_text(encoding="utf-8"))


def convert(draft: Path, target: Path, out: Path) -> Path:
    """Have the library's converter write a z-lab drafter in its own format."""
    from speculators.convert.dflash.converter import DFlashConverter

    DFlashConverter().convert(draft, out, str(target), validate=False)
    return out
