"""A GPU that is not there has a GPU's rules, and what travels to one that is finds its place there."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

from benchmarks.gpu import card_report, pack
from benchmarks.gpu.card_tests import GPU_TESTS
from benchmarks.gpu.results import PartRun, Results, Skipped


def test_an_engine_keeps_a_gpus_rules_and_what_breaks_them_is_noticed() -> None:
    environ = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "tests.benchmarks.fake_gpu"]
    done = subprocess.run(command, cwd=pack.ROOT, env=environ, capture_output=True, text=True, check=False)
    assert done.stdout.endswith("rules kept\n"), done.stderr[-3000:]


def test_a_rehearsal_fails_where_a_part_or_an_engine_did() -> None:
    ended = [PartRun("engine", 9.0, 0, None), PartRun("start", 9.0, 0, "failed with status 1: RuleError")]
    skipped = [Skipped("text, graphs", "RuntimeError: no"), Skipped("tiny, batch 3", "no space")]
    found = card_report.problems(Results({}, parts=ended, skipped=skipped))
    assert found == ["start: failed with status 1: RuleError", "text, graphs: RuntimeError: no"]
    assert card_report.problems(Results({}, parts=ended[:1])) == []


def entry(cache: Path, key: str, name: str) -> None:
    """A kernel as Triton keeps it, whose group names its files by whole paths."""
    folder = cache / key
    folder.mkdir(parents=True)
    files = [f"{name}.cubin", f"{name}.json"]
    for file in files:
        (folder / file).write_text(f"{key} {file}")
    (folder / "lock").write_text("")
    (folder / f"{name}.source").write_text("text that was compiled")
    paths = {file: str(folder / file) for file in files}
    (folder / f"__grp__{name}.json").write_text(json.dumps({"child_paths": paths}))


def test_kernels_that_came_along_are_found_where_they_are_unpacked(tmp_path: Path) -> None:
    cache, checkout = tmp_path / "made", tmp_path / "checkout"
    entry(cache, "AB12", "_rms_norm_kernel")
    entry(cache, "CD34", "_merge_kernel")
    packed = checkout / pack.FOLDER / pack.KERNELS
    assert pack.unpacked(checkout, tmp_path) == {}, "nothing came along"
    pack.pack(cache, packed, {"triton": "3.6.0", "key": "k", "arch": 90, "kernels": 2})
    with tarfile.open(packed) as archive:
        names = archive.getnames()
    assert names[-1] == pack.MANIFEST, "unpacked last, it says that all is there"
    assert not any(name.endswith(("lock", ".source")) for name in names)
    kernels = [name.rpartition("/")[2] for name in names if name.endswith(".cubin")]
    assert kernels == ["_merge_kernel.cubin", "_rms_norm_kernel.cubin"], (
        "by name, so that those of a kernel are neighbours"
    )
    environ = pack.unpacked(checkout, tmp_path / "there")
    there = Path(environ["TRITON_CACHE_DIR"])
    assert there.is_relative_to(tmp_path / "there")
    assert pack.num_kernels(there) == 2
    group = json.loads((there / "AB12" / "__grp___rms_norm_kernel.json").read_text())["child_paths"]
    assert group == {name: str(there / "AB12" / name) for name in ("_rms_norm_kernel.cubin", "_rms_norm_kernel.json")}
    assert Path(group["_rms_norm_kernel.cubin"]).read_text() == "AB12 _rms_norm_kernel.cubin"
    # Unpacked once; another pack lies elsewhere.
    (there / "AB12" / "_rms_norm_kernel.cubin").unlink()
    assert pack.unpacked(checkout, tmp_path / "there") == environ
    assert pack.num_kernels(there) == 1
    entry(cache, "EF56", "_argmax_kernel")
    pack.pack(cache, packed, {"triton": "3.6.0", "key": "k", "arch": 90, "kernels": 3})
    assert pack.unpacked(checkout, tmp_path / "there") != environ


def test_what_is_said_of_carried_kernels_names_a_triton_that_they_do_not_fit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from benchmarks.gpu.card_parts import carried_kernels

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    assert carried_kernels() == "none"
    about = {"triton": "3.6.0", "key": pack.kernel_key(), "arch": 90, "kernels": 7}
    (tmp_path / pack.MANIFEST).write_text(json.dumps(about))
    assert carried_kernels() == "7 by Triton 3.6.0 for compute capability 9.0: they fit"
    (tmp_path / pack.MANIFEST).write_text(json.dumps(about | {"key": "of another"}))
    assert carried_kernels().endswith("they do not fit the Triton of this machine")


def test_the_pack_compiles_what_the_report_launches(tmp_path: Path) -> None:
    others = {"texts cpu", "texts half", "profile", "second start", "products", "sustained", "measured cycles"}
    launching = {part.name for part in card_report.PARTS} - others
    assert set(pack.PARTS) == launching
    tests = pack.command("python3.12", "tests", tmp_path)
    assert set(GPU_TESTS) < set(tests)
    command = pack.command("python3.12", "start", tmp_path / "records")
    assert command[:4] == ["python3.12", "-m", "benchmarks.gpu.card_parts", "start"]
    assert command[-2:] == ["--fake", "compile"]
    (tmp_path / "deep" / "er").mkdir(parents=True)
    (tmp_path / "deep" / "er" / "file").write_bytes(b"x" * 1000)
    assert pack.size_of(tmp_path) == 1000
    assert pack.MOST_BYTES == 60 * 1024 * 1024
