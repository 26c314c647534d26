"""The timing of quantised products runs anywhere, and says where it measures nothing."""

from __future__ import annotations

import pytest
import torch

from benchmarks.gpu import quantised_products
from benchmarks.gpu.results import ProductRun
from dflash_kernels.quantised_linear import Tile, quantised_linear_reference
from dflash_kernels.quantised_weight import FP8, INT4, QuantisedWeight
from dflash_kernels.triton_import import HAS_TRITON


def test_it_runs_on_a_cpu_and_says_that_it_measures_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    assert quantised_products.main(["--device", "cpu", "--tokens", "3", "--weights", "int4"]) == 0
    out = capsys.readouterr().out
    assert "measure nothing" in out
    assert "| tiny | int4 | 3 |" in out
    assert "| experts | int4 | 3 |" in out


def test_without_a_gpu_it_says_what_to_do(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert quantised_products.main([]) == 1
    assert "run it on a machine with one" in capsys.readouterr().out


@pytest.mark.skipif(not HAS_TRITON, reason="the kernels need Triton")
@pytest.mark.parametrize("kind", [FP8, INT4])
def test_every_candidate_gives_the_product(kind: str) -> None:
    """In float16, which the interpreter rounds as a GPU does."""
    weight, names = quantised_products.random_weight(kind, 72, 256, torch.device("cpu")), set()
    for count in quantised_products.CANDIDATE_TOKENS:
        ways = quantised_products.ways_of(kind, count, weight)
        new = {name: way for name, way in ways.items() if name not in names}
        names |= set(ways)
        x = torch.randn(3, 256, generator=torch.Generator().manual_seed(0)).half()
        expected = quantised_linear_reference(x, weight)
        for way in new.values():
            torch.testing.assert_close(way(x, weight), expected, atol=5e-3 * float(expected.abs().max()), rtol=0)
    named = {name.rpartition(" for ")[0] for name in names}
    assert {quantised_products.tile_name(tile) for tile, _ in quantised_products.CANDIDATE_TILES} <= named
    assert {"codes", "numbers"} <= names


def test_a_candidate_that_is_off_or_fails_is_named_and_left_out(capsys: pytest.CaptureFixture[str]) -> None:
    weight, x = quantised_products.random_weight(INT4, 16, 128, torch.device("cpu")), torch.randn(2, 128)

    def fails(x: torch.Tensor, weight: QuantisedWeight) -> torch.Tensor:
        raise RuntimeError("out of resource: shared memory")

    ways = {
        "right": quantised_linear_reference,
        "the same": quantised_linear_reference,
        "off": lambda x, weight: 1.5 * quantised_linear_reference(x, weight),
        "fails": fails,
        "not a number": lambda x, weight: quantised_linear_reference(x, weight) * float("nan"),
    }
    expected = quantised_linear_reference(x, weight)
    found = quantised_products.seconds_of_ways(ways, "tiny, int4, 2 tokens", x, [weight], expected)
    assert list(found) == ["right", "the same"]
    assert found["right"] == found["the same"]
    said = capsys.readouterr().out
    assert "tiny, int4, 2 tokens: 'off' is off by 0.5 of the largest number" in said
    assert "'fails' fails (RuntimeError: out of resource: shared memory)" in said
    assert "'not a number' is off by nan" in said


def test_ways_are_ranked_by_their_mean_over_products() -> None:
    runs = [
        ProductRun("qkv", FP8, 64, 2e-5, 1e-5, 0.0, {"a": 1e-5, "b": 4e-5}),
        ProductRun("down", FP8, 64, 2e-5, 4e-5, 0.0, {"a": 1e-5}),
        ProductRun("down", FP8, 16, 1e-5, 3e-5, 0.0),
    ]
    each, ranked = quantised_products.candidate_tables(runs).split("\n\n")
    assert "| qkv | fp8 | 64 | 10.0 | 20.0 | a 10.0, b 40.0 |" in each
    assert ranked.splitlines()[2:] == [
        "| fp8 | 16 | as chosen | 3.00 | 1 |",
        "| fp8 | 64 | a | 2.00 | 2 |",
        "| fp8 | 64 | as chosen | 1.00 | 2 |",
        "| fp8 | 64 | b | 0.25 | 1 |",
    ]


def test_columns_are_split_for_so_many_programs_whatever_the_number_of_tokens() -> None:
    weight = quantised_products.random_weight(FP8, 256, 4096, torch.device("cpu"))
    tile = Tile(128, 128, 3, 8)
    assert [quantised_products.splits_for(16, count, weight, tile) for count in (1, 128, 129, 512, 2048)] == [
        8, 8, 4, 2, 1,
    ]  # fmt: skip
