"""`make gpu-report`: what a card gives, in one command of at most 8 minutes, and what of it is not right or not fast.

    python -m benchmarks.gpu.card_report [--seconds 470] [--out DIR] [--shape qwen3-8b] [--only texts]

runs parts, each in a process of its own with its own share of the time, in the order of what they are worth: the
machine, the demo pair's text in every way of running and the GPU tests, all at the same time; then, one at a time,
ceilings, decode cycles, traffic, prompts, kernels beside other ways to do the same, profiles, products by quantised
weights and starts. What a part finds is written as it comes (`records.jsonl`), and a summary (`summary.md`) after each
part. One that fails or outlasts its share is recorded with the reason, and the next one goes on. `--rehearse` runs all
of it on a CPU, with tiny sizes and over a GPU that is not there: it measures nothing and says so.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu import card_summary, card_texts, pack
from benchmarks.gpu.card_tests import GPU_TESTS, REHEARSED_TESTS, TEST_OPTIONS
from benchmarks.gpu.results import PartRun, Recorder, Results
from benchmarks.gpu.run import DEFAULT_OUT, describe_device
from benchmarks.gpu.shapes import SHAPES
from benchmarks.gpu.synthetic import SyntheticAcceptance

ROOT = Path(__file__).resolve().parents[2]
RECORDS, SUMMARY, LOG = "records.jsonl", "summary.md", "log.txt"
SECONDS = 470.0
# How long a part may go on past its share, to finish what it is at, and then until it is killed.
GRACE_S, KILL_S = 8.0, 3.0
# Less is not worth a process that imports torch.
LEAST_S = 5.0
POLL_S = 0.1
# Of a part's output, as much as this is kept.
LOG_BYTES = 1 << 20
LAST_LINES = 3
# What the end of a run prints: some machines give back so much of the output.
PRINTED = 10_000
WORKERS = 9
# Of a rehearsal, whose kernels are launched by a slow CPU that may be busy: times the shares and the whole.
REHEARSAL_TIMES = 5.0


@dataclass(frozen=True)
class Part:
    """One process: its name, and its share in seconds. beside: it runs at the same time as its neighbours of which that
    is said too. on_request: it runs only where `--only` names it."""

    name: str
    seconds: float
    beside: bool = False
    on_request: bool = False


PARTS = (
    Part("environment", 40.0),
    *(Part(f"texts {group}", 150.0, beside=True) for group in card_texts.GROUPS),
    Part("tests", 160.0, beside=True),
    Part("ceilings", 30.0),
    Part("engine", 70.0),
    Part("traffic", 60.0),
    Part("prompts", 45.0),
    Part("kernels", 40.0),
    Part("sustained", 25.0),
    Part("profile", 40.0),
    Part("quantised cycles", 30.0),
    Part("quantised", 40.0),
    Part("start", 60.0),
    Part("second start", 60.0),
    Part("products", 60.0, on_request=True),
    Part("measured cycles", 90.0, on_request=True),
    Part("candidates", 40.0, on_request=True),
)


@dataclass(frozen=True)
class Plan:
    """How parts are run: options of all, the records that they append to, and the environment."""

    options: tuple[str, ...]
    records: Path
    environ: dict[str, str]
    rehearsal: bool = False

    def command(self, part: Part, seconds: float) -> list[str]:
        """What runs a part that may begin nothing new after so long."""
        if part.name == "tests":
            return self._pytest()
        command = [sys.executable, "-m", "benchmarks.gpu.card_parts", part.name, "--records", str(self.records)]
        return [*command, "--seconds", f"{seconds:.1f}", *self.options]

    def _pytest(self) -> list[str]:
        workers = min(WORKERS, max(1, (os.cpu_count() or 1) - 2))
        shared = ["-n", str(workers), "--max-worker-restart", "2"] if importlib.util.find_spec("xdist") else []
        plugins = ["-p", "tests.gpu.outcomes", "-p", "no:cacheprovider"]
        if self.rehearsal:
            return [sys.executable, "-m", "pytest", "-q", *plugins, "--tb=short", *REHEARSED_TESTS]
        plugins += ["-p", "tests.gpu.fresh_inputs"]
        return [sys.executable, "-m", "pytest", "-q", *plugins, *shared, "--tb=short", *TEST_OPTIONS, *GPU_TESTS]


def groups(parts: Sequence[Part]) -> Iterator[list[Part]]:
    """Parts that run at the same time, in order."""
    together: list[Part] = []
    for part in parts:
        if together and not (part.beside and together[-1].beside):
            yield together
            together = []
        together.append(part)
    if together:
        yield together


def share(part: Part, left_s: float, times: float = 1.0) -> float | None:
    """Seconds of a part: its own share, as far as so much is left of the whole; None where that is too little. What a
    part does not take is left for all that come after it."""
    seconds = min(part.seconds * times, left_s - GRACE_S - KILL_S)
    return seconds if seconds >= LEAST_S else None


@dataclass
class _Running:
    """A part's process, in a session of its own, so that what it has started ends with it."""

    part: Part
    process: subprocess.Popen[bytes]
    output: Path
    seconds: float
    began: float = field(default_factory=time.monotonic)
    reason: str | None = None

    def ended(self) -> bool:
        """Whether it is over, ending it where its time is up."""
        took = time.monotonic() - self.began
        if self.process.poll() is None and took < self.seconds + GRACE_S:
            return False
        if self.process.poll() is None:
            self.reason = f"ended after {took:.0f} s, its share of the time; what it had found is kept"
            self._signal(signal.SIGTERM)
            self._wait()
        elif self.process.returncode != 0:
            lines = self.output.read_text(encoding="utf-8", errors="replace").strip().splitlines()
            said = " / ".join(line.strip() for line in lines[-LAST_LINES:])
            self.reason = f"failed with status {self.process.returncode}: {said[:400]}"
        self.kill()
        return True

    def kill(self) -> None:
        """End it and what it has left behind, workers of tests among them."""
        self._signal(signal.SIGKILL)
        self._wait()

    def _wait(self) -> None:
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(KILL_S)

    def _signal(self, number: int) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, number)


