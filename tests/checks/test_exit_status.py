"""Each program of `checks` exits with 1 when any of its rounds is bad, and with 0 when none is. What they measure is
made up."""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import checks
from benchmarks.prefix import PrefixMeasurement
from checks import abusive_clients, chaos, lossless, malformed, mixed, sampled_text, sampling, structured
from dflash_backend.spec_stats import SpecDecodingStats

Rounds = Iterator[bool]
Fake = Callable[..., Any]
COUNTS = SimpleNamespace(
    num_preemptions=0, prefix_cache_hits=0, spec_decoding=SimpleNamespace(acceptance_length=4.0), counts=None
)
LLM = SimpleNamespace(stats=lambda: COUNTS, tokenizer=SimpleNamespace(encode=lambda text: [1]))


class Server(nullcontext[Any]):
    """A server that is none."""

    pid, port, grpc_url, http_url, metrics_url = 1, 9, "", "", ""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(self)


def later(make: Fake) -> Fake:
    async def coroutine(*arguments: Any, **options: Any) -> Any:
        return make()

    return coroutine


def words(rounds: Rounds) -> list[str]:
    """What the next round missed."""
    return [] if next(rounds) else ["a bound"]


def of_sampling(rounds: Rounds) -> dict[str, Any]:
    return {"fit": lambda ratio, *_, **__: sampling.FitResult(ratio, 10, 5, 0.5 if next(rounds) else 0.0, 4.0)}


def of_chaos(rounds: Rounds) -> dict[str, Any]:
    streams = [0.1] * chaos.STREAMS

    def play(*_: Any) -> chaos.Round:
        return chaos.Round(streams, 1.0 if next(rounds) else None, 2, [])

    def since(members: Any) -> chaos.Leftovers:
        return chaos.Leftovers([], [], [] if next(rounds) else ["a file"])

    return {
        "TritonServer": Server, "DFlashClient": Server, "right_answer": lambda client: "", "family": lambda pid: set(),
        "play": play, "LeftoverCount": lambda directory: SimpleNamespace(since=since),
    }  # fmt: skip


def of_abusive_clients(rounds: Rounds) -> dict[str, Any]:
    kind = later(lambda: abusive_clients.Outcome(surprises=words(rounds)))
    return {"running_front_end": Server, "leavers": kind, "slow_readers": kind, "half_open": kind}


def of_key_fairness(rounds: Rounds) -> dict[str, Any]:
    measure = later(lambda: SimpleNamespace(misses=lambda: words(rounds)))
    return {"running_front_end": Server, "measure": measure}


def of_cancel_cost(rounds: Rounds) -> dict[str, Any]:
    # The second measurement decides: its share over that of the first.
    many = iter((0.0, 0.0 if next(rounds) else 0.5))
    return {"TritonServer": Server, "shares": later(lambda: (next(many), 0.0))}


def of_tenant_flood(rounds: Rounds) -> dict[str, Any]:
    return {"TritonServer": Server, "measure": later(lambda: SimpleNamespace(misses=lambda: words(rounds)))}


def of_malformed(rounds: Rounds) -> dict[str, Any]:
    warm_up = iter((malformed.Report(), malformed.Report(misses=words(rounds))))
    memory = iter(({"server": 100.0, "stub": 100.0}, {"server": 100.0, "stub": 100.0 if next(rounds) else 106.0}))
    return {"TritonServer": Server, "run": lambda *_: next(warm_up), "memory_mib": lambda pid: next(memory)}


def of_random_requests(rounds: Rounds) -> dict[str, Any]:
    def send_many(*_: Any) -> Any:
        return {}, None if next(rounds) else "a miss"

    server = SimpleNamespace(port=9, server=Server())
    return {"running_front_end": lambda *_: nullcontext(server), "PATHS": list("abc"), "send_many": send_many}


def of_mixed(rounds: Rounds) -> dict[str, Any]:
    return {"TritonServer": Server, "draw": lambda *_: [], "run": later(lambda: mixed.Report(misses=words(rounds)))}


