"""Threads are counted by the cores that a container may use, not by those of its machine."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from dflash_backend import cores
from dflash_backend.cores import usable_cores


def in_group(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, own: str, files: dict[str, str]) -> int:
    """The usable cores of 64, with these files below the folder of control groups."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(64)))
    monkeypatch.setattr(cores, "OWN_CGROUP", tmp_path / "own")
    monkeypatch.setattr(cores, "CGROUPS", tmp_path / "cgroup")
    (tmp_path / "own").write_text(own)
    for name, text in files.items():
        path = tmp_path / "cgroup" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return usable_cores()


@pytest.mark.parametrize(
    ("own", "files", "expected"),
    [
        pytest.param("0::/\n", {"cpu.max": "800000 100000\n"}, 8, id="a container sees its own group as the root"),
        pytest.param("0::/a/b\n", {"a/b/cpu.max": "max 100000\n"}, 64, id="no limit"),
        pytest.param(
            "0::/a/b\n", {"a/b/cpu.max": "max 100000", "a/cpu.max": "250000 100000"}, 2, id="the limit of a group above"
        ),
        pytest.param("0::/gone\n", {"cpu.max": "50000 100000"}, 1, id="half a core, and the host's path"),
        pytest.param(
            "4:cpu,cpuacct:/docker/1\n1:name=systemd:/x\n0::/\n",
            {"cpu,cpuacct/cpu.cfs_quota_us": "400000\n", "cpu,cpuacct/cpu.cfs_period_us": "100000\n"},
            4,
            id="the first version of control groups",
        ),
        pytest.param("3:cpu:/\n", {"cpu/cpu.cfs_quota_us": "-1\n", "cpu/cpu.cfs_period_us": "100000"}, 64, id="none"),
        pytest.param("0::/\n", {"cpu.max": "12800000 100000\n"}, 64, id="more than there are"),
        pytest.param("0::/\n", {"cpu.max": "what\n"}, 64, id="a file that says something else"),
        pytest.param("what", {"cpu.max": "100000 100000\n"}, 64, id="a process's file that says something else"),
    ],
)
def test_a_cpu_limit_counts(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, own: str, files: dict[str, str], expected: int
) -> None:
    assert in_group(monkeypatch, tmp_path, own, files) == expected


def test_without_control_groups_the_affinity_counts(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {3, 5})
    monkeypatch.setattr(cores, "OWN_CGROUP", tmp_path / "nothing")
    assert usable_cores() == 2
