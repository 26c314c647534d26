"""The fields of Gemma 4 in `config.json`: which layers see everything, and what these have of their own.

A field that is missing takes the value that `transformers` 5 gives it.
"""

from __future__ import annotations

from dflash_backend.checkpoints.json_reader import JsonReader
from dflash_backend.checkpoints.rope import read_layer_rope
from dflash_backend.checkpoints.spec import FULL, SLIDING, Gemma4Spec, RopeSpec

# Every so manieth layer sees everything where no field says which do.
PATTERN = 6
DEFAULT_WINDOW, UNIFIED_WINDOW = 512, 1024
MAX_HEADS = 1024
MAX_HEAD_DIM = 1024
GLOBAL_ROPE = RopeSpec(theta=1_000_000.0, kind="proportional", share=0.25)

# Parts that are not built here, of the small Gemma 4 (E2B and E4B), and why.
OWN_EMBEDDINGS = "hidden_size_per_layer_input"
MISSING_OWN_EMBEDDINGS = 256
ABSENT = {
    OWN_EMBEDDINGS: "embeddings of each layer's own are not supported",
    "num_kv_shared_layers": "KV that layers share is not supported",
}


def gemma4_windows(config: JsonReader, num_layers: int, missing: int = DEFAULT_WINDOW) -> tuple[int | None, ...]:
    """`sliding_window` in the layers that `layer_types` calls sliding; `missing` where the field is not there."""
    window = config.integer("sliding_window", default=missing)
    return tuple(window if name == SLIDING else None for name in _layer_types(config, num_layers))


def read_gemma4(config: JsonReader, num_layers: int, max_positions: int, has_own_embeddings: bool = True) -> Gemma4Spec:
    """What Gemma 4's decoder has of its own. has_own_embeddings: whether layers have embeddings of their own where no
    field says it. Raises `CheckpointError`."""
    missing = {OWN_EMBEDDINGS: MISSING_OWN_EMBEDDINGS} if has_own_embeddings else {}
    for field, reason in ABSENT.items():
        if config.data.get(field, missing.get(field, 0)):
            raise config.fail(field, f"0: {reason}")
    if config.data.get("use_bidirectional_attention") == "all":
        raise config.fail("use_bidirectional_attention", "null or 'vision': a target's text is causal")
    types = _layer_types(config, num_layers)
    num_heads = config.integer("num_attention_heads")
    keys_are_values = config.boolean("attention_k_eq_v", default=False)
    num_kv_heads = config.integer("num_key_value_heads", default=4, high=MAX_HEADS)
    if keys_are_values and config.given("num_global_key_value_heads"):
        num_kv_heads = config.integer("num_global_key_value_heads", high=MAX_HEADS)
    head_dim = config.integer("global_head_dim", default=512, high=MAX_HEAD_DIM)
    saved = _saved_heads(config, types)
    if saved is not None:
        head_dim, num_kv_heads = (
            saved.integer("head_dim", default=config.integer("head_dim", default=256), high=MAX_HEAD_DIM),
            saved.integer("num_key_value_heads", default=config.integer("num_key_value_heads", default=4)),
        )
    if num_heads % num_kv_heads:
        raise config.fail("num_global_key_value_heads", f"a divisor of num_attention_heads ({num_heads})")
    if head_dim % 2:
        raise config.fail("global_head_dim", "an even number, as rotary embedding needs")
    softcap = None
    if config.given("final_logit_softcapping"):
        softcap = config.number("final_logit_softcapping", low=1e-3, high=1e6)
    return Gemma4Spec(
        global_layers=tuple(name == FULL for name in types),
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        rope=read_layer_rope(config, FULL, head_dim, max_positions, GLOBAL_ROPE),
        keys_are_values=keys_are_values,
        softcap=softcap,
    )


def _layer_types(config: JsonReader, num_layers: int) -> tuple[str, ...]:
    """The kind of each layer. The last sees everything, whatever the file says of it."""
    usual = tuple(FULL if (index + 1) % PATTERN == 0 else SLIDING for index in range(num_layers))
    types = config.layer_types(num_layers, FULL, SLIDING) or usual
    return (*types[:-1], FULL)


def _saved_heads(config: JsonReader, types: tuple[str, ...]) -> JsonReader | None:
    """What `per_layer_config` says of the layers that see everything, which is how `transformers` saves their heads;
    None where there is none. It must say the same of all of them, and nothing of others."""
    layers = config.object("per_layer_config")
    if not layers.data:
        return None
    own = {str(index) for index, name in enumerate(types) if name == FULL}
    entries = [layers.object(name) for name in layers.data]
    if set(layers.data) != own or any(entry.data != entries[0].data for entry in entries):
        raise config.fail("per_layer_config", f"the same for each layer of '{FULL}', and nothing for others")
    unknown = set(entries[0].data) - {"head_dim", "num_key_value_heads"}
    if unknown:
        raise entries[0].fail(sorted(unknown)[0], "no such field: only heads may differ between layers")
    return entries[0]
