"""What the worker's tests share: the settings of an engine for a tiny pair."""

from __future__ import annotations

from typing import Any

import pytest

from tests.tiny_models import make_pair


@pytest.fixture(scope="session")
def settings(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    models = make_pair(tmp_path_factory.mktemp("pair"))
    return {**models, "kv_block_size": 4, "max_model_len": 64, "max_num_seqs": 4}
