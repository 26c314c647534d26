"""The driver of `make bench-gpu`: runs the parts of the benchmark in processes of their own and reports.

Each part has a time budget and writes what it measures as it goes. A part that fails or outlasts its budget is ended;
what it had written counts, the rest is reported as not measured, and the next part finds a clean device. So a run
always ends in time with all that it has.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu import report, step_bytes
from benchmarks.gpu.results import Recorder, Results, Skipped
from benchmarks.gpu.shapes import FLOOR_SHAPES, PUBLISHED, SHAPES
from benchmarks.gpu.synthetic import SyntheticAcceptance

DEFAULT_OUT = Path("benchmarks/results/gpu")
# Seconds for the whole suite, and how long a part may go on past its own budget to finish what it is at.
BUDGET_S = 465.0
GRACE_S = 12.0
LAST_LINES = 3
NOT_A_MEASUREMENT = "Run on a CPU to exercise the benchmark: not a measurement of anything."


@dataclass(frozen=True)
class Part:
    """One process: what it measures, of which shape, and its share of the budget in seconds."""

    name: str
    shape: str
    seconds: float

    def __str__(self) -> str:
        return f"{self.name} of {self.shape}"


def parts(shapes: list[str]) -> list[Part]:
    """In the order of what matters most, should the time run out."""
    first, *others = shapes
    result = [Part("ceilings", first, 35.0), Part("engine", first, 90.0), Part("traffic", first, 80.0)]
    result.append(Part("prompts", first, 40.0))
    result.append(Part("references", first, 40.0))
    return result + [Part("engine", shape, 52.0) for shape in others] + [Part("references", s, 32.0) for s in others]


def run_parts(todo: list[Part], records: Path, options: list[str], budget_s: float) -> None:
    """Run each part while there is time; what was not measured is recorded with the reason."""
    deadline = time.monotonic() + budget_s
    for part in todo:
        seconds = min(part.seconds, deadline - time.monotonic() - GRACE_S)
        if seconds <= 0:
            Recorder(records).write(Skipped(str(part), f"the budget of {budget_s:.0f} s was used up"))
            continue
        print(f"{part}: up to {seconds:.0f} s", flush=True)
        reason = run_part(part, records, options, seconds)
        if reason:
            print(f"  {reason}", flush=True)
            Recorder(records).write(Skipped(str(part), reason))


def run_part(part: Part, records: Path, options: list[str], seconds: float) -> str | None:
    """Run one part; why it did not end well, None when it did."""
    command = [sys.executable, "-m", "benchmarks.gpu.part", part.name, "--shape", part.shape]
    command += ["--records", str(records), "--seconds", f"{seconds:.1f}", *options]
    try:
        done = subprocess.run(command, stderr=subprocess.PIPE, text=True, timeout=seconds + GRACE_S, check=False)
    except subprocess.TimeoutExpired:
        return f"ended after {seconds + GRACE_S:.0f} s, its share of the budget; what it had measured is kept"
    if done.returncode == 0:
        return None
    said = " / ".join(line.strip() for line in done.stderr.strip().splitlines()[-LAST_LINES:])
    return f"failed with status {done.returncode}: {said}"


def read_results(records: Path, settings: dict[str, Any]) -> Results:
    """All that the parts wrote."""
    results = Results(settings)
    results.take(records.read_text(encoding="utf-8"))
    return results


def describe_device(device: str) -> dict[str, Any]:
    """What a report says of the machine."""
    described: dict[str, Any] = {"torch": torch.__version__, "python": sys.version.split()[0]}
    if device == "cuda":
        properties = torch.cuda.get_device_properties(0)
        described |= {"name": properties.name, "memory_bytes": properties.total_memory, "cuda": torch.version.cuda}
    else:
        described |= {"name": "a CPU", "note": NOT_A_MEASUREMENT}
    return described


def arguments() -> argparse.ArgumentParser:
    """What can be chosen."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu", description=__doc__)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="cpu exercises the code, no more")
    parser.add_argument(
        "--shape", choices=tuple(FLOOR_SHAPES), action="append", help="may be given again; all published ones"
    )
    parser.add_argument("--out", type=Path, help=f"where results are written; {DEFAULT_OUT}, and nowhere on a CPU")
    parser.add_argument("--budget", type=float, default=BUDGET_S, help="seconds for the whole suite")
    parser.add_argument(
        "--floor", action="store_true", help="print the bytes of a cycle by what weights and KV are in, and end"
    )
    parser.add_argument("--acceptance-length", type=float, default=6.5, help="mean of the synthetic acceptance")
    return parser


def out_directory(args: argparse.Namespace) -> Path | None:
    """Where to write; None: nowhere. What is recorded is of GPUs."""
    given: Path | None = args.out
    return given or (DEFAULT_OUT if args.device == "cuda" else None)


def main(argv: list[str] | None = None) -> int:
    """Entry point."""
    parser = arguments()
    args = parser.parse_args(argv)
    if args.floor:
        print(step_bytes.table(list(dict.fromkeys(args.shape or (*PUBLISHED, *(FLOOR_SHAPES.keys() - SHAPES.keys()))))))
        return 0
    shapes = list(dict.fromkeys(args.shape or PUBLISHED))
    if unknown := [name for name in shapes if name not in SHAPES]:
        parser.error(f"{', '.join(unknown)} is there with --floor alone; measured are {', '.join(SHAPES)}")
    if args.device == "cuda" and not torch.cuda.is_available():
        print(
            "torch sees no NVIDIA GPU here, and this benchmark measures one. To see that it runs: python -m "
            "benchmarks.gpu --device cpu --shape tiny",
            file=sys.stderr,
        )
        return 1
    # A tiny drafter has fewer drafts than the mean asks for.
    length = min(args.acceptance_length, *(0.6 * SHAPES[name]().draft.block_size for name in shapes))
    acceptance = SyntheticAcceptance.with_mean_length(SHAPES[shapes[0]]().num_speculative_tokens, length)
    settings = {"shapes": shapes, "budget_s": args.budget, "acceptance": acceptance.describe()}
    options = ["--device", args.device, "--acceptance-length", str(length)]
    out = out_directory(args)
    with tempfile.TemporaryDirectory() as directory:
        records = Path(directory) / "records.jsonl"
        Recorder(records).write_raw("device", describe_device(args.device))
        run_parts(parts(shapes), records, options, args.budget)
        results = read_results(records, settings)
    print("\n" + (report.markdown(results) if out is None else report.write(out, results)))
    return 0 if results.cycles else 1
