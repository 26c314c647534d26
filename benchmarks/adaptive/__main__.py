"""`python -m benchmarks.adaptive`: speculation that follows the load against fixed k and none, in one run.

With the demo target, greedy in float32: a good drafter, one whose layer ids are shifted and one with random weights;
few and many streams; short and long contexts; traffic that the drafter knows and that it does not. In each cell the
systems run in turn in short slices. `adaptive` is compared, round by round, with the better of `none` and `fixed`.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from benchmarks.adaptive.cells import (
    Cell,
    Rates,
    all_cells,
    corner_cells,
    measure,
    measure_change,
)
from benchmarks.adaptive.simulation import simulated_table
from benchmarks.adaptive.systems import ADAPTIVE, FIXED, INJECT, NGRAM, NONE, Systems, models_loaded_once
from benchmarks.quiet import MOST_OTHERS
from load_tests.markdown import markdown_table

# Of the better of none and fixed k; with the random drafter, whose injection is for nothing, of none, and of none with
# injection.
LEAST, LEAST_OF_NONE, LEAST_OF_INJECTING = 0.95, 0.93, 0.97
# After a change of traffic: when a part is measured, and how much of the better one adaptive then has at least.
STEPS_AFTER_CHANGE, LEAST_AFTER_CHANGE = 50, 0.9
# Slices are this many times as short and as many with one stream, whose steps are short, and with more: the speed of a
# machine changes within seconds.
FINER_WITH_ONE, FINER = 4, 2
UNPREDICTABLE = 5.0


def interval(values: list[float]) -> str:
    """The median and the middle half."""
    low, middle, high = statistics.quantiles(values, n=4)
    return f"{middle:.2f} [{low:.2f}, {high:.2f}]"


def misses(cell: Cell, rates: Rates) -> list[str]:
    """What the cell misses, a sentence each."""
    wanted: list[tuple[tuple[str, ...], float]] = [((NONE, FIXED), LEAST)]
    if cell.drafter == "random":
        wanted = [((NONE, FIXED), LEAST_OF_NONE), ((INJECT,), LEAST_OF_INJECTING)]
    found = []
    for others, least in wanted:
        ratio = statistics.median(rates.ratios(ADAPTIVE, others))
        if ratio < least:
            found.append(f"{cell}: adaptive has {ratio:.3f} of {' or '.join(others)}, below {least}")
    return found


def row(cell: Cell, rates: Rates) -> list[str]:
    """A line of the table."""
    rate = [f"{rates.median(name):.0f}" if name in rates.by_system else "" for name in (NONE, INJECT, FIXED, NGRAM)]
    return [
        *map(str, (cell.drafter, cell.streams, cell.context, cell.traffic)),
        *rate,
        f"{rates.median(ADAPTIVE):.0f}",
        interval(rates.ratios(ADAPTIVE, (NONE, FIXED))),
    ]


HEADER = [
    "drafter",
    "streams",
    "context",
    "traffic",
    NONE,
    INJECT,
    FIXED,
    NGRAM,
    ADAPTIVE,
    "adaptive / better of none and fixed",
]


def report(table: str, measured: list[Rates], rounds: int, slice_s: float, run_s: float) -> str:
    """The page of results; `measured` are the rates of the table's lines."""
    num_repeated, num_disturbed = (
        sum(counts) for counts in zip(*((rates.num_repeated, rates.num_disturbed) for rates in measured), strict=True)
    )
    return (
        f"# Speculation that follows the load\n\nTokens per second, medians of {FINER * rounds} slices of "
        f"{slice_s / FINER:g} s, with one stream {FINER_WITH_ONE * rounds} of {slice_s / FINER_WITH_ONE:g} s, in turn; "
        f"{os.cpu_count()} cores, {run_s:.0f} s in all. "
        f"{num_repeated} slices ran again, since other processes took more than {MOST_OTHERS:.0%} of the cores; "
        f"{num_disturbed} count although they did each time. "
        "The last column is the median and the middle half over the rounds. Written by `python -m benchmarks.adaptive`."
        f"\n\n{table}\n"
    )


