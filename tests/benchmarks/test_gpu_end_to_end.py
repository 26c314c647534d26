"""The GPU benchmark runs from its ceilings to its report on a CPU, over tiny shapes: no figure of it means anything."""

from __future__ import annotations

import runpy
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.gpu import part, prompts, report, run, traffic
from benchmarks.gpu.build import attention_backend
from benchmarks.gpu.engine import Cell, decoding
from benchmarks.gpu.floor import Ceilings
from benchmarks.gpu.plain import PlainPair
from benchmarks.gpu.reference import load_transformers
from benchmarks.gpu.results import (
    DFLASH,
    EQUAL,
    INVARIANT,
    NO_DRAFT,
    PLAIN,
    PLAIN_DFLASH,
    RAGGED,
    TRANSFORMERS,
    Recorder,
    Results,
)
from benchmarks.gpu.sampling import BATCHES, FILTERS
from benchmarks.gpu.shapes import draft_tensors, target_tensors, tiny
from dflash_backend.messages import EngineCoreOutputs, GenerationRequest
from dflash_backend.worker.batch_parallel import op_threads
from dflash_backend.worker.graphs import capture_sizes

CPU = torch.device("cpu")
ROWS = {batch * (1 + tiny().num_speculative_tokens) for batch in BATCHES}


def run_parts(directory: Path, shape: str, *names: str) -> Results:
    """The parts in this process."""
    records = directory / "records"
    Recorder(records).write_raw("device", run.describe_device("cpu"))
    with op_threads(1):
        for name in names:
            options = ["--shape", shape, "--device", "cpu", "--acceptance-length", "2.4", "--seconds", "60"]
            assert part.main([name, *options, "--records", str(records)]) == 0
    return run.read_results(records, {"acceptance": "synthetic acceptance"})


def test_every_part_measures_and_the_report_says_that_it_is_no_measurement(tmp_path: Path) -> None:
    results = run_parts(tmp_path, "tiny", "ceilings", "engine", "references")
    assert results.ceilings is not None
    assert results.ceilings.copy_bandwidth > 0
    assert {cycle.system for cycle in results.cycles} == {
        DFLASH,
        INVARIANT,
        NO_DRAFT,
        TRANSFORMERS,
        PLAIN,
        PLAIN_DFLASH,
    }
    drafting = [cycle for cycle in results.cycles if cycle.system == DFLASH]
    assert [(cycle.batch, cycle.nominal_context) for cycle in drafting] == [(1, 24), (2, 40)]
    for cycle in drafting:
        assert all(seconds > 0 for seconds in cycle.phases.values())
        # The same unit. The two are measured in runs of their own, so on a busy machine they may differ by a multiple.
        assert sum(cycle.phases.values()) <= cycle.cycle_s * 20
        tokens_a_cycle = cycle.tokens_per_s * cycle.cycle_s / cycle.batch
        assert 1 <= tokens_a_cycle <= 4
        assert cycle.context > cycle.nominal_context
    assert [entry.what for entry in results.skipped] == ["tiny, batch 3, context 4096"]
    assert "there is room for" in results.skipped[0].reason
    text = report.write(tmp_path / "out", results)
    assert run.NOT_A_MEASUREMENT in text
    assert "Where a cycle's time goes: tiny" in text
    assert {(entry.filters, entry.rows) for entry in results.sampling} == {(c, r) for c in FILTERS for r in ROWS}
    assert all(min(entry.seconds, entry.torch_seconds) > 0 for entry in results.sampling)
    assert "| tiny | top_k 20, top_p 0.95 |" in text
    assert results.kernels[0].seconds >= results.kernels[-1].seconds > 0


def test_the_graphs_of_traffic_are_those_that_a_server_takes_for_its_cells() -> None:
    sizes = traffic.SIZES["cuda"]
    batches = {each.cell.batch for each in sizes.cells} | {sizes.mixed[0]}
    offered = capture_sizes(64, 16)
    assert set(sizes.row_sizes) == {min(size for size in offered if size >= batch) for batch in batches}


def test_traffic_measures_prompts_mixed_steps_unlike_rows_and_the_start(tmp_path: Path) -> None:
    results = run_parts(tmp_path, "tiny", "ceilings", "traffic")
    assert results.skipped == []
    sizes = traffic.SIZES["cpu"]
    assert [(c.system, c.batch) for c in results.cycles] == [(each.system, each.cell.batch) for each in sizes.cells]
    by_name = {cycle.system: cycle for cycle in results.cycles}
    assert by_name[RAGGED].context == pytest.approx(by_name[EQUAL].context, abs=4)
    assert all(0 < cycle.host_s <= cycle.cycle_s for cycle in results.cycles if cycle.host_s is not None)
    assert all(cycle.host_s is not None for cycle in results.cycles)
    assert [(run.name, run.batch, run.tokens) for run in results.steps] == [
        *(("prompt", 0, tokens) for tokens in sizes.prompts),
        ("mixed", sizes.mixed[0], sizes.mixed[2]),
    ]
    for run_ in results.steps:
        assert run_.floor_s > 0
        assert 0 < run_.host_s <= run_.seconds
        assert run_.device_s > 0
    assert results.starts[0].seconds > 0
    assert results.starts[0].num_graphs == 0, "a CPU has none"
    text = report.write(tmp_path / "out", results)
    assert "| tiny | mixed | 2 | 16 |" in text
    assert "from loaded weights to the first request" in text


