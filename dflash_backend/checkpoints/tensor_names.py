"""What a checkpoint's tensors are called here, whatever module they were saved from.

The same weights may lie under `layers.0...`, `model.layers.0...` or `module._orig_mod.model.layers.0...`: a base model,
one with a head, one that was wrapped for training. Everything else knows one name for each: that of a target with a
head, or of a multimodal one where the config has a text part; and for a drafter the name without any prefix.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from dflash_backend.checkpoints.families import FAMILIES, TEXT_PARTS
from dflash_backend.checkpoints.json_reader import JsonReader

SPECULATORS = "speculators_model_type"
EMBEDDING, HEAD = "embed_tokens.weight", "lm_head.weight"
# Modules that a model is wrapped in, which no part of one is called.
WRAPPERS = ("module", "_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module")
# What may come before the name of a part: the model within another.
OUTER = ("model", "language_model", "base_model", "draft_model")
# Parts of the decoder itself; of others a target's names have `model.` at most.
DECODER_PARTS = frozenset(["layers", "embed_tokens", "norm", "rotary_emb"])
# Parts beside the decoder, never within `model.`.
OWN_PARTS = frozenset(["lm_head", "mtp"])
SHOWN = 3


@dataclass(frozen=True)
class NameLayout:
    """How names begin. decoder: those of the decoder's parts. others: those of other parts, but for `OWN_PARTS`. tied:
    the head is the embedding, so that either may be in the files."""

    decoder: str
    others: str
    tied: bool = False


def name_layout(config: JsonReader) -> NameLayout | None:
    """How the tensors of a checkpoint with this `config.json` are called here; None where it says of no model what it
    is. Raises `CheckpointError`."""
    architectures = [TEXT_PARTS.get(name, name) for name in config.strings("architectures")]
    family = next((FAMILIES[name] for name in architectures if name in FAMILIES), None)
    if config.given(SPECULATORS) or (architectures and family is None):
        return NameLayout("", "")
    if family is None:
        return None
    return NameLayout(target_prefix(config), "model.", is_tied(config, family.tied))


def target_prefix(config: JsonReader) -> str:
    """How the names of a target's decoder begin."""
    return "model.language_model." if config.given("text_config") else "model."


def is_tied(config: JsonReader, missing: bool) -> bool:
    """Whether a target's config says that the head is the embedding: as the file says, else as its text part does, else
    `missing`."""
    text = config.object("text_config")
    return config.boolean("tie_word_embeddings", default=text.boolean("tie_word_embeddings", default=missing))


def bare_name(name: str) -> str:
    """A tensor's name without what it was saved from."""
    words = [word for word in name.split(".") if word not in WRAPPERS] or [name]
    while len(words) > 1 and words[0] in OUTER:
        del words[0]
    return ".".join(words)


def name_here(stored: str, layout: NameLayout) -> str:
    """What the tensor is called here that a file calls `stored`."""
    bare = bare_name(stored)
    part = bare.partition(".")[0]
    return ("" if part in OWN_PARTS else layout.decoder if part in DECODER_PARTS else layout.others) + bare


def beginnings(names: Iterable[str]) -> str:
    """How tensors' names begin, up to the first number in each or else three words, the most frequent first, as for an
    error."""
    counts: Counter[str] = Counter()
    for name in names:
        words = name.split(".")
        end = next((i for i, word in enumerate(words) if word.isdigit()), 3)
        counts[".".join(words[:end]) + ("." if end < len(words) else "")] += 1
    shown = ", ".join(f"'{name}'" for name, _ in counts.most_common(SHOWN))
    return shown + (f" and {len(counts) - SHOWN} more" if len(counts) > SHOWN else "")


def stored_name(stored: Mapping[str, str], name: str) -> str:
    """What the files would call the tensor `name`, which they lack: as they call others of its kind. `stored`: what
    they call those that they have, by the names here."""
    bare = bare_name(name)
    kind = name[: len(name) - len(bare)]
    for known, there in stored.items():
        rest = bare_name(known)
        if known[: len(known) - len(rest)] == kind and there.endswith(rest):
            return there[: len(there) - len(rest)] + bare
    return name
