"""The layouts that came with a model or a tool: FP8 of Qwen, FBGEMM's FP8, GPTQ and AWQ, written number by number
(`tests/support/quantised.py`). Logits equal those that `transformers` computes with the weights that they stand for."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from dflash_backend.checkpoints import CheckpointError, read_target
from dflash_backend.checkpoints.describe import target_facts
from dflash_backend.engine.inspection import inspect_target
from tests.support.quantised import (
    AWQ,
    FP8_BLOCK,
    GPTQ,
    Packer,
    awq,
    edit_config,
    fp8_block,
    fp8_rows,
    fp8_tensor,
    gptq,
    is_projection,
    make_qwen_fp8,
    write,
    write_by_name,
)
from tests.support.quantised_logits import assert_same_logits, projections, weight_of
from tests.support.tiny_models import make_target

pytestmark = pytest.mark.usefixtures("single_thread", "inference_mode")
MOE = "Qwen3MoeForCausalLM"
SIZES: dict[str, Any] = {"hidden_size": 160, "intermediate_size": 272}

FORMATS: dict[str, tuple[Packer, dict[str, Any]]] = {
    "fp8 in blocks of other sizes": (fp8_block(24, 40), FP8_BLOCK | {"weight_block_size": [24, 40]}),
    "fp8 of a tensor": (fp8_tensor(), {"quant_method": "fp8", "activation_scheme": "dynamic"}),
    "fp8 of a tensor, transformers' name": (
        fp8_tensor("weight_scale_inv", (1,)),
        {"quant_method": "fp8", "weight_block_size": None},
    ),
    "fbgemm fp8": (fp8_rows, {"quant_method": "fbgemm_fp8", "activation_scale_ub": 1200.0}),
    "gptq": (gptq(), GPTQ),
    "gptq of 8 bits": (gptq(8), GPTQ | {"bits": 8}),
    "gptq in one group": (gptq(group=-1), GPTQ | {"group_size": -1}),
    "gptq without g_idx": (gptq(g_idx=False), GPTQ),
    "gptq with columns in another order": (gptq(shuffled=True), GPTQ | {"desc_act": True}),
    "gptq v2": (gptq(stored_less=0), GPTQ | {"checkpoint_format": "gptq_v2"}),
    "awq": (awq(), AWQ),
    "awq, older names": (
        awq(32),
        {"quant_method": "awq", "w_bit": 4, "q_group_size": 32, "version": "GEMM", "zero_point": True},
    ),
}


def test_a_qwen_checkpoint_in_fp8_gives_the_logits_of_its_weights(tmp_path: Path) -> None:
    assert_same_logits(make_qwen_fp8(tmp_path))


@pytest.mark.parametrize("name", FORMATS)
def test_a_published_layout_gives_the_logits_of_its_weights(tmp_path: Path, name: str) -> None:
    packer, config = FORMATS[name]
    make_target(tmp_path / "source", **SIZES)
    assert_same_logits(write(tmp_path / "source", tmp_path, packer, config))


def test_projections_of_gptq_have_the_scheme_of_the_first_rule_that_names_them(tmp_path: Path) -> None:
    """As GPTQModel writes it. Of projections that are one product here, one may be named alone; rules for layers that
    are not there say nothing."""
    rules = {
        "-:.*o_proj": {},
        "+:.*down.*": {"bits": 8, "group_size": 8},
        r".*\.q_proj": {"bits": 8, "desc_act": True},
        "+:.*_proj": {"bits": 4, "group_size": 16, "mse": 2.4},
        "+:.*mtp.*": {"bits": 3},
    }

    def pack(name: str) -> Packer | None:
        if not is_projection(name) or "o_proj" in name:
            return None
        own = {"down_proj": gptq(8, group=8), "q_proj": gptq(8, shuffled=True)}
        return own.get(name.split(".")[-2], gptq())

    make_target(tmp_path / "source", **SIZES)
    copies = write_by_name(tmp_path / "source", tmp_path, pack, GPTQ | {"dynamic": rules})
    assert_same_logits(copies)
    assert (
        "INT8, a scale and a zero point for each 8 weights"
        in dict(target_facts(read_target(copies.quantised)))["quantised"]
    )
    edit_config(copies.quantised, quantization_config=GPTQ | {"dynamic": {"+:.*down.*": {"bits": 3}}})
    with pytest.raises(CheckpointError, match=r"'model.layers.0.mlp.down_proj' has INT3 by a rule of 'dynamic'"):
        inspect_target(read_target(copies.quantised))


@pytest.mark.parametrize("name", ["fp8 in blocks of other sizes", "gptq with columns in another order", "awq"])
def test_experts_are_dequantised_and_the_router_is_as_it_was(tmp_path: Path, name: str) -> None:
    packer, config = FORMATS[name]
    sizes = SIZES | {"moe_intermediate_size": 48}
    make_target(tmp_path / "source", architecture=MOE, tie_word_embeddings=False, **sizes)
    copies = write(tmp_path / "source", tmp_path, packer, config)
    assert len([name for name in projections(copies.quantised) if ".experts." in name]) == 5 * 6 * 3
    assert_same_logits(copies)


@pytest.mark.parametrize(
    ("packer", "config"),
    [(gptq(), GPTQ), (gptq(8), GPTQ | {"bits": 8}), (gptq(stored_less=0), GPTQ | {"format": "gptq_v2"}), (awq(), AWQ)],
)
def test_zero_points_at_both_ends_of_their_codes(tmp_path: Path, packer: Packer, config: dict[str, Any]) -> None:
    """Rows of positive weights have the zero point 0, which GPTQ stores as the largest code, rows of negative ones the
    largest."""
    make_target(tmp_path / "source")
    sign = torch.ones(64, 1)
    sign[::2] = -1

    def pack(name: str) -> Callable[[torch.Tensor], Any] | None:
        if name != "model.layers.0.self_attn.q_proj.weight":
            return None
        return lambda weight: packer(weight.abs() * sign)

    copies = write_by_name(tmp_path / "source", tmp_path, pack, config)
    name = "model.layers.0.self_attn.q_proj"
    found, expected = weight_of(copies.quantised, name, 64, 32), weight_of(copies.plain, name, 64, 32)
    torch.testing.assert_close(found, expected, atol=1e-6, rtol=0.0)


def test_a_quantised_head_and_biases_are_read(tmp_path: Path) -> None:
    make_target(
        tmp_path / "source", architecture="Qwen2ForCausalLM", tie_word_embeddings=False, vocab_size=104, **SIZES
    )

    def pack(name: str) -> Packer | None:
        return awq() if name.endswith("_proj.weight") or name == "lm_head.weight" else None

    copies = write_by_name(tmp_path / "source", tmp_path, pack, AWQ)
    assert "lm_head" in projections(copies.quantised)
    assert_same_logits(copies)
