"""What the worker's tests share: the settings of an engine for a tiny pair."""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.tiny_models import VOCAB_SIZE, make_pair


@pytest.fixture(autouse=True)
def steps_of_any_length(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else a busy machine, whose steps take long, gets other plans: fewer tokens of a prompt in a step."""
    for bound in ("AUTO_STEP_S", "AUTO_LONG_STEP_S"):
        monkeypatch.setattr(f"dflash_backend.core.step_time.{bound}", 60.0)


@pytest.fixture(scope="session")
def settings(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    models = make_pair(tmp_path_factory.mktemp("pair"))
    return {**models, "kv_block_size": 4, "max_model_len": 64, "max_num_seqs": 4}


@pytest.fixture(scope="session")
def few_layers(settings: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The same with a target of two layers, for kernels under the interpreter, which takes as long for each layer."""
    layers = {"target_layer_ids": [0, 1], "mask_token_id": VOCAB_SIZE - 1}
    folder = tmp_path_factory.mktemp("few_layers")
    return settings | make_pair(folder, {"num_hidden_layers": 2}, num_target_layers=2, dflash_config=layers)
