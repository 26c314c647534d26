"""How the demo saves a drafter of each kind, and how the sizes of a saved one are read."""

from typing import Any

from demo.data import SPECIAL_TOKEN_IDS
from demo.model import PairConfig
from dflash_backend.training.formats import ARCHITECTURES, KINDS, SPECULATORS, ZLAB, Naming, config_fields
from dflash_backend.training.network import DSPARK, EAGLE3, Shape

Fields = dict[str, Any]

SPECIAL = {
    "bos_token_id": SPECIAL_TOKEN_IDS["<|endoftext|>"],
    "eos_token_id": SPECIAL_TOKEN_IDS["<|im_end|>"],
    "pad_token_id": SPECIAL_TOKEN_IDS["<|endoftext|>"],
}
SAVED = {architecture: kind for kind, architecture in {**ARCHITECTURES, EAGLE3: "Eagle3DraftModel"}.items()}
"""The kind of each architecture: EAGLE-3 is saved as speculators does, the others as their authors do."""
OWN_SIZES = ("conv_group_size", "selector_rank", "selector_top_k", "markov_rank")


def draft_fields(config: PairConfig) -> Fields:
    """The `config.json` of a drafter."""
    form = SPECULATORS if config.drafter == EAGLE3 else ZLAB
    return config_fields(config, form, Naming(special=SPECIAL))


def kind_of(fields: Fields) -> str:
    """The kind of a saved drafter, by its `config.json`. Raises `ValueError`."""
    (architecture,) = fields["architectures"]
    if architecture not in SAVED:
        raise ValueError(f"the demo has no drafter of the architecture {fields['architectures']}")
    return SAVED[architecture]


def read_config(fields: Fields) -> PairConfig:
    """The sizes in a drafter's `config.json`, of a pair whose target has the demo's number of layers where it does not
    say it."""
    drafter = kind_of(fields)
    decoder: Fields = fields.get("transformer_layer_config", fields)
    inner: Fields = fields.get("dflash_config", fields)
    own = {name: inner[name] for name in OWN_SIZES if name in inner}
    layer_ids: list[int] = inner.get("target_layer_ids", [])
    if drafter == EAGLE3:
        layer_ids = [i - 1 for i in fields["eagle_aux_hidden_state_layer_ids"]]
        own["eagle_drafts"] = fields["speculators_config"]["proposal_methods"][0]["speculative_tokens"]
    else:
        own["block_size"] = fields["block_size"] + (drafter == DSPARK)
        own["target_layers"] = fields["num_target_layers"]
        own["draft_layers"] = fields["num_hidden_layers"]
    shape = {name: decoder[name] for name in Shape.__dataclass_fields__ if name in decoder}
    return PairConfig(shape=Shape(**shape), target_layer_ids=tuple(layer_ids), drafter=drafter, **own)


__all__ = ["KINDS", "SPECIAL", "draft_fields", "read_config"]
