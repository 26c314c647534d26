"""The drafts of a drafter as its training module computes them, without a KV cache; serving is held
against them."""

from collections.abc import Sequence

import torch
from torch import Tensor

from dflash_backend.training.dflash2 import DFlash2DraftModel
from dflash_backend.training.dspark import DSparkDraftModel
from dflash_backend.training.eagle3 import Eagle3DraftModel, Passes
from dflash_backend.training.loss import head_logits
from dflash_backend.training.network import DraftModel, Tables


def propose(draft: DraftModel, tables: Tables, features: Tensor, tokens: Sequence[int]) -> list[int]:
    """The drafts behind the last of `tokens`, before which features `[1, length, layers * hidden]` are known."""
    anchors, anchor = torch.tensor([[features.shape[1]]]), tokens[-1]
    if isinstance(draft, Eagle3DraftModel):
        passes = Passes(draft, tables, features, torch.tensor([tokens[1:]]), anchors)
        return _passes(passes, tables, anchor, draft.config.num_drafts)
    # DSpark's anchor gives the first draft.
    first, masks = (0, draft.config.num_drafts - 1) if isinstance(draft, DSparkDraftModel) else (1, None)
    hidden = draft.outputs(tables, features, anchors, torch.tensor([[anchor]]), masks)[0, 0, first:]
    logits = head_logits(hidden, tables.head)
    if isinstance(draft, DSparkDraftModel):
        return _biased_walk(draft, logits, anchor)
    if isinstance(draft, DFlash2DraftModel):
        return _selected_walk(draft, logits, hidden, anchor)
    return logits.argmax(-1).tolist()


def _passes(passes: Passes, tables: Tables, anchor: int, count: int) -> list[int]:
    """A pass for each draft, with the one before it."""
    tokens = [anchor]
    for _ in range(count):
        tokens.append(int(head_logits(passes.run(torch.tensor([tokens[-1:]])), tables.head).argmax()))
    return tokens[1:]


def _biased_walk(draft: DSparkDraftModel, logits: Tensor, anchor: int) -> list[int]:
    """A walk from the anchor: each draft's logits and the bias of the token before it."""
    tokens = [anchor]
    for own in logits:
        bias = draft.markov_head.markov_w2(draft.markov_head.markov_w1.weight[tokens[-1]])
        tokens.append(int((own + bias).argmax()))
    return tokens[1:]


def _selected_walk(draft: DFlash2DraftModel, logits: Tensor, hidden: Tensor, anchor: int) -> list[int]:
    """A walk from the anchor: the candidate with the largest sum of its logit and its edge."""
    tokens, previous = [], torch.tensor(anchor)
    values, candidates = logits.topk(draft.config.selector_top_k, dim=-1)
    for i in range(len(logits)):
        scores = values[i] + draft.candidate_selector(hidden[i], previous, candidates[i])
        previous = candidates[i, scores.argmax()]
        tokens.append(int(previous))
    return tokens
