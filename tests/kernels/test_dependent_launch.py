"""Kernels that begin before the one before them has ended keep the rules of `dflash_kernels.dependent_launch`."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

import dflash_kernels
from dflash_kernels import dependent_launch
from tests.kernels.compile_only import ROOT
from tests.support.scale import SCALE

ENVIRONMENT = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
# Loads in front of the wait: of the weight of a norm, and of both halves of those of queries and keys.
CONSTANT_LOADS = {"_rms_norm_kernel": 1, "_qk_norm_rope_write_kernel": 2}
SMALL = {"_rms_norm_kernel", "_gated_mul_kernel", "_qk_norm_rope_write_kernel"}
ATTENTION = {"_attend_shares_kernel", "_merge_kernel"}
ARCHS = [80, 89, 90, 100, 120] if SCALE >= 4 else [90]


@pytest.fixture(scope="module")
def compiled() -> list[tuple[str, int, dict[str, int]]]:
    """Of each kernel: its name, the architecture, and what was counted."""
    pytest.importorskip("triton.backends.nvidia", reason="this build of Triton cannot compile for NVIDIA GPUs")
    command = [sys.executable, "-m", "tests.kernels.dependent_launches", *map(str, ARCHS)]
    done = subprocess.run(command, cwd=ROOT, env=ENVIRONMENT, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    found = []
    for line in done.stdout.splitlines():
        name, arch, *counts = line.split()
        found.append((name, int(arch), {key: int(value) for key, value in (each.split("=") for each in counts)}))
    return found


def check(found: list[tuple[str, int, dict[str, int]]]) -> None:
    for name, arch, counts in found:
        if arch < dependent_launch.FIRST_ARCH:
            assert set(counts.values()) == {0}, (name, arch, counts)
            continue
        assert counts.pop("loads") <= CONSTANT_LOADS.get(name, 0), (name, arch)
        expected = {"pdl": 1, "waits": 1, "at_once": 1, "early_launches": 0, "launches": 1, "stores": 0}
        assert counts == expected, (name, arch)


@pytest.mark.slow
@pytest.mark.parametrize("attention", [False, True])
def test_kernels_wait_before_they_read_or_write_what_others_do(
    compiled: list[tuple[str, int, dict[str, int]]], attention: bool
) -> None:
    found = [each for each in compiled if (each[0] in SMALL) != attention]
    names = ATTENTION if attention else SMALL
    assert {(name, arch) for name, arch, _ in found} == {(name, arch) for name in names for arch in ARCHS}
    check(found)


def test_every_kernel_that_can_be_launched_so_waits_and_says_it_at_each_launch() -> None:
    waiting = set()
    for path in Path(dflash_kernels.__path__[0]).glob("*.py"):
        source = path.read_text()
        names = set()
        for name, body in re.findall(r"def (_\w+_kernel)\((.*?)(?=\n@|\ndef |\Z)", source, re.DOTALL):
            if "PDL: tl.constexpr" in body:
                assert body.count("after_kernel_before(PDL)") == 1, name
                names.add(name)
            else:
                assert "after_kernel_before" not in body, name
        assert source.count("**dependent_launch()") == len(names), path.name
        waiting |= names
    assert waiting == SMALL | ATTENTION


def test_a_launch_is_a_dependent_one_where_the_gpu_has_it_and_the_setting_allows_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(dependent_launch._Wanted, "value", True)
    monkeypatch.setattr(dependent_launch, "_has_dependent_launch", lambda: False)
    assert dependent_launch.dependent_launch() == {"PDL": False}
    monkeypatch.setattr(dependent_launch, "_has_dependent_launch", lambda: True)
    assert dependent_launch.dependent_launch() == {"PDL": True, "launch_pdl": True}
    dependent_launch.use_dependent_launch(False)
    assert not dependent_launch.wants_dependent_launch()
    assert dependent_launch.dependent_launch() == {"PDL": False}


@pytest.mark.parametrize(
    ("backend", "arch", "driver", "expected"),
    [
        ("cuda", 90, 12030, True),
        ("cuda", 120, 13000, True),
        ("cuda", 89, 13000, False),
        ("cuda", 90, 12020, False),
        ("cuda", 90, 0, False),
        ("hip", 950, 12030, False),
    ],
)
def test_gpus_before_hopper_and_drivers_before_cuda_12_3_have_it_not(
    monkeypatch: pytest.MonkeyPatch, backend: str, arch: int, driver: int, expected: bool
) -> None:
    active = SimpleNamespace(get_current_target=lambda: SimpleNamespace(backend=backend, arch=arch))
    of_gpu = SimpleNamespace(JITFunction=object, runtime=SimpleNamespace(driver=SimpleNamespace(active=active)))
    monkeypatch.setattr(dependent_launch, "triton", of_gpu)
    monkeypatch.setattr(dependent_launch, "driver_version", lambda: driver)
    assert dependent_launch._has_dependent_launch.__wrapped__() == expected
