"""What a config.pbtxt must say for the model to work."""

from __future__ import annotations

import pytest

from dflash_backend.config import ConfigError
from dflash_backend.frontend.model_config import check_decoupled


def test_a_decoupled_model_is_taken():
    check_decoupled({"model_transaction_policy": {"decoupled": True}})


@pytest.mark.parametrize(
    "config", [{}, {"model_transaction_policy": {}}, {"model_transaction_policy": {"decoupled": False}}]
)
def test_one_that_is_not_is_refused_with_the_line_to_add(config):
    with pytest.raises(ConfigError, match=r"add that line") as refused:
        check_decoupled(config)
    assert "model_transaction_policy { decoupled: true }" in str(refused.value)
