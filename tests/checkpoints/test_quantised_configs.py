"""What published checkpoints say of their quantised weights, as their tools write it, and how it is read."""

from __future__ import annotations

from typing import Any

import pytest

from dflash_backend.checkpoints.json_reader import JsonReader
from dflash_backend.checkpoints.quantization import Quantization, read_quantization

QWEN_FP8 = {
    "activation_scheme": "dynamic",
    "fmt": "e4m3",
    "modules_to_not_convert": ["lm_head", "model.layers.0.input_layernorm", "model.layers.0.mlp.gate"],
    "quant_method": "fp8",
    "weight_block_size": [128, 128],
}
AUTO_FP8 = {
    "activation_scheme": "static",
    "ignored_layers": ["lm_head"],
    "kv_cache_scheme": None,
    "quant_method": "fp8",
}
FBGEMM = {
    "activation_scale_ub": 1200.0,
    "modules_to_not_convert": ["lm_head", "model.layers.0"],
    "quant_method": "fbgemm_fp8",
}
LLM_COMPRESSOR_INT4 = {
    "config_groups": {
        "group_0": {
            "input_activations": None,
            "output_activations": None,
            "targets": ["Linear"],
            "weights": {
                "actorder": "weight",
                "block_structure": None,
                "dynamic": False,
                "group_size": 128,
                "num_bits": 4,
                "observer": "minmax",
                "observer_kwargs": {},
                "strategy": "group",
                "symmetric": True,
                "type": "int",
            },
        }
    },
    "format": "pack-quantized",
    "global_compression_ratio": 1.89,
    "ignore": ["lm_head"],
    "kv_cache_scheme": None,
    "quant_method": "compressed-tensors",
    "quantization_status": "compressed",
    "sparsity_config": {},
    "transform_config": {},
    "version": "0.12.3",
}
LLM_COMPRESSOR_FP8 = {
    "config_groups": {
        "FP8_BLOCK": {
            "format": "float-quantized",
            "input_activations": {
                "dynamic": True,
                "group_size": 128,
                "num_bits": 8,
                "strategy": "group",
                "type": "float",
            },
            "output_activations": None,
            "targets": ["Linear"],
            "weights": {"block_structure": "128x128", "num_bits": 8, "strategy": "block", "type": "float"},
        }
    },
    "format": "float-quantized",
    "ignore": ["lm_head", "re:.*mlp.gate$"],
    "quant_method": "compressed-tensors",
    "quantization_status": "frozen",
}
AUTO_GPTQ = {
    "bits": 4,
    "damp_percent": 0.01,
    "dataset": None,
    "desc_act": False,
    "exllama_config": {"version": 1},
    "group_size": 128,
    "modules_in_block_to_quantize": None,
    "quant_method": "gptq",
    "sym": True,
    "true_sequential": True,
}
GPTQ_MODEL = {
    "bits": 8,
    "checkpoint_format": "gptq",
    "desc_act": True,
    "dynamic": {"-:.*mlp.gate.*": {}},
    "group_size": -1,
    "lm_head": False,
    "meta": {"quantizer": ["gptqmodel:4.0.0"]},
    "pack_dtype": "int32",
    "quant_method": "gptq",
}
AUTO_AWQ = {
    "bits": 4,
    "group_size": 128,
    "modules_to_not_convert": None,
    "quant_method": "awq",
    "version": "gemm",
    "zero_point": True,
}

PROJECTION, GATE = "model.layers.3.mlp.experts.5.up_proj", "model.layers.0.mlp.gate"
CASES: dict[str, tuple[dict[str, Any], str, bool]] = {
    "qwen fp8": (QWEN_FP8, "FP8 (e4m3), a scale for each 128 x 128 weights", True),
    "auto fp8": (AUTO_FP8, "FP8 (e4m3), a scale for each tensor", False),
    "fbgemm": (FBGEMM, "FP8 (e4m3), a scale for each row", True),
    "llm-compressor int4": (LLM_COMPRESSOR_INT4, "INT4, a scale for each 128 weights of a row", False),
    "llm-compressor fp8": (LLM_COMPRESSOR_FP8, "FP8 (e4m3), a scale for each 128 x 128 weights", True),
    "auto-gptq": (AUTO_GPTQ, "INT4, a scale and a zero point for each 128 weights of a row", False),
    "gptqmodel": (GPTQ_MODEL, "INT8, a scale and a zero point for each row, columns in an order of their own", False),
    "auto-awq": (AUTO_AWQ, "INT4, a scale and a zero point for each 128 weights of a row", False),
}


def read(config: dict[str, Any]) -> Quantization:
    quantization = read_quantization(JsonReader({"quantization_config": config}, "config.json"))
    assert quantization is not None
    return quantization


@pytest.mark.parametrize("name", CASES)
def test_a_config_as_its_tool_writes_it(name: str) -> None:
    config, words, ignores_gate = CASES[name]
    quantization = read(config)
    scheme = quantization.scheme_of(PROJECTION, {})
    assert scheme is not None
    assert scheme.in_words() == words
    assert (GATE in quantization.ignored) == ignores_gate
    assert ("lm_head" in quantization.ignored) == (name not in ("auto-gptq", "gptqmodel", "auto-awq"))


@pytest.mark.parametrize("config", [{}, {"quantization_config": None}, {"compression_config": False}])
def test_a_config_that_says_nothing(config: dict[str, Any]) -> None:
    assert read_quantization(JsonReader(config, "config.json")) is None
