"""`dflash-triton inspect DIR/config.json`: each published drafter is named from its config alone."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import save_file

from dflash_backend.checkpoints import CheckpointError
from dflash_backend.drafters.published import DRAFTERS, PublishedDrafter, unsupported_target
from dflash_backend.engine.inspection import CheckpointReport, inspect
from tests.support.tiny_models import make_draft, make_target

# Hidden size, layers and vocabulary of each target that is supported; of another a stand-in, as only the drafter's
# method and format matter there.
SHAPES = {
    "Qwen/Qwen3-4B": (2560, 36, 151936),
    "Qwen/Qwen3-8B": (4096, 36, 151936),
    "Qwen/Qwen3-14B": (5120, 40, 151936),
    "Qwen/Qwen3-32B": (5120, 64, 151936),
    "Qwen/Qwen3-30B-A3B": (2048, 48, 151936),
    "Qwen/Qwen3-30B-A3B-Instruct-2507": (2048, 48, 151936),
    "Qwen/Qwen3-235B-A22B": (4096, 94, 151936),
    "Qwen/Qwen3-235B-A22B-Instruct-2507": (4096, 94, 151936),
    "Qwen/Qwen3-Coder-30B-A3B-Instruct": (2048, 48, 151936),
    "Qwen/Qwen3-Coder-Next": (2048, 48, 151936),
    "Qwen/Qwen3.5-4B": (2560, 32, 248320),
    "Qwen/Qwen3.5-9B": (4096, 32, 248320),
    "Qwen/Qwen3.5-27B": (5120, 64, 248320),
    "Qwen/Qwen3.5-35B-A3B": (2048, 40, 248320),
    "Qwen/Qwen3.5-122B-A10B": (3072, 48, 248320),
    "Qwen/Qwen3.6-27B": (5120, 64, 248320),
    "Qwen/Qwen3.6-35B-A3B": (2048, 40, 248320),
    "Qwen/Qwen3.8-27B": (5120, 64, 248320),  # as Qwen3.6-27B: its own config was not seen here
    "meta-llama/Llama-3.1-8B-Instruct": (4096, 32, 128256),
    "meta-llama/Llama-3.3-70B-Instruct": (8192, 80, 128256),
    "openai/gpt-oss-20b": (2880, 24, 201088),
    "openai/gpt-oss-120b": (2880, 36, 201088),
    "google/gemma-4-26B-A4B-it": (2816, 30, 262144),
    "google/gemma-4-31B-it": (5376, 60, 262144),
}
STAND_IN = (5120, 64, 248320)
MASK, EAGLE_VOCAB = 100, 32000
# What a drafter says where its own target is not: the drafter is read, or it is not.
# Of what is not supported, why what its config says is read all the same.
READ_BUT_FOR_OTHERS = ("targets of the family", "pickled weights")
WORDS_OF_REFUSAL = {"P-EAGLE": "'peagle'", "its format": "Eagle3Model", "its format (Gemma4DSpark": "Gemma4DSparkModel"}
BY_NAME = {each.name: each for each in DRAFTERS}


def layer_ids(each: PublishedDrafter) -> list[int]:
    """Three for EAGLE-3, as its default has them, else five evenly spaced ones."""
    last = SHAPES.get(each.target.name, STAND_IN)[1] - 3
    if each.method in ("eagle3", "peagle"):
        return [1, (last + 3) // 2 - 1, last - 1]
    return [round(1 + i * (last - 1) / 4) for i in range(5)]


def decoder(each: PublishedDrafter, layers: int, kind: str) -> dict[str, Any]:
    hidden, _, vocab = SHAPES.get(each.target.name, STAND_IN)
    return {
        "model_type": kind,
        "hidden_act": "silu",
        "hidden_size": hidden,
        "intermediate_size": 3 * hidden,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "num_hidden_layers": layers,
        "max_position_embeddings": 40960,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1000000.0,
        "vocab_size": vocab,
    }


def config_of(each: PublishedDrafter) -> dict[str, Any]:
    """The config of a published drafter, rebuilt: the fields of its format and method, the sizes of its target, and the
    method's default layers."""
    if each.format == "speculators":
        return _speculators(each)
    own = {"architectures": [each.architecture], "torch_dtype": "bfloat16"}
    if each.method == "eagle3" and each.format == "DeepSpec":
        own |= {
            "num_target_layers": SHAPES.get(each.target.name, STAND_IN)[1],
            "target_layer_ids": layer_ids(each),
            "ttt_length": 7,
        }
        return decoder(each, 1, "qwen3") | own
    if each.method == "eagle3":
        return decoder(each, 1, "llama") | own | {"draft_vocab_size": EAGLE_VOCAB}
    own |= {"num_target_layers": SHAPES.get(each.target.name, STAND_IN)[1]}
    if each.format == "DeepSpec":
        is_dspark = each.method == "dspark"
        own |= {"block_size": 7, "mask_token_id": MASK, "target_layer_ids": layer_ids(each)}
        own |= {"markov_rank": 256 if is_dspark else 0, "markov_head_type": "vanilla", "num_anchors": 512}
        own |= {"enable_confidence_head": is_dspark, "confidence_head_with_markov": is_dspark}
        return decoder(each, 5, "qwen3") | own
    dflash: dict[str, Any] = {"target_layer_ids": layer_ids(each), "mask_token_id": MASK, "block_size": 16}
    if each.method == "dflash2":
        dflash |= {"conv_kernel_size": 2, "conv_group_size": 16, "selector_rank": 256, "selector_top_k": 16}
    return decoder(each, 5, "qwen3") | own | {"dflash_config": dflash}


