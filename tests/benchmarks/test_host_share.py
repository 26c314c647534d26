"""`make bench` says how much of a step the host takes for itself."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import report
from benchmarks.measure import HostShare, Measurement, measure_host_share
from benchmarks.prefix import PrefixMeasurement
from dflash_backend import LLM
from load_tests.prompts import load_prompts

HOST = HostShare(streams=32, num_steps=100, step_s=2.0, phase_s=1.6, message_s=0.1)


def test_the_host_has_what_no_phase_accounts_for_and_the_messages() -> None:
    assert HOST.host_s == pytest.approx(0.5)
    assert HOST.share == pytest.approx(0.5 / 2.1)
    assert HOST.per_step_s == pytest.approx(5e-3)


def test_every_step_of_a_run_is_counted_once_and_the_host_has_a_part_of_it() -> None:
    llm = LLM(enable_prefix_caching=False, kv_cache_gb=0.1, max_num_seqs=4)
    prompts = [llm.tokenizer.encode(row.prompt) for row in load_prompts(4)]
    before = llm.stats()
    host = measure_host_share(llm, prompts, streams=4, max_tokens=8)
    after = llm.stats()
    assert host.num_steps == after.num_steps - before.num_steps > 0
    assert host.step_s == pytest.approx(after.step_seconds - before.step_seconds)
    assert 0 < host.phase_s < host.step_s
    assert host.message_s > 0


def test_the_share_is_in_the_table_and_in_the_json(tmp_path: Path) -> None:
    runs = [
        Measurement(system, streams, seconds=1.0, num_tokens=10, outputs={0: [1]})
        for system in (report.BASELINE, report.NO_DRAFT, report.DFLASH)
        for streams in (1, 32)
    ]
    prefix = PrefixMeasurement(10, 1, 1.0, 0.1, 2.0, 2.0, True, 10)
    measured = report.Runs(runs, through_ratio=0.8, through_ratios=[0.8], host=HOST)
    text = report.write(tmp_path, measured, prefix, {"cores": 2, "torch": "2", "prompts": 1})
    row = next(line for line in text.splitlines() if "host's own share" in line)
    assert "32 streams: 5.00 of 21.00 ms | 0.238 |" in row
    assert json.loads((tmp_path / "bench.json").read_text())["host"]["share"] == pytest.approx(0.238, abs=1e-3)
