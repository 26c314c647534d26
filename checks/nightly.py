"""Runs every promise at its full count, and keeps what was printed: `make nightly`, an hour or two on two cores.

Each command's output goes to `benchmarks/results/nightly/NAME.txt`, and `summary.md` has a line for each: commit them.
With `--only` some of them run anew, and the lines of the others stay, but for those of commands that have changed. A
command that lacks a package or program is skipped, and one that takes longer than its limit is ended. Exit status 1
when any command failed or was ended; the others run all the same.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO

from checks.exit_status import SKIPPED

RESULTS = Path(__file__).resolve().parents[1] / "benchmarks" / "results" / "nightly"
OUTCOMES = "outcomes.json"
# The module, its arguments, and what it shows.
COMMANDS: dict[str, tuple[tuple[str, ...], str]] = {
    "lossless": (("checks.lossless",), "greedy output equals that of transformers, 200 prompts, 9 ways to run"),
    "sampling": (
        ("checks.sampling", "--prompts", "5", "--seeds", "3"),
        "sampled output has the target's distribution: 5 prompts, 3 ranges of seeds, drafts with and without noise",
    ),
    "smollm2": (
        ("checks.smollm2",),
        "SmolLM2: weights, ids, scores, 100 greedy answers as transformers', and drafts change none",
    ),
    "llama_gguf": (
        ("checks.llama_gguf",),
        "the demo pair in GGUF: texts and drafts as in safetensors, texts as llama.cpp's, where that is installed",
    ),
    "sampled_text": (("checks.sampled_text",), "sampled text by seed, 100 prompts, 5 seeds, 9 ways to run"),
    "structured": (
        ("checks.structured", "--fits", "20000"),
        "500 answers over 10 schemas and 5 regular expressions parse, and are the target's own",
    ),
    "grammar_bounds": (
        ("checks.grammar_bounds", "--count", "400", "--live", "60"),
        "400 expressions, schemas and grammars of bad shapes: time and memory of each, and another client's stream",
    ),
    "grammar_bounds_large": (
        ("checks.grammar_bounds", "--count", "200", "--vocabulary", "151669"),
        "200 of them with a vocabulary of 151,669 tokens",
    ),
    "acceptance": (("checks.acceptance",), "acceptance and accuracy, and what a wrong layer index costs"),
    "kv_cache": (("checks.kv_cache",), "a KV cache in FP8: blocks, acceptance, and text without a drafter"),
    "prefix": (("checks.prefix",), "a prefix hit: time to first token and acceptance"),
    "kv_tiers": (
        ("checks.kv_tiers",),
        "KV tiers: first token of a hit, a working set of 4 times the device, others' steps",
    ),
    "disaggregation": (
        ("checks.disaggregation",),
        "a prefill and a decode server beside one: 64 prompts of 1,500 tokens, and each engine killed 10 times",
    ),
    "scheduler": (("benchmarks.scheduler",), "planning and lookup with up to a million cached blocks"),
    "adaptive": (("benchmarks.adaptive", "--full"), "speculation that follows the load against none and fixed k"),
    "change": (("benchmarks.adaptive", "--change"), "the same when the traffic changes"),
    "mixed": (("checks.mixed", "--requests", "500", "--dropped", "200"), "500 requests at once, 200 dropped"),
    "malformed": (("checks.malformed", "--requests", "10000"), "10,000 malformed requests"),
    "random_requests": (
        ("checks.random_requests", "--requests", "1000"),
        "1,000 random requests to each endpoint: no server error, and a stream brings what the whole answer has",
    ),
    "chaos": (("checks.chaos", "--rounds", "20"), "the engine is killed 20 times under load"),
    "event_loop": (
        ("checks.event_loop",),
        "the largest bodies that the OpenAI front end takes keep others waiting for at most 50 ms",
    ),
    "drafter_swap": (
        ("checks.drafter_swap", "--swaps", "10"),
        "the drafter is swapped 10 times under 32 streams, and a worse one goes again: no error, no text that differs",
    ),
    "silent_stream": (
        ("checks.silent_stream",),
        "streams that are silent for 60 s come through a proxy that gives up after 15 s",
    ),
    "readiness": (("checks.readiness",), "an engine is killed and kept down for 10 s: what each probe says"),
    "ranks": (("checks.chaos", "--rounds", "10", "--ranks", "2"), "a rank of two is killed 10 times under load"),
    "ray_ranks": (
        ("checks.ray_ranks", "--rounds", "5"),
        "two Ray nodes share a target, and one is lost 5 times under load",
    ),
    "tensor_parallel": (("checks.tensor_parallel",), "200 texts of 2 and 4 ranks are those of one process"),
    "vocabulary": (
        ("pytest", "-q", "tests/parallel/test_vocabulary_ranks.py"),
        "a vocabulary split over 2 and 4 ranks, 16 kinds of targets, and hard logits: the text of one process",
    ),
    "tenant_flood": (("checks.tenant_flood",), "short requests beside 500 long prompts of another tenant"),
    "cancel_cost": (("checks.cancel_cost",), "asking whether 64 clients are still there"),
    **{
        f"training_{seed}": (
            ("checks.training", "--seed", str(seed), "--minutes", "10", "--work", "/tmp/dflash-check-training"),
            f"a drafter that is given no data, beside one of the generator's prompts: target and seed {seed}",
        )
        for seed in (1, 2, 3)
    },
    "adapting": (
        ("checks.adapting", "--minutes", "5", "--work", "/tmp/dflash-check-adapting"),
        "a target that was fine-tuned to another style: what its drafter lost, and what five minutes give back",
    ),
    "tests": (
        (
            "pytest",
            "-q",
            "-n",
            "logical",
            "-m",
            "slow and not server",
            "tests/core",
            "tests/invariants/test_lossless.py",
            "tests/invariants/test_logits_processing.py",
            "tests/drafters/test_formats_end_to_end.py",
            "tests/checkpoints",
            "tests/demo",
        ),
        "random traffic, distributions and damaged checkpoints at four times the counts of make test",
    ),
    "marked": (
        ("pytest", "-q", "-n", "logical", "-m", "nightly", "tests"),
        "the tests that make test leaves to the night",
    ),
    "examples": (
        (
            "pytest",
            "-q",
            "tests/text/test_detokenizer.py",
            "tests/frontend/test_parsing.py",
            "tests/frontend/test_harmony.py",
            "tests/frontend/test_random_requests.py",
            "tests/core/test_prefix_cache.py",
            "tests/demo/test_pair.py",
        ),
        "examples of hypothesis that no run has had before",
    ),
    "overlap": (
        ("pytest", "-q", "-n", "logical", "tests/worker/test_random_overlap.py"),
        "1,000 random workloads with steps in flight yield what the engine without overlap yields",
    ),
    "combinations": (
        ("pytest", "-q", "-n", "logical", "tests/invariants/test_setting_combinations.py"),
        "1,000 draws of settings, families, drafters and traffic: each request gets its target's own text",
    ),
    "positions": (
        ("pytest", "-q", "-n", "logical", "tests/worker/test_long_positions.py"),
        "text, scores and drafts across the positions 2^15 and 2^16, four kinds of targets",
    ),
    "sweeps": (
        (
            "pytest",
            "-q",
            "-n",
            "logical",
            "tests/worker/test_recurrent_hits.py",
            "tests/worker/test_recurrent_engines.py",
            "tests/worker/test_mixed_steps.py",
            "tests/worker/test_shared_prefixes.py",
            "tests/invariants/test_same_seed.py",
            "tests/invariants/test_batch_invariance.py",
            "tests/invariants/test_batch_invariant_kernels.py",
            "tests/kernels/test_invariant_kernels.py",
            "tests/kernels/test_paged_attention.py",
            "tests/benchmarks/test_kernel_variants.py",
            "tests/drafters/test_dspark_engine.py",
        ),
        "copied states, mixed steps, shared prefixes, seeds, batch invariance: all ways of which make test runs some",
    ),
    "reloads": (
        ("pytest", "-q", "tests/server/test_repository_api.py", "-k", "over_and_over or two_instances"),
        "a model that is unloaded and loaded eight times leaks nothing, and two instances share long answers",
    ),
    "pages": (
        ("pytest", "-q", "tests/docs/test_examples.py", "-k", "README or evaluation"),
        "the commands of the pages that measure acceptance, with as many questions as they say",
    ),
    "compiles": (
        ("pytest", "-q", "tests/kernels/test_compiles.py"),
        "every kernel compiles for Hopper, with every tile of quantised weights",
    ),
    "kept_pair": (
        ("tests.support.kept_pair", "--prompts", "2", "--tokens", "16"),
        "the demo pair in FP8 and INT4 that stay quantised, kernels interpreted: the dequantised pair's text",
    ),
    "states": (
        (
            "pytest",
            "-q",
            "-n",
            "logical",
            "tests/core/test_core_random.py",
        ),
        "480,000 random steps, and 100,000 each with slots of recurrent states and with blocks of windows: contents "
        "are checked",
    ),
    "router": (
        ("benchmarks.router",),
        "64 replicas and a million requests, simulated: hits, balance, at most 50 us for a decision",
    ),
    "recurrent_hits": (
        ("benchmarks.recurrent_hits",),
        "a prefix hit behind a copied state: at most a quarter of a miss at 1,500 tokens",
    ),
    "window_blocks": (("benchmarks.window_blocks",), "what a long request holds of layers with a window"),
    "kernel_variants": (
        ("benchmarks.gpu.kernel_variants",),
        "200 mixed workloads over all kinds of engines compile no kernel in service",
    ),
    "gpu_rehearsal": (
        ("benchmarks.gpu.card_report", "--rehearse"),
        "every part of make gpu-report over a GPU that is not there: no devices mixed, no wait in a step or a capture",
    ),
    "mutants": (("tests.mutations.run",), "the tests notice every known defect"),
}
# tests/support/scale.py
ENVIRON = {
    "examples": {"TEST_RANDOM": "1"},
    "tests": {"TEST_SCALE": "4"},
    "marked": {"TEST_SCALE": "4"},
    "overlap": {"TEST_SCALE": "40"},
    "positions": {"TEST_SCALE": "4"},
    "sweeps": {"TEST_SCALE": "4"},
    "vocabulary": {"TEST_SCALE": "4"},
    "reloads": {"TEST_SCALE": "4"},
    "pages": {"TEST_SCALE": "4"},
    "compiles": {"TEST_SCALE": "4"},
    "combinations": {"TEST_RANDOM": "1", "TEST_SCALE": "32"},
    "states": {"TEST_SCALE": "10"},
}
# Seconds after which a command hangs: several times what the slowest takes, apart from all mutants.
LIMIT_S, LIMITS = 3 * 3600.0, {"mutants": 12 * 3600.0}
# How long what is ended may take to end its servers.
GRACE_S = 10.0
# The exit status of a command that was ended, as that of `timeout`.
ENDED = 124


@dataclass(frozen=True)
class Outcome:
    """How a command ended. command: as `command_of` has it. num_skipped: tests that did not run."""

    name: str
    command: str
    status: int
    seconds: float
    commit: str
    num_skipped: int = 0

    @property
    def failed(self) -> bool:
        """Whether the promise was missed."""
        return self.status not in (0, SKIPPED)

    @property
    def line(self) -> str:
        """A row of the summary."""
        shows = COMMANDS[self.name][1]
        words = {0: "kept", SKIPPED: "skipped", ENDED: "MISSED (ended after its limit)"}
        word = words.get(self.status, f"MISSED (exit {self.status})")
        if self.num_skipped and not self.status:
            word += f", tests skipped: {self.num_skipped}"
        return f"| {shows} | `{self.command}` | {word} | {self.seconds:.0f} | {self.commit} |"


def command_of(name: str) -> str:
    """The command of this name as a shell takes it."""
    variables = (f"{variable}={value} " for variable, value in ENVIRON.get(name, {}).items())
    return f"{''.join(variables)}python -m {shlex.join(COMMANDS[name][0])}"


def run(name: str, directory: Path, commit: str) -> Outcome:
    """Run one command and keep what it prints."""
    arguments, path = COMMANDS[name][0], directory / f"{name}.txt"
    started = time.monotonic()
    with path.open("w", encoding="utf-8") as output:
        command, environ = [sys.executable, "-m", *arguments], os.environ | ENVIRON.get(name, {})
        status = _status_of(command, environ, output, LIMITS.get(name, LIMIT_S))
    seconds, num_skipped = time.monotonic() - started, 0
    if arguments[0] == "pytest":
        last = path.read_text(encoding="utf-8", errors="replace").rstrip().rpartition("\n")[2]
        num_skipped = sum(map(int, re.findall(r"(\d+) skipped", last)))
        if status == 0 and num_skipped and " passed" not in last:
            status = SKIPPED
    return Outcome(name, command_of(name), status, seconds, commit, num_skipped)


def _status_of(command: Sequence[str], environ: Mapping[str, str], output: IO[str], limit_s: float) -> int:
    """The exit status of a command, which is ended after `limit_s` seconds with all that it has started."""
    process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, env=environ, start_new_session=True)
    try:
        return process.wait(limit_s)
    except subprocess.TimeoutExpired:
        return ENDED
    finally:
        # Also after Ctrl-C, which does not reach a session of its own.
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(GRACE_S)
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def kept_outcomes(directory: Path) -> dict[str, Outcome]:
    """Those of runs before, by name, whose commands are still the same."""
    path = directory / OUTCOMES
    found = json.loads(path.read_text(encoding="utf-8")) if path.exists() else []
    return {
        outcome["name"]: Outcome(**outcome)
        for outcome in found
        if outcome["name"] in COMMANDS and outcome.get("command") == command_of(outcome["name"])
    }


def summary(outcomes: Sequence[Outcome]) -> str:
    """All outcomes as Markdown."""
    kept = sum(outcome.status == 0 for outcome in outcomes)
    skipped = sum(outcome.status == SKIPPED for outcome in outcomes)
    more = f", {skipped} skipped" if skipped else ""
    lines = [
        "# The promises at their full counts",
        "",
        f"{kept} of {len(outcomes)} kept{more}, of {len(COMMANDS)} that there are; {platform.machine()}, "
        f"{os.cpu_count()} cores, Python {platform.python_version()}. Written by `make nightly`; what each command "
        "printed lies beside this page.",
        "",
        "| promise | command | outcome | seconds | commit |",
        "| --- | --- | --- | ---: | --- |",
        *(outcome.line for outcome in outcomes),
    ]
    return "\n".join(lines) + "\n"


def main() -> int:
    """Entry point."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", nargs="*", choices=COMMANDS, default=list(COMMANDS), help="some of them")
    parser.add_argument("--out", type=Path, default=RESULTS, help="where the results go (%(default)s)")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    shown = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
    outcomes = kept_outcomes(args.out)
    for name in args.only:
        print(f"{name} ...", flush=True)
        outcomes[name] = run(name, args.out, shown.stdout.strip() or "unknown")
        print(outcomes[name].line, flush=True)
        ordered = [outcomes[each] for each in COMMANDS if each in outcomes]
        (args.out / OUTCOMES).write_text(json.dumps([asdict(each) for each in ordered], indent=1), encoding="utf-8")
        (args.out / "summary.md").write_text(summary(ordered), encoding="utf-8")
    return int(any(outcomes[name].failed for name in args.only))


if __name__ == "__main__":
    sys.exit(main())
