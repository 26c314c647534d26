"""LoRA adapters: each request's text is that of a target with its adapter merged into the weights, whatever other
requests are in the step, with and without a drafter."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from dflash_backend.checkpoints import read_target
from dflash_backend.checkpoints.lora import LoraAdapters
from dflash_backend.config import ConfigError
from dflash_backend.engine.build import BuiltEngine
from dflash_backend.models import load_target
from dflash_backend.models.linear import Linear, LoraLinear, using_adapters
from tests.models.test_family_engines import MAX_TOKENS, chosen, prompts
from tests.support.lora_adapter import Adapter, make_adapter
from tests.support.tiny_models import make_draft, make_target
from tests.worker.engines import Outputs, engine, on_device_runner

pytestmark = pytest.mark.usefixtures("single_thread")
NEXT = "Qwen3NextForCausalLM"
FAMILIES: list[tuple[str, dict[str, Any]]] = [
    ("Qwen3ForCausalLM", {}),
    ("LlamaForCausalLM", {"attention_bias": True, "mlp_bias": True}),
    ("MistralForCausalLM", {"sliding_window": 9}),
    ("Qwen3MoeForCausalLM", {"mlp_only_layers": [0, 3]}),
    (NEXT, {"mlp_only_layers": [1]}),
    ("Qwen3_5ForCausalLM", {}),
    ("Gemma4ForCausalLM", {}),
    ("GptOssForCausalLM", {}),
]


def made(tmp_path: Path, **target: Any) -> tuple[PreTrainedModel, dict[str, Adapter], dict[str, Any]]:
    """A target in `target` and a drafter in `draft`; two adapters of other ranks, projections and scales; and the
    settings that serve them."""
    model = make_target(tmp_path / "target", **target)
    make_draft(tmp_path / "draft")
    adapters = {
        "all": make_adapter(tmp_path / "all", model, rank=3),
        "some": make_adapter(
            tmp_path / "some", model, 5, ("q_proj", "v_proj", "down_proj"), 6, torch.bfloat16, use_rslora=True
        ),
    }
    modules = {name: str(adapter.directory) for name, adapter in adapters.items()}
    settings = {"target_model": tmp_path / "target", "draft_model": "", "lora_modules": modules}
    return model, adapters, settings | {"kv_block_size": 4, "max_num_batched_tokens": 64, "max_model_len": 128}


def texts(built: BuiltEngine, names: list[str], **sampling: Any) -> dict[tuple[str, int], list[int]]:
    """What each of `names`, an adapter or "", gives for each prompt, all at once."""
    outputs = Outputs(built)
    keys = {f"{name}/{index}": (name, index) for index in range(len(prompts())) for name in names}
    for request_id, (name, index) in keys.items():
        given = {"temperature": 0.0, "max_tokens": MAX_TOKENS, "ignore_eos": True, **sampling}
        outputs.add(request_id, prompts()[index], lora_name=name, **given)
        outputs.step()
    found = outputs.finish()
    return {key: found[request_id] for request_id, key in keys.items()}


@pytest.mark.parametrize(("architecture", "changes"), FAMILIES)
def test_each_request_has_the_text_of_the_target_that_its_adapter_is_merged_into(
    tmp_path: Path, architecture: str, changes: dict[str, Any]
) -> None:
    model, adapters, settings = made(tmp_path, architecture=architecture, **changes)
    models = {"": model} | {name: adapter.merged(model) for name, adapter in adapters.items()}
    found = texts(built := engine(**settings), list(models))
    wanted = {(name, index): chosen(models[name], prompts()[index], tokens) for (name, index), tokens in found.items()}
    assert found == wanted
    assert len({tuple(found[name, 2]) for name in models}) == len(models), (
        "an adapter that changes nothing shows nothing"
    )
    hybrid = built.pair.target.decoder.delta_net is not None
    assert (built.core.stats().prefix_cache_hits > 0) != hybrid
    with_drafts = engine(**settings | {"draft_model": tmp_path / "draft"})
    assert texts(with_drafts, list(models)) == found
    assert with_drafts.core.stats().spec_decoding.num_drafts > 0
    assert with_drafts.runner.requests.num_adapted == sum(
        bool(with_drafts.runner.requests.adapters[each.index]) for each in with_drafts.runner.requests.records.values()
    )


def test_a_request_is_the_same_alone_and_beside_others(tmp_path: Path) -> None:
    _, _, settings = made(tmp_path)
    settings |= {"draft_model": tmp_path / "draft"}
    sampled = {"temperature": 0.8, "top_p": 0.9, "seed": 7}
    together = texts(engine(**settings), ["", "all", "some"], **sampled)
    for name in ("", "all", "some"):
        assert texts(engine(**settings), [name], **sampled).items() <= together.items()


@pytest.mark.parametrize("settings", [{"batch_invariant": True}, {"attention_backend": "torch"}, {"dtype": "bfloat16"}])
def test_other_operations_have_adapters_too(tmp_path: Path, settings: dict[str, Any]) -> None:
    model, adapters, models = made(tmp_path)
    found = texts(engine(**models, **settings), ["", "all"])
    assert found[("all", 2)] != found[("", 2)]
    if settings.get("dtype") is None:
        merged = adapters["all"].merged(model)
        assert found[("all", 2)] == chosen(merged, prompts()[2], found[("all", 2)])


def test_the_padded_steps_of_a_gpu_run_adapters(tmp_path: Path) -> None:
    _, _, settings = made(tmp_path)
    settings |= {"draft_model": tmp_path / "draft"}
    names = ["", "all", "some"]
    on_cpu = texts(engine(**settings), names)
    built = on_device_runner(engine(**settings, kv_write_guard=False))
    assert built.runner.graphs.num_steps
    assert texts(built, names) == on_cpu


def test_kv_is_shared_among_requests_of_one_adapter_alone(tmp_path: Path) -> None:
    _, _, settings = made(tmp_path)
    built = engine(**settings)
    prompt = prompts()[2]

    def cached(name: str) -> int:
        before = built.core.stats().prefix_cache_hits
        outputs = Outputs(built)
        outputs.add(f"{name} {before}", prompt, temperature=0.0, max_tokens=2, lora_name=name)
        outputs.finish()
        return built.core.stats().prefix_cache_hits - before

    assert [cached(name) for name in ("", "all", "some", "", "all", "some")] == [0, 0, 0, 88, 88, 88]


def test_a_pass_without_adapters_has_the_operations_of_a_target_without(tmp_path: Path) -> None:
    make_target(tmp_path / "t", num_hidden_layers=2)
    model = make_target(tmp_path / "t", num_hidden_layers=2)
    adapters = LoraAdapters({"a": make_adapter(tmp_path / "a", model, projections=("q_proj", "up_proj")).directory})
    spec, cpu = read_target(tmp_path / "t"), torch.device("cpu")
    plain = load_target(spec, 64, torch.float32, cpu)
    adapted = load_target(spec, 64, torch.float32, cpu, adapters=adapters)
    assert (adapted.stack is None) == (plain.stack is None)
    for own, wrapped, layer in zip(adapted.layers, adapted._adapted, plain.layers, strict=True):
        assert type(own.weights.qkv) is type(layer.weights.qkv)
        assert type(wrapped.weights.qkv) is type(wrapped.weights.mlp.gate_up) is LoraLinear
        assert wrapped.weights.qkv.base is own.weights.qkv, "weights are there once"
        assert type(wrapped.weights.output) is not LoraLinear, "no adapter adds to it"


def test_adapters_are_those_of_the_thread_and_of_the_block() -> None:
    base = Linear(torch.zeros(2, 3))
    linear = LoraLinear(base, Linear(torch.ones(1, 3)), Linear(torch.ones(2, 1)), torch.tensor([1]))
    x = torch.ones(2, 3)
    with using_adapters(torch.tensor([0, 1])):
        assert linear(x).tolist() == [[0, 0], [3, 3]]
        with using_adapters(None):
            assert not linear(x).any()
        assert linear(x).any()
        with ThreadPoolExecutor(1) as other:  # which runs another part of the step
            assert not other.submit(linear, x).result().any()
    assert not linear(x).any()


def test_numbers_of_other_adapters_do_not_reach_a_token() -> None:
    down = Linear(torch.tensor([[float("inf")] * 3, [1.0] * 3]))
    linear = LoraLinear(Linear(torch.zeros(2, 3)), down, Linear(torch.ones(2, 2)), torch.tensor([1, 2]))
    with using_adapters(torch.tensor([2, 0])):
        assert linear(torch.ones(2, 3)).tolist() == [[3, 3], [0, 0]]


def test_adapters_are_refused_with_ranks(tmp_path: Path) -> None:
    _, _, settings = made(tmp_path)
    with pytest.raises(ConfigError, match=r"'lora_modules' and 'tensor_parallel_size' \(2\) do not go together"):
        engine(**settings, tensor_parallel_size=2)
