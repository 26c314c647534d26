"""KV tiers on this machine: what a hit of host memory or of a disk saves, what a working set larger than the device
gains, and what other requests' steps pay while KV moves.

`python -m checks.kv_tiers` prints them for the demo pair, or for another target without a drafter, and exits with 1
when a bound below is missed.
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from dflash_backend import LLM, SamplingParams
from dflash_backend.core.moves import DEVICE, HOST, Move, Record
from dflash_backend.engine.kv_tiers import CPU_STORE_MB_S
from dflash_backend.messages import GenerationRequest
from dflash_backend.worker.kv_mover import BackgroundMover, DeviceRecords, HostRecords
from dflash_cli.commands.arguments import positive_int

# What the project promises: the first token of a hit of host memory over that of computing it, and the 95th percentile
# of others' steps while KV moves over that of a quiet engine.
MAX_FIRST_TOKEN_RATIO = 0.35
MAX_STEP_RATIO = 1.3
BLOCK = 16
GREEDY = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True)


@dataclass(frozen=True)
class Answer:
    """Of one request: seconds to its first token, and the share of its prompt that was found."""

    first_token_s: float
    found: float


def prompts(count: int, num_tokens: int) -> list[list[int]]:
    """Prompts of which no two begin alike."""
    rng = random.Random(3)
    return [[rng.randrange(5, 1400) for _ in range(num_tokens)] for _ in range(count)]


def engine(num_positions: int, **settings: Any) -> LLM:
    """An engine over a device's cache of that many positions. settings: among them the models', by default the demo
    pair's."""
    models = {name: settings[name] for name in ("target", "draft") if name in settings}
    llm = LLM(device="cpu", max_model_len=1024, max_num_seqs=4, kv_cache_gb=0.1, **models)
    size = sum(part[0].nbytes // part.shape[1] * part.shape[0] for part in llm.engine.runner.model.kv.records[0])
    del llm
    gib = (num_positions // BLOCK + 0.5) * size / 1024**3
    longest = min(2048, num_positions // BLOCK * BLOCK)
    return LLM(device="cpu", max_model_len=longest, max_num_seqs=4, kv_cache_gb=gib, **settings)


def ask(llm: LLM, prompt: list[int]) -> Answer:
    """One request alone; then all that is to go to tiers goes there."""
    (output,) = llm.generate([prompt], GREEDY)
    core, until = llm.engine.core, time.monotonic() + 5.0
    while core.is_moving and time.monotonic() < until:
        core.advance_moves()
        time.sleep(0.01)
    assert output.first_token_s is not None
    assert output.stats is not None
    return Answer(output.first_token_s, output.stats.num_cached_tokens / len(prompt))


def first_tokens(num_tokens: int, count: int, **settings: Any) -> tuple[float, float]:
    """Median seconds to the first token of prompts that are computed, and of the same ones when they come back from a
    tier: the device holds one and a half."""
    llm = engine(num_tokens * 3 // 2, **settings)
    own = prompts(count + 1, num_tokens)
    ask(llm, own.pop())  # the first request of a process is slower
    computed = [ask(llm, prompt) for prompt in own]
    again = [ask(llm, prompt) for prompt in own]
    assert all(each.found == 0 for each in computed)
    assert all(each.found > 0.9 for each in again), [each.found for each in again]
    return statistics.median(each.first_token_s for each in computed), statistics.median(
        each.first_token_s for each in again
    )


def working_set(count: int, num_tokens: int, num_requests: int, **settings: Any) -> tuple[float, float]:
    """Share of the prompts' tokens that was found, and mean seconds to the first token, of requests for prompts by
    Zipf's law that together take four times the device's cache."""
    llm = engine(count * num_tokens // 4, **settings)
    own, rng = prompts(count, num_tokens), random.Random(5)
    weights = [1 / (rank + 1) for rank in range(count)]
    answers = [ask(llm, prompt) for prompt in rng.choices(own, weights, k=num_requests)]
    return statistics.mean(each.found for each in answers), statistics.mean(each.first_token_s for each in answers)


class _Traffic:
    """Records that go from the device to host memory and back, each as often, for as long as the block lasts, in blocks
    that no request has."""

    def __init__(self, llm: LLM, num_blocks: int, max_bytes_s: float, max_stored_bytes_s: float) -> None:
        step = llm.engine.runner.model
        device = DeviceRecords([(tensors, 0) for tensors in step.kv.records])
        stores = {HOST: HostRecords(device.sizes, [num_blocks], False)}
        self._mover = BackgroundMover(device, stores, max_bytes_s, max_stored_bytes_s)
        self._last = llm.engine.core.config.num_blocks - 1
        self._num_blocks = num_blocks
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._keep_busy)
        self.num_bytes = 0

    def _keep_busy(self) -> None:
        number = 0
        while not self._ended.is_set():
            slots = range(16)
            out = [Record(0, b"", self._last - slot, slot) for slot in slots]
            back = [Record(0, b"", slot, self._last - slot) for slot in slots]
            self._mover.submit(Move(number, DEVICE, HOST, tuple(out)))
            self._mover.submit(Move(number + 1, HOST, DEVICE, tuple(back)))
            number += 2
            num_under_way = 2
            while num_under_way and not self._ended.is_set():
                self._mover.wait(0.1)
                done = self._mover.finished()
                num_under_way -= len(done)
                self.num_bytes += sum(each.num_bytes for each in done)

    def __enter__(self) -> _Traffic:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._ended.set()
        self._thread.join()
        self._mover.close()


def steps(llm: LLM, num_tokens: int) -> list[float]:
    """Seconds of the decode steps of four requests."""
    core = llm.engine.core
    params = SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True)
    for index, prompt in enumerate(prompts(4, 64)):
        core.add_request(GenerationRequest(str(index), prompt, params))
    core.step()
    core.collect_drafts()
    found = []
    while core.has_unfinished():
        began = time.perf_counter()
        core.step()
        core.collect_drafts()
        found.append(time.perf_counter() - began)
    return found


def p95(values: Sequence[float]) -> float:
    return statistics.quantiles(values, n=20)[-1]


def step_ratios(num_runs: int, num_tokens: int, max_mb_s: float, **models: Any) -> tuple[list[float], float]:
    """Of each pair of runs the 95th percentile of steps while KV moves over that without, and the megabytes a second
    that moved. max_mb_s: as `kv_move_mb_s`."""
    llm = LLM(device="cpu", max_model_len=1024, max_num_seqs=4, kv_cache_gb=0.2, adaptive_speculation=False, **models)
    steps(llm, num_tokens)
    ratios, moved, seconds = [], 0, 0.0
    for _ in range(num_runs):
        quiet = p95(steps(llm, num_tokens))
        began = time.perf_counter()
        with _Traffic(llm, 16, max_mb_s * 1e6, 0.0 if max_mb_s else CPU_STORE_MB_S * 1e6) as traffic:
            busy = p95(steps(llm, num_tokens))
        seconds += time.perf_counter() - began
        moved += traffic.num_bytes
        ratios.append(busy / quiet)
    return ratios, moved / seconds / 1e6


def main() -> int:
    """Print the figures; 1 where a bound is missed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=positive_int, default=1500, help="of the prompts whose first token is timed")
    parser.add_argument("--requests", type=positive_int, default=150, help="of the working set (%(default)s)")
    parser.add_argument("--set-tokens", type=positive_int, default=400, help="of its prompts (%(default)s)")
    parser.add_argument("--target", help="a target without a drafter, such as smollm2 (the demo pair)")
    parser.add_argument("--runs", type=positive_int, default=5, help="pairs of runs for the time of steps")
    parser.add_argument("--move-mb-s", type=float, default=0.0, help="as kv_move_mb_s, 0: not set")
    arguments = parser.parse_args()
    models: dict[str, Any] = {"target": arguments.target, "draft": ""} if arguments.target else {}
    wrong = []
    with tempfile.TemporaryDirectory() as folder:
        disk: dict[str, Any] = {"kv_disk_path": folder, "kv_disk_gb": 2.0}
        if not models:
            disk["kv_host_gb"] = 0.003  # as little as there may be for the demo pair
        host: dict[str, Any] = {"kv_host_gb": 2.0}
        for name, settings in (("host memory", host), ("disk", disk)):
            computed, loaded = first_tokens(arguments.tokens, 5, **settings, **models)
            print(
                f"first token at {arguments.tokens} tokens: computed {computed * 1e3:.1f} ms, from {name} "
                f"{loaded * 1e3:.1f} ms: {loaded / computed:.3f}",
                flush=True,
            )
            if name == "host memory" and loaded / computed > MAX_FIRST_TOKEN_RATIO:
                wrong.append(f"a hit of host memory takes {loaded / computed:.3f}, at most {MAX_FIRST_TOKEN_RATIO}")
        for name, settings in (("none", {}), ("host memory", host), ("disk", disk)):
            found, first = working_set(16, arguments.set_tokens, arguments.requests, **settings, **models)
            what = f"{found:.1%} found, first token {first * 1e3:.1f} ms"
            print(f"working set of 4 times the device, {name}: {what}", flush=True)
    ratios, rate = step_ratios(arguments.runs, 240, arguments.move_mb_s, **models)
    median = statistics.median(ratios)
    spread = f"{min(ratios):.2f} to {max(ratios):.2f}"
    print(f"p95 of others' steps while {rate:.0f} MB/s move: {median:.2f} of quiet ({spread})")
    if median > MAX_STEP_RATIO:
        wrong.append(f"others' steps take {median:.2f} of quiet, at most {MAX_STEP_RATIO}")
    for line in wrong:
        print(f"missed: {line}")
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