def show_change(rounds: int, seconds: float, clock: Callable[[], float]) -> int:
    """Math, then text at so high a temperature that no drafter can know it, then math: the exit status is 1 when
    adaptive has less than `LEAST_AFTER_CHANGE` of the better of none and fixed k in some part."""
    missed = False
    with tempfile.TemporaryDirectory() as folder, models_loaded_once():
        systems = Systems(Path(folder))
        for streams in (1, 8, 32):
            loops = systems.loops(Cell("demo", streams, 100, "math"))
            parts = measure_change(loops, (0.0, UNPREDICTABLE, 0.0), rounds, seconds, STEPS_AFTER_CHANGE, clock)
            for number, rates in enumerate(parts, start=1):
                ratios = rates.ratios(ADAPTIVE, (NONE, FIXED))
                missed |= statistics.median(ratios) < LEAST_AFTER_CHANGE
                print(
                    f"{streams} streams, part {number}: "
                    + ", ".join(f"{name} {rates.median(name):.0f}" for name in rates.by_system)
                    + f"; adaptive / better of none and fixed: {interval(ratios)}",
                    flush=True,
                )
            for loop in loops.values():
                loop.end()
    return int(missed)


def main() -> int:
    """Entry point."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--simulate", action="store_true", help="only the simulation of an H200, in about ten minutes")
    parser.add_argument("--change", action="store_true", help="only the demo drafter, with traffic that changes")
    parser.add_argument("--full", action="store_true", help="the whole grid instead of its 24 corners")
    parser.add_argument("--cells", nargs="*", default=[], help="only cells with all of these words, as in: random 64")
    parser.add_argument(
        "--rounds", type=int, default=7, help="turns of each system in a cell, of --seconds each in all"
    )
    parser.add_argument("--seconds", type=float, default=1.0, help="length of a turn")
    parser.add_argument("--cpu-time", action="store_true", help="count this process's time, where others run as well")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results"), help="where the results are written")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    clock = time.process_time if args.cpu_time else time.perf_counter
    if args.change:
        return show_change(args.rounds, args.seconds, clock)
    if args.simulate:
        text, missed = simulated_table()
        (args.out / "adaptive_simulated.md").write_text(text, encoding="utf-8")
        print(text + "\n" + ("\n".join(missed) or "nothing is missed"))
        return int(bool(missed))
    cells = all_cells() if args.full else corner_cells()
    cells = [cell for cell in cells if all(word in str(cell).replace(",", "").split() for word in args.cells)]
    rows, data = [], []
    found: list[str] = []
    measured: list[Rates] = []
    started = time.monotonic()
    with tempfile.TemporaryDirectory() as folder, models_loaded_once():
        systems = Systems(Path(folder))
        for cell in cells:
            loops = systems.loops(cell)
            finer = FINER_WITH_ONE if cell.streams == 1 else FINER
            rates = measure(loops, args.rounds * finer, args.seconds / finer, clock)
            for loop in loops.values():
                loop.end()
            rows.append(row(cell, rates))
            found += misses(cell, rates)
            data.append({**vars(cell), "tokens_per_s": rates.by_system})
            measured.append(rates)
            print(f"{cell}: " + ", ".join(f"{name} {rates.median(name):.0f}" for name in rates.by_system), flush=True)
    table = markdown_table(HEADER, rows)
    text = report(table, measured, args.rounds, args.seconds, time.monotonic() - started)
    (args.out / "adaptive.md").write_text(text, encoding="utf-8")
    (args.out / "adaptive.json").write_text(json.dumps(data, indent=1), encoding="utf-8")
    print("\n" + table + "\n" + ("\n".join(found) or "nothing is missed"))
    return int(bool(found))


if __name__ == "__main__":
    sys.exit(main())