class Report:
    """A run: it starts parts, and writes what they found."""

    def __init__(self, plan: Plan, out: Path, settings: dict[str, Any], seconds: float) -> None:
        self._plan, self._out, self._settings = plan, out, settings
        self._deadline = time.monotonic() + seconds
        self._recorder = Recorder(plan.records)
        self._cache = Path(plan.environ.get("TRITON_CACHE_DIR", Path.home() / ".triton" / "cache"))
        self._times = REHEARSAL_TIMES if plan.rehearsal else 1.0
        self._compiled = pack.num_kernels(self._cache)
        self._output = tempfile.TemporaryDirectory()

    def run(self, parts: Sequence[Part]) -> None:
        """Run every part for which there is time; the summary is written after each."""
        with self._output:
            for together in groups(parts):
                left = self._deadline - time.monotonic()
                running = [found for part in together if (found := self._start(part, left))]
                try:
                    while running:
                        for one in [one for one in running if one.ended()]:
                            running.remove(one)
                            self._finish(one)
                        time.sleep(POLL_S)
                finally:  # they would outlive a run that is interrupted
                    for one in running:
                        one.kill()

    def _start(self, part: Part, left: float) -> _Running | None:
        seconds = share(part, left, self._times)
        if seconds is None:
            self._recorder.write(PartRun(part.name, 0.0, 0, "no time was left"))
            self.write()
            return None
        output = Path(self._output.name) / part.name.replace(" ", "_")
        with output.open("wb") as file:
            process = subprocess.Popen(
                self._plan.command(part, seconds), cwd=ROOT, env=self._plan.environ, stdin=subprocess.DEVNULL,
                stdout=file, stderr=subprocess.STDOUT, start_new_session=True,
            )  # fmt: skip
        return _Running(part, process, output, seconds)

    def _finish(self, running: _Running) -> None:
        took = time.monotonic() - running.began
        compiled, self._compiled = self._compiled, pack.num_kernels(self._cache)
        new = max(self._compiled - compiled, 0)
        reason = running.reason
        if running.part.name == "tests" and reason and running.process.returncode == 1:
            reason = None  # tests have failed, of which there are records
        self._recorder.write(PartRun(running.part.name, round(took, 1), new, reason))
        with running.output.open("rb") as file:
            file.seek(max(0, running.output.stat().st_size - LOG_BYTES))
            text = file.read()
        with (self._out / LOG).open("ab") as log:
            log.write(f"=== {running.part.name}\n".encode() + text + b"\n")
        left = self._deadline - time.monotonic()
        print(f"[{left:.0f} s left] {running.part.name}: {took:.0f} s, {new} kernels compiled"
              + (f"; {reason}" if reason else ""), flush=True)  # fmt: skip
        self.write()

    def write(self) -> str:
        """Write the summary of what there is, and return it."""
        results = Results(self._settings)
        results.take(self._plan.records.read_text(encoding="utf-8"))
        text = card_summary.markdown(results)
        (self._out / SUMMARY).write_text(text, encoding="utf-8")
        return text


def printed(text: str, where: Path) -> str:
    """The beginning of a summary, in whole lines, of at most `PRINTED` characters."""
    if len(text) <= PRINTED:
        return text
    note = f"(more in {where})"
    return text[: text.rindex("\n", 0, PRINTED - len(note))] + "\n" + note


def out_directory(given: Path | None, card: str) -> Path:
    """Where files are written: as asked for, else into the folder that the environment variable OUT names, else among
    the recorded results, by the card's name."""
    if given is not None:
        return given
    if os.environ.get("OUT"):
        return Path(os.environ["OUT"])
    return ROOT / DEFAULT_OUT / re.sub(r"[^a-z0-9]+", "-", card.lower()).strip("-")


