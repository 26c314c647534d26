"""The setting `activation_quantization`: activations in FP8 in every step, and text that does not follow from which
kernel multiplies them."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from dflash_backend.checkpoints import read_target
from dflash_backend.checkpoints.quantization.scheme import Layout, Scheme
from dflash_backend.config import ConfigError, EngineConfig
from dflash_backend.engine import checks
from dflash_backend.engine.build import build_engine
from dflash_backend.engine.checks import check_activation_quantization
from dflash_backend.models.ops import Fp8ActivationsLayerOps, TritonLayerOps, select_ops
from dflash_kernels import quantised_linear, scaled_linear
from dflash_kernels.quantised_weight import FP8, INT8, QuantisedWeight
from dflash_kernels.scaled_linear import LEAST_TOKENS
from tests.support.quantised import AWQ, awq, write
from tests.support.tiny_models import MASK_TOKEN_ID, make_pair, make_target
from tests.worker.engines import engine, outputs_of, triton_engine

pytestmark = pytest.mark.usefixtures("single_thread")
# One prompt that torch multiplies, and one that our kernel does.
PROMPTS = [[(7 * i) % 90 + 1 for i in range(max(tokens for _, tokens in LEAST_TOKENS) + 5)], [9, 8, 7]]
ASKED: list[dict[str, Any]] = [
    {"max_tokens": 2, "temperature": 0.0, "ignore_eos": True},
    {"max_tokens": 2, "temperature": 0.8, "seed": 1, "ignore_eos": True},
]
SETTINGS: dict[str, Any] = {
    "max_model_len": 96,
    "max_num_seqs": 2,
    "kv_cache_gb": 0.01,
    "quantization": "fp8",
    "activation_quantization": "fp8",
}


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    settings = {"num_target_layers": 2, "dflash_config": {"target_layer_ids": [0, 1], "mask_token_id": MASK_TOKEN_ID}}
    return dict(make_pair(tmp_path_factory.mktemp("pair"), {"num_hidden_layers": 2}, **settings))


def test_text_is_that_of_the_reference_with_drafts_and_chunks_and_without(
    pair: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    by_torch, multiply = [], scaled_linear.multiply_scaled
    with monkeypatch.context() as patched:
        patched.setattr(Fp8ActivationsLayerOps, "product_of", reference_of)
        expected = outputs_of(triton_engine(**pair | SETTINGS | {"draft_model": ""}), PROMPTS, ASKED)
    monkeypatch.setattr(
        scaled_linear, "multiply_scaled", lambda *args: by_torch.append(len(args[0])) or multiply(*args)
    )
    for changed in ({"draft_model": ""}, {"max_num_batched_tokens": 40}):
        by_torch.clear()
        found = outputs_of(triton_engine(**pair | SETTINGS | changed), PROMPTS, ASKED)
        assert found.tokens == expected.tokens
        served = [count for count in by_torch if count not in scaled_linear.TRIAL_TOKENS]
        assert bool(served) == ("max_num_batched_tokens" not in changed)


def reference_of(ops: object, weight: torch.Tensor | QuantisedWeight) -> Any:
    """The reference as the product of FP8 weights."""
    if isinstance(weight, QuantisedWeight):
        return scaled_linear.scaled_linear_reference
    return TritonLayerOps().product_of(weight)


def test_each_weight_has_the_product_that_the_setting_asks_for() -> None:
    cpu, codes = torch.device("cpu"), torch.zeros(32, 64, dtype=torch.uint8)
    of_fp8 = QuantisedWeight(FP8, codes, torch.ones(1, 32), None, 1, 64)
    integers = QuantisedWeight(INT8, codes, torch.ones(1, 32), None, 1, 64)
    ops, invariant = (select_ops(cpu, "triton", each, torch.bfloat16) for each in (False, True))
    assert isinstance(ops.product_of(of_fp8), scaled_linear.ScaledProduct)
    assert invariant.product_of(of_fp8) is scaled_linear.invariant_scaled_linear
    assert ops.product_of(integers) is quantised_linear.quantised_linear
    assert invariant.product_of(integers) is quantised_linear.invariant_quantised_linear
    assert select_ops(cpu, "triton").product_of(of_fp8) is quantised_linear.quantised_linear


def test_where_no_product_is_of_fp8_it_is_refused_with_what_would_work(tmp_path: Path, pair: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=r"'activation_quantization' is 'fp8': here weights are dequantised at load"):
        engine(**pair | SETTINGS)
    make_target(tmp_path / "plain")
    of_int4 = str(write(tmp_path / "plain", tmp_path / "q", awq(32), AWQ | {"group_size": 32}).quantised)
    values = {"device": "cpu", "attention_backend": "triton", "activation_quantization": "fp8", "draft_model": ""}
    with pytest.raises(ConfigError, match=r"no weights of the target in .* are FP8: take a checkpoint in FP8"):
        build_engine(EngineConfig.from_values(values | {"target_model": of_int4}))


def test_ranks_that_share_a_target_are_refused_it_though_they_keep_codes(pair: dict[str, Any]) -> None:
    values = {"attention_backend": "triton", "device": "cpu", **pair, **SETTINGS, "tensor_parallel_size": 2}
    with pytest.raises(ConfigError, match=r"ranks share the target, .* tensor_parallel_size=1"):
        check_activation_quantization(
            EngineConfig.from_values(values), read_target(Path(pair["target_model"])), True, lambda line, _: None
        )


def test_a_checkpoint_of_which_some_weights_are_fp8_has_it(
    monkeypatch: pytest.MonkeyPatch, pair: dict[str, Any]
) -> None:
    schemes = [None, *(Scheme(layout, 8, (1, None), ("scale",)) for layout in (Layout.INT8, Layout.FLOAT8))]
    rules = [(None, scheme) for scheme in schemes]
    monkeypatch.setattr(checks, "load_quantization", lambda path: SimpleNamespace(rules=rules))
    values = {"device": "cpu", **pair, "activation_quantization": "fp8"}
    config, target = EngineConfig.from_values(values), read_target(Path(pair["target_model"]))
    check_activation_quantization(config, target, True, lambda line, _: None)
    del rules[-1]
    with pytest.raises(ConfigError, match="are FP8: take a checkpoint in FP8"):
        check_activation_quantization(config, target, True, lambda line, _: None)


def test_the_log_says_what_becomes_fp8(pair: dict[str, Any]) -> None:
    lines: list[str] = []
    values = {"device": "cpu", "attention_backend": "triton", **pair, **SETTINGS, "draft_model": ""}
    build_engine(EngineConfig.from_values(values), lambda message, _: lines.append(message))
    assert any("activations become FP8 (e4m3) before products by FP8 weights" in line for line in lines)
