"""The distribution of the first three sampled tokens against the target's own, by a chi-square test.

`python -m checks.sampling` prints the p-value for drafts without noise and with the request's. The exact distribution
comes from `transformers`, by enumerating all likely continuations.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from dataclasses import dataclass

import torch
from scipy import stats

from dflash_backend import LLM
from dflash_backend.config import asset_path
from dflash_backend.messages import SamplingParams

# A bin of the test holds at least this many expected samples; rarer continuations share one bin.
MIN_EXPECTED = 8.0
# The target is unsure how to go on here, and the drafter is sometimes right. Behind the first, digits and operators
# come at each position, so that noise of the wrong position shows.
QUESTION = "<|im_start|>user\nTell me something<|im_end|>\n<|im_start|>assistant\n"
PROMPTS = ("What is 3", *(QUESTION + beginning for beginning in ("Here", "A", "The", "One", "There")))
PROMPT = PROMPTS[0]
LEAST_P = 0.01
DRAFT_TEMPERATURE_RATIOS = (0.0, 1.0)


@dataclass(frozen=True)
class FitResult:
    """A chi-square test of `num_samples` samples over `num_bins` bins."""

    draft_temperature_ratio: float
    num_samples: int
    num_bins: int
    p_value: float
    acceptance_length: float


def exact_distribution(prompt: list[int], num_samples: int, depth: int = 3) -> dict[tuple[int, ...], float]:
    """Probabilities of all continuations of `depth` tokens that are expected at least `MIN_EXPECTED` times."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(asset_path("demo", "pair", "target"), dtype=torch.float32).eval()
    least = MIN_EXPECTED / num_samples
    prefixes: dict[tuple[int, ...], float] = {(): 1.0}
    for _ in range(depth):
        longer: dict[tuple[int, ...], float] = {}
        items = list(prefixes.items())
        for first in range(0, len(items), 64):
            chunk = items[first : first + 64]
            ids = torch.tensor([prompt + list(prefix) for prefix, _ in chunk])
            with torch.inference_mode():
                probs = model(ids, logits_to_keep=1).logits[:, -1].double().softmax(dim=-1)
            for (prefix, weight), row in zip(chunk, probs, strict=True):
                for token in (row * weight >= least).nonzero().flatten().tolist():
                    longer[(*prefix, token)] = weight * row[token].item()
        prefixes = longer
    return prefixes


def fit(
    draft_temperature_ratio: float,
    num_samples: int,
    seed: int = 0,
    num_speculative_tokens: int = 3,
    prompt: str = PROMPT,
) -> FitResult:
    """Sample the first three tokens `num_samples` times at temperature 1 through the engine and test the fit."""
    llm = LLM(
        draft_temperature_ratio=draft_temperature_ratio,
        num_speculative_tokens=num_speculative_tokens,
        max_num_seqs=256,
        max_model_len=256,
        seed=seed,
    )
    ids = llm.tokenizer.encode(prompt)
    exact = exact_distribution(ids, num_samples)
    base = seed * 1_000_003
    params = [SamplingParams(max_tokens=3, temperature=1.0, seed=base + i, ignore_eos=True) for i in range(num_samples)]
    outputs = llm.generate([ids] * num_samples, params)
    counts = Counter(tuple(output.token_ids) for output in outputs)
    observed = [counts[key] for key in exact]
    expected = [probability * num_samples for probability in exact.values()]
    observed.append(num_samples - sum(observed))
    expected.append(num_samples - sum(expected))
    return FitResult(
        draft_temperature_ratio,
        num_samples,
        len(expected),
        float(stats.chisquare(observed, expected).pvalue),
        llm.stats().spec_decoding.acceptance_length,
    )


def main() -> int:
    """Entry point; the exit status is 1 when the output does not fit."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--samples", type=int, default=20_000, help="of each fit (%(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="the first seed (%(default)s)")
    parser.add_argument("--prompts", type=int, choices=range(1, len(PROMPTS) + 1), default=1, help="%(default)s")
    parser.add_argument("--seeds", type=int, default=1, help="ranges of seeds for each prompt (%(default)s)")
    args = parser.parse_args()
    fits = [
        (r, p, args.seed + s)
        for r in DRAFT_TEMPERATURE_RATIOS
        for p in PROMPTS[: args.prompts]
        for s in range(args.seeds)
    ]
    # Of many fits that are all right some are this bad by chance: the bound is for the worst of them.
    least = LEAST_P / len(fits)
    failed = False
    for ratio, prompt, seed in fits:
        result = fit(ratio, args.samples, seed, prompt=prompt)
        failed = failed or result.p_value <= least
        print(
            f"ratio {ratio:g}, {prompt.rpartition(chr(10))[2]!r}, seeds {seed}: p = {result.p_value:.3f} over "
            f"{result.num_bins} bins, {result.num_samples} samples, acceptance length {result.acceptance_length:.2f}",
            flush=True,
        )
    print(f"a fit fails at p = {least:.2g} or less: {'one did' if failed else 'none did'}")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
