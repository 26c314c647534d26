"""Whether a drafter layer's queries see only positions up to their own: all rules, in the order in which they hold."""

from __future__ import annotations

from collections.abc import Sequence

from dflash_backend.checkpoints.json_reader import JsonReader


def layer_causality(
    setting: bool | None,
    configs: Sequence[JsonReader],
    dflash: JsonReader,
    sliding: Sequence[bool],
    sliding_causal: bool,
) -> tuple[bool, ...]:
    """Causality of each drafter layer. The first that is present decides:

    1. `setting`, the server's `causal`, None for auto;
    2. `is_causal` of the first of `configs` that has it;
    3. `dflash_config.causal`, from `dflash`;
    4. layers that `layer_types` calls sliding (`sliding`, one entry for each layer) are causal if `sliding_causal`;
    5. else not causal.
    """
    if setting is not None:
        return (setting,) * len(sliding)
    for config in configs:
        if config.given("is_causal"):
            return (config.boolean("is_causal", default=False),) * len(sliding)
    if dflash.given("causal"):
        return (dflash.boolean("causal", default=False),) * len(sliding)
    return tuple(is_sliding and sliding_causal for is_sliding in sliding)
