"""Sampled text is a function of the target, the prompt, the parameters and the seed: every way to run gives the same
(invariant LOSSLESS).

`python -m checks.sampled_text` compares each way with the target alone, without drafter and prefix cache. Where two
texts part, rounding must explain it: the two scores, or a token's distance from the edge of a filter, are equal up to
1e-4 in float64. One answer in 2,000 may part so; each is printed. With `--draft DIR [DIR ...]` the ways are those of
other drafters of the demo target, of any kind (`make demo-model DRAFTER=dflash2`).
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

import torch

from benchmarks.worse_drafters import random_drafter
from checks.core_state import check_core
from checks.lossless import TINY_POOL_BLOCKS, pool_of
from dflash_backend import LLM
from dflash_backend.config import NGRAM, asset_path
from dflash_backend.drafters.registry import read_draft
from dflash_backend.messages import SamplingParams
from dflash_kernels.gumbel_noise import gumbel_reference
from dflash_kernels.logits_filter import lowest_kept_reference
from load_tests.prompts import load_prompts

TEMPERATURES = (0.7, 1.0)
# In turn with the prompts.
FILTERS: tuple[dict[str, Any], ...] = ({}, {"top_p": 0.9}, {"top_k": 20, "min_p": 0.02})
TIE = 1e-4
ANSWERS_FOR_A_TIE = 2000
TARGET = asset_path("demo", "pair", "target")


@dataclass(frozen=True)
class Way:
    """One way to run: settings, and how often the same requests are run, of which the last time counts."""

    name: str
    settings: dict[str, Any] = field(default_factory=dict)
    times: int = 1


@dataclass(frozen=True)
class Request:
    """A prompt's token ids and how it is sampled."""

    prompt: tuple[int, ...]
    sampling: SamplingParams


@dataclass(frozen=True)
class Parting:
    """Where an answer leaves that of the target alone: index of the request, position in the output, and the distance
    that rounding had to bridge (infinite where an answer ends early)."""

    request: int
    position: int
    distance: float

    @property
    def is_tie(self) -> bool:
        """Whether rounding explains it."""
        return self.distance <= TIE


def ways(random_draft: Path) -> list[Way]:
    """What must all give the same text. `random_draft`: a drafter with random weights (`random_drafter`)."""
    small = {"kv_cache_gb": pool_of(TINY_POOL_BLOCKS)}
    return [
        Way("alone", {"max_num_seqs": 1}),
        Way("among 31 others"),
        Way("drafts with the request's noise", {"draft_temperature_ratio": 1.0}),
        Way("a drafter with random weights", {"draft": str(random_draft)}),
        Way("k = 3", {"num_speculative_tokens": 3}),
        Way("always all of k", {"adaptive_speculation": False}),
        Way("n-grams", {"draft": NGRAM}),
        Way("no drafter", {"draft": ""}),
        Way("with prefix hits", times=2),
        Way("after preemptions", small | {"enable_prefix_caching": False}),
        Way("in chunks of 64 tokens", {"max_num_batched_tokens": 64}),
    ]


def drafter_ways(draft: Path) -> list[Way]:
    """What must give the same text with another drafter of the demo target."""
    own = {"draft": str(draft)}
    small = {"kv_cache_gb": pool_of(TINY_POOL_BLOCKS, draft_model=str(draft))}
    return [
        Way("alone", own | {"max_num_seqs": 1}),
        Way("drafts with the request's noise", own | {"draft_temperature_ratio": 1.0}),
        Way("always all of k, with prefix hits", own | {"adaptive_speculation": False}, times=2),
        Way("after preemptions, in chunks", own | small | {"max_num_batched_tokens": 64}),
    ]


def all_ways(drafts: Sequence[Path], folder: Path) -> Iterator[Way]:
    """Those of each of the drafters, said in their names; without any, those of the demo pair. `folder` is empty."""
    if not drafts:
        yield from ways(random_drafter(folder))
    for draft in drafts:
        method = read_draft(draft).method
        yield from (replace(way, name=f"{method}, {way.name}") for way in drafter_ways(draft))


def requests(num_prompts: int, seeds: Sequence[int], max_tokens: int) -> list[Request]:
    """Each prompt at each temperature with each seed."""
    tokenizer = LLM(draft="").tokenizer
    prompts = [tuple(tokenizer.encode(row.prompt)) for row in load_prompts(num_prompts)]
    return [
        Request(
            prompt,
            SamplingParams(
                max_tokens=max_tokens, temperature=temperature, seed=seed, ignore_eos=True, **FILTERS[i % len(FILTERS)]
            ),
        )
        for seed in seeds
        for temperature in TEMPERATURES
        for i, prompt in enumerate(prompts)
    ]


