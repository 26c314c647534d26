"""The command line of the load tests: `python -m load_tests list`, `python -m load_tests SCENARIO [options]`.

Exit codes: 0 every bound was met, 1 a wrong answer or a bound that was missed, 2 bad usage, 3 nothing was missed and
some bound could not be judged, 130 interrupted.
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
from typing import TYPE_CHECKING

from dflash_backend.checkpoints import CheckpointError
from dflash_backend.config import ConfigError, check_setting
from dflash_cli.launcher.triton_install import LauncherError
from load_tests.reference import ExpectedAnswersError
from load_tests.scenarios import SCENARIOS
from load_tests.verdict import Bound
from load_tests.workload import Options, Scenario

if TYPE_CHECKING:
    from load_tests.run import Address, Finished

MAX_USERS = 4096
MAX_DURATION_S = 24 * 3600
MAX_PROMPTS = 100_000
MAX_RATE = 5000.0
EXIT_CODES = {"PASS": 0, "FAIL": 1, "INCOMPLETE": 3, "INTERRUPTED": 130}
LOOPBACK = re.compile(r"^(localhost|127\.\d+\.\d+\.\d+|\[::1\])(:\d+)?$")


class UsageError(ValueError):
    """The command line asks for what cannot be. The text is for the person who wrote it."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Entry point."""
    parser = _parser()
    given = parser.parse_args(arguments)
    if given.scenario == "list":
        for scenario in SCENARIOS.values():
            print(f"{scenario.name:16} {scenario.summary}\n{'':16} shows: {scenario.shows}")
        return 0
    missing = [name for name in ("locust", "matplotlib") if importlib.util.find_spec(name) is None]
    if missing:
        print(
            f"load_tests: {' and '.join(missing)} missing; install them with: pip install -e '.[load]'", file=sys.stderr
        )
        return 2
    # The server must go with us also when it is not a terminal that ends us.
    signal.signal(signal.SIGTERM, lambda number, frame: os.kill(os.getpid(), signal.SIGINT))
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
        _add_options(
            commands.add_parser(scenario.name, help=scenario.summary, description=_description(scenario)), scenario
        )
    return parser


def _description(scenario: Scenario) -> str:
    settings = ", ".join(f"{name}={value}" for name, value in scenario.settings.items())
    return f"{scenario.summary}. Shows: {scenario.shows}. Server: {settings}."


def _add_options(parser: argparse.ArgumentParser, scenario: Scenario) -> None:
    defaults = scenario.defaults
    add = parser.add_argument
    add("--users", type=_integer(1, MAX_USERS), default=defaults.users, help="closed-loop users; default %(default)s")
    add("--duration", type=_number(1, MAX_DURATION_S), default=defaults.duration_s, help="seconds; default %(default)s")
    add("--rate", type=_number(0, MAX_RATE), default=defaults.rate, help="open-loop requests/s; default %(default)s")
    add("--prompts", type=_integer(1, MAX_PROMPTS), default=defaults.prompts, help="questions; default %(default)s")
    add("--seed", type=_integer(0, 2**31), default=0, help="of prompts and arrivals; default %(default)s")
    add("--protocol", choices=("grpc", "http"), default="grpc", help="default %(default)s")
    add("--set", action="append", default=[], metavar="NAME=VALUE", help="a setting of the server; may be repeated")
    add("--settings", default="", metavar="'NAME=VALUE ...'", help="several settings in one argument")
    add("--compare", metavar="NAME=VALUE", help="run again with this setting and compare the throughputs")
    add("--name", default="", help="of the folder with the results; default: the scenario and the time")
    add("--out", type=Path, default=None, help="folder that the results' folder goes to; default: load_tests/results")
    add("--url", default="", metavar="HOST:PORT", help="use the server that runs there; loopback addresses only")
    add("--metrics-url", default="", metavar="HOST:PORT", help="its metrics, with --url")
    add("--model", default="dflash", help="its model, with --url; default %(default)s")


