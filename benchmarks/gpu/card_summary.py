"""The summary of `make gpu-report`, in Markdown: what is asked for beside what was measured, then everything else, the
most telling first. Pure: it only reads `Results`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from benchmarks.gpu import report
from benchmarks.gpu.card_texts import Comparison, compare
from benchmarks.gpu.quantised_products import FP8_BOTH as FP8_BOTH_PRODUCTS
from benchmarks.gpu.quantised_products import candidate_tables
from benchmarks.gpu.report import Target
from benchmarks.gpu.results import DFLASH, FP8_BOTH, INVARIANT, NO_DRAFT, SAMPLED, SERVING, Cycle, Results
from dflash_kernels.quantised_weight import FP8, INT4
from load_tests.markdown import markdown_table

SHORT = 1024
# Times the floor that a cycle may take: by system, rows.
CYCLES: tuple[tuple[str, int, float], ...] = (
    (DFLASH, 1, 1.25), (DFLASH, 8, 1.35), (DFLASH, 32, 1.3), (NO_DRAFT, 1, 1.23), (NO_DRAFT, 32, 1.19),
    (SERVING, 9, 1.77), (SERVING, 17, 1.83),
)  # fmt: skip
# Times the floor of prompts by their tokens, and of a step of 8 rows with a prompt of 256 beside them.
PROMPTS: tuple[tuple[int, float], ...] = ((2048, 1.24), (8192, 1.21), (32768, 1.26))
MIXED = 1.38
DECODE: tuple[tuple[str, float], ...] = (("8 rows of 2048", 1.75), ("32 rows of 2048", 1.08), ("64 rows of 1024", 1.16))
# One system's cycle over another's, by rows: at most, and how many times as fast at least.
SAMPLED_OVER_GREEDY, INVARIANT_OVER_NORMAL = 1.05, 1.15
FP8_CYCLES: tuple[tuple[int, float], ...] = ((1, 1.3), (8, 1.2), (32, 1.3))
# Of a layer's products the slowest beside bfloat16, by tokens.
PRODUCTS: tuple[tuple[int, float], ...] = ((16, 1.3), (64, 0.95), (256, 0.6), (2048, 0.85))
START_S, SECOND_START_S = 15.0, 20.0
LAYER = ("qkv", "output", "gate, up", "down")
MOST_FAILURES = 12
LONGEST_REASON = 160
REHEARSAL = "A rehearsal on a CPU: no figure here means anything."


def markdown(results: Results) -> str:
    """The whole summary."""
    # A rehearsal holds nothing to anything: its kernels have not run.
    rehearsal = bool(results.settings.get("rehearsal"))
    comparisons = [] if rehearsal else compare(results.texts)
    parts = [f"# {results.device.get('name', 'An unknown device')}: {results.settings.get('shape', '')}"]
    if rehearsal:
        parts.append(f"**{REHEARSAL}**")
    parts.append("\n".join(first_lines(results, comparisons)))
    if not rehearsal:
        parts.append(goal_table(results))
    for title, text in (
        ("Text", text_table(comparisons)),
        ("Tests that failed", failures(results)),
        ("Parts", part_table(results)),
        ("Cycles", report.cycle_table(results.cycles) if results.cycles else ""),
        ("Steps with prompts", report.step_table(results) if results.steps else ""),
        ("Kernels", kernel_table(results)),
        ("Products by quantised weights, times as fast as in bfloat16", product_table(results)),
        ("Products by quantised weights in other ways", candidate_table(results)),
        ("Steps by kernels", profile_table(results)),
        ("Starts", start_table(results)),
        ("Attention of one layer for a whole prompt", report.prompt_table(results) if results.prompts else ""),
        ("Attention of one layer alone", report.attention_table(results) if results.attention else ""),
        ("Tokens of sampled rows", report.sampling_table(results) if results.sampling else ""),
        ("Not measured", "\n".join(f"- {one.what}: {one.reason}" for one in results.skipped)),
        ("Machine", "\n".join(f"- {fact.name}: {fact.value}" for fact in results.facts)),
    ):
        if text:
            parts += [f"## {title}", text]
    return "\n\n".join(parts) + "\n"


def first_lines(results: Results, comparisons: list[Comparison]) -> list[str]:
    """Whether it is right, and what the device gives."""
    verdicts = Counter(one.verdict for one in comparisons)
    outcomes = Counter(run.outcome for run in results.checks if run.test != "all")
    ended = [run.outcome for run in results.checks if run.test == "all"]
    lines = []
    if comparisons:
        ways = len({one.way for one in comparisons})
        lines.append(f"Text, {ways} ways: " + _counts(verdicts, ("equal", "parts", "WRONG")) + ".")
    else:
        lines.append(f"Text: not compared; {len(results.texts)} kinds of requests were answered.")
    if outcomes:
        lines.append(f"Tests: {_counts(outcomes, ('passed', 'failed', 'skipped'))}; {', '.join(ended) or 'not ended'}.")
    else:
        lines.append("Tests: none ran.")
    if results.ceilings is None:
        lines.append("Ceilings: not measured, so there are no floors.")
    else:
        copy, rate = results.ceilings.copy_bandwidth / 1e12, results.ceilings.matrix_rate / 1e12
        lines.append(f"Copy {copy:.3f} TB/s (read plus written), matrix {rate:.0f} TFLOP/s.")
    lines.append(f"Kernels compiled here: {sum(part.compiled for part in results.parts)}.")
    lines.append(f"Random weights in cycles; {results.settings.get('acceptance', '')}.")
    return [f"- {line}" for line in lines]


def _counts(found: Counter[str], names: Iterable[str]) -> str:
    return ", ".join(f"{found[name]} {name}" for name in names)


def goals(results: Results) -> list[tuple[Target, str]]:
    """What is asked for beside what was measured, as a ratio (seconds of starts), each with the times that it is of."""
    shape = str(results.settings.get("shape", ""))
    found: list[tuple[Target, str]] = []

    def add(name: str, bound: float, upper: bool, measured: float | None, detail: str = "-") -> None:
        found.append((Target(name, bound, upper, measured), detail))

    def cycle(system: str, batch: int) -> Cycle | None:
        return results.find(shape, system, batch, SHORT)

    def over_floor(name: str, bound: float, times: tuple[float, float] | None, unit: float = 1e3) -> None:
        if times is None or not times[1]:
            add(f"{name}, over floor", bound, True, None)
        else:
            add(f"{name}, over floor", bound, True, times[0] / times[1], _beside(*times, unit))

    def beside(name: str, bound: float, upper: bool, own: Cycle | None, other: Cycle | None) -> None:
        if own is None or other is None:
            add(name, bound, upper, None)
            return
        ratio = own.cycle_s / other.cycle_s
        add(name, bound, upper, ratio if upper else 1 / ratio, _beside(own.cycle_s, other.cycle_s, 1e3))

    for system, batch, bound in CYCLES:
        one = cycle(system, batch)
        over_floor(f"{system}, {batch} rows", bound, None if one is None else (one.cycle_s, one.floor_s))
    beside("sampled over greedy, 32 rows", SAMPLED_OVER_GREEDY, True, cycle(SAMPLED, 32), cycle(DFLASH, 32))
    steps = {(run.name, run.tokens): run for run in results.steps}
    for name, tokens, bound in (("mixed", 256, MIXED), *(("prompt", tokens, bound) for tokens, bound in PROMPTS)):
        run = steps.get((name, tokens))
        over_floor(f"{name} of {tokens} tokens", bound, None if run is None else (run.seconds, run.floor_s))
    kernels = {run.name: run for run in results.kernel_runs if run.section == "decode attention"}
    for name, bound in DECODE:
        own = kernels.get(name)
        over_floor(f"attention, {name}", bound, None if own is None else (own.seconds, own.floor_s), 1e6)
    for batch, bound in FP8_CYCLES:
        beside(f"FP8 with FP8 activations over bf16, {batch} rows", bound, False, cycle(FP8_BOTH, batch),
               cycle(DFLASH, batch))  # fmt: skip
    for kind in (FP8_BOTH_PRODUCTS, FP8, INT4):
        for tokens, bound in PRODUCTS:
            speedups = [
                run.speedup
                for run in results.products
                if (run.weights, run.tokens) == (kind, tokens) and run.product in LAYER
            ]
            bound = 1.0 if kind == FP8_BOTH_PRODUCTS else bound
            add(f"{kind}: slowest product, {tokens} rows, over bf16", bound, False, min(speedups, default=None))
    for batch in (1, 8, 32):
        beside(f"batch_invariant over normal, {batch} rows", INVARIANT_OVER_NORMAL, True, cycle(INVARIANT, batch),
               cycle(DFLASH, batch))  # fmt: skip
    starts = results.starts_of_servers
    add("start: kernels and graphs, s", START_S, True, starts[0].seconds if starts else None)
    second = starts[-1].process_s if len(starts) > 1 else None
    add("second start of a process, s", SECOND_START_S, True, second)
    return found


def _beside(seconds: float, other: float, unit: float) -> str:
    digits = 2 if unit == 1e3 else 1
    return f"{seconds * unit:.{digits}f} / {other * unit:.{digits}f} {'ms' if unit == 1e3 else 'us'}"


def goal_table(results: Results) -> str:
    """`goals` as a table."""
    rows = []
    for target, detail in goals(results):
        sign = "at most" if target.upper else "at least"
        measured = "-" if target.measured is None else f"{target.measured:.3g}"
        rows.append([target.name, measured, detail, f"{sign} {target.bound:g}", target.verdict])
    return markdown_table(["what", "measured", "time / beside", "asked for", ""], rows, "lrrr")


def text_table(comparisons: list[Comparison]) -> str:
    """Where texts part, and the ways in which none does."""
    if not comparisons:
        return ""
    rows = []
    for one in comparisons:
        if one.verdict != "equal":
            at = " ".join(map(str, one.parts_at[:6]))
            rows.append([one.way, one.against, one.requests, f"{one.equal} of {one.count}", at, one.verdict])
    parting = {row[0] for row in rows}
    whole = [way for way in dict.fromkeys(one.way for one in comparisons) if way not in parting]
    text = f"Equal in all: {'; '.join(whole) or 'none'}."
    header = ["way", "against", "requests", "equal", "parts at", ""]
    return text + (f"\n\n{markdown_table(header, rows)}" if rows else "")


def failures(results: Results) -> str:
    """The first tests that failed, with the reason, and how many there are in each file."""
    failed = [run for run in results.checks if run.outcome == "failed"]
    lines = [f"- {run.test}: {run.reason[:LONGEST_REASON]}" for run in failed[:MOST_FAILURES]]
    if len(failed) > MOST_FAILURES:
        by_file = Counter(run.test.partition("::")[0] for run in failed)
        lines.append("- in all: " + ", ".join(f"{name} {number}" for name, number in by_file.items()))
    return "\n".join(lines)


def part_table(results: Results) -> str:
    """How each part ended."""
    rows = [[part.part, f"{part.seconds:.0f}", part.compiled, part.reason or "whole"] for part in results.parts]
    return markdown_table(["part", "s", "kernels compiled", "ended"], rows, "lrr") if rows else ""


def kernel_table(results: Results) -> str:
    """Operations alone, in microseconds, with the same by others."""
    rows = []
    for run in results.kernel_runs:
        others = ", ".join(f"{name} {1e6 * seconds:.1f}" for name, seconds in run.others.items())
        over = f"{run.seconds / run.floor_s:.2f}x" if run.floor_s else "-"
        times = [f"{1e6 * seconds:.1f}" for seconds in (run.seconds, run.floor_s)]
        rows.append([run.section, run.name, *times, over, others or "-"])
    return markdown_table(["", "what", "us", "floor", "over it", "others, us"], rows, "llrrr") if rows else ""


def product_table(results: Results) -> str:
    """A row for each weight, a column for each number of tokens."""
    tokens = sorted({run.tokens for run in results.products})
    rows: dict[tuple[str, str], dict[int, str]] = {}
    for run in results.products:
        rows.setdefault((run.product, run.weights), {})[run.tokens] = f"{run.speedup:.2f} ({1e6 * run.seconds:.1f} us)"
    cells = [[*key, *(row.get(number, "-") for number in tokens)] for key, row in rows.items()]
    return markdown_table(["product", "weights", *(f"{number} tokens" for number in tokens)], cells) if cells else ""


def candidate_table(results: Results) -> str:
    """Those that were computed in other ways as well."""
    runs = [run for run in results.products if run.others]
    return candidate_tables(runs) if runs else ""


def profile_table(results: Results) -> str:
    """Kernels of a step and the time between them, then those that take the most time of the first step."""
    if not results.profiles:
        return ""
    rows = [
        [one.name, f"{one.kernels:.0f}", f"{1e3 * one.busy_s:.2f}", f"{1e3 * one.gaps_s:.2f}",
         f"{1e6 * one.median_gap_s:.2f}", f"{1e3 * one.wall_s:.2f}"]
        for one in results.profiles
    ]  # fmt: skip
    header = ["step", "kernels", "busy, ms", "gaps, ms", "median gap, us", "with the profiler, ms"]
    text = markdown_table(header, rows, "lrrrrr")
    for one in results.profiles:
        longest = [[f"`{name}`", f"{calls:.1f}", f"{1e6 * seconds:.1f}"] for name, calls, seconds in one.longest[:8]]
        text += f"\n\n{markdown_table([f'{one.name}: kernel', 'a step', 'us a step'], longest, 'lrr')}"
    return text


def start_table(results: Results) -> str:
    """What starts took."""
    rows = []
    for run in results.starts:
        process = "-" if run.process_s is None else f"{run.process_s:.1f}"
        memory = "-" if run.memory_bytes is None else f"{run.memory_bytes / 2**30:.2f}"
        known = "from the cache" if run.cached else "compiled anew"
        rows.append([run.shape, f"{run.seconds:.1f}", run.num_graphs, known, process, memory])
    header = ["model", "kernels and graphs, s", "padded steps", "kernels", "whole process, s", "GiB"]
    return markdown_table(header, rows, "lrrlrr") if rows else ""
