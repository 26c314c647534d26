"""The floor of a cycle is arithmetic on published dimensions, and acceptance is drawn from what it says."""

from __future__ import annotations

import dataclasses
import statistics

import pytest
import torch

from benchmarks.gpu import floor, shapes, step_bytes
from benchmarks.gpu.floor import Ceilings, CycleSize, Work
from benchmarks.gpu.run import main
from benchmarks.gpu.synthetic import SyntheticAcceptance
from benchmarks.gpu.traffic import mixed_floor
from dflash_kernels.quantised_weight import FP8, INT4, MXFP4, QuantisedWeight

BF16 = 2
CEILINGS = Ceilings(copy_bandwidth=4.3e12, matrix_rate=780e12)


def size(batch: int = 1, context: float = 0, k: int = 15) -> CycleSize:
    return CycleSize(batch, context, k, BF16)


def test_qwen3_8b_reads_its_published_weights_once_in_verify_and_the_drafters_once_behind() -> None:
    work = floor.cycle_work(shapes.qwen3_8b(), size())
    # 8.19e9 parameters without the embedding, whose rows are looked up; the drafter's with fc and the target's head.
    assert work["verify"].bytes + work["accept"].bytes == pytest.approx(15.2e9, rel=0.01)
    assert work["draft"].bytes + work["inject"].bytes == pytest.approx(3.3e9, rel=0.05)


def test_floor_of_qwen3_8b_at_4_3_tb_per_s_is_4_3_ms() -> None:
    work = floor.cycle_work(shapes.qwen3_8b(), size())
    assert sum(floor.floor_seconds(work, CEILINGS).values()) == pytest.approx(4.3e-3, rel=0.02)


def test_published_shapes_have_the_published_number_of_parameters() -> None:
    for name, billions in (("qwen3-8b", 8.19), ("llama-3.1-8b", 8.03), ("qwen3-30b-a3b", 30.5)):
        shape = shapes.SHAPES[name]()
        count = shapes.num_elements(shapes.target_expected(shape))
        assert count / 1e9 == pytest.approx(billions, abs=0.05), name


def test_weights_of_the_floor_are_the_matrices_of_the_models() -> None:
    for name in ("tiny", "tiny-moe"):
        shape = shapes.SHAPES[name]()
        tensors = shapes.target_expected(shape)
        matrices = shapes.num_elements({name: tensor for name, tensor in tensors.items() if tensor.dim() == 2})
        embedding = shape.target.vocab_size * shape.target.decoder.hidden_size
        # Enough tokens that every expert is chosen by someone; their own bytes are taken off again.
        many = CycleSize(1000, 0, 0, 1)
        work = floor.cycle_work(shape, many)
        decoder = shape.target.decoder
        of_tokens = many.num_tokens * (decoder.hidden_size + 2 * shape.target.vocab_size)
        of_tokens += many.num_tokens * decoder.num_layers * 4 * decoder.kv_size
        num_bytes = work["verify"].bytes + work["accept"].bytes
        assert num_bytes - of_tokens == pytest.approx(matrices - embedding), name


def test_context_adds_its_kv_once_a_row() -> None:
    shape = shapes.qwen3_8b()
    near, far = (floor.cycle_work(shape, size(8, context)) for context in (0, 32768))
    kv_bytes = 8 * 32768 * floor.kv_bytes_per_token(shape, BF16)
    assert sum(w.bytes for w in far.values()) - sum(w.bytes for w in near.values()) == pytest.approx(kv_bytes)


def test_kv_in_fp8_takes_away_its_share_of_the_targets_kv_and_of_nothing_else() -> None:
    shape = shapes.qwen3_8b()
    found = step_bytes.cycle_bytes(shape, size(8, 32768))
    # A number takes 1 byte and a share of 4 in place of 2; the new tokens' are written and read.
    numbers = 36 * 2 * 1024 * 8 * (32768 + 2 * 16)
    assert found["bf16"] - found["KV fp8"] == pytest.approx(numbers * (2 - 132 / 128), rel=1e-6)


