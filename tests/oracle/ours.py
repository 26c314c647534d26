"""The same cases through this project's drafter, target and engine."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from dflash_backend import LLM
from dflash_backend.attention.torch_backend import TorchBackend
from dflash_backend.checkpoints import read_target
from dflash_backend.drafters.base import ContextBatch, Drafts, LoadOptions
from dflash_backend.drafters.dflash.drafter import captured_layers
from dflash_backend.drafters.pairing import check_pair
from dflash_backend.drafters.registry import drafter_class, read_draft
from dflash_backend.models import load_target
from dflash_backend.models.ops import LayerOps
from dflash_backend.spec_stats import SpecDecodingStats
from dflash_backend.worker.batch import spans
from tests.models.drafting import KeepsLogits, draft_batch, slots
from tests.oracle import cases
from tests.oracle.cases import Step
from tests.support.paged import BLOCK_SIZE, block_tables, caches, context
from tests.support.tiny_models import save_checkpoint

CPU = torch.device("cpu")
MAX_POSITIONS = 512
REPOSITORY = Path(__file__).parents[2]
DEMO_TARGET, DEMO_DRAFT = REPOSITORY / "demo/pair/target", REPOSITORY / "demo/pair/draft"


def draft_logits(target: Path, draft: Path, features: torch.Tensor, steps: Sequence[Step]) -> list[torch.Tensor]:
    """Logits of each step's drafts, float32 `[k, draft_vocab]`, through `inject` and `propose` over paged KV."""
    return [logits for logits, _ in drafts(target, draft, features, steps)]


def drafts(
    target: Path, draft: Path, features: torch.Tensor, steps: Sequence[Step]
) -> list[tuple[torch.Tensor, list[int]]]:
    """As `draft_logits`, with each step's draft tokens."""
    return [(logits, found.token_ids.tolist()) for logits, found in confident_drafts(target, draft, features, steps)]


@torch.inference_mode()
def confident_drafts(
    target: Path, draft: Path, features: torch.Tensor, steps: Sequence[Step], wants_confidence: bool = False
) -> list[tuple[torch.Tensor, Drafts]]:
    """As `draft_logits`, with what was drafted, and if asked how sure the drafter is of it. A drafter that reads the
    token behind a position is given those of `cases.token_ids`, the anchors among them."""
    target_spec, spec = read_target(target), read_draft(draft)
    check_pair(target_spec, spec)
    options = LoadOptions(MAX_POSITIONS, torch.float32, CPU, lambda name, share: None, LayerOps())
    make = drafter_class(spec).load(spec, options)
    target_model = load_target(target_spec, MAX_POSITIONS, torch.float32, CPU)
    drafter = make(target_model, caches(spec.decoder), TorchBackend(BLOCK_SIZE))
    assert drafter.placeholder_id is not None
    tables, done, found = block_tables(1), np.zeros(1, dtype=np.int64), []
    for step in steps:
        rows, positions = spans(done, np.array([step.num_new]))
        behind = cases.token_ids(int(positions[-1]) + 2)[positions + 1] if drafter.reads_next_tokens else None
        assert behind is None or int(behind[-1]) == step.anchor
        context = ContextBatch(
            features[positions],
            torch.from_numpy(positions),
            slots(tables, rows, positions),
            next_token_ids=behind,
        )
        drafter.inject(context)
        done, k = done + step.num_new, np.array([step.k])
        sampler = KeepsLogits(wants_confidence)
        batch = draft_batch(
            np.array([step.anchor]), done, k, tables, drafter.placeholder_id, drafter.lookahead_base,
            features[done - 1],
        )  # fmt: skip
        proposed = drafter.propose(batch, sampler)
        found.append((sampler.logits, proposed))
    return found


@torch.inference_mode()
def target_features(target: Path, draft: Path, token_ids: torch.Tensor) -> torch.Tensor:
    """What a drafter is given of a sequence, float32 `[n, L * hidden]`."""
    spec = read_target(target)
    model = load_target(spec, MAX_POSITIONS, torch.float32, CPU)
    capture = captured_layers(read_draft(draft), spec.decoder.num_layers)
    paged = context(block_tables(1), [0], [len(token_ids)])
    features = model.forward(token_ids, paged, caches(spec.decoder), capture).features
    assert features is not None
    return features


def demo_prompts() -> list[tuple[str, list[int]]]:
    """A question of each held-out set, and its token ids."""
    from dflash_backend.text.tokenizer import Tokenizer

    tokenizer = Tokenizer.load(DEMO_TARGET)
    found = []
    for name in ("math", "code", "chat"):
        with (REPOSITORY / "demo/held_out" / f"{name}.jsonl").open(encoding="utf-8") as lines:
            row: dict[str, Any] = json.loads(next(lines))
        found.append((name, list(tokenizer.apply_chat_template(row["messages"]))))
    return found


def generate(llm: LLM, prompts: Sequence[list[int]], max_tokens: int) -> list[tuple[list[int], SpecDecodingStats]]:
    """Greedy answers: tokens and counts of each."""
    outputs = llm.generate(list(prompts), [{"max_tokens": max_tokens, "temperature": 0.0}] * len(prompts))
    return [(list(output.token_ids), output.stats.spec_decoding) for output in outputs if output.stats is not None]


def write_zlab(directory: Path, case: str, **changes: Any) -> Path:
    """The drafter of a z-lab case."""
    return save_checkpoint(directory, cases.zlab_config(case) | changes, cases.drafter_tensors())