def of_silent_stream(rounds: Rounds) -> dict[str, Any]:
    def run(silent_s: float, timeout_s: float, interval_s: float) -> dict[str, Any]:
        return {path: (next(rounds) is bool(interval_s), 1, 2.0) for path in ("/a", "/b")}

    return {"run": run}


def of_event_loop(rounds: Rounds) -> dict[str, Any]:
    slow = {name: (200, 200, 0.01 if next(rounds) else 0.051, 1.0) for name in "ab"}
    return {"run": lambda *_: slow | {"c": (413, 413 if next(rounds) else 200, 0.01, 1.0)}}


def of_parse_cost(rounds: Rounds) -> dict[str, Any]:
    def measure(url: str, body: bytes | None, *_: Any) -> Any:
        # Without a request it is of the machine itself.
        return "" if body is None else SimpleNamespace(misses=lambda: words(rounds))

    attacks = {name: lambda: SimpleNamespace(SerializeToString=bytes) for name in "abc"}
    return {"TritonServer": Server, "measure": measure, "ATTACKS": attacks}


def of_structured(rounds: Rounds) -> dict[str, Any]:
    prompts, asked = [[1]], [{"structured_outputs": {"regex": "a"}}]
    # Of each way one of two things is wrong: the text, or whose it is.
    kinds = iter(range(99))

    def answers(way: Any, *_: Any) -> Any:
        good = way is structured.TARGET_ALONE or next(rounds)
        is_text = next(kinds) % 2 == 0
        return ["a" if good or not is_text else "b"], [[5] if good or is_text else [6]], LLM

    return {"requests": lambda count: (prompts, asked), "answers": answers, "fit": lambda *_: float(next(rounds))}


def of_sampled_text(rounds: Rounds) -> dict[str, Any]:
    ways = [sampled_text.Way(name) for name in "abc"]
    return {
        "target_alone": lambda *_: [], "all_ways": lambda *_: ways,
        "answers": lambda *_: ([], LLM), "vars_of": lambda *_: {},
        "partings": lambda *_: [] if next(rounds) else [sampled_text.Parting(0, 3, 1.0)],
        "requests": lambda *_: [SimpleNamespace(sampling=None)],
    }  # fmt: skip


def of_lossless(rounds: Rounds) -> dict[str, Any]:
    cases = [lossless.Case(name, 1, {}) for name in "abc"]
    return {
        "LLM": lambda **_: LLM, "load_prompts": lambda count: [], "reference": lambda *_: None, "cases": lambda: cases,
        "run_case": lambda case, *_: lossless.CaseResult(case, 5 if next(rounds) else 4, 5, 0, 0, None),
    }  # fmt: skip


def of_kv_cache(rounds: Rounds) -> dict[str, Any]:
    return {
        "blocks": lambda: words(rounds), "lossless": lambda *_: words(rounds),
        "quality": lambda *_: (None, None, words(rounds)),
    }  # fmt: skip


def of_acceptance(rounds: Rounds) -> dict[str, Any]:
    found = SimpleNamespace(overall=SimpleNamespace(counts=SimpleNamespace(acceptance_length=10.0)))
    return {
        "held_out": lambda count: [], "LLM": lambda **_: LLM, "measure": lambda *_: found, "tables": lambda *_: "",
        "shifted_drafter": lambda *_: "", "misses": lambda found: words(rounds),
        "misses_shifted": lambda *_: words(rounds),
    }  # fmt: skip


def of_prefix(rounds: Rounds) -> dict[str, Any]:
    made = PrefixMeasurement(1500, 3, 1.0, 0.1, 4.0, 4.0, next(rounds), 1500)
    return {"measure_prefix": lambda *_: made, "load_prompts": lambda count: []}


def of_hybrid(rounds: Rounds) -> dict[str, Any]:
    miss = {name: lambda *_: int(not next(rounds)) for name in ("greedy", "sampled", "hits", "prefix")}
    return {"HybridPair": lambda path: SimpleNamespace(**miss)}


