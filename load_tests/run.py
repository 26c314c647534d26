"""One run from end to end: expected answers, server, load, report."""

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
from load_tests.expected_answers import ExpectedAnswer, expected_answers
from load_tests.hit_rate import ideal_hits
from load_tests.load import Load, Target, make_load
from load_tests.report import write_report
from load_tests.result import RunResult
from load_tests.scenario import Run, Scenario
from load_tests.workload import Options

_NUM_BLOCKS = re.compile(r"KV cache of (\d+) blocks")


@dataclass(frozen=True, slots=True)
class Address:
    """A server that this run does not start. `url` is that of the protocol in use."""

    url: str
    metrics_url: str
    model: str = "dflash"


def run_scenario(
    scenario: Scenario,
    options: Options,
    directory: Path,
    expected_dir: Path,
    address: Address | None,
    log: Callable[[str], None],
) -> Run:
    """Run a scenario against a server of its own, or the one at `address`, and write everything to `directory`.
    Expected answers are kept in `expected_dir`.

    Raises `LauncherError`, `ConfigError` or `CheckpointError` with a sentence when there is no server to be had, and
    `OSError` when the results cannot be written.
    """
    settings = {**scenario.settings, **options.settings}
    questions = scenario.questions(options)
    answers = expected_answers(scenario.name, options.seed, questions, settings, expected_dir, log)
    directory.mkdir(parents=True, exist_ok=True)
    num_blocks = _NumBlocks()
    with _server(options, settings, address, num_blocks, log) as target:
        load = make_load(target, scenario.phases(options, questions), questions, answers, directory, log)
    run = Run(scenario, options, _result(settings, load, answers, num_blocks.value), directory)
    write_report(run)
    return run


class _NumBlocks:
    """The number of KV blocks, from the server's log; None until it says so."""

    def __init__(self) -> None:
        self.value: int | None = None

    def read(self, line: LogLine) -> None:
        """Read a line of the log."""
        if match := _NUM_BLOCKS.search(line.text):
            self.value = int(match[1])


@contextmanager
def _server(
    options: Options,
    settings: Mapping[str, str],
    address: Address | None,
    num_blocks: _NumBlocks,
    log: Callable[[str], None],
) -> Iterator[Target]:
    """A server on free loopback ports for the block, or the one at `address`."""
    if address is not None:
        yield Target(address.url, address.metrics_url, options.protocol, address.model, None)
        return
    # DFLASH_ variables would change what is measured without a trace of it in the results.
    environ = {name: value for name, value in os.environ.items() if not name.startswith("DFLASH_")}
    # Answers must say how much of their prompt was cached, which tells hits from misses.
    told = {"report_cached_tokens": "true", **settings}
    server = TritonServer(
        told, host="127.0.0.1", http_port=0, grpc_port=0, metrics_port=0, environ=environ, on_log=num_blocks.read
    )
    log("starting the server" + "".join(f", {name} = {value}" for name, value in settings.items()))
    began = time.monotonic()
    with server:
        log(f"ready after {time.monotonic() - began:.1f} s")
        url = server.grpc_url if options.protocol == "grpc" else server.http_url
        yield Target(url, server.metrics_url, options.protocol, server.model_name, server.pid)


def _result(
    settings: dict[str, str], load: Load, answers: Mapping[str, ExpectedAnswer], num_kv_blocks: int | None
) -> RunResult:
    config = EngineConfig.from_values(settings)
    # Refused requests were never looked up in the prefix cache.
    asked = [(s.question, s.salt) for s in load.recorder.samples if s.outcome not in ("refused", "error")]
    caching = config.enable_prefix_caching
    ideal = ideal_hits(asked, answers, config.kv_block_size) if caching else None
    total = (num_kv_blocks or 0) * config.data_parallel_size
    bounded = ideal_hits(asked, answers, config.kv_block_size, total) if caching and total else None
    return RunResult(
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