def _speculators(each: PublishedDrafter) -> dict[str, Any]:
    is_eagle = each.method in ("eagle3", "peagle")
    own: dict[str, Any] = {
        "speculators_model_type": each.method,
        "aux_hidden_state_layer_ids": [i + 1 for i in layer_ids(each)],
        "draft_vocab_size": EAGLE_VOCAB,
        "torch_dtype": "bfloat16",
        "transformer_layer_config": decoder(each, 1 if is_eagle else 5, "llama" if is_eagle else "qwen3"),
        "speculators_config": {
            "algorithm": each.method,
            "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": 3 if is_eagle else 7}],
            "verifier": {"name_or_path": each.target.name},
        },
    }
    return own if is_eagle else own | {"block_size": 8, "mask_token_id": MASK}


def report_of(each: PublishedDrafter, directory: Path) -> CheckpointReport:
    path = directory / "config.json"
    path.write_text(json.dumps(config_of(each)))
    return inspect(str(path)).checkpoints[0]


def is_refused(each: PublishedDrafter) -> bool:
    """Whether what is not supported is the drafter itself."""
    return each.method == "peagle" or each.architecture[:6] == "Gemma4"


@pytest.mark.parametrize("name", [each.name for each in DRAFTERS if not is_refused(each)])
def test_a_published_drafter_is_named_from_its_config_alone(name: str, tmp_path: Path) -> None:
    each = BY_NAME[name]
    report = report_of(each, tmp_path)
    facts = dict(report.facts)
    assert (report.kind, facts["method"], report.weights) == ("drafter", each.kind, None)
    assert report.format == {"DeepSpec": "deepspec", "EAGLE": "eagle3"}.get(each.format, each.format)
    assert f"hidden size {SHAPES.get(each.target.name, STAND_IN)[0]}" in facts["made for"]
    assert ("only the weights say it" in facts["embedding"], facts["weights"]) == (True, "bfloat16; not read")
    if each.format == "EAGLE":
        assert "takes by default" in facts["features"]
    else:
        assert f"layer ids {layer_ids(each)} of the target" in facts["features"]
    if each.format == "speculators":
        assert facts["made for"].startswith(each.target.name)
        assert facts.get("target") == each.unsupported == unsupported_target(each.target.name)


@pytest.mark.parametrize("name", [each.name for each in DRAFTERS if is_refused(each)])
def test_one_that_is_not_supported_is_refused_for_the_reason_in_the_table(name: str, tmp_path: Path) -> None:
    each = BY_NAME[name]
    reason = each.unsupported
    assert reason is not None
    with pytest.raises(CheckpointError) as raised:
        report_of(each, tmp_path)
    assert [
        words for start, words in WORDS_OF_REFUSAL.items() if reason.startswith(start) and words in str(raised.value)
    ]


def test_what_the_table_calls_supported_is_what_is_read() -> None:
    assert set(SHAPES) >= {each.target.name for each in DRAFTERS if each.unsupported is None}
    others = [each for each in DRAFTERS if each.unsupported is not None and not is_refused(each)]
    assert all(str(each.unsupported).startswith(READ_BUT_FOR_OTHERS) for each in others)


def test_the_command_says_what_a_config_alone_does_not(cli, tmp_path: Path) -> None:
    make_draft(tmp_path)
    path = tmp_path / "config.json"
    for file in tmp_path.glob("*.safetensors"):
        file.unlink()
    ended = cli("inspect", path)
    assert ended.status == 0
    assert "not read: of a config alone" in ended.out
    data = json.loads(cli("inspect", path, "--json").out)["drafter"]
    assert (data["weights"], data["facts"]["method"]) == (None, "DFlash")
    ended = cli("inspect", tmp_path)
    assert (ended.status, "has no .safetensors file" in ended.err) == (1, True)


def test_a_targets_config_and_a_pair_need_directories(cli, tmp_path: Path) -> None:
    make_target(tmp_path)
    assert (
        "is a target's config, whose weights are read, too; give its directory"
        in cli("inspect", tmp_path / "config.json").err
    )
    told = cli("inspect", tmp_path / "config.json", "--draft", tmp_path).err
    assert "expected a model directory, a file in GGUF (.gguf) or a hub id" in told


def test_a_broken_config_is_refused_as_beside_its_weights(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    good = config_of(BY_NAME["z-lab/Qwen3-8B-DFlash-b16"])
    for broken, words in (
        ({"num_target_layers": None}, "num_target_layers"),
        ({"quantization_config": {"quant_method": "gguf"}}, "quant_method"),
        ({"has_own_lm_head": 3}, "has_own_lm_head"),
    ):
        path.write_text(json.dumps(good | broken))
        with pytest.raises(CheckpointError, match=words):
            inspect(str(path))


def test_weights_without_tensors_are_no_config_alone(cli, tmp_path: Path) -> None:
    make_draft(tmp_path)
    save_file({}, tmp_path / "model.safetensors")
    ended = cli("inspect", tmp_path)
    assert (ended.status, "has no tensors in its .safetensors files" in ended.err) == (1, True)