def of_readiness(rounds: Rounds) -> dict[str, Any]:
    return {"run": lambda *_: words(rounds)}


def of_openapi_fuzz(rounds: Rounds) -> dict[str, Any]:
    ended = SimpleNamespace(run=lambda *_, **__: SimpleNamespace(returncode=int(not next(rounds))))
    up = SimpleNamespace(get=lambda *_, **__: SimpleNamespace(is_success=next(rounds)))
    return {"running_front_end": Server, "subprocess": ended, "httpx": up}


def of_smollm2(rounds: Rounds) -> dict[str, Any]:
    def compared(*given: Any) -> None:
        given[-1].compare("answers", int(next(rounds)), 1)

    return {
        "find_model": lambda *_: "", "named_file": lambda *_: "", "LLM": lambda **_: LLM,
        "Reference": lambda path: None, "chat_prompts": lambda *_: [],
        **{f"compare_{part}": compared for part in ("tokens", "scores", "perplexity", "greedy", "drafts")},
    }  # fmt: skip


def of_llama_gguf(rounds: Rounds) -> dict[str, Any]:
    def compared(*given: Any) -> None:
        for _ in range(2):
            given[-1].compare("answers", int(next(rounds)), 1)

    return {"compare": compared, "LLAMA": SimpleNamespace(missing=lambda *_: "")}


def of_drafter_swap(rounds: Rounds) -> dict[str, Any]:
    async def swapped(*_: Any) -> list[str]:
        return words(rounds)

    return {"noisy_drafter": lambda path: path, "TritonServer": Server, "swap_under_load": swapped}


def of_kv_tiers(rounds: Rounds) -> dict[str, Any]:
    from checks.kv_tiers import MAX_FIRST_TOKEN_RATIO, MAX_STEP_RATIO

    def first_tokens(*_: Any, **settings: Any) -> tuple[float, float]:
        in_time = "kv_disk_path" in settings or next(rounds)
        return 1.0, MAX_FIRST_TOKEN_RATIO + (-0.01 if in_time else 0.01)

    return {
        "first_tokens": first_tokens,
        "working_set": lambda *_, **settings: (0.5, 0.1),
        "step_ratios": lambda *_: ([MAX_STEP_RATIO + (-0.01 if next(rounds) else 0.01)], 100.0),
    }


def of_disaggregation(rounds: Rounds) -> dict[str, Any]:
    async def compared(*_: Any) -> list[str]:
        return words(rounds)

    return {"TritonServer": Server, "compare": compared}


def of_training(rounds: Rounds) -> dict[str, Any]:
    from checks.training import LEAST

    made = {"answer_tokens": 1, "steps": 1, "samples": 1, "data_seconds": 1.0, "training_seconds": 1.0}
    lengths = iter([LEAST + 0.01, 1.0]) if next(rounds) else iter([LEAST - 0.01, 1.0])
    return {
        "make_target": lambda work, seed: work.mkdir(parents=True, exist_ok=True) or work,
        "make_drafter": lambda *_: made,
        "generator_rows": lambda seed: ({"prompt": "a"} for _ in range(10**6)),
        "acceptance": lambda *_: {"all": next(lengths)},
    }


def of_adapting(rounds: Rounds) -> dict[str, Any]:
    from checks.adapting import LEAST

    made = {"answer_tokens": 1, "steps": 1, "samples": 1, "data_seconds": 1.0, "training_seconds": 1.0}
    lengths = iter([9.0, 5.0, 5 + 4 * LEAST + (0.01 if next(rounds) else -0.01)])
    return {
        "make_target": lambda *_: None,
        "make_drafter": lambda *_: made,
        "write_prompts": lambda work, seed: work,
        "acceptance": lambda *_: dict.fromkeys(("all", "math", "code", "chat", "talk"), next(lengths)),
    }


