"""The kinds of drafter: what each is called in a checkpoint, its own fields there, and its module."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from demo.dflash2 import TAPS, DFlash2DraftModel
from demo.dspark import DSparkDraftModel
from demo.eagle3 import Eagle3DraftModel
from demo.model import DFLASH, DFLASH2, DSPARK, EAGLE3, MASK_TOKEN, DraftModel, PairConfig, Shape

Fields = dict[str, Any]

OWN_SIZES = ("conv_group_size", "selector_rank", "selector_top_k", "markov_rank")


@dataclass(frozen=True)
class Kind:
    """A kind of drafter. fields: what its `config.json` has beside the decoder's own, given those."""

    architecture: str
    module: type[DraftModel]
    fields: Callable[[PairConfig, Fields], Fields]


def _zlab(config: PairConfig, decoder: Fields, **own: Any) -> Fields:
    """As z-lab saves DFlash and DFlash2."""
    inner = {"target_layer_ids": list(config.target_layer_ids), "mask_token_id": MASK_TOKEN, "causal": False, **own}
    return {
        **decoder,
        "block_size": config.block_size,
        "num_target_layers": config.target_layers,
        "dflash_config": inner,
    }


def _dflash2(config: PairConfig, decoder: Fields) -> Fields:
    return _zlab(
        config,
        decoder,
        conv_kernel_size=TAPS,
        conv_group_size=config.conv_group_size,
        selector_rank=config.selector_rank,
        selector_top_k=config.selector_top_k,
    )


def _dspark(config: PairConfig, decoder: Fields) -> Fields:
    """As deepseek-ai's DeepSpec saves it; each place of a block gives a draft."""
    return {
        **decoder,
        "block_size": config.num_drafts,
        "num_target_layers": config.target_layers,
        "target_layer_ids": list(config.target_layer_ids),
        "mask_token_id": MASK_TOKEN,
        "sample_from_anchor": True,
        "markov_rank": config.markov_rank,
        "markov_head_type": "vanilla",
        "enable_confidence_head": True,
        "confidence_head_with_markov": True,
    }


def _eagle3(config: PairConfig, decoder: Fields) -> Fields:
    """As the speculators library saves it. It counts a target's layers from the embedding's output on."""
    proposal = {"proposal_type": "greedy", "speculative_tokens": config.num_drafts, "verifier_accept_k": 1}
    return {
        "speculators_model_type": "eagle3",
        "speculators_config": {
            "algorithm": "eagle3",
            "default_proposal_method": "greedy",
            "proposal_methods": [proposal],
            "verifier": {"name_or_path": None, "architectures": ["Qwen3ForCausalLM"]},
        },
        "draft_vocab_size": config.shape.vocab_size,
        "target_hidden_size": config.shape.hidden_size,
        "norm_before_residual": False,
        "norm_output": False,
        "eagle_aux_hidden_state_layer_ids": [i + 1 for i in config.target_layer_ids],
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "transformer_layer_config": decoder | {"num_hidden_layers": 1, "layer_types": ["full_attention"]},
    }


KINDS = {
    DFLASH: Kind("DFlashDraftModel", DraftModel, _zlab),
    DFLASH2: Kind("DFlash2DraftModel", DFlash2DraftModel, _dflash2),
    DSPARK: Kind("Qwen3DSparkModel", DSparkDraftModel, _dspark),
    EAGLE3: Kind("Eagle3DraftModel", Eagle3DraftModel, _eagle3),
}


def make_drafter(config: PairConfig) -> DraftModel:
    """A drafter of the kind that the config names, before training."""
    return KINDS[config.drafter].module(config)


def kind_of(fields: Fields) -> str:
    """The kind of a saved drafter, by its `config.json`. Raises `ValueError`."""
    for name, kind in KINDS.items():
        if fields["architectures"] == [kind.architecture]:
            return name
    raise ValueError(f"the demo has no drafter of the architecture {fields['architectures']}")


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
