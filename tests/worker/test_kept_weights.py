"""An engine whose models stay quantised gives the text of the same models dequantised, with drafts and without.

Kernels run on a GPU, else under Triton's interpreter.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from dflash_backend.models.decoder import DecoderTarget
from dflash_backend.models.linear import QuantisedLinear
from dflash_kernels.quantised_weight import MXFP4, QuantisedWeight
from tests.support.mxfp4_checkpoint import make_mxfp4_target
from tests.support.quantised import AWQ, FP8_BLOCK, awq, fp8_block, write
from tests.support.scale import by_night
from tests.support.tiny_models import MASK_TOKEN_ID, make_pair
from tests.worker.engines import engine, outputs_of, triton_engine

pytestmark = pytest.mark.usefixtures("single_thread")
FEATURES = {"target_layer_ids": [0, 1], "mask_token_id": MASK_TOKEN_ID}
PROMPTS = [[1, 2, 3, 4, 5, 6], [9, 8, 7], [5] * 11]
ASKED: list[dict[str, Any]] = [
    {"max_tokens": 3, "temperature": 0.0, "ignore_eos": True},
    {"max_tokens": 3, "temperature": 0.8, "seed": 1, "ignore_eos": True},
    {"max_tokens": 3, "temperature": 0.0, "ignore_eos": True},
]
# A target of two layers: the interpreter takes as long for each.
FEW_LAYERS: dict[str, Any] = {"target": {"num_hidden_layers": 2}, "num_target_layers": 2, "dflash_config": FEATURES}
FORMATS = {
    "fp8": (fp8_block(32, 32), FP8_BLOCK | {"weight_block_size": [32, 32]}),
    "int4": (awq(32), AWQ | {"group_size": 32}),
}


@pytest.mark.parametrize(("name", "drafted"), [("fp8", True), ("int4", True), by_night("int4", False)])
def test_a_pair_that_stays_quantised_gives_the_text_of_its_numbers(tmp_path: Path, name: str, drafted: bool) -> None:
    packer, config = FORMATS[name]
    settings: dict[str, Any] = make_pair(tmp_path, **FEW_LAYERS)
    settings |= {"max_model_len": 64, "max_num_seqs": 4, "kv_cache_gb": 0.01}
    for model, folder in (("target_model", "t"), ("draft_model", "d")):
        settings[model] = str(write(tmp_path / folder, tmp_path / f"q{folder}", packer, config).quantised)
    expected = outputs_of(engine(**settings, dtype="float32"), PROMPTS, ASKED)
    built = triton_engine(**settings | ({} if drafted else {"draft_model": ""}))
    target = built.runner.model.target
    assert isinstance(target, DecoderTarget)
    assert isinstance(target.layers[0].weights.qkv, QuantisedLinear)
    assert outputs_of(built, PROMPTS, ASKED).tokens == expected.tokens
    assert sum(map(len, expected.tokens.values())) == 9


@pytest.mark.parametrize("name", ["fp8", by_night("int4")])
def test_experts_that_stay_quantised_give_the_text_of_their_numbers(tmp_path: Path, name: str) -> None:
    packer, config = FORMATS[name]
    moe = {"architecture": "Qwen3MoeForCausalLM", "moe_intermediate_size": 32, "num_hidden_layers": 2}
    settings: dict[str, Any] = make_pair(tmp_path, moe, num_target_layers=2, dflash_config=FEATURES)
    settings |= {"max_model_len": 64, "max_num_seqs": 4, "kv_cache_gb": 0.01}
    settings["target_model"] = str(write(tmp_path / "t", tmp_path / "q", packer, config).quantised)
    expected = outputs_of(engine(**settings, dtype="float32"), PROMPTS, ASKED)
    built = triton_engine(**settings)
    target = built.runner.model.target
    assert isinstance(target, DecoderTarget)
    assert isinstance(target.layers[0].weights.mlp.gate_up, QuantisedWeight)
    assert outputs_of(built, PROMPTS, ASKED).tokens == expected.tokens


@pytest.mark.parametrize("drafted", [True, by_night(False)])
def test_experts_in_mxfp4_give_the_text_of_their_numbers(tmp_path: Path, drafted: bool) -> None:
    settings: dict[str, Any] = make_pair(tmp_path, num_target_layers=2, dflash_config=FEATURES)
    make_mxfp4_target(tmp_path / "mxfp4", hidden_size=32, intermediate_size=32, num_hidden_layers=2)
    settings |= {"target_model": str(tmp_path / "mxfp4"), "max_model_len": 64, "max_num_seqs": 4, "kv_cache_gb": 0.01}
    expected = outputs_of(engine(**settings, dtype="float32"), PROMPTS, ASKED)
    built = triton_engine(**settings | ({} if drafted else {"draft_model": ""}))
    target = built.runner.model.target
    assert isinstance(target, DecoderTarget)
    gate_up = target.layers[0].weights.mlp.gate_up
    assert isinstance(gate_up, QuantisedWeight)
    assert gate_up.kind == MXFP4
    assert outputs_of(built, PROMPTS, ASKED).tokens == expected.tokens


def test_fp8_made_at_load_stays_fp8(tmp_path: Path) -> None:
    settings: dict[str, Any] = make_pair(tmp_path, **FEW_LAYERS)
    settings |= {"max_model_len": 64, "kv_cache_gb": 0.01, "quantization": "fp8"}
    expected = outputs_of(engine(**settings, dtype="float32"), PROMPTS, ASKED)
    built = triton_engine(**settings)
    target = built.runner.model.target
    assert isinstance(target, DecoderTarget)
    assert isinstance(target.layers[0].weights.mlp.gate_up, QuantisedLinear)
    assert outputs_of(built, PROMPTS, ASKED).tokens == expected.tokens
