"""What a drafter is and how its checkpoint was read, in words."""

from __future__ import annotations

from dflash_backend.checkpoints.describe import Facts, decoder_facts, file_facts, runs, warnings
from dflash_backend.drafters.layer_ids import to_boundary_ids
from dflash_backend.drafters.spec import DraftModelSpec, DraftSpec

UNKNOWN = "its own or the target's: only the weights say it"


def draft_facts(spec: DraftSpec, dtype: str = "") -> Facts:
    """Label and text of what is known of a drafter. dtype: what it is loaded in, if not in its own. Raises
    `CheckpointError` when its files are gone."""
    if not isinstance(spec, DraftModelSpec):
        return spec.facts()
    return [
        ("config" if spec.config_alone else "directory", str(spec.path)),
        ("method", spec.kind),
        ("format", spec.format),
        ("made for", _made_for(spec)),
        *decoder_facts(spec.decoder),
        ("causality", runs(["causal" if causal else "not causal" for causal in spec.causal])),
        ("features", _features(spec)),
        ("speculative tokens", f"{spec.num_speculative_tokens}, as the checkpoint asks"),
        ("vocabulary", _vocabulary(spec)),
        ("embedding", _embedding(spec)),
        ("LM head", _lm_head(spec)),
        *spec.facts(),
        *([("weights", f"{spec.dtype}; not read")] if spec.config_alone else file_facts(spec.path, spec.dtype, dtype)),
        *warnings(spec.notes),
    ]


def _made_for(spec: DraftModelSpec) -> str:
    layers = f"a target of {spec.num_target_layers} layers" if spec.num_target_layers else "a target"
    width = f"hidden size {spec.target_hidden_size}"
    return f"{spec.target_name or layers}, {width}, {spec.vocab_size} tokens"


def _features(spec: DraftModelSpec) -> str:
    if not spec.target_layer_ids:
        return "of the target's layers that the method takes by default, as the checkpoint names none"
    boundaries = list(to_boundary_ids(spec.target_layer_ids))
    last = "; the last layer's after the final norm" if spec.normed_last_layer else ""
    return f"layer ids {list(spec.target_layer_ids)} of the target, which are boundary ids {boundaries}{last}"


def _embedding(spec: DraftModelSpec) -> str:
    if spec.config_alone:
        return UNKNOWN
    if spec.has_embedding:
        return "its own"
    scaled = "scaled where the target's first layer scales it"
    return f"the target's, {scaled if spec.scales_embedding else 'its rows as they are stored'}"


def _lm_head(spec: DraftModelSpec) -> str:
    if spec.config_alone:
        return UNKNOWN
    if spec.has_lm_head:
        return "its own"
    return f"the target's, {spec.draft_vocab_size} rows of it" if spec.maps_vocabulary else "the target's"


def _vocabulary(spec: DraftModelSpec) -> str:
    if spec.maps_vocabulary:
        return f"proposes {spec.draft_vocab_size} of {spec.vocab_size} tokens, mapped by d2t"
    return f"all {spec.vocab_size} tokens"
