"""The setting `kv_cache_dtype`: the target's KV in FP8 or bfloat16, however it is run; the drafter's as it was."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.gpu.shapes import qwen3_8b
from checks.core_state import check_core
from dflash_backend.attention import FP8, BackendError, Capabilities, Requirements, select_backend
from dflash_backend.attention.flash_attn_backend import FlashAttnBackend
from dflash_backend.attention.selection import BACKENDS, lacking
from dflash_backend.attention.torch_backend import TorchBackend
from dflash_backend.config import ConfigError, EngineConfig
from dflash_backend.engine.build import BuiltEngine, build_engine
from dflash_backend.worker.kv_cache import PagedKVCache, bytes_per_block
from dflash_kernels.fp8_kv import dequantise_kv_reference, quantise_kv_reference
from tests.parallel.test_ranks import end
from tests.support.batch_invariance import differing, random_prompts, run
from tests.support.scale import by_night, others_by_night
from tests.support.tiny_models import VOCAB_SIZE, make_draft, make_pair, make_target
from tests.worker.engines import Outputs, engine, on_device_runner, triton_engine

pytestmark = pytest.mark.usefixtures("single_thread")
SETTINGS: dict[str, Any] = {"kv_block_size": 4, "max_num_batched_tokens": 48, "max_model_len": 128}
FP8_KV: dict[str, Any] = {**SETTINGS, "kv_cache_dtype": "fp8"}
SAMPLINGS: list[dict[str, Any]] = [{"temperature": 0.0}, {"temperature": 1.0, "seed": 3, "top_p": 0.9}]
FAMILIES = ["Qwen3ForCausalLM", "MistralForCausalLM", "GptOssForCausalLM", "Gemma4ForCausalLM", "Qwen3NextForCausalLM"]
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return make_pair(tmp_path_factory.mktemp("models"))


def texts(built: BuiltEngine, **sampling: Any) -> dict[str, list[int]]:
    """Prompts of several lengths, in chunks, with hits on one another, beside rows that decode."""
    shared = random_prompts(1, VOCAB_SIZE)[0][:20]
    outputs = Outputs(built)
    for index, prompt in enumerate([[5, 6, 7, 8, 9], shared, [i % 50 + 1 for i in range(60)], [*shared, 8, 4, 9]]):
        outputs.add(str(index), prompt, max_tokens=12, ignore_eos=True, **sampling)
        outputs.step()
    tokens = outputs.finish()
    check_core(built.core)
    return tokens


def models_of(architecture: str, folder: Path) -> dict[str, str]:
    others = {"sliding_window": 9} if architecture.startswith("Mistral") else {}
    others |= {"num_experts": 0} if architecture.startswith("Qwen3Next") else {}
    make_target(folder / "target", architecture=architecture, **others)
    make_draft(folder / "draft")
    return {"target_model": str(folder / "target"), "draft_model": str(folder / "draft")}


def test_fp8_is_bytes_and_scales_for_the_target_and_the_drafter_keeps_its_dtype(pair: dict[str, str]) -> None:
    kv = engine(**pair, **FP8_KV).runner.model.kv
    assert {layer.data.dtype for layer in kv.target} == {torch.uint8}
    assert {layer.scales.shape == layer.data.shape[:-1] for layer in kv.target if layer.scales is not None} == {True}
    assert {(layer.data.dtype, layer.scales) for layer in kv.draft} == {(torch.float32, None)}


@pytest.mark.parametrize("kv_dtype", ["fp8", "bfloat16", "bf16"])
def test_there_are_as_many_blocks_as_the_bytes_say_and_the_load_says_it(pair: dict[str, str], kv_dtype: str) -> None:
    lines: list[str] = []
    settings = {**pair, "kv_cache_gb": 0.01, "max_model_len": 64}
    plain = build_engine(EngineConfig.from_values(settings))
    own = build_engine(
        EngineConfig.from_values({**settings, "kv_cache_dtype": kv_dtype}), lambda message, _: lines.append(message)
    )
    (line,) = [line for line in lines if "KV cache:" in line and "as many fit" in line]
    ratio = own.ready.num_kv_blocks / plain.ready.num_kv_blocks
    said = float(line.split("so that ")[1].split(" times as many fit")[0])
    assert said == pytest.approx(ratio, rel=0.01)
    size = sum(
        tensor[0].nbytes
        for layer in [*own.runner.model.kv.target, *own.runner.model.kv.draft]
        for tensor in (layer.data, layer.scales)
        if tensor is not None
    )
    assert f"{size} bytes a block" in line
    assert own.ready.num_kv_blocks == int(0.01 * 1024**3 // size)
    assert f"tokens in {kv_dtype};" in own.ready.description


def test_qwen3_8b_with_five_drafter_layers_gets_about_1_7_times_the_blocks() -> None:
    shape = qwen3_8b()
    sizes = [
        bytes_per_block(shape.target.decoder, shape.draft.decoder, 16, torch.bfloat16, dtype) for dtype in (None, FP8)
    ]
    # 36 layers of 8 heads of 128 numbers, K and V, in 2 bytes or in 1 with 4 for each head; 5 of the drafter in 2.
    assert sizes == [16 * 41 * 16 * 256, 16 * (36 * 16 * 132 + 5 * 16 * 256)]
    assert sizes[0] / sizes[1] == pytest.approx(1.74, abs=0.005)


@pytest.mark.parametrize("architecture", [*FAMILIES[:2], *map(by_night, FAMILIES[2:])])
def test_drafts_change_no_text_and_steps_of_a_gpu_give_that_of_a_cpu(tmp_path: Path, architecture: str) -> None:
    models = models_of(architecture, tmp_path)
    with_guard = {**models, **FP8_KV, "kv_write_guard": True}
    alone, drafted = engine(**with_guard | {"draft_model": ""}), engine(**with_guard)
    overlapped = on_device_runner(engine(**models, **FP8_KV))
    for sampling in SAMPLINGS:
        expected = texts(alone, **sampling)
        assert texts(drafted, **sampling) == expected == texts(overlapped, **sampling)
    assert drafted.core.stats().prefix_cache_hits > 0


def test_kernels_give_the_text_of_torch(tmp_path: Path) -> None:
    layers = {"target_layer_ids": [0, 1], "mask_token_id": VOCAB_SIZE - 1}
    target = {"architecture": "GptOssForCausalLM", "num_hidden_layers": 2}
    settings = {**make_pair(tmp_path, target, num_target_layers=2, dflash_config=layers), **FP8_KV}
    prompts = [[5, 6, 7, 8, 9], [i % 50 + 1 for i in range(60)]]
    torchs, kernels = (run(build(**settings), prompts, max_tokens=4)[0] for build in (engine, triton_engine))
    assert kernels == torchs


@pytest.mark.parametrize("architecture", others_by_night(FAMILIES[:4], (FAMILIES[0], FAMILIES[2])))
def test_with_batch_invariant_chunks_hits_and_drafts_change_no_bit_over_fp8(tmp_path: Path, architecture: str) -> None:
    settings = {**models_of(architecture, tmp_path), **FP8_KV, "batch_invariant": True, "kv_write_guard": False}
    prompts = random_prompts(4, VOCAB_SIZE)
    alone = run(engine(**settings | {"draft_model": "", "max_num_batched_tokens": 2048}), prompts[:1])
    built = engine(**settings)
    for round_number in range(2):
        together = run(built, prompts, prefix=f"{round_number}-")
        assert differing(alone[1], together[1]) == 0
    assert built.core.stats().prefix_cache_hits > 0


def test_a_chunk_attends_over_what_the_cache_holds(pair: dict[str, str]) -> None:
    """Logits of a prompt in one chunk and of one token at a time differ by rounding of float32 alone, far less than by
    what FP8 costs."""
    prompt = [[5, 6, 7, 8, 9, 3, 4, 11, 12, 13]]
    whole, pieces, plain = (
        run(engine(**{**pair, **settings, "draft_model": ""}), prompt, max_tokens=1)[1]["0", len(prompt[0]) - 1]
        for settings in (FP8_KV, FP8_KV | {"max_num_batched_tokens": 3, "max_num_seqs": 1}, SETTINGS)
    )
    apart, cost = float((whole - pieces).abs().max()), float((whole - plain).abs().max())
    assert cost > 1e-3
    assert apart < 0.02 * cost


def test_ranks_keep_their_heads_in_fp8_and_give_the_text_of_one(pair: dict[str, str]) -> None:
    alone, shared = engine(**pair, **FP8_KV), engine(**pair, **FP8_KV, tensor_parallel_size=2)
    own, whole = shared.runner.model.kv.target[0], alone.runner.model.kv.target[0]
    assert own.data.shape[3] * 2 == whole.data.shape[3]
    assert own.scales is not None
    assert own.scales.shape == own.data.shape[:-1]
    for sampling in SAMPLINGS:
        assert texts(shared, **sampling) == texts(alone, **sampling)
    end(shared)


def test_bfloat16_kv_beside_float32_changes_no_text_with_drafts(pair: dict[str, str]) -> None:
    settings = {**pair, **SETTINGS, "kv_cache_dtype": "bf16", "kv_write_guard": True}
    expected = texts(engine(**settings | {"draft_model": ""}), temperature=0.0)
    assert texts(engine(**settings), temperature=0.0) == expected


@pytest.mark.parametrize("kv_dtype", ["fp8", "bf16"])
def test_the_first_layers_kv_is_that_of_float32_rounded(pair: dict[str, str], kv_dtype: str) -> None:
    """Its hidden states are the same, whatever the KV is in."""
    kept = []
    for dtype in ("auto", kv_dtype):
        built = engine(**{**pair, **SETTINGS, "draft_model": ""}, kv_cache_dtype=dtype)
        run(built, [[7 + i for i in range(40)]], max_tokens=1)
        layer = built.runner.model.kv.target[0]
        kept.append(layer.gather(torch.arange(10), 4, torch.float32))
    exact, rounded = kept
    assert int(exact.abs().amax((-1, -2)).count_nonzero()) == 2 * 40
    if kv_dtype == "bf16":
        assert torch.equal(rounded, exact.bfloat16().float())
    else:
        expected = dequantise_kv_reference(*quantise_kv_reference(exact), torch.float32)
        assert torch.equal(rounded, expected)
        assert not torch.equal(rounded, exact)


def test_a_pool_in_fp8_is_claimed_whole(pair: dict[str, str]) -> None:
    spec = qwen3_8b().target.decoder
    kv = PagedKVCache.allocate(spec, None, 2, 4, torch.float32, CPU, FP8)
    kv.target[0].data.fill_(3)
    assert kv.target[0].scales is not None
    kv.target[0].scales.fill_(3)
    kv.claim()
    assert not any(layer.data.any() or layer.scales.any() for layer in kv.target if layer.scales is not None)


@pytest.mark.parametrize("kv_dtype", [FP8, torch.bfloat16])
def test_a_backend_that_cannot_read_such_kv_is_refused_with_those_that_can(kv_dtype: torch.dtype) -> None:
    needs = Requirements(frozenset(), frozenset({64}), torch.float16, "cpu", kv_dtype=kv_dtype)
    backends = {"flash_attn": (limited(), TorchBackend), "torch": BACKENDS["torch"]}
    with pytest.raises(BackendError, match=r"'flash_attn' lacks kv_cache_dtype (fp8|bfloat16).*would do: torch"):
        select_backend("flash_attn", needs, 16, backends)
    assert select_backend(None, needs, 16, backends).name == "torch"
    assert not lacking(BACKENDS["torch"][0], needs, 16)


def test_flash_attn_says_that_it_reads_kv_of_its_own_dtype_alone() -> None:
    needs = Requirements(frozenset(), frozenset({64}), torch.bfloat16, "cuda", kv_dtype=FP8)
    assert lacking(FlashAttnBackend.capabilities, needs, 256) == ["kv_cache_dtype fp8"]


def limited() -> Capabilities:
    return dataclasses.replace(TorchBackend.capabilities, kv_dtypes=frozenset())


@pytest.mark.parametrize(
    ("value", "words"),
    [("fp8_e5m2", "fp8_e5m2 is not supported: fp8 is e4m3"), ("int8", "int8 is not"), ("fp8_e4m3", "fp8 is e4m3 here")],
)
def test_other_values_are_refused_with_what_would_work(value: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        EngineConfig.from_values({"kv_cache_dtype": value})
