"""The two ways to number the layers whose outputs are the target features. Only this file converts them.

A layer id i (ours everywhere else) is the output of decoder layer i, 0-based. A boundary id i (EAGLE and speculators)
is the hidden state after i layers have run. Layer id i and boundary id i + 1 are the same features.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

from dflash_backend.checkpoints.json_reader import JsonReader
from dflash_backend.checkpoints.spec import CheckpointError

MAX_LAYER_IDS = 1024

LAYER, BOUNDARY = "layer ids", "boundary ids"

# Where speculators configs name the layers, as `named_layers` takes them.
SPECULATORS_FIELDS = (
    ("", "aux_hidden_state_layer_ids", BOUNDARY),
    ("", "eagle_aux_hidden_state_layer_ids", BOUNDARY),
)


@dataclass(frozen=True)
class NamedLayers:
    """Layers that a config names. ids: layer ids. reader, field, convention: where and how it names them. notes: for
    the log, where another field names other layers."""

    ids: tuple[int, ...]
    reader: JsonReader
    field: str
    convention: str
    notes: tuple[str, ...] = ()

    def fail(self, expected: str) -> CheckpointError:
        """The error for these ids."""
        return self.reader.fail(self.field, expected)


def named_layers(config: JsonReader, fields: Sequence[tuple[str, str, str]]) -> NamedLayers | None:
    """The layers that the first of `fields` names; None where none is there.

    fields: (object, field, convention); object "" is the top level. Raises `CheckpointError` for a field that holds no
    ids, whether it decides or not.
    """
    found: list[tuple[NamedLayers, str]] = []
    for holder, field, convention in fields:
        reader = config.object(holder) if holder else config
        ids = reader.integers(field, low=0 if convention == LAYER else 1)
        if ids is None:
            continue
        if len(ids) > MAX_LAYER_IDS:
            raise reader.fail(field, f"at most {MAX_LAYER_IDS} {convention}")
        layers = ids if convention == LAYER else to_layer_ids(ids)
        found.append((NamedLayers(layers, reader, field, convention), f"{holder}.{field}" if holder else field))
    if not found:
        return None
    chosen, name = found[0]
    notes = tuple(
        f"{name} names the target layers {list(chosen.ids)} and is used; {other} names {list(layers.ids)} (layer ids)"
        for layers, other in found[1:]
        if layers.ids != chosen.ids
    )
    return dataclasses.replace(chosen, notes=notes)


def to_layer_ids(boundary_ids: Sequence[int]) -> tuple[int, ...]:
    """Layer ids of boundary ids, which are at least 1: before the first layer there is no layer's output."""
    return tuple(boundary - 1 for boundary in boundary_ids)


def to_boundary_ids(layer_ids: Sequence[int]) -> tuple[int, ...]:
    """Boundary ids of layer ids."""
    return tuple(layer + 1 for layer in layer_ids)
