"""The command line of the load tests: `python -m load_tests list`, `python -m load_tests SCENARIO [options]`.

Exit codes: 0 every bound was met, 1 a wrong answer or a bound that was missed, 2 bad usage, 3 nothing was missed and
some bound could not be decided, 130 interrupted. Of several runs the status is the severest: 1, then 130, then 3.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib.util
import os
import re
import shlex
import signal
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from dflash_backend.checkpoints import CheckpointError
from dflash_backend.config import ConfigError, check_setting
from dflash_cli.launcher.triton_install import LauncherError
from load_tests.expected_answers import ExpectedAnswersError
from load_tests.scenario import Run, Scenario
from load_tests.scenarios import SCENARIOS
from load_tests.verdict import Bound, verdict
from load_tests.workload import Options

RESULTS = Path(__file__).resolve().parent / "results"
EXPECTED = Path(__file__).resolve().parent / "expected"
EXIT_CODES = {"PASS": 0, "FAIL": 1, "INCOMPLETE": 3, "INTERRUPTED": 130}
# What several runs and comparisons end with: the first of these that one of them has.
SEVEREST_FIRST = [EXIT_CODES[each] for each in ("FAIL", "INTERRUPTED", "INCOMPLETE", "PASS")]
LOOPBACK = re.compile(r"^(localhost|127\.\d+\.\d+\.\d+|\[::1\])(:\d+)?$")


class UsageError(ValueError):
    """The command line asks for what is not possible. The text is for the person who wrote it."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Entry point."""
    given = _parser().parse_args(arguments)
    if given.scenario == "list":
        for scenario in SCENARIOS.values():
            print(f"{scenario.name:16} {scenario.summary}\n{'':16} shows: {scenario.shows}")
        return 0
    # SIGTERM too must end the server.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        return _run(given)
    except UsageError as error:
        print(f"load_tests: {error}", file=sys.stderr)
        return 2
    except (LauncherError, ConfigError, CheckpointError, ExpectedAnswersError, OSError) as error:
        print(f"load_tests: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("load_tests: interrupted before there were results", file=sys.stderr)
        return 130


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m load_tests", description="Load tests that check every answer.")
    commands = parser.add_subparsers(dest="scenario", required=True, metavar="list | SCENARIO")
    commands.add_parser("list", help="name the scenarios")
    for scenario in SCENARIOS.values():
        settings = ", ".join(f"{name}={value}" for name, value in scenario.settings.items())
        description = f"{scenario.summary}. Shows: {scenario.shows}. Server: {settings}."
        _add_options(commands.add_parser(scenario.name, help=scenario.summary, description=description), scenario)
    return parser


def _add_options(parser: argparse.ArgumentParser, scenario: Scenario) -> None:
    defaults = scenario.defaults
    add = parser.add_argument
    add("--users", type=_number(int, 1, 4096), default=defaults.users, help="closed-loop users; default %(default)s")
    add("--duration", type=_number(float, 1, 86_400), default=defaults.duration_s, help="seconds; default %(default)s")
    add("--rate", type=_number(float, 0, 5000), default=defaults.rate, help="open-loop requests/s; default %(default)s")
    add("--prompts", type=_number(int, 1, 100_000), default=defaults.prompts, help="questions; default %(default)s")
    add("--seed", type=_number(int, 0, 2**31), default=0, help="of prompts and arrivals; default %(default)s")
    add("--protocol", choices=("grpc", "http"), default="grpc", help="default %(default)s")
    add("--set", action="append", default=[], metavar="NAME=VALUE", help="a setting of the server; may be repeated")
    add("--settings", default="", metavar="'NAME=VALUE ...'", help="several settings in one argument")
    add("--compare", metavar="NAME=VALUE", help="run again with this setting and compare the throughputs")
    add("--name", default="", help="of the folder with the results; default: the scenario and the time")
    add("--out", type=Path, default=RESULTS, help="folder that the results' folder goes to; default: %(default)s")
    add("--expected", type=Path, default=EXPECTED, help="folder of the expected answers; default: %(default)s")
    add("--url", default="", metavar="HOST:PORT", help="use the server that runs there; loopback addresses only")
    add("--metrics-url", default="", metavar="HOST:PORT", help="its metrics, with --url")
    add("--model", default="dflash", help="its model, with --url; default %(default)s")


def _run(given: argparse.Namespace) -> int:
    scenario, options = SCENARIOS[given.scenario], _options(given)
    name = given.name or f"{scenario.name}-{time.strftime('%Y%m%d-%H%M%S')}"
    changed = _settings([given.compare]) if given.compare else {}
    _check(given, name)
    missing = [module for module in ("locust", "matplotlib") if importlib.util.find_spec(module) is None]
    if missing:
        raise UsageError(f"{' and '.join(missing)} missing; install with: pip install -e '.[load]'")
    # Not above: `list` and bad usage need no locust.
    from load_tests.run import Address, run_scenario

    address = Address(given.url, given.metrics_url, given.model) if given.url else None
    first = run_scenario(scenario, options, given.out / name, given.expected, address, _log)
    _show(first)
    codes = [EXIT_CODES[first.verdict]]
    if scenario.against and first.verdict in ("PASS", "INCOMPLETE") and address is None:
        codes += _compare_all(first, given)
    if not changed or EXIT_CODES["INTERRUPTED"] in codes:
        return severest(codes)
    options = dataclasses.replace(options, settings={**options.settings, **changed})
    suffix = re.sub(r"[^A-Za-z0-9_.-]+", "-", given.compare)
    second = run_scenario(scenario, options, given.out / f"{name}-{suffix}", given.expected, None, _log)
    _show(second)
    codes.append(EXIT_CODES[second.verdict])
    if second.result.complete:
        comparison = scenario.compare(first.result, second.result, given.compare)
        _log(comparison.line())
        (first.directory / "comparison.md").write_text(f"{comparison.line()}\n", encoding="utf-8")
        codes.append(_exit_code(comparison))
    return severest(codes)


def severest(codes: Sequence[int]) -> int:
    """The exit status of several runs, from those of each: a run in which something could not be decided hides none in
    which something was missed."""
    return min(codes, key=SEVEREST_FIRST.index)


def _exit_code(comparison: Bound) -> int:
    return EXIT_CODES[verdict(True, [comparison])]


def _compare_all(first: Run, given: argparse.Namespace) -> list[int]:
    """Run what the scenario is compared with, up to an interruption; the exit status of each run and comparison."""
    from load_tests.run import run_scenario

    lines, codes = [], list[int]()
    for one in first.scenario.against:
        changed = one.settings({**first.scenario.settings, **first.options.settings})
        options = dataclasses.replace(first.options, settings={**first.options.settings, **changed})
        directory = first.directory.with_name(f"{first.directory.name}-{one.name}")
        other = run_scenario(first.scenario, options, directory, given.expected, None, _log)
        _show(other)
        codes.append(EXIT_CODES[other.verdict])
        if not other.result.complete:
            break
        bound = one.compare(first.result, other.result)
        lines.append(bound.line())
        codes.append(_exit_code(bound))
    if not lines:
        return codes
    _log("\n".join(lines))
    (first.directory / "comparison.md").write_text("\n\n".join(lines) + "\n", encoding="utf-8")
    return codes


def _options(given: argparse.Namespace) -> Options:
    try:
        settings = [*given.set, *shlex.split(given.settings)]
    except ValueError as error:
        raise UsageError(f"--settings is {given.settings!r}, which cannot be read: {error}") from None
    return Options(
        users=given.users,
        duration_s=given.duration,
        rate=given.rate,
        prompts=given.prompts,
        seed=given.seed,
        protocol=given.protocol,
        settings=_settings(settings),
    )


def _settings(pairs: Sequence[str]) -> dict[str, str]:
    settings = {}
    for pair in pairs:
        name, separator, value = pair.partition("=")
        if not separator:
            raise UsageError(f"{pair!r} is no setting; write NAME=VALUE, as in max_num_seqs=32")
        try:
            check_setting(name, value, "command line")
        except ConfigError as error:
            raise UsageError(str(error)) from None
        settings[name] = value
    return settings


def _check(given: argparse.Namespace, name: str) -> None:
    """Raise `UsageError` for a name that is no folder's, or for options that do not go together."""
    if name in (".", "..") or not re.fullmatch(r"[A-Za-z0-9_.-]+", name):
        raise UsageError(f"--name is {name!r}; use letters, digits, '_', '-' and '.'")
    if bool(given.url) != bool(given.metrics_url):
        raise UsageError("--url and --metrics-url go together: one is where requests go, the other where metrics are")
    if given.compare and given.url:
        raise UsageError("--compare needs a server of its own for each run; leave out --url")
    for option, url in (("--url", given.url), ("--metrics-url", given.metrics_url)):
        if url and not LOOPBACK.match(url):
            raise UsageError(
                f"{option} is {url!r}; allowed: a loopback address, as in localhost:8001, so that nobody loads a "
                "network by mistake (docs/load-testing.md says how to reach a server elsewhere)"
            )


def _show(run: Run) -> None:
    from load_tests.report import lines

    _log("\n".join([*lines(run), f"written to {os.path.relpath(run.directory)}"]))


def _log(text: str) -> None:
    print(text, flush=True)


def _number(kind: type[int] | type[float], low: float, high: float) -> Callable[[str], float]:
    def parse(text: str) -> float:
        try:
            if low <= (number := kind(text)) <= high:
                return number
        except ValueError:
            pass
        noun = "an integer" if kind is int else "a number"
        raise argparse.ArgumentTypeError(f"{text!r}; allowed: {noun} from {low} to {high}")

    return parse