def answers(way: Way, asked: Sequence[Request]) -> tuple[list[list[int]], LLM]:
    """The output tokens of each request, and the engine that gave them."""
    llm = LLM(**{"max_num_seqs": 32, "kv_write_guard": True} | way.settings)
    outputs = []
    for _ in range(way.times):
        outputs = llm.generate([list(each.prompt) for each in asked], [each.sampling for each in asked])
    check_core(llm.engine.core)
    return [output.token_ids for output in outputs], llm


def target_alone(asked: Sequence[Request], target: Path = TARGET) -> list[list[int]]:
    """The output tokens of each request without drafter and prefix cache."""
    return answers(Way("target alone", {"target": str(target), "draft": "", "enable_prefix_caching": False}), asked)[0]


def partings(
    asked: Sequence[Request], expected: Sequence[list[int]], found: Sequence[list[int]], target: Path = TARGET
) -> list[Parting]:
    """The first difference of each answer that differs. target: where the answers come from."""
    different = []
    for index, (request, one, other) in enumerate(zip(asked, expected, found, strict=True)):
        if one != other:
            position = next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), None)
            if position is None:
                different.append(Parting(index, min(len(one), len(other)), float("inf")))
            else:
                distance = _distance(request, one[:position], (one[position], other[position]), target)
                different.append(Parting(index, position, distance))
    return different


@cache
def _target_in_float64(target: Path) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(target, dtype=torch.float64).eval()


def _distance(request: Request, output: list[int], tokens: tuple[int, int], target: Path) -> float:
    """How far the `tokens` that two runs chose after `output` are from being equally good: the difference of their
    scores or, where a filter keeps one of them only, its logit's distance from the edge in units of the temperature."""
    sampling, ids = request.sampling, [*request.prompt, *output]
    with torch.inference_mode():
        logits = _target_in_float64(target)(torch.tensor([ids]), logits_to_keep=1).logits[:, -1]
    temperature = torch.tensor([sampling.temperature])
    seed, position = torch.tensor([sampling.seed]), torch.tensor([len(ids)])
    noise = gumbel_reference(seed, position, torch.arange(logits.shape[1])).double()
    scores = (logits / sampling.temperature + noise)[0, list(tokens)]
    filters = torch.tensor([max(sampling.top_k, 0)]), torch.tensor([sampling.top_p]), torch.tensor([sampling.min_p])
    lowest = lowest_kept_reference(logits, temperature, *filters)
    edge = float("inf") if lowest is None else (logits[0, list(tokens)] - lowest).abs().min() / sampling.temperature
    return min(float((scores[0] - scores[1]).abs()), float(edge))


def main() -> int:
    """Entry point; the exit status is 1 when a text differs by more than rounding, or too many do."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--prompts", type=int, default=100, help="%(default)s")
    parser.add_argument("--seeds", type=int, default=5, help="1 to this one (%(default)s)")
    parser.add_argument("--max-tokens", type=int, default=64, help="of each answer (%(default)s)")
    parser.add_argument("--draft", type=Path, nargs="+", metavar="DIR", help="other drafters of the demo target")
    args = parser.parse_args()
    asked = requests(args.prompts, range(1, args.seeds + 1), args.max_tokens)
    expected = target_alone(asked)
    num_answers = num_parted = num_wrong = 0
    with tempfile.TemporaryDirectory() as folder:
        for way in all_ways(args.draft or [], Path(folder)):
            tokens, llm = answers(way, asked)
            parted = partings(asked, expected, tokens)
            stats = llm.stats()
            num_answers, num_parted = num_answers + len(asked), num_parted + len(parted)
            num_wrong += sum(not each.is_tie for each in parted)
            print(
                f"{way.name:45} {len(asked) - len(parted):>5} of {len(asked)} equal, acceptance length "
                f"{stats.spec_decoding.acceptance_length:.2f}, {stats.num_preemptions} preemptions, "
                f"{stats.prefix_cache_hits} cached tokens",
                flush=True,
            )
            for each in parted:
                sampling = asked[each.request].sampling
                print(f"    {'tie' if each.is_tie else 'WRONG'}: {json.dumps(vars_of(each, sampling))}", flush=True)
    most = -(-num_answers // ANSWERS_FOR_A_TIE)
    print(f"{num_parted} of {num_answers} answers part, {num_wrong} of them not at a tie; at most {most} may, at ties")
    return int(num_wrong > 0 or num_parted > most)


def vars_of(parting: Parting, sampling: SamplingParams) -> dict[str, Any]:
    """What is printed of a parting."""
    return {
        "request": parting.request,
        "position": parting.position,
        "distance": parting.distance,
        "seed": sampling.seed,
        "temperature": sampling.temperature,
    }


if __name__ == "__main__":
    sys.exit(main())