def _run(given: argparse.Namespace) -> int:
    from load_tests import run

    scenario = SCENARIOS[given.scenario]
    options = _options(given)
    address = _address(given)
    name = given.name or f"{scenario.name}-{time.strftime('%Y%m%d-%H%M%S')}"
    if name in (".", "..") or not re.fullmatch(r"[A-Za-z0-9_.-]+", name):
        raise UsageError(f"--name is {name!r}; use letters, digits, '_', '-' and '.'")
    results = given.out or run.RESULTS
    changed = _settings([given.compare]) if given.compare else {}
    if changed and address is not None:
        raise UsageError("--compare needs a server of its own for each run; leave out --url")
    finished = run.run_scenario(scenario, options, results / name, address, _say)
    _show(finished)
    if not changed or not finished.result.complete:
        return _exit_code(finished)
    other = dataclasses.replace(options, settings={**options.settings, **changed})
    suffix = re.sub(r"[^A-Za-z0-9_.-]+", "-", given.compare)
    second = run.run_scenario(scenario, other, results / f"{name}-{suffix}", None, _say)
    _show(second)
    comparison = compare(finished, second, given.compare)
    print(comparison.line())
    (finished.directory / "comparison.md").write_text(f"{comparison.line()}\n", encoding="utf-8")
    return _exit_code(finished) or _exit_code(second) or int(not comparison.met and comparison.applies)


def compare(first: Finished, second: Finished, changed: str) -> Bound:
    """The throughput of a run over that of the same workload with a setting changed."""
    scenario = first.result.scenario
    limit = scenario.compare_at_least.get(changed)
    base = second.result.requests_per_s
    return Bound(
        f"throughput over that with {changed}",
        first.result.requests_per_s / base if base else None,
        "at least",
        limit if limit is not None else 0.0,
        applies=limit is not None,
        note=f"{first.result.requests_per_s:.1f} and {base:.1f} right answers/s",
    )


def _options(given: argparse.Namespace) -> Options:
    return Options(
        users=given.users,
        duration_s=given.duration,
        rate=given.rate,
        prompts=given.prompts,
        seed=given.seed,
        protocol=given.protocol,
        settings=_settings([*given.set, *_words(given.settings)]),
    )


def _words(text: str) -> list[str]:
    try:
        return shlex.split(text)
    except ValueError as error:
        raise UsageError(f"--settings is {text!r}, which cannot be read: {error}") from None


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


def _address(given: argparse.Namespace) -> Address | None:
    from load_tests.run import Address

    if bool(given.url) != bool(given.metrics_url):
        raise UsageError("--url and --metrics-url go together: one is where requests go, the other where metrics are")
    if not given.url:
        return None
    for option, url in (("--url", given.url), ("--metrics-url", given.metrics_url)):
        if not LOOPBACK.match(url):
            raise UsageError(
                f"{option} is {url!r}; allowed: a loopback address, as in localhost:8001, so that nobody loads a "
                "network by mistake (docs/load-testing.md says how to reach a server elsewhere)"
            )
    return Address(given.url, given.metrics_url, given.model)


def _show(finished: Finished) -> None:
    from load_tests.report import lines

    print("\n".join(lines(finished.result, finished.bounds)))
    print(f"written to {os.path.relpath(finished.directory)}")


def _exit_code(finished: Finished) -> int:
    return EXIT_CODES[finished.verdict]


def _say(text: str) -> None:
    print(text, flush=True)


def _integer(low: int, high: int) -> Callable[[str], int]:
    def parse(text: str) -> int:
        if not text.strip().lstrip("-").isdigit() or not low <= int(text) <= high:
            raise argparse.ArgumentTypeError(f"{text!r}; allowed: an integer from {low} to {high}")
        return int(text)

    return parse


def _number(low: float, high: float) -> Callable[[str], float]:
    def parse(text: str) -> float:
        try:
            number = float(text)
        except ValueError:
            number = float("nan")
        if not low <= number <= high:
            raise argparse.ArgumentTypeError(f"{text!r}; allowed: a number from {low:g} to {high:g}")
        return number

    return parse