@pytest.mark.parametrize(("name", "bits"), [("fp8", 8 + 32 / 128**2), ("int4", 4 + 16 / 128)])
def test_quantised_weights_are_those_of_the_targets_projections_alone(name: str, bits: float) -> None:
    found = step_bytes.cycle_bytes(shapes.qwen3_8b(), size())
    projections = 36 * (4096 * (4096 + 2 * 1024) + 4096 * 4096 + 3 * 4096 * 12288)
    assert found["KV fp8"] - found[f"weights {name}, KV fp8"] == pytest.approx(projections * (2 - bits / 8), rel=1e-6)


@pytest.mark.parametrize(("name", "kind"), [("fp8", FP8), ("int4", INT4)])
def test_bytes_of_a_quantised_weight_are_what_it_takes_in_memory(name: str, kind: str) -> None:
    codes = torch.zeros(256, 512, dtype=torch.uint8)
    rows, dtype = (128, torch.float32) if kind == FP8 else (1, torch.float16)
    weight = QuantisedWeight.of_codes(kind, codes, torch.zeros(256 // rows, 4, dtype=dtype), None, rows, 128)
    assert weight.num_bytes / codes.numel() == step_bytes.WEIGHTS[name]


@pytest.mark.parametrize("name", step_bytes.WEIGHTS)
def test_experts_that_are_read_count_as_quantised_and_their_router_does_not(name: str) -> None:
    shape = shapes.qwen3_30b_a3b()
    found = step_bytes.cycle_bytes(shape, size())
    attention = 2048 * (4096 + 2 * 512) + 4096 * 2048
    experts = floor.expected_experts(128, 8, 16) * 3 * 2048 * 768
    saved = 48 * (attention + experts) * (2 - step_bytes.WEIGHTS[name])
    assert found["KV fp8"] - found[f"weights {name}, KV fp8"] == pytest.approx(saved, rel=1e-6)


def test_experts_of_gpt_oss_count_as_mxfp4_and_what_is_beside_them_as_bfloat16() -> None:
    found = step_bytes.cycle_bytes(shapes.gpt_oss_20b(), size())
    experts = 24 * floor.expected_experts(32, 4, 16) * 3 * 2880 * 2880
    assert found["KV fp8"] - found["experts mxfp4, KV fp8"] == pytest.approx(experts * (2 - 4.25 / 8), rel=1e-6)
    codes, scales = torch.zeros(64, 2880, dtype=torch.uint8), torch.zeros(64, 90, dtype=torch.uint8)
    weight = QuantisedWeight.of_codes(MXFP4, codes, scales, None, 1, 32)
    assert weight.num_bytes / codes.numel() == step_bytes.MXFP4_EXPERTS
    assert found.keys() == {"bf16", "KV fp8", "experts mxfp4, KV fp8"}


def test_a_shape_of_the_floor_alone_is_not_measured(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--device", "cpu", "--shape", "gpt-oss-20b"])
    assert "gpt-oss-20b is there with --floor alone" in capsys.readouterr().err


def test_floor_prints_a_line_for_each_size_on_any_machine(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--floor"]) == 0
    lines = capsys.readouterr().out.splitlines()[2:]
    assert len(lines) == 4 * 9
    assert {line.count("|") for line in lines} == {9}
    assert lines[-1].startswith("| gpt-oss-20b | 32 | 32000 |")
    assert lines[0].startswith("| Qwen3-8B | 1 | 1000 | 18.")


def test_a_sliding_window_bounds_the_kv_that_is_read() -> None:
    decoder = shapes.qwen3_8b().draft.decoder
    windowed = dataclasses.replace(decoder, sliding_windows=(512,) * decoder.num_layers)
    assert floor.decoder_work(windowed, size(context=32768)) == floor.decoder_work(decoder, size(context=512))


def test_a_floor_is_bound_by_operations_when_there_are_enough_tokens() -> None:
    one, many = (floor.matrix(4096, 4096, tokens, BF16) for tokens in (1, 4096))
    assert one.seconds(CEILINGS) == one.bytes / CEILINGS.copy_bandwidth
    assert many.seconds(CEILINGS) == many.flops / CEILINGS.matrix_rate
    assert Work(1.0, 2.0) + Work(3.0, 4.0) == Work(4.0, 6.0)


def test_a_mixed_step_multiplies_weights_by_the_tokens_of_both_and_reads_them_once() -> None:
    """8 rows with 15 drafts and 256 tokens of a prompt are 384 tokens to the target: 2 * 6.95e9 operations each are
    6.6 ms at 806 TFLOP/s, while either alone would wait for the weights. One token more is nearly nothing."""
    shape, ceilings, size = shapes.SHAPES["qwen3-8b"](), Ceilings(4.284e12, 806e12), CycleSize(8, 1024, 15, 2)
    cycle_s = sum(floor.floor_seconds(floor.cycle_work(shape, size), ceilings).values())
    assert mixed_floor(shape, size, 1, ceilings) == pytest.approx(cycle_s, rel=1e-3)
    verify_s = 384 * 2 * 6.946e9 / 806e12
    rest = floor.cycle_work(shape, size)
    rest_s = rest["draft"].seconds(ceilings) + rest["inject"].seconds(ceilings)
    assert mixed_floor(shape, size, 256, ceilings) == pytest.approx(verify_s + rest_s, rel=0.06)
    assert verify_s + rest_s > 1.5 * cycle_s


def test_expected_experts_go_from_one_tokens_own_to_all() -> None:
    assert floor.expected_experts(128, 8, 1) == pytest.approx(8)
    assert floor.expected_experts(128, 8, 16) == pytest.approx(128 * (1 - (120 / 128) ** 16))
    assert floor.expected_experts(128, 8, 2000) == pytest.approx(128)


def test_without_drafts_nothing_is_injected_or_drafted() -> None:
    work = floor.cycle_work(shapes.qwen3_8b(), size(k=0))
    assert work["inject"] == work["draft"] == Work()


@pytest.mark.parametrize("length", [1.0, 3.2, 6.5, 15.9, 16.0])
def test_synthetic_acceptance_has_the_mean_that_was_asked_for(length: float) -> None:
    acceptance = SyntheticAcceptance.with_mean_length(15, length)
    weights = acceptance.weights()
    assert sum(weights) == pytest.approx(1.0)
    assert 1 + sum(count * weight for count, weight in enumerate(weights)) == pytest.approx(length, abs=1e-6)


def test_synthetic_acceptance_draws_what_it_states() -> None:
    acceptance = SyntheticAcceptance.with_mean_length(15, 6.5)
    drawn = acceptance.draw(20_000, seed=3)
    assert 1 + statistics.mean(drawn) == pytest.approx(6.5, abs=0.15)
    assert set(drawn) == set(range(16))
    assert acceptance.draw(50, seed=3) == drawn[:50]
    assert "synthetic acceptance" in acceptance.describe()


def test_a_mean_that_no_block_can_have_is_refused() -> None:
    with pytest.raises(ValueError, match="cannot be had with 3 drafts: 1 to 4"):
        SyntheticAcceptance.with_mean_length(3, 6.5)


def test_random_tensors_are_the_same_whenever_a_name_is_read() -> None:
    shape = shapes.tiny()
    first, second = (shapes.target_tensors(shape, torch.float32, torch.device("cpu")) for _ in range(2))
    name = "model.layers.1.mlp.down_proj.weight"
    tensor = first.make(name)
    assert torch.equal(tensor, second.make(name))
    assert not torch.equal(tensor, first.make("model.layers.0.mlp.down_proj.weight"))
    assert float(tensor.std()) == pytest.approx(shapes.WEIGHT_STD, rel=0.1)
    assert torch.equal(first.make("model.norm.weight"), torch.ones(shape.target.decoder.hidden_size))
    with pytest.raises(KeyError):
        first.make("model.norm.bias")
