"""What a tenant may be called, and the weights that an operator gives to some."""

from __future__ import annotations

import math
import re

TENANT_NAME = re.compile(r"[A-Za-z0-9._:@/-]{0,128}")
# Quotients by others overflow, or leave the range in which tokens count.
LOWEST_WEIGHT, HIGHEST_WEIGHT = 1e-6, 1e6
TENANT_NAME_IN_WORDS = "at most 128 letters, digits and characters of ._:@/-"


def parse_tenant_weights(text: str) -> dict[str, float]:
    """Weights by tenant, from text such as `"batch=1,chat=4"`. Raises ValueError with a sentence."""
    weights: dict[str, float] = {}
    for entry in filter(None, (part.strip() for part in text.split(","))):
        name, _, number = entry.rpartition("=")
        name = name.strip()
        try:
            weight = float(number)
        except ValueError:
            weight = math.nan
        if not TENANT_NAME.fullmatch(name) or not LOWEST_WEIGHT <= weight <= HIGHEST_WEIGHT:
            raise ValueError(
                f"'{entry}' is not a tenant's name ({TENANT_NAME_IN_WORDS}), '=' and a weight from "
                f"{LOWEST_WEIGHT:f} to {HIGHEST_WEIGHT:.0f}"
            )
        if name in weights:
            raise ValueError(f"the tenant '{name}' comes twice")
        weights[name] = weight
    return weights
