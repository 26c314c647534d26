"""One run from end to end: right answers, server, load, result on disk. Called by the command line and by tests."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from dflash_backend.config import EngineConfig
from dflash_cli.launcher.server import TritonServer
from dflash_cli.launcher.server_log import LogLine
from load_tests.ideal import ideal_hits
from load_tests.load import Load, Target, make_load
from load_tests.reference import Expected, expected_answers
from load_tests.report import write_report
from load_tests.result import RunResult
from load_tests.verdict import Bound, passed, word
from load_tests.workload import Options, Scenario

RESULTS = Path(__file__).resolve().parent / "results"
EXPECTED = Path(__file__).resolve().parent / "expected"
_NUM_BLOCKS = re.compile(r"KV cache of (\d+) blocks")


@dataclass(frozen=True, slots=True)
class Address:
    """A server that somebody else started. `url` is that of the protocol in use."""

    url: str
    metrics_url: str
    model: str = "dflash"


@dataclass(frozen=True)
class Finished:
    """A run that is over: its result, what was asked of it, and where it was written."""

    result: RunResult
    bounds: list[Bound]
    directory: Path

    @property
    def passed(self) -> bool:
        """Whether it ran to its end and no bound was missed."""
        return self.result.complete and passed(self.bounds)

    @property
    def verdict(self) -> str:
        """PASS, FAIL, INCOMPLETE or INTERRUPTED."""
        return word(self.result.complete, self.bounds)


def run_scenario(
    scenario: Scenario,
    options: Options,
    directory: Path,
    address: Address | None = None,
    say: Callable[[str], None] = print,
    expected_dir: Path = EXPECTED,
) -> Finished:
    """Run a scenario against a server of its own, or the one at `address`, and write everything to `directory`.

    Raises `LauncherError`, `ConfigError` or `CheckpointError` with a sentence when there is no server to be had, and
    `OSError` when the results cannot be written.
    """
    settings = {**scenario.settings, **options.settings}
    questions = scenario.questions(options)
    answers = expected_answers(scenario.name, options.seed, questions, settings, expected_dir, say)
    directory.mkdir(parents=True, exist_ok=True)
    with _server(options, settings, address, say) as (target, pool):
        load = make_load(target, scenario.phases(options, questions), questions, answers, directory, say)
    result = _result(scenario, options, settings, load, answers, pool.num_blocks)
    bounds = list(scenario.bounds(result))
    write_report(result, bounds, directory)
    return Finished(result, bounds, directory)


class _PoolSize:
    """Reads from the server's log how many KV blocks it has; None as long as it has not said so."""

    def __init__(self) -> None:
        self.num_blocks: int | None = None

    def read(self, line: LogLine) -> None:
        """See `TritonServer`'s `on_log`."""
        match = _NUM_BLOCKS.search(line.text)
        if match:
            self.num_blocks = int(match[1])


@contextmanager
def _server(
    options: Options, settings: Mapping[str, str], address: Address | None, say: Callable[[str], None]
) -> Iterator[tuple[Target, _PoolSize]]:
    """A server of our own on free loopback ports while the block lasts, or the one at `address`."""
    pool = _PoolSize()
    if address is not None:
        yield Target(address.url, address.metrics_url, options.protocol, address.model, None), pool
        return
    # The caller's own DFLASH_ variables would change what is measured without a trace of it in the results.
    environ = {name: value for name, value in os.environ.items() if not name.startswith("DFLASH_")}
    # A sample is told apart as hit or miss by what its own answer says.
    told = {"report_cached_tokens": "true", **settings}
    server = TritonServer(
        told, host="127.0.0.1", http_port=0, grpc_port=0, metrics_port=0, environ=environ, on_log=pool.read
    )
    say("starting the server" + "".join(f", {name} = {value}" for name, value in settings.items()))
    began = time.monotonic()
    with server:
        say(f"ready after {time.monotonic() - began:.1f} s")
        url = server.grpc_url if options.protocol == "grpc" else server.http_url
        yield Target(url, server.metrics_url, options.protocol, server.model_name, server.pid), pool


def _result(
    scenario: Scenario,
    options: Options,
    settings: dict[str, str],
    load: Load,
    answers: Mapping[str, Expected],
    num_kv_blocks: int | None,
) -> RunResult:
    config = EngineConfig.from_values(settings)
    # A refused request was never looked up.
    asked = [(s.question, s.salt) for s in load.recorder.samples if s.outcome not in ("refused", "error")]
    caching = config.enable_prefix_caching
    ideal = ideal_hits(asked, answers, config.kv_block_size) if caching else None
    bounded = ideal_hits(asked, answers, config.kv_block_size, num_kv_blocks) if caching and num_kv_blocks else None
    return RunResult(
        scenario=scenario,
        options=options,
        recorder=load.recorder,
        observations=load.observations,
        phases=load.phases,
        duration_s=load.duration_s,
        complete=load.complete,
        settings=settings,
        num_kv_blocks=num_kv_blocks,
        ideal=ideal,
        ideal_bounded=bounded,
    )
