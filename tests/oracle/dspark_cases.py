"""The DSpark checkpoints that both sides run, as `cases` has those of DFlash."""

from __future__ import annotations

from typing import Any

import torch

from tests.oracle import cases
from tests.oracle.cases import Step, hashed
from tests.support.tiny_models import HIDDEN

BLOCK_SIZE = 7
RANK = 8

# The Markov head of a case, and whether it has a confidence head that reads the token before. The last is what DeepSpec
# saves as DFlash.
DEEPSPEC: dict[str, dict[str, Any]] = {
    "vanilla": {"kind": "vanilla"},
    "gated": {"kind": "gated"},
    "recurrent": {"kind": "rnn"},
    "confidence of the output alone": {"kind": "gated", "reads_markov": False},
    "no heads": {"rank": 0, "confidence": False},
}
# A prompt, then four accepted tokens and one more, then a whole block; the last block is a shorter one.
STEPS = (Step(21, 5, 7), Step(5, 17, 7), Step(8, 40, 4))
# The steps and the anchors whose logits are kept; of all others only the drafts and how sure the drafter is of them.
KEPT_STEPS = (1, 2)
KEPT_ANCHORS = [0, 2]

SPECULATORS: dict[str, dict[str, Any]] = {
    "vanilla": {"kind": "vanilla"},
    "gated, cut vocabulary": {"kind": "gated", "small_vocabulary": True},
    "recurrent, cut vocabulary": {"kind": "rnn", "small_vocabulary": True},
    "recurrent": {"kind": "rnn"},
    "vanilla, masks alone": {"kind": "vanilla", "from_anchor": False},
    "recurrent, masks alone": {"kind": "rnn", "from_anchor": False, "small_vocabulary": True},
}


def num_drafts(case: dict[str, Any]) -> int:
    """Drafts of a whole block."""
    return BLOCK_SIZE if case.get("from_anchor", True) else BLOCK_SIZE - 1


def fields(case: dict[str, Any]) -> dict[str, Any]:
    """The fields of its heads."""
    rank = case.get("rank", RANK)
    return {
        "markov_rank": rank,
        "markov_head_type": case.get("kind", "vanilla"),
        "enable_confidence_head": case.get("confidence", True),
        "confidence_head_with_markov": case.get("confidence", True) and case.get("reads_markov", True),
    }


def tensors(case: dict[str, Any]) -> dict[str, torch.Tensor]:
    """A drafter's tensors, without embedding and LM head."""
    rank, kind = case.get("rank", RANK), case.get("kind", "vanilla")
    own = {}
    if rank:
        draft_vocab = len(cases.DRAFT_VOCAB) if case.get("small_vocabulary") else cases.VOCAB_SIZE
        own["markov_head.markov_w1.weight"] = hashed("markov first", (cases.VOCAB_SIZE, rank), 1.0)
        own["markov_head.markov_w2.weight"] = hashed("markov second", (draft_vocab, rank), 1.5)
        if kind == "gated":
            own["markov_head.gate_proj.weight"] = hashed("gate", (rank, HIDDEN + rank), 0.5)
            own["markov_head.gate_proj.bias"] = hashed("gate bias", (rank,), 0.5)
        if kind == "rnn":
            own["markov_head.joint_proj.weight"] = hashed("joint", (3 * rank, 2 * rank + HIDDEN), 0.5)
            own["markov_head.joint_proj.bias"] = hashed("joint bias", (3 * rank,), 0.5)
    if case.get("confidence", True):
        width = HIDDEN + (rank if case.get("reads_markov", True) else 0)
        own["confidence_head.proj.weight"] = hashed("confidence", (1, width), 0.4)
        own["confidence_head.proj.bias"] = hashed("confidence bias", (1,), 0.5)
    return cases.drafter_tensors() | own


def deepspec_tensors(case: dict[str, Any]) -> dict[str, torch.Tensor]:
    """As `tensors`, with the target's embedding and LM head, which DeepSpec saves as well."""
    return tensors(case) | {
        "embed_tokens.weight": hashed("embed", (cases.VOCAB_SIZE, HIDDEN), 1.0),
        "lm_head.weight": hashed("head", (cases.VOCAB_SIZE, HIDDEN), 0.5),
    }


def speculators_tensors(case: dict[str, Any]) -> dict[str, torch.Tensor]:
    """As `tensors`, with the maps of a cut vocabulary and its rows of the target's LM head, as the library saves it."""
    found = tensors(case)
    if case.get("small_vocabulary"):
        found |= cases.vocabulary_maps()
        found["lm_head.weight"] = hashed("head", (cases.VOCAB_SIZE, HIDDEN), 0.5)[cases.DRAFT_VOCAB]
    return found
