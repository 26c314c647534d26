"""The runs of a benchmark in a file, each written as it ends: a benchmark that was stopped goes on from there."""

from __future__ import annotations

import json
import platform
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.peers.figures import Cell, Results, Sample

FILE = "peers-runs.jsonl"


class RunLog:
    """The file `peers-runs.jsonl` in `directory`: what was asked for, then one line for each run. Without a directory
    nothing is written."""

    def __init__(self, directory: Path | None) -> None:
        self._path = None if directory is None else directory / FILE

    def begin(self, asked: Mapping[str, Any]) -> None:
        """A file with no runs yet; one that is there is replaced."""
        if self._path is not None:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._path.write_text(json.dumps(asked) + "\n", encoding="utf-8")

    def resume(self, asked: Mapping[str, Any]) -> Results:
        """The runs that the file has; a file with none where there is none. A line that was cut off is left out.
        Raises `ValueError` for one that was asked for something else."""
        results = Results()
        if self._path is None or not self._path.is_file():
            self.begin(asked)
            return results
        first, *lines = self._path.read_text(encoding="utf-8").splitlines(keepends=True)
        before = json.loads(first)
        if before != json.loads(json.dumps(asked)):
            names = [name for name in before.keys() | asked.keys() if before.get(name) != asked.get(name)]
            differs = ", ".join(f"{name} {before.get(name)!r} and now {asked.get(name)!r}" for name in sorted(names))
            raise ValueError(f"{self._path} was asked for something else ({differs}): give another --out, or the same")
        whole = [line for line in lines if line.endswith("\n")]
        self._path.write_text(first + "".join(whole), encoding="utf-8")
        for line in whole:
            data = json.loads(line)
            results.versions[data["system"]] = data["version"]
            results.failures += data["failures"]
            sample = None if data["sample"] is None else Sample.of(data["sample"], data["others"])
            results.add(Cell(**data["cell"]), data["system"], sample)
        return results

    def add(self, cell: Cell, system: str, version: str, sample: Sample | None, failures: list[str]) -> None:
        """A run has ended. sample: None where the system failed, as `failures` say."""
        if self._path is None:
            return
        data = {
            "cell": vars(cell),
            "system": system,
            "version": version,
            "sample": None if sample is None else vars(sample),
            "others": 0.0 if sample is None else sample.others,
            "failures": failures,
        }
        with self._path.open("a", encoding="utf-8") as stream:
            stream.write(json.dumps(data) + "\n")


def tree() -> str:
    """The commit of this engine, with `-changed` where its files differ from it; empty where there is no git."""
    root = Path(__file__).parents[2]

    def git(*words: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(["git", "-C", str(root), *words], capture_output=True, text=True, check=False)

    try:
        commit = git("rev-parse", "--short=8", "HEAD").stdout.strip()
        changed = git("diff", "--quiet", "HEAD", "--", ".", ":(exclude)benchmarks/results").returncode == 1
    except OSError:
        return ""
    return f"{commit}-changed" if commit and changed else commit


def processor() -> str:
    """The name of the processor, and the widest of its instructions that products of rows use."""
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return platform.processor() or platform.machine()
    fields = dict(line.split(":", 1) for line in text.splitlines() if ":" in line)
    named = {key.strip(): value.strip() for key, value in fields.items()}
    flags = named.get("flags", "").split()
    widest = next((flag for flag in ("amx_bf16", "avx512_bf16", "avx512f", "avx2") if flag in flags), "")
    name = f"{named.get('model name', platform.machine())} (family {named.get('cpu family', '?')})"
    return f"{name}, {widest}" if widest else name