def arguments() -> argparse.ArgumentParser:
    """What can be chosen."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, help=f"of all parts together ({SECONDS:.0f})")
    parser.add_argument("--out", type=Path, help="where files are written; $OUT, or benchmarks/results/gpu/CARD")
    parser.add_argument("--shape", choices=tuple(SHAPES), help="qwen3-8b; tiny in a rehearsal")
    parser.add_argument(
        "--only", action="append", metavar="PART", help="parts whose names begin so; may be given again"
    )
    parser.add_argument("--rehearse", action="store_true", help="on a CPU, over a GPU that is not there")
    parser.add_argument(
        "--device", choices=("cuda", "cpu"), default="cuda", help="of a rehearsal: cpu takes no GPU's way"
    )
    parser.add_argument("--acceptance-length", type=float, default=6.5, help="mean of the synthetic acceptance")
    return parser


def chosen(only: Sequence[str] | None) -> list[Part]:
    """The parts whose names begin with one of these; by default all but those that run on request. Raises ValueError
    for a name that is no part's."""
    for name in only or ():
        if not any(part.name.startswith(name) for part in PARTS):
            raise ValueError(f"there is no part '{name}'; parts are {', '.join(part.name for part in PARTS)}")
    return [part for part in PARTS if (part.name.startswith(tuple(only)) if only else not part.on_request)]


def main(argv: list[str] | None = None) -> int:
    """Entry point; 1 where there is no GPU, or where nothing was found."""
    parser = arguments()
    args = parser.parse_args(argv)
    try:
        parts = chosen(args.only)
    except ValueError as error:
        parser.error(str(error))
    if args.device == "cpu" and not args.rehearse:
        parser.error("a CPU has no report; with --rehearse it shows that one would come")
    if not args.rehearse and not torch.cuda.is_available():
        print("torch sees no NVIDIA GPU here. To see that a report would come: python -m benchmarks.gpu.card_report "
              "--rehearse --out DIR", file=sys.stderr)  # fmt: skip
        return 1
    if args.rehearse and args.out is None and not os.environ.get("OUT"):
        with tempfile.TemporaryDirectory() as directory:
            return report_on(args, parts, Path(directory))
    card = "rehearsal" if args.rehearse else torch.cuda.get_device_name(0)
    return report_on(args, parts, out_directory(args.out, card))


def report_on(args: argparse.Namespace, parts: Sequence[Part], out: Path) -> int:
    """Run the parts, write into `out`, and print the summary's beginning; 1 where nothing was found, and in a rehearsal
    where anything failed."""
    device = describe_device("cpu" if args.rehearse else "cuda")
    out = out.resolve()  # parts run in the checkout's folder
    out.mkdir(parents=True, exist_ok=True)
    for name in (RECORDS, SUMMARY, LOG):
        (out / name).unlink(missing_ok=True)
    shape = args.shape or ("tiny" if args.rehearse else "qwen3-8b")
    length = min(args.acceptance_length, 0.6 * SHAPES[shape]().draft.block_size)
    acceptance = SyntheticAcceptance.with_mean_length(SHAPES[shape]().num_speculative_tokens, length)
    options = ["--shape", shape, "--device", args.device, "--acceptance-length", str(length)]
    if args.rehearse and args.device == "cuda":
        options += ["--fake", "rules"]
    records = out / RECORDS
    environ = dict(os.environ) | {"GPU_REPORT_RECORDS": str(records), "PYTHONUNBUFFERED": "1", "HF_HUB_OFFLINE": "1"}
    environ.pop("TRITON_INTERPRET", None)
    environ |= pack.unpacked(ROOT, Path(tempfile.gettempdir()))
    Recorder(records).write_raw("device", device)
    plan = Plan(tuple(options), records, environ, args.rehearse)
    settings = {"shape": SHAPES[shape]().name, "acceptance": acceptance.describe(), "rehearsal": args.rehearse}
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(1))
    report = Report(plan, out, settings, args.seconds or SECONDS * (REHEARSAL_TIMES if args.rehearse else 1.0))
    report.run(parts)
    text = report.write()
    print("\n" + printed(text, out / SUMMARY))
    results = Results(settings)
    results.take(records.read_text(encoding="utf-8"))
    if args.rehearse:
        failed = problems(results)
        print("\n".join(["", *(f"NOT AS ON A GPU: {problem}" for problem in failed)]) if failed else "\nevery part ran")
        return int(bool(failed))
    return 0 if any(part.reason is None for part in results.parts) else 1


def problems(results: Results) -> list[str]:
    """What a rehearsal shows: parts that did not end well, and engines that failed."""
    found = [f"{part.part}: {part.reason}" for part in results.parts if part.reason is not None]
    return found + [f"{one.what}: {one.reason}" for one in results.skipped if one.what.startswith("text, ")]


if __name__ == "__main__":
    sys.exit(main())