def test_prompts_are_measured_by_every_way_that_there_is(tmp_path: Path) -> None:
    results = run_parts(tmp_path, "tiny", "ceilings", "prompts")
    assert results.skipped == []
    own = attention_backend(tiny(), torch.device("cpu"), torch.float32).name
    assert [(run_.name, run_.tokens) for run_ in results.steps] == [
        (f"prompt, {own}", tokens) for tokens in traffic.SIZES["cpu"].prompts
    ]
    whole, chunk = prompts.CHUNKS["cpu"]
    # The backend of a CPU, and torch's attention over the same, dense.
    assert [(run_.system, run_.tokens, run_.behind) for run_ in results.prompts] == [
        (own, *whole), ("torch", *whole), (own, *chunk)
    ]  # fmt: skip
    assert results.prompts[0].difference is None
    assert results.prompts[1].difference is None or results.prompts[1].difference < 1e-5
    query_size = tiny().target.decoder.query_size
    operations = [round(run_.flops_per_s * run_.seconds) for run_ in results.prompts]
    assert operations == [4 * query_size * n * (behind + n // 2) for n, behind in (whole, whole, chunk)]
    assert f"| tiny | {own} | 16 | 48 |" in report.write(tmp_path / "out", results)


def test_one_row_has_more_positions_than_the_others() -> None:
    class Asked:
        """Takes requests and has nothing to do."""

        def __init__(self) -> None:
            self.lengths: list[int] = []

        def add_request(self, request: GenerationRequest) -> None:
            self.lengths.append(len(request.prompt_token_ids))

        def step(self) -> EngineCoreOutputs:
            return EngineCoreOutputs()

        def abort(self, names: list[str]) -> None:
            assert len(names) == len(self.lengths)

        def has_unfinished(self) -> bool:
            return False

    for cell in (Cell(3, 16, first=60), Cell(3, 16)):
        core: Any = Asked()
        with decoding(core, tiny(), cell, 3, 2):
            pass
        assert core.lengths == [cell.first or 16, 16, 16]
        assert sum(core.lengths) / 3 == pytest.approx(cell.mean_context)


def test_a_prompt_is_computed_and_its_tokens_are_all_in_the_floor() -> None:
    shape, ceilings = tiny(), Ceilings(1e12, 1e9)  # nothing but operations counts
    whole = traffic.prompt_floor(shape, 0, 100, torch.float32, ceilings)
    parts = [traffic.prompt_floor(shape, begin, 50, torch.float32, ceilings) for begin in (0, 50)]
    head = 2 * shape.target.decoder.hidden_size * shape.target.vocab_size / 1e9
    assert sum(parts) - head == pytest.approx(whole, rel=0.01)
    assert parts[1] > parts[0], "behind the first half"


def test_experts_run_as_well(tmp_path: Path) -> None:
    results = run_parts(tmp_path, "tiny-moe", "ceilings", "engine", "references")
    assert {cycle.system for cycle in results.cycles} == {DFLASH, INVARIANT, NO_DRAFT}
    assert any(entry.reason == "the comparison is written for dense models" for entry in results.skipped)


def test_acceptance_that_was_asked_for_is_what_the_engine_yields(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(part.NUM_CYCLES, "cpu", 60)
    results = run_parts(tmp_path, "tiny", "ceilings", "engine")
    yields = [c.tokens_per_s * c.cycle_s / c.batch for c in results.cycles if c.system == DFLASH]
    assert yields
    for tokens in yields:
        assert tokens == pytest.approx(2.4, abs=0.5)


def test_plain_torch_computes_what_transformers_does_on_the_same_weights() -> None:
    shape, length = tiny(), 12
    pair = PlainPair(
        shape, target_tensors(shape, torch.float32, CPU), draft_tensors(shape, torch.float32, CPU), 2, length
    )
    tokens = torch.randint(0, shape.target.vocab_size, (2, length), generator=torch.Generator().manual_seed(0))
    with torch.inference_mode():
        expected = load_transformers(shape, torch.float32, CPU)(tokens).logits
        embedded = torch.nn.functional.embedding(tokens, pair.embedding)
        hidden, _ = pair.target.forward(embedded, torch.arange(length).expand(2, -1))
        actual = pair.logits(hidden, pair.final_norm)
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-5)


def test_without_a_gpu_the_command_says_so_and_writes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr("sys.argv", ["benchmarks.gpu", "--out", str(tmp_path / "out")])
    with pytest.raises(SystemExit) as ended:
        runpy.run_module("benchmarks.gpu", run_name="__main__")
    assert ended.value.code == 1
    said = capsys.readouterr().err
    assert "no NVIDIA GPU here" in said
    assert "--device cpu --shape tiny" in said
    assert not (tmp_path / "out").exists()


def test_a_run_on_a_cpu_leaves_the_recorded_results_alone() -> None:
    args = run.arguments().parse_args(["--device", "cpu", "--shape", "tiny"])
    assert run.out_directory(args) is None
    assert run.out_directory(run.arguments().parse_args([])) == run.DEFAULT_OUT