def of_vllm_drafts(rounds: Rounds) -> dict[str, Any]:
    counted = SimpleNamespace(spec_decoding=SpecDecodingStats(10, 150, 100, []))
    outputs = [SimpleNamespace(token_ids=[1], stats=counted)] * 24
    llm = SimpleNamespace(
        tokenizer=LLM.tokenizer,
        engine=SimpleNamespace(ready=SimpleNamespace(num_speculative_tokens=15)),
        generate=lambda *_, **__: outputs,
    )
    answers = [[1]] * 23 + ([[1]] if next(rounds) else [[2]])
    theirs = {"answers": answers, "drafts": 244 if next(rounds) else 245, "version": "0"}
    return {"LLM": lambda *_, **__: llm, "by_vllm": lambda *_: theirs}


def of_check(rounds: Rounds) -> dict[str, Any]:
    return {"check": lambda *_: next(rounds), "nodes_of": Server}


# The number of rounds of each, its options, and what stands in for its work.
PROGRAMS: dict[str, tuple[int, list[str], Callable[[Rounds], dict[str, Any]]]] = {
    "sampling": (len(sampling.DRAFT_TEMPERATURE_RATIOS), [], of_sampling),
    "chaos": (4, ["--rounds", "3"], of_chaos),
    "abusive_clients": (3, [], of_abusive_clients),
    "key_fairness": (2, [], of_key_fairness),
    "cancel_cost": (1, [], of_cancel_cost),
    "tenant_flood": (1, [], of_tenant_flood),
    "malformed": (2, [], of_malformed),
    "mixed": (1, [], of_mixed),
    "random_requests": (3, [], of_random_requests),
    "silent_stream": (4, [], of_silent_stream),
    "event_loop": (3, [], of_event_loop),
    "parse_cost": (3, [], of_parse_cost),
    "structured": (len(structured.WAYS) + 1, ["--fits", "5"], of_structured),
    "sampled_text": (3, [], of_sampled_text),
    "lossless": (3, [], of_lossless),
    "kv_cache": (3, [], of_kv_cache),
    "acceptance": (3, [], of_acceptance),
    "prefix": (1, [], of_prefix),
    "hybrid": (4, ["--pair", "."], of_hybrid),
    "readiness": (1, [], of_readiness),
    "drafter_swap": (1, [], of_drafter_swap),
    "kv_tiers": (2, [], of_kv_tiers),
    "disaggregation": (1, [], of_disaggregation),
    "training": (1, ["--work", "FOLDER"], of_training),
    "adapting": (1, ["--work", "FOLDER"], of_adapting),
    "vllm_drafts": (2, ["--python", sys.executable], of_vllm_drafts),
    "smollm2": (5, [], of_smollm2),
    "llama_gguf": (2, [], of_llama_gguf),
    "openapi_fuzz": (2, [], of_openapi_fuzz),
    "tensor_parallel": (1, [], of_check),
    "ray_ranks": (1, [], of_check),
}


@pytest.mark.parametrize(
    ("name", "bad"), [(name, bad) for name, (count, *_) in PROGRAMS.items() for bad in (None, *range(count))]
)
def test_one_bad_round_is_enough(name: str, bad: int | None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    count, options, made = PROGRAMS[name]
    module = import_module(f"checks.{name}")
    rounds = iter([number != bad for number in range(count)])
    for attribute, stand_in in made(rounds).items():
        monkeypatch.setattr(module, attribute, stand_in, raising=attribute != "nodes_of")
    monkeypatch.setattr(sys, "argv", [name, *(str(tmp_path) if each == "FOLDER" else each for each in options)])
    monkeypatch.setattr(tempfile, "tempdir", None)  # which some of them change
    try:
        status = module.main()
    except SystemExit as ended:
        status = ended.code
    assert status == int(bad is not None)
    assert bad is not None or next(rounds, None) is None, "every round counts"


def test_every_program_that_judges_is_here_or_has_a_test_of_its_own() -> None:
    """`answers` and `vllm_side` only print."""
    programs = {path.stem for path in Path(checks.__file__).parent.glob("*.py") if "\ndef main(" in path.read_text()}
    assert programs - set(PROGRAMS) == {"answers", "dynamo", "grammar_bounds", "nightly", "vllm_side"}
