"""How many processor cores this process may keep busy: those that it may run on, and no more than its CPU limit.

A container's limit (`docker run --cpus`, Kubernetes' `limits.cpu`) is a quota of its control group: time per period, on
any cores. More threads than that do not gain: the kernel stops all of them for the rest of each period.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

CGROUPS, OWN_CGROUP = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")


def usable_cores() -> int:
    """At least 1. Of a quota that is no whole number of cores the part of a core is left out."""
    num_cores = len(os.sched_getaffinity(0))
    return max(1, min([num_cores, *(int(quota) for quota in _quotas())]))


def _quotas() -> Iterator[float]:
    """The CPU quotas of the process's control group and of those above it, in cores."""
    with contextlib.suppress(OSError, ValueError):
        for line in OWN_CGROUP.read_text(encoding="utf-8").splitlines():
            _, controllers, path = line.split(":", 2)
            if controllers == "":
                yield from _of_group(CGROUPS, path)
            elif "cpu" in controllers.split(","):
                yield from _of_group(CGROUPS / controllers, path)
                yield from _of_group(CGROUPS / "cpu", path)


def _of_group(root: Path, path: str) -> Iterator[float]:
    """Those of a group and the groups above it. In a container the path may be that of the host, and what is mounted
    at `root` the container's own group."""
    group = Path(path.lstrip("/"))
    for each in (group, *group.parents):
        folder = root / each
        with contextlib.suppress(OSError, ValueError):
            quota, period = (folder / "cpu.max").read_text(encoding="utf-8").split()
            if quota != "max":
                yield int(quota) / int(period)
        with contextlib.suppress(OSError, ValueError):
            micros = int((folder / "cpu.cfs_quota_us").read_text(encoding="utf-8"))
            if micros > 0:
                yield micros / int((folder / "cpu.cfs_period_us").read_text(encoding="utf-8"))
