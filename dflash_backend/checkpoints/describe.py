"""What a checkpoint is and how it was read, in words: for the server's log at load and for `dflash-triton inspect`.

A misread checkpoint only shows as lower acceptance, so everything that could be read otherwise is said.
"""

from __future__ import annotations

from itertools import groupby
from pathlib import Path

from dflash_backend.checkpoints.files import code_files, weight_files
from dflash_backend.checkpoints.json_reader import JsonReader
from dflash_backend.checkpoints.layer_ids import to_boundary_ids
from dflash_backend.checkpoints.rope import rope_in_words
from dflash_backend.checkpoints.spec import DecoderSpec, DraftSpec, TargetSpec

Facts = list[tuple[str, str]]


def target_facts(spec: TargetSpec) -> Facts:
    """Label and text of what was read of a target. Raises `CheckpointError` when its files are gone."""
    embeddings = "tied: the LM head is the embedding" if spec.tie_word_embeddings else "embedding and LM head apart"
    ends = ", ".join(map(str, spec.eos_token_ids)) or "none"
    return [
        ("directory", str(spec.path)),
        ("architecture", spec.architecture),
        *_decoder_facts(spec.decoder),
        ("vocabulary", f"{spec.vocab_size} tokens, {embeddings}"),
        ("end of sequence", ends),
        *_file_facts(spec.path, spec.dtype),
    ]


def draft_facts(spec: DraftSpec) -> Facts:
    """Label and text of what was read of a drafter. Raises `CheckpointError` when its files are gone."""
    return [
        ("directory", str(spec.path)),
        ("format", spec.format),
        ("made for", _made_for(spec)),
        *_decoder_facts(spec.decoder),
        ("causality", _runs(["causal" if causal else "not causal" for causal in spec.causal])),
        ("features", _features(spec)),
        ("block", f"{spec.block_size} places: the anchor and up to {spec.max_speculative_tokens} drafts"),
        ("speculative tokens", f"{spec.num_speculative_tokens}, as the checkpoint asks"),
        ("vocabulary", _vocabulary(spec)),
        ("embedding", "its own" if spec.has_embedding else "the target's"),
        ("LM head", _lm_head(spec)),
        ("mask token", _mask_token(spec)),
        *_scale_facts(spec),
        *_file_facts(spec.path, spec.dtype),
        # Each with a label of its own, as facts become an object in JSON.
        *((f"warning {i}" if i > 1 else "warning", note) for i, note in enumerate(spec.notes, 1)),
    ]


def _decoder_facts(decoder: DecoderSpec) -> Facts:
    biases = [name for name, has in (("attention", decoder.output_bias), ("MLP", decoder.mlp_bias)) if has]
    facts = [
        ("layers", str(decoder.num_layers)),
        ("hidden size", f"{decoder.hidden_size}, MLP {decoder.intermediate_size}"),
        (
            "heads",
            f"{decoder.num_heads} for queries, {decoder.num_kv_heads} for keys and values, of size {decoder.head_dim}",
        ),
        ("rotary embedding", rope_in_words(decoder.rope)),
        ("positions", str(decoder.max_len)),
        ("attention", _runs([f"window of {w}" if w else "full" for w in decoder.sliding_windows])),
    ]
    if biases:
        facts.append(("biases", " and ".join(biases)))
    if decoder.moe is not None:
        moe = decoder.moe
        facts.append(
            (
                "experts",
                f"{moe.num_experts} of size {moe.intermediate_size}, {moe.experts_per_token} for a token, in "
                f"{sum(moe.sparse_layers)} of {decoder.num_layers} layers; weights "
                + ("scaled to sum to 1" if moe.norm_topk_prob else "as the router gives them"),
            )
        )
    return facts


def _file_facts(directory: Path, dtype: str) -> Facts:
    size = weight_bytes(directory)
    facts = [("weights", f"{dtype}, {size / 1024**2:.1f} MiB on disk")]
    code = code_files(directory)
    if JsonReader.load(directory / "config.json").given("auto_map") or code:
        facts.append(("code", f"{', '.join(code) or 'named by auto_map'}: never run, and not needed"))
    return facts


def weight_bytes(directory: Path) -> int:
    """Size of a checkpoint's weights on disk, in bytes."""
    return sum(file.stat().st_size for file in weight_files(directory))


def _made_for(spec: DraftSpec) -> str:
    layers = f"a target of {spec.num_target_layers} layers" if spec.num_target_layers else "a target"
    width = f"hidden size {spec.target_hidden_size}"
    return f"{spec.target_name or layers}, {width}, {spec.vocab_size} tokens"


def _features(spec: DraftSpec) -> str:
    boundaries = list(to_boundary_ids(spec.target_layer_ids))
    last = "; the last layer's after the final norm" if spec.normed_last_layer else ""
    return f"layer ids {list(spec.target_layer_ids)} of the target, which are boundary ids {boundaries}{last}"


def _lm_head(spec: DraftSpec) -> str:
    if spec.has_lm_head:
        return "its own"
    return f"the target's, {spec.draft_vocab_size} rows of it" if spec.maps_vocabulary else "the target's"


def _scale_facts(spec: DraftSpec) -> Facts:
    """What the checkpoint asks for beyond plain DFlash."""
    facts = []
    if spec.input_embedding_scale != 1:
        facts.append(("input embedding scale", f"{spec.input_embedding_scale:g}"))
    form = spec.logits
    steps = [f"times {form.multiplier:g}"] if form.multiplier != 1 else []
    steps += [f"soft-capped at {form.softcap:g}"] if form.softcap is not None else []
    steps += [f"times {form.scale:g}"] if form.scale != 1 else []
    return facts + ([("logits", ", then ".join(steps))] if steps else [])


def _vocabulary(spec: DraftSpec) -> str:
    if spec.maps_vocabulary:
        return f"proposes {spec.draft_vocab_size} of {spec.vocab_size} tokens, mapped by d2t"
    return f"all {spec.vocab_size} tokens"


def _mask_token(spec: DraftSpec) -> str:
    if spec.has_mask_embedding:
        return f"{spec.mask_token_id}, with an embedding of its own (mask_embedding.pt)"
    return str(spec.mask_token_id)


def _runs(words: list[str]) -> str:
    """`a in layers 0-3, b in layer 4`; `a in all layers` where they agree."""
    if len(set(words)) == 1:
        return f"{words[0]} in all layers"
    parts = []
    first = 0
    for word, group in groupby(words):
        last = first + len(list(group)) - 1
        parts.append(f"{word} in " + (f"layer {first}" if first == last else f"layers {first}-{last}"))
        first = last + 1
    return ", ".join(parts)
