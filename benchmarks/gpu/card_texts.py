"""The demo pair's text on a GPU in every way of running, beside the CPU's: what each way is compared with, and where it
parts from it. A part of `make gpu-report`; one process for each of `GROUPS`."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from benchmarks.gpu.results import Fact, Recorder, Skipped, TextRun
from benchmarks.gpu.timing import Scale
from dflash_backend import LLM
from dflash_backend.core.admission import RequestError
from load_tests.prompts import load_prompts

SETTINGS: dict[Scale, Mapping[str, Any]] = {
    "cuda": {"max_num_seqs": 8, "max_model_len": 512, "kv_cache_gb": 0.25},
    "cpu": {"max_num_seqs": 2, "max_model_len": 512, "kv_cache_gb": 0.05, "max_num_batched_tokens": 128},
}
SAMPLINGS: tuple[dict[str, Any], ...] = (
    {"temperature": 1.0},
    {"temperature": 0.8, "top_p": 0.9},
    {"temperature": 1.2, "top_k": 5},
    {"temperature": 1.5, "min_p": 0.05, "top_p": 0.95, "top_k": 20},
)
SPECIAL: tuple[dict[str, Any], ...] = (
    {},
    {"logprobs": 2},
    {"repetition_penalty": 1.2, "frequency_penalty": 0.2},
    {"logit_bias": {300: 2.0}, "min_tokens": 20},
    {"structured_outputs": {"regex": "[a-z ]{5,40}[.]"}},
)
# Shorter than a block of drafts, and ended within one.
SHORT_PROMPT, SHORT_TOKENS = "Hi", (1, 2, 3, 4, 8)
# Prompts, and tokens of each answer.
SIZES: dict[Scale, tuple[int, int]] = {"cuda": (12, 64), "cpu": (2, 8)}
LONG, LONG_AGAIN = "long", "long, from the prefix cache"


# What a device, torch, Triton and the engine raise.
FAILURES = (RuntimeError, ValueError, TypeError, AttributeError, AssertionError, RequestError)


@dataclass(frozen=True)
class Way:
    """How an engine is started: its settings. against: the way whose text it must have. exact: to the token, else up to
    ties of its dtype, of which there are few."""

    settings: Mapping[str, Any]
    against: str | None = None
    exact: bool = True
    on_cpu: bool = False


def _float32(**settings: Any) -> Way:
    return Way({"dtype": "float32"} | settings, "CPU, k = 0")


def _bfloat16(against: str | None, exact: bool = False, **settings: Any) -> Way:
    return Way({"dtype": "bfloat16"} | settings, against, exact)


FP8: dict[str, Any] = {"quantization": "fp8"}
FP8_BOTH: dict[str, Any] = {"quantization": "fp8", "activation_quantization": "fp8"}
CPU: dict[str, Any] = {"dtype": "float32", "device": "cpu"}
NO_DRAFTS: dict[str, Any] = {"draft": ""}
WAYS: dict[str, Way] = {
    "CPU, k = 0": Way(CPU | NO_DRAFTS, on_cpu=True),
    "CPU, drafts": Way(CPU, "CPU, k = 0", on_cpu=True),
    "CPU, FP8 KV": Way(CPU | NO_DRAFTS | {"kv_cache_dtype": "fp8"}, on_cpu=True),
    "graphs, overlap": _float32(),
    "neither": _float32(enable_cuda_graphs=False, enable_overlap=False),
    "graphs": _float32(enable_overlap=False),
    "overlap": _float32(enable_cuda_graphs=False),
    "k = 0": _float32(**NO_DRAFTS),
    "fixed k": _float32(adaptive_speculation=False),
    "n-grams": _float32(draft="ngram"),
    "small chunks": _float32(max_num_batched_tokens=64),
    "bf16, k = 0": _bfloat16(None, **NO_DRAFTS),
    "bf16": _bfloat16("bf16, k = 0"),
    "bf16, n-grams": _bfloat16("bf16, k = 0", draft="ngram"),
    "batch_invariant, alone": _bfloat16(None, batch_invariant=True, max_num_seqs=1, **NO_DRAFTS),
    "batch_invariant": _bfloat16("batch_invariant, alone", exact=True, batch_invariant=True),
    "FP8 KV": _bfloat16("CPU, FP8 KV", kv_cache_dtype="fp8"),
    "FP8 weights, k = 0": _bfloat16(None, **FP8, **NO_DRAFTS),
    "FP8 weights": _bfloat16("FP8 weights, k = 0", **FP8),
    "FP8 both, k = 0": _bfloat16(None, **FP8_BOTH, **NO_DRAFTS),
    "FP8 both": _bfloat16("FP8 both, k = 0", **FP8_BOTH),
}
# Of one process each, which run at the same time: nothing is timed here.
GROUPS: dict[str, tuple[str, ...]] = {
    "cpu": ("CPU, k = 0", "CPU, FP8 KV", "CPU, drafts"),
    "default": ("graphs, overlap", "neither"),
    "half": ("graphs", "overlap", "k = 0"),
    "drafts": ("fixed k", "n-grams", "small chunks"),
    "bf16": ("bf16, k = 0", "bf16", "bf16, n-grams"),
    "invariant": ("batch_invariant", "batch_invariant, alone"),
    "fp8": ("FP8 weights, k = 0", "FP8 weights", "FP8 KV"),
    "fp8 both": ("FP8 both, k = 0", "FP8 both"),
}


def requests(scale: Scale) -> dict[str, tuple[list[str], list[dict[str, Any]]]]:
    """Prompts and parameters by kind, in the order in which an engine gets them."""
    count, tokens = SIZES[scale]
    prompts = [row.prompt for row in load_prompts(count)]
    greedy: dict[str, Any] = {"temperature": 0.0}
    numbered = range(count)
    of_special = max(tokens // 2, max(one.get("min_tokens", 0) for one in SPECIAL))
    longer = [prompt * 3 for prompt in prompts[:2]]
    of_longer = [{**greedy, "max_tokens": min(16, tokens)}] * 2
    return {
        "greedy": (prompts, [{**greedy, "max_tokens": tokens}] * count),
        "short": ([SHORT_PROMPT] * len(SHORT_TOKENS), [{**greedy, "max_tokens": n} for n in SHORT_TOKENS]),
        "sampled": (prompts, [{**SAMPLINGS[i % len(SAMPLINGS)], "seed": i, "max_tokens": tokens} for i in numbered]),
        "special": (prompts, [{**greedy, "max_tokens": of_special, **SPECIAL[i % len(SPECIAL)]} for i in numbered]),
        LONG: (longer, of_longer),
        LONG_AGAIN: (longer, of_longer),
    }


def run_way(name: str, device: torch.device, scale: Scale, recorder: Recorder) -> None:
    """Start an engine in a way and record what it answers to every kind of request. What fails is recorded: the start,
    or one kind of requests, after which the next one is tried."""
    way = WAYS[name]
    started = time.monotonic()
    try:
        # As keywords of `LLM`, so that a way may say `device`.
        llm = LLM(**{**SETTINGS[scale], "device": device.type, **way.settings})
    except FAILURES as error:
        recorder.write(Skipped(f"text, {name}", _in_a_line(error)))
        return
    num_steps = 0 if way.on_cpu else llm.engine.runner.graphs.num_steps
    recorder.write(Fact(f"start, {name}", f"{time.monotonic() - started:.1f} s, {num_steps} padded steps"))
    for kind, (prompts, params) in requests(scale).items():
        try:
            outputs = llm.generate(prompts, params)
        except FAILURES as error:
            recorder.write(Skipped(f"text, {name}, {kind}", _in_a_line(error)))
        else:
            recorder.write(TextRun(name, kind, [list(output.token_ids) for output in outputs]))


def _in_a_line(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"


@dataclass(frozen=True)
class Comparison:
    """A way's answers of one kind beside those that they must equal: how many do, and where the others part."""

    way: str
    against: str
    requests: str
    equal: int
    count: int
    parts_at: tuple[int, ...]
    exact: bool

    @property
    def verdict(self) -> str:
        """In a word."""
        if self.equal == self.count:
            return "equal"
        return "WRONG" if self.exact and self.requests not in ("sampled", "special") else "parts"


def compare(texts: Sequence[TextRun]) -> list[Comparison]:
    """Every way's answers beside those of its counterpart, where both are there; and those of a long prompt from the
    prefix cache beside those before."""
    answers = {(run.way, run.requests): run.answers for run in texts}
    found = []
    for (name, kind), own in answers.items():
        way = WAYS[name]
        if kind == LONG_AGAIN and (name, LONG) in answers:
            found.append(_comparison(name, name, kind, own, answers[name, LONG], way.exact))
        if way.against and (way.against, kind) in answers:
            found.append(_comparison(name, way.against, kind, own, answers[way.against, kind], way.exact))
    return found


def _comparison(
    way: str, against: str, kind: str, own: list[list[int]], other: list[list[int]], exact: bool
) -> Comparison:
    parts = []
    for ours, theirs in zip(own, other, strict=True):
        if ours != theirs:
            pairs = enumerate(zip(ours, theirs, strict=False))
            parts.append(next((at for at, (a, b) in pairs if a != b), min(len(ours), len(theirs))))
    return Comparison(way, against, kind, len(own) - len(parts), len(own), tuple(parts), exact)
