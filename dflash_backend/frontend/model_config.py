"""What Triton tells a model of its config.pbtxt, checked. Used by `model_repository/dflash/1/model.py`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dflash_backend.config import ConfigError


def check_decoupled(model_config: Mapping[str, Any]) -> None:
    """Raise `ConfigError` unless the model may send more than one response to a request."""
    if not model_config.get("model_transaction_policy", {}).get("decoupled", False):
        raise ConfigError(
            "config.pbtxt has no `model_transaction_policy { decoupled: true }`, without which Triton takes a single "
            "response to a request and streams cannot be sent; add that line"
        )
