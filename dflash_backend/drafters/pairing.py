"""Whether a drafter was made for a target."""

from __future__ import annotations

from dflash_backend.checkpoints.spec import CheckpointError, TargetSpec
from dflash_backend.config import NGRAM
from dflash_backend.drafters.layer_ids import to_boundary_ids
from dflash_backend.drafters.spec import DraftModelSpec


def check_pair(target: TargetSpec, draft: DraftModelSpec) -> None:
    """Raise `CheckpointError`, with both directories and both numbers, unless the drafter fits the target."""
    reason = _depth_mismatch(target, draft) or _width_mismatch(target, draft) or _vocabulary_mismatch(target, draft)
    if reason:
        raise CheckpointError(f"the drafter in {draft.path} does not fit the target in {target.path}: {reason}")


def short_reach(draft: DraftModelSpec | None, max_model_len: int, looks_up: bool = False) -> str | None:
    """A sentence for the log where the drafter addresses fewer positions than requests of `max_model_len` tokens have;
    None where it reaches as far, or there is none. looks_up: prompt lookup drafts beside it."""
    if draft is None or draft.decoder.max_len >= max_model_len:
        return None
    return (
        f"the drafter in {draft.path} addresses {draft.decoder.max_len} positions (max_position_embeddings and its "
        f"rotary scaling), and requests may have {max_model_len}: from there on they are decoded without drafts"
        + (f", also of prompt lookup, which drafts to the end with draft_model={NGRAM}" if looks_up else "")
    )


def _depth_mismatch(target: TargetSpec, draft: DraftModelSpec) -> str | None:
    num_layers = target.decoder.num_layers
    if draft.num_target_layers not in (None, num_layers):
        return f"it was made for {draft.num_target_layers} target layers, the target has {num_layers}"
    if max(draft.target_layer_ids, default=0) < num_layers:
        return None
    if draft.format == "speculators":
        boundaries = list(to_boundary_ids(draft.target_layer_ids))
        return f"it reads the boundary ids {boundaries}, the target of {num_layers} layers has 1 to {num_layers}"
    return f"it reads target_layer_ids {list(draft.target_layer_ids)}, the target has layers 0 to {num_layers - 1}"


def _width_mismatch(target: TargetSpec, draft: DraftModelSpec) -> str | None:
    own, theirs = draft.decoder.hidden_size, target.decoder.hidden_size
    if draft.target_hidden_size != theirs:
        said = "hidden_size" if draft.target_hidden_size == own else "target_hidden_size"
        return f"{said} is {draft.target_hidden_size}, the target's is {theirs}"
    if own == theirs:
        return None
    missing = [name for name, has in (("embedding", draft.has_embedding), ("LM head", draft.has_lm_head)) if not has]
    if missing:
        return (
            f"hidden_size is {own}, the target's is {theirs}, and the drafter has no {' and no '.join(missing)} of its "
            "own; the target's are of another size"
        )
    return None


def _vocabulary_mismatch(target: TargetSpec, draft: DraftModelSpec) -> str | None:
    if draft.vocab_size != target.vocab_size:
        return f"vocab_size is {draft.vocab_size}, the target's is {target.vocab_size}"
    if draft.draft_vocab_size > target.vocab_size:
        return f"draft_vocab_size is {draft.draft_vocab_size}, more than the target's {target.vocab_size} tokens"
    return draft.mismatch(target)
